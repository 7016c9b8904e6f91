"""Profiles of one step: `profile: memory` (see `memory_report`) and `profile: trace`, a PyTorch Profiler trace with a table by
phase and one by part.

    with profiling.trace(engine, "step.json.gz") as trace:
        loss = handle.loss(engine, batch); engine.backward(loss); engine.step()
    print(trace.table())

A phase is a time of the host: forward, recompute (decoder layers run again), backward without that, optimizer, rest (the
loss, where it is made outside of the model). Work of the GPU belongs to the phase in which the host asked for it, whichever
thread did; it may run later. Kinds of work: attention kernels, products (GEMM), exchanges (NCCL, and gloo on the CPU), copies
(between device and host and on the device), other. Without a GPU the operators of torch are counted, each without those
inside it and in the phase in which it runs.

A second table is by part of the model and of the step (`by_part`; `parts` says which there are and how they are named):
  1. each kernel or copy is traced to the call that launched it, and so to the innermost named span of that host thread;
  2. two rules by name come first: an NCCL kernel is all-to-all inside attention's spans and ZeRO elsewhere, a copy between device
     and host is offload except inside ZeRO's and the optimizer's; an exchange of a thread without spans goes by its own name;
  3. each moment of the window is given away once: to the computation that runs; else to the exchange; else to the host copy;
     else it is idle. What runs at once on several streams shares it equally.

A span is (start, end), in microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from upipe import memory_report, parts
from upipe.memory_report import MemoryReport, phases

Span = tuple[float, float]
Mode = Literal["none", "report", "memory", "trace"]
PHASES = ("forward", "recompute", "backward", "optimizer", "rest")
ATTENTION, PRODUCTS, EXCHANGES, COPIES, OTHER = "attention", "products", "exchanges", "copies", "other"
KINDS = (ATTENTION, PRODUCTS, EXCHANGES, COPIES, OTHER)
PREFIX = "upipe: "
"""What names of phases begin with in a trace."""
IDLE = "idle"
COMMUNICATION = (parts.ALL_TO_ALL, parts.ZERO, parts.OFFLOAD)
"""Parts that have exchanges and host copies of their own."""
HOST_CATEGORIES = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver", "fwdbwd")
"""Of a Chrome trace's events those of the host that `by_part` needs."""

_ATTENTION = re.compile(r"flash|fmha|sdpa|scaled_dot_product|_efficient_attention", re.I)
_EXCHANGE = re.compile(r"nccl|^gloo:|^c10d::|record_param_comms|PtoP", re.I)
_PRODUCT = re.compile(r"gemm|nvjet|cublas|cutlass|splitk|^aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|_addmm_activation)$", re.I)
_COPY = re.compile(r"^memcpy|^aten::(copy_|_to_copy|cat|clone)$|copy_kernel|CatArrayBatchedCopy", re.I)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans in order; empty spans are dropped, touching ones joined."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    """How long at least one of the spans lasts."""
    return sum(end - start for start, end in union(spans))


def overlap(one: Iterable[Span], other: Iterable[Span]) -> float:
    """How long a span of each side lasts at once."""
    a, b = union(one), union(other)
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def kind_of(name: str) -> str:
    """What a kernel, a copy or an operator counts as, by its name."""
    for pattern, kind in ((_EXCHANGE, EXCHANGES), (_ATTENTION, ATTENTION), (_PRODUCT, PRODUCTS), (_COPY, COPIES)):
        if pattern.search(name):
            return kind
    return OTHER


@dataclass
class PhaseTimes:
    """One phase. host_ms: how long the host was in it. ms: for each kind how long at least one such piece of work ran.
    busy_ms: how long any ran. exposed_ms: exchanges and copies while no work of another kind ran, in any phase."""

    host_ms: float = 0.0
    busy_ms: float = 0.0
    exposed_ms: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))


def by_phase(events: Iterable[dict[str, Any]]) -> tuple[dict[str, PhaseTimes], bool]:
    """Times of each phase of a trace.

    Args:
        events: `traceEvents` of a Chrome trace of torch.profiler; ts and dur in microseconds.

    Returns:
        Phase -> times; and whether they are a GPU's (else the operators' on the host).

    Raises:
        ValueError: the trace has no phases (it was not taken by `trace`), or nothing ran in it.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    hosts: dict[str, list[Span]] = {phase: [] for phase in PHASES}
    for event in complete:
        name = event["name"].removeprefix(PREFIX)
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX) and name in hosts:
            hosts[name].append(_span(event))
    if not any(hosts.values()):
        raise ValueError(f"the trace has no phases, no event {PREFIX}forward or so: take it with profiling.trace")
    gpu = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = _on_gpu(complete, gpu) if gpu else _cut(_on_host(complete), hosts)
    if not work:
        raise ValueError(_NOTHING)
    spans: dict[str, dict[str, list[Span]]] = {phase: {kind: [] for kind in KINDS} for phase in PHASES}
    for item in work:
        spans[_phase_at(item.asked, hosts)][kind_of(item.name)].append(item.span)
    hidden = union(s for kinds in spans.values() for kind in (ATTENTION, PRODUCTS, OTHER) for s in kinds[kind])
    inside = union(hosts["recompute"])
    found = {}
    for phase in PHASES:
        moving = spans[phase][EXCHANGES] + spans[phase][COPIES]
        found[phase] = PhaseTimes(
            host_ms=(length(hosts[phase]) - (overlap(hosts[phase], inside) if phase == "backward" else 0.0)) / 1e3,
            busy_ms=length(s for kind in KINDS for s in spans[phase][kind]) / 1e3,
            exposed_ms=(length(moving) - overlap(moving, hidden)) / 1e3,
            ms={kind: length(spans[phase][kind]) / 1e3 for kind in KINDS},
        )
    return found, bool(gpu)


def _span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def _phase_at(time: float, hosts: dict[str, list[Span]]) -> str:
    for phase in ("recompute", "backward", "forward", "optimizer"):
        if any(start <= time < end for start, end in hosts[phase]):
            return phase
    return "rest"


def _cut(work: list[_Work], hosts: dict[str, list[Span]]) -> list[_Work]:
    """The host's work in pieces that lie in one phase each: the range around a checkpoint is open while its layers run again."""
    edges = sorted({moment for spans in hosts.values() for span in spans for moment in span})
    pieces = []
    for item in work:
        start, end = item.span
        inner = edges[bisect_right(edges, start) : bisect_left(edges, end)]
        for left, right in pairwise((start, *inner, end)):
            pieces.append(item._replace(asked=left, span=(left, right)))
    return pieces


_NOTHING = "the trace has no kernel and no operator: nothing ran in it, or the profiler was not allowed to see it"


class _Work(NamedTuple):
    """A piece of work. asked, thread: when and where the host asked for it; thread None: the trace does not tell."""

    name: str
    category: str
    asked: float
    thread: tuple | None
    span: Span


def _on_gpu(complete: list[dict[str, Any]], gpu: list[dict[str, Any]]) -> list[_Work]:
    """Asked for by the launching call; where the profiler has none, as of a driver's call that it does not watch, by the operator."""
    operators = {
        e["args"]["External id"]: (float(e["ts"]), _thread(e))
        for e in complete
        if e.get("cat") == "cpu_op" and _is_operator(e["name"]) and "External id" in e.get("args", {})
    }
    asked = {
        e["args"]["correlation"]: (float(e["ts"]), _thread(e))
        for e in complete
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    work = []
    for e in gpu:
        args = e.get("args", {})
        launched = asked.get(args.get("correlation")) or operators.get(args.get("External id")) or (float(e["ts"]), None)
        work.append(_Work(e["name"], e["cat"], *launched, _span(e)))
    return work


def _thread(event: dict[str, Any]) -> tuple:
    return event.get("pid"), event.get("tid")


def _on_host(complete: list[dict[str, Any]]) -> list[_Work]:
    """Operators, in the pieces in which no operator inside them runs."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in complete:
        if event.get("cat") == "cpu_op" or (event.get("cat") == "user_annotation" and event["name"].startswith("gloo:")):
            threads.setdefault(_thread(event), []).append(event)
    work: list[_Work] = []

    def add(event, start: float, end: float) -> None:
        if end > start:
            work.append(_Work(event["name"], event["cat"], start, _thread(event), (start, end)))

    for own in threads.values():
        # Operators that are open, from the outermost; `at` is how far the innermost one's time is given out.
        inside: list[tuple[float, dict[str, Any]]] = []
        at = 0.0
        for event in sorted(own, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0)))):
            start, end = _span(event)
            while inside and inside[-1][0] <= start:
                closed, closing = inside.pop()
                add(closing, at, closed)
                at = max(at, closed)
            if inside:
                add(inside[-1][1], at, start)
            inside.append((end, event))
            at = start
        while inside:
            closed, closing = inside.pop()
            add(closing, at, closed)
            at = max(at, closed)
    return work


@dataclass
class PartTimes:
    """A window divided without rest. ms: part -> its computation, and its exchanges and host copies while nothing computes; last
    IDLE. communication_ms: how long at least one exchange or host copy of a part ran, hidden or not."""

    window_ms: float
    ms: dict[str, float]
    communication_ms: dict[str, float]


def has_parts(events: Iterable[dict[str, Any]]) -> bool:
    """Whether a trace was taken inside `parts.named`."""
    return any(_part_of(event) is not None for event in events)


def by_part(events: Iterable[dict[str, Any]]) -> PartTimes:
    """Times of each part of a trace; without a GPU of torch's operators on the host, whose idle time is Python's.

    Args:
        events: as in `by_phase`; of the host's those of `HOST_CATEGORIES` count.

    Raises:
        ValueError: the trace has no named parts (it was not taken inside `parts.named`), or nothing ran in it.
    """
    events = list(events)
    complete = [e for e in events if e.get("ph") == "X"]
    if not has_parts(complete):
        raise ValueError(f"the trace has no parts, no event {parts.PREFIX}{parts.MLP} or so: take it inside parts.named")
    gpu = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = _on_gpu(complete, gpu) if gpu else _on_host([e for e in complete if _is_operator(e["name"])])
    if not work:
        raise ValueError(_NOTHING)
    spans = _named_spans(events, complete)
    pieces = []
    for item, inside in zip(work, _innermost(work, spans)):
        level, part = _place(item, inside, item.thread in spans)
        pieces.append((level, part, item.span))
    start, end = min(span[0] for *_, span in pieces), max(span[1] for *_, span in pieces)
    moving = {part: [span for level, mine, span in pieces if level > 0 and mine == part] for part in COMMUNICATION}
    return PartTimes(
        (end - start) / 1e3,
        {part: time / 1e3 for part, time in _divided(pieces, start, end).items()},
        {part: length(found) / 1e3 for part, found in moving.items()},
    )


def _is_operator(name: str) -> bool:
    """Not a range around Python code, as functions of autograd are, in which other work runs."""
    return name.startswith("gloo:") or ("::" in name and not name.startswith(("autograd::", "torch::autograd::")))


def _part_of(event: dict[str, Any]) -> str | None:
    """The part that an event names."""
    if event.get("cat") != "user_annotation":
        return None
    if event["name"].startswith(parts.PREFIX):
        return event["name"].removeprefix(parts.PREFIX)
    return parts.OPTIMIZER if event["name"].startswith("Optimizer.step#") else None


class _Range(NamedTuple):
    span: Span
    part: str


def _named_spans(events: list[dict[str, Any]], complete: list[dict[str, Any]]) -> dict[tuple, list[_Range]]:
    """Thread -> spans with a part, those of nodes of the backward among them."""
    spans: dict[tuple, list[_Range]] = {}
    for event in complete:
        part = _part_of(event)
        if part is not None:
            spans.setdefault(_thread(event), []).append(_Range(_span(event), part))
    ends: dict[Any, list[dict[str, Any]]] = {"s": [], "f": []}
    for event in events:
        if event.get("cat") == "fwdbwd" and event.get("ph") in ends:
            ends[event["ph"]].append(event)
    called = [_Work("", "", float(e["ts"]), _thread(e), (0.0, 0.0)) for e in ends["s"]]
    of_link = {e["id"]: part for e, part in zip(ends["s"], _innermost(called, spans)) if part is not None}
    nodes: dict[tuple, Span] = {}
    for event in complete:
        # The node begins with the range around it; the inner one has the link.
        if event.get("cat") == "cpu_op" and "Sequence number" in event.get("args", {}):
            nodes[(*_thread(event), float(event["ts"]))] = _span(event)
    for event in ends["f"]:
        node = nodes.get((*_thread(event), float(event["ts"])))
        if event["id"] in of_link and node is not None:
            spans.setdefault(_thread(event), []).append(_Range(node, of_link[event["id"]]))
    return spans


def _innermost(work: list[_Work], spans: dict[tuple, list[_Range]]) -> list[str | None]:
    """The part of the innermost span in which each piece was asked for."""
    found: list[str | None] = [None] * len(work)
    by_thread: dict[tuple, list[int]] = {}
    for i, item in enumerate(work):
        if item.thread in spans:
            by_thread.setdefault(item.thread, []).append(i)
    for thread, mine in by_thread.items():
        ranges = iter(sorted(spans[thread], key=lambda r: (r.span[0], -r.span[1])))
        following, inside = next(ranges, None), []
        for i in sorted(mine, key=lambda i: work[i].asked):
            time = work[i].asked
            while following is not None and following.span[0] <= time:
                while inside and inside[-1].span[1] <= following.span[0]:
                    inside.pop()
                inside.append(following)
                following = next(ranges, None)
            while inside and inside[-1].span[1] <= time:
                inside.pop()
            found[i] = inside[-1].part if inside else None
    return found


_COMPUTES, _EXCHANGES, _COPIES = range(3)
"""What gets a moment before what."""


def _place(item: _Work, inside: str | None, named: bool) -> tuple[int, str]:
    """Level and part. named: whether the thread is known and has spans: gloo's own threads have none."""
    of_attention = inside in (parts.ATTENTION, parts.ALL_TO_ALL)
    if not named:
        of_attention = re.search(r"all_?to_?all|send|recv", item.name, re.I) is not None
    if item.category in ("kernel", "gpu_memcpy", "gpu_memset"):
        if "nccl" in item.name.lower() or "PtoP" in item.name:
            return _EXCHANGES, parts.ALL_TO_ALL if of_attention else parts.ZERO
        if item.category == "gpu_memcpy" and ("HtoD" in item.name or "DtoH" in item.name):
            return _COPIES, inside if inside in (parts.ZERO, parts.OPTIMIZER) else parts.OFFLOAD
    elif kind_of(item.name) == EXCHANGES:
        return _EXCHANGES, parts.ALL_TO_ALL if of_attention else parts.ZERO
    return _COMPUTES, inside or parts.OTHER


def _divided(pieces: list[tuple[int, str, Span]], start: float, end: float) -> dict[str, float]:
    """Each moment from start to end once: part -> how long."""
    times = dict.fromkeys((*parts.PARTS, IDLE), 0.0)
    pieces = [piece for piece in pieces if piece[2][1] > piece[2][0]]
    changes = sorted((span[i], 1 - 2 * i, level, part) for level, part, span in pieces for i in (0, 1))
    running: list[dict[str, int]] = [{}, {}, {}]
    at = start
    for moment, change, level, part in changes:
        if moment > at:
            shares = next((counts for counts in running if counts), {IDLE: 1})
            for mine, count in shares.items():
                times[mine] += (moment - at) * count / sum(shares.values())
            at = moment
        counts = running[level]
        counts[part] = counts.get(part, 0) + change
        if counts[part] == 0:
            del counts[part]
    times[IDLE] += end - at
    return times


@dataclass
class StepTrace:
    """A traced step. Made by `trace`; filled when its block ends. path: of the Chrome trace (open it in Perfetto).
    times: by phase. parts: by part, None where nothing in it has one. gpu: whether they are a GPU's."""

    path: Path
    times: dict[str, PhaseTimes] | None = None
    gpu: bool = False
    parts: PartTimes | None = None

    def table(self) -> str:
        """Times by phase and by part as text, in ms. In the first table a column is how long at least one such piece of work ran, so
        columns may add up to more than `busy`; the second adds up to the window."""
        what = "the GPU" if self.gpu else "torch's operators on the CPU"
        names = "".join(f"{name:>11}" for name in ("host", "busy", *KINDS, "exposed"))
        lines = [f"ms of {what} by phase", f"  {'phase':<11}{names}"]
        for phase, t in self._done().items():
            numbers = (t.host_ms, t.busy_ms, *(t.ms[kind] for kind in KINDS), t.exposed_ms)
            lines.append(f"  {phase:<11}" + "".join(f"{number:>11.1f}" for number in numbers))
        lines.append("exposed: exchanges and copies while nothing else runs")
        if self.parts is not None:
            lines += ["", f"ms of {what} by part", f"  {'part':<11}{'ms':>11}{'share':>11}{'moving':>11}"]
            window, moving = self.parts.window_ms, self.parts.communication_ms
            for part, time in (self.parts.ms | {"window": window}).items():
                also = f"{moving[part]:>11.1f}" if part in moving else ""
                lines.append(f"  {part:<11}{time:>11.1f}{100 * time / window:>10.1f}%{also}")
            lines.append("moving: its exchanges or host copies, hidden or not; ms has of them what no computation hides")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The table's numbers."""
        phases_ms = {phase: vars(times) for phase, times in self._done().items()}
        return {"gpu": self.gpu, "phases": phases_ms, "parts": None if self.parts is None else vars(self.parts)}

    def _done(self) -> dict[str, PhaseTimes]:
        if self.times is None:
            raise RuntimeError("the step is still being traced: read it after the `with trace(...)` block")
        return self.times


@contextmanager
def trace(engine: nn.Module, path: str | Path):
    """Trace what runs inside, one optimizer step say, with torch.profiler; yields a `StepTrace`, filled at the end.

    Args:
        engine: a DeepSpeed engine (of another module only the forward and the recompute are told apart).
        path: the Chrome trace to write, .json or .json.gz; its folder must be there.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"path={str(path)!r}: a Chrome trace ends in .json or .json.gz")
    cuda = torch.cuda.is_available()
    made = StepTrace(path)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiler:
        # The phases wrap bound methods of the engine: those that have a part by then.
        with parts.named(engine), phases(engine, lambda name: record_function(PREFIX + name)):
            yield made
        if cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        events = json.load(file)["traceEvents"]
    made.times, made.gpu = by_phase(events)
    made.parts = by_part(events) if has_parts(events) else None


class StepProfile:
    """Profiles one step of a training loop: `start(step)` before its first forward, `stop(step)` after its optimizer step.

    Args:
        mode: "none": both do nothing. "memory": `memory_report.recorded`; "report": its table alone, no files. "trace": `trace`.
        engine: a DeepSpeed engine.
        folder: where the files go, made when they are written: memory-rank0.{txt,json,pickle,png} or
            trace-rank0.{txt,json.gz}.
        step: the number of the step to profile. The second of a run shows what the others do; the first warms up.
        rank: of this process.
    """

    def __init__(self, mode: Mode, engine: nn.Module, folder: str | Path, step: int, rank: int) -> None:
        self.mode, self.engine, self.folder, self.step, self.rank = mode, engine, Path(folder), step, rank
        self._open = ExitStack()
        self._made: MemoryReport | StepTrace | None = None

    def start(self, step: int) -> None:
        if self.mode == "none" or step != self.step or self._made is not None:
            return
        if self.mode in ("memory", "report"):
            self._made = self._open.enter_context(memory_report.recorded(self.engine))
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._made = self._open.enter_context(trace(self.engine, self.folder / f"trace-rank{self.rank}.json.gz"))

    def stop(self, step: int) -> str | None:
        """The table where this was the step, its files written; else None."""
        if self._made is None or step != self.step:
            return None
        try:
            self._open.close()
        except ValueError as error:
            if self.mode != "report":
                raise
            return f"what the memory of step {step} was for is not told: {error}"  # nobody asked for it: training goes on
        return self._write()

    def failed(self, error: BaseException) -> str | None:
        """To be called where a step raised. Of a memory profile the files are written and the table returned: of a step that ran
        out of memory it is the one to read."""
        self._open.__exit__(type(error), error, error.__traceback__)
        if not isinstance(self._made, MemoryReport) or self._made.error is not error or self._made.analysis is None:
            return None
        return self._write()

    def _write(self) -> str:
        if self.mode == "report":
            return self._made.table()
        if isinstance(self._made, MemoryReport):
            return self._made.write(self.folder, f"memory-rank{self.rank}")
        text = self._made.table()
        (self.folder / f"trace-rank{self.rank}.txt").write_text(text + "\n")
        return text
