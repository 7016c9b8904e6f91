"""Tiled MLP, norms and loss: as functions against the modules themselves, and on whole models against plain Hugging Face
under ZeRO 0 to 3, DDP and FSDP2.

DeepSpeed 0.19.8's three tiled operators have six reproduced defects; the input of each is a test here or in
test_loss.py (`deepspeed_defect`).
"""

import copy
import functools
import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import upipe
from tests.plain import assert_close, data_of, plain_step, relative_error, tiny_model
from tests.sharded import ds_config, gradients, sharded
from tests.test_zoo import ZOO, zoo_model
from upipe import loss
from upipe.preflight import PreflightError
from upipe.tiled import Counts, TilingConfig, apply_tiling, tiled_loss_of, tiled_mlp, tiled_norm

SMALL = TilingConfig(mlp_tokens=4, norm_tokens=3, loss_tokens=5)


def part_of(name, kind, dtype=torch.float64):
    """The MLP or the first norm of a zoo model."""
    layer = zoo_model(name, 4, 2, dtype).model.layers[1]
    return layer.mlp if kind == "mlp" else layer.post_attention_layernorm


def biased_mlp(dtype=torch.float64):
    model = tiny_model("llama", 4, 2, mlp_bias=True, hidden_act="gelu_new", dtype=dtype)
    return model.model.layers[0].mlp


MLPS = {"llama": lambda **k: part_of("llama-biased", "mlp", **k), "biased": biased_mlp, "gemma2": lambda **k: part_of("gemma2", "mlp", **k),
        "phi3": lambda **k: part_of("phi3", "mlp", **k)}
DENSE = [name for name in ZOO if name not in ("qwen3_moe", "gpt_oss")]


def both(function, module, x, *args, **kwargs):
    """(output, gradients of x and of every parameter) of the tiled function and of the module."""
    results = []
    for call in (lambda x: function(x, module, *args, **kwargs), module):
        leaf = x.detach().clone().requires_grad_()
        out = call(leaf)
        g = torch.Generator().manual_seed(5)
        grad = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
        results.append((out.detach(), torch.autograd.grad(out, [leaf, *module.parameters()], grad)))
    return results


def assert_both(function, module, x, tolerance, *args, **kwargs):
    (out, grads), (want, want_grads) = both(function, module, x, *args, **kwargs)
    assert_close("output", out, want, tolerance)
    for name, a, b in zip(("x", *dict(module.named_parameters())), grads, want_grads):
        assert a.dtype == b.dtype
        assert_close(f"gradient of {name}", a, b, tolerance)


def rows(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# the functions


@pytest.mark.parametrize("tile", [1, 4, 7, 22, 500])
@pytest.mark.parametrize("mlp", MLPS.values(), ids=MLPS)
def test_T25_mlp_of_two_rows_whose_length_is_no_multiple_of_the_tile_and_tiles_longer_than_it(mlp, tile):
    module = mlp()
    assert_both(tiled_mlp, module, rows(2, 11, module.down_proj.out_features), 1e-12, tile)


@pytest.mark.parametrize("shape", [(13,), (1, 1), (2, 3, 5)], ids=str)
def test_mlp_of_other_shapes(shape):
    module = biased_mlp()
    assert_both(tiled_mlp, module, rows(*shape, module.down_proj.out_features), 1e-12, 4)


def test_mlp_of_an_input_that_is_not_contiguous():
    module = biased_mlp()
    D = module.down_proj.out_features
    assert_both(tiled_mlp, module, rows(5, 2, D).transpose(0, 1), 1e-12, 3)
    assert_both(tiled_mlp, module, rows(2, 5, 2 * D)[..., ::2], 1e-12, 3)


def test_mlp_and_norm_of_no_tokens():
    layer = tiny_model("llama", 4, 2).model.layers[0]
    for function, module in ((tiled_mlp, layer.mlp), (tiled_norm, layer.input_layernorm)):
        x = torch.zeros(3, 0, 32, requires_grad=True)
        out = function(x, module, 4)
        out.sum().backward()
        assert out.shape == x.shape == x.grad.shape
        assert all(not p.grad.any() for p in module.parameters())


def test_gradcheck():
    module = tiny_model("llama", 2, 1, hidden=4, intermediate_size=6, mlp_bias=True, dtype=torch.float64).model.layers[0].mlp
    assert torch.autograd.gradcheck(lambda x, *_: tiled_mlp(x, module, 2), (rows(1, 5, 4).requires_grad_(), *module.parameters()))


@pytest.mark.parametrize("frozen", [("x",), ("gate_proj.weight", "down_proj.bias"), ("all",)], ids=str)
def test_frozen_parameters_and_inputs(frozen):
    module = biased_mlp()
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen and "all" not in frozen)
    wanted = [p for p in module.parameters() if p.requires_grad]
    results = []
    for call in (lambda x: tiled_mlp(x, module, 3), module):
        x = rows(2, 5, module.down_proj.out_features).requires_grad_("x" not in frozen)
        results.append(torch.autograd.grad(call(x).square().sum(), [*wanted, *([x] if x.requires_grad else [])]))
    for a, b in zip(*results):
        assert_close("gradient", a, b, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_norm_is_bit_equal_and_its_gradients_are_right(name, dtype):
    """Forward: the module's own bits. Backward: fp64 from the same numbers; in bf16 no worse than the module's own."""
    module = part_of(name, "norm", torch.float32).to(dtype)
    x = rows(2, 11, module.weight.shape[0], dtype=dtype)
    for tile in (1, 4, 500):
        (out, grads), (want, own) = both(tiled_norm, module, x, tile)
        assert out.dtype == want.dtype and torch.equal(out, want)
        _, right = both(tiled_norm, copy.deepcopy(module).double(), x.double(), 500)[1]
        for what, a, b, r in zip(("x", "weight"), grads, own, right):
            assert a.dtype == b.dtype
            if dtype == torch.bfloat16:
                assert relative_error(a, r) <= 1.05 * relative_error(b, r), what
            else:
                assert_close(what, a, r, 1e-6)


@pytest.mark.parametrize("strides", ["expanded gradient", "parts of wider rows", "columns first"])
def test_norm_of_rows_and_gradients_of_any_strides(strides):
    module = part_of("mistral", "norm", torch.float32)
    D = module.weight.shape[0]
    x, grad = (torch.randn(2, 11, D, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    if strides == "expanded gradient":
        grad = grad[:1, :1, :1].expand(2, 11, D)
    elif strides == "parts of wider rows":
        x, grad = torch.cat((x, x), -1)[..., 3 : 3 + D], torch.cat((grad, grad), -1)[..., 1 : 1 + D]
    else:
        x, grad = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (x, grad))
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    found = torch.autograd.grad(tiled_norm(leaf, module, 4), (leaf, module.weight), grad)
    wanted = torch.autograd.grad(module(leaf), (leaf, module.weight), grad)
    for a, b in zip(found, wanted):
        assert_close(strides, a, b, 1e-6)


def test_norm_of_an_fp32_weight_on_bf16_rows():
    for name in ("mistral", "olmo2", "gemma3"):
        module = part_of(name, "norm", torch.float32)
        x = rows(2, 11, module.weight.shape[0], dtype=torch.bfloat16)
        (out, _), (want, _) = both(tiled_norm, module, x, 4)
        assert out.dtype == want.dtype and torch.equal(out, want)


def test_T29_tiles_are_counted_in_tokens_whatever_the_width():
    """512 tokens, hidden size 8: DeepSpeed's recipe makes tokens / hidden = 64 tiles; here the default is one, and any can be had."""
    model = tiny_model("llama", 2, 1, hidden=8)
    module, x, calls = model.model.layers[0].mlp, rows(1, 512, 8, dtype=torch.float32), []
    act = module.act_fn
    module.act_fn = nn.SiLU()
    module.act_fn.forward = lambda t: calls.append(t.shape[0]) or act(t)
    for tile, expected in ((8192, [512]), (512, [512]), (200, [200, 200, 112])):
        calls.clear()
        tiled_mlp(x, module, tile)
        assert calls == expected
    calls.clear()
    tiled_mlp(x, module)
    assert calls == [512]


@pytest.mark.parametrize("fp32_grads", [True, False])
def test_T28_bf16_weights_in_64_tiles_are_no_worse_than_untiled(fp32_grads):
    """Errors of the weights' gradients against fp64, beside the untiled bf16 module's; bf16 sums are shown to be worse."""
    module = part_of("llama-biased", "mlp", torch.float32).to(torch.bfloat16)
    x = rows(1, 2048, module.down_proj.out_features, dtype=torch.bfloat16)
    grad = rows(*x.shape, seed=2).to(torch.bfloat16)
    wide = copy.deepcopy(module).double()
    found = {}
    for name, call, of, g in (("tiled", lambda x: tiled_mlp(x, module, 32, fp32_grads), module, grad), ("untiled", module, module, grad),
                              ("right", wide, wide, grad.double())):
        leaf = x.to(g.dtype).requires_grad_()
        found[name] = torch.autograd.grad(call(leaf), [leaf, *of.parameters()], g)
    ratios = [relative_error(t, r) / relative_error(u, r) for t, u, r in zip(*(found[n] for n in ("tiled", "untiled", "right")))]
    assert ratios[0] <= 1.05, ratios
    assert all(ratio <= 1.05 for ratio in ratios[1:]) == fp32_grads, ratios


def test_T30_products_of_bf16_read_bf16_and_no_weight_is_copied():
    from tests.test_loss import Operands

    module = part_of("llama-biased", "mlp", torch.float32).to(torch.bfloat16)
    weights = {tuple(p.shape) for p in module.parameters()} | {tuple(p.T.shape) for p in module.parameters()}
    x = rows(1, 10, module.down_proj.out_features, dtype=torch.bfloat16).requires_grad_()
    with Operands() as seen:
        tiled_mlp(x, module, 2, fp32_grads=False).sum().backward()
    assert seen.read == {torch.bfloat16} and not weights & set(seen.made)


# whose memory the gradient goes to


def in_a_graph(kind, reuse):
    """Gradients of x and what became of the incoming one, with the MLP's output used in one of several ways."""
    module = biased_mlp()
    x = rows(1, 9, module.down_proj.out_features).requires_grad_()
    counts, kept = Counts(), []
    y = tiled_mlp(x, module, 2, reuse_grad=reuse, counts=counts)
    if kind == "view":
        y = y.view(9, -1)
    if kind == "retained":
        y.retain_grad()
    if kind == "hook":
        y.register_hook(kept.append)
    if kind == "given":
        given = torch.ones_like(y)
        y.backward(given)
        kept.append(given)
    elif kind == "expanded":
        y.sum().backward()
    elif kind == "residual":
        (x + y).square().sum().backward()
    elif kind == "held inside":
        z = y.clone()
        z.register_hook(kept.append)
        z.square().sum().backward()
    else:
        y.square().sum().backward()
    if kind == "retained":
        kept.append(y.grad)
    return x.grad, kept, counts


@pytest.mark.parametrize("kind,sole", [("alone", True), ("view", True), ("retained", True), ("residual", False), ("hook", False),
                                       ("given", False), ("expanded", False), ("held inside", False)])
def test_the_incoming_gradient_is_written_over_only_where_nothing_else_holds_it(kind, sole):
    want, right, _ = in_a_graph(kind, reuse=False)
    got, kept, counts = in_a_graph(kind, reuse=True)
    assert (counts.reused, counts.copied) == ((1, 0) if sole else (0, 1))
    assert_close("gradient", got, want, 1e-12)
    for a, b in zip(kept, right):
        assert torch.equal(a, b), "a gradient that somebody holds was written over"


def norm_and_mlp_of_a_layer(device):
    layer = tiny_model("llama", 4, 2).to(device).model.layers[0]
    x = rows(1, 9, 32, dtype=torch.float32).to(device).requires_grad_()
    norms, mlps = Counts(), Counts()
    y = tiled_norm(x, layer.post_attention_layernorm, 2, reuse_grad=True, counts=norms)
    (x + tiled_mlp(y, layer.mlp, 2, reuse_grad=True, counts=mlps)).square().sum().backward()
    assert (norms.reused, norms.copied, mlps.reused, mlps.copied) == (1, 0, 0, 1)
    again = x.detach().clone().requires_grad_()
    (again + layer.mlp(layer.post_attention_layernorm(again))).square().sum().backward()
    assert_close("gradient", x.grad, again.grad, 1e-5)


def test_norm_reuses_the_gradient_that_the_mlp_gives_it():
    norm_and_mlp_of_a_layer("cpu")


# DeepSpeed's defects


def test_deepspeed_defect_T1_no_list_of_parameters_is_needed():
    """compute_params=None, the documented default, crashes all three of DeepSpeed's."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    module = biased_mlp()
    x = rows(1, 6, module.down_proj.out_features)
    with pytest.raises(TypeError, match="NoneType"):
        TiledMLP.apply(lambda self, x: self(x), module, x.requires_grad_(), 2, None)
    assert_both(tiled_mlp, module, x.detach(), 1e-12, 3)


def test_deepspeed_defect_T2_five_tokens_in_tiles_of_which_there_are_fewer_than_asked_for():
    """torch.chunk gives three pieces of five tokens where four were asked for (across engines: `test_zero`)."""
    module = biased_mlp()
    for tile in (1, 2, 3, 4, 5, 8):
        assert_both(tiled_mlp, module, rows(1, 5, module.down_proj.out_features), 1e-12, tile)


def test_deepspeed_defect_T6_output_of_another_width_than_the_input():
    module = biased_mlp()
    module.down_proj = nn.Linear(module.down_proj.in_features, 7, dtype=torch.float64)
    assert_both(tiled_mlp, module, rows(2, 11, module.gate_proj.in_features), 1e-12, 4, reuse_grad=True)


# on models


def tiled_window(handle, engine, batches, step=False):
    """As `sharded.window`, with the loss inside the model: (mean of the losses, gradients)."""
    total, grads = 0.0, None
    for i, batch in enumerate(handle.shard(batches, accumulation=len(batches))):
        out = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], shift_labels=batch["shift_labels"], use_cache=False)
        assert out.logits is None
        value = loss.global_loss(out.loss, batch["num_valid"], batch["accumulation"], loss.gradient_scale(engine))
        total += float(value.detach()) / len(batches)
        if not hasattr(engine, "step"):
            (value / len(batches)).backward()
            continue
        engine.backward(value)
        if i + 1 == len(batches):
            grads = gradients(engine)
        if step or i + 1 < len(batches):
            engine.step()
    return total, grads


def assert_equal(got, grads, plain, tolerance=1e-5):
    assert abs(got - plain.loss) <= tolerance * abs(plain.loss), (got, plain.loss)
    for name, expected in plain.grads.items():
        assert_close(f"gradient of {name}", grads[name], expected, tolerance)


@pytest.mark.parametrize("name", ZOO)
def test_model_without_any_wrapper(name):
    """Every served architecture, batch of two, against plain Hugging Face in fp64; everything comes off again."""
    model, plain = zoo_model(name, 4, 2), zoo_model(name, 4, 2, torch.float64)
    state, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    tiling = apply_tiling(model, SMALL)
    assert list(model.state_dict()) == state and tiled_loss_of(model) is tiling
    assert (tiling.mlps, len(tiling.experts)) == ((2, 0) if name in DENSE else (0, 2))
    assert tiling.norms == sum(type(m).__name__.startswith("Tiled") and "Norm" in type(m).__name__ for m in model.modules()) > 4
    ids = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, -1], labels[0, 2:6] = -100, -100
    got = model(input_ids=ids, shift_labels=labels, labels=ids, use_cache=False).loss     # T23: shift_labels win
    got.backward()
    want = F.cross_entropy(plain(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    want.backward()
    assert_close("loss", got, want, 1e-6)
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        assert_close(n, p.grad, q.grad)
    assert ("mixtures of experts left as they are" in tiling.report()) == (name not in DENSE)
    logits = model(input_ids=ids, use_cache=False).logits
    tiling.remove()
    assert [type(m) for m in model.modules()] == classes and tiled_loss_of(model) is None
    assert torch.equal(logits, model(input_ids=ids, use_cache=False).logits) or name in DENSE
    assert_close("logits", logits, plain(input_ids=ids, use_cache=False).logits)


def zero(stage, sp, checkpointing, tied, accumulation, steps=1, data=None, kind="qwen3", config=SMALL):
    data = data or data_of("odd", dist.get_world_size() // sp, accumulation)
    plain_model = tiny_model(kind, 4, 2, tied=tied)
    model = tiny_model(kind, 4, 2, tied=tied)
    tiling = apply_tiling(model, config)
    with sharded(model, sp, stage=stage, accumulation=accumulation, checkpointing=checkpointing) as (handle, engine):
        for step in range(steps):
            plain = plain_step(plain_model, data)
            got, grads = tiled_window(handle, engine, data[handle.dp_rank], step=steps > 1)
            assert_equal(got, grads, plain, 1e-5 if step == 0 else 1e-4)
            with torch.no_grad():
                for n, p in plain_model.named_parameters():
                    p -= 0.1 * plain.grads[n]
    tiling.remove()
    assert not any("_tiling" in vars(type(m)) for m in model.modules())


@pytest.mark.parametrize("stage,sp,checkpointing,tied,accumulation", [
    (0, 1, None, False, 2), (0, 2, "non-reentrant", True, 1), (1, 2, None, False, 1), (1, 1, "reentrant", True, 2),
    (2, 1, None, False, 1), (2, 2, "non-reentrant", False, 2), (3, 1, None, True, 2), (3, 2, None, False, 1),
    (3, 2, "non-reentrant", True, 1), (3, 1, "reentrant", False, 1)])
def test_zero(worlds, stage, sp, checkpointing, tied, accumulation):
    worlds(2).run(zero, stage=stage, sp=sp, checkpointing=checkpointing, tied=tied, accumulation=accumulation)


def test_one_rank(worlds):
    worlds(1).run(zero, stage=1, sp=1, checkpointing="non-reentrant", tied=False, accumulation=2, kind="llama")


def data_of_lengths(lengths):
    g = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 61, (1, n), generator=g) for n in lengths]
    return [[{"input_ids": i, "labels": i}] for i in ids]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_defect_T2_five_tokens_a_rank_different_on_each(worlds, stage):
    """DeepSpeed's TiledMLP: silently wrong weight gradients in ZeRO 1 and 2, an error in the step of ZeRO-3."""
    worlds(2).run(zero, stage=stage, sp=1, checkpointing=None, tied=False, accumulation=1, steps=3, data=data_of_lengths((5, 5)),
                  config=TilingConfig(2, 2, 2))


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_T26_ranks_of_different_lengths_and_numbers_of_tiles_under_zero_3(worlds, checkpointing):
    """5 tokens on one rank, 23 on the other: 2 and 6 tiles of the MLP. Three steps."""
    worlds(2).run(zero, stage=3, sp=1, checkpointing=checkpointing, tied=False, accumulation=1, steps=3, data=data_of_lengths((5, 23)))


def masked(stage, what):
    data = data_of("odd", 1, 1)
    labels = data[0][0]["labels"]
    # 13 tokens are two shards of 7, tiles of 5: the second rank's first tile, the second rank, everything
    labels[:, {"tile": slice(8, 13), "rank": slice(7, None), "batch": slice(None)}[what]] = -100
    zero(stage, 2, None, False, 1, data=data)


@pytest.mark.parametrize("what", ["tile", "rank", "batch"])
@pytest.mark.parametrize("stage", [2, 3])
def test_T21_T22_a_tile_a_rank_a_batch_without_a_label(worlds, stage, what):
    worlds(2).run(masked, stage=stage, what=what)


def test_T24_tiles_of_one_token(worlds):
    worlds(2).run(zero, stage=3, sp=2, checkpointing=None, tied=False, accumulation=1, config=TilingConfig(1, 1, 1))


def wrapped(kind, checkpointing, sp):
    from tests.test_wrappers import _wrap

    data = data_of("batch2", dist.get_world_size() // sp, 2)
    plain = plain_step(tiny_model("llama", 4, 2, tied=checkpointing), data)
    model = tiny_model("llama", 4, 2, tied=checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tiling = apply_tiling(model, SMALL)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp))
    fired = {}
    engine = _wrap(kind, model)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.update({name: fired.get(name, 0) + 1}))
    got, _ = tiled_window(handle, engine, data[handle.dp_rank])
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    assert_equal(got, grads, plain)
    if kind == "ddp":
        assert set(fired.values()) == {2} and len(fired) == len(plain.grads), fired
    else:
        with pytest.raises(PreflightError, match="fully_shard"):
            tiling.remove()
    handle.remove() if kind == "ddp" else handle.mpu.destroy()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-kept"])
@pytest.mark.parametrize("sp", [1, 2])
def test_T27_two_layers_under_ddp_and_fsdp2_accumulate_each_weight_once_a_backward(worlds, kind, checkpointing, sp):
    worlds(2).run(wrapped, kind=kind, checkpointing=checkpointing, sp=sp)


def bf16_on_two_ranks():
    """64 local tokens in 64 tiles. Gradients summed over ranks in fp32, against fp32 from the same bf16 weights."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 61, (1, 128), generator=g)
    data = [[{"input_ids": ids, "labels": ids}]]
    bf16 = tiny_model("llama", 4, 2, dtype=torch.bfloat16)
    right = plain_step(copy.deepcopy(bf16).float(), data)
    errors = {}
    for name in ("untiled", "tiled"):
        model = copy.deepcopy(bf16)
        tiling = apply_tiling(model, TilingConfig(1, 1, 1)) if name == "tiled" else None
        handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
        if tiling:
            tiled_window(handle, model, data[0])
        else:
            (batch,) = handle.shard(data[0])
            handle.loss(model, batch).backward()
        grads = {n: p.grad.float() for n, p in model.named_parameters()}
        for grad in grads.values():
            dist.all_reduce(grad)
        errors[name] = {n: relative_error(grads[n], r) for n, r in right.grads.items()}
        handle.remove()
    return errors


def test_T28_bf16_on_two_ranks_in_64_tiles(worlds):
    errors = worlds(2).run(bf16_on_two_ranks)[0]
    for name, error in errors["tiled"].items():
        assert error <= 1.2 * errors["untiled"][name], (name, error, errors["untiled"][name])


def liveness(checkpointing, kind, steps=4, layers=3):
    """ZeRO-3: the most weights of MLPs, and of everything, gathered at once in each step; and what stays gathered."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    model = tiny_model(kind, 4, 2, layers=layers)
    apply_tiling(model, SMALL)
    config = ds_config(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=0)
    fetch, peaks, left = PartitionedParameterCoordinator.fetch_sub_module, [], []
    data = data_of("odd", 1, 1)[0]

    def live(part):
        return [n for n, p in model.named_parameters() if part in n and p.ds_status == ZeroParamStatus.AVAILABLE]

    def sampled(*args, **kwargs):
        result = fetch(*args, **kwargs)
        peaks[-1] = max(peaks[-1], len(live(".mlp.")))
        return result

    with sharded(model, 2, config=config, checkpointing=checkpointing) as (handle, engine):
        PartitionedParameterCoordinator.fetch_sub_module = sampled
        try:
            for _ in range(steps):
                peaks.append(0)
                (batch,) = handle.shard(data)
                out = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], shift_labels=batch["shift_labels"],
                             use_cache=False)
                engine.backward(loss.global_loss(out.loss, batch["num_valid"], 1, loss.gradient_scale(engine)))
                left.append(live(""))
                engine.step()
        finally:
            PartitionedParameterCoordinator.fetch_sub_module = fetch
    return peaks, left


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
def test_zero_3_gathers_the_mlp_in_hand_only_and_nothing_stays(worlds, checkpointing):
    for peaks, left in worlds(2).run(liveness, checkpointing=checkpointing, kind="llama"):
        assert left == [[]] * 4
        assert peaks == [3] * 4


# putting on and taking off


def test_config_values_and_models_that_do_not_fit_are_refused():
    model = tiny_model("llama", 4, 2)
    classes = [type(m) for m in model.modules()]
    for wrong, says in ((TilingConfig(mlp_tokens=0), "mlp_tokens=0"), (TilingConfig(loss_tokens=2.5), "loss_tokens=2.5"),
                        (TilingConfig(z_loss=-1.0), "z_loss=-1.0"), (TilingConfig(None, None, None), "nothing that"), ({}, "TilingConfig")):
        with pytest.raises(PreflightError, match=says):
            apply_tiling(model, wrong)
    with pytest.raises(ValueError, match="liger"):
        apply_tiling(model, TilingConfig(loss_implementation="fused"))
    with pytest.raises(PreflightError, match="LlamaMLP"):
        apply_tiling(nn.Linear(2, 2))
    hook = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(PreflightError, match=r"layers\.1\.mlp\.up_proj has hooks"):
        apply_tiling(model)
    hook.remove()
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj)
    with pytest.raises(PreflightError, match="Sequential, not a plain torch.nn.Linear"):
        apply_tiling(model)
    model.model.layers[0].mlp.down_proj = model.model.layers[0].mlp.down_proj[0]
    assert [type(m) for m in model.modules()] == classes
    tiling = apply_tiling(model)
    with pytest.raises(PreflightError, match="already"):
        apply_tiling(model)
    tiling.remove()
    assert [type(m) for m in model.modules()] == classes


def test_functions_refuse_other_modules_dtypes_and_autocast():
    mlp, x = biased_mlp(torch.float32), rows(1, 3, 32, dtype=torch.float32)
    for name in ("qwen3_moe", "gpt_oss"):
        with pytest.raises(PreflightError, match="mixture of experts"):
            tiled_mlp(x, part_of(name, "mlp", torch.float32))
    with pytest.raises(PreflightError, match="Sequential is not an MLP"):
        tiled_mlp(x, nn.Sequential())
    with pytest.raises(PreflightError, match="RMSNorm are"):
        tiled_norm(x, nn.LayerNorm(32))
    with pytest.raises(TypeError, match="bfloat16 but gate_proj.weight is torch.float32"):
        tiled_mlp(x.bfloat16(), mlp)
    with pytest.raises(PreflightError, match="tile_tokens=True"):
        tiled_mlp(x, mlp, True)
    with torch.autocast("cpu"), pytest.raises(PreflightError, match="autocast"):
        tiled_mlp(x, mlp)


def test_a_subclass_of_a_served_class_is_left_alone():
    """It may compute something else."""
    class Doubled(type(biased_mlp())):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny_model("llama", 4, 2)
    model.model.layers[0].mlp.__class__ = Doubled
    assert apply_tiling(model, SMALL).mlps == 1 and type(model.model.layers[0].mlp) is Doubled


def test_saved_configuration_names_the_plain_class_and_a_copy_works(tmp_path):
    model = tiny_model("llama", 4, 2)
    tiling = apply_tiling(model, SMALL)
    model.save_pretrained(tmp_path)
    again = type(tiny_model("llama", 4, 2)).from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    ids = torch.arange(3, 12)[None]
    assert_close("logits", model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 11)
    twin = copy.deepcopy(model)
    tiling.remove()
    assert_close("a copy", twin(input_ids=ids, shift_labels=ids).loss, loss.token_loss_sum(model(input_ids=ids).logits, ids))


def test_forward_with_shift_labels_refuses_what_would_change_the_sum():
    model = tiny_model("llama", 4, 2)
    apply_tiling(model, SMALL)
    ids = torch.arange(3, 12)[None]
    for options in ({"num_items_in_batch": 3}, {"logits_to_keep": 1}):
        with pytest.raises(PreflightError, match="leave logits_to_keep and num_items_in_batch out"):
            model(input_ids=ids, shift_labels=ids, **options)


def test_evaluation_leaves_no_gradient():
    """TiledFusedLogitsLoss fills lm_head.grad in evaluation (deepspeed_defect T5)."""
    model = tiny_model("llama", 4, 2, tied=True)
    apply_tiling(model, SMALL)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        value = model.eval()(input_ids=ids, shift_labels=ids).loss
    assert not value.requires_grad and all(p.grad is None for p in model.parameters())


# on a GPU


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def llama_mlp(width, hidden, dtype=torch.bfloat16):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=hidden)).to("cuda", dtype)


@on_gpu
@pytest.mark.parametrize("tile", [1000, 8192])
def test_mlp_on_a_gpu_is_no_worse_than_untiled_bf16(tile):
    module, x = llama_mlp(1024, 3584), torch.randn(1, 16000, 1024, device="cuda", dtype=torch.bfloat16)
    wide, grad, found = copy.deepcopy(module).double(), torch.randn_like(x), {}
    for name, call, of in (("tiled", lambda x: tiled_mlp(x, module, tile), module), ("untiled", module, module), ("right", wide, wide)):
        leaf = x.to(next(of.parameters()).dtype).requires_grad_()
        out = call(leaf)
        found[name] = (out.detach(), *torch.autograd.grad(out, [leaf, *of.parameters()], grad.to(out.dtype)))
    for t, u, r in zip(*(found[n] for n in ("tiled", "untiled", "right"))):
        assert relative_error(t, r) <= 1.05 * relative_error(u, r)


@on_gpu
def test_norm_on_a_gpu_reuses_the_gradient_that_the_mlp_gives_it():
    norm_and_mlp_of_a_layer("cuda")


@on_gpu
def test_norm_on_a_gpu_is_the_modules_own():
    norm = part_of("mistral", "norm", torch.float32).cuda().bfloat16()
    x = torch.randn(1, 20000, norm.weight.shape[0], device="cuda", dtype=torch.bfloat16)
    assert torch.equal(tiled_norm(x, norm, 8192), norm(x))


@on_gpu
def test_peak_of_the_mlp_on_a_gpu():
    """Forward: output and a tile (g, u, act, product, one temporary). Backward: dx, a tile, fp32 sums."""
    N, D, width, tile = 65536, 2048, 8192, 2048
    module = llama_mlp(D, width)
    x = torch.randn(1, N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    tiled_mlp(x, module, tile).backward(grad)
    x.grad = None
    module.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = tiled_mlp(x, module, tile)
    forward = torch.cuda.max_memory_allocated() - before
    assert forward <= 1.05 * (2 * N * D + 5 * 2 * tile * width), forward
    torch.cuda.reset_peak_memory_stats()
    out.backward(grad)
    backward = torch.cuda.max_memory_allocated() - before
    assert backward <= 1.05 * (2 * 2 * N * D + 10 * 2 * tile * width + 3 * D * width * (4 + 2)), backward


@on_gpu
def test_T29_tiles_cost_no_time_on_a_gpu():
    """512K tokens of width 2048, beside the module under checkpointing, which recomputes as tiles do."""
    module, x = llama_mlp(2048, 8192), torch.randn(1, 524288, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad, best = torch.randn_like(x), {}
    whole = functools.partial(checkpoint, module, use_reentrant=False)
    for _ in range(3):  # in turn, the first warms up
        for name, call in (("tiled", functools.partial(tiled_mlp, mlp=module)), ("whole", whole)):
            x.grad = None
            module.zero_grad()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call(x).backward(grad)
            torch.cuda.synchronize()
            best[name] = min(best.get(name, math.inf), time.perf_counter() - began)
    assert best["tiled"] <= 1.1 * best["whole"], best


@on_gpu
def test_T43_more_than_2_to_the_31_elements():
    """655,360 tokens of width 4096: the last rows are those of a short input."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(1, 655360, 4096, device="cuda", dtype=torch.bfloat16)
    norm, module = LlamaRMSNorm(4096).to("cuda", torch.bfloat16), llama_mlp(4096, 256)
    for function, part in ((tiled_norm, norm), (tiled_mlp, module)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, part)
        grad = x.flip(-1)  # not x: a norm's gradient along its input vanishes
        out.backward(grad)
        end = x[:, -50:].clone().requires_grad_()
        want = part(end)
        want.backward(grad[:, -50:])
        assert_close("output", out[:, -50:], want, 1e-2)
        assert_close("gradient", leaf.grad[:, -50:], end.grad, 1e-2)
        del leaf, out
