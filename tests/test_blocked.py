"""A kernel in blocks of the sequence against its single call: values, what runs, what it holds, the settings and the table."""

import pytest
import torch

import upipe
from tests.plain import assert_close, batch_of, data_of, plain_step, tiny_model
from tests.sharded import assert_equal_to_plain, gradients, sharded
from upipe import blocked, kernel_blocks, kernels, plan, preflight, reference, simulate
from upipe.blocked import BlockedAttention, in_blocks
from upipe.config import ConfigError, from_mapping
from upipe.kernels import CudnnAttention, FlashAttention4, ReferenceAttention, TorchFlashAttention
from upipe.live import LiveStorages, SimulatedAttention
from upipe.methods.config import MethodConfig, check_stages
from upipe.preflight import PreflightError

SCALE = 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")
KERNELS = {"flash": TorchFlashAttention(), "reference": ReferenceAttention()}


@pytest.fixture
def poisoned():
    """torch.empty gives NaN, so an output that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(B, S, h, n, d, dtype=torch.float32):
    g = torch.Generator().manual_seed(S)
    q, k, v, grad = (torch.randn(B, S, heads, d, generator=g, dtype=torch.float64).to(dtype) for heads in (h, n, n, h))
    return 2 * q, k, v, grad


def run(kernel, q, k, v, grad, mask=(), **buffers):
    out, lse = kernel.forward(q, k, v, SCALE, *mask)
    return dict(zip(NAMES, (out, lse, *kernel.backward(grad, q, k, v, out, lse, SCALE, *mask))))


def close(got, want, tolerance):
    for name in NAMES:
        assert got[name].dtype == want[name].dtype
        assert_close(name, got[name], want[name], tolerance, zero_tolerance=tolerance)


class Counted(ReferenceAttention):
    """Writes down the calls it gets: pass, whether causal, queries, keys, heads."""

    def __init__(self, causal=True, calls=None):
        self.causal, self.calls = causal, [] if calls is None else calls

    def without_mask(self):
        return Counted(False, self.calls)

    def _of(self):
        return ReferenceAttention() if self.causal else blocked.ring.FullReferenceAttention()

    def _forward(self, q, k, v, *rest):
        self.calls.append(("forward", self.causal, q.shape[1], k.shape[1], q.shape[2]))
        return self._of()._forward(q, k, v, *rest)

    def _backward(self, grad, q, k, v, *rest):
        self.calls.append(("backward", self.causal, q.shape[1], k.shape[1], q.shape[2]))
        return self._of()._backward(grad, q, k, v, *rest)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-11), (torch.bfloat16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("shape, size", [((1, 64, 4, 4, 8), 16), ((2, 33, 4, 2, 8), 16), ((1, 50, 6, 1, 8), 7), ((2, 17, 1, 1, 4), 16),
                                         ((2, 7, 2, 1, 4), 1)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_are_the_single_call(poisoned, name, shape, size, dtype, tolerance):
    """Also where a block does not divide the length, and the last has one token."""
    tensors = inputs(*shape, dtype)
    got, single = run(in_blocks(KERNELS[name], size, size), *tensors), run(KERNELS[name], *tensors)
    close(got, single, tolerance)


def test_softcap(poisoned):
    tensors = inputs(2, 40, 4, 2, 8, torch.float64)
    mask = None, None, 1.5
    got = run(in_blocks(KERNELS["reference"], 16, 16), *tensors, mask)
    close(got, run(KERNELS["reference"], *tensors, mask), 1e-11)
    with pytest.raises(AssertionError, match="out"):
        close(got, run(KERNELS["reference"], *tensors), 1e-3)


def test_the_calls_that_run():
    """Query blocks outside with several query heads a kv head, key blocks with one; forward and backward by themselves."""
    q, k, v, grad = inputs(1, 20, 4, 2, 8)
    kernel = Counted()
    run(in_blocks(kernel, 8, "none"), q, k, v, grad)
    assert kernel.calls == [("forward", True, 8, 8, 4), ("forward", True, 8, 8, 4), ("forward", False, 8, 8, 4), ("forward", True, 4, 4, 4),
                            ("forward", False, 4, 8, 4), ("forward", False, 4, 8, 4), ("backward", True, 20, 20, 4)]
    kernel = Counted()
    run(in_blocks(kernel, "none", 12), q, k, v, grad)
    of_a_head = [("backward", True, 12, 12, 2), ("backward", False, 8, 12, 2), ("backward", True, 8, 8, 2)]
    assert kernel.calls == [("forward", True, 20, 20, 4), *of_a_head, *of_a_head]
    kernel = Counted()
    run(in_blocks(kernel, 20, 64), q, k, v, grad)
    assert kernel.calls == [("forward", True, 20, 20, 4), ("backward", True, 20, 20, 4)]
    assert in_blocks(kernel, "none", "none") is kernel


def test_packed_rows_and_windows(poisoned):
    """A document that is longer than a block is cut; a window is left to the single call."""
    q, k, v, grad = inputs(2, 40, 4, 2, 8)
    offsets = (0, 5, 29, 40), (0, 40)
    kernel = Counted()
    close(run(in_blocks(kernel, 16, 16), q, k, v, grad, (offsets,)), run(ReferenceAttention(), q, k, v, grad, (offsets,)), 1e-5)
    assert {call[2:4] for call in kernel.calls} == {(5, 5), (16, 16), (8, 8), (8, 16), (11, 11)}
    kernel = Counted()
    windowed = run(in_blocks(kernel, 16, 16), q, k, v, grad, (None, 6))
    close(windowed, run(ReferenceAttention(), q, k, v, grad, (None, 6)), 0.0)
    assert {call[1:4] for call in kernel.calls} == {(True, 40, 40)}


def test_documents_of_one_call_stay_in_it():
    """A kernel that takes many documents at once still does: only its documents of a call of their own are cut."""
    class Packs(Counted):
        def _runs(self, offsets):
            return ((row, starts) for row, starts in enumerate(offsets))

    kernel = Packs()
    q, k, v, grad = inputs(2, 40, 2, 1, 8)
    in_blocks(kernel, 16, 16).forward(q, k, v, SCALE, ((0, 20, 40), (0, 40)))
    assert [call[2:4] for call in kernel.calls] == [(40, 40), (16, 16), (16, 16), (16, 16), (8, 8), (8, 16), (8, 16)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_views_and_buffers(poisoned, heads):
    """Some heads of a wider [S, B, heads, d] buffer in and out, dq over out: the same bits, and nothing beside them."""
    h, n = heads
    tensors = inputs(2, 21, h, n, 8)

    def wider(t):
        B, S, heads, d = t.shape
        whole = torch.full((S, B, heads + 3, d), torch.nan, dtype=t.dtype)
        return whole[:, :, 1:-2].transpose(0, 1).copy_(t), whole

    kernel = in_blocks(KERNELS["reference"], 8, 8)
    want = run(kernel, *tensors)
    q, k, v, grad = (wider(t)[0] for t in tensors)
    out, whole_out = wider(torch.zeros_like(q))
    got, lse = kernel.forward(q, k, v, SCALE, out=out)
    assert got is out and torch.equal(out, want["out"]) and kernel.dq_over_out
    dk, dv = wider(torch.zeros_like(k)), wider(torch.zeros_like(v))
    grads = kernel.backward(grad, q, k, v, out, lse, SCALE, dq=out, dk=dk[0], dv=dv[0])
    for result, buffer, name in zip(grads, (out, dk[0], dv[0]), NAMES[2:]):
        assert result is buffer and torch.equal(buffer, want[name]), name
    for part, whole in (dk, dv, (out, whole_out)):
        assert whole.isnan().sum() == whole[:, :, :3].numel() and not part.isnan().any()


def test_a_denominator_with_more_in_it():
    """Attention sinks: out and lse are changed after the forward, and gradients follow."""
    q, k, v, grad = inputs(1, 24, 2, 1, 8, torch.float64)
    out, lse = reference.attention(q, k, v, SCALE)
    more = torch.logaddexp(lse, torch.zeros_like(lse))
    out = out * (lse - more).exp().transpose(1, 2)[..., None]
    want = ReferenceAttention().backward(grad, q, k, v, out, more, SCALE)
    got = in_blocks(ReferenceAttention(), 8, 8).backward(grad, q, k, v, out, more, SCALE)
    for name, a, b in zip(NAMES[2:], got, want):
        assert_close(name, a, b, 1e-11)


@pytest.mark.parametrize("of", [FlashAttention4(), CudnnAttention()], ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (2, 2), (16, 4)], ids=str)
def test_what_it_holds(of, heads):
    """Bytes beside arguments, results and lse are those that the module says, whatever the length, but for the sums over it."""
    (h, n), C, d, blocks = heads, 1024, 128, 6
    S, group = blocks * C, h // n
    kernel = in_blocks(SimulatedAttention(of), C, C)
    with LiveStorages() as live:
        q, k, v, out, grad = (torch.empty(1, S, heads, d, dtype=torch.bfloat16, device="meta") for heads in (h, n, n, h, h))
        live.start()
        before = live.now
        _, lse = kernel.forward(q, k, v, SCALE, out=out)
        forward = live.peak - before - 4 * h * S
        live.start()
        before = live.now
        kernel.backward(grad, q, k, v, out, lse, SCALE, dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))
        backward = live.peak - before - 2 * (h + 2 * n) * S * d
    small = 64 * h * C  # numbers a query, not d of them
    assert h * C * d * (4 + 2) <= forward <= h * C * d * (4 + 2) + small
    whole, block = (2, group) if group > 1 else (group, 2)
    call = of.backward_bytes(C, group, 1, d) + (2 * (group + 2) * C * d if of.writes_gradients else 0)
    assert 4 * (whole * S + block * C) * d <= backward <= 4 * (whole * S + block * C) * d + call + small


def test_where_dq_may_not_lie_over_out():
    """FlashAttention-3 has no such calls here; a kernel that does not allow it still does not in blocks."""
    class Apart(ReferenceAttention):
        dq_over_out = False

        def without_mask(self):
            return blocked.ring.FullReferenceAttention()

    q, k, v, grad = inputs(1, 12, 2, 1, 8)
    kernel = in_blocks(Apart(), 4, 4)
    out, lse = kernel.forward(q, k, v, SCALE)
    with pytest.raises(ValueError, match="dq_over_out is False"):
        kernel.backward(grad, q, k, v, out, lse, SCALE, dq=out)
    with pytest.raises(ValueError, match="fa3.*in blocks.*use fa4, cudnn, flash, reference"):
        in_blocks(kernels.FlashAttention3(), 4, 4)


@pytest.mark.parametrize("forward, backward, words", [
    (65536, 65536, "reference in blocks of 64K"), (65536, "none", "reference, forward in blocks of 64K"),
    ("none", 100, "reference, backward in blocks of 100"), (65536, 32768, "reference, forward in blocks of 64K, backward in blocks of 32K"),
    ("auto", "auto", "reference in blocks as measured"), ("auto", "none", "reference, forward in blocks as measured"),
])
def test_said_in_words(forward, backward, words):
    assert str(BlockedAttention(ReferenceAttention(), forward, backward)) == words


@pytest.mark.parametrize("tokens", [0, -1, True, 1.5, "wide", None])
def test_tokens_that_are_none(tokens):
    for pair in ((tokens, "none"), ("none", tokens)):
        with pytest.raises(ValueError, match="blocks of .* use none, auto or a positive number"):
            BlockedAttention(ReferenceAttention(), *pair)


def row(tokens, forward, heads=(4, 1), gpu="G", kernel="cudnn", head_dim=128):
    return {"gpu": gpu, "kernel": kernel, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "tokens": tokens,
            "forward": forward, "backward": {"none": 10.0, "65536": 10.0}, "commit": "c"}


ROWS = (
    row(131072, {"none": 100.0, "32768": 99.5, "65536": 101.0}),
    row(524288, {"none": 110.0, "32768": 102.0, "65536": 100.0, "131072": 100.0}),
    row(524288, {"none": 100.0, "65536": 120.0}, heads=(1, 1)),
    row(524288, {"none": 200.0, "32768": 100.0}, heads=(16, 4)),
)


@pytest.mark.parametrize("tokens, heads, size", [
    (524288, (4, 1), 65536),     # of equal times the smaller block, which holds less
    (1 << 21, (4, 1), 65536),    # longer than any that was measured: as the longest
    (262144, (4, 1), None),      # between two: as the shorter, whose blocks gain less than 1 %
    (65536, (4, 1), None),       # shorter than any
    (524288, (2, 2), None),      # one query head a kv head: as (1, 1)
    (524288, (32, 8), 32768),    # four: of those the nearer number of heads
])
def test_choice(tokens, heads, size):
    got, why = kernel_blocks.choose("forward", tokens, *heads, 128, "G", "cudnn", ROWS)
    assert got == size and why
    assert kernel_blocks.choose("backward", tokens, *heads, 128, "G", "cudnn", ROWS)[0] is None


@pytest.mark.parametrize("gpu, kernel, head_dim", [("H", "cudnn", 128), ("G", "fa4", 128), ("G", "cudnn", 64), (None, "reference", 128)])
def test_what_was_not_measured_is_a_single_call(gpu, kernel, head_dim):
    size, why = kernel_blocks.choose("forward", 1 << 20, 4, 1, head_dim, gpu, kernel, ROWS)
    assert size is None and "nothing was measured" in why


def test_auto_runs_what_the_table_says(monkeypatch):
    table = [row(16, {"none": 2.0, "8": 1.0}, heads=(2, 1), gpu=None, kernel="reference", head_dim=8)]
    monkeypatch.setattr(kernel_blocks, "table", lambda: tuple(table))
    kernel = Counted()
    auto = in_blocks(kernel, "auto", "auto")
    for S in (12, 16):
        run(auto, *inputs(1, S, 2, 1, 8))
    assert [call[:4] for call in kernel.calls] == [
        ("forward", True, 12, 12), ("backward", True, 12, 12), ("forward", True, 8, 8), ("forward", True, 8, 8), ("forward", False, 8, 8),
        ("backward", True, 16, 16)]
    assert str(auto) == ("reference in blocks as measured (backward of 12 single, backward of 16 single, forward of 12 single, "
                         "forward of 16 in blocks of 8)")
    table.clear()
    kernel = Counted()
    assert in_blocks(kernel, "auto", "none") is kernel
    run(in_blocks(kernel, "auto", "auto"), *inputs(1, 16, 2, 1, 8))
    assert [call[2] for call in kernel.calls] == [16, 16]


def test_the_repository_s_table_is_readable():
    for found in kernel_blocks.table():
        assert set(found) == set(ROWS[0]) and all("none" in found[way] and len(found[way]) > 1 for way in ("forward", "backward"))


def test_settings_are_read_from_yaml():
    for text, value in (("64K", 65536), (100, 100), ("auto", "auto"), ("none", "none")):
        config = from_mapping(upipe.UPipeConfig, {"kernel_block_tokens": text, "kernel_block_tokens_backward": text}, folder=".")
        assert (config.kernel_block_tokens, config.kernel_block_tokens_backward) == (value, value)
    assert upipe.UPipeConfig() == upipe.UPipeConfig(kernel_block_tokens="auto", kernel_block_tokens_backward="none")
    with pytest.raises(ConfigError, match="kernel_block_tokens"):
        from_mapping(upipe.UPipeConfig, {"kernel_block_tokens": "wide"}, folder=".")


@pytest.mark.parametrize("settings, says", [
    ({"kernel_block_tokens": 0}, "kernel_block_tokens: blocks of 0 tokens: use none, auto or a positive number"),
    ({"kernel_block_tokens_backward": -4}, "kernel_block_tokens_backward: blocks of -4"),
    ({"kernel_block_tokens": 64, "kernel": "fa2"}, "fa2.*in blocks.*use fa4, cudnn, flash, reference"),
])
def test_refused_before_the_first_step(settings, says):
    with pytest.raises(PreflightError, match=says):
        preflight.check_kernel_blocks(upipe.UPipeConfig(**settings))
    run = plan.request("llama3-8b", 131072, 8, [f"upipe.{name}={value}" for name, value in settings.items()])
    with pytest.raises(ConfigError, match=says):
        plan.predict(run, plan.Machine.parse("8xH200"))


def test_torch_s_own_context_parallel_takes_none():
    check_stages(MethodConfig("ulysses"), upipe.UPipeConfig(kernel_block_tokens=64))
    check_stages(MethodConfig("native"), upipe.UPipeConfig())
    for field in ("kernel_block_tokens", "kernel_block_tokens_backward"):
        with pytest.raises(ValueError, match=f"upipe.{field}=64 with method=native: torch calls its kernels itself"):
            check_stages(MethodConfig("native"), upipe.UPipeConfig(**{field: 64}))


def check_model(sequence, ring=1, checkpointing=None, method="upipe"):
    """A whole model in blocks of four tokens against the plain one; and that blocks did run."""
    sizes = {"kernel_block_tokens": 4, "kernel_block_tokens_backward": 5}
    ran, pairs = [], blocked._pairs
    blocked._pairs = lambda S, size: ran.append((S, size)) or pairs(S, size)
    try:
        data = data_of(sequence, 1, 1)
        plain = plain_step(tiny_model("llama", 8, 2), data)
        with sharded(tiny_model("llama", 8, 2), 2, checkpointing=checkpointing, ring_degree=ring, kernel="reference", method=method,
                     **sizes) as (handle, engine):
            assert_equal_to_plain(handle, engine, plain, data, 1e-5)
            said = "reference, forward in blocks of 4, backward in blocks of 5" + (" on a ring of 2" if ring == 2 else "")
            assert f"attention kernel: {said} (" in handle.report() and set(handle.kernels.values()) == {"reference"}
        assert {size for S, size in ran if S > size} == {4, 5}
    finally:
        blocked._pairs = pairs


def bits(checkpointing):
    """Gradients in blocks, of a model that stores everything and of one that recomputes."""
    with sharded(tiny_model("llama", 8, 2), 2, checkpointing=checkpointing, kernel="reference", kernel_block_tokens=4,
                 kernel_block_tokens_backward=4) as (handle, engine):
        (batch,) = handle.shard([batch_of("odd", 0)])
        engine.backward(handle.loss(engine, batch))
        return gradients(engine)


def same_bits():
    want = bits(None)
    for checkpointing in ("non-reentrant", "attention output on the host"):
        for name, got in bits(checkpointing).items():
            assert torch.equal(got, want[name]), (checkpointing, name)


def every_model():
    check_model("batch2")
    check_model("odd", ring=2, checkpointing="non-reentrant")
    check_model("packed", checkpointing="fused layers, host")
    check_model("batch2", method="ulysses")
    check_model("odd", method=MethodConfig("fpdt", chunk_tokens=8))
    same_bits()


def test_models_on_two_ranks(worlds):
    """Ulysses of two, a ring of two, other methods; a recomputed forward gives the stored one's gradients, bit for bit."""
    worlds(2).run(every_model)


def test_the_planner_counts_them():
    """A fused layer whose peak is in the attention block: beside it stand the blocks' fp32 sums."""
    def predicted(*words):
        words = ["memory.preset=lowest_memory", "memory.fused_layers=true", "upipe.kernel=cudnn", *words]
        run = plan.request("llama3-8b", 524288, 8, words)
        return plan.predict(run, plan.Machine.parse("8xH200"), only_here=True)

    single = predicted("upipe.kernel_block_tokens=none")
    assert ", cudnn, forward in blocks as measured\n" in predicted().text() and kernel_blocks.measured("NVIDIA H200", "cudnn")
    blocks = predicted("upipe.kernel_block_tokens=128K", "upipe.kernel_block_tokens_backward=128K")
    assert blocks.phases["backward"] > single.phases["backward"] and blocks.phases["loss"] == single.phases["loss"]
    assert ", cudnn in blocks of 128K\n" in blocks.text() and ", cudnn\n" in single.text()
    assert "blocks of attention calls: by times measured" in blocks.text() and "blocks of attention" not in single.text()


@pytest.mark.parametrize("words, calls", [
    # A forward's stages are four times as wide.
    ((), {"forward": (4, 1), "backward": (1, 1)}),
    (("upipe.overlap=false",), {"forward": (1, 1), "backward": (1, 1)}),
    (("method=ulysses",), {"forward": (16, 4), "backward": (16, 4)}),
])
def test_the_planner_takes_their_measured_times(monkeypatch, words, calls):
    """Peaks, which take a simulation of every setting, are left out: no time is of them."""
    peaks = simulate.Peaks((1024, 2048), *[(0, 0)] * 4)
    monkeypatch.setattr(plan, "peaks_of", lambda case: peaks)
    monkeypatch.setattr(plan, "_simulated", lambda case, lengths: peaks)

    def time(*more, tokens=2**19, machine="2xH200"):
        run = plan.request("llama3-8b", tokens, 2, ["model.layers=4", "upipe.kernel=cudnn", *words, *more])
        return plan.predict(run, plan.Machine.parse(machine), kept=True).time

    single = time("upipe.kernel_block_tokens=none")
    for way, size in (("forward", "kernel_block_tokens=64K"), ("backward", "kernel_block_tokens_backward=64K")):
        found = time("upipe.kernel_block_tokens=none", f"upipe.{size}")
        row = kernel_blocks.nearest(2**19, *calls[way], 128, "NVIDIA H200", "cudnn")
        ratio = row[way]["none"] / row[way]["65536"]
        assert found[f"attention, {way}"] == pytest.approx(single[f"attention, {way}"] / ratio) and ratio != 1
        other = {"forward": "attention, backward", "backward": "attention, forward"}[way]
        assert found[other] == single[other]
    assert time()["attention, forward"] < 0.95 * single["attention, forward"]
    for same in ({"tokens": 2**16}, {"machine": "2xH100-80GB"}):
        assert time(**same)["attention, forward"] == time("upipe.kernel_block_tokens=none", **same)["attention, forward"]


@pytest.mark.parametrize("size, expected", [("none", 1.0), ("auto", 1.1), (65536, 1.1), (32768, 110 / 102), (16384, 1.0)])
def test_speed(size, expected):
    assert kernel_blocks.speed(size, "forward", 2**19, 4, 1, 128, "G", "cudnn", ROWS) == pytest.approx(expected)
    assert kernel_blocks.speed(size, "forward", 2**16, 4, 1, 128, "G", "cudnn", ROWS) == 1.0


def test_auto_without_a_row_is_simulated_as_single_calls(monkeypatch):
    shape = "{}"
    run = plan.request("llama3-8b", 131072, 8, ["upipe.kernel_block_tokens=auto", "upipe.attention_output=device"])
    monkeypatch.setattr(kernel_blocks, "table", tuple)
    (case,) = set(plan.cases_of(run, shape, "fa4", None, "G").values())
    plain = plan.request("llama3-8b", 131072, 8, ["upipe.attention_output=device"])
    assert "block" not in case.key and {case} == set(plan.cases_of(plain, shape, "fa4", None).values())
    monkeypatch.setattr(kernel_blocks, "table", lambda: (row(1024, {"none": 2.0, "512": 1.0}, kernel="fa4"),))
    (case,) = set(plan.cases_of(run, shape, "fa4", None, "G").values())
    assert case.key.endswith("block_tokens=auto gpu=G")


def test_a_meta_tensor_is_not_taken_for_out():
    """On the meta device every tensor has the same address."""
    class Apart(ReferenceAttention):
        dq_over_out = False

        def _backward(self, grad, q, k, v, *rest):
            return q, k, v

    q, k, v, out = (torch.empty(1, 4, 2, 8, device="meta") for _ in range(4))
    lse = torch.empty(1, 2, 4, device="meta")
    assert Apart().backward(out, q, k, v, out, lse, SCALE, dq=torch.empty_like(q))[0].shape == q.shape
