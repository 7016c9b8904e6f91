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
import json
import linecache
import re
import resource
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
import torch

from upipe import host, models
from upipe.apply import UPipeConfig
from upipe.build import ModelConfig
from upipe.config import ConfigError
from upipe.glm.config import preset_shapes as glm_shapes
from upipe.layer import SERVED
from upipe.loss import LOSS_TILE_TOKENS
from upipe.memory import MemoryConfig
from upipe.methods import config as methods
from upipe.oom_killer import death
from upipe.optimize import TrainConfig
from upipe.preflight import PreflightError
from upipe.presets import preset_shapes
from upipe.tiled import MLP_TILE_TOKENS, NORM_TILE_TOKENS

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
    return Explanation(outcome, reason(cause), numbers, advice(outcome, settings or {}, numbers, getattr(cause, "memory", None)))


def killed(number: int, by_kernel: bool | None, settings: dict[str, Any] | None = None) -> Explanation:
    """How another process ended that signal `number` killed, and that so has no exception.

    Args:
        by_kernel: whether the kernel says that its out-of-memory killer did it (`oom_killer`); None: it does not say.
    """
    outcome, why = death(number, by_kernel)
    if outcome != "oom_host":
        return Explanation(outcome, why)
    # What that process held is free again, and this one's use says nothing of it.
    numbers = {"limit": host_limits()["limit"]}
    return Explanation(outcome, why, numbers, advice(outcome, settings or {}, numbers))


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


GLM = "glm5_next"
FRAGMENTED = 0.05
"""Share of the limit that is reserved but unallocated, from which on fragmentation is worth a line."""

DEVICE, PINNED, HOST = ("oom_device",), ("oom_pinned",), ("oom_host",)
_SECTIONS = {"model": ModelConfig, "train": TrainConfig, "upipe": UPipeConfig, "memory": MemoryConfig}
_DEFAULTS = {f"{name}.{f.name}": f.default for name, section in _SECTIONS.items() for f in fields(section)} | {"memory.offload": "none"}


class _Now:
    """The settings of a run, by "section.key"; what is missing has its default.

    memory: which memory ran out, where the exception says (`host.PinnedHostMemoryError.memory`).
    """

    def __init__(self, settings: dict[str, Any], memory: str | None = None) -> None:
        self.settings, self.memory = settings, memory

    def given(self, key: str) -> Any:
        section, name = key.split(".")
        values = self.settings.get(section)
        return values.get(name) if isinstance(values, dict) else None

    def __call__(self, key: str) -> Any:
        value = self.given(key)
        return _DEFAULTS.get(key) if value is None else value

    @property
    def offloads(self) -> bool:
        """Whether layers' inputs go to the host, a number of them that is set rather than estimated."""
        return self("memory.offload") in ("pinned", "pageable")

    @property
    def ulysses(self) -> int:
        return max(1, self("upipe.sp_size") // max(1, self("upipe.ring_degree")))

    @property
    def family(self) -> str | None:
        """The model's type, where the settings or its folder say."""
        pretrained, preset = self("model.pretrained"), self("model.preset")
        if pretrained is not None:
            try:
                described = json.loads((Path(pretrained) / "config.json").read_text())
                return described.get("text_config", described)["model_type"]
            except (OSError, ValueError, KeyError, AttributeError):
                return None
        if preset is not None:
            return (glm_shapes() | preset_shapes()).get(preset, {}).get("model_type", GLM)
        return self("model.architecture") or ("llama" if self("model.hidden_size") else None)

    @property
    def layers(self) -> int | None:
        return self("model.layers") or (glm_shapes() | preset_shapes()).get(self("model.preset"), {}).get("num_hidden_layers")

    @property
    def parts(self) -> bool:
        """Whether the model takes the stack's tiles, pairs and stages; a GLM model has its own."""
        return self("model.glm") is None and not (self.family or "").startswith(GLM)

    @property
    def stages(self) -> bool:
        return self.parts and methods.name_in(self.settings) == "upipe"

    @property
    def may_fuse(self) -> bool:
        return self.stages and self.family in (None, *SERVED)

    @property
    def fused(self) -> bool:
        return self("memory.fused_layers") is True

    @property
    def within(self) -> bool:
        return self("memory.offload_within_layer") is True

    @property
    def all_heads_normed(self) -> bool:
        """Whether a q/k norm runs over all heads, which `dx: bf16` does not serve."""
        return any(a.norm_width == "full" for a in models.ARCHITECTURES if a.name == self.family)


_CHECKPOINTED = ("model.checkpointing", ("non-reentrant",))
_FUSED = (("upipe.dx", ("gemm",)), ("memory.offload", ("pinned", "pageable", "auto")), _CHECKPOINTED)
_WITHIN = (
    ("memory.fused_layers", (True,)), ("memory.offload", ("pinned", "pageable")), ("memory.prefetch", (False,)),
    ("memory.keep_layers_on_gpu", (0, "auto")), ("memory.pinned_fallback", (False,)), ("upipe.dx", ("gemm",)), _CHECKPOINTED,
)  # fmt: skip


def _width(now: _Now) -> tuple[int]:
    return (now.ulysses,)


def _host_outputs(now: _Now) -> tuple[str]:
    return ("auto" if now("upipe.attention_output_layers") is None else "fewer",)


def _pairs(now: _Now) -> tuple[int | None]:
    """An odd number of layers is not all pairs."""
    return (now.layers // 2 if (now.layers or 0) % 2 else None,)


def _keeps_some(now: _Now) -> bool:
    keep = now("memory.keep_layers_on_gpu")
    paired = now("memory.store_every") == 2 and now("memory.pairs") is None
    return now.offloads and keep != 0 and not (keep == "auto" and (paired or now.within))


Allowed = tuple[Any, ...] | Callable[[_Now], tuple[Any, ...]]
# Against which outcomes; what it does and costs; whether it is open, given the settings of now; the setting, and then others that it
# needs. Of the values that a setting may have the first is advised; the others are named where theirs of now is none of them.
_ADVICE: tuple[tuple[tuple[str, ...], str, Callable[[_Now], bool], tuple[tuple[str, Allowed], ...]], ...] = (
    (DEVICE, "the MLP in tiles; next to no time",
     lambda now: now.parts and not now.fused and now("memory.mlp_tokens") is None, (("memory.mlp_tokens", (MLP_TILE_TOKENS,)),)),
    (DEVICE, "no fp32 copy; next to no time",
     lambda now: now.parts and now("memory.norm_tokens") is None, (("memory.norm_tokens", (NORM_TILE_TOKENS,)),)),
    (DEVICE, "no whole logits; next to no time",
     lambda now: now.parts and now("memory.loss_tokens") is None, (("memory.loss_tokens", (LOSS_TILE_TOKENS,)),)),
    (DEVICE, "layers keep their input alone; one more forward a step",
     lambda now: now("model.checkpointing") == "none", (_CHECKPOINTED,)),
    (DEVICE, "saved inputs on the host, copied beside computation",
     lambda now: now("memory.offload") in ("none", "auto"), (("memory.offload", ("pinned",)), _CHECKPOINTED)),
    (DEVICE, "a layer as one function, without what its parts hold beside each other (Llama, Mistral, Qwen2, Qwen3); next to no time",
     lambda now: now.may_fuse and not now.fused, (("memory.fused_layers", (True,)), *_FUSED)),
    (DEVICE, "the last layers' inputs on the host too", _keeps_some, (("memory.keep_layers_on_gpu", (0,)),)),
    (DEVICE, "states and parameters sharded; gathers beside computation",
     lambda now: now("train.zero_stage") != 3, (("train.zero_stage", (3,)),)),
    (DEVICE, "the narrowest stages of attention",
     lambda now: now.stages and (now("upipe.heads_per_stage") == "auto" or (now("upipe.heads_per_stage") or 0) > now.ulysses),
     (("upipe.heads_per_stage", _width),)),
    # In parts of a layer alone: attention_output: host by itself lowers no peak, dx: bf16 without it raises one.
    (DEVICE, "about one u less with dx: bf16; attention runs forward once a step, and needs host memory",
     lambda now: now.stages and not now.fused and now("upipe.dx") == "bf16" and now("upipe.attention_output") != "host",
     (("upipe.attention_output", ("host",)), _CHECKPOINTED)),
    (DEVICE, "about one u less in layers that are not fused; their sum over stages is rounded each time",
     lambda now: now.stages and not now.fused and now.family not in SERVED and not now.all_heads_normed and now("upipe.dx") != "bf16",
     (("upipe.dx", ("bf16",)), ("upipe.attention_output", ("host",)), _CHECKPOINTED)),
    (DEVICE, "one stage's buffers in place of two; exchanges are waited for",
     lambda now: now.stages and now("upipe.overlap") is True, (("upipe.overlap", (False,)),)),
    (DEVICE, "one saved input less; each is waited for",
     lambda now: now("memory.offload") != "none" and now("memory.prefetch") is True, (("memory.prefetch", (False,)),)),
    (DEVICE, "up to three u less, of a fused layer's working tensors; copies are waited for",
     lambda now: now.may_fuse and not now.within and now("train.micro_batch_size") == 1,
     (("memory.offload_within_layer", (True,)), *_WITHIN)),
    (DEVICE, "optimizer states on the host; a slower optimizer step",
     lambda now: now("memory.optimizer") != "cpu", (("memory.optimizer", ("cpu",)), ("train.zero_stage", (3, 2, 1)))),
    (PINNED, "goes on pageable from where pinning fails",
     lambda now: now.memory in (None, host.SAVED) and now("memory.offload") in ("pinned", "auto")
     and now("memory.pinned_fallback") is not True and not now.within, (("memory.pinned_fallback", (True,)),)),
    (PINNED, "ordinary memory through a small pinned ring; a few per cent of a step",
     lambda now: now.memory in (None, host.SAVED, host.WORKING) and now("memory.offload") in ("pinned", "auto"),
     (("memory.offload", ("pageable",)), ("memory.pinned_fallback", (False,)), _CHECKPOINTED)),
    (PINNED + HOST, "that many more saved inputs on the device",
     lambda now: now.offloads and not now.within, (("memory.keep_layers_on_gpu", ("more",)),)),
    (PINNED + HOST, "attention outputs of fewer layers on the host; the others run attention forward once more a step",
     lambda now: now.stages and now("upipe.attention_output") == "host" and now("upipe.attention_output_layers") != 0,
     (("upipe.attention_output_layers", _host_outputs),)),
    (PINNED + HOST, "one stored input for two layers; one more forward of the first of them",
     lambda now: now.parts and now.offloads and now("memory.store_every") == 1, (("memory.store_every", (2,)), ("memory.pairs", _pairs))),
    (PINNED + HOST, "nothing of attention on the host; its forward runs once more a step",
     lambda now: now.stages and now("upipe.attention_output") == "host",
     (("upipe.attention_output", ("device",)), ("upipe.attention_output_layers", (None,)))),
    (PINNED + HOST, "a layer's working tensors on the device", lambda now: now.within, (("memory.offload_within_layer", (False,)),)),
    (HOST, "its states on the GPU", lambda now: now("memory.optimizer") != "device", (("memory.optimizer", ("device",)),)),
    (HOST, "saved inputs on the device",
     lambda now: now("memory.offload") != "none" and not now.fused and now("memory.store_every") == 1,
     (("memory.offload", ("none",)), ("memory.keep_layers_on_gpu", ("auto",)), ("memory.pinned_fallback", (False,)))),
    (DEVICE + PINNED + HOST, "a row at a time; with as many times more train.accumulation a step has the same tokens",
     lambda now: (now("train.micro_batch_size") or 1) > 1, (("train.micro_batch_size", (1,)),)),
    (DEVICE + PINNED + HOST, "fewer tokens a rank; needs more GPUs",
     lambda now: methods.name_in(now.settings) != "none", (("upipe.sp_size", ("larger",)),)),
    (DEVICE + PINNED + HOST, "all but the states is in proportion", lambda now: True, (("data.tokens", ("fewer",)),)),
)  # fmt: skip


def advice(outcome: str, settings: dict[str, Any], numbers: dict[str, int], memory: str | None = None) -> tuple[str, ...]:
    """Settings that would help against an outcome, those that cost the least first, as "section.key: value (now ...) - what it
    does"; what is set so already is left out. Where a setting needs others, they are on its line: "... with section.key: value, ...".
    Each line may be taken by itself.

    Args:
        settings: sections with keys, as a run's YAML file has them; what is missing counts as its default.
        numbers: of the outcome, bytes (see `Explanation`).
        memory: which pinned memory could not be had, one of `host.WORKS`; None: not known.
    """
    now = _Now(settings, memory)
    lines = []
    loose, limit = numbers.get("reserved but unallocated", 0), numbers.get("limit", 0)
    if outcome == "oom_device" and limit and loose > FRAGMENTED * limit:
        lines.append(f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment - lost to fragments: {_size(loose)}")
    if outcome == "oom_pinned" and any("ulimit" in name for name in numbers):
        lines.append("ulimit -l unlimited, in the shell or the scheduler - costs nothing")
    for outcomes, what, is_open, wanted in _ADVICE:
        if outcome in outcomes and is_open(now):
            values = [(key, allowed(now) if callable(allowed) else allowed) for key, allowed in wanted]
            others = [(key, allowed) for key, allowed in values[1:] if now(key) not in allowed]
            first, *rest = (_setting(now, key, allowed[0]) for key, allowed in values[:1] + others)
            lines.append(f"{first}{' with ' if rest else ''}{', '.join(rest)} - {what}")
    return tuple(lines)


def _setting(now: _Now, key: str, value: Any) -> str:
    given = now.given(key)
    return f"{key}: {_yaml(value)}" + ("" if given is None else f" (now {_yaml(given)})")


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
