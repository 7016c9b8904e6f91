"""Every method of sharing attention equals plain Hugging Face in logits, loss and every parameter's gradient, fp32, 1e-5.

Real gloo ranks in a world of 4, those that share no sequence data-parallel with different data. The cases cover every pair of
values of every two factors a method has; a few of them run by default.

On GPUs: `torchrun --standalone --nproc_per_node N -m tests.test_methods [METHOD ...]` runs every method, or those named, in bf16
over all of them, beside the unsharded model.
"""

import gc
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import upipe
from tests.pairwise import pairwise
from tests.plain import SEQUENCES, data_of, plain_step, shifted, tiny_model
from tests.sharded import assert_equal_to_plain, sharded
from upipe import config, host, reference
from upipe.kernels import Case
from upipe.layer import apply_fused_layers
from upipe.live import LiveStorages
from upipe.methods import NAMES, MethodConfig, apply_method, native
from upipe.methods.apply import MethodSharding, check_native_data
from upipe.methods.core import Heads
from upipe.methods.layouts import Chunked, Zigzag, chunk_home, chunk_visible
from upipe.preflight import PreflightError, check_kernel
from upipe.traffic import Traffic
from upipe.trainer import RunConfig

TOLERANCE = 1e-5
DEGREES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))


FACTORS = {
    "degrees": DEGREES,
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (28, 7), (5, 5)),
    "sequence": SEQUENCES,
    "model": ("llama", "qwen2", "qwen3"),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "checkpointing": (None, "non-reentrant", "reentrant"),
    "chunk": (None,),
}
WITHIN = tuple(d for d in DEGREES if d[0] == 1)
METHODS = {
    "ring": {"degrees": tuple(d for d in DEGREES if d[1] == 1)},
    "usp": {},
    "fpdt": {"degrees": WITHIN, "chunk": (4, 8, 16)},
    # DeepSpeed's class shares heads evenly alone.
    "ulysses": {"degrees": WITHIN, "heads": ((8, 8), (8, 2), (8, 1))},
}
CASES = [case for seed, (method, some) in enumerate(METHODS.items())
         for case in pairwise({"method": (method,), **FACTORS, **some}, seed)]


def few(cases):
    """For each method and degrees above one rank, less two, the packed case with most to go wrong."""
    chosen = {}
    for case in cases:
        (ring, ulysses), (_, kv_heads) = case["degrees"], case["heads"]
        key = case["method"], case["degrees"]
        if ring * ulysses < 2 or key in (("ulysses", (1, 4)), ("usp", (1, 2)), ("usp", (2, 1))):
            continue
        rank = (case["sequence"] == "packed", kv_heads < ulysses, case["zero"] == 3, case["accumulation"] == 1)
        if key not in chosen or rank > chosen[key][0]:
            chosen[key] = rank, case
    return [case for _, case in chosen.values()]


FEW = few(CASES)


def name_of(case):
    ring, ulysses = case["degrees"]
    heads, kv_heads = case["heads"]
    return (f"{case['method']}-{ring}x{ulysses}-{case['model']}-{heads}h{kv_heads}kv-{case['sequence']}-zero{case['zero']}-"
            f"acc{case['accumulation']}-{case['checkpointing'] or 'stored'}-{case['chunk']}")


def config_of(case):
    method = case["method"]
    return MethodConfig(method, case["degrees"][0] if method in ("ring", "usp") else None, case["chunk"] if method == "fpdt" else None)


def check(case):
    """One case, on every rank of the world."""
    heads, kv_heads = case["heads"]
    sp = case["degrees"][0] * case["degrees"][1]

    def model():
        return tiny_model(case["model"], heads, kv_heads, seed=heads + kv_heads, tied=case["model"] == "qwen2")

    data = data_of(case["sequence"], dist.get_world_size() // sp, case["accumulation"])
    plain = plain_step(model(), data)
    counts = {sum(int((shifted(b) != -100).sum()) for b in row) for row in data}
    assert len(counts) == len(data), "every data-parallel rank must have its own number of valid tokens"
    with sharded(model(), sp, stage=case["zero"], accumulation=case["accumulation"], checkpointing=case["checkpointing"],
                 method=config_of(case)) as (handle, engine):
        assert handle.method == config_of(case)
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)
        assert handle.kernels and case["method"] in handle.report()


@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_methods(worlds, case):
    worlds(4).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW], ids=name_of)
def test_methods_in_full(worlds, case):
    worlds(4).run(check, case=case)


EIGHT_RANKS = [
    {"method": "usp", "degrees": (2, 4), "heads": (28, 7), "sequence": "packed", "model": "qwen2", "zero": 3, "accumulation": 1,
     "checkpointing": "non-reentrant", "chunk": None},
    {"method": "usp", "degrees": (4, 2), "heads": (6, 2), "sequence": "odd", "model": "qwen3", "zero": 2, "accumulation": 2,
     "checkpointing": None, "chunk": None},
    {"method": "fpdt", "degrees": (1, 8), "heads": (8, 2), "sequence": "packed", "model": "llama", "zero": 3, "accumulation": 1,
     "checkpointing": "non-reentrant", "chunk": 8},
    {"method": "ring", "degrees": (8, 1), "heads": (5, 5), "sequence": "packed", "model": "llama", "zero": 3, "accumulation": 1,
     "checkpointing": None, "chunk": None},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_RANKS, ids=name_of)
def test_methods_on_eight_ranks(worlds, case):
    worlds(8).run(check, case=case)


# Orders of tokens


@pytest.mark.parametrize("layout", [
    Zigzag(1, 1), Zigzag(1, 3), Zigzag(2), Zigzag(2, 2), Zigzag(3, 2), Chunked(1, 5), Chunked(2, 8), Chunked(4, 4), Chunked(3, 12),
], ids=str)
def test_layouts_share_every_token_once(layout):
    for tokens in (1, 2, 7, 16, 31, 64, 2999):
        total = layout.padded(tokens)
        shares = [layout.pieces(tokens, rank) for rank in range(layout.ranks)]
        held = [position for pieces in shares for piece in pieces for position in piece]
        assert sorted(held) == list(range(total)) and total >= tokens
        assert {sum(map(len, pieces)) for pieces in shares} == {total // layout.ranks}
        assert layout.padded(total) == total and [layout.pieces(total, rank) for rank in range(layout.ranks)] == shares


def test_chunks_meet_as_few_as_fit():
    layout = Chunked(2, 8)
    assert [layout.chunks(n) for n in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert layout.pieces(20, 1) == (range(4, 8), range(12, 16), range(20, 24)) and layout.padded(20) == 24
    with pytest.raises(ValueError, match="multiple of 3"):
        Chunked(3, 8)


def test_what_a_chunk_sees_is_what_the_definition_says():
    """Every pair of a query and an earlier key of its document is in one rectangle, or in the chunk's own causal part."""
    size, chunks = 5, 4
    for starts in ((0, 20), (0, 3, 11, 20), (0, 5, 10, 20), (0, 1, 2, 19, 20), tuple(range(21))):
        document = [sum(start <= i for start in starts) for i in range(20)]
        for chunk in range(chunks):
            home = chunk_home(starts, size, chunk)
            own = {(q, k) for a, b in zip(home, home[1:]) for q in range(a, b) for k in range(a, q + 1)}
            first = chunk * size
            assert own == {(q, k) for q in range(size) for k in range(q + 1) if document[first + q] == document[first + k]}
            for earlier in range(chunk):
                seen = chunk_visible(starts, size, chunk, earlier)
                got = set() if seen is None else {(q, k) for q in range(size)[seen[0]] for k in range(size)[seen[1]]}
                at = earlier * size
                assert got == {(q, k) for q in range(size) for k in range(size) if document[first + q] == document[at + k]}


# One interface


def interface(method, sp, ring):
    """Positions, shards and what is gathered again are one order; afterwards the model is plain, and nothing is kept."""
    model = tiny_model("llama", 4, 2)
    classes = [type(m) for m in model.modules()]
    before = dist.distributed_c10d._world.pg_map.copy()
    used = set(host.pool()._used)
    handle = apply_method(model, MethodConfig(method, ring, 8 if method == "fpdt" else None), upipe.UPipeConfig(sp_size=sp))
    ids = torch.arange(3, 30)[None]
    (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
    assert torch.equal(batch["position_ids"], handle.positions(batch["input_ids"].shape[1]))
    other = handle.mpu.ring_size + 1
    for of_another in ({"chunk": 16}, {"ring_degree": other}, {"sp_size": sp + 1}):
        with pytest.raises(PreflightError, match=f"was sharded for {next(iter(of_another))}=.* this handle has"):
            handle.loss(model, batch | of_another)
    whole = handle.gather(batch["input_ids"])
    assert torch.equal(whole[:, :27], ids) and not whole[:, 27:].any()
    assert torch.equal(handle.gather(batch["position_ids"])[0], torch.arange(whole.shape[1]))
    targets = handle.gather(batch["shift_labels"])
    assert torch.equal(targets[:, :26], ids[:, 1:]) and bool((targets[:, 26:] == -100).all())
    if method != "upipe":
        with pytest.raises(PreflightError, match="a fused layer is of method=upipe"):
            apply_fused_layers(model, handle)
    # A batch without positions gets the same ones.
    with torch.no_grad():
        given, made = (model(input_ids=batch["input_ids"], use_cache=False, **more).logits
                       for more in ({"position_ids": batch["position_ids"]}, {}))
    assert torch.equal(given, made)
    loss = handle.loss(model, batch)
    loss.backward()
    ran = set(handle.kernels.values())
    handle.remove()
    assert [type(m) for m in model.modules()] == classes and dist.distributed_c10d._world.pg_map.keys() == before.keys()
    assert set(host.pool()._used) <= used
    for ask in (lambda: handle.shard([]), lambda: handle.positions(13), lambda: handle.gather(batch["input_ids"])):
        with pytest.raises(PreflightError, match="handle was removed"):
            ask()
    return float(loss.detach()), ran


@pytest.mark.parametrize("method, ring", [("upipe", None), ("ulysses", None), ("ring", None), ("usp", 2), ("fpdt", None)])
def test_one_interface(worlds, method, ring):
    results = worlds(2).run(interface, method=method, sp=2, ring=ring)
    alone = worlds(2).run(interface, method="none", sp=1, ring=None)
    for (loss, ran), (want, _) in zip(results, alone):
        assert loss == pytest.approx(want, rel=1e-5) and ran == {"flash"}


def sent(method, kv_heads):
    """-> bytes that each rank sends in one checkpointed step of one layer: 64 tokens, 4 heads of 8 in fp32."""
    model = tiny_model("llama", 4, kv_heads, layers=1)
    handle = apply_method(model, MethodConfig(method, chunk_tokens=16 if method == "fpdt" else None), upipe.UPipeConfig(sp_size=2))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.arange(64)[None] % 50
    (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
    with Traffic() as traffic:
        handle.loss(model, batch).backward()
    handle.remove()
    return traffic.sent


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("method", ["ulysses", "fpdt", "ring"])
def test_bytes_sent(worlds, method, kv_heads):
    """Two forwards and a backward. By heads: half of q, k (twice as many where each rank needs its own copy), v and the result,
    and as much of their gradients, the gradient of a copy once. By the ring: k and v of one run from the first rank, of both
    from the last, and the gradients back."""
    row, L = 8 * 4, 32
    if method == "ring":
        run = L // 2
        keys = 2 * kv_heads * row * run
        want = [2 * keys + keys + 2 * keys, 2 * 2 * keys + 2 * keys + keys]
    else:
        want = [3 * (4 + 2 * max(kv_heads, 2) + 4) * row * L // 2] * 2
    assert worlds(2).run(sent, method=method, kv_heads=kv_heads) == want


# Refusals


def mixed_dtypes(method):
    model = tiny_model("llama", 4, 2)
    model.model.layers[0].self_attn.k_proj.to(torch.bfloat16)
    handle = apply_method(model, method, upipe.UPipeConfig(2))
    try:
        ids = torch.arange(8)[None] % 7
        (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
        with pytest.raises(TypeError, match="float32 but k_proj.weight is torch.bfloat16"):
            handle.loss(model, batch)
    finally:
        handle.remove()


@pytest.mark.parametrize("method", ["ulysses", "ring", "fpdt"])
def test_mixed_dtypes_are_refused_by_name(worlds, method):
    worlds(2).run(mixed_dtypes, method=method)


def refused(method, sp, heads=(8, 2), kind="llama", settings=None, **config_of_model):
    model = tiny_model(kind, *heads, **config_of_model)
    classes = [type(m) for m in model.modules()]
    try:
        apply_method(model, MethodConfig(**method) if isinstance(method, dict) else method, upipe.UPipeConfig(sp, **(settings or {})))
    except PreflightError as error:
        assert [type(m) for m in model.modules()] == classes
        return str(error)
    return None


@pytest.mark.parametrize("method, sp, more, says", [
    ("rings", 2, {}, ", ".join(NAMES)),
    ("none", 2, {}, "use sp_size=1"),
    ({"name": "usp", "ring_degree": 3}, 2, {}, "use one of 1, 2"),
    ({"name": "ring", "ring_degree": 2}, 4, {}, "ring_degree=4"),
    ("ulysses", 4, {"heads": (6, 2)}, "use 1, 2, 6 ranks"),
    ({"name": "fpdt", "chunk_tokens": 9}, 4, {}, "use 8"),
    ("native", 2, {}, "method=native on cpu"),
    ("ring", 2, {"settings": {"attention_output": "host"}}, "only method=upipe walks heads"),
    ("ring", 2, {"settings": {"kernel": "fa2"}}, "use fa4, cudnn, flash, reference"),
    ("ring", 3, {}, "does not divide the world"),
    ("ring", 2, {"settings": {"attention_output_layers": 1}}, "upipe.attention_output_layers=1 with method=ring"),
    (2, 2, {}, "method: 2: give one of upipe, ulysses"),
], ids=str)
def test_refusals(worlds, method, sp, more, says):
    for message in worlds(4).run(refused, method=method, sp=sp, **more):
        assert message is not None and says in message, message


@pytest.mark.parametrize("overrides, says", [
    (["method=rign"], "did you mean 'ring'"),
    (["method=ring", "upipe.attention_output=host", "model.checkpointing=non-reentrant"], "only method=upipe walks heads"),
    (["method=ring", "memory.preset=paper", "memory.fused_layers=true"], "fused layer is of method=upipe"),
    (["method=none"], "use sp_size=1"),
    (["method=fpdt", "method.chunk_tokens=9"], "use 8"),
    (["method=ulysses", "method.ring_degree=2"], "use name: usp"),
    (["method.chunk_tokens=8"], "only fpdt has chunks"),
])
def test_configurations_are_refused_by_name(overrides, says):
    with pytest.raises(config.ConfigError, match=says):
        config.load(RunConfig, "configs/demo.yaml", overrides)


def test_method_in_a_configuration():
    assert config.load(RunConfig, "configs/demo.yaml").method == MethodConfig()
    assert config.load(RunConfig, "configs/demo.yaml", ["method=ring"]).method == MethodConfig("ring")
    made = config.load(RunConfig, "configs/demo.yaml", ["method=usp", "method.ring_degree=2"])
    assert made.method == MethodConfig("usp", 2)
    again = config.from_mapping(RunConfig, config.to_mapping(made))
    assert again.method == made.method
    # Presets of the memory stack leave what is of UPipe's stages alone.
    for preset in ("paper", "fastest", "lowest_memory"):
        made = config.load(RunConfig, "configs/demo.yaml", ["method=fpdt", "method.chunk_tokens=64K", f"memory.preset={preset}"])
        assert made.upipe == upipe.UPipeConfig(sp_size=2) and made.memory.offload in ("pinned", "auto")


def test_degrees():
    assert [MethodConfig("usp").degrees(n) for n in (1, 4, 8, 16, 32)] == [(1, 1), (1, 4), (1, 8), (2, 8), (4, 8)]
    assert MethodConfig("ring").degrees(4) == (4, 1) and MethodConfig("fpdt").degrees(4) == (1, 4)


def test_any_heads_are_shared():
    for heads, kv_heads, ranks in ((8, 1, 4), (28, 7, 8), (5, 5, 4), (3, 1, 4)):
        shares = [Heads.of(heads, kv_heads, ranks, rank, object()) for rank in range(ranks)]
        assert [head for share in shares for head in share.mine.q_heads] == list(range(heads))
        for share in shares:
            for q, kv in share.calls():
                assert (q.stop - q.start) % (kv.stop - kv.start) == 0


def test_native_takes_no_packed_documents():
    check_native_data(None)
    with pytest.raises(PreflightError, match="one document a row"):
        check_native_data(((0, 3, 8),))


class Gathered(torch.autograd.Function):
    """[1, L, H, d] of every rank in zigzag order -> [1, N*L, H, d] in order, on every rank."""

    @staticmethod
    def forward(ctx, local):
        ctx.order = torch.cat([torch.arange(p.start, p.stop) for rank in range(dist.get_world_size())
                               for p in Zigzag(dist.get_world_size()).pieces(local.shape[1] * dist.get_world_size(), rank)])
        shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, local.contiguous())
        return torch.cat(shards, 1)[:, ctx.order.argsort()]

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.contiguous())
        return grad[:, ctx.order].chunk(dist.get_world_size(), 1)[dist.get_rank()]


class PlainNative(native.Native):
    """torch's place taken by the definition, over gloo; spoil is applied to the gradient that comes in."""

    def __init__(self, spoil):
        super().__init__(list(range(dist.get_world_size())), "cpu")
        self.spoil = spoil

    def attend(self, q, k, v, kernel, scale):
        q = q + (q * (self.spoil - 1) - (q * (self.spoil - 1)).detach())
        out, _ = reference.attention(*(Gathered.apply(t) for t in (q, k, v)), scale)
        order = [torch.arange(p.start, p.stop) for p in Zigzag(dist.get_world_size()).pieces(out.shape[1], dist.get_rank())]
        return out[:, torch.cat(order)]


def probed(spoil):
    made = PlainNative(spoil)
    try:
        made.refuse_if_wrong("cudnn", 16, torch.float32)
    except PreflightError as error:
        return str(error), made.mesh.get_group() is PlainNative(1.0).mesh.get_group()
    return None, made.mesh.get_group() is PlainNative(1.0).mesh.get_group()


@pytest.mark.parametrize("spoil", [1.0, 1.5])
def test_native_is_refused_where_torch_s_gradients_are_wrong(worlds, spoil):
    for message, kept in worlds(2).run(probed, spoil=spoil):
        assert kept
        if spoil == 1.0:
            assert message is None
        else:
            assert "dq 0.5," in message and "kernel=cudnn" in message and "method=ring" in message


def probed_in(mode):
    with getattr(torch, mode)():
        return probed(1.0)[0], probed(1.5)[0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_native_is_probed_where_an_evaluation_comes_first(worlds, mode):
    for right, wrong in worlds(2).run(probed_in, mode=mode):
        assert right is None and "dq 0.5," in wrong


def probed_within_a_checkpoint(use_reentrant):
    """A first call comes in a layer's forward; what the probe saves there would be missing when the layer is computed again."""
    made, x = PlainNative(1.0), torch.ones(3, requires_grad=True)

    def layer(x):
        made.refuse_if_wrong("cudnn", 16, torch.float32)
        return x.sin() * x

    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    return x.grad.tolist(), list(made.errors("cudnn", 16, torch.float32))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_native_is_probed_within_a_checkpointed_layer(worlds, use_reentrant):
    wanted = (torch.ones(3).sin() + torch.ones(3).cos()).tolist()
    for grad, probes in worlds(2).run(probed_within_a_checkpoint, use_reentrant=use_reentrant):
        assert grad == pytest.approx(wanted) and probes == ["out", "dq", "dk", "dv"]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_native_lets_go_of_its_graph(gradients, hooked):
    q, k, v = (torch.randn(1, 64, heads, 8, requires_grad=gradients) for heads in (4, 2, 2))
    gc.disable()
    try:
        with LiveStorages("cpu") as live, torch.autograd.graph.save_on_cpu() if hooked else nullcontext():
            live.know(q, k, v)
            out = LocalNative().attend(q, k, v, "flash", 8**-0.5)
            if gradients:
                out.backward(torch.ones_like(out))
            q.grad = k.grad = v.grad = None
            del out
            assert live.peak > 0 and live.now == 0
    finally:
        gc.enable()


class LocalNative(native.Native):
    """torch's context_parallel over one rank on the CPU: attention outside of it is not attention, and it does not nest."""

    def __init__(self):
        self.inside, self.calls = False, 0

    @contextmanager
    def on(self, like, kernel):
        assert not self.inside, "context_parallel within context_parallel turns the outer one off"
        self.inside, self.calls = True, self.calls + 1
        yield
        self.inside = False


@pytest.mark.parametrize("use_reentrant, calls", [(None, 2), (True, 3), (False, 4)])
def test_native_in_a_checkpointed_layer(use_reentrant, calls):
    """Forward and backward; forward again when the layer is, and once more where saved tensors are hooked."""
    made, maker = LocalNative(), torch.Generator().manual_seed(0)
    weights = [(torch.randn(32, width, generator=maker) / 6).requires_grad_() for width in (32, 16, 16, 32)]
    x, far = (torch.randn(2, 10, 32, generator=maker) for _ in range(2))

    def attention(attend, x):
        q, k, v = ((x @ w).unflatten(2, (-1, 8)) for w in weights[:3])
        return x + attend(q, k, v).flatten(2) @ weights[3]

    def gradients(layer):
        for leaf in (x.requires_grad_(), *weights):
            leaf.grad = None
        h = layer(layer(x))
        h.backward(far)
        return h.detach(), x.grad, *(w.grad for w in weights)

    want = gradients(lambda x: attention(lambda q, k, v: reference.attention(q, k, v, 8**-0.5)[0], x))
    layer = partial(attention, lambda q, k, v: made.attend(q, k, v, "flash", 8**-0.5))
    got = gradients(layer if use_reentrant is None else partial(checkpoint, layer, use_reentrant=use_reentrant))
    assert made.calls == 2 * calls
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= 1e-5 * w.norm()


@pytest.mark.parametrize("heads, kv_heads, length", [(4, 2, 10), (4, 1, 10), (1, 1, 10)])
def test_what_native_was_given_may_be_changed_in_place(heads, kv_heads, length):
    """Tensors of one head are in the kernel's order already."""
    maker = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, length, h, 8, generator=maker).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    far = torch.randn(2, length, heads, 8, generator=maker)
    want = torch.autograd.grad(reference.attention(*leaves, 8**-0.5)[0], leaves, far)
    given = [t * 1.0 for t in leaves]
    out = LocalNative().attend(*given, "flash", 8**-0.5)
    for t in given:
        t.mul_(3.0)
    for g, w in zip(torch.autograd.grad(out, leaves, far), want, strict=True):
        assert (g - w).norm() <= 1e-5 * w.norm()


def test_what_native_refused_stays_refused(monkeypatch):
    """Also where a refused call has left its kernel among those chosen."""
    monkeypatch.setitem(native.BACKENDS, "reference", None)
    case = Case.of(torch.empty(0), 16)
    sharding = object.__new__(MethodSharding)
    sharding.config, sharding.kernels = upipe.UPipeConfig(sp_size=2, kernel="reference"), {case: check_kernel("reference", case)}
    sharding._native = mock.create_autospec(native.Native, instance=True)
    assert sharding.kernel(case) is sharding.kernels[case]
    sharding._native.refuse_if_wrong.side_effect = PreflightError("wrong here")
    for _ in range(2):
        with pytest.raises(PreflightError, match="wrong here"):
            sharding.kernel(case)


# GPUs


def gpu_model(dtype, attn="sdpa"):
    return tiny_model("llama", 8, 2, attn=attn, dtype=dtype, hidden=256, head_dim=64, max_position_embeddings=8192).cuda()


def whole_gradients(dtype, ids):
    model = gpu_model(dtype)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def pooled(got, want):
    """Relative error of all gradients together, each weighing the same."""
    return float(torch.stack([(got[name] - g).norm() / g.norm() for name, g in want.items()]).square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_methods_on_gpus():
    count = str(min(torch.cuda.device_count(), 4))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", "tests.test_methods"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


def main(*names):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    upipe.init_distributed()
    N = dist.get_world_size()
    ids = torch.randint(3, 61, (1, 512 * N), generator=torch.Generator().manual_seed(0)).cuda()
    want = whole_gradients(torch.float32, ids)
    plain = pooled(whole_gradients(torch.bfloat16, ids), want)
    usp = MethodConfig("usp", 2) if N > 2 else MethodConfig("usp", 1)
    every = MethodConfig("ulysses"), MethodConfig("ring"), usp, MethodConfig("fpdt", chunk_tokens=128 * N), MethodConfig("native")
    for method in every:
        if names and method.name not in names:
            continue
        for kernel in ("cudnn", "flash"):
            model = gpu_model(torch.bfloat16)
            handle = apply_method(model, method, upipe.UPipeConfig(sp_size=N, kernel=kernel))
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            (batch,) = handle.shard([{"input_ids": ids.cpu(), "labels": ids.cpu()}])
            try:
                handle.loss(model, batch).backward()
            except PreflightError as error:
                # torch's own attention, where it is wrong: found before the first step.
                assert method.name == "native" and "the relative errors are" in str(error), error
                handle.remove()
                if dist.get_rank() == 0:
                    print(f"{method.name} {kernel}: refused, {error}", flush=True)
                continue
            got = {}
            for name, p in model.named_parameters():
                got[name] = p.grad.float()
                dist.all_reduce(got[name])
            ran = set(handle.kernels.values())
            handle.remove()
            error = pooled(got, want)
            if dist.get_rank() == 0:
                print(f"{method.name} {kernel}: {error:.2e} (unsharded {plain:.2e})", flush=True)
            assert ran == {kernel} and error <= 1.5 * plain, (method, kernel, error, plain)
    dist.barrier()
    if dist.get_rank() == 0:
        print("PASS")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
