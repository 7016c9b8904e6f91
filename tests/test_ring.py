"""Zigzag ring attention over real ranks against plain attention of the whole sequence: result, log-sum-exp and every gradient;
what it holds, when it sends, faults that must show, and the attention block on a ring x Ulysses mesh.

On GPUs: `torchrun --standalone --nproc_per_node N -m tests.test_ring` runs a ring of all of them over NCCL, each kernel beside
itself on the whole sequence.
"""

import os
import random
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from tests.pairwise import pairwise
from tests.test_block import call, defined_block, make
from upipe import reference, ring, workspace, zigzag
from upipe.block import BlockSpec, Projections, attention_block
from upipe.kernels import KERNELS, Case, FlashAttention2, FlashAttention4, ReferenceAttention, select
from upipe.live import LiveStorages, SimulatedAttention
from upipe.schedule import HeadSchedule

SCALE = 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")


def documents(kind, total, batch):
    """Boundaries of each row: one document; three across runs; one token each; rows that differ, one of them whole."""
    if kind == "whole":
        return None
    if kind == "one token each":
        return (tuple(range(total + 1)),) * batch
    rng = random.Random(total)
    rows = [(0, *sorted(rng.sample(range(1, total), min(2, total - 1))), total) for _ in range(batch)]
    if kind == "mixed":
        rows[-1] = tuple(sorted({0, 1, total // 2, total // 2 + 1, total}))
        rows[0] = (0, total) if batch > 1 else rows[0]
    return tuple(rows)


def inputs(heads, kv_heads, total, batch, dtype, head_dim=8, device="cpu"):
    g = torch.Generator().manual_seed(total)
    q, k, v, grad = (torch.randn(batch, total, n, head_dim, generator=g, dtype=torch.float64)
                     for n in (heads, kv_heads, kv_heads, heads))
    return [t.to(device, dtype) for t in (2 * q, k, v, grad)]


def defined(q, k, v, grad, offsets, softcap=None):
    """From the definition, in fp64, of the whole sequence."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    out, lse = reference.attention(q, k, v, SCALE, offsets, softcap=softcap)
    out.backward(grad.double())
    return dict(zip(NAMES, (out.detach(), lse.detach(), q.grad, k.grad, v.grad)))


def laid(t, layout):
    """The same values as they lie in practice: [B, S, heads, d]; a stage buffer, [S, B, heads, d]; some heads of a wider one."""
    if layout == "rows":
        return t.contiguous()
    wider = t.new_full((t.shape[1], t.shape[0], t.shape[2] + (layout == "some heads"), t.shape[3]), float("nan"))
    view = wider.transpose(0, 1)[:, :, : t.shape[2]]
    return view.copy_(t)


def gathered(t, dim):
    """The whole of what each ring rank has of its two runs, in the order of the sequence."""
    R = dist.get_world_size()
    pieces = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(R)]
    dist.all_gather(pieces, t.contiguous())
    joined = torch.cat(pieces, dim)
    return torch.cat([joined.narrow(dim, part.start, len(part)) for part in zigzag.restored(joined.shape[dim], R, 1)], dim)


def own(t, swapped=False):
    """This ring rank's two runs of a whole [B, S, ...]."""
    parts = zigzag.shards(t.shape[1], dist.get_world_size(), 1, dist.get_rank(), 0)
    pieces = [t[:, part.start : part.stop] for part in parts]
    if swapped:
        pieces = list(torch.cat(pieces, 1).chunk(2, dim=1))[::-1]
    return torch.cat(pieces, 1)


def on_the_ring(kernel, whole, offsets, softcap=None, layout="rows", buffers=False, swapped=False):
    """What the ring makes of a whole sequence, gathered; uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        q, k, v, grad = (laid(own(t, swapped), layout) for t in whole)
        mask = {"offsets": offsets, "softcap": softcap}
        out, lse = kernel.forward(q, k, v, SCALE, **mask, out=torch.empty_like(q) if buffers else None)
        first = gathered(out, 1), gathered(lse, 2)
        given = dict(zip(("dq", "dk", "dv"), (out, torch.empty_like(k), torch.empty_like(v)))) if buffers else {}
        before = [t.clone() for t in (q, k, v, grad, lse)]
        got = kernel.backward(grad, q, k, v, out, lse, SCALE, **mask, **given)
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, grad, lse))), "an input was written to"
        for result, name in zip(got, given):
            assert result is given[name], name
        return dict(zip(NAMES, (*first, *(gathered(t, 1) for t in got))))
    finally:
        torch.use_deterministic_algorithms(False)


def errors(got, want, grad):
    """Relative errors by name; of a gradient that vanishes, against a hundredth of the incoming one."""
    least = {"out": 0.0, "lse": 1e-2 * grad.double().norm()}
    result = {}
    for name, expected in want.items():
        scale = max(expected.norm(), least.get(name, 1e-2 * grad.double().norm()))
        error = float((got[name].double() - expected).norm() / scale)
        result[name] = error if error == error else float("inf")
    return result


def kernel_of(name, dtype, head_dim=8):
    """A kernel over the ring of all ranks."""
    return ring.on_ring(select(name, Case("cpu", (0, 0), dtype, head_dim)), dist.group.WORLD)


def check(heads, run, batch, packing, kernel, dtype, layout, buffers, softcap=None):
    R, (heads, kv_heads) = dist.get_world_size(), heads
    offsets = documents(packing, 2 * R * run, batch)
    whole = inputs(heads, kv_heads, 2 * R * run, batch, dtype)
    kernel = kernel_of(kernel, dtype)
    assert isinstance(kernel, ring.RingAttention) == (R > 1)
    got = on_the_ring(kernel, whole, offsets, softcap, layout, buffers)
    assert all(t.dtype == dtype for t in got.values())
    wrong = errors(got, defined(*whole, offsets, softcap), whole[3])
    assert max(wrong.values()) <= {torch.float64: 1e-10, torch.float32: 1e-5}[dtype], wrong


def check_in_tiles(**case):
    size, ring.MERGE_TILE = ring.MERGE_TILE, 1000
    try:
        check(**case)
    finally:
        ring.MERGE_TILE = size


CASES = pairwise({
    "ranks": (1, 2, 3, 4),
    "heads": ((4, 4), (4, 2), (3, 1), (1, 1)),
    "run": (1, 2, 5, 33),
    "batch": (1, 2),
    "packing": ("whole", "across runs", "one token each", "mixed"),
    "kernel": ("flash", "reference"),
    "dtype": (torch.float64, torch.float32),
    "layout": ("rows", "stage buffer", "some heads"),
    "buffers": (False, True),
})


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v).replace("torch.", "") for v in case.values()))
def test_ring_is_attention_of_the_whole_sequence(worlds, case):
    case = dict(case)
    worlds(case.pop("ranks")).run(check, **case)


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_chunks_and_tiles(worlds, ranks):
    """More queries than the reference takes and than are merged at a time."""
    worlds(ranks).run(check_in_tiles, heads=(2, 1), run=330, batch=1, packing="across runs", kernel="reference",
                      dtype=torch.float32, layout="stage buffer", buffers=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_softcap(worlds, ranks):
    worlds(ranks).run(check, heads=(4, 2), run=5, batch=2, packing="mixed", kernel="reference", dtype=torch.float64,
                      layout="rows", buffers=True, softcap=1.5)


def bf16(kernel):
    """-> errors on the ring, and of the same kernel on the whole sequence."""
    whole = inputs(4, 2, 2 * 4 * 32, 1, torch.bfloat16)
    want = defined(*whole, None)
    alone = select(kernel, Case("cpu", (0, 0), torch.bfloat16, 8))
    q, k, v, grad = whole
    out, lse = alone.forward(q, k, v, SCALE)
    plain = dict(zip(NAMES, (out, lse, *alone.backward(grad, q, k, v, out, lse, SCALE))))
    got = [on_the_ring(kernel_of(kernel, torch.bfloat16), whole, None, buffers=buffers) for buffers in (False, True, True)]
    assert all(torch.equal(got[1][name], got[2][name]) and torch.equal(got[0][name], got[1][name]) for name in NAMES)
    return errors(got[0], want, grad), errors(plain, want, grad)


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_is_as_near_as_the_kernel_on_one_rank_and_repeats(worlds, ranks, kernel):
    """Sums are in fp32: what is added is a rounding of each part. log-sum-exp, never in bf16, stays at fp32's error."""
    for ours, plain in worlds(ranks).run(bf16, kernel=kernel):
        assert ours["lse"] < 1e-3
        for name in ("out", "dq", "dk", "dv"):
            assert ours[name] <= 1.5 * plain[name], (name, ours, plain)


# Faults


def faulty(fault, packing):
    """-> relative errors with a fault put in, and without."""
    R = dist.get_world_size()
    whole, offsets = inputs(4, 2, 2 * R * 6, 1, torch.float64), documents(packing, 2 * R * 6, 1)
    kernel, want = kernel_of("reference", torch.float64), defined(*whole, documents(packing, 2 * R * 6, 1))
    sound = errors(on_the_ring(kernel, whole, offsets), want, whole[3])
    kernel = kernel_of("reference", torch.float64)
    merge, visible, collect = ring.merge_, zigzag.visible, ring.RingAttention._collect
    calls = []

    def all_but_one_merge(*tensors):
        calls.append(tensors)
        if len(calls) != 1:
            merge(*tensors)

    def other_half(starts, run, size, rank, visitor):
        seen = visible(starts, run, size, rank, visitor)
        if seen is None or visitor < rank:
            return seen
        return slice(seen[0].start - run, seen[0].stop - run), seen[1]

    def without_dk(returning, sums):
        collect(returning, [*sums[:1], ring._Sum(sums[1].like), sums[2]])

    try:
        if fault == "a merge is dropped":
            ring.merge_ = all_but_one_merge
        elif fault == "a visitor is seen by the wrong run":
            zigzag.visible = other_half
        elif fault == "dk made elsewhere is left out":
            ring.RingAttention._collect = staticmethod(without_dk)
        swapped = fault == "the two runs are swapped"
        return errors(on_the_ring(kernel, whole, offsets, swapped=swapped), want, whole[3]), sound
    finally:
        ring.merge_, zigzag.visible, ring.RingAttention._collect = merge, visible, staticmethod(collect)


@pytest.mark.parametrize("fault, shows", [
    ("the two runs are swapped", ("out", "lse", "dq", "dk", "dv")),
    ("a visitor is seen by the wrong run", ("out", "lse", "dq", "dk", "dv")),
    ("a merge is dropped", ("out", "lse")),
    ("dk made elsewhere is left out", ("dk",)),
])
@pytest.mark.parametrize("packing", ["whole", "across runs"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fault_shows(worlds, ranks, fault, shows, packing):
    for wrong, sound in worlds(ranks).run(faulty, fault=fault, packing=packing):
        assert max(sound.values()) < 1e-10
        assert min(wrong[name] for name in shows) > 1e-2, wrong


# What it holds and when it sends


class SilentRing(ring.Ring):
    """A ring without other ranks: nothing arrives. Logs what is begun and what is waited for."""

    def __init__(self, rank, size, log=None):
        self.group, self.rank, self.size, self.log = None, rank, size, [] if log is None else log

    def exchange(self, target, send, source, receive):
        assert all(t.is_contiguous() for t in (*send, *receive))
        number = sum(entry.startswith("send") for entry in self.log)
        self.log.append(f"send {number}")
        log = self.log

        class Work:
            def wait(self):
                log.append(f"wait {number}")

        return ring.Messages([Work()], send, receive)


class LoggedAttention(ReferenceAttention):
    def __init__(self, log, full=False):
        self.log, self.label = log, "full" if full else "own"

    def forward(self, q, k, v, scale, offsets=None, window=None, softcap=None, out=None):
        self.log.append(self.label)
        return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, grad, q, k, v, out, lse, scale, offsets=None, window=None, softcap=None, dq=None, dk=None, dv=None):
        self.log.append(self.label)
        return [torch.zeros_like(t) if buffer is None else buffer for t, buffer in zip((q, k, v), (dq, dk, dv))]


@pytest.mark.parametrize("rank", range(3))
def test_sends_are_under_calls(rank):
    """Every exchange but a backward's first is begun before a call and waited for after one; none by a barrier."""
    log = []
    kernel = ring.RingAttention(LoggedAttention(log), SilentRing(rank, 3, log), full=LoggedAttention(log, full=True))
    q, k, v, grad = inputs(2, 1, 8, 1, torch.float32)
    out, lse = kernel.forward(q, k, v, SCALE)
    assert log == ["send 0", "own", "wait 0", "send 1", "full", "wait 1", "full"]
    log.clear()
    kernel.backward(grad, q, k, v, out, lse, SCALE)
    # 0 and 1 bring k and v, 2 and 3 take dk and dv home.
    assert log == ["send 0", "wait 0", "send 1", "full", "send 2", "wait 1", "full", "wait 2", "send 3", "own", "wait 3"]


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (4, 2)])
def test_what_a_ring_of_two_holds(rank, heads, kv_heads):
    """Beside its arguments and FlashAttention-4's own memory, on tensors without values. In forward the other rank's keys and
    what comes of them; in backward, under the last call, its dk and dv, this rank's on their way, and dq."""
    inner, tokens, head_dim = FlashAttention4(), 2 * 65536, 128
    kernel = ring.RingAttention(SimulatedAttention(inner), SilentRing(rank, 2), full=SimulatedAttention(inner))
    unit = tokens * head_dim * 2
    with torch.device("meta"):
        q, out, grad, dq = (torch.empty(tokens, 1, heads, head_dim, dtype=torch.bfloat16).transpose(0, 1) for _ in range(4))
        k, v, dk, dv = (torch.empty(tokens, 1, kv_heads, head_dim, dtype=torch.bfloat16).transpose(0, 1) for _ in range(4))
        # Rank 0 gets both of rank 1's runs, which its second run sees; rank 1 gets one, which both of its runs see.
        runs_in, queries = (2 * kv_heads, heads / 2) if rank == 0 else (kv_heads, heads)
        live = LiveStorages()
        live.know(q, k, v, out)
        with live:
            _, lse = kernel.forward(q, k, v, SCALE, out=out)
        small = 8 * heads * tokens * 4 + ring.MERGE_TILE * 4
        assert (runs_in + queries) * unit <= live.peak <= (runs_in + queries) * unit + small
        for given in (dq, out):
            live = LiveStorages()
            live.know(q, k, v, out, grad, lse, dq, dk, dv)
            with live:
                kernel.backward(grad, q, k, v, out, lse, SCALE, dq=given, dk=dk, dv=dv)
            held = live.peak - inner.backward_bytes(tokens, heads, kv_heads, head_dim)
            assert held == (3 * kv_heads + queries) * unit


# Refusals


def alone():
    return [kernel is ring.on_ring(kernel, dist.group.WORLD) is ring.on_ring(kernel, None) for kernel in KERNELS], refused_alone()


def refused_alone():
    with pytest.raises(ValueError, match="a ring of 1 rank: it needs at least 2"):
        ring.RingAttention(ReferenceAttention(), dist.group.WORLD)
    return True


def test_on_a_ring_of_one_the_kernel_is_itself(worlds):
    assert worlds(1).run(alone) == [([True] * len(KERNELS), True)]


def test_refusals_name_what_would_work():
    with pytest.raises(ValueError, match=r"kernel fa2 .*not served on a ring.*use fa4, cudnn, flash, reference"):
        ring.RingAttention(FlashAttention2(), SilentRing(0, 2))
    kernel = ring.RingAttention(ReferenceAttention(), SilentRing(0, 2))
    q, k, v, _ = inputs(2, 1, 8, 2, torch.float32)
    with pytest.raises(ValueError, match="window=3.*ring of 1"):
        kernel.forward(q, k, v, SCALE, window=3)
    with pytest.raises(ValueError, match="7 tokens a rank"):
        kernel.forward(q[:, :7], k[:, :7], v[:, :7], SCALE)
    with pytest.raises(ValueError, match=r"end at \[8\].*2 x 8 = 16"):
        kernel.forward(q, k, v, SCALE, offsets=((0, 8), (0, 8)))
    with pytest.raises(ValueError, match="offsets of 1 rows.*there are 2 rows"):
        kernel.forward(q, k, v, SCALE, offsets=((0, 16),))
    assert "ring of 2" in kernel.declines(Case.of(q, window=True)) and kernel.declines(Case.of(q)) is None
    flash = ring.RingAttention(select("flash", Case.of(q)), SilentRing(0, 2))
    assert flash.declines(Case.of(q, softcap=True)) == "it has no softcap" and str(flash) == "flash on a ring of 2"


# The attention block on a mesh


def mesh_groups(R, P):
    """This rank's Ulysses group and ring group."""
    mesh, rank = zigzag.Mesh(dist.get_world_size(), R, P), dist.get_rank()
    made = []
    for groups in (mesh.ulysses_groups, mesh.ring_groups):
        handles = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        made.append(next(handle for ranks, handle in handles.items() if rank in ranks))
    return mesh.place(rank), *made


def block_on_a_mesh(ring_size, heads, kv_heads, stage, batch, offsets, kernel, modes, checkpointing=None):
    R, P = ring_size, dist.get_world_size() // ring_size
    (_, r, p), ulysses_group, ring_group = mesh_groups(R, P)
    x, weights, cos, sin, grad = made = make(heads, kv_heads, 8, 20, 24, batch, True, True, 8)
    order = [i for part in zigzag.shards(24, R, P, r, p) for i in part]
    inner = select(kernel, Case("cpu", (0, 0), x.dtype, 8))
    spec = BlockSpec(HeadSchedule(heads, kv_heads, P, stage), rank=p, group=ulysses_group if P > 1 else None, head_dim=8,
                     scale=0.4, kernel=ring.on_ring(inner, ring_group), norm_eps=1e-3, offsets=offsets, **modes)
    x, cos, sin, grad = (t[:, order].contiguous() for t in (x, cos, sin, grad))
    x.requires_grad_()
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)
    workspace.poison()
    try:
        out = call(lambda x: attention_block(x, Projections(**leaves), cos, sin, spec), x, checkpointing)
        workspace.poison()
        out.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    result = {}
    for name, t in (("out", out.detach().contiguous()), ("x", x.grad)):
        pieces = [torch.empty_like(t) for _ in range(R * P)]
        dist.all_gather(pieces, t)
        joined = torch.cat(pieces, 1)
        result[name] = torch.cat([joined[:, part.start : part.stop] for part in zigzag.restored(24, R, P)], 1)
    for name, leaf in leaves.items():
        dist.all_reduce(leaf.grad)
        result[name] = leaf.grad
    for name, expected in defined_block(8, *made, offsets).items():
        error = float((result[name] - expected).norm() / expected.norm())
        assert error < 1e-10, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize("ring_size, ranks", [(2, 8), (4, 8), (2, 6)])
def test_the_block_on_larger_meshes(worlds, ring_size, ranks):
    """With an odd Ulysses degree one rank's tokens are of both runs."""
    worlds(ranks).run(block_on_a_mesh, ring_size=ring_size, heads=8, kv_heads=2, stage=None, batch=2,
                      offsets=((0, 5, 6, 24), (0, 17, 24)), kernel="flash", modes={})


@pytest.mark.parametrize("ring_size, heads, stage, batch, offsets, kernel, modes, checkpointing", [
    (2, (8, 2), 2, 1, None, "flash", {}, None),
    (2, (4, 4), 4, 2, ((0, 5, 6, 24), (0, 17, 24)), "reference", {}, "by hand"),
    (2, (6, 2), 2, 2, ((0, 24), (0, 1, 13, 24)), "flash", {"attention_output": "host", "dx": "bf16"}, "non-reentrant"),
    (2, (5, 1), 4, 1, ((0, 11, 24),), "reference", {"overlap": False}, None),
    (4, (4, 2), 1, 1, ((0, 9, 24),), "flash", {}, "by hand"),
    (4, (4, 1), 4, 2, None, "reference", {}, None),
], ids=["8h2kv", "4h4kv-packed", "6h2kv-host", "5h1kv-serial", "ring-only", "ring-only-whole"])
def test_the_block_on_ring_x_ulysses(worlds, ring_size, heads, stage, batch, offsets, kernel, modes, checkpointing):
    worlds(4).run(block_on_a_mesh, ring_size=ring_size, heads=heads[0], kv_heads=heads[1], stage=stage, batch=batch,
                  offsets=offsets, kernel=kernel, modes=modes, checkpointing=checkpointing)


# GPUs


def test_flash_attention_4_is_called_without_a_mask(monkeypatch):
    """Against a stand-in that takes the arguments of flash-attn-4 4.0.0b36's functions that are used."""
    stand_in, definition = types.ModuleType("flash_attn.cute.interface"), ring.FullReferenceAttention()

    def forward(q, k, v, *, softmax_scale, causal, return_lse, softcap=None, out=None):
        assert causal is False and return_lse is True
        return *definition.forward(q, k, v, softmax_scale, softcap=softcap, out=out), None, None, None

    def backward(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, softcap=None, dq=None, dk=None, dv=None):
        assert causal is False and lse.is_contiguous()
        return definition.backward(dout, q, k, v, out, lse, softmax_scale, softcap=softcap, dq=dq, dk=dk, dv=dv)

    stand_in._flash_attn_fwd, stand_in._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_in)
    q, _, _, grad = inputs(4, 2, 6, 2, torch.float32)
    _, k, v, _ = inputs(4, 2, 10, 2, torch.float32)
    kernel = ring.full_of(FlashAttention4())
    for softcap in (None, 1.5):
        out, lse = kernel.forward(q, k, v, SCALE, softcap=softcap)
        want, want_lse = definition.forward(q, k, v, SCALE, softcap=softcap)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        wider = torch.cat((lse, lse), 2)[:, :, :6]
        got = kernel.backward(grad, q, k, v, out, wider, SCALE, softcap=softcap)
        assert all(map(torch.equal, got, definition.backward(grad, q, k, v, out, lse, SCALE, softcap=softcap)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["fa4", "cudnn", "flash"])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("queries, keys", [(1000, 2000), (2000, 1000), (1024, 1024), (1, 777), (777, 1)])
def test_calls_without_a_mask_on_a_gpu(name, heads, kv_heads, queries, keys):
    """Against the reference in fp32, with out and lse of a softmax over more keys than these."""
    g = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, queries, heads, 128, generator=g).cuda().bfloat16() for _ in range(2))
    k, v = (torch.randn(2, keys, kv_heads, 128, generator=g).cuda().bfloat16() for _ in range(2))
    case = Case.of(q)
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    if kernel.declines(case):
        pytest.skip(kernel.declines(case))
    full, want = ring.full_of(kernel), ring.FullReferenceAttention()
    wide = [t.float() for t in (q, k, v)]
    out, lse = full.forward(q, k, v, 0.1)
    want_out, want_lse = want.forward(*wide, 0.1)
    more = want_lse + 0.5
    fed = (0.7 * want_out).bfloat16()
    got = full.backward(grad, q, k, v, fed, more, 0.1)
    expected = want.backward(grad.float(), *wide, fed.float(), more, 0.1)
    pairs = dict(zip(NAMES, zip((out, lse, *got), (want_out, want_lse, *expected))))
    for which, (a, b) in pairs.items():
        assert float((a.float() - b).norm() / b.norm()) < 1.5e-2, which


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_ring_of_gpus():
    count = str(min(torch.cuda.device_count(), 4))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m", "tests.test_ring"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    R = dist.get_world_size()
    for name in ("reference", "flash", "cudnn", "fa4"):
        dtype = torch.float32 if name == "reference" else torch.bfloat16
        inner = next(kernel for kernel in KERNELS if kernel.name == name)
        if reason := inner.declines(Case.of(torch.empty(1, dtype=dtype, device="cuda"), 128)):
            print(f"{name} skipped: {reason}")
            continue
        for packing, batch, buffers in (("whole", 1, True), ("whole", 2, False), ("across runs", 2, True), ("mixed", 1, False)):
            total = 2 * R * 500
            whole, offsets = inputs(4, 2, total, batch, dtype, 128, "cuda"), documents(packing, total, batch)
            want = defined(*whole, offsets)
            q, k, v, grad = whole
            out, lse = inner.forward(q, k, v, SCALE, offsets)
            plain = dict(zip(NAMES, (out, lse, *inner.backward(grad, q, k, v, out, lse, SCALE, offsets))))
            kernel = ring.RingAttention(inner, dist.group.WORLD)
            got = on_the_ring(kernel, whole, offsets, layout="stage buffer", buffers=buffers)
            ours, alone = errors(got, want, grad), errors(plain, want, grad)
            if dist.get_rank() == 0:
                print(name, packing, {which: f"{ours[which]:.2e} (alone {alone[which]:.2e})" for which in NAMES}, flush=True)
            assert all(ours[which] <= 1.5 * alone[which] + 1e-6 for which in NAMES), (name, packing, ours, alone)
    dist.barrier()
    if dist.get_rank() == 0:
        print("PASS")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
