"""KDA: the chunked delta rule against its definition and transformers', the short convolution, and the layer by heads over real
ranks: contiguous, zigzag and ring x Ulysses shards, packed rows, both exchanges, groups that do not divide."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.glm5_next.modeling_glm5_next import chunk_kimi_delta_attention

from experiments.glm_live import kda_bytes
from tests.glm_modules import assert_all_close, make, passes, random, replaced, split_of, summed
from tests.plain import assert_close
from upipe.glm import TokenLayout, TokenSplit, conv, kda
from upipe.glm.conv import short_convolution
from upipe.glm.delta import chunk_kda, recurrent_kda, select_kernel
from upipe.glm.kda import KDAConfig, choose_exchange, linear_attention
from upipe.live import LiveStorages
from upipe.preflight import PreflightError

PACKED = ((0, 1, 2, 17, 50, 64, 80), (0, 66, 80))


def inputs(S, strongest, dtype=torch.float32, B=2, H=3, K=16, V=8):
    q, k, v = (random(B, S, H, w, seed=i) for i, w in enumerate((K, K, V)))
    g, beta = -strongest * torch.sigmoid(random(B, S, H, K, seed=3) * 4), torch.sigmoid(random(B, S, H, seed=4))
    return [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta)]


def results(function, tensors, *more):
    out = function(*tensors, *more)
    return out, *torch.autograd.grad((out * random(*out.shape, seed=9).to(out.dtype)).sum(), tensors)


@pytest.mark.parametrize("offsets", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "strongest, dtype, tolerance", [(0.5, torch.float32, 2e-5), (5.0, torch.float32, 2e-5), (5.0, torch.float64, 1e-12)]
)
def test_chunks_are_the_recurrence(strongest, dtype, tolerance, offsets):
    """Segments of 2 chunks, so that states are handed on and replayed; lengths that chunks do not divide."""
    tensors = inputs(80, strongest, dtype)
    expected = results(recurrent_kda, tensors, offsets)
    for name, got, want in zip(("out", "q", "k", "v", "g", "beta"), results(chunk_kda, tensors, offsets, 2), expected):
        assert_close(name, got, want, tolerance)


def test_chunks_are_those_of_transformers():
    tensors = inputs(150, 5.0)
    expected = results(lambda *t: chunk_kimi_delta_attention(*t, use_qk_l2norm_in_kernel=True)[0], tensors)
    for name, got, want in zip(("out", "q", "k", "v", "g", "beta"), results(chunk_kda, tensors), expected):
        assert_close(name, got, want, 2e-5)


def test_the_strongest_decay_is_refused_beyond_what_fp32_holds():
    q, k, v, g, beta = inputs(40, 5.0)
    for strength, right in ((10.0, True), (10.1, False)):
        g = torch.full_like(g, -strength)
        if right:
            assert_close("out", chunk_kda(q, k, v, g, beta), recurrent_kda(q, k, v, g, beta), 2e-5)
        else:
            with pytest.raises(ValueError, match="-10.1.*below -10"):
                chunk_kda(q, k, v, g, beta)


def peak_of(function, make_tensors):
    """Peak bytes of a forward and backward on the meta device beyond what it is given."""
    tensors = make_tensors()
    live = LiveStorages()
    live.know(*tensors)
    with live:
        out = function(*tensors)
        torch.autograd.grad(out, [t for t in tensors if t.requires_grad], torch.empty_like(out))
    return live.peak


def test_memory_is_linear_in_the_tokens():
    """Per token and head at K = V = 128 in bf16, gradients included; transformers' fallback takes 32 KiB for decays alone."""

    def tensors(S):
        q, k, v, g = (torch.empty(1, S, 2, 128, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
        return [q, k, v, g, torch.empty(1, S, 2, device="meta", dtype=torch.bfloat16, requires_grad=True)]

    peaks = [peak_of(lambda *t: chunk_kda(*t, segment_chunks=2), lambda S=S: tensors(S)) for S in (64, 128, 256)]
    slopes = [(b - a) / (2 * step) for a, b, step in zip(peaks, peaks[1:], (64, 128))]
    # The output and its gradient, four gradients, and a state every 32 tokens.
    assert slopes[0] == pytest.approx(slopes[1], rel=0.02) and slopes[1] < 6 * 256 + 2048 + 128, slopes


def plain_convolution(x, weight, offsets):
    """Each document by itself through nn.functional.conv1d."""
    K = weight.shape[1]
    rows = []
    for row, starts in zip(x, offsets or [(0, x.shape[1])] * x.shape[0]):
        parts = [
            nn.functional.conv1d(row[None, a:b].mT, weight[:, None], padding=K - 1, groups=weight.shape[0])[0, :, : b - a].mT
            for a, b in zip(starts, starts[1:])
        ]
        rows.append(nn.functional.silu(torch.cat(parts)))
    return torch.stack(rows)


@pytest.mark.parametrize("offsets", [None, PACKED], ids=["whole", "packed"])
def test_short_convolution(offsets, monkeypatch):
    tensors = [random(2, 80, 6).requires_grad_(), random(6, 4, seed=2).requires_grad_()]
    expected = results(plain_convolution, tensors, offsets)

    def check(tile):
        for name, got, want in zip(("out", "x", "weight"), results(short_convolution, tensors, offsets, tile), expected):
            assert_close(f"{name}, tiles of {tile}", got, want, 1e-5)

    for tile in (3, 7, 79, 80, 500):
        check(tile)
    with pytest.raises(ValueError, match="tile_tokens=2 with 4 taps.*at least 3"):
        short_convolution(*tensors, offsets, 2)
    monkeypatch.setattr(conv, "_halo", lambda part, weight: part.start)  # without the halo it is wrong
    with pytest.raises(AssertionError):
        check(7)


CONFIGS = [
    KDAConfig("gather", 3, tile_tokens=7),
    KDAConfig("all_to_all", 3),
    KDAConfig("gather", 1),
    KDAConfig("all_to_all", 100, tile_tokens=7),
]


def layer_passes(module, x, config, weights, split=None, offsets=None):
    return passes(module, x, lambda t: linear_attention(module, t, split, offsets, config), (weights,))


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0])
def test_the_layer_is_that_of_transformers(lower_bound):
    module, x, w = make("LinearAttention", linear_lower_bound=lower_bound), random(2, 70, 32), random(2, 70, 32, seed=2)
    expected = passes(module, x, module, (w,))
    for config in CONFIGS:
        assert_all_close(layer_passes(module, x, config, w), expected, 2e-5)


def test_the_replaced_class_takes_a_layout():
    """Documents of the layout, one list for both rows, are rows by themselves; what runs is noted once."""
    module, x = replaced(make("LinearAttention"), kda=KDAConfig(heads_per_group=3)), random(2, 80, 32)
    positions = torch.cat([torch.arange(30), torch.arange(50)])[None]

    def run(rows, positions=None):
        return module(rows, TokenLayout(TokenSplit(), positions, rows.shape[1]))

    alone = torch.cat([run(x[:, :30]), run(x[:, 30:])], 1)
    assert_close("out", run(x, positions), alone, 1e-5)
    assert (run(x) - alone)[:, 30:].norm() > 0.01 * alone.norm()
    assert module.runtime.ran == {"linear_attention": "KDA, kernel torch, 3 heads of a rank at a time"}


@pytest.mark.parametrize(
    "fp32", [("conv1d", "dt_bias", "A_log"), pytest.param((), marks=pytest.mark.slow)], ids=["as published", "all bf16"]
)
def test_in_bf16_it_is_no_worse_than_transformers(fp32):
    """Mean error over seeds of the output and each gradient, against fp64: rounding of one seed is noise."""
    sums, seeds = {}, range(3)
    for seed in seeds:
        module, x, w = make("LinearAttention", seed).double(), *(random(2, 70, 32, seed=100 + 2 * seed + i) for i in (0, 1))
        ours = functools.partial(linear_attention, module, config=CONFIGS[0])
        exact = passes(module, x.double(), ours, (w.double(),))
        kept = {name: p.float() for name, p in module.state_dict().items() if any(part in name for part in fp32)}
        module.bfloat16()
        for name, value in kept.items():
            module.get_parameter(name).data = value
        for side, function in enumerate((ours, module)):
            got = passes(module, x.bfloat16(), function, (w.bfloat16(),))
            for name, want in exact.items():
                error = (got[name].double() - want).norm() / want.norm() / len(seeds)
                sums.setdefault(name, [0.0, 0.0])[side] += error.item()
    for name, (mine, theirs) in sums.items():
        assert mine <= 1.2 * theirs, f"{name}: {mine:.2e}, transformers {theirs:.2e}"
    mine, theirs = (sum(errors) for errors in zip(*sums.values()))
    assert mine <= 1.03 * theirs, f"together {mine:.3e}, transformers {theirs:.3e}"


LAYOUTS = {2: [(2, None), (1, PACKED)], 4: [(4, PACKED), (1, None), (2, PACKED)]}  # Ulysses ranks of a ring rank, documents


def over_ranks(cases, break_it=None):
    """On every rank of a world: the layer by heads against one rank's, outputs, dx and summed gradients."""
    module, x, w = make("LinearAttention"), random(2, 80, 32), random(2, 80, 32, seed=2)
    whole = {}
    for ulysses, offsets in cases:
        split = split_of(ulysses)
        if offsets not in whole:
            whole[offsets] = layer_passes(module, x, KDAConfig(), w, offsets=offsets)
        expected = dict(whole[offsets])
        expected |= {key: split.take(expected[key]) for key in ("output 0", "dx")}
        for config in CONFIGS:
            got = layer_passes(module, split.take(x), config, split.take(w), split, offsets)
            got |= summed({key: grad for key, grad in got.items() if key not in ("output 0", "dx")})
            assert_all_close(got, expected, 1e-5)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_heads_over_ranks(worlds, ranks):
    worlds(ranks).run(over_ranks, cases=LAYOUTS[ranks])


def breaks(name):
    """Without one part of it the comparison must fail, on every rank."""
    joined = TokenSplit.natural
    broken = {
        "order": (TokenSplit, "natural", lambda self, t: t.transpose(0, 1).flatten(1, 2)),
        "halo": (conv, "_halo", lambda part, weight: part.start),
        "seams": (TokenSplit, "natural", joined),  # control: nothing is broken
    }[name]
    before = getattr(broken[0], broken[1])
    setattr(*broken)
    try:
        over_ranks(LAYOUTS[2][1:])
        raised = False
    except AssertionError:
        raised = True
    finally:
        setattr(broken[0], broken[1], before)
    assert raised == (name != "seams")


@pytest.mark.parametrize("name", ["order", "halo", "seams"])
def test_each_part_is_needed(worlds, name):
    worlds(2).run(breaks, name=name)


def bytes_sent(exchange):
    """Elements that a forward hands to collectives for other ranks."""
    module, x, sent = make("LinearAttention"), random(1, 8, 32), []
    real_gather, real_swap = dist.all_gather_into_tensor, kda.exchange

    def gather(out, t, group):
        sent.append(t.numel() * (dist.get_world_size() - 1))
        real_gather(out, t, group=group)

    def swap(send, recv, sizes, recv_sizes, group):
        sent.append(sum(sizes) - sizes[dist.get_rank()])
        real_swap(send, recv, sizes, recv_sizes, group)

    dist.all_gather_into_tensor, kda.exchange = gather, swap
    try:
        linear_attention(module, x, split_of(1), config=KDAConfig(exchange))
    finally:
        dist.all_gather_into_tensor, kda.exchange = real_gather, real_swap
    return sum(sent)


def test_the_exchange_is_the_one_that_sends_less(worlds):
    """Counted: hidden 32 and 8 heads of 8 are 328 projections a token, 10.25 times as wide, as in the published shape."""
    for ranks in (2, 4):
        gather, swap = (worlds(ranks).run(bytes_sent, exchange=e)[0] for e in ("gather", "all_to_all"))
        back = 8 * 64 * (ranks - 1) // ranks  # outputs to their tokens, the same for both
        assert gather - back == 8 * 32 * (ranks - 1) and swap - back == 8 * 328 * (ranks - 1) // ranks
    assert [choose_exchange(P, 32, 8, 8) for P in (2, 10, 11)] == ["gather", "gather", "all_to_all"]
    assert [choose_exchange(P, 4096, 64, 128) for P in (1, 8, 10, 11, 64)] == ["gather"] * 3 + ["all_to_all"] * 2


def test_the_peak_is_a_group_s():
    """Bytes a token that a layer takes beyond x and the parameters: 16 heads at once, and 4 at a time."""
    slopes = {heads: kda_bytes(heads, 16, 128, 64, (64, 96), 32) for heads in (4, 16)}
    assert slopes[16] > 3.5 * slopes[4], slopes


def heads_are_refused():
    module = make("LinearAttention", linear_num_heads=6, linear_head_dim=4)
    with pytest.raises(PreflightError, match="linear_num_heads=6 on 4 ranks.*use 1, 2, 3, 6 ranks"):
        linear_attention(module, random(1, 8, 32), split_of(1))


def test_refusals(worlds):
    worlds(4).run(heads_are_refused)
    for name, device, bound, says in (
        ("fast", "cpu", -5.0, "'fast' is unknown: use auto, torch, fla"),
        ("fla", "cpu", -5.0, "needs a GPU.*cpu.*torch"),
        ("auto", "cpu", None, "linear_lower_bound=None.*fla"),
        ("torch", "cuda", -11.0, "linear_lower_bound=-11.0.*-10"),
    ):
        with pytest.raises(PreflightError, match=says):
            select_kernel(name, device, bound)
    for bad in ({"exchange": "both"}, {"heads_per_group": 0}, {"tile_tokens": 1.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            KDAConfig(**bad)


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [None, ((0, 100, 640, 1000),)], ids=["whole", "packed"])
def test_fla_is_the_torch_kernel(offsets):
    pytest.importorskip("fla")
    module = make("LinearAttention", linear_num_heads=4, linear_head_dim=128, hidden_size=256).cuda()
    x, w = random(1, 1000, 256).cuda(), random(1, 1000, 256, seed=2).cuda()
    exact = layer_passes(module, x, KDAConfig(kernel="torch"), w, offsets=offsets)
    for name, p in module.named_parameters():
        if not any(part in name for part in ("conv1d", "dt_bias", "A_log")):
            p.data = p.data.bfloat16()
    x, w = x.bfloat16(), w.bfloat16()
    errors = {}
    for kernel in ("torch", "fla"):
        got = layer_passes(module, x, KDAConfig(kernel=kernel), w, offsets=offsets)
        errors[kernel] = {name: ((got[name].float() - want).norm() / want.norm()).item() for name, want in exact.items()}
    for name, error in errors["fla"].items():
        assert error <= max(2 * errors["torch"][name], 2e-2), (name, error, errors["torch"][name])
