"""The attention block, one autograd function over real ranks, against the definition: output and every gradient, fp64."""

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from tests.pairwise import pairwise
from tests.plain import assert_close
from upipe import host, reference, workspace
from upipe.block import BlockSpec, Projections, attention_block, checkpoint_contexts
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


def call(block, x, checkpointing):
    """The block's result as a checkpointed layer makes it. checkpointing: None, "non-reentrant" (torch's) or "by hand" (a
    first forward without gradients, then the one whose graph is kept)."""
    if checkpointing is None:
        return block(x)
    if checkpointing == "non-reentrant":
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)
    first, again = checkpoint_contexts()
    with first, torch.no_grad():
        before = block(x)
    workspace.poison()
    with again:
        after = block(x)
    assert torch.equal(before, after)
    return after


def sharded_block(heads, kv_heads, width, head_dim, x, weights, cos, sin, grad, offsets, kernel, needs=None, checkpointing=None,
                  **modes):
    """Output, input gradient and summed parameter gradients of the block over all ranks of the world."""
    P, rank = dist.get_world_size(), dist.get_rank()
    schedule = HeadSchedule(heads, kv_heads, P, width)
    spec = BlockSpec(schedule, rank=rank, group=dist.group.WORLD if P > 1 else None, head_dim=head_dim, scale=0.4,
                     kernel=select(kernel, Case("cpu", (0, 0), x.dtype, head_dim)), norm_eps=1e-3, offsets=offsets, **modes)
    x, cos, sin, grad = (t.chunk(P, dim=1)[rank].contiguous() for t in (x, cos, sin, grad))
    x.requires_grad_(needs is None or "x" in needs)
    leaves = {name: w.clone().requires_grad_(needs is None or name in needs) for name, w in weights.items()}
    out = call(lambda x: attention_block(x, Projections(**leaves), cos, sin, spec), x, checkpointing)
    workspace.poison()
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


def check(heads, kv_heads, width, shape, bias, norm, offsets, kernel, dtype=torch.float64, tolerance=1e-10, **modes):
    """One case on every rank of the world; uninitialised memory is NaN, and so is what the workspace kept."""
    workspace.poison()
    head_dim, hidden, batch, rotated = shape
    offsets = None if OFFSETS[offsets] is None else OFFSETS[offsets][:batch]
    made = make(heads, kv_heads, head_dim, hidden, 24, batch, bias, norm, rotated, dtype)
    most = -(-heads // dist.get_world_size())
    width = dist.get_world_size() * {"smallest": 1, "middle": max(1, most // 2), "largest": most}[width]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = sharded_block(heads, kv_heads, width, head_dim, *made, offsets, kernel, **modes)
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
    "attention_output": ("device", "host"),
    "overlap": (True, False),
    "dx": ("gemm", "bf16"),
    "checkpointing": ("by hand", "non-reentrant", None),
})


def name_of(case):
    heads, kv_heads = case["heads"]
    parts = [f"{case['ranks']}ranks", f"{heads}h{kv_heads}kv", case["width"], "x".join(map(str, case["shape"])),
             case["offsets"], case["kernel"], case["attention_output"], "overlap" if case["overlap"] else "serial",
             f"dx-{case['dx']}", case["checkpointing"] or "stored"]
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


def with_small_biases(heads=4, kv_heads=2, head_dim=16, hidden=64, tokens=1024):
    """Errors of the bf16 output against fp64, ours and those of plain bf16 modules, where attention is all but a mean: there a
    bias added to rows already rounded shows, for its own rounding is the same in every row."""
    x, weights, cos, sin, grad = make(heads, kv_heads, head_dim, hidden, tokens, 1, True, False, head_dim)
    weights = {name: w * (0.02 if name in ("wq", "wk") else 0.1 if name.startswith("b") else 1) for name, w in weights.items()}
    x, grad, weights = x.bfloat16(), grad.bfloat16(), {name: w.bfloat16() for name, w in weights.items()}
    cos, sin = torch.ones_like(cos).bfloat16(), torch.zeros_like(sin).bfloat16()
    want = defined_block(head_dim, x, weights, cos, sin, grad, None)["out"]
    got = sharded_block(heads, kv_heads, dist.get_world_size(), head_dim, x, weights, cos, sin, grad, None, "flash")["out"]
    linear, w = torch.nn.functional.linear, weights
    q, k, v = (linear(x, w["w" + n], w["b" + n]).view(1, tokens, -1, head_dim).transpose(1, 2) for n in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)
    plain = linear(out.transpose(1, 2).reshape(1, tokens, -1), w["wo"], w["bo"])
    return [((t.double() - want).norm() / want.norm()).item() for t in (got, plain)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_in_bf16_are_not_rounded_apart(worlds, ranks):
    ours, plain = worlds(ranks).run(with_small_biases)[0]
    assert ours <= 1.2 * plain


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


def two_blocks(attention_output, dx, checkpointing):
    """Two blocks in one checkpointed function, called twice before one backward: each recomputed forward finds its own copy."""
    made = make(8, 2, 8, 20, 24, 1, True, True, 8)
    x, weights, cos, sin, grad = (made[0].clone().requires_grad_(), {n: w.clone().requires_grad_() for n, w in made[1].items()}, *made[2:])
    P, rank = dist.get_world_size(), dist.get_rank()
    spec = BlockSpec(HeadSchedule(8, 2, P), rank=rank, group=dist.group.WORLD, head_dim=8, scale=0.4, norm_eps=1e-3,
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)), attention_output=attention_output, dx=dx)
    part = slice(rank * 24 // P, (rank + 1) * 24 // P)

    def function(x):
        for factor in (1.0, 0.5):
            x = attention_block(x * factor, Projections(**weights), cos[:, part].contiguous(), sin[:, part].contiguous(), spec)
        return x

    def whole(x):
        for factor in (1.0, 0.5):
            x = reference.attention_block(x=x * factor, cos=cos, sin=sin, head_dim=8, scale=0.4, eps=1e-3, offsets=None, **weights)
        return x

    leaves = (x, *weights.values())
    expected = torch.autograd.grad(whole(x), leaves, grad)
    expected = [a + 2 * b for a, b in zip(expected, torch.autograd.grad(whole(2 * x), leaves, grad))]
    mine = x[:, part].detach().clone().requires_grad_()
    total = call(function, mine, checkpointing) + 2 * call(function, 2 * mine, checkpointing)
    total.backward(grad[:, part])
    assert_close("x", mine.grad, expected[0][:, part], 1e-10)
    for (name, leaf), want in zip(weights.items(), expected[1:]):
        dist.all_reduce(leaf.grad)
        assert_close(name, leaf.grad, want, 1e-10)


@pytest.mark.parametrize("dx", ["gemm", "bf16"])
@pytest.mark.parametrize("checkpointing", ["by hand", "non-reentrant"])
def test_two_blocks_and_two_calls_before_one_backward(worlds, checkpointing, dx):
    worlds(2).run(two_blocks, attention_output="host", dx=dx, checkpointing=checkpointing)


def bits(**modes):
    made = make(8, 2, 8, 20, 24, 2, True, True, 8, torch.float32)
    return {name: t.clone() for name, t in sharded_block(8, 2, None, 8, *made, None, "flash", checkpointing="by hand", **modes).items()}


def same_bits(steps):
    """host, device and either overlap give the same bits, at every step, from a poisoned workspace."""
    want = bits(overlap=False)
    for _ in range(steps):
        for modes in ({}, {"attention_output": "host"}, {"attention_output": "host", "overlap": False}):
            workspace.poison()
            for name, got in bits(**modes).items():
                assert torch.equal(got, want[name]), (name, modes)
    for modes in ({"attention_output": "host"}, {}):
        low = bits(dx="bf16", **modes)
        assert all(torch.isfinite(t).all() for t in low.values())


def test_modes_agree_bit_for_bit(worlds):
    worlds(2).run(same_bits, steps=5)


def second_backward(**modes):
    """The first backward uses the attention output's memory; a second one of the same graph is right all the same."""
    made = make(8, 2, 8, 20, 24, 1, False, False, 8)
    P, rank = dist.get_world_size(), dist.get_rank()
    x, weights, cos, sin, grad = (t.chunk(P, 1)[rank].contiguous() if torch.is_tensor(t) else t for t in made)
    spec = BlockSpec(HeadSchedule(8, 2, P), rank=rank, group=dist.group.WORLD, head_dim=8, scale=0.4,
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)), **modes)
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    out = attention_block(x, Projections(**weights), cos, sin, spec)
    once = [g.clone() for g in torch.autograd.grad(out, leaves, grad, retain_graph=True)]
    for i, (a, b) in enumerate(zip(once, torch.autograd.grad(out, leaves, grad))):
        assert_close(f"input {i}", a, b, 1e-12)


@pytest.mark.parametrize("modes", [{}, {"attention_output": "host", "dx": "bf16"}], ids=["device", "host-bf16"])
def test_a_second_backward_of_one_graph(worlds, modes):
    worlds(2).run(second_backward, **modes)


def host_memory():
    """Every copy goes back to the pool, those of calls that never ran backward too."""
    before = set(host.pool()._used)
    bits(attention_output="host", dx="bf16")
    bits(attention_output="host")
    x, weights, cos, sin, _ = make(8, 2, 8, 20, 24, 1, False, False, 8)
    spec = BlockSpec(HeadSchedule(8, 2, 1), rank=0, group=None, head_dim=8, scale=0.4,
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)), attention_output="host")
    first, _ = checkpoint_contexts()
    with first, torch.no_grad():
        attention_block(x, Projections(**weights), cos, sin, spec)
    del first, _
    bits(attention_output="host")
    bits()
    from upipe.block import _give_back
    _give_back()
    assert set(host.pool()._used) <= before


def test_host_copies_are_given_back(worlds):
    worlds(2).run(host_memory)


def test_a_recomputed_forward_without_contexts_is_refused():
    x, weights, cos, sin, grad = make(4, 2, 8, 20, 8, 1, False, False, 8)
    spec = BlockSpec(HeadSchedule(4, 2, 1), rank=0, group=None, head_dim=8, scale=0.4, attention_output="host",
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)))

    def block(x):
        return attention_block(x, Projections(**weights), cos, sin, spec)

    y = torch.utils.checkpoint.checkpoint(block, x.requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="checkpoint_contexts"):
        y.backward(grad)


def test_contexts_without_checkpointing_are_refused():
    x, weights, cos, sin, grad = make(4, 2, 8, 20, 8, 1, False, False, 8)
    spec = BlockSpec(HeadSchedule(4, 2, 1), rank=0, group=None, head_dim=8, scale=0.4,
                     kernel=select("flash", Case("cpu", (0, 0), x.dtype, 8)))
    first, _ = checkpoint_contexts()
    with first:
        y = attention_block(x.requires_grad_(), Projections(**weights), cos, sin, spec)
    with pytest.raises(RuntimeError, match="not recomputed"):
        y.backward(grad)


def test_workspace_is_exactly_sized_and_reused():
    """A forward keeps whole heads of the sequence, the same buffers for every call; a result that is a graph's has their room."""
    workspace.clear()
    x, weights, cos, sin, grad = make(8, 2, 8, 20, 24, 1, False, False, 8)
    spec = BlockSpec(HeadSchedule(8, 2, 1), rank=0, group=None, head_dim=8, scale=0.4,
                     kernel=select("reference", Case("cpu", (0, 0), x.dtype, 8)))
    space, head = workspace.of(x.device), 24 * 8 * x.itemsize
    kept = []
    for _ in range(3):
        with torch.no_grad():
            attention_block(x, Projections(**weights), cos, sin, spec)
        kept.append({id(b) for buffers in space.free.values() for b in buffers})
        assert workspace.report()["cpu"] == sum(b.raw.numel() for buffers in space.free.values() for b in buffers)
    assert kept[0] == kept[1] == kept[2]
    assert 0 < space.bytes <= 25 * head and all(size % head == 0 for size in space.free)
    attention_block(x.requires_grad_(), Projections(**weights), cos, sin, spec).backward(grad)
    assert space.bytes <= 5 * head
