"""Fused layers with their working tensors on the host (`offload_within_layer`): the plain model's gradients, the bits of the same
layers without, bytes, host memory, peaks, refusals."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import upipe
from tests.plain import assert_close, data_of, plain_step, tiny_model
from tests.sharded import ds_config
from tests.test_layer import CASES, check
from tests.test_stack import TILES, stacked, window
from upipe import block, host, workspace
from upipe.apply import host_layers
from upipe.layer import FusedLayersConfig, moved_bytes
from upipe.memory import GIB, Plan
from upipe.offload import CheckpointConfig
from upipe.schedule import HeadSchedule

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


def steps_of(plan, kind, sp, zero, accumulation, sequence, outputs, overlap):
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    model = tiny_model(kind, 8, 2, layers=LAYERS)
    settings = {"attention_output": "host", "attention_output_layers": outputs} if outputs else {}
    config = upipe.UPipeConfig(sp_size=sp, overlap=overlap, **settings)
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
          row_tile=3):
    common = dict(kind=kind, sp=sp, zero=zero, accumulation=accumulation, sequence=sequence, outputs=outputs, overlap=overlap)
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
        summed = ("o_proj", "q_norm", "k_norm")
        assert not [n for n in grads if not any(part in n for part in summed) and not torch.equal(grads[n], others[n])]
    for (a, _, _), (b, _, again) in zip(before[1:], after[1:], strict=True):
        assert abs(a - b) <= 1e-5 * abs(a) and again == numbers
    assert counts == (3 * LAYERS * accumulation, 0), counts
    assert report.waiting == 0 and report.kept_calls == 0 and report.paired_calls == pairs * accumulation
    assert held[1] == held[2], "host memory is made anew in every step"
    # Bytes, as the planner has them. Every layer's input is sent once: stored, or made again for the second of a pair.
    model = tiny_model(kind, 8, 2, layers=LAYERS)
    rows = report.bytes_to_host // (LAYERS * accumulation * model.config.hidden_size * 4)
    expected = [
        moved_bytes(
            HeadSchedule(8, 2, sp), rows, model.config.hidden_size, model.model.layers[0].self_attn.head_dim, 4, norm=kind == "qwen3",
            on_host=i in on_host, first_of_pair=i < 2 * pairs and i % 2 == 0,
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    for name in ("to_host", "to_device"):
        assert numbers[f"within_layers_{name}_gib"] * GIB == accumulation * sum(getattr(moved, name) for moved in expected), name


STEPS = {
    "pinned": dict(),
    "bits": dict(kind="qwen3", row_tile=8192, outputs=1),
    "pageable": dict(kind="qwen3", offload="pageable", zero=0, sp=1, accumulation=2),
    "output on the host": dict(kind="qwen2", outputs=2, zero=2, sequence="packed"),
    "overlap": dict(overlap=True, offload="pageable", accumulation=2),
    "pairs": dict(pairs=2, kind="qwen3"),
    "pairs, outputs on the host": dict(pairs=1, outputs=3, zero=1, sp=1, offload="pageable"),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_against_the_plain_model_and_without(worlds, case):
    worlds(2).run(steps, **STEPS[case])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["pinned", "pageable"])
@pytest.mark.parametrize("sp, pairs, outputs", [(4, 0, 0), (2, 2, 2), (1, 0, 4)])
def test_the_rest_of_the_grid(worlds, zero, offload, sp, pairs, outputs):
    worlds(4).run(steps, zero=zero, offload=offload, sp=sp, pairs=pairs, outputs=outputs, accumulation=1 + zero % 2, overlap=bool(zero % 2))
