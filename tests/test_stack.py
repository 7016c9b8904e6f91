"""The memory stack as a whole: tiles, offload and the attention block's settings together against plain Hugging Face, in fp32 to
1e-5, and recomputed against stored, bit for bit; presets, what is refused, and training runs.

Real gloo ranks and real copies to host memory. Tiles are of a few tokens, so that every case has many.
"""

import contextlib
import dataclasses
import importlib
from types import SimpleNamespace
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import GemmaConfig, LlamaConfig

from experiments import train_point
from tests import training
from tests.pairwise import every_value, further, pairwise
from tests.plain import SEQUENCES, assert_close, data_of, plain_step, relative_error, shifted, tiny_model
from tests.sharded import ds_config, gradients
from upipe import PreflightError, UPipeConfig, host, preflight
from upipe.build import ModelConfig, ModelSizes, model_sizes
from upipe.check import _plain_gradients
from upipe.config import ConfigError, from_mapping, to_mapping
from upipe.layer import FusedLayersConfig
from upipe.loss import LossTerms
from upipe.memory import GIB, PRESETS, MemoryConfig, Plan, apply_stack, fill, make_plan
from upipe.methods import MethodConfig, apply_method
from upipe.metrics import read_metrics
from upipe.offload import CheckpointConfig
from upipe.outcomes import explain
from upipe.tiled import TilingConfig
from upipe.trainer import RunConfig, Trainer, build_optimizer, deepspeed_config

TOLERANCE = 1e-5
TILES = {"none": None, "five": TilingConfig(5, 3, 4), "loss": TilingConfig(None, None, 6), "one": TilingConfig(1, 1, 1)}
OFFLOADS = ("none", "device", "pinned", "pageable")
MASKED = ("none", "tile", "rank", "batch")


def plan_of(tiles, offload, prefetch=True, keep=0, fused=False):
    """A plan of the parts as given; "none" leaves checkpointing to the caller, "device" is ours without offload."""
    checkpointing = None
    if offload != "none":
        mode = "none" if offload == "device" else offload
        checkpointing = CheckpointConfig(mode, keep if mode != "none" else "auto", prefetch=prefetch, staging_mib=1, staging_chunks=2)
    sent = 2 - keep if offload in ("pinned", "pageable") else 0
    return Plan(TILES[tiles], checkpointing, 2, sent, 0, 0, 0, fused=FusedLayersConfig(5) if fused else None)


@contextlib.contextmanager
def stacked(model, plan, config, ds):
    """(stack, engine) of a plain model, taken down at the end, after which the model is plain again."""
    classes = [type(m) for m in model.modules()]
    stack = apply_stack(model, plan, config, ds)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds, mpu=stack.handle.mpu
    )
    engine.train()
    yield stack, engine
    engine.destroy()
    stack.remove()
    assert [type(m) for m in model.modules()] == classes


def window(stack, engine, batches):
    """Loss and whole gradients of one accumulation window, and what its step moved."""
    total, grads = 0.0, None
    for i, batch in enumerate(stack.handle.shard(batches, accumulation=len(batches))):
        value = stack.handle.loss(engine, batch)
        total += float(value.detach()) / len(batches)
        engine.backward(value)
        if i + 1 == len(batches):
            grads = gradients(engine)
        engine.step()
    return total, grads, stack.end_step()


def hide(data, what, sp):
    """Take the labels of the first tokens of a rank, of a rank, or of the whole first micro-batch (of data rank 0) away."""
    if what == "none":
        return data
    batch = data[0][0]
    labels = batch["labels"]
    L = -(-labels.shape[1] // sp)
    place = {"tile": slice(L if sp > 1 else 0, (L if sp > 1 else 0) + 5), "rank": slice(L, None) if sp > 1 else slice(0, L // 2)}
    labels[:, place.get(what, slice(None))] = -100
    return data


FACTORS = {
    "model": ("llama", "qwen3", "tied"),
    "sp": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 3),
    "sequence": SEQUENCES,
    "masked": MASKED,
    "tiles": tuple(TILES),
    "offload": OFFLOADS,
    "block": (("device", True, "gemm"), ("host", True, "gemm"), ("host", False, "bf16"), ("device", False, "bf16")),
    "prefetch": (True, False),
    "keep": (0, 1),
    "layer": ("parts", "fused"),
}


def name_of(case):
    return "-".join(f"{v}" if not isinstance(v, tuple) else "".join(map(str, v)) for v in case.values())


def check(case):
    """One case, on every rank of a world of 4: one window against the plain model, then what moved."""
    sp, accumulation = case["sp"], case["accumulation"]
    kind, tied = ("qwen2", True) if case["model"] == "tied" else (case["model"], False)
    output, overlap, dx = case["block"]
    data = hide(data_of(case["sequence"], dist.get_world_size() // sp, accumulation), case["masked"], sp)
    # In fp64. A key bias's gradient is all but cancelled (it moves all scores of a query alike, up to rotation): the plain model's
    # own fp32 error in it is 4e-6.
    plain = plain_step(tiny_model(kind, 8, 2, tied=tied, dtype=torch.float64), data)
    model = tiny_model(kind, 8, 2, tied=tied)
    # What a fused layer does not go with is a case of its parts.
    fused = case["layer"] == "fused" and case["offload"] != "none" and dx == "gemm"
    plan = plan_of(case["tiles"], case["offload"], case["prefetch"], case["keep"], fused)
    config = UPipeConfig(sp_size=sp, attention_output=output, overlap=overlap, dx=dx)
    if plan.checkpointing is None and output == "host":
        from upipe.build import enable_checkpointing

        enable_checkpointing(model, reentrant=False)
    with stacked(model, plan, config, ds_config(case["zero"], accumulation)) as (stack, engine):
        loss, grads, moved = window(stack, engine, data[stack.handle.dp_rank])
        assert abs(loss - plain.loss) <= TOLERANCE * abs(plain.loss), (loss, plain.loss)
        assert set(grads) == set(plain.grads)
        for name, expected in plain.grads.items():
            assert_close(f"gradient of {name}", grads[name], expected, TOLERANCE * (3 if name.endswith("k_proj.bias") else 1))
        if plan.fused is not None:
            assert stack.fused.layers == 2 and stack.fused.counts.reused + stack.fused.counts.copied == 2 * accumulation
        elif plan.tiling is not None and plan.tiling.mlp_tokens is not None:
            assert min(c.reused + c.copied for c in (stack.tiling.mlp_counts, stack.tiling.norm_counts)) > 0
        assert (moved.get("to_host_gib", 0) > 0) == (moved.get("to_device_gib", 0) > 0) == (plan.sent_layers > 0)
        assert (moved.get("attention_to_host_gib", 0) > 0) == (moved.get("attention_to_device_gib", 0) > 0) == (output == "host")
        assert (moved.get("host_gib", 0) > 0) == (plan.sent_layers > 0 or output == "host"), moved


CASES = pairwise(FACTORS)


@pytest.mark.parametrize("case", every_value(CASES), ids=name_of)
def test_stack_grid(worlds, case):
    worlds(4).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", further(FACTORS, 110, CASES, seed=5), ids=name_of)
def test_stack_grid_sample(worlds, case):
    worlds(4).run(check, case=case)


FUSED = [
    {"model": "llama", "sp": 2, "zero": 3, "accumulation": 3, "sequence": "packed", "masked": "rank", "tiles": "five",
     "offload": "pinned", "block": ("host", False, "gemm"), "prefetch": False, "keep": 0, "layer": "fused"},
    {"model": "qwen3", "sp": 4, "zero": 2, "accumulation": 1, "sequence": "batch2", "masked": "tile", "tiles": "loss",
     "offload": "pageable", "block": ("device", True, "gemm"), "prefetch": True, "keep": 1, "layer": "fused"},
    {"model": "tied", "sp": 1, "zero": 1, "accumulation": 1, "sequence": "odd", "masked": "none", "tiles": "none",
     "offload": "device", "block": ("device", True, "gemm"), "prefetch": True, "keep": 0, "layer": "fused"},
    {"model": "qwen3", "sp": 2, "zero": 0, "accumulation": 3, "sequence": "even", "masked": "batch", "tiles": "one",
     "offload": "pinned", "block": ("host", True, "gemm"), "prefetch": True, "keep": 0, "layer": "fused"},
]


@pytest.mark.parametrize("case", FUSED, ids=name_of)
def test_fused_layers_in_the_stack(worlds, case):
    worlds(4).run(check, case=case)


# recomputed and stored


def steps_of(kind, sp, zero, tiles, offload, output, accumulation=2, steps=2, **more):
    """Losses and gradients of two optimizer steps."""
    data = data_of("odd", dist.get_world_size() // sp, accumulation)
    model, plan = tiny_model(kind, 8, 2), plan_of(tiles, offload, **more)
    config, found = UPipeConfig(sp_size=sp, attention_output=output), []
    with stacked(model, plan, config, ds_config(zero, accumulation)) as (stack, engine):
        for _ in range(steps):
            found.append(window(stack, engine, data[stack.handle.dp_rank])[:2])
    return found


def recomputed(kind, sp, zero, tiles, offload, output, **more):
    """Fused layers are never stored: with their inputs on the device."""
    fused = more.get("fused", False)
    stored = steps_of(kind, sp, zero, tiles, "device" if fused else "none", "device", fused=fused)
    again = steps_of(kind, sp, zero, tiles, offload, output, **more)
    for (a, grads), (b, others) in zip(stored, again, strict=True):
        assert a == b and grads.keys() == others.keys()
        assert all(torch.equal(grads[n], others[n]) for n in grads), [n for n in grads if not torch.equal(grads[n], others[n])]


@pytest.mark.parametrize(("kind", "sp", "zero", "tiles", "offload", "output", "more"), [
    ("llama", 2, 3, "five", "device", "device", {}),
    ("qwen3", 2, 3, "five", "pinned", "host", {}),
    ("llama", 1, 2, "loss", "pageable", "device", {"prefetch": False}),
    ("qwen3", 2, 1, "one", "pinned", "device", {"keep": 1}),
    ("llama", 2, 0, "five", "pageable", "host", {"prefetch": False}),
    ("llama", 2, 3, "five", "pinned", "host", {"fused": True}),
    ("qwen3", 2, 1, "one", "pageable", "device", {"fused": True, "keep": 1}),
])
def test_recomputed_is_stored_bit_for_bit(worlds, kind, sp, zero, tiles, offload, output, more):
    worlds(2).run(recomputed, kind=kind, sp=sp, zero=zero, tiles=tiles, offload=offload, output=output, **more)


# presets


BASE = {"model": dict(training.SHAPE), "data": {"path": "x", "tokens": "128K"}}


def configured(preset, **sections):
    mapping = {name: dict(value) for name, value in BASE.items()} | {"memory": {"preset": preset}}
    for name, values in sections.items():
        mapping[name] = mapping.get(name, {}) | values
    return from_mapping(RunConfig, mapping)


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"none"}))
def test_a_preset_sets_what_the_user_did_not(preset):
    config = configured(preset)
    for section, values in PRESETS[preset].items():
        for key, value in values.items():
            assert getattr(getattr(config, section), key) == value, key
    other = configured(preset, upipe={"overlap": False, "attention_output": "device"}, memory={"loss_tokens": 7, "offload": "pageable"})
    assert (other.upipe.overlap, other.upipe.attention_output, other.memory.loss_tokens) == (False, "device", 7)
    assert other.memory.offload == "pageable" and other.memory.mlp_tokens == config.memory.mlp_tokens
    assert configured(preset, memory={"mlp_tokens": None}).memory.mlp_tokens is None


def test_the_papers_offload_is_pageable_beyond_4_million_tokens():
    assert [configured("paper", data={"tokens": t}).memory.offload for t in ("1M", "4M", 4 * 2**20 + 1, "5M")] == [
        "pinned", "pinned", "pageable", "pageable"
    ]  # fmt: skip
    assert configured("lowest_memory", data={"tokens": "5M"}).memory.offload == "pinned"


def test_a_filled_configuration_reads_back_as_itself():
    for given in ({}, {"dx": "gemm"}, {"dx": "bf16"}):
        config = configured("lowest_memory", upipe=given)
        assert from_mapping(RunConfig, dataclasses.asdict(config)) == config
    assert configured("none").memory == MemoryConfig() and configured("none").upipe == UPipeConfig()


def test_a_preset_is_for_configurations_that_are_read():
    with pytest.raises(ValueError, match="use upipe.config.load or from_mapping"):
        MemoryConfig(preset="paper")
    mapping = {"memory": {"preset": "paper"}}
    fill(mapping, "1M")
    assert mapping == {"memory": {"preset": "paper"}}, "the mapping given stays as it is"


def test_the_lowest_memory_is_that_of_fused_layers_where_they_can_be(tmp_path):
    config = configured("lowest_memory")
    assert (config.memory.fused_layers, config.upipe.dx, config.upipe.overlap) == (True, "gemm", False)
    assert planned("lowest_memory", host=300).fused == FusedLayersConfig(2048)
    assert planned("paper").fused is None and planned("fastest", host=300).fused == FusedLayersConfig(8192)
    fastest = [configured("fastest", memory=given) for given in ({}, {"fused_layers": False})]
    assert [(made.memory.fused_layers, made.upipe.dx) for made in fastest] == [(True, "gemm"), (False, "gemm")]
    in_parts = [
        {"memory": {"fused_layers": False}}, {"memory": {"offload": "none"}}, {"upipe": {"dx": "bf16"}}, {"model": {"pretrained": "gemma"}},
    ]  # fmt: skip
    GemmaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8).save_pretrained(tmp_path / "gemma")
    LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path / "llama")
    for sections in in_parts:
        mapping = BASE | {"memory": {"preset": "lowest_memory"}}
        for name, values in sections.items():
            mapping[name] = values if name == "model" else mapping.get(name, {}) | values
        made = from_mapping(RunConfig, mapping, folder=tmp_path)
        assert (made.memory.fused_layers, made.upipe.dx) == (False, "bf16"), sections
    # A folder is relative to the configuration's.
    assert from_mapping(RunConfig, mapping | {"model": {"pretrained": "llama"}}, folder=tmp_path).memory.fused_layers
    # What cannot be read is refused where the model is made.
    assert not from_mapping(RunConfig, mapping | {"model": {"pretrained": "no/model"}}, folder=tmp_path).memory.fused_layers


def test_offload_brings_checkpointing_along():
    assert configured("none", memory={"offload": "pinned"}).model.checkpointing == "non-reentrant"
    assert configured("none").model.checkpointing == "none"


@pytest.mark.parametrize(("sections", "message"), [
    ({"memory": {"offload": "pinned"}, "model": {"checkpointing": "none"}}, "checkpointing=none: it sends the saved inputs"),
    ({"memory": {"offload": "pinned"}, "model": {"checkpointing": "reentrant"}}, "offload=pinned with model.checkpointing=reentrant"),
    ({"upipe": {"attention_output": "host"}}, "attention_output=host with model.checkpointing=none"),
    ({"upipe": {"attention_output": "host"}, "model": {"checkpointing": "reentrant"}}, "set model.checkpointing: non-reentrant"),
    ({"memory": {"keep_layers_on_gpu": 2}}, "keep_layers_on_gpu=2 with memory.offload=none"),
    ({"memory": {"keep_layers_on_gpu": 2, "offload": "auto"}}, "auto chooses how many stay"),
    ({"memory": {"keep_layers_on_gpu": -1, "offload": "pinned"}}, "keep_layers_on_gpu=-1: must be 0 or more"),
    ({"memory": {"pinned_fallback": True, "offload": "pageable"}}, "pinned_fallback=true with memory.offload=pageable"),
    ({"train": {"z_loss": 1e-4}}, "z_loss=0.0001 with memory.loss_tokens=null"),
    ({"train": {"label_smoothing": 0.1}}, "label_smoothing=0.1 with memory.loss_tokens=null"),
    ({"train": {"label_smoothing": 1.5}}, "label_smoothing=1.5: must be from 0 to 1"),
    ({"memory": {"loss_implementation": "liger"}}, "loss_implementation=liger with memory.loss_tokens=null"),
    ({"memory": {"optimizer": "cpu"}, "train": {"zero_stage": 0}}, "ZeRO 1, 2 and 3"),
    ({"memory": {"fused_layers": True}}, "fused_layers=true with memory.offload=none"),
    ({"memory": {"fused_layers": True, "offload": "pinned"}, "upipe": {"dx": "bf16"}}, "offload=pinned, upipe.dx=bf16"),
    ({"memory": {"mlp_tokens": 0}}, "mlp_tokens=0: must be positive"),
    ({"memory": {"preset": "papers"}}, "did you mean 'paper'"),
    ({"memory": {"preset": ["paper"]}}, "preset="),
    ({"memory": {"ofload": "none"}}, "did you mean 'offload'"),
])
def test_what_does_not_go_together_is_refused_when_it_is_read(sections, message):
    with pytest.raises(ConfigError, match=message):
        configured("none", **sections)


def test_sections_of_the_wrong_type_are_refused_by_name():
    for section in ("memory", "upipe", "model"):
        with pytest.raises(ConfigError, match=f"{section}=3: expected a section"):
            from_mapping(RunConfig, BASE | {"memory": {"preset": "paper"}} | {section: 3})


# the plan


LLAMA_8B = ModelSizes(8_030_261_248, 32, 218_112_000, 4096, 32, 4096, 128256, kv_heads=8)


def planned(preset="none", tokens=512 * 1024, host=256, device=None, ranks=2, sizes=LLAMA_8B, **sections):
    sections = {"train": {"dtype": "bf16"}, "upipe": {"sp_size": 2}} | sections
    run = configured(preset, **sections)
    return make_plan(
        run, tokens, sizes, world=ranks, local_ranks=ranks, device_bytes=None if device is None else int(device * GIB),
        host_bytes=int(host * GIB),
    )  # fmt: skip


def test_sizes_are_those_of_the_model():
    assert model_sizes(ModelConfig(preset="llama3-8b")) == LLAMA_8B


def test_the_bytes_of_a_plan():
    """Llama3-8B, 512K tokens on two ranks: u is 2 GiB; 31 inputs are sent. 62 GiB a rank."""
    plan = planned("paper")
    assert plan.input_bytes == 2 * GIB and (plan.sent_layers, plan.attention_bytes) == (31, 0)
    assert plan.host_bytes == 62 * GIB and plan.checkpointing == CheckpointConfig("pinned")
    assert plan.tiling == TilingConfig(8192, 8192, 2048)
    assert "31 layer inputs of 2 GiB to pinned host memory, 1 on the device" in plan.describe()
    host = planned("paper", upipe={"sp_size": 2, "attention_output": "host"}, host=300)
    assert host.attention_bytes == 32 * (2 * GIB + 262144 * 32 * 4)
    cpu = planned("paper", memory={"optimizer": "cpu"})
    assert cpu.host_bytes == plan.host_bytes + 6 * LLAMA_8B.parameters
    kept = planned("paper", memory={"keep_layers_on_gpu": 40})
    assert kept.sent_layers == 0 and kept.host_bytes == 0


def test_more_than_the_host_has_is_refused():
    told = r"2 ranks of this host would keep 124.0 GiB in its 100.0 GiB.*31 layer inputs of 2.00 GiB\. Use store_every: 2 .*a larger keep"
    with pytest.raises(ConfigError, match=told):
        planned("paper", host=100)
    with pytest.raises(ConfigError, match="attention outputs of 65.00 GiB"):
        planned("lowest_memory", host=200)


def test_the_fastest_preset_sends_only_what_does_not_fit():
    def sent(device, tokens=2**18, **more):
        return planned("fastest", tokens=tokens, host=4000, device=device, **more).sent_layers

    assert sent(None) == sent(141) == 0 and 0 < sent(110) < sent(90) == sent(40) == 31
    assert planned("fastest", tokens=2**18, host=1000).checkpointing == CheckpointConfig("none")
    assert planned("fastest", tokens=2**18, host=1000, device=110).checkpointing.offload == "pinned"
    assert sent(141, tokens=2**22) == 31 and sent(110, memory={"optimizer": "cpu"}) < sent(110)


def test_checkpointing_of_the_model_goes_where_the_plan_has_its_own():
    model = ModelConfig(**training.SHAPE, checkpointing="non-reentrant")
    assert planned("paper").model(model).checkpointing == "none" and planned("none").model(model) is model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathers_and_buckets_follow_the_layer(stage):
    run = configured("none", train={"zero_stage": stage})
    zero = deepspeed_config(run.train, run.memory, cuda=False, layer_parameters=1000)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1000 and zero.get("allgather_bucket_size") == (1000 if stage in (1, 2) else None)
    live = {k: zero.get(f"stage3_{k}") for k in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")}
    assert list(live.values()) == ([1200, 1200, 250] if stage == 3 else [None] * 3)
    set_ = configured("none", train={"zero_stage": stage, "max_live_parameters": 7},
                      memory={"reduce_bucket_parameters": 8, "prefetch_parameters": 0})
    zero = deepspeed_config(set_.train, set_.memory, cuda=False, layer_parameters=1000)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 8
    assert stage != 3 or (zero["stage3_max_live_parameters"], zero["stage3_prefetch_bucket_size"]) == (7, 0)


@pytest.mark.parametrize(("environment", "warned"), [
    ({}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}, False),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
])
def test_fixed_segments_are_warned_of(caplog, environment, warned):
    assert preflight.warn_of_allocator(environment) == warned
    assert ("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in caplog.text) == warned


def asked_to_warn():
    module, asked = importlib.import_module("upipe.apply"), []
    with mock.patch.object(module, "_warn_of_allocator", lambda: asked.append(1)):
        for method in ("upipe", "ulysses"):
            apply_method(tiny_model("llama", 4, 2), method, UPipeConfig(sp_size=1)).remove()
    return len(asked)


def test_every_sharded_model_asks_for_the_warning_and_a_process_has_it_once(worlds, monkeypatch):
    assert worlds(1).run(asked_to_warn) == [2]
    told, warn = [], importlib.import_module("upipe.apply")._warn_of_allocator
    monkeypatch.setattr(preflight, "warn_of_allocator", lambda: told.append(1))
    for gpu, rank, times in ((False, 0, 0), (True, 1, 0), (True, 0, 1)):
        warn.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setenv("RANK", str(rank))
        warn()
        warn()
        assert len(told) == times
    warn.cache_clear()


# on models


def failing(**more):
    """A stack that cannot be put on leaves the model plain, and the ranks free for the next."""
    model = tiny_model("llama", 8, 2)
    classes = [type(m) for m in model.modules()]
    model.gradient_checkpointing_enable()
    with pytest.raises(PreflightError, match="transformers' own checkpointing is on"):
        apply_stack(model, plan_of("five", "pinned"), UPipeConfig(sp_size=2))
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(ConfigError, match="liger needs a GPU"):
        apply_stack(model, dataclasses.replace(plan_of("five", "none"), tiling=TilingConfig(loss_implementation="liger")), UPipeConfig())
    model.gradient_checkpointing_disable()
    stack = apply_stack(model, plan_of("five", "pinned"), UPipeConfig(sp_size=2, attention_output="host"))
    report = stack.handle.report()
    stack.remove()
    for part in ("2 MLPs in tiles of 5 tokens", "loss in tiles of 4 tokens", "offload pinned: 0 layer inputs on the device, 2 on the host",
                 "attention output on the host, exchange overlapped, dx by gemm"):
        assert part in report, (part, report)
    assert "tiles" not in stack.handle.report() and [type(m) for m in model.modules()] == classes


def test_a_stack_that_is_refused_comes_off_again_and_one_that_is_on_is_reported(worlds):
    worlds(2).run(failing)


def losses_of(optimizer, zero_stage, dtype):
    """Losses of four AdamW steps as `upipe train` makes them."""
    run = configured("none", memory={"optimizer": optimizer}, train={"zero_stage": zero_stage, "dtype": dtype, "accumulation": 2})
    model = tiny_model("llama", 8, 2)
    ds = deepspeed_config(run.train, run.memory, cuda=False, layer_parameters=4000)
    stack = apply_stack(model, plan_of("five", "none"), UPipeConfig(sp_size=2))
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model, run.train, cuda=False), config=ds,
                                      mpu=stack.handle.mpu)
    losses = []
    for _ in range(4):
        for batch in stack.handle.shard(data_of("odd", 1, 2)[0], accumulation=2):
            loss = stack.handle.loss(engine, batch)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    engine.destroy()
    stack.remove()
    return losses


@pytest.mark.parametrize(("stage", "dtype"), [
    (3, "bf16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "fp32"), (2, "bf16"), (3, "fp32"))),
])
def test_an_optimizer_on_the_host_takes_the_same_steps(worlds, stage, dtype):
    found = [worlds(2).run(losses_of, optimizer=o, zero_stage=stage, dtype=dtype)[0] for o in ("device", "cpu")]
    assert found[0] == pytest.approx(found[1], rel=1e-6 if dtype == "fp32" else 2e-3)
    # Two batches take turns.
    assert found[0][-2] < found[0][0] and found[0][-1] < found[0][1]


def test_loss_terms_of_the_self_check_are_those_of_the_loss():
    """Its plain side, from torch's cross-entropy, against the definition written out token by token."""
    model, batch = tiny_model("llama", 8, 2), data_of("odd", 1, 1)[0][0]
    terms = LossTerms(z_loss=1e-2, label_smoothing=0.1)
    loss, grads = _plain_gradients(model, batch, torch.device("cpu"), terms)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[0].double()
    total, count = 0.0, 0
    for row, label in zip(logits, shifted(batch)[0].tolist()):
        if label != -100:
            lse = row.exp().sum().log()
            total, count = total + 0.9 * (lse - row[label]) + 0.1 * (lse - row.mean()) + 1e-2 * lse**2, count + 1
    (total / count).backward()
    assert loss == pytest.approx(float((total / count).detach()), rel=1e-6)
    for name, p in model.named_parameters():
        assert relative_error(grads[name], p.grad) < 1e-5, name


# bytes moved

def pinning_fails(fused):
    """Layers' inputs are page-locked, attention outputs are not."""
    model = tiny_model("llama", 8, 2)
    run = configured("lowest_memory", memory={"fused_layers": fused, "preset": "lowest_memory"}, upipe={"sp_size": 2})
    plan = plan_of("five", "pinned", prefetch=False, fused=fused)
    data, registered, taken = data_of("odd", 1, 1)[0], [], host.HostPool._make

    def register(address, nbytes):
        registered.append(nbytes)
        return "out of memory (2)"

    def make(pool, nbytes, pinned, purpose):
        with mock.patch.object(host, "_register", register if purpose == host.OUTPUTS else lambda *_: None):
            return taken(pool, nbytes, pinned, purpose)

    with stacked(model, plan, run.upipe, ds_config(0, 1)) as (stack, engine):
        batch = next(iter(stack.handle.shard(data)))
        host.pool().clear()
        with mock.patch.object(host.HostPool, "_make", make), pytest.raises(host.PinnedHostMemoryError) as caught:
            stack.handle.loss(engine, batch)
    told = explain(caught.value, to_mapping(run))
    assert registered and told.outcome == "oom_pinned" and "pinned host memory for attention outputs" in told.reason
    keys = [line.split(":")[0] for line in told.help if not line.startswith("ulimit")]
    assert keys == ["memory.keep_layers_on_gpu", "upipe.attention_output_layers", "memory.store_every", "upipe.attention_output",
                    "upipe.sp_size", "data.tokens"]  # fmt: skip
    assert "attention_output: device" in told.reason and "pinned_fallback" not in str(told) and "pageable" not in str(told)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_outputs_that_cannot_be_page_locked_are_told_of(worlds, fused):
    worlds(2).run(pinning_fails, fused=fused)


def bytes_of_a_step(output, dx, fused, sp, layers_on_host=None):
    """Two micro-batches of one row: what a step copies, as it follows from the sizes."""
    model = tiny_model("llama", 8, 2)
    plan = plan_of("five", "pinned", keep=1, fused=fused)
    config = UPipeConfig(sp_size=sp, attention_output=output, attention_output_layers=layers_on_host, dx=dx, overlap=False)
    data = data_of("odd", dist.get_world_size() // sp, 2)
    with stacked(model, plan, config, ds_config(2, 2)) as (stack, engine):
        mine = data[stack.handle.dp_rank]
        found = [window(stack, engine, mine)[2] for _ in range(2)]
    rows = sum(-(-batch["input_ids"].shape[1] // sp) for batch in mine)
    width, head_dim = model.config.hidden_size, model.model.layers[0].self_attn.head_dim
    # Of two layers the last one's input stays.
    expected = {"to_host": rows * width * 4, "to_device": rows * width * 4}
    on_host = 0 if output == "device" else 2 if layers_on_host is None else layers_on_host
    outputs, lse = rows * 8 * head_dim * 4, rows * sp * (8 // sp) * 4
    if on_host:
        expected["attention_to_host"] = on_host * (outputs + lse)
        # With dx: bf16 the recomputed forward and the backward fetch it each.
        expected["attention_to_device"] = on_host * ((2 if dx == "bf16" else 1) * outputs + lse)
    for numbers in found:
        assert {key.removesuffix("_gib"): value * GIB for key, value in numbers.items() if "_to_" in f"_{key}"} == expected


@pytest.mark.parametrize(("output", "dx", "fused", "more"), [
    ("device", "gemm", False, {}), ("host", "gemm", False, {}), ("host", "bf16", False, {}), ("host", "gemm", True, {}),
    ("host", "gemm", True, {"layers_on_host": 1, "sp": 1}), ("device", "gemm", True, {}),
])
def test_what_a_step_copies_is_told_in_both_directions(worlds, output, dx, fused, more):
    worlds(2).run(bytes_of_a_step, output=output, dx=dx, fused=fused, **{"sp": 2} | more)


def bytes_of_fpdt():
    model, data = tiny_model("llama", 8, 2), data_of("even", 1, 1)[0]
    plan, ds = plan_of("five", "pinned"), ds_config(0, 1)
    stack = apply_stack(model, plan, UPipeConfig(sp_size=2), ds, MethodConfig("fpdt", chunk_tokens=8))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds, mpu=stack.handle.mpu)
    _, _, numbers = window(stack, engine, data)
    assert numbers["attention_to_host_gib"] > 0 and numbers["attention_to_device_gib"] > 0
    assert stack.handle.moved()["bytes_to_host"] == 0, "counted anew"
    engine.destroy()
    stack.remove()


def test_chunks_of_fpdt_are_among_what_a_step_copies(worlds):
    worlds(2).run(bytes_of_fpdt)


# training runs


def run_of(tmp_path, preset, **changes):
    config = training.mapping(tmp_path, **{"train__steps": 3, **changes})
    small = {"mlp_tokens": 5, "norm_tokens": 3, "loss_tokens": 4}
    config["memory"] = {"preset": preset} | ({} if preset == "none" else small)
    return config


def trained(config):
    result = training.train(config)
    dist.barrier()
    return result | {"records": read_metrics(config["train"]["run_dir"])}


def test_trainer_runs_with_every_preset(worlds, tmp_path):
    """The same data and weights: the losses are those without a stack, and so is the evaluation."""
    found = {}
    for preset in PRESETS:
        config = run_of(tmp_path, preset, train__run_dir=str(tmp_path / preset), data__eval_fraction=0.2, train__eval_every=2)
        found[preset] = worlds(2).run(trained, config=config)[0]
    for preset, result in found.items():
        assert result["losses"] == pytest.approx(found["none"]["losses"], rel=1e-5), preset
        records = result["records"]
        assert records[1]["eval_loss"] == pytest.approx(found["none"]["records"][1]["eval_loss"], rel=1e-5)
        sends = preset in ("paper", "lowest_memory")
        # One of two layers is sent, 7 tokens of 32 fp32 numbers, two micro-batches a step.
        for key in ("to_host_gib", "to_device_gib"):
            assert [r.get(key, 0) for r in records] == [2 * 7 * 32 * 4 / GIB * sends] * 3
        # Output and log-sum-exp of both layers, four heads over two ranks.
        outputs, lse = (2 * 2 * n * 4 / GIB * (preset in ("lowest_memory", "fastest")) for n in (7 * 32, 2 * 14))
        assert [(r.get("attention_to_host_gib", 0), r.get("attention_to_device_gib", 0)) for r in records] == [(outputs + lse,) * 2] * 3
        assert all(("host_pinned_gib" in r) == (preset != "none") for r in records)
        assert ("loss in tiles of 4 tokens" in result["text"]) == (preset != "none")
    assert "memory  preset paper; 1 layer inputs" in found["paper"]["text"]
    assert "memory  saved as the model has it; 0 GiB" in found["none"]["text"]


@pytest.mark.parametrize(("preset", "changes"), [
    pytest.param("lowest_memory", {"train__zero_stage": 3, "train__micro_batch_size": 2}, marks=pytest.mark.slow),
    pytest.param("lowest_memory", {"train__zero_stage": 2, "memory__fused_layers": False}, marks=pytest.mark.slow),
    ("lowest_memory", {"train__zero_stage": 3}),
    ("paper", {"train__zero_stage": 2, "train__z_loss": 1e-3, "train__label_smoothing": 0.1}),
    pytest.param("fastest", {"train__zero_stage": 1, "train__dtype": "bf16"}, marks=pytest.mark.slow),
    ("paper", {"train__zero_stage": 3, "train__dtype": "bf16", "model__zero_init": "always", "memory__optimizer": "cpu"}),
])
def test_the_self_check_passes_with_the_whole_stack_on(worlds, tmp_path, preset, changes):
    memory_keys = {key.removeprefix("memory__"): value for key, value in changes.items() if key.startswith("memory__")}
    config = run_of(tmp_path, preset, **{key: value for key, value in changes.items() if not key.startswith("memory__")})
    config["memory"] |= memory_keys
    passed, text = worlds(2).run(training.checked, config=config)[0]
    assert passed, text


@pytest.mark.parametrize(("changes", "message"), [
    ({"upipe__sp_size": 3}, "does not divide"),
    ({"upipe__heads_per_stage": 3}, "heads_per_stage|multiple"),
])
def test_a_dry_run_checks_the_stack(worlds, tmp_path, changes, message):
    worlds(2).run(dry, config=run_of(tmp_path, "lowest_memory"))
    with pytest.raises(AssertionError, match=message):
        worlds(2).run(dry, config=run_of(tmp_path, "lowest_memory", **changes))


def dry(config):
    trainer = Trainer(from_mapping(RunConfig, config), dry_run=True)
    text = trainer.describe()
    trainer.close()
    assert "2 MLPs in tiles of 5 tokens" in text and "offload pinned: 1 layer inputs on the device, 1 on the host" in text


def test_a_dry_run_refuses_what_the_host_cannot_hold(worlds, tmp_path, monkeypatch):
    monkeypatch.setattr("upipe.trainer.host_gib", lambda: 1e-6)
    with pytest.raises(ConfigError, match="in its 0.0 GiB of memory, each of them 1 layer inputs"):
        Trainer(from_mapping(RunConfig, run_of(tmp_path, "paper", upipe__sp_size=1)), dry_run=True)


# experiments


def point(**sections):
    settings = {"model_name": "toy", "device": "cpu", "processes": 2, "tokens": 64, "model": dict(training.SHAPE),
                "train": {"steps": 2}, "upipe": {"sp_size": 2}}
    return from_mapping(train_point.Point, settings | sections)


def ran(settings):
    """A point's record; the group of the world stays for other tests."""
    saved, train_point.dist = train_point.dist, SimpleNamespace(**{
        **{n: getattr(dist, n) for n in ("get_world_size", "get_rank", "barrier", "all_reduce", "all_gather_object", "ReduceOp")},
        "destroy_process_group": lambda: None,
    })
    try:
        return train_point.run(point(**settings)).to_dict()
    finally:
        train_point.dist = saved


def test_a_point_takes_the_memory_section(worlds):
    plain = worlds(2).run(ran, settings={})[0]
    found = worlds(2).run(ran, settings={"memory": {"preset": "lowest_memory", "mlp_tokens": 5}})[0]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    told = [found[k] for k in ("attention_output", "overlap", "dx", "offload", "keep_layers_on_gpu", "tile_tokens")]
    assert told == ["host", False, "slabs", "pinned", 1, 5] and found["fused"]
    assert plain["offload"] == "none" and plain["tile_tokens"] is None and plain["attention_output"] == "device"
    last = found["host_steps"][-1]
    assert last["to_host_gib"] == last["to_device_gib"] == 32 * 32 * 4 / GIB
    assert last["attention_to_host_gib"] == last["attention_to_device_gib"] > 0 and found["host_pinned_gib"] > 0
    assert any("offload pinned" in line for line in found["report"])


def test_a_point_is_refused_as_a_run_is():
    with pytest.raises(ConfigError, match="offload=pinned with model.checkpointing=reentrant"):
        point(model=dict(training.SHAPE, checkpointing="reentrant"), memory={"offload": "pinned"})
