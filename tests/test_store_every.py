"""One stored input for two layers, and attention outputs of some layers on the host: the gradients of the plain model, the bits
of the same stack without either, and what is on the host."""

import dataclasses
import gc
import json
import types
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import upipe
from tests.pairwise import half
from tests.plain import assert_close, data_of, plain_step, tiny_model
from tests.sharded import ds_config
from tests.test_offload import MODES, assert_same, checkpointed, config, gradients, ids_of, loss_of, model_of
from tests.test_stack import LLAMA_8B, TILES, configured, planned, stacked, window
from upipe import PreflightError, UPipeConfig, block, simulate, workspace
from upipe.apply import host_layers
from upipe.build import ModelConfig, hf_config
from upipe.config import ConfigError
from upipe.layer import FusedLayersConfig, apply_fused_layers, layer_contexts
from upipe.live import LiveStorages
from upipe.memory import GIB, Plan
from upipe.offload import CheckpointConfig, OffloadError, apply_checkpointing
from upipe.tiled import TilingConfig, apply_tiling

LAYERS = 4


def plan_of(offload, pairs=0, tiles="five", fused=False, keep="auto", prefetch=True):
    keep = "auto" if offload == "none" else keep
    saved = CheckpointConfig(offload, keep, prefetch=prefetch, staging_mib=1, staging_chunks=2, pairs=pairs)
    fused = FusedLayersConfig(5) if fused else None
    return Plan(TILES[tiles], saved, LAYERS, saved.sent(LAYERS), 0, 0, 0, fused=fused, pairs=pairs)


def steps_of(plan, kind, sp, zero, accumulation, sequence, outputs, steps=2, **block_settings):
    """Losses and gradients of optimizer steps, and what the last one moved; how often attention's forward ran in it."""
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    model = tiny_model(kind, 8, 2, layers=LAYERS)
    settings = {"attention_output": "host", "attention_output_layers": outputs} if outputs else {}
    found, forwards = [], [0]
    run = block._Run.forward

    def counted(self, copy):
        forwards[0] += 1
        return run(self, copy)

    block._Run.forward = counted
    try:
        with stacked(model, plan, UPipeConfig(sp_size=sp, **settings, **block_settings), ds_config(zero, accumulation)) as (stack, engine):
            for _ in range(steps):
                forwards[0] = 0
                found.append(window(stack, engine, data[stack.handle.dp_rank]))
            reports = stack.checkpointing._last
    finally:
        block._Run.forward = run
    return found, reports, forwards[0]


def check(kind="llama", sp=2, zero=3, accumulation=1, sequence="odd", offload="pinned", pairs=2, outputs=0, **more):
    """Against the plain model to 1e-5; against the stack without pairs and with every attention output made again bit for bit."""
    block_settings = {key: more.pop(key) for key in ("overlap", "dx") if key in more}
    common = dict(kind=kind, sp=sp, zero=zero, accumulation=accumulation, sequence=sequence, **block_settings)
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    plain = plain_step(tiny_model(kind, 8, 2, layers=LAYERS), data)
    # With dx in bf16 wo's gradient is summed otherwise from the host than from the device.
    before = outputs if block_settings.get("dx") == "bf16" else 0
    stored, _, _ = steps_of(plan_of("none", **more | {"keep": "auto"}), outputs=before, **common)
    plan = plan_of(offload, pairs, **more)
    again, report, forwards = steps_of(plan, outputs=outputs, **common)
    assert abs(again[0][0] - plain.loss) <= 1e-5 * abs(plain.loss)
    for name, expected in plain.grads.items():
        assert_close(name, again[0][1][name], expected)
    for (a, grads, _), (b, others, _) in zip(stored, again, strict=True):
        assert a == b and grads.keys() == others.keys()
        assert not [name for name in grads if not torch.equal(grads[name], others[name])]
    assert report.paired_calls == pairs * accumulation and report.waiting == 0
    kept = plan.checkpointing.kept(LAYERS)
    assert report.kept_calls == kept * accumulation
    # Of layers in pairs the first runs three times and the second twice; with the output on the host each runs once.
    on_host = host_layers(UPipeConfig(attention_output="host" if outputs else "device", attention_output_layers=outputs or None), LAYERS)
    runs = [1 if i in on_host else 3 if i < 2 * pairs and i % 2 == 0 else 2 for i in range(LAYERS)]
    assert forwards == sum(runs) * accumulation, (forwards, runs)


CASES = {
    "parts": dict(kind="qwen3", accumulation=2),
    "parts, outputs on the host": dict(zero=2, outputs=3, pairs=1, sequence="packed", offload="pageable"),
    "parts, dx in bf16": dict(zero=1, sp=1, outputs=1, dx="bf16", overlap=False),
    "fused": dict(fused=True, prefetch=False),
    "fused, outputs on the host": dict(kind="qwen3", fused=True, outputs=2, accumulation=2),
    "fused, on the device": dict(fused=True, sp=1, zero=0, offload="none", outputs=1),
    # A constant added to every k is nearly nothing to a softmax, but for the rotation: k_proj.bias has the smallest gradient for
    # the sums that make it, and the plain model in fp32 is itself up to 3e-6 off fp64 there (7e-6 with packed documents).
    "parts, biases": dict(kind="qwen2", outputs=2),
    "fused, biases, packed documents": dict(kind="qwen2", fused=True, sequence="packed"),
    "outputs alone": dict(fused=True, pairs=0, outputs=3, zero=1, sp=1),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_plain_model_and_without(worlds, case):
    worlds(2).run(check, **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("zero, offload, fused, what", half(
    zero=(0, 1, 2, 3), offload=("pinned", "pageable", "none"), fused=(False, True),
    what=((4, 2, 2, "odd"), (2, 1, 4, "batch2"), (1, 2, 0, "padded"), (4, 1, 1, "packed")),
))
def test_the_rest_of_the_grid(worlds, zero, offload, fused, what):
    sp, pairs, outputs, sequence = what
    worlds(4).run(check, zero=zero, offload=offload, fused=fused, sp=sp, pairs=pairs, outputs=outputs, sequence=sequence,
                  accumulation=1 + zero % 2)  # fmt: skip


@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("pairs, keep", [(1, "auto"), (1, 0), (2, "auto"), (2, 1)])
def test_bits_bytes_and_slabs(offload, pairs, keep):
    """Three steps: the bits without checkpointing; one slab for each input that is sent; a pair's comes back twice."""
    u, stored = 2 * 21 * 32 * 4, LAYERS - pairs
    kept = {"auto": 1 if pairs < 2 else 0}.get(keep, keep)
    sent = 0 if offload == "none" else stored - kept
    twice = 0 if offload == "none" else pairs - (kept if pairs == 2 else 0)
    plain, ours = model_of("qwen3"), model_of("qwen3")
    with checkpointed(ours, config(offload, pairs=pairs, keep_layers_on_gpu=keep)) as handle:
        for step in range(3):
            for model in (plain, ours):
                model.zero_grad()
                loss_of(model, ids_of(seed=step)).backward()
            assert_same(gradients(ours), gradients(plain))
            report = handle.end_step()
            assert (report.layer_calls, report.paired_calls, report.kept_calls) == (LAYERS, pairs, stored - sent)
            assert (report.bytes_to_host, report.bytes_to_device) == (sent * u, (sent + twice) * u)
            assert report.waiting == 0 and report.host_bytes - report.pinned_bytes in (0, sent * u)
            assert handle._store is None or len(handle._store._slabs) == sent
        assert f"{stored - sent} layer inputs on the device, {sent} on the host\n{pairs} pairs" in handle.report()


def test_dropout_is_the_same_in_every_run_of_a_layer():
    model = model_of("llama", attention_dropout=0.3)
    torch.manual_seed(3)
    loss_of(model, ids_of()).backward()
    expected = gradients(model)
    with checkpointed(model, config("pinned", pairs=2)):
        model.zero_grad()
        torch.manual_seed(3)
        loss_of(model, ids_of()).backward()
        assert_same(gradients(model), expected)


def test_the_first_input_is_not_on_the_device_while_the_second_layer_is_in_backward():
    """Of one pair: tensors of the width of a layer's input in the second layer's backward."""
    model, alive = model_of(layers=2), {}
    width = 2 * 21 * 32

    def count(name):
        gc.collect()
        alive[name] = sum(isinstance(t, torch.Tensor) and t.numel() == width and t.grad_fn is None for t in gc.get_objects())

    for offload in ("pinned", "none"):
        with checkpointed(model, config(offload, pairs=1, prefetch=False)):
            plain = model.model.layers[1].mlp.forward

            def forward(x, plain=plain, offload=offload):
                if torch._C._current_graph_task_id() != -1:
                    count(offload)
                return plain(x)

            model.model.layers[1].mlp.forward = forward
            loss_of(model, ids_of()).backward()
            model.model.layers[1].mlp.forward = plain
    assert alive["none"] > alive["pinned"] > 0, alive


@pytest.mark.parametrize("break_it, says", [
    (lambda model: model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 1.0, *args[1:])), "not given what layer 0"),
    (lambda model: model.model.layers[0].register_forward_hook(lambda m, args, out: out.mul_(1.0)), "not given what layer 0"),
    (lambda model: (model.model.embed_tokens.requires_grad_(False), model.model.layers[0].requires_grad_(False)), "both are trained"),
])  # fmt: skip
def test_what_lies_between_the_layers_of_a_pair_is_refused(break_it, says):
    model = model_of()
    with checkpointed(model, config("pinned", pairs=1)):
        break_it(model)
        with pytest.raises(OffloadError, match=says):
            loss_of(model, ids_of())


def wrapped(wrapper):
    """DistributedDataParallel and fully_shard a layer: gradients of the plain model, three windows."""
    from torch.distributed.fsdp import fully_shard

    data = data_of("odd", 1, 1)
    plain, model = plain_step(tiny_model("llama", 4, 2, layers=LAYERS), data), tiny_model("llama", 4, 2, layers=LAYERS).train()
    handle = upipe.apply(model, UPipeConfig(sp_size=2, attention_output="host", attention_output_layers=1))
    saved = apply_checkpointing(model, CheckpointConfig("pinned", pairs=2), contexts=block.checkpoint_contexts)
    if wrapper == "ddp":
        engine = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        engine = fully_shard(model)
    for _ in range(3):
        model.zero_grad()
        (batch,) = handle.shard(data[0])
        handle.loss(engine, batch).backward()
        for name, p in model.named_parameters():
            assert_close(name, p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, plain.grads[name], 1e-5)
        assert saved.end_step().paired_calls == 2


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_other_wrappers(worlds, wrapper):
    worlds(2).run(wrapped, wrapper=wrapper)


def trained(zero, fused, pairs, outputs):
    """Losses of six AdamW steps."""
    model = tiny_model("llama", 8, 2, layers=LAYERS)
    settings = {"attention_output": "host", "attention_output_layers": outputs} if outputs else {}
    ds, losses = ds_config(zero), []
    handle = upipe.apply(model, UPipeConfig(sp_size=2, **settings))
    parts = [apply_fused_layers(model, handle)] if fused else []
    contexts = layer_contexts if fused else block.checkpoint_contexts
    parts.append(apply_checkpointing(model, CheckpointConfig("pinned", pairs=pairs), contexts=contexts))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=ds, mpu=handle.mpu)
    engine.train()
    for _ in range(6):
        (batch,) = handle.shard(data_of("odd", 1, 1)[0])
        loss = handle.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if zero == 3:
            assert not [n for n, p in model.named_parameters() if p.ds_status.name == "AVAILABLE"]
    engine.destroy()
    for part in (*reversed(parts), handle):
        part.remove()
    assert not any(hasattr(m, "_upipe_layer") for m in model.modules())
    return losses


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_training_under_zero_3_takes_the_same_steps(worlds, fused):
    """Weights change, modules are gathered in the recorded order, and nothing stays gathered."""
    before, after = (worlds(2).run(trained, zero=3, fused=fused, pairs=pairs, outputs=outputs)[0] for pairs, outputs in ((0, 0), (2, 1)))
    assert before == after and before[-1] < before[0]


# which layers, and what is refused


def test_which_layers_keep_their_output_on_the_host():
    """Every other one from the first, so the first of every pair, then those between; the last is the last."""

    def of(count, layers=7):
        return sorted(host_layers(UPipeConfig(attention_output="host", attention_output_layers=count), layers))

    assert [of(n) for n in (0, 1, 3, 4, 5, 7, None)] == [[], [0], [0, 2, 4], [0, 2, 4, 6], [0, 1, 2, 4, 6], [*range(7)], [*range(7)]]
    assert of(7, 8) == [*range(7)] and host_layers(UPipeConfig(), 7) == frozenset()
    assert [CheckpointConfig("pinned", pairs=n).stored(5) for n in (0, 1, 2)] == [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 4]]
    assert [CheckpointConfig("pinned", pairs=n).sent(4) for n in (0, 1, 2)] == [3, 2, 2]


def refused():
    model = tiny_model("llama", 4, 2)
    for given, says in (
        (UPipeConfig(attention_output="host", attention_output_layers=3), "attention_output_layers=3 of 2 layers: use a number up to 2"),
        (UPipeConfig(attention_output="host", attention_output_layers=True), "attention_output_layers=True"),
        (UPipeConfig(attention_output="host", attention_output_layers="auto"), "settled from the length"),
        (UPipeConfig(attention_output_layers=1), "with attention_output='device'"),
    ):
        with pytest.raises(PreflightError, match=says):
            upipe.apply(model, given)
    with pytest.raises(PreflightError, match="pairs=2 of 2 layers: at most 1"):
        apply_checkpointing(model, CheckpointConfig("pinned", pairs=2))
    handle = upipe.apply(model, UPipeConfig(attention_output="host", attention_output_layers=1))
    assert "attention output of 1 layers on the host" in handle.report()
    handle.remove()


def test_refusals(worlds):
    worlds(1).run(refused)


@pytest.mark.parametrize(("sections", "message"), [
    ({"memory": {"pairs": 2}}, "pairs=2 with store_every=1"),
    ({"memory": {"pairs": 0, "store_every": 2, "offload": "pinned"}}, "pairs=0: must be positive"),
    ({"memory": {"store_every": 3}}, "store_every=3"),
    ({"memory": {"store_every": 2}}, "store_every=2 with memory.offload=none"),
    ({"memory": {"store_every": 2, "offload": "auto"}}, "set memory.offload: pinned or pageable"),
    ({"upipe": {"attention_output_layers": 2}}, "attention_output_layers=2 with upipe.attention_output=device"),
    ({"upipe": {"attention_output_layers": "all"}}, "attention_output_layers='all'"),
])
def test_settings_that_do_not_go_together(sections, message):
    with pytest.raises(ConfigError, match=message):
        configured("none", **sections)


def test_the_bytes_of_a_plan():
    """Llama3-8B, 512K tokens on two ranks: u is 2 GiB a rank. As many outputs as 30 GiB for the system leave room for."""
    pairs = planned("paper", memory={"store_every": 2, "pairs": 2})
    assert (pairs.sent_layers, pairs.kept_layers, pairs.host_bytes) == (29, 1, 58 * GIB)
    assert "29 layer inputs of 2 GiB to pinned host memory, 1 on the device, one for both layers of 2 pairs" in pairs.describe()
    every = planned("paper", memory={"store_every": 2})
    assert (every.pairs, every.sent_layers, every.kept_layers) == (16, 16, 0)
    each = 2 * GIB + 262144 * 32 * 4
    for outputs, expected in ((5, 5), (0, 0), ("auto", int((256 / 2 - 15 - 62) * GIB // each))):
        plan = planned("paper", upipe={"sp_size": 2, "attention_output": "host", "attention_output_layers": outputs})
        assert (plan.attention_layers, plan.attention_bytes) == (expected, expected * each), outputs
    assert f"attention outputs of {expected} of 32 layers there too, 2.03 GiB each" in plan.describe()
    auto = {"upipe": {"sp_size": 2, "attention_output": "host", "attention_output_layers": "auto"}}
    both = planned("paper", host=160, memory={"store_every": 2}, **auto)
    assert both.attention_layers == int((160 / 2 - 15 - 32) * GIB // each) and both.host_bytes <= (80 - 15) * GIB
    # A quarter of a small host is left to the system.
    assert planned("paper", host=80, memory={"store_every": 2, "offload": "pinned"}, **auto).attention_layers == 0
    assert planned("fastest", host=64).attention_layers == (64 * 3 / 4 / 2) * GIB // each == 11
    assert planned("fastest", upipe={"sp_size": 2, "attention_output": "device"}).attention_layers == 0


@pytest.mark.parametrize(("layers", "sections", "message"), [
    (31, {"memory": {"store_every": 2}}, "store_every=2 of 31 layers, an odd number: set memory.pairs to 15 or fewer"),
    (31, {"memory": {"store_every": 2, "pairs": 16}}, "pairs=16 of 31 layers: use 15 or fewer"),
    (32, {"upipe": {"sp_size": 2, "attention_output": "host", "attention_output_layers": 33}}, "attention_output_layers=33 of 32 layers"),
    (32, {"upipe": {"sp_size": 2, "attention_output": "host"}}, "Use store_every: 2 with more pairs, .*attention_output_layers: auto"),
])  # fmt: skip
def test_plans_that_cannot_be(layers, sections, message):
    with pytest.raises(ConfigError, match=message):
        planned("paper", host=100, sizes=dataclasses.replace(LLAMA_8B, layers=layers), **sections)


# on the device


class Away:
    """Stands for a `HostStore` of the meta device: what is sent takes nothing, what comes back is new."""

    def __init__(self, *_, **__):
        self._waiting, self.serials = {}, iter(range(10**6))

    def send(self, x):
        saved = types.SimpleNamespace(serial=next(self.serials), shape=x.shape, dtype=x.dtype)
        self._waiting[saved.serial] = saved
        return saved

    def receive(self, saved, last=True):
        if last:
            del self._waiting[saved.serial]
        return torch.empty(saved.shape, dtype=saved.dtype, device="meta")

    def holds(self, saved):
        return saved.serial in self._waiting

    def next_serial(self):
        return next(self.serials)

    def settle(self, saved):
        pass


class Before(torch.autograd.Function):
    """What precedes the layers: makes their input, and keeps nothing of it or of its gradient."""

    @staticmethod
    def forward(ctx, seed, shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    @staticmethod
    def backward(ctx, grad):
        return torch.empty(0, device="meta"), None


def backward_peak(case, tokens):
    """Bytes of the backward of one pair of layers whose input is on the host, everything full-width counted."""
    values = json.loads(case.shape)
    two = dataclasses.replace(case, shape=json.dumps(values | {"layer_types": ["full_attention"] * 2}))
    host = simulate._Host()
    live = host.live = LiveStorages()
    with simulate.without_a_device(case, host), mock.patch("upipe.offload.HostStore", Away):
        model = simulate._model(two)
        apply_tiling(model, TilingConfig(case.mlp_tokens, case.norm_tokens, case.loss_tokens))
        handle = simulate.apply_module.apply(
            model, UPipeConfig(case.ranks, attention_output=case.attention_output, overlap=case.overlap, dx=case.dx)
        )
        if case.fused:
            apply_fused_layers(model, handle, FusedLayersConfig(case.mlp_tokens))
        contexts = layer_contexts if case.fused else block.checkpoint_contexts
        apply_checkpointing(model, CheckpointConfig("pinned", 0, prefetch=False, pairs=1), contexts=contexts)
        live.know(*model.parameters(), *model.buffers())
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with live:
            y = Before.apply(torch.empty(0, device="meta", requires_grad=True), (1, tokens, values["hidden_size"]))
            positions = torch.empty(1, tokens, dtype=torch.int64, device="meta")
            d = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
            angles = tuple(torch.empty(1, tokens, d, dtype=torch.bfloat16, device="meta") for _ in range(2))
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
            for layer in model.model.layers:
                y = layer(y, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            end = simulate.After.apply(y)
            del y
            live.start()
            before = live.now - workspace.of(torch.device("meta")).bytes
            end.backward()
        return live.peak, before


@pytest.mark.parametrize("fused, output", [(True, "device"), (True, "host"), pytest.param(False, "host", marks=pytest.mark.slow)])
def test_a_pair_holds_no_more_than_a_layer(fused, output):
    """Llama3-8B, P = 8: the backward of a pair peaks where that of a layer does, or, as the planner has it, in the first layer's
    second forward beside the incoming gradient."""
    shape, tokens = simulate.shape_of(hf_config(ModelConfig(preset="llama3-8b"))), 65536
    case = simulate.Case(
        shape, 8, "fa4", overlap=False, fused=fused, attention_output=output, mlp_tokens=4096, norm_tokens=8192, loss_tokens=2048
    )
    single = simulate.simulate(case, (tokens,))
    u = tokens * 4096 * 2
    if fused:
        other = dataclasses.replace(case, attention_output={"host": "device", "device": "host"}[output])
        assert simulate.simulate(other, (tokens,)).backward == single.backward
    found, before = backward_peak(case, tokens)
    # cos, sin, positions: between forward and backward nothing of the layers is on the device but stage buffers.
    assert before < 0.1 * u
    assert found == pytest.approx(max(single.backward[0], single.forward[0] + u), rel=0.01)
