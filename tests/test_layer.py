"""A whole decoder layer as one autograd function against the plain Hugging Face layer: output and every gradient."""

import copy
import types

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn.functional import rms_norm

import upipe
from experiments import live_layer
from experiments.live import SHAPES
from tests.plain import VOCAB, assert_close, block_causal, data_of, plain_step, randomise, relative_error, tiny_model
from tests.sharded import assert_equal_to_plain, ds_config
from tests.test_zoo import zoo_model
from upipe import PreflightError, host, memory, models, reference, workspace
from upipe.apply import document_offsets
from upipe.block import BlockSpec, Projections
from upipe.kernels import Case, select
from upipe.layer import (
    MLP_TOKENS,
    FusedLayersConfig,
    LayerSpec,
    LayerWeights,
    _LayerRun,
    _normed,
    apply_fused_layers,
    decoder_layer,
    layer_contexts,
    weights_of,
)
from upipe.offload import CheckpointConfig, apply_checkpointing
from upipe.schedule import HeadSchedule
from upipe.tiled import Counts

TOKENS = 24
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def plain_model(kind, heads, kv_heads, dtype=torch.float32, layers=1, biases=False, **config):
    """A plain model with random weights. biases: in Llama's projections and MLP, which have them on request."""
    if kind == "mistral":
        from transformers import MistralConfig, MistralForCausalLM

        torch.manual_seed(0)
        values = MistralConfig(
            vocab_size=VOCAB, hidden_size=config.get("hidden", heads * 8), intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=config.get("head_dim", 8), sliding_window=7,
            attn_implementation="sdpa",
        )
        return randomise(MistralForCausalLM(values)).to(dtype).train()
    more = {"attention_bias": True, "mlp_bias": True} if biases and kind == "llama" else {}
    return tiny_model(kind, heads, kv_heads, layers=layers, attn="sdpa", dtype=dtype, **more, **config).train()


def in_fp64(model):
    """Hugging Face's norms compute in fp32 whatever their input: these in fp64, for the comparison at 1e-10."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(lambda self, x: rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon), module)
    return model


def inputs(model, batch, packed, dtype):
    """x, cos, sin, positions, gradient of the output; the same on every rank."""
    g = torch.Generator().manual_seed(1)
    D = model.config.hidden_size
    x, grad = (torch.randn(batch, TOKENS, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    positions = torch.arange(TOKENS).expand(batch, -1).clone()
    if packed:
        positions[0, 5:] -= 5
        positions[-1, 17:] -= int(positions[-1, 17])
    cos, sin = model.model.rotary_emb(x, positions)
    return x, cos, sin, positions, grad


def plain_layers(model, x, cos, sin, positions, grad):
    """Output, and gradients by name, of the plain layers one after the other."""
    window = getattr(model.config, "sliding_window", None) if model.config.model_type == "mistral" else None
    mask = block_causal(positions, x.dtype, window)
    x = x.clone().requires_grad_()
    y = x
    for layer in model.model.layers:
        y = layer(y, attention_mask=mask, position_ids=positions, position_embeddings=(cos, sin))
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.model.layers.named_parameters()}}


class Own(torch.autograd.Function):
    """Hands on a gradient that nothing else holds, as the layer above does."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


def sharded_layers(model, x, cos, sin, positions, grad, checkpointing=None, width=None, mlp_tokens=5, counts=None,
                   offload="none", **modes):
    """The same from `decoder_layer` on every rank, gathered and summed over all of them."""
    P, rank = dist.get_world_size(), dist.get_rank()
    config, architecture = model.config, models.of_model_type(model.config.model_type)
    x, cos, sin, grad = (t.chunk(P, 1)[rank].contiguous() if t.shape[1] == TOKENS else t for t in (x, cos, sin, grad))
    x.requires_grad_()
    counts, y = counts or Counts(), x
    window = architecture.window(model.model.layers[0].self_attn)
    for layer in model.model.layers:
        attention = layer.self_attn
        block = BlockSpec(
            HeadSchedule(config.num_attention_heads, config.num_key_value_heads, P, width), rank=rank,
            group=dist.group.WORLD if P > 1 else None, head_dim=attention.head_dim,
            kernel=select("auto", Case("cpu", (0, 0), x.dtype, attention.head_dim, window is not None)),
            scale=attention.scaling, norm_eps=architecture.norm_eps(attention),
            offsets=document_offsets(positions), window=window, **modes,
        )  # fmt: skip
        eps = config.rms_norm_eps
        spec = LayerSpec(block, layer.mlp.act_fn, eps, eps, mlp_tokens, counts=counts, offload=offload)

        def function(h, layer=layer, spec=spec):
            return decoder_layer(h, weights_of(layer, architecture), cos, sin, spec)

        if checkpointing is None:
            y = function(y)
        elif checkpointing == "non-reentrant":
            y = torch.utils.checkpoint.checkpoint(function, y, use_reentrant=False, context_fn=layer_contexts)
    workspace.poison()
    Own.apply(y).backward(grad)
    pieces = [torch.empty_like(y) for _ in range(P)]
    dist.all_gather(pieces, y.detach().contiguous())
    result = {"y": torch.cat(pieces, 1)}
    dist.all_gather(pieces, x.grad.contiguous())
    result["x"] = torch.cat(pieces, 1)
    for name, p in model.model.layers.named_parameters():
        result[name] = p.grad.clone()
        dist.all_reduce(result[name])
    return result


def check(kind, heads, kv_heads, dtype, tolerance, batch=1, packed=False, layers=1, biases=False, config=(), **modes):
    workspace.poison()
    model = plain_model(kind, heads, kv_heads, dtype, layers, biases, **dict(config))
    if dtype == torch.float64:
        in_fp64(model)
    made = inputs(model, batch, packed, dtype)
    want = plain_layers(copy.deepcopy(model), *made)
    counts = Counts()
    torch.use_deterministic_algorithms(True, warn_only=True)     # uninitialised memory is NaN
    try:
        got = sharded_layers(model, *made, counts=counts, **modes)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(got) == set(want)
    for name, expected in want.items():
        assert_close(name, got[name], expected, tolerance)
    assert (counts.reused, counts.copied) == ((layers, 0) if batch == 1 else (0, layers))


CASES = {
    "llama": dict(kind="llama", heads=8, kv_heads=2),
    "llama-host": dict(kind="llama", heads=8, kv_heads=2, attention_output="host"),
    "llama-mha-biases": dict(kind="llama", heads=4, kv_heads=4, biases=True, batch=2),
    "llama-ragged": dict(kind="llama", heads=9, kv_heads=3, packed=True, config={"hidden": 45, "head_dim": 6}, overlap=False),
    "llama-wider-hidden": dict(kind="llama", heads=4, kv_heads=1, config={"hidden": 48, "head_dim": 8}, attention_output="host",
                               overlap=False),
    "qwen2-ragged": dict(kind="qwen2", heads=14, kv_heads=7, attention_output="host"),
    "qwen2-packed": dict(kind="qwen2", heads=8, kv_heads=2, packed=True, batch=2, attention_output="host"),
    "qwen3": dict(kind="qwen3", heads=8, kv_heads=2, layers=2, attention_output="host"),
    "qwen3-serial": dict(kind="qwen3", heads=6, kv_heads=2, overlap=False, batch=2, packed=True),
    "mistral": dict(kind="mistral", heads=8, kv_heads=2, layers=2, overlap=False),
    "mistral-checkpointed": dict(kind="mistral", heads=8, kv_heads=2, layers=2, checkpointing="non-reentrant", attention_output="host"),
    "qwen3-checkpointed": dict(kind="qwen3", heads=8, kv_heads=4, layers=2, checkpointing="non-reentrant", mlp_tokens=4096),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_layer_is_the_plain_layer_in_fp64(worlds, case, ranks):
    worlds(ranks).run(check, dtype=torch.float64, tolerance=1e-10, **CASES[case])


@pytest.mark.parametrize("case", ["llama", "llama-ragged", "qwen3", "qwen2-packed"])
def test_layer_in_fp32(worlds, case):
    worlds(2).run(check, dtype=torch.float32, tolerance=1e-5, **CASES[case])


# a whole model under DeepSpeed


def step_of_a_model(kind, stage, checkpointing, attention_output="device", overlap=True, accumulation=1, sequence="odd"):
    """Loss and every gradient of a model of fused layers, three windows in a row, against the plain model."""
    data = data_of(sequence, 1, accumulation)
    plain, model = plain_step(tiny_model(kind, 4, 2), data), tiny_model(kind, 4, 2)
    config = ds_config(stage, accumulation)
    if stage == 3:
        config["zero_optimization"].update(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=dist.get_world_size(), attention_output=attention_output, overlap=overlap))
    fused = apply_fused_layers(model, handle, FusedLayersConfig(mlp_tokens=4))
    saved = None
    if checkpointing is not None:
        saved = apply_checkpointing(model, CheckpointConfig(offload=checkpointing, staging_mib=1), contexts=layer_contexts)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, mpu=handle.mpu)
    engine.train()
    for _ in range(3):
        assert_equal_to_plain(handle, engine, plain, data, logits=False, step=True)
        if saved is not None:
            assert saved.end_step().layer_calls == 2 * accumulation
    assert names.keys() == plain.grads.keys()
    if stage == 3:
        left = [n for n, p in model.named_parameters() if p.ds_status.name == "AVAILABLE"]
        assert not left, f"still gathered: {left}"
    counts = fused.counts.reused, fused.counts.copied
    engine.destroy()
    if saved is not None:
        saved.remove()
    fused.remove()
    handle.remove()
    assert "_fused" not in dir(model.model.layers[0])
    return counts


@pytest.mark.parametrize("checkpointing", [None, "none", "pinned"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_under_zero(worlds, stage, checkpointing):
    counts = worlds(2).run(step_of_a_model, kind="llama", stage=stage, checkpointing=checkpointing)
    assert counts == [(6, 0)] * 2


@pytest.mark.parametrize("kind, stage, options", [
    ("qwen3", 3, dict(checkpointing="pageable", attention_output="host", sequence="packed")),
    ("qwen2", 2, dict(checkpointing="pinned", attention_output="host", accumulation=2, overlap=False)),
    ("qwen3", 1, dict(checkpointing=None, attention_output="host", sequence="padded")),
    ("llama", 3, dict(checkpointing="none", accumulation=2, sequence="batch2")),
], ids=lambda value: value if isinstance(value, str) else None)  # fmt: skip
def test_other_steps_under_zero(worlds, kind, stage, options):
    (reused, copied), _ = worlds(2).run(step_of_a_model, kind=kind, stage=stage, **options)
    assert reused + copied == 6 * options.get("accumulation", 1)
    assert (copied == 0) == (options.get("sequence") not in ("padded", "batch2"))


def step_of_a_wrapped_model(wrapper, checkpointing):
    """Gradients under DistributedDataParallel and fully_shard a layer, without DeepSpeed."""
    from torch.distributed.fsdp import fully_shard

    data = data_of("odd", 1, 1)
    plain, model = plain_step(tiny_model("qwen3", 4, 2), data), tiny_model("qwen3", 4, 2).train()
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2, attention_output="host"))
    fused = apply_fused_layers(model, handle)
    if checkpointing is not None:
        apply_checkpointing(model, CheckpointConfig(offload=checkpointing, keep_layers_on_gpu=0), contexts=layer_contexts)
    if wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        (batch,) = handle.shard(data[0])
        handle.loss(wrapped, batch).backward()
        for name, p in model.named_parameters():
            assert_close(name, p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, plain.grads[name], 1e-5)
    return fused.counts.reused, fused.counts.copied


@pytest.mark.parametrize("checkpointing", [None, "pinned"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_step_under_other_wrappers(worlds, wrapper, checkpointing):
    assert worlds(2).run(step_of_a_wrapped_model, wrapper=wrapper, checkpointing=checkpointing) == [(4, 0)] * 2


def gathered_at_once():
    """ZeRO-3: the most parameters of layers gathered when a parameter is fetched or a layer computes; and what stays."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from upipe import layer

    model = tiny_model("llama", 4, 2, layers=3)
    config = ds_config(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=0)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    apply_fused_layers(model, handle)
    saved = apply_checkpointing(model, CheckpointConfig(), contexts=layer_contexts)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, mpu=handle.mpu)
    peaks, left = [], []

    def live(part=""):
        return [n for n, p in model.named_parameters() if part in n and p.ds_status.name == "AVAILABLE"]

    def sampled(plain):
        def call(*args, **kwargs):
            result = plain(*args, **kwargs)
            peaks[-1] = max(peaks[-1], len(live(".layers.")))
            return result
        return call

    run = layer._LayerRun
    places = (PartitionedParameterCoordinator, "fetch_sub_module"), (run, "finish_forward"), (run, "backward_in_place")
    before = [getattr(*place) for place in places]
    for place, plain in zip(places, before):
        setattr(*place, sampled(plain))
    try:
        for _ in range(3):
            peaks.append(0)
            (batch,) = handle.shard(data_of("odd", 1, 1)[0])
            engine.backward(handle.loss(engine, batch))
            left += live()
            engine.step()
    finally:
        for place, plain in zip(places, before):
            setattr(*place, plain)
    engine.destroy()
    saved.remove()
    handle.remove()
    return peaks, left


def test_zero_3_gathers_one_layer_and_nothing_stays(worlds):
    for peaks, left in worlds(2).run(gathered_at_once):
        assert peaks == [9] * 3 and not left


# the incoming gradient and the saved input


def one_layer(kind="llama", dtype=torch.float64, **modes):
    """A function of hidden states, its parameters, and inputs; P = 1."""
    model = in_fp64(plain_model(kind, 4, 2, dtype))
    x, cos, sin, positions, grad = inputs(model, 1, False, dtype)
    layer, architecture, counts = model.model.layers[0], models.of_model_type(kind), Counts()
    kernel = select("auto", Case("cpu", (0, 0), dtype, layer.self_attn.head_dim))
    block = BlockSpec(HeadSchedule(4, 2, 1), rank=0, group=None, kernel=kernel, head_dim=layer.self_attn.head_dim,
                      scale=layer.self_attn.scaling, norm_eps=architecture.norm_eps(layer.self_attn), **modes)
    spec = LayerSpec(block, layer.mlp.act_fn, model.config.rms_norm_eps, model.config.rms_norm_eps, 7, counts=counts)
    want = plain_layers(copy.deepcopy(model), x, cos, sin, positions, grad)
    return lambda h: decoder_layer(h, weights_of(layer, architecture), cos, sin, spec), layer, x.requires_grad_(), grad, want, counts


def test_a_gradient_that_others_hold_is_left_alone():
    function, layer, x, grad, want, counts = one_layer()
    before = grad.clone()
    for y, given in ((function(x), grad), (function(x).sum(), None), (function(x), grad.transpose(1, 2).contiguous().transpose(1, 2))):
        x.grad = None
        y.backward(given)
        if given is not None:
            assert torch.equal(given, before)
            assert_close("x", x.grad, want["x"], 1e-10)
    kept = function(x)
    kept.retain_grad()     # torch copies it: the layer's own is still its alone
    x.grad = None
    Own.apply(kept).backward(grad)
    assert torch.equal(kept.grad, before)
    assert_close("x", x.grad, want["x"], 1e-10)
    seen = []
    hooked = function(x)
    hooked.register_hook(seen.append)
    Own.apply(hooked).backward(grad)
    assert torch.equal(seen[0], before)
    assert (counts.reused, counts.copied) == (1, 4)


def test_a_gradient_of_its_own_becomes_dx():
    """The gradient that the layer is handed and the one it hands on are one memory."""
    function, layer, x, grad, want, counts = one_layer()
    places = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, g):
            places.append(g.data_ptr())
            return g

    Seen.apply(function(Seen.apply(x))).backward(grad.clone())
    assert counts.copied == 1     # Seen's caller holds the one that backward() was given
    places.clear()
    x.grad = None
    Seen.apply(Own.apply(function(Seen.apply(x)))).backward(grad)
    Own.apply(function(Seen.apply(x))).backward(grad)
    assert counts.reused == 2 and len(places) == 3


@pytest.mark.parametrize("attention_output", ["device", "host"])
def test_a_second_backward_of_one_graph(attention_output):
    function, layer, x, grad, want, _ = one_layer(attention_output=attention_output)
    y = function(x)
    for again in (True, False):
        got = torch.autograd.grad(Own.apply(y), [x, *layer.parameters()], grad, retain_graph=again)
        for name, g in zip(("x", *(n for n, _ in layer.named_parameters())), got):
            assert_close(name, g, want["x" if name == "x" else f"0.{name}"], 1e-10)


def test_only_the_input_is_saved():
    function, layer, x, grad, want, _ = one_layer()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(x)
    mine = {id(p) for p in layer.parameters()}
    others = [tuple(t.shape) for t in saved if id(t) not in mine]
    assert sorted(others) == sorted([(1, TOKENS, 32), (1, TOKENS, 8), (1, TOKENS, 8)])


def test_frozen_parameters_get_no_gradient():
    function, layer, x, grad, want, _ = one_layer("qwen3")
    free = {"self_attn.k_proj.weight", "mlp.up_proj.weight", "self_attn.q_norm.weight"}
    for name, p in layer.named_parameters():
        p.requires_grad_(name in free)
    function(x).backward(grad)
    for name, p in layer.named_parameters():
        assert (p.grad is not None) == (name in free)
        if p.grad is not None:
            assert_close(name, p.grad, want[f"0.{name}"], 1e-10)
    assert_close("x", x.grad, want["x"], 1e-10)


def test_host_memory_is_given_back():
    from upipe.block import _give_back

    before = set(host.pool()._used)  # other tests', abandoned or alive
    for _ in range(2):
        function, layer, x, grad, want, _ = one_layer(attention_output="host")
        first, again = layer_contexts()
        with first, torch.no_grad():
            function(x)
        with again:
            y = function(x)
        Own.apply(y).backward(grad)
        assert_close("x", x.grad, want["x"], 1e-10)
        with torch.no_grad():
            function(x)
        abandoned = function(x)
        del abandoned, first, again, y, function
        _give_back()
        assert set(host.pool()._used) <= before


def bf16_errors(kind, batches=8):
    """Each tensor's error against fp64, ours and the plain bf16 layer's, from the same rounded weights and inputs; squares
    added over some batches, since on a single one the ratio of a small tensor is luck."""
    sums = {}
    for batch in range(batches):
        low = plain_model(kind, 8, 2, torch.bfloat16)
        torch.manual_seed(batch)
        x, cos, sin, positions, grad = inputs(low, 1, False, torch.bfloat16)
        x, grad = (t + 0.5 * torch.randn_like(t) for t in (x, grad))
        want = plain_layers(in_fp64(copy.deepcopy(low).double()), x.double(), cos.double(), sin.double(), positions, grad.double())
        plain = plain_layers(copy.deepcopy(low), x, cos, sin, positions, grad)
        got = sharded_layers(low, x, cos, sin, positions, grad)
        for name, right in want.items():
            errors = [(t[name].double() - right.double()).square().sum().item() for t in (got, plain)]
            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), errors)]
    return {name: (ours**0.5, plain**0.5) for name, (ours, plain) in sums.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_bf16_is_no_worse_than_the_plain_layer(worlds, kind, ranks):
    for name, (ours, plain) in worlds(ranks).run(bf16_errors, kind=kind)[0].items():
        assert ours <= 1.2 * plain, (name, ours, plain)


# what is refused


def test_checkpointing_that_would_run_attention_a_third_time_is_refused():
    function, layer, x, grad, *_ = one_layer()
    y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="layer_contexts"):
        y.backward(grad)
    with pytest.raises(RuntimeError, match="Checkpoint each by itself"):
        torch.utils.checkpoint.checkpoint(lambda h: function(function(h)), x, use_reentrant=False, context_fn=layer_contexts)


def test_settings_and_tensors_that_do_not_fit_are_refused():
    function, layer, x, *_ = one_layer()
    with pytest.raises(TypeError, match="torch.float32 but wq is torch.float64"):
        function(x.float())
    with pytest.raises(ValueError, match='dx="gemm"'):
        one_layer(dx="bf16")
    block = BlockSpec(HeadSchedule(4, 2, 1), rank=0, group=None, kernel=None, head_dim=8, scale=1.0)
    with pytest.raises(ValueError, match="mlp_tokens=0"):
        LayerSpec(block, torch.nn.functional.silu, 1e-6, 1e-6, 0)
    w = torch.ones(2, 2, dtype=x.dtype)
    given = LayerWeights(Projections(w, w, w, w, sinks=w), w, w, w, w, w)
    with pytest.raises(ValueError, match="sinks is given"):
        decoder_layer(x, given, x, x, LayerSpec(block, torch.nn.functional.silu, 1e-6, 1e-6))


def refused(model, says, handle=None, config=None, error=PreflightError, **settings):
    """`apply_fused_layers` raises and changes nothing."""
    mine = handle or upipe.apply(model, upipe.UPipeConfig(**settings))
    classes = [type(m) for m in model.modules()]
    with pytest.raises(error, match=says):
        apply_fused_layers(model, mine, config)
    assert [type(m) for m in model.modules()] == classes
    if handle is None:
        mine.remove()


def refusals():
    for name in ("gemma2", "qwen3_moe", "phi3"):
        refused(zoo_model(name, 4, 2), "has no layer to fuse")
    refused(tiny_model("llama", 4, 2), 'use dx="gemm"', dx="bf16")
    refused(tiny_model("llama", 4, 2), "mlp_tokens=0", config=FusedLayersConfig(mlp_tokens=0))
    refused(tiny_model("llama", 4, 2), "FusedLayersConfig", config={})
    other = tiny_model("llama", 4, 2)
    handle = upipe.apply(other)
    refused(tiny_model("llama", 4, 2), "not that of upipe.apply on this model", handle=handle)
    hook = other.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    refused(other, r"layer 1\.mlp\.up_proj has hooks", handle=handle)
    hook.remove()
    other.gradient_checkpointing_enable()
    refused(other, "gradient_checkpointing_disable", handle=handle)
    other.gradient_checkpointing_disable()
    saved = apply_checkpointing(other)
    refused(other, "before apply_checkpointing", handle=handle)
    saved.remove()
    fused = apply_fused_layers(other, handle)
    refused(other, "fused already", handle=handle)
    ids = torch.arange(3, 12)[None]
    with pytest.raises(PreflightError, match="key/value cache"):
        other.model.layers[0](torch.ones(1, 3, 32), cache=object())
    with pytest.raises(PreflightError, match=r"attention_mask \(1, 1, 3, 3\)"):
        other.model.layers[0](torch.ones(1, 3, 32), attention_mask=torch.ones(1, 1, 3, 3))
    other.train().gradient_checkpointing_enable()
    with pytest.raises(PreflightError, match="gradient_checkpointing_disable"):
        other(input_ids=ids, use_cache=False)
    other.gradient_checkpointing_disable()
    saved = apply_checkpointing(other, contexts=layer_contexts)
    with pytest.raises(PreflightError, match="subclassed after"):
        fused.remove()
    saved.remove()
    fused.remove()
    handle.remove()


def test_apply_refuses_what_does_not_fit(worlds):
    worlds(1).run(refusals)


def mixed_layers():
    """A layer of another class beside served ones is left alone and reported, and the model is the plain one."""
    class Halved(type(tiny_model("llama", 4, 2).model.layers[0])):
        def forward(self, *args, **kwargs):
            return 0.5 * super().forward(*args, **kwargs)

    data = data_of("odd", 1, 1)
    plain, model = tiny_model("llama", 4, 2, layers=3), tiny_model("llama", 4, 2, layers=3)
    for m in (plain, model):
        m.model.layers[1].__class__ = Halved
    classes = [type(m) for m in model.modules()]
    plain = plain_step(plain, data)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2, attention_output="host"))
    fused = apply_fused_layers(model, handle)
    assert fused.layers == 2 and len(fused.left) == 1 and "layer 1, Halved" in fused.report()
    saved = apply_checkpointing(model, CheckpointConfig(offload="pinned"), contexts=layer_contexts)
    model.train()
    (batch,) = handle.shard(data[0])
    handle.loss(model, batch).backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        assert_close(name, p.grad, plain.grads[name], 1e-5)
    assert (fused.counts.reused, fused.counts.copied) == (2, 0)
    with torch.no_grad():
        shards = [torch.empty(1, 7, VOCAB) for _ in range(2)]
        dist.all_gather(shards, model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits)
    assert_close("logits in eval", torch.cat(shards, 1)[:, :13], plain.logits[0][0], 1e-5)
    for thing in (saved, fused, handle):
        thing.remove()
    assert [type(m) for m in model.modules()] == classes


def test_other_layers_are_left_alone(worlds):
    worlds(2).run(mixed_layers)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)], ids=str)
def test_norms_of_rows_as_wide_as_the_hidden_states(dtype, tolerance):
    """Rounded once, whatever the rows' strides; the backward adds to what is there, and to the sum of the weight's gradient in fp32."""
    g = torch.Generator().manual_seed(0)
    x, dn, before, weight = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in (*[(9, 96)] * 3, (96,)))
    total = torch.full((96,), 2.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = tuple(t.double().clone().requires_grad_() for t in (x, weight))
    wanted = reference.rms_norm(*leaves, 1e-3)
    dx, dweight = torch.autograd.grad(wanted, leaves, dn.double())
    for rows in (x, torch.cat((x, x), 1)[:, :96], x.t().contiguous().t()):
        assert_close("normed", _normed(rows, weight, 1e-3), wanted.detach(), tolerance)
        grad, sums = before.clone(), total.clone()
        _LayerRun._add_norm_backward(grad, dn.clone(), rows, weight, 1e-3, sums)
        assert_close("gradient", grad, before.double() + dx, 1.5 * tolerance)
        assert_close("weight's", sums, 2 + dweight, min(tolerance, 2e-6))
        _LayerRun._add_norm_backward(grad, dn.clone(), rows, weight, 1e-3, None)


# memory, counted


LLAMA = SHAPES["llama3_8b"] | {"width": 14336}


@pytest.mark.parametrize("attention_output", ["device", "host"])
@pytest.mark.parametrize("preset, most", [("lowest_memory", 6.5), ("fastest", 8.4)])
def test_peak_of_a_whole_layer_on_eight_ranks(preset, most, attention_output):
    """Llama3-8B, the machine's default kernel: everything counted, between 64K and 128K local tokens."""
    assert memory.PRESETS[preset]["memory"]["fused_layers"]
    found = live_layer.slopes(ranks=8, attention_output=attention_output, **live_layer.PRESETS[preset], **LLAMA)
    per_unit, constant, table = found["backward"]
    assert per_unit <= most and constant <= 0.7, (per_unit, constant, table)
    # The phase with the peak is the stages' at both lengths, or the slope would be of two things.
    assert found["stages"][:2] == (per_unit, constant)
    assert found["first forward"][0] < per_unit


@pytest.mark.parametrize(
    "ranks, width, overlap, walks",
    [
        (2, 2, False, (16, 16, 16)),     # a pass a stage, though k and v arrive in four of them
        (2, 2, True, (4, 4, 16)),        # the forward's stages are four times as wide
        (2, 32, True, (1, 1, 1)),
        (8, 8, False, (4, 4, 4)),
        (8, 8, True, (4, 4, 6)),         # k's and v's exchanges would take longer than the pass they save: two more each
    ],
)  # fmt: skip
@pytest.mark.parametrize("offload", ["none", "pinned"])
def test_passes_over_x(monkeypatch, ranks, width, overlap, walks, offload):
    """Of the first forward, the recomputed one and the backward, each with the norm computed again: `moved_bytes` counts as many."""
    passes, plain = [], _LayerRun.normed

    def counted(run):
        passes[-1] += 1
        return plain(run)

    walk = _LayerRun.walk

    def walked(run, *steps):
        passes.append(0)
        return walk(run, *steps)

    monkeypatch.setattr(_LayerRun, "normed", counted)
    monkeypatch.setattr(_LayerRun, "walk", walked)
    live_layer.layer_peaks(4096, ranks, heads_per_stage=width, overlap=overlap, offload=offload, **LLAMA)
    stages = 32 // width
    assert tuple(passes) == (walks if offload == "none" else (stages, stages, stages))


@pytest.mark.slow
def test_peak_on_two_ranks():
    """Where the tiles' constants no longer count."""
    for preset, most, lengths in (("lowest_memory", 4.3, (2**17, 2**18)), ("fastest", 4.6, (3 * 2**16, 2**18))):
        per_unit, constant, table = live_layer.slopes(lengths, ranks=2, **live_layer.PRESETS[preset], **LLAMA)["backward"]
        assert per_unit <= most and constant <= 0.7, table


def test_the_command_prints_a_table_that_adds_up(capsys):
    assert live_layer.main(["--ranks", "8", "--preset", "lowest_memory"]) == 0
    out = capsys.readouterr().out
    sizes = [float(line.split()[0]) for line in out.splitlines() if line.startswith("    ")]
    assert abs(sum(sizes[:-1]) - sizes[-1]) < 0.02 and "in all" in out
    assert live_layer.main(["--ranks", "8", "--heads-per-stage", "3"]) == 2
    assert "use one of" in capsys.readouterr().err


# on a GPU


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def gpu_layer(tokens, hidden=2048, heads=16, kv_heads=4, width=5632, mlp_tokens=MLP_TOKENS, head_dim=None, **modes):
    """A Llama layer in bf16 on a GPU, P = 1: the function, the plain layer, cos, sin, positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    d = head_dim or hidden // heads
    config = LlamaConfig(hidden_size=hidden, intermediate_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d,
                         attn_implementation="sdpa", max_position_embeddings=tokens)
    layer = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16).train()
    positions = torch.arange(tokens, device="cuda")[None]
    cos, sin = LlamaRotaryEmbedding(config).cuda()(layer.mlp.up_proj.weight, positions)
    block = BlockSpec(HeadSchedule(heads, kv_heads, 1), rank=0, group=None, head_dim=d, scale=d**-0.5,
                      kernel=select("auto", Case.of(cos, d)), **modes)
    spec = LayerSpec(block, layer.mlp.act_fn, config.rms_norm_eps, config.rms_norm_eps, mlp_tokens)
    architecture = models.of_model_type("llama")
    return lambda x: decoder_layer(x, weights_of(layer, architecture), cos, sin, spec), layer, cos, sin, positions, spec


@on_gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_bf16_on_a_gpu_is_no_worse_than_the_plain_layer(overlap):
    """10,000 tokens: more than one tile of the MLP and of rows."""
    function, layer, cos, sin, positions, spec = gpu_layer(10000, overlap=overlap)
    x, grad = (torch.randn(1, 10000, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plain, wide = copy.deepcopy(layer), copy.deepcopy(layer).float()
    found = {}

    def run(name, call, parameters, x, grad):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        found[name] = (y.detach(), *torch.autograd.grad(Own.apply(y), [leaf, *parameters], grad))

    def plainly(of, dtype):
        return lambda h: of(h, position_ids=positions, position_embeddings=(cos.to(dtype), sin.to(dtype)))

    run("ours", function, layer.parameters(), x, grad)
    run("plain", plainly(plain, torch.bfloat16), plain.parameters(), x, grad)
    run("right", plainly(wide, torch.float32), wide.parameters(), x.float(), grad.float())
    assert spec.counts.reused == 1
    names = ("y", "x", *(name for name, _ in layer.named_parameters()))
    for name, ours, plainly_, right in zip(names, found["ours"], found["plain"], found["right"]):
        assert relative_error(ours, right) <= 1.2 * relative_error(plainly_, right), name


@on_gpu
@pytest.mark.parametrize("preset", ["lowest_memory", "fastest"])
def test_peak_on_a_gpu_is_the_counted_one(preset):
    """P = 1, Llama3-8B's shape at 32K tokens: what `live_layer` counts."""
    tokens = 32768
    kernel = select("auto", Case("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 128)).name
    if kernel != "fa4":
        pytest.skip("only fa4's own memory is known with several query heads a kv head")
    modes = live_layer.PRESETS[preset]
    function, layer, *_ = gpu_layer(tokens, 4096, 32, 8, 14336, **modes)
    x = torch.randn(1, tokens, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    Own.apply(function(x)).sum().backward()      # workspace, autotuning
    x.grad = None
    torch.cuda.synchronize()

    class After(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.shape = y.shape
            return y.new_empty(())

        @staticmethod
        def backward(ctx, _):
            return torch.ones(ctx.shape, device="cuda", dtype=torch.bfloat16)

    first, again = layer_contexts()
    with first, torch.no_grad():
        function(x)
    with again:
        end = After.apply(function(x))
    for p in layer.parameters():
        p.grad = None
    workspace.clear()
    others = torch.cuda.memory_allocated() - x.numel() * 2 - 2 * tokens * 128 * 2
    torch.cuda.reset_peak_memory_stats()
    end.backward()
    measured = torch.cuda.max_memory_allocated() - others
    counted = live_layer.layer_peaks(tokens, 1, kernel=kernel, **LLAMA, **modes)["backward"][0]
    assert 0.85 * counted <= measured <= 1.05 * counted, (measured / 2**30, counted / 2**30)


@on_gpu
def test_T43_more_than_2_to_the_31_elements():
    """270,336 tokens of width 8192 and two narrow heads, against the plain layer: outputs and gradients of rows at both ends and
    around element 2**31, and of the weights."""
    tokens, hidden = 270336, 8192
    function, layer, cos, sin, positions, spec = gpu_layer(tokens, hidden, 2, 1, 1024, head_dim=128)
    x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    probes = [slice(0, 200), slice(2**31 // hidden - 100, 2**31 // hidden + 100), slice(tokens - 200, tokens)]
    found = {}
    for name in ("ours", "plain"):
        leaf = x.clone().requires_grad_()
        y = function(leaf) if name == "ours" else layer(leaf, position_ids=positions, position_embeddings=(cos, sin))
        rows = [y.detach()[:, probe].clone() for probe in probes]
        Own.apply(y).backward(x.flip(-1))
        del y
        rows += [leaf.grad[:, probe].clone() for probe in probes]
        found[name] = rows + [p.grad.clone() for p in layer.parameters()]
        del leaf
        layer.zero_grad()
    parts = [f"{what} of rows from {probe.start}" for what in ("output", "gradient") for probe in probes]
    for part, ours, plain in zip(parts + [name for name, _ in layer.named_parameters()], found["ours"], found["plain"], strict=True):
        assert relative_error(ours, plain) <= 2e-2, part
