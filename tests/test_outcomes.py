"""What an outcome says beside its name: the numbers of each kind of failure, and the settings that would help."""

import os
import signal
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from upipe import host
from upipe.outcomes import NAMES, classify, explain, host_limits, killed
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
LOWEST = {
    "model": {"checkpointing": "non-reentrant"},
    "train": {"zero_stage": 3},
    "data": {"tokens": 1 << 20},
    "upipe": {"sp_size": 8, "heads_per_stage": 8, "attention_output": "host", "overlap": False, "dx": "bf16"},
    "memory": {
        "mlp_tokens": 2048, "norm_tokens": 2048, "loss_tokens": 1024, "offload": "pinned", "prefetch": False, "optimizer": "cpu",
        "keep_layers_on_gpu": 0, "pinned_fallback": True,
    },
}  # fmt: skip


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
    plain, lowest = explain(torch.OutOfMemoryError(DEVICE_213_CAPPED)), explain(torch.OutOfMemoryError(DEVICE_213_CAPPED), LOWEST)
    assert {"memory.mlp_tokens", "memory.loss_tokens", "model.checkpointing", "memory.offload", "upipe.attention_output",
            "upipe.dx", "upipe.overlap", "memory.optimizer"} < set(keys(plain))  # fmt: skip
    assert keys(lowest) == ["upipe.sp_size", "data.tokens"]
    assert "(now 1048576)" in lowest.help[-1]
    for section, key, value in (
        ("upipe", "heads_per_stage", 32), ("train", "zero_stage", 1), ("upipe", "overlap", True), ("upipe", "dx", "gemm"),
        ("memory", "offload", "none"), ("memory", "mlp_tokens", None), ("memory", "keep_layers_on_gpu", 4),
    ):  # fmt: skip
        changed = {name: dict(keys) for name, keys in LOWEST.items()}
        changed[section][key] = value
        assert keys(explain(torch.OutOfMemoryError(DEVICE_213_CAPPED), changed))[0] == f"{section}.{key}", key
    narrow = explain(torch.OutOfMemoryError(DEVICE_211), {"upipe": {"sp_size": 8, "heads_per_stage": 32}})
    assert any(line.startswith("upipe.heads_per_stage: 8 (now 32)") for line in narrow.help)


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
    told = killed(signal.SIGKILL, True, LOWEST)
    assert told.outcome == "oom_host" and "out-of-memory killer" in told.reason and told.numbers["limit"] > 0
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
