"""Fused layers with their working tensors on the host (`offload_within_layer`): the plain model's gradients, the bits of the same
layers without, bytes, host memory, peaks, refusals."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import upipe
from experiments import live_layer
from tests.pairwise import half
from tests.plain import assert_close, data_of, plain_step, tiny_model
from tests.sharded import ds_config
from tests.test_layer import CASES, LLAMA, Own, check, gpu_layer, on_gpu, one_layer
from tests.test_stack import TILES, configured, planned, stacked, window
from upipe import PreflightError, block, host, plan, simulate, workspace
from upipe.apply import host_layers
from upipe.build import ModelConfig, hf_config
from upipe.config import ConfigError
from upipe.layer import FusedLayersConfig, apply_fused_layers, layer_contexts, moved_bytes
from upipe.memory import GIB, Plan
from upipe.offload import CheckpointConfig, HostInput, OffloadError, apply_checkpointing, giving
from upipe.schedule import HeadSchedule
from upipe.simulate import Case, shape_of

LAYERS = 4


def in_tiles(function, **arguments):
    """With row tiles of a few rows, so that there are several."""
    with mock.patch.object(block, "ROW_TILE", 5):
        return function(**arguments)


def layers_in_tiles(**arguments):
    in_tiles(check, **arguments)


ONE_ROW = {name: case for name, case in CASES.items() if case.get("batch", 1) == 1}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["llama", "llama-ragged", "llama-wider-hidden", "qwen3", "mistral-checkpointed", "qwen3-checkpointed"])
def test_layer_is_the_plain_layer_in_fp64(worlds, case, ranks):
    offload = "pinned" if case.startswith("llama") else "pageable"
    worlds(ranks).run(layers_in_tiles, dtype=torch.float64, tolerance=1e-10, offload=offload, **ONE_ROW[case])


def plan_of(offload, within, pairs=0):
    """within: working tensors on the host too."""
    saved = CheckpointConfig(
        offload, 0, prefetch=False, staging_mib=1, staging_chunks=2, pairs=pairs, leave_on_host=within
    )
    fused = FusedLayersConfig(5, offload=offload if within else "none")
    return Plan(TILES["five"], saved, LAYERS, saved.sent(LAYERS), 0, 0, 0, fused=fused, pairs=pairs)


def steps_of(plan, kind, sp, zero, accumulation, sequence, outputs, overlap, ring=1):
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    model = tiny_model(kind, 8, 2, layers=LAYERS)
    settings = {"attention_output": "host", "attention_output_layers": outputs} if outputs else {}
    config = upipe.UPipeConfig(sp_size=sp, ring_degree=ring, overlap=overlap, **settings)
    found, held = [], []
    with stacked(model, plan, config, ds_config(zero, accumulation)) as (stack, engine):
        for _ in range(3):
            found.append(window(stack, engine, data[stack.handle.dp_rank]))
            block._give_back()
            held.append(host.pool().held_bytes)
            workspace.poison()
        counts = stack.fused.counts.reused, stack.fused.counts.copied
        report = stack.checkpointing._last
        on_host = host_layers(config, LAYERS) if outputs else []
    return found, report, counts, held, on_host


def steps(kind="llama", sp=2, zero=3, accumulation=1, sequence="odd", offload="pinned", pairs=0, outputs=0, overlap=False,
          row_tile=3, ring=1):
    common = dict(ring=ring, kind=kind, sp=sp, zero=zero, accumulation=accumulation, sequence=sequence, outputs=outputs, overlap=overlap)
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    plain = plain_step(tiny_model(kind, 8, 2, layers=LAYERS), data)
    with mock.patch.object(block, "ROW_TILE", row_tile):
        before, *_ = steps_of(plan_of(offload, False, pairs), **common)
        after, report, counts, held, on_host = steps_of(plan_of(offload, True, pairs), **common)
    assert abs(after[0][0] - plain.loss) <= 1e-5 * abs(plain.loss)
    for name, expected in plain.grads.items():
        assert_close(name, after[0][1][name], expected, 1e-5 * (3 if name.endswith("k_proj.bias") else 1))
    (loss, grads, _), (other, others, numbers) = before[0], after[0]
    assert loss == other and grads.keys() == others.keys()
    if row_tile > 100:
        # What is summed over tiles rather than at once has other bits, nothing else.
        assert not [n for n in grads if "o_proj" not in n and not torch.equal(grads[n], others[n])]
    for (a, _, _), (b, _, again) in zip(before[1:], after[1:], strict=True):
        assert abs(a - b) <= 1e-5 * abs(a) and again == numbers
    assert counts == (3 * LAYERS * accumulation, 0), counts
    assert report.waiting == 0 and report.kept_calls == 0 and report.paired_calls == pairs * accumulation
    assert held[1] == held[2], "host memory is made anew in every step"
    # Bytes, as the planner has them. Every layer's input is sent once: stored, or made again for the second of a pair.
    model = tiny_model(kind, 8, 2, layers=LAYERS)
    width, head_dim = model.config.hidden_size, model.model.layers[0].self_attn.head_dim
    # Of all micro-batches, whose lengths differ.
    rows = report.bytes_to_host // (LAYERS * width * 4)
    expected = [
        moved_bytes(
            HeadSchedule(8, 2, sp // ring), rows, width, head_dim, 4, norm=kind == "qwen3",
            on_host=i in on_host, first_of_pair=i < 2 * pairs and i % 2 == 0,
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    for name in ("to_host", "to_device"):
        moved = numbers[f"within_layers_{name}_gib"] * GIB, sum(getattr(each, name) for each in expected)
        assert moved[0] == moved[1], (name, moved, rows)


STEPS = {
    "pinned": dict(),
    "bits": dict(kind="qwen3", row_tile=8192, outputs=1),
    "pageable": dict(kind="qwen3", offload="pageable", zero=0, sp=1, accumulation=2),
    "output on the host": dict(kind="qwen2", outputs=2, zero=2, sequence="packed"),
    "overlap": dict(overlap=True, offload="pageable", accumulation=2),
    "pairs": dict(pairs=2, kind="qwen3"),
    "ring": dict(ring=2, zero=1, offload="pageable"),
    "pairs, outputs on the host": dict(pairs=1, outputs=3, zero=1, sp=1, offload="pageable"),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_against_the_plain_model_and_without(worlds, case):
    worlds(2).run(steps, **STEPS[case])


@pytest.mark.slow
@pytest.mark.parametrize("zero, offload, what", half(
    zero=(0, 1, 2, 3), offload=("pinned", "pageable"), what=((4, 0, 0), (2, 2, 2), (1, 0, 4)),
))
def test_the_rest_of_the_grid(worlds, zero, offload, what):
    sp, pairs, outputs = what
    worlds(4).run(steps, zero=zero, offload=offload, sp=sp, pairs=pairs, outputs=outputs, accumulation=1 + zero % 2, overlap=bool(zero % 2))


# one layer


def offloaded_layer(offload="pinned", **modes):
    """As `one_layer`, with its working tensors on the host."""
    function, layer, x, grad, want, counts = one_layer(**modes)
    (spec,) = (cell.cell_contents for cell in function.__closure__ if hasattr(cell.cell_contents, "mlp_tokens"))
    object.__setattr__(spec, "offload", offload)
    return function, spec, x, grad, want, counts


@pytest.mark.parametrize("attention_output", ["device", "host"])
def test_a_gradient_that_others_hold_is_left_alone_and_a_second_backward_is_right(attention_output):
    function, spec, x, grad, want, counts = offloaded_layer(attention_output=attention_output)
    before, y = grad.clone(), function(x)
    for _ in range(2):
        x.grad = None
        y.backward(grad, retain_graph=True)
        assert torch.equal(grad, before)
        assert_close("x", x.grad, want["x"], 1e-10)
    assert (counts.reused, counts.copied) == (0, 2)
    x.grad = None
    Own.apply(function(x)).backward(grad)
    assert_close("x", x.grad, want["x"], 1e-10)
    assert (counts.reused, counts.copied) == (1, 2) and spec.moved.to_host > 0 < spec.moved.to_device


def test_the_gradient_is_let_go_and_the_input_is_never_here():
    """What the layer is handed has no memory once it is on the host; the input's rows come from there alone."""
    function, spec, x, grad, want, _ = offloaded_layer("pageable")
    handed = []

    class Handed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, _):
            given = grad.clone()
            handed.append(given.untyped_storage()._weak_ref())
            return given

    first, again = layer_contexts()
    with first, torch.no_grad():
        assert_close("y", function(x), want["y"], 1e-10)
    given, stand_in = HostInput(x.detach().clone()), torch.full((1,), torch.nan, dtype=x.dtype).expand(x.shape).requires_grad_()
    plain, gone = block._Run._walk_back, []

    def walk_back(self, *args):
        gone.append(torch.UntypedStorage._expired(handed[0]))
        return plain(self, *args)

    with mock.patch.object(block._Run, "_walk_back", walk_back):
        with again, giving(given):
            y = function(stand_in)
        Handed.apply(y).backward(grad)
    assert given.taken and gone == [True]
    assert_close("x", stand_in.grad, want["x"], 1e-10)
    torch.UntypedStorage._free_weak_ref(handed[0])


def test_host_memory_is_given_back():
    host.pool().clear()
    function, spec, x, grad, *_ = offloaded_layer()
    held = []
    for _ in range(3):
        x.grad = None
        Own.apply(function(x)).backward(grad)
        block._give_back()
        assert not host.pool()._used
        held.append(host.pool().held_bytes)
    assert held[0] == held[1] == held[2] > 0
    del function


# refusals


def test_settings_that_do_not_fit_are_refused():
    function, spec, x, *_ = offloaded_layer()
    with pytest.raises(ValueError, match="2 rows a batch.*micro-batches of one"):
        function(torch.cat((x, x)))
    with pytest.raises(PreflightError, match="offload='disk': use none, pinned or pageable"):
        type(spec)(spec.block, spec.act, 1e-6, 1e-6, offload="disk")
    kept = dict(offload="pinned", prefetch=False, keep_layers_on_gpu=1)
    for wrong in (dict(offload="none", prefetch=False), dict(offload="pinned"), kept):
        with pytest.raises(ValueError, match='leave_on_host=True with offload=.* use offload="pinned" or "pageable"'):
            CheckpointConfig(leave_on_host=True, **wrong)


def refused():
    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=1))
    with pytest.raises(PreflightError, match="offload='disk'"):
        apply_fused_layers(model, handle, FusedLayersConfig(offload="disk"))
    # An input that stays on the host is for layers that read it there.
    saved = apply_checkpointing(
        model, CheckpointConfig("pinned", prefetch=False, leave_on_host=True), contexts=block.checkpoint_contexts
    )
    model.train()
    data = data_of("odd", 1, 1)[0]
    batch = next(iter(handle.shard(data)))
    with pytest.raises(OffloadError, match="LlamaDecoderLayer did not read its input from the host"):
        model(**{k: v for k, v in batch.items() if k in ("input_ids", "position_ids")}).logits.sum().backward()
    saved.remove()
    fused = apply_fused_layers(model, handle, FusedLayersConfig(offload="pinned"))
    with pytest.raises(OffloadError, match="moved 0 bytes to the host and 0 back"):
        fused.end_step()
    assert "working tensors in pinned host memory: 0.00 GiB to the host" in fused.report()
    fused.remove()
    layer = model.model.layers[1]
    layer.__class__ = type("Other", (type(layer),), {})
    with pytest.raises(PreflightError, match="of which 1 cannot be fused .layer 1, Other"):
        apply_fused_layers(model, handle, FusedLayersConfig(offload="pinned"))


def test_apply_refuses_what_does_not_fit(worlds):
    worlds(1).run(refused)


WITHIN = {"fused_layers": True, "offload": "pinned", "prefetch": False, "offload_within_layer": True}


@pytest.mark.parametrize("sections, told", [
    ({"memory": {"fused_layers": False}}, "memory.fused_layers=False"),
    ({"memory": {"offload": "auto"}}, "memory.offload=auto"),
    ({"memory": {"keep_layers_on_gpu": 1}}, "memory.keep_layers_on_gpu=1"),
    ({"memory": {"prefetch": True}}, "memory.prefetch=True"),
    ({"memory": {"pinned_fallback": True}}, "memory.pinned_fallback=True"),
    ({"train": {"micro_batch_size": 2}}, "train.micro_batch_size=2"),
])
def test_configurations_that_do_not_fit_are_refused(sections, told):
    with pytest.raises(ConfigError, match=f"offload_within_layer=true with {told}: .*use memory.fused_layers: true"):
        configured("none", **sections | {"memory": WITHIN | sections.get("memory", {})})
    assert configured("none", memory=WITHIN).memory.offload_within_layer


def test_the_bytes_of_a_plan():
    """Llama3-8B, 512K tokens on two ranks: u is 2 GiB; the gradient and the attention output take one each, and the input of a pair's
    second layer. No input stays on the device."""
    found = planned("none", memory=WITHIN)
    assert (found.sent_layers, found.kept_layers, found.working_bytes, found.host_bytes) == (32, 0, 4 * GIB, 68 * GIB)
    assert (found.fused.offload, found.checkpointing.leave_on_host) == ("pinned", True)
    assert "a layer's working tensors too, 4 GiB" in found.describe()
    assert planned("none", memory=WITHIN | {"store_every": 2}).working_bytes == 6 * GIB
    with pytest.raises(ConfigError, match="working tensors of a layer of 4.00 GiB.*offload_within_layer: false"):
        planned("none", host=100, memory=WITHIN)


# peaks


@pytest.mark.parametrize("ranks, stages", [(8, 3.336), pytest.param(2, 1.268, marks=pytest.mark.slow)])
def test_peak_of_a_whole_layer(ranks, stages):
    """Slopes in u to 1 %, x and the gradients counted. Stages, eight ranks: k, v 0.5, q, dO, the attention output 0.25 each, dk and dv
    of the kernel 0.5, its fp32 dq 0.508, their sums 1, cos and sin 0.0625, log-sum-exp 0.016."""
    found = live_layer.slopes((262144, 524288), ranks=ranks, **LLAMA, **live_layer.PRESETS["offload_within_layer"])
    by_hand = {"first forward": 2.0625, "stages": stages, "row tiles": 1.078 + 0.5, "MLP": 0.078}
    for phase, units in by_hand.items():
        assert found[phase][0] == pytest.approx(units, rel=0.01), phase
    assert found["backward"][0] == pytest.approx(max(stages, by_hand["row tiles"]), rel=0.01)
    assert found["stages"][1] <= 0.7


@pytest.mark.slow
def test_the_planner_s_simulation_finds_the_same():
    shape = shape_of(hf_config(ModelConfig(preset="llama3-8b")))
    settings = dict(overlap=False, fused=True, mlp_tokens=4096, loss_tokens=1024, norm_tokens=2048)
    within, plain = (
        simulate.simulate(Case(shape, 8, "fa4", offload_within_layer=on, **settings), (262144, 524288)) for on in (True, False)
    )
    unit = 2 * json.loads(shape)["hidden_size"]
    assert within.slope("backward") / unit == pytest.approx(3.336, rel=0.01)
    assert plain.slope("backward") / unit == pytest.approx(6.336, rel=0.01)
    assert plain.slope("forward") / unit == pytest.approx(within.slope("forward") / unit + 1, rel=0.01)
    assert plain.slope("loss") / unit == pytest.approx(within.slope("loss") / unit + 1, rel=0.01)
    assert within.host == 0


# the planner


def test_the_planner_takes_it_where_nothing_else_fits():
    machine = plan.Machine.parse("8xH100-80GB")
    shorter, longer = plan.fit("llama3-8b", 5 * 2**20, machine), plan.fit("llama3-8b", 11 * 2**20, machine)
    assert not shorter.run.memory.offload_within_layer and longer.run.memory.offload_within_layer
    u = longer.tokens * 4096 * 2 / 8 / GIB
    assert longer.host["working tensors"] == pytest.approx(8 * 3 * u) and longer.pairs == 16
    assert sum(longer.phases.values()) and longer.device_gib < 77
    # Over 25 u a layer are waited for; even so they are some 2 % of the step.
    moved = moved_bytes(HeadSchedule(32, 8, 8), longer.tokens // 8, 4096, 128, 2, norm=False, on_host=False)
    assert moved.to_host / GIB == pytest.approx(5 * u) and moved.to_device / GIB == pytest.approx(20 * u)
    assert 0.005 < longer.time["host copies not hidden"] / longer.time_s < 0.05
    assert plan.fit("llama3-8b", 11 * 2**20, machine, ["memory.prefetch=true"]) is None


# on a GPU


@on_gpu
@pytest.mark.parametrize("offload", ["pinned", "pageable"])
@pytest.mark.parametrize("overlap", [True, False])
def test_copies_beside_computation_on_a_gpu(overlap, offload):
    """20,000 tokens in bf16: several tiles of everything; ten runs with the gradients of the layer without, the order of streams being
    what could be wrong."""
    function, layer, *_, spec = gpu_layer(20000, overlap=overlap)
    x, grad = (torch.randn(1, 20000, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def gradients():
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(Own.apply(y), [leaf, *layer.parameters()], grad)

    wanted = gradients()
    object.__setattr__(spec, "offload", offload)
    for _ in range(10):
        for a, b in zip(gradients(), wanted):
            assert float((a - b).float().norm() / b.float().norm()) < 1e-2
