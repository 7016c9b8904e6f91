"""What an outcome says beside its name: the numbers of each kind of failure, and the settings that would help."""

import copy
import json
import os
import re
import signal
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
import yaml

from upipe import host
from upipe.config import from_mapping, to_mapping
from upipe.memory import PRESETS
from upipe.outcomes import NAMES, advice, classify, explain, host_limits, killed
from upipe.preflight import PreflightError
from upipe.trainer import RunConfig

GIB = 2**30
DEVICE_211 = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.25 GiB is free. "
    "Including non-PyTorch memory, this process has 127.50 GiB memory in use. Of the allocated memory 100.00 GiB is allocated "
    "by PyTorch, and 26.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
DEVICE_213_CAPPED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 139.80 GiB of which 110.00 GiB is free. "
    "Including non-PyTorch memory, this process has 28.50 GiB memory in use. 28.00 GiB allowed; Of the allocated memory "
    "27.75 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 100.00 MiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OUTCOMES = ("oom_device", "oom_pinned", "oom_host")
SHAPE = dict(hidden_size=64, layers=3, heads=4, kv_heads=2, intermediate_size=96, vocab_size=64)


def settings_of(preset="none", **sections):
    """A run's settings as the trainer has them, of three layers of Llama on eight ranks."""
    mapping = {"model": dict(SHAPE), "data": {"path": "x", "tokens": "1M"}, "upipe": {"sp_size": 8}, "memory": {"preset": preset}}
    for name, values in sections.items():
        mapping[name] = values if isinstance(values, str) else mapping.get(name, {}) | values
    return to_mapping(from_mapping(RunConfig, mapping))


def lowest(**sections):
    """The preset, and all else that lowers the device's memory."""
    more = {"keep_layers_on_gpu": 0, "offload_within_layer": True, "optimizer": "cpu"}
    return settings_of("lowest_memory", **sections | {"memory": more | sections.get("memory", {})})


def keys(explanation):
    """The settings named, without their values."""
    return [line.split(":")[0].split("=")[0] for line in explanation.help]


def test_device_says_asked_in_use_limit_and_fragmentation():
    told = explain(torch.OutOfMemoryError(DEVICE_211))
    assert told.outcome == "oom_device"
    assert told.numbers["asked"] == 20 * GIB and told.numbers["in use"] == 127.5 * GIB and told.numbers["free"] == 12.25 * GIB
    assert told.numbers["limit"] == round(139.8 * GIB) and told.numbers["allocated by torch"] == 100 * GIB
    # 26 of 139.8 GiB in fragments: the first thing to try.
    assert told.help[0].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") and "26.00 GiB" in told.help[0]
    text = str(told)
    assert text.startswith("out of device memory (the GPU's) (oom_device): OutOfMemoryError: CUDA out of memory.")
    for part in ("asked 20.00 GiB", "in use 127.50 GiB", "limit 139.80 GiB", "memory.offload: pinned", "data.tokens: fewer"):
        assert part in text, part


def test_device_under_a_cap_has_the_cap_as_its_limit():
    told = explain(torch.OutOfMemoryError(DEVICE_213_CAPPED))
    assert told.numbers["limit"] == 28 * GIB and told.numbers["asked"] == GIB // 2
    assert told.numbers["reserved but unallocated"] == 100 * 2**20 and told.numbers["allocated by torch"] == 27.75 * GIB
    assert not any("expandable_segments" in line for line in told.help)


def test_advice_leaves_out_what_is_set_already():
    error = torch.OutOfMemoryError(DEVICE_213_CAPPED)
    plain, least = explain(error), explain(error, lowest())
    assert {"memory.mlp_tokens", "memory.loss_tokens", "model.checkpointing", "memory.offload", "memory.fused_layers",
            "upipe.dx", "upipe.overlap", "memory.offload_within_layer", "memory.optimizer"} < set(keys(plain))  # fmt: skip
    assert keys(least) == ["upipe.sp_size", "data.tokens"]
    assert "(now 1048576)" in least.help[-1]
    for section, key, value in (
        ("upipe", "heads_per_stage", 32), ("upipe", "heads_per_stage", "auto"), ("train", "zero_stage", 1), ("upipe", "overlap", True),
        ("memory", "offload_within_layer", False), ("memory", "norm_tokens", None), ("memory", "loss_tokens", None),
    ):  # fmt: skip
        assert keys(explain(error, lowest(**{section: {key: value}})))[0] == f"{section}.{key}", key
    narrow = explain(torch.OutOfMemoryError(DEVICE_211), {"upipe": {"sp_size": 8, "heads_per_stage": 32}})
    assert any(line.startswith("upipe.heads_per_stage: 8 (now 32)") for line in narrow.help)


def test_the_device_is_told_of_fused_layers_and_of_their_own_offload():
    paper, least = advice("oom_device", settings_of("paper"), {}), advice("oom_device", settings_of("lowest_memory"), {})
    assert any(line.startswith("memory.fused_layers: true (now false) - ") for line in paper)
    whole = "memory.offload_within_layer: true (now false) with memory.fused_layers: true (now false), memory.prefetch: false (now true) - "
    assert any(line.startswith(whole) for line in paper)
    assert any(line.startswith("memory.offload_within_layer: true (now false) - ") for line in least)
    assert not any("upipe.dx" in line or "upipe.attention_output" in line for line in (*paper, *least))
    # In parts, where dx: bf16 is set or nothing better can be had.
    parts = settings_of("lowest_memory", memory={"fused_layers": False}, upipe={"attention_output": "device"})
    told = advice("oom_device", parts, {})
    assert any(line.startswith("memory.fused_layers: true (now false) with upipe.dx: gemm (now bf16) - ") for line in told)
    assert any(line.startswith("upipe.attention_output: host (now device) - ") for line in told)
    # Rows of two sequences do not fit within a layer.
    two = advice("oom_device", settings_of("lowest_memory", train={"micro_batch_size": 2}), {})
    assert not any("offload_within_layer" in line for line in two)


@pytest.mark.parametrize(("kind", "serves", "dx"), [("qwen3", True, False), ("gemma2", False, True), ("olmo2", False, False)])
def test_what_is_advised_is_of_the_models_family(tmp_path, kind, serves, dx):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    settings = {"model": {"pretrained": str(tmp_path)}, "upipe": {"sp_size": 2}}
    told = advice("oom_device", settings, {})
    assert any(line.startswith("memory.fused_layers: true") for line in told) == serves
    assert any(line.startswith("upipe.dx: bf16 with upipe.attention_output: host, model.checkpointing: ") for line in told) == dx
    # Where that cannot be read, each with the models it is for.
    told = advice("oom_device", settings | {"model": {"pretrained": "not/here"}}, {})
    assert any("Llama, Mistral, Qwen2, Qwen3" in line for line in told) and any("layers that are not fused" in line for line in told)


@pytest.mark.parametrize("model", [{"preset": "glm-tiny"}, {"pretrained": "not/here", "glm": {}}])
def test_a_model_with_tiles_of_its_own_is_told_of_none(model):
    told = [line for outcome in OUTCOMES for line in advice(outcome, {"model": model, "memory": {"offload": "pinned"}}, {})]
    assert not any(name in line for line in told for name in ("_tokens", "fused", "store_every", "upipe.overlap", "upipe.dx"))
    assert any(line.startswith("memory.keep_layers_on_gpu: 0") for line in told)


def applied(settings, pairs):
    """The settings with those advised; in place of "larger" and the like a value that is."""
    made = copy.deepcopy(settings)
    for key, value in pairs:
        section, name = key.split(".")
        now = made[section][name]
        if value == "larger":
            value = 2 * now
        elif value == "fewer":
            value = now // 2 if isinstance(now, int) else 1
        elif value == "more":
            value = 2 if now == "auto" else now + 1
        made[section][name] = value
    return made


def advised(line):
    """The settings of a line of advice."""
    return [(key, yaml.safe_load(value)) for key, value in re.findall(r"(\w+\.\w+): ([\w-]+)", line.split(" - ")[0])]


FORMS = {
    **{name: (name, {}) for name in PRESETS},
    **{f"{name}, {'fused' if on else 'in parts'}": (name, {"memory": {"fused_layers": on}})
       for name in PRESETS if name != "none" for on in (True, False)},
    "lowest_memory, within": ("lowest_memory", {"memory": {"offload_within_layer": True, "keep_layers_on_gpu": 0}}),
    "lowest_memory, pairs": ("lowest_memory", {"memory": {"store_every": 2, "pairs": 1}}),
    "lowest_memory, device": ("lowest_memory", {"memory": {"fused_layers": False}, "upipe": {"attention_output": "device"}}),
    "paper, pageable": ("paper", {"memory": {"offload": "pageable", "keep_layers_on_gpu": 2}}),
    "paper, fallback": ("paper", {"memory": {"pinned_fallback": True, "keep_layers_on_gpu": 1}}),
    "fastest, wide": ("fastest", {"upipe": {"heads_per_stage": 32, "attention_output_layers": 2, "overlap": True}}),
    "fastest, fallback": ("fastest", {"memory": {"pinned_fallback": True}, "train": {"micro_batch_size": 4}}),
    "reentrant": ("none", {"model": {"checkpointing": "reentrant"}, "memory": {"optimizer": "cpu"}}),
    "checkpointed, fused": ("none", {"memory": {"offload": "pinned", "fused_layers": True, "pinned_fallback": True}}),
    "ZeRO 0": ("none", {"train": {"zero_stage": 0}, "upipe": {"sp_size": 4, "ring_degree": 2, "heads_per_stage": 4, "dx": "bf16"}}),
    **{method: ("paper", {"method": method}) for method in ("ulysses", "ring", "fpdt")},
    "alone": ("none", {"method": "none", "upipe": {"sp_size": 1}}),
    "GLM": ("none", {"model": dict.fromkeys(SHAPE) | {"preset": "glm-tiny"}, "memory": {"offload": "pinned"}}),
}  # fmt: skip


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("form", FORMS)
def test_each_line_of_advice_can_be_taken_as_it_is_written(form, outcome):
    preset, sections = FORMS[form]
    settings = settings_of(preset, **sections)
    for memory in (None, *host.WORKS) if outcome == "oom_pinned" else (None,):
        lines, together = advice(outcome, settings, {}, memory), []
        assert lines[-1].startswith("data.tokens: fewer (now 1048576)")
        for line in lines:
            pairs = advised(line)
            assert pairs and applied(settings, pairs) != settings, line
            from_mapping(RunConfig, applied(settings, pairs))
            stages = [key for key, _ in pairs if key.startswith("upipe.") and key != "upipe.sp_size"]
            assert not stages or settings["method"]["name"] == "upipe", line
            together += pairs
        if outcome == "oom_device":
            from_mapping(RunConfig, applied(settings, together))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_several_rows_at_a_time_are_advised_against(outcome):
    one, four = (advice(outcome, settings_of("paper", train={"micro_batch_size": n}), {}) for n in (1, 4))
    assert not any("micro_batch_size" in line for line in one)
    assert any(line.startswith("train.micro_batch_size: 1 (now 4)") for line in four)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_advice_for_settings_of_any_form(outcome):
    """What cannot be read counts as not given: an out-of-memory message must come."""
    for settings in (
        {}, {"upipe": None, "memory": None}, {"method": "ring", "upipe": {"sp_size": 8}}, {"model": {"preset": "no such"}},
        {"memory": {"offload": None, "store_every": 2, "pairs": None}, "upipe": {"attention_output": "host", "heads_per_stage": "auto"}},
        {"train": {"zero_stage": 0}, "method": {"name": "usp", "ring_degree": 2}, "upipe": {"sp_size": 0}},
    ):  # fmt: skip
        assert advice(outcome, settings, {})[-1].startswith("data.tokens: fewer")


def test_every_setting_that_is_advised_exists():
    sections = get_type_hints(RunConfig)
    names = {f"{section}.{f.name}" for section, cls in sections.items() for f in fields(cls)}
    wide = {"upipe": {"sp_size": 1, "heads_per_stage": 4, "attention_output": "host"}, "train": {"zero_stage": 1},
            "memory": {"offload": "pinned", "optimizer": "cpu"}}  # fmt: skip
    errors = (torch.OutOfMemoryError(DEVICE_213_CAPPED), MemoryError(), host.PinnedHostMemoryError("pinned host memory: no"))
    named = {key for error in errors for settings in ({}, wide) for key in keys(explain(error, settings))}
    assert {key for key in named if "." in key} <= names
    assert len(named) > 15


def test_pinned_has_what_was_asked_and_what_is_pinned(monkeypatch):
    monkeypatch.setattr(host, "_register", lambda address, nbytes: "out of memory (2)")
    pool = host.HostPool()
    with pytest.raises(host.PinnedHostMemoryError) as caught:
        pool.take((3 << 20,), torch.uint8)
    settings = {"memory": {"offload": "pinned", "keep_layers_on_gpu": 1}, "upipe": {"attention_output": "host"}}
    told = explain(caught.value, settings)
    assert told.outcome == "oom_pinned" and told.numbers["asked"] == 3 << 20 and told.numbers["pinned"] == 0
    assert told.numbers["limit"] > 0 and "out of pinned (page-locked) host memory (oom_pinned)" in str(told)
    found = [key for key in keys(told) if "ulimit" not in key]
    assert found == ["memory.pinned_fallback", "memory.offload", "memory.keep_layers_on_gpu", "upipe.attention_output_layers",
                     "memory.store_every", "upipe.attention_output", "upipe.sp_size", "data.tokens"]  # fmt: skip


def test_host_has_the_machines_numbers_and_torchs_request():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15, dtype=torch.uint8)
    told = explain(caught.value, {"memory": {"optimizer": "cpu", "offload": "pageable"}})
    assert told.outcome == "oom_host" and told.numbers["asked"] == 10**15
    assert 0 < told.numbers["in use"] < told.numbers["limit"] and told.numbers["free"] <= told.numbers["limit"]
    assert {"memory.optimizer", "memory.offload", "memory.keep_layers_on_gpu"} < set(keys(told))
    with pytest.raises(MemoryError) as caught:
        bytearray(1 << 60)
    told = explain(caught.value)
    assert told.outcome == "oom_host" and "asked" not in told.numbers and told.numbers["limit"] > 0


def test_limit_of_the_control_group_of_both_kinds(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    machine = host_limits(proc, groups)
    (groups / "job/step").mkdir(parents=True)
    (groups / "memory").mkdir()
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (groups / "job/step/memory.max").write_text("max\n")
    (groups / "job/step/memory.current").write_text("7000000\n")
    assert host_limits(proc, groups)["limit"] == machine["limit"]
    # Its own group has no limit, the one above has.
    (groups / "job/memory.max").write_text("10000000\n")
    (groups / "job/memory.current").write_text("7500000\n")
    got = host_limits(proc, groups)
    assert got["limit"] == 10_000_000 and got["free"] == 2_500_000
    (proc / "self/cgroup").write_text("9:cpu:/x\n4:memory:/elsewhere\n")
    (groups / "memory/memory.limit_in_bytes").write_text("5000000\n")
    (groups / "memory/memory.usage_in_bytes").write_text("1000000\n")
    got = host_limits(proc, groups)
    assert got["limit"] == 5_000_000 and got["free"] == 4_000_000


def test_killed_by_the_kernel_is_out_of_host_memory():
    told = killed(signal.SIGKILL, True, lowest())
    assert told.outcome == "oom_host" and "out-of-memory killer" in told.reason
    assert [*told.numbers] == ["limit"] and told.numbers["limit"] > 0, "this process's use says nothing of the other's"
    assert "memory.optimizer" in keys(told)
    assert killed(signal.SIGKILL, False).outcome == "failed" and killed(signal.SIGSEGV, True).outcome == "failed"


def test_refused_and_failed_say_what_they_say():
    told = explain(PreflightError("sp_size=3 does not divide 8 ranks: use 1, 2, 4, 8"))
    assert (told.outcome, told.numbers, told.help) == ("refused", {}, ()) and "use 1, 2, 4, 8" in str(told)
    told = explain(ValueError("no such thing"))
    assert told.outcome == "failed" and str(told) == "failed (failed): ValueError: no such thing"


def test_explain_and_classify_agree_and_every_outcome_has_a_name():
    try:
        try:
            raise torch.OutOfMemoryError(DEVICE_211)
        except RuntimeError as cause:
            raise ValueError("a wrapper") from cause
    except ValueError as error:
        wrapped = error
    for error in (wrapped, MemoryError(), OSError(12, os.strerror(12)), ValueError("x"), PreflightError("y")):
        told = explain(error)
        assert (told.outcome, told.reason) == classify(error) and told.outcome in NAMES
    assert explain(wrapped).numbers["asked"] == 20 * GIB
