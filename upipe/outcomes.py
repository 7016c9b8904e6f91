"""How a run ended, told by its cause: the exception that ended it, never an exit code.

| outcome | cause |
|---|---|
| oom_device | the GPU's memory: torch.OutOfMemoryError, or an allocation of the driver, NCCL or cuBLAS |
| oom_pinned | page-locked host memory: cudaHostAlloc or cudaHostRegister failed |
| oom_host | host memory: MemoryError, torch's CPU allocator, ENOMEM |
| refused | PreflightError or ConfigError: named before the first step |
| failed | everything else |

CUDA words a failed page-locked allocation as it does a device one ("CUDA error: out of memory"), so those two are told
apart by the statement that failed, which the traceback has.
"""

from __future__ import annotations

import errno
import linecache
import re
import traceback
from pathlib import Path

import torch

from upipe.config import ConfigError
from upipe.preflight import PreflightError

_PINNED = re.compile(r"cudaHostAlloc|cudaHostRegister|cudaMallocHost|pinned host memory", re.IGNORECASE)
_PINNING = re.compile(_PINNED.pattern + r"|pin_memory|host_register", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA (host )?(m|c)alloc")
_CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory")


def classify(error: BaseException) -> tuple[str, str]:
    """The outcome that an exception stands for, and the reason: its type and message, first line."""
    for cause in _causes(error):
        outcome = _outcome(cause)
        if outcome != "failed":
            return outcome, reason(cause)
    return "failed", reason(error)


def reason(error: BaseException) -> str:
    """One line: the exception's type and the first line of its message (the whole of it for a refusal)."""
    text = str(error).strip()
    if not isinstance(error, (PreflightError, ConfigError)):
        text = text.split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _causes(error: BaseException):
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
