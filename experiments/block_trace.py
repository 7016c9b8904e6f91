"""What a GPU did during a step, from the profiler's trace: communication that compute hides, and communication that it waits for.

A span is (start, end) in microseconds. Communication: NCCL's kernels, peer-to-peer copies, and copies between device and
host. Compute: every other kernel, and what else the copy engines and memset do on the device. Communication is exposed
while no compute runs, whether something waits for it or the GPU is idle. A trace with named spans (`upipe.parts`) also says what of
the step it was for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from upipe.parts import named
from upipe.profiling import HOST_CATEGORIES, Span, by_part, has_parts, length, overlap, union

COMPUTE, NCCL, HOST = "compute", "nccl", "host_copies"
MARKER = "spin_kernel"
"""What torch.cuda._sleep runs."""


def exposure(communication: list[Span], compute: list[Span]) -> dict[str, float | None]:
    """total_ms and exposed_ms of communication, and exposed_ratio, exposed over total; None where there is none."""
    total = length(communication)
    exposed = total - overlap(communication, compute)
    return {"total_ms": total / 1e3, "exposed_ms": exposed / 1e3, "exposed_ratio": exposed / total if total else None}


def kind_of(category: str, name: str) -> str | None:
    """What a trace event counts as: "compute", "nccl" or "host_copies"; None where it is none of the GPU's."""
    if category == "kernel":
        return NCCL if "nccl" in name.lower() else COMPUTE
    if category == "gpu_memcpy":
        if "HtoD" in name or "DtoH" in name:
            return HOST
        return NCCL if "PtoP" in name else COMPUTE
    return COMPUTE if category == "gpu_memset" else None


def summary(events: Iterable[dict[str, Any]], top: int = 12) -> dict[str, Any]:
    """What a trace says.

    Args:
        events: `traceEvents` of a Chrome trace as torch.profiler writes it; ts and dur in microseconds.
        top: how many kernels to name.

    Returns:
        window_ms, from the first GPU event to the last; busy_ms, idle_ms, compute_ms in it; `exposure` of nccl,
        host_copies and both together (communication); top, the kernels and copies that took longest, each name, ms (added
        up, also where some ran at once), share of the window, count. Of a trace with named spans also parts_ms, which divides
        the window by part without rest, and communication_ms, hidden or not, of the parts that have any
        (`upipe.profiling.by_part`).

    Raises:
        ValueError: there is no GPU event.
    """
    spans: dict[str, list[Span]] = {COMPUTE: [], NCCL: [], HOST: []}
    by_name: dict[str, list[float]] = {}
    events = list(events)
    for event in events:
        kind = kind_of(event.get("cat", ""), event.get("name", "")) if event.get("ph") == "X" else None
        if kind is None:
            continue
        start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        spans[kind].append((start, start + duration))
        by_name.setdefault(event["name"], []).append(duration)
    everything = union(span for kind in spans.values() for span in kind)
    if not everything:
        raise ValueError("the trace has no GPU event: nothing ran on a GPU, or the profiler was not allowed to see it")
    window, busy = everything[-1][1] - everything[0][0], length(everything)
    parts = by_part(events) if has_parts(events) else None
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "window_ms": window / 1e3,
        "busy_ms": busy / 1e3,
        "idle_ms": (window - busy) / 1e3,
        "compute_ms": length(spans[COMPUTE]) / 1e3,
        NCCL: exposure(spans[NCCL], spans[COMPUTE]),
        HOST: exposure(spans[HOST], spans[COMPUTE]),
        "communication": exposure(spans[NCCL] + spans[HOST], spans[COMPUTE]),
        "top": [{"name": n[:100], "ms": sum(d) / 1e3, "share": sum(d) / window, "count": len(d)} for n, d in longest],
    } | ({} if parts is None else {"parts_ms": parts.ms, "communication_ms": parts.communication_ms})


def after_marker(events: list[dict[str, Any]], marker: str = MARKER) -> list[dict[str, Any]]:
    """The GPU's events that start after the last kernel of that name has ended. Raises ValueError where there is none."""
    ends = [float(e["ts"]) + float(e.get("dur", 0.0)) for e in events if e.get("cat") == "kernel" and marker in e["name"]]
    if not ends:
        raise ValueError(f"the trace has no {marker}: the profiler did not see the GPU's kernels")
    return [e for e in events if kind_of(e.get("cat", ""), e.get("name", "")) is not None and float(e["ts"]) >= max(ends)]


def trace(
    step: Callable[[], None], together: Callable[[], None], naming: AbstractContextManager | None = None
) -> list[dict[str, Any]]:
    """The GPU's events of one call of `step`; the GPU is idle before and after.

    `together` is a barrier of the ranks. It runs after the profiler has started, which takes each rank another while, and
    a kernel of torch's that only waits marks where it is over. With `naming`, such as `upipe.parts.named`, the step runs inside it, and
    the host's events that say what work was for come too; the host is then slower. Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("profiling needs a GPU: its kernels and copies are what is looked at")
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA] if naming is None else [kinds.CPU, kinds.CUDA]) as profiler:
        together()
        torch.cuda.synchronize()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        with nullcontext() if naming is None else naming:
            step()
        torch.cuda.synchronize()
    events = _events(profiler)
    host = [] if naming is None else [e for e in events if e.get("cat") in HOST_CATEGORIES]
    return after_marker(events) + host


def parts_of(step: Callable[[], None], together: Callable[[], None], engine: torch.nn.Module) -> dict[str, Any]:
    """`summary` of one step of an engine (or model) with its parts. Without a GPU of torch's operators, and only window_ms, parts_ms and
    communication_ms. together: as in `trace`."""
    if torch.cuda.is_available():
        return summary(trace(step, together, named(engine)))
    together()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, named(engine):
        step()
    found = by_part(_events(profiler))
    return {"window_ms": found.window_ms, "parts_ms": found.ms, "communication_ms": found.communication_ms}


def _events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
