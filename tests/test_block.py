"""The attention block, one autograd function over real ranks, against the definition: output and every gradient, fp64."""

import pytest
import torch
import torch.distributed as dist

from tests.pairwise import pairwise
from tests.plain import assert_close
from upipe import reference
from upipe.block import BlockSpec, Projections, attention_block
from upipe.kernels import Case, select
from upipe.schedule import HeadSchedule

OFFSETS = {"whole": None, "packed": ((0, 5, 6, 24), (0, 17, 24))}
PARAMETERS = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "q_norm", "k_norm")


def make(heads, kv_heads, head_dim, hidden, tokens, batch, bias, norm, rotated, dtype=torch.float64, seed=0):
    """x, weights by name, cos, sin, gradient of the output; the same on every rank."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    shapes = {"wq": (heads * head_dim, hidden), "wk": (kv_heads * head_dim, hidden), "wv": (kv_heads * head_dim, hidden),
              "wo": (hidden, heads * head_dim)}
    weights = {name: random(*shape) * 1.3 / shape[1] ** 0.5 for name, shape in shapes.items()}
    if bias:
        weights.update({"b" + name[1]: 0.3 * random(shapes[name][0]) for name in shapes})
    if norm:
        weights.update(q_norm=1 + 0.3 * random(head_dim), k_norm=1 + 0.3 * random(head_dim))
    angle = torch.rand(batch, tokens, rotated // 2, generator=g, dtype=torch.float64) * 6
    angle = torch.cat((angle, angle), -1)
    made = random(batch, tokens, hidden), angle.cos(), angle.sin(), random(batch, tokens, hidden)
    x, cos, sin, grad = (t.to(dtype) for t in made)
    return x, {name: w.to(dtype) for name, w in weights.items()}, cos, sin, grad


def sharded_block(heads, kv_heads, width, head_dim, x, weights, cos, sin, grad, offsets, kernel, needs=None):
    """Output, input gradient and summed parameter gradients of the block over all ranks of the world."""
    P, rank = dist.get_world_size(), dist.get_rank()
    schedule = HeadSchedule(heads, kv_heads, P, width)
    spec = BlockSpec(schedule, rank=rank, group=dist.group.WORLD if P > 1 else None, head_dim=head_dim, scale=0.4,
                     kernel=select(kernel, Case("cpu", (0, 0), x.dtype, head_dim)), norm_eps=1e-3, offsets=offsets)
    x, cos, sin, grad = (t.chunk(P, dim=1)[rank].contiguous() for t in (x, cos, sin, grad))
    x.requires_grad_(needs is None or "x" in needs)
    leaves = {name: w.clone().requires_grad_(needs is None or name in needs) for name, w in weights.items()}
    out = attention_block(x, Projections(**leaves), cos, sin, spec)
    out.backward(grad)
    pieces = [torch.empty_like(out) for _ in range(P)]
    dist.all_gather(pieces, out.detach().contiguous())
    result = {"out": torch.cat(pieces, 1)}
    if x.grad is not None:
        dist.all_gather(pieces, x.grad)
        result["x"] = torch.cat(pieces, 1)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            total = leaf.grad.clone()
            dist.all_reduce(total)
            result[name] = total
    return result


def defined_block(head_dim, x, weights, cos, sin, grad, offsets):
    """The same from the definition."""
    leaves = {name: w.double().requires_grad_() for name, w in weights.items()}
    x = x.double().requires_grad_()
    out = reference.attention_block(x=x, cos=cos.double(), sin=sin.double(), head_dim=head_dim, scale=0.4, eps=1e-3,
                                    offsets=offsets, **leaves)
    out.backward(grad.double())
    return {"out": out.detach(), "x": x.grad, **{name: w.grad for name, w in leaves.items()}}


def check(heads, kv_heads, width, shape, bias, norm, offsets, kernel, dtype=torch.float64, tolerance=1e-10):
    """One case on every rank of the world; uninitialised memory is NaN."""
    head_dim, hidden, batch, rotated = shape
    offsets = None if OFFSETS[offsets] is None else OFFSETS[offsets][:batch]
    made = make(heads, kv_heads, head_dim, hidden, 24, batch, bias, norm, rotated, dtype)
    most = -(-heads // dist.get_world_size())
    width = dist.get_world_size() * {"smallest": 1, "middle": max(1, most // 2), "largest": most}[width]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = sharded_block(heads, kv_heads, width, head_dim, *made, offsets, kernel)
    finally:
        torch.use_deterministic_algorithms(False)
    want = defined_block(head_dim, *made, offsets)
    assert set(got) == set(want)
    for name, expected in want.items():
        assert got[name].dtype == dtype
        assert_close(name, got[name], expected, tolerance)


CASES = pairwise({
    "ranks": (1, 2, 3, 4),
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (9, 3), (14, 7), (5, 5), (3, 3), (2, 1)),
    "width": ("smallest", "middle", "largest"),
    "shape": ((8, 20, 1, 8), (6, 16, 2, 6), (10, 12, 2, 4)),          # head dim, hidden, batch, rotated dims
    "bias": (False, True),
    "norm": (False, True),
    "offsets": ("whole", "packed"),
    "kernel": ("flash", "reference"),
})


def name_of(case):
    heads, kv_heads = case["heads"]
    parts = [f"{case['ranks']}ranks", f"{heads}h{kv_heads}kv", case["width"], "x".join(map(str, case["shape"])),
             case["offsets"], case["kernel"]]
    return "-".join(parts + [flag for flag in ("bias", "norm") if case[flag]])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_block_is_the_definition(worlds, case):
    case = dict(case)
    heads, kv_heads = case.pop("heads")
    worlds(case.pop("ranks")).run(check, heads=heads, kv_heads=kv_heads, **case)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_block_in_fp32(worlds, ranks):
    worlds(ranks).run(check, heads=6, kv_heads=2, width="smallest", shape=(8, 20, 2, 8), bias=True, norm=True,
                      offsets="packed", kernel="auto", dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_block_in_bf16(worlds, ranks):
    """bf16 keeps 8 bits: about 4e-3 an operation, a few of them in a row."""
    worlds(ranks).run(check, heads=8, kv_heads=2, width="smallest", shape=(8, 20, 2, 8), bias=True, norm=False,
                      offsets="whole", kernel="auto", dtype=torch.bfloat16, tolerance=3e-2)


def frozen(needs):
    """Only what needs a gradient gets one, and it is the right one."""
    made = make(8, 2, 8, 20, 24, 2, True, True, 8)
    got = sharded_block(8, 2, None, 8, *made, None, "reference", needs)
    want = defined_block(8, *made, None)
    assert set(got) == {"out", *needs}
    for name in got:
        assert_close(name, got[name], want[name], 1e-10)


@pytest.mark.parametrize("needs", [("x",), ("wq",), ("wk", "bk"), ("wv",), ("wo", "bo"), ("k_norm",), ("q_norm", "x")], ids="+".join)
def test_frozen_parameters(worlds, needs):
    worlds(2).run(frozen, needs=needs)


def saved_shapes(heads, kv_heads):
    """Shapes of the tensors the block keeps for backward, parameters apart."""
    x, weights, cos, sin, _ = make(heads, kv_heads, 8, 20, 24, 1, False, False, 8)
    P, rank = dist.get_world_size(), dist.get_rank()
    spec = BlockSpec(HeadSchedule(heads, kv_heads, P), rank=rank, group=dist.group.WORLD, head_dim=8, scale=0.4,
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)))
    x, cos, sin = (t.chunk(P, dim=1)[rank].contiguous() for t in (x, cos, sin))
    leaves = {name: w.requires_grad_() for name, w in weights.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention_block(x.requires_grad_(), Projections(**leaves), cos, sin, spec)
    parameters = {w.data_ptr() for w in leaves.values()}
    return [tuple(t.shape) for t in kept if t.data_ptr() not in parameters]


def test_q_k_and_v_are_not_kept_for_backward(worlds):
    """Kept: input, output and log-sum-exp, rotation tables; all heads of q, k or v nowhere."""
    for shapes in worlds(2).run(saved_shapes, heads=8, kv_heads=2):
        numels = sorted(torch.Size(shape).numel() for shape in shapes)
        hidden, out, lse, table = 12 * 20, 12 * 8 * 8, 4 * 24, 12 * 8
        assert numels == sorted([hidden, out, lse, table, table]), shapes


def mixed_dtypes():
    x, weights, cos, sin, _ = make(4, 2, 8, 20, 8, 1, False, False, 8)
    weights["wv"] = weights["wv"].float()
    spec = BlockSpec(HeadSchedule(4, 2, 1), rank=0, group=None, head_dim=8, scale=0.4,
                     kernel=select("reference", Case("cpu", (0, 0), x.dtype, 8)))
    return attention_block(x, Projections(**weights), cos, sin, spec)


def test_mixed_dtypes_are_refused_by_name():
    with pytest.raises(TypeError, match="float64.*wv.*float32"):
        mixed_dtypes()
