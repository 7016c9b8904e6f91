"""A step by part: a made-up trace by hand, real steps of every way to train, and that naming the parts changes nothing."""

import json

import pytest
import torch
from torch import nn

from experiments import block_trace
from tests.test_profiling import span
from upipe import block, parts, profiling
from upipe.parts import (
    ALL_TO_ALL,
    ATTENTION,
    LOSS,
    MLP,
    NORM,
    OFFLOAD,
    OPTIMIZER,
    OTHER,
    OUTPUT,
    PARTS,
    PREFIX,
    PROJECTION,
    ZERO,
    Named,
)
from upipe.profiling import IDLE, by_part

WIDE = {
    "architecture": "qwen3", "hidden_size": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate_size": 768, "vocab_size": 2048,
}  # fmt: skip
OTHER_SHARE = 0.15
"""Most that `other` may be of the computation of layers, loss and other, in `WIDE` at 256 tokens a rank. Measured 0.01 to 0.08."""


def made_up():
    """A step on two host threads with spans and one without, on three streams of a GPU; times in us."""
    named = [
        (PROJECTION, 0, 10, 1), (ATTENTION, 11, 20, 1), (ALL_TO_ALL, 12, 14, 1), (MLP, 21, 30, 1), (ZERO, 22, 23, 1), (NORM, 44, 46, 2),
        (OPTIMIZER, 60, 70, 1),
    ]  # fmt: skip
    work = [
        # category, name, launched at, on thread, start, end
        ("kernel", "nvjet_tst", 5, 1, 1000, 1100),
        ("kernel", "ncclDevKernel_SendRecv", 13, 1, 1050, 1200),            # 50 under the product, 50 under attention
        ("kernel", "flash_fwd_kernel", 15, 1, 1150, 1300),
        ("kernel", "ncclDevKernel_AllGather", 22.5, 1, 1280, 1400),         # 20 under attention, 50 under the MLP
        ("kernel", "nvjet_tst", 25, 1, 1350, 1450),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 26, 5, 1400, 1500),  # 50 under the MLP; then idle for 100
        ("kernel", "nvjet_tst", 42, 2, 1600, 1700),                         # in the backward's node
        ("kernel", "elementwise", 45, 2, 1650, 1750),                       # beside it for 50
        ("kernel", "ncclDevKernel_ReduceScatter", 47, 2, 1690, 1720),       # hidden
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 65, 1, 1750, 1770),
        ("kernel", "multi_tensor_apply", 66, 1, 1770, 1800),
        ("gpu_memset", "Memset (Device)", 80, 1, 1800, 1810),
    ]
    events = [span("user_annotation", PREFIX + part, start, end, tid) for part, start, end, tid in named]
    events += [span("cpu_op", "aten::mm", 25, 26, 1), span("cpu_op", "MmBackward0", 40, 50, 2, **{"Sequence number": 3})]
    link = {"cat": "fwdbwd", "name": "fwdbwd", "id": 9, "pid": 1}
    events += [link | {"ph": "s", "ts": 25, "tid": 1}, link | {"ph": "f", "ts": 40, "tid": 2}]
    for n, (category, name, at, thread, start, end) in enumerate(work):
        if name == "multi_tensor_apply":  # whose launch the profiler has not seen, but the operator that it came from
            events.append(span("cpu_op", "aten::_fused_adamw_", at, at + 1, thread, **{"External id": 33}))
            events.append(span(category, name, start, end, 7, correlation=n, **{"External id": 33}))
            continue
        events.append(span("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, thread, correlation=n))
        events.append(span(category, name, start, end, 7, correlation=n))
    return events


WANTED = {
    PROJECTION: 0.100, ALL_TO_ALL: 0.050, ATTENTION: 0.150, OUTPUT: 0.0, MLP: 0.175, NORM: 0.075, LOSS: 0.0, OFFLOAD: 0.050,
    OPTIMIZER: 0.050, ZERO: 0.050, OTHER: 0.010, IDLE: 0.100,
}  # fmt: skip


def test_every_moment_of_a_made_up_step_belongs_to_one_part():
    found = by_part(made_up())
    assert found.ms == pytest.approx(WANTED) and list(found.ms) == [*PARTS, IDLE]
    assert found.window_ms == pytest.approx(0.810) == pytest.approx(sum(WANTED.values()))
    assert found.communication_ms == pytest.approx({ALL_TO_ALL: 0.150, ZERO: 0.150, OFFLOAD: 0.100})
    moved = [event | {"tid": 5} if event["cat"] == "cuda_runtime" else event for event in made_up()]
    found = by_part(moved)
    assert found.ms[OTHER] > 0.5, "a launch counts on its own thread alone"
    assert found.communication_ms == pytest.approx({ALL_TO_ALL: 0.150, ZERO: 0.150, OFFLOAD: 0.120}), "there exchanges go by their names"
    unlinked = by_part([event for event in made_up() if event["cat"] != "fwdbwd"]).ms
    assert unlinked[MLP] == pytest.approx(0.100) and unlinked[OTHER] == pytest.approx(0.085)


def test_the_summary_of_a_trace_has_its_parts():
    said = block_trace.summary(made_up())
    assert said["parts_ms"] == pytest.approx(WANTED) and said["window_ms"] == pytest.approx(0.810)
    assert said["idle_ms"] == pytest.approx(said["parts_ms"][IDLE])
    assert said["communication"]["exposed_ms"] == pytest.approx(0.170)       # all-to-all, ZeRO, offload and the optimizer's copy
    bare = [event for event in made_up() if event["cat"] != "user_annotation"]
    assert "parts_ms" not in block_trace.summary(bare)
    with pytest.raises(ValueError, match="no parts"):
        by_part(bare)
    with pytest.raises(ValueError, match="nothing ran"):
        by_part([span("user_annotation", PREFIX + MLP, 0, 1)])


def state(rows, model):
    """What naming changes: attributes of the table, hooks of the modules."""
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    return [vars(row.owner)[row.attribute] for row in rows], hooks


def test_names_are_taken_off_again_and_a_name_that_is_gone_is_refused():
    from upipe.build import ModelConfig, build_model

    model = build_model(ModelConfig(**WIDE, layers=1), seed=0)
    rows = parts.table() + parts._rotations(model)
    assert len({(id(row.owner), row.attribute) for row in rows}) == len(rows) > 80
    before = state(rows, model)
    with pytest.raises(KeyError), parts.named(model):
        during = state(rows, model)
        raise KeyError
    after = state(rows, model)
    assert all(a is not b for a, b in zip(before[0], during[0])) and before[1] != during[1]
    assert all(a is b for a, b in zip(before[0], after[0])) and before[1] == after[1]
    # Inherited is not defined: setting it there would not be undone by setting it back.
    for owner, attribute in ((block._Run, "vanished"), (type(model), "named_modules")):
        found = [*rows, Named(owner, attribute, MLP)]
        with pytest.raises(AttributeError, match=f"{owner.__name__} does not define {attribute}"), parts.named(model, found):
            pass
    assert all(a is b for a, b in zip(before[0], state(rows, model)[0]))


def steps(settings, folder):
    """Of each setting two steps, and the same step traced: losses, gradient norms, gradients in place; times by part."""
    import torch.distributed as dist

    from experiments import stack_methods
    from experiments.stack_methods import Engine, Setting, Shape, named_kernel
    from upipe.traffic import Traffic

    stack_methods.MODELS["wide"] = WIDE
    found, ranks = {}, dist.get_world_size()
    for text in settings:
        setting = Setting.parse(text)
        engine = Engine(Shape("wide", 2, ranks, "float32"), [setting], named_kernel("reference"))
        engine.activate(setting)
        batch = engine.batch(256 * ranks)

        def step(engine=engine, batch=batch):
            loss = float(engine.step(batch))
            after = engine.after_step()
            counts = [vars(part.counts) for part in stacked(engine.model, "_fused")]
            counts += [vars(c) for part in stacked(engine.model, "_tiling") for c in (part.mlp_counts, part.norm_counts)]
            return loss, after["grad_norm"], after.get("gradients_shared"), json.loads(json.dumps(counts))

        first, second = step(), step()
        path = f"{folder}/{setting.name}{len(found)}-{dist.get_rank()}.json"
        # As `experiments.stack --profile` does, inside of what counts bytes.
        with profiling.trace(engine.engine, path) as trace, Traffic():
            traced = step()
        engine.close()
        found[text] = {"steps": (first, second, traced), "table": trace.table(), **vars(trace.parts)}
    return found


def stacked(model, name):
    """What was put on a model under a name, once each."""
    return list({id(p): p for m in model.modules() for p in [getattr(type(m), name, None)] if p is not None}.values())


LAYERS = (PROJECTION, OUTPUT, MLP, NORM, LOSS)


def check(found, ranks):
    for setting, of in found.items():
        first, second, traced = of["steps"]
        assert traced[:3] == second[:3] == first[:3], setting
        grown = [{key: late[key] - early[key] for key in late} for early, late in zip(first[3], second[3])]
        assert [{key: late[key] - early[key] for key in late} for early, late in zip(second[3], traced[3])] == grown, setting
        ms, moving = of["ms"], of["communication_ms"]
        assert sum(ms.values()) == pytest.approx(of["window_ms"]) and min(ms.values()) >= 0, setting
        # DeepSpeed's offload leaves tensors of the CPU alone.
        offload = "checkpoint=off" not in setting and setting != "alst"
        missing = [part for part in PARTS if not ms[part] > 0 and part not in (ALL_TO_ALL, ZERO, OFFLOAD)]
        missing += [OFFLOAD] * (offload and not ms[OFFLOAD] > 0)
        missing += [part for part in (ALL_TO_ALL, ZERO) if ranks > 1 and not moving[part] > 0]
        assert not missing, (setting, missing, ms)
        assert ranks > 1 or moving[ALL_TO_ALL] == 0
        share = ms[OTHER] / (ms[OTHER] + sum(ms[part] for part in LAYERS))
        assert share < OTHER_SHARE, (setting, share, ms)
        assert f"  {MLP:<11}{ms[MLP]:>11.1f}" in of["table"]


@pytest.mark.parametrize("ranks,settings", [
    (1, ("plain:checkpoint=off,tiles=off,loss=hf", "upipe:device,layer=fused")),
    (2, ("ulysses", "upipe:host")),
    pytest.param(1, ("plain:tiles=loss", "upipe:host,layer=fused,within=on,prefetch=off", "upipe:U=H,tiles=off"), marks=pytest.mark.slow),
    pytest.param(2, ("upipe:device", "upipe:host,layer=fused", "alst"), marks=pytest.mark.slow),
    pytest.param(2, ("ring", "fpdt:chunk=128", "ulysses:rope=model", "upipe:host,dx=bf16,tiles=off"), marks=pytest.mark.slow),
])
def test_parts_of_real_steps(worlds, tmp_path, ranks, settings):
    for found in worlds(ranks).run(steps, settings=settings, folder=str(tmp_path), timeout=400.0):
        check(found, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_trace_has_its_parts():
    from upipe.build import ModelConfig, build_model

    model = build_model(ModelConfig(**WIDE, layers=2), seed=0).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(WIDE["vocab_size"], (1, 4096), device="cuda")

    def step():
        nn.functional.cross_entropy(model(input_ids=ids, use_cache=False).logits[0], ids[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    said = block_trace.summary(block_trace.trace(step, lambda: None, parts.named(model)))
    ms = said["parts_ms"]
    assert sum(ms.values()) == pytest.approx(said["window_ms"]) and ms[IDLE] == pytest.approx(said["idle_ms"])
    assert not [part for part in (PROJECTION, ATTENTION, OUTPUT, MLP, NORM, LOSS, OPTIMIZER) if not ms[part] > 0]
    # Backward is launched by autograd's own thread: most of a part's time, and all of it would be other.
    assert ms[OTHER] < 0.3 * (said["window_ms"] - ms[IDLE])
