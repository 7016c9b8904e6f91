"""One stored input for two layers, and attention outputs of some layers on the host: the gradients of the plain model, the bits
of the same stack without either, and what is on the host."""

import gc

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import upipe
from tests.plain import assert_close, data_of, plain_step, tiny_model
from tests.sharded import ds_config
from tests.test_offload import MODES, assert_same, checkpointed, config, gradients, ids_of, loss_of, model_of
from tests.test_stack import LLAMA_8B, TILES, configured, planned, stacked, window
from upipe import PreflightError, UPipeConfig, block, host
from upipe.apply import host_layers
from upipe.config import ConfigError
from upipe.layer import FusedLayersConfig, layer_contexts
from upipe.memory import GIB, Plan
from upipe.offload import CheckpointConfig, OffloadError, apply_checkpointing

LAYERS = 4


def plan_of(offload, pairs=0, tiles="five", fused=False, keep="auto", prefetch=True):
    saved = CheckpointConfig(offload, "auto" if offload == "none" else keep, prefetch=prefetch, staging_mib=1, staging_chunks=2, pairs=pairs)
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
        assert_close(name, again[0][1][name], expected, 1e-5 * (3 if name.endswith("k_proj.bias") else 1))
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
    "outputs alone": dict(fused=True, pairs=0, outputs=3, zero=1, sp=1),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_plain_model_and_without(worlds, case):
    worlds(2).run(check, **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["pinned", "pageable", "none"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sp, pairs, outputs, sequence", [(4, 2, 2, "odd"), (2, 1, 4, "batch2"), (1, 2, 0, "padded"), (4, 1, 1, "packed")])
def test_the_rest_of_the_grid(worlds, zero, offload, fused, sp, pairs, outputs, sequence):
    worlds(4).run(check, zero=zero, offload=offload, fused=fused, sp=sp, pairs=pairs, outputs=outputs, sequence=sequence,
                  accumulation=1 + zero % 2)  # fmt: skip
