"""How a run ended, told by its cause: the exception that ended it, never an exit code.

| outcome | cause |
|---|---|
| oom_device | the GPU's memory: torch.OutOfMemoryError, or an allocation of the driver, NCCL or cuBLAS |
| oom_pinned | page-locked host memory: cudaHostAlloc or cudaHostRegister failed |
| oom_host | host memory: MemoryError, torch's CPU allocator, ENOMEM; or the kernel's out-of-memory killer (`killed`) |
| refused | PreflightError or ConfigError: named before the first step |
| failed | everything else |

CUDA words a failed page-locked allocation as it does a device one ("CUDA error: out of memory"), so those two are told
apart by the statement that failed, which the traceback has.

`explain` adds the numbers, from the message where it has them and else from the machine, and the settings that would help.
"""

from __future__ import annotations

import errno
import linecache
import re
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from upipe import host
from upipe.config import ConfigError
from upipe.preflight import PreflightError

_PINNED = re.compile(r"cudaHostAlloc|cudaHostRegister|cudaMallocHost|pinned host memory", re.IGNORECASE)
_PINNING = re.compile(_PINNED.pattern + r"|pin_memory|host_register", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA (host )?(m|c)alloc")
_CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory")


def classify(error: BaseException) -> tuple[str, str]:
    """The outcome that an exception stands for, and the reason: its type and message, first line."""
    outcome, cause = _told(error)
    return outcome, reason(cause)


def reason(error: BaseException) -> str:
    """One line: the exception's type and the first line of its message (the whole of it for a refusal)."""
    text = str(error).strip()
    if not isinstance(error, (PreflightError, ConfigError)):
        text = text.split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _told(error: BaseException) -> tuple[str, BaseException]:
    for cause in _causes(error):
        outcome = _outcome(cause)
        if outcome != "failed":
            return outcome, cause
    return "failed", error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _outcome(error: BaseException) -> str:
    if isinstance(error, (PreflightError, ConfigError)):
        return "refused"
    if isinstance(error, torch.OutOfMemoryError):
        return "oom_device"
    if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom_host"
    if isinstance(error, RuntimeError):
        text = str(error)
        if _CPU_ALLOCATOR.search(text):
            return "oom_host"
        if _PINNED.search(text):
            return "oom_pinned"
        if _NO_MEMORY.search(text):
            return "oom_pinned" if _PINNING.search(text + failing_statement(error)) else "oom_device"
    return "failed"


def failing_statement(error: BaseException) -> str:
    """Source text of the statement that raised: the innermost one outside torch, and torch's own inside that."""
    package = str(Path(torch.__file__).parent)
    texts = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first, last = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
        texts.append("".join(linecache.getline(frame.filename, number) for number in range(first, last + 1)))
        if not frame.filename.startswith(package):
            break
    return "".join(texts)


NAMES = {
    "oom_device": "out of device memory (the GPU's)",
    "oom_host": "out of host memory",
    "oom_pinned": "out of pinned (page-locked) host memory",
    "refused": "refused before the first step",
    "failed": "failed",
}


@dataclass(frozen=True)
class Explanation:
    """How a run ended, for people: `str()` is text of a few lines.

    Args:
        outcome, reason: as `classify` gives them.
        numbers: bytes, by what they are: "asked" (the allocation that failed), "in use" (by this process), "limit", "free" and
            others beside them. Only those that are known.
        help: settings that would help, those with the least cost in time first.
    """

    outcome: str
    reason: str
    numbers: dict[str, int] = field(default_factory=dict)
    help: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{NAMES[self.outcome]} ({self.outcome}): {self.reason}"]
        if self.numbers:
            lines.append("  " + ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in self.numbers.items()))
        if self.help:
            lines += ["  what would help, the cheapest first:", *(f"    {line}" for line in self.help)]
        return "\n".join(lines)


def explain(error: BaseException, settings: dict[str, Any] | None = None) -> Explanation:
    """The outcome of an exception with its numbers and what would help.

    Args:
        settings: the run's configuration, sections with keys as in its YAML file (`config.to_mapping`): settings that are as
            advised already are left out of the advice.
    """
    outcome, cause = _told(error)
    text = str(cause)
    if outcome == "oom_device":
        numbers = _device_memory() | _in_message(text, _DEVICE)
        if "total" in numbers:
            numbers["limit"] = numbers.get("allowed", numbers["total"])
    elif outcome == "oom_pinned":
        numbers = _pinned_memory() | _in_message(text, _REGISTER)
    elif outcome == "oom_host":
        numbers = host_limits() | _in_message(text, _HOST)
    else:
        return Explanation(outcome, reason(cause))
    order = ("asked", "in use", "limit", "free")
    numbers = {name: numbers[name] for name in order if name in numbers} | numbers
    return Explanation(outcome, reason(cause), numbers, advice(outcome, settings or {}, numbers))


def killed(number: int, by_kernel: bool, settings: dict[str, Any] | None = None) -> Explanation:
    """How a process ended that signal `number` killed, and that so has no exception.

    Args:
        by_kernel: whether the kernel says that its out-of-memory killer did it (the count in the control group's
            memory.events rose, or its log names the process).
    """
    name = signal.Signals(number).name
    if number == signal.SIGKILL and by_kernel:
        numbers, why = host_limits(), f"{name} by the kernel's out-of-memory killer"
        return Explanation("oom_host", why, numbers, advice("oom_host", settings or {}, numbers))
    return Explanation("failed", f"ended by {name}")


_QUANTITY = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# The words of torch 2.11 to 2.13 (CUDACachingAllocator.cpp, alloc_cpu.cpp), numpy's, and `host`'s.
_DEVICE = {
    "asked": rf"Tried to allocate {_QUANTITY}",
    "in use": rf"this process has {_QUANTITY} memory in use",
    "total": rf"total capacity of {_QUANTITY}",
    "allowed": rf"{_QUANTITY} allowed",
    "free": rf"of which {_QUANTITY} is free",
    "allocated by torch": rf"{_QUANTITY} is allocated by PyTorch",
    "reserved but unallocated": rf"{_QUANTITY} is reserved by PyTorch but unallocated",
}
_HOST = {"asked": rf"(?:tried to allocate|Unable to allocate) {_QUANTITY}"}
_REGISTER = {"asked": rf"cudaHostRegister of {_QUANTITY}", "pinned": rf"has {_QUANTITY} \([^)]*\) pinned"}


def _in_message(text: str, patterns: dict[str, str]) -> dict[str, int]:
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: round(float(m[1]) * _UNITS[m[2]]) for name, m in found.items() if m is not None}


def _device_memory() -> dict[str, int]:
    """Of the current GPU and of torch on it; nothing where CUDA was not started or is in an error that keeps it from saying."""
    if not torch.cuda.is_initialized():
        return {}
    try:
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    except RuntimeError:
        return {}
    return {
        "in use": total - free, "total": total, "free": free, "allocated by torch": allocated,
        "reserved but unallocated": reserved - allocated,
    }  # fmt: skip


def _pinned_memory() -> dict[str, int]:
    numbers = {"pinned": host.pool().pinned_bytes, "held on the host": host.pool().held_bytes}
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY:
        numbers["limit (ulimit -l)"] = limit
    return numbers | {name: nbytes for name, nbytes in host_limits().items() if name != "in use"}


def host_limits(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Host memory, in bytes: "in use", this process's resident set; "limit", the machine's memory or that of this process's
    control group where it is less; "free", what is available within it; "host.pool()", what offload holds of it."""
    machine = psutil.virtual_memory()
    limit, free = machine.total, machine.available
    for most, used in _control_groups(proc, cgroups):
        if most < limit:
            limit, free = most, min(free, most - used)
    return {"in use": psutil.Process().memory_info().rss, "limit": limit, "free": free, "host.pool()": host.pool().held_bytes}


def _control_groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of the control groups around this process, of both kinds, those that have a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = Path(path.lstrip("/"))
        # A group is bound by those above it too; inside a container its path may be another namespace's.
        for folder in (own, *own.parents):
            try:
                most, used = ((root / folder / name).read_text().strip() for name in names)
            except OSError:
                continue
            if most.isdecimal() and used.isdecimal():
                yield int(most), int(used)


def _size(nbytes: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.2f} {unit}"
    return f"{nbytes} bytes"


FRAGMENTED = 0.05
"""Share of the limit that is reserved but unallocated, from which on fragmentation is worth a line."""

Now = Callable[..., Any]
DEVICE, PINNED, HOST = ("oom_device",), ("oom_pinned",), ("oom_host",)


def _ulysses(now: Now) -> int:
    return now("upipe.sp_size", 1) // max(1, now("upipe.ring_degree", 1))


def _offloads(now: Now) -> bool:
    return now("memory.offload", "none") != "none"


# Against which outcomes; the setting and the value; what it does and costs; whether it is open, given the settings of now.
_ADVICE: tuple[tuple[tuple[str, ...], str, str, str, Callable[[Now], bool]], ...] = (
    (DEVICE, "memory.mlp_tokens", "8192", "the MLP in tiles; next to no time", lambda now: now("memory.mlp_tokens") is None),
    (DEVICE, "memory.norm_tokens", "8192", "no fp32 copy; next to no time", lambda now: now("memory.norm_tokens") is None),
    (DEVICE, "memory.loss_tokens", "2048", "no whole logits; next to no time", lambda now: now("memory.loss_tokens") is None),
    (DEVICE, "model.checkpointing", "non-reentrant", "layers keep their input alone; one more forward a step",
     lambda now: now("model.checkpointing", "none") == "none"),
    (DEVICE, "memory.offload", "pinned", "saved inputs on the host, copied beside computation",
     lambda now: now("memory.offload", "none") in ("none", "auto")),
    (DEVICE, "memory.keep_layers_on_gpu", "0", "the last layers' inputs on the host too",
     lambda now: _offloads(now) and now("memory.keep_layers_on_gpu", "auto") != 0),
    (DEVICE, "train.zero_stage", "3", "states and parameters sharded; gathers beside computation",
     lambda now: now("train.zero_stage", 3) != 3),
    (DEVICE, "upipe.heads_per_stage", "{ulysses}", "the narrowest stages of attention",
     lambda now: (now("upipe.heads_per_stage") or 0) > _ulysses(now)),
    (DEVICE, "upipe.attention_output", "host", "recomputed from the host, not kept on the device; needs host memory",
     lambda now: now("upipe.attention_output", "device") != "host"),
    (DEVICE, "upipe.dx", "bf16", "one u less with attention_output: host; its sum over stages is rounded each time",
     lambda now: now("upipe.dx", "gemm") != "bf16"),
    (DEVICE, "upipe.overlap", "false", "one stage's buffers in place of two; exchanges are waited for",
     lambda now: now("upipe.overlap", True) is True),
    (DEVICE, "memory.prefetch", "false", "one saved input less; each is waited for",
     lambda now: _offloads(now) and now("memory.prefetch", True) is True),
    (DEVICE, "memory.optimizer", "cpu", "optimizer states on the host; a slower optimizer step",
     lambda now: now("memory.optimizer", "device") != "cpu"),
    (PINNED, "memory.pinned_fallback", "true", "goes on pageable from where pinning fails",
     lambda now: now("memory.offload") == "pinned" and now("memory.pinned_fallback") is not True),
    (PINNED, "memory.offload", "pageable", "ordinary memory through a small pinned ring; a few per cent of a step",
     lambda now: now("memory.offload", "pinned") != "pageable"),
    (PINNED + HOST, "memory.keep_layers_on_gpu", "more", "that many more saved inputs on the device", _offloads),
    (PINNED + HOST, "upipe.attention_output_layers", "auto", "attention outputs of only as many layers as the host has room for",
     lambda now: now("upipe.attention_output", "device") != "device" and now("upipe.attention_output_layers") != "auto"),
    (PINNED + HOST, "memory.store_every", "2", "one stored input for two layers; one more forward of the first of them",
     lambda now: _offloads(now) and now("memory.store_every", 1) == 1),
    (PINNED + HOST, "upipe.attention_output", "device", "nothing of attention on the host; its forward runs once more a step",
     lambda now: now("upipe.attention_output", "device") != "device"),
    (HOST, "memory.optimizer", "device", "its states on the GPU", lambda now: now("memory.optimizer", "device") != "device"),
    (HOST, "memory.offload", "none", "saved inputs on the device", _offloads),
    (DEVICE + PINNED + HOST, "upipe.sp_size", "larger", "fewer tokens a rank; needs more GPUs", lambda now: True),
    (DEVICE + PINNED + HOST, "data.tokens", "fewer", "all but the states is in proportion", lambda now: True),
)  # fmt: skip


def advice(outcome: str, settings: dict[str, Any], numbers: dict[str, int]) -> tuple[str, ...]:
    """Settings that would help against an outcome, those that cost the least first, as "section.key: value (now ...) - what it
    does"; what is set so already is left out.

    Args:
        settings: sections with keys, as a run's YAML file has them; what is missing counts as its default.
        numbers: of the outcome, bytes (see `Explanation`).
    """

    def now(key: str, default: Any = None) -> Any:
        section, name = key.split(".")
        return settings.get(section, {}).get(name, default)

    lines = []
    loose, limit = numbers.get("reserved but unallocated", 0), numbers.get("limit", 0)
    if outcome == "oom_device" and limit and loose > FRAGMENTED * limit:
        lines.append(f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment - lost to fragments: {_size(loose)}")
    if outcome == "oom_pinned" and any("ulimit" in name for name in numbers):
        lines.append("ulimit -l unlimited, in the shell or the scheduler - costs nothing")
    for outcomes, key, value, what, is_open in _ADVICE:
        if outcome in outcomes and is_open(now):
            given = "" if now(key) is None else f" (now {now(key)})"
            lines.append(f"{key}: {value.format(ulysses=_ulysses(now))}{given} - {what}")
    return tuple(lines)
