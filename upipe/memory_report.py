"""Where the memory of a training step goes: every block that is alive at its peak, by what it is for.

    with memory_report.recorded(engine) as report:
        loss = handle.loss(engine, batch); engine.backward(loss); engine.step()
    print(report.table())
    report.snapshot("step.pickle")     # for https://pytorch.org/memory_viz
    report.plot("step.png")

On a GPU the caching allocator records the step (`torch.cuda.memory._record_memory_history`): each allocation with its
Python frames. On the CPU and on the meta device, where no allocator tells, `TracedStorages` writes the same format from
the storages that operators make. `analyse` is a pure function of such a snapshot: it replays the events, finds the peak,
and says of each block what it is for:

    parameters, master weights, optimizer, gradients   alive before the step (or after it): by identity with the engine's
                                                       own tensors; allocated in it: by the DeepSpeed or torch.optim frame
    gathered parameters                                whole parameters under ZeRO-3 or FSDP2
    saved inputs                                       inputs of the decoder layers, whatever made them, and fetched ones
    attention                                          the block and its workspace
    tiles                                              tiled MLPs and norms
    loss                                               the loss, and logits
    layers                                             residual stream, its gradient, activations of untiled modules
    other                                              none of these; alive before the step and nobody's: batches, cuBLAS

The innermost frame that a rule knows decides. A node of autograd in C++ has no frame of its own: what it makes counts as
gradients where it has exactly a parameter's size, as layers otherwise; but to a tile's, the loss's or the block's own
backward belongs what autograd does for it.

Units: bytes inside, GiB = 2**30 bytes in what is printed.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upipe import host, workspace
from upipe.block import Reusable
from upipe.offload import Checkpointing, decoder_layers
from upipe.preflight import PreflightError, numel

PARAMETERS, MASTER, OPTIMIZER, GRADIENTS = "parameters", "master weights", "optimizer", "gradients"
GATHERED, SAVED, ATTENTION, TILES, LOSS = "gathered parameters", "saved inputs", "attention", "tiles", "loss"
LAYERS, OTHER = "layers", "other"
KINDS = (PARAMETERS, MASTER, OPTIMIZER, GRADIENTS, GATHERED, SAVED, ATTENTION, TILES, LOSS, LAYERS, OTHER)
STATES = (PARAMETERS, MASTER, OPTIMIZER, GRADIENTS, GATHERED)
_AUTOGRAD, _ZERO, _WALK_ON = "autograd", "zero", ""
SKEW_US = 20
"""How far the allocator's clock and Python's may be apart."""

_RULES: tuple[tuple[str, str, str], ...] = (
    # Part of a file's path; function names (a pattern, whole name); what it means. The first that fits a frame counts.
    ("upipe/memory_report.py", ".*", _WALK_ON),
    ("upipe/workspace.py", ".*", ATTENTION),
    ("upipe/block.py", ".*", ATTENTION),
    ("upipe/attention.py", ".*", ATTENTION),
    ("upipe/tiled.py", ".*", TILES),
    ("upipe/layer.py", "product|project|attention_output|place|finish", ATTENTION),
    ("upipe/layer.py", ".*(mlp|tile|norm|sums|rounded).*|residual|add|finish_forward", TILES),
    ("upipe/layer.py", ".*", LAYERS),
    ("upipe/loss.py", "product|add_product|wide_dtype|_adds_into_fp32", _WALK_ON),
    ("upipe/loss.py", ".*", LOSS),
    ("upipe/offload.py", "run|run_again", LAYERS),
    ("upipe/offload.py", "backward|_checkpoint|prefetch", SAVED),
    ("deepspeed/runtime/zero/(partition_parameters|partitioned_param_coordinator).py", ".*", GATHERED),
    ("deepspeed/runtime/(zero/stage|bf16_optimizer|fp16/)", ".*", _ZERO),
    ("deepspeed/runtime/engine.py", ".*(allreduce|reduce_gradients).*", GRADIENTS),
    ("deepspeed/sequence/", ".*", ATTENTION),
    ("torch/optim/|deepspeed/ops/", ".*", OPTIMIZER),
    ("torch/distributed/fsdp/", ".*(gather|unshard).*", GATHERED),
    ("torch/distributed/fsdp/", ".*(reduce|post_backward).*", GRADIENTS),
    ("torch/autograd/graph.py", "_engine_run_backward", _AUTOGRAD),
    ("transformers/loss/", ".*", LOSS),
    ("modeling_[a-z0-9_]+.py|transformers/models/", ".*", LAYERS),
)

Known = dict[int, tuple[str, int]]
"""Address -> what it is, bytes."""


class Note(NamedTuple):
    """That the storage at an address was seen at a time (us since 1970) as what `kind` says."""

    address: int
    time_us: int
    kind: str


@dataclass
class Block:
    """One allocation. born, died: numbers of the events that made and freed it: -1, already there; the number of events,
    still there. completed: when the allocator could use it again, later than `died` where another stream used it."""

    address: int
    nbytes: int
    kind: str
    where: str
    born: int
    died: int
    completed: int


@dataclass
class Analysis:
    """What a snapshot says.

    Attributes:
        blocks: every one that lived during the recording.
        times_us: of the events. peak_event: after which the peak was reached (-1: it was there at the start).
        peak: bytes, as asked of the allocator. by_kind, by_where: that, by what for and by line of code.
        awaiting: bytes at the peak that are free but not yet usable, as another stream had used them (beside the peak).
    """

    blocks: list[Block]
    times_us: list[int]
    peak_event: int
    peak: int
    by_kind: dict[str, int]
    by_where: list[tuple[str, str, int]]
    awaiting: int


def analyse(
    snapshot: dict[str, Any],
    device: int = 0,
    *,
    before: Known | None = None,
    after: Known | None = None,
    notes: Iterable[Note] = (),
    gradient_sizes: Iterable[int] = (),
) -> Analysis:
    """Replay a snapshot's events and say what is alive at the peak.

    Args:
        snapshot: as `torch.cuda.memory._snapshot()` gives it: `segments` (blocks that are there at the end) and
            `device_traces` (events of each device). What was there at the start follows from both.
        device: index of the device.
        before, after: the engine's tensors at the start and at the end.
        notes: storages whose use is known better than from the line that made them.
        gradient_sizes: bytes of whole parameters, to tell weight gradients that autograd makes.

    Raises:
        ValueError: no events of that device, or events that contradict each other (some were lost).
    """
    traces = snapshot["device_traces"]
    if device >= len(traces):
        raise ValueError(f"the snapshot has traces of {len(traces)} devices, none of device {device}")
    events = [e for e in traces[device] if e["action"] in ("alloc", "free_requested", "free_completed")]
    end, sizes = len(events), frozenset(gradient_sizes)
    blocks: list[Block] = []
    live: dict[int, Block] = {}
    pending: dict[int, Block] = {}
    for i, event in enumerate(events):
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            if address in live:
                raise ValueError(f"event {i} allocates {address:#x}, which is in use: events are missing from the snapshot")
            kind, where = _kind_of(event.get("frames", ()), size, sizes)
            live[address] = Block(address, size, kind, where, i, end, end)
            blocks.append(live[address])
        elif event["action"] == "free_requested":
            block = live.pop(address, None)
            if block is None:
                block = Block(address, size, OTHER, "before the step", -1, end, end)
                blocks.append(block)
            block.died = i
            pending[address] = block
        elif address in pending:
            pending.pop(address).completed = i
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        for entry in segment["blocks"]:
            if entry["state"] == "active_allocated" and entry["address"] not in live:
                blocks.append(Block(entry["address"], entry["requested_size"], OTHER, "before the step", -1, end, end))
    times = [event.get("time_us", i) for i, event in enumerate(events)]
    _apply_notes(blocks, times, notes)
    for block in blocks:
        for known, applies in ((before, block.born < 0), (after, block.died == end)):
            kind, nbytes = (known or {}).get(block.address, (None, 0))
            if applies and kind is not None and nbytes <= block.nbytes:
                block.kind, block.where = kind, block.where if block.born >= 0 else kind
                break
    return _at_peak(blocks, times)


def _at_peak(blocks: list[Block], times: list[int]) -> Analysis:
    change = [0] * (len(times) + 1)
    total = 0
    for block in blocks:
        if block.born < 0:
            total += block.nbytes
        else:
            change[block.born] += block.nbytes
        change[block.died] -= block.nbytes if block.died < len(times) else 0
    peak, at = total, -1
    for i in range(len(times)):
        total += change[i]
        if total > peak:
            peak, at = total, i
    by_kind = dict.fromkeys(KINDS, 0)
    by_where: Counter[tuple[str, str]] = Counter()
    awaiting = 0
    for block in blocks:
        if block.born <= at < block.died:
            by_kind[block.kind] += block.nbytes
            by_where[block.kind, block.where] += block.nbytes
        elif block.died <= at < block.completed:
            awaiting += block.nbytes
    largest = [(kind, where, nbytes) for (kind, where), nbytes in by_where.most_common()]
    return Analysis(blocks, times, at, peak, by_kind, largest, awaiting)


def _apply_notes(blocks: list[Block], times: list[int], notes: Iterable[Note]) -> None:
    at: dict[int, list[Block]] = {}
    for block in blocks:
        at.setdefault(block.address, []).append(block)

    def lived(block: Block, time_us: int) -> bool:
        born = -math.inf if block.born < 0 else times[block.born]
        died = math.inf if block.died >= len(times) else times[block.died]
        return born - SKEW_US <= time_us <= died + SKEW_US

    for note in notes:
        found = [block for block in at.get(note.address, ()) if lived(block, note.time_us)]
        if found:
            block = max(found, key=lambda b: b.born)
            if block.kind not in STATES:
                block.kind = note.kind


def _kind_of(frames: Iterable[dict[str, Any]], size: int, gradient_sizes: frozenset[int]) -> tuple[str, str]:
    """What an allocation is for, and the line that made it; frames from the innermost outwards."""
    frames = list(frames)
    fallback = None
    for i, frame in enumerate(frames):
        kind = _rule(frame["filename"], frame["name"])
        if kind == _WALK_ON:
            if fallback is None and "torch/nn/modules/" in frame["filename"]:
                fallback = i
            continue
        where = _line(frame)
        if kind == _AUTOGRAD:
            caller = next((f for f in frames[i:] if "/torch/" not in f["filename"]), frame)
            kind = _rule(caller["filename"], caller["name"])
            if kind not in (ATTENTION, TILES, LOSS):
                kind = GRADIENTS if size in gradient_sizes else LAYERS
            return kind, f"a node of autograd, under {_line(caller)}"
        if kind == _ZERO:
            stepping = any(f["name"] in ("step", "_take_model_step") and "deepspeed/" in f["filename"] for f in frames[i:])
            return (OPTIMIZER if stepping else GRADIENTS), where
        return kind, where
    if not frames:
        # On a GPU, backward runs in threads of autograd's own.
        return (GRADIENTS if size in gradient_sizes else LAYERS), "a node of autograd"
    if fallback is not None:
        return LAYERS, _line(frames[fallback])
    return OTHER, _line(next((f for f in frames if "/torch/" not in f["filename"] and f["filename"] != __file__), frames[0]))


@functools.cache
def _rule(filename: str, function: str) -> str:
    for path, name, kind in _RULES:
        if re.search(path, filename) and re.fullmatch(name, function):
            return kind
    return _WALK_ON


def _line(frame: dict[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


# Tensors of an engine, by name in DeepSpeed 0.19.8: zero/stage3.py, zero/stage_1_and_2.py, bf16_optimizer.py.
_DEEPSPEED = {
    MASTER: ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"),
    PARAMETERS: ("fp16_partitioned_groups_flat", "bit16_groups_flat", "bf16_groups_flat", "param_groups_fp16_flat_cpu_memory"),
    GRADIENTS: (
        "grad_partitions_flat_buffer", "averaged_gradients", "all_grad_tensors", "ipg_buckets", "grads_in_partition",
        "extra_large_param_to_reduce", "temp_grad_buffer_for_gpu_offload", "temp_grad_buffer_for_cpu_offload",
        "fp32_groups_gradients_flat", "accumulated_grads_in_cpu", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    ),
}  # fmt: skip


class State(NamedTuple):
    """A storage of an engine: what it is, where, and its address (`address_of`)."""

    kind: str
    device: torch.device
    address: int
    nbytes: int


def address_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others alive: its address on a GPU; elsewhere that of torch's own record of it,
    as storages on the meta device have no other."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if tensor.device.type == "cuda" else storage._cdata


def states(engine: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[State]:
    """Every storage that holds the model's states, once: parameters and buffers, master weights, optimizer, gradients.

    Args:
        engine: a DeepSpeed engine, or a model (also under DDP or fully_shard) with its `optimizer`.
    """
    found: dict[tuple[torch.device, int], State] = {}
    for kind, tensor in _state_tensors(engine, optimizer):
        state = State(kind, tensor.device, address_of(tensor), tensor.untyped_storage().nbytes())
        if state.nbytes:
            found.setdefault((state.device, state.address), state)
    return list(found.values())


def _state_tensors(engine: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    """What it is, and the tensor; a storage may come several times, and the first is right."""
    outer = getattr(engine, "optimizer", None) if optimizer is None else optimizer
    inner = outer
    while hasattr(getattr(inner, "optimizer", None), "param_groups"):
        inner = inner.optimizer
    for kind, names in _DEEPSPEED.items():
        for name in names:
            for tensor in _tensors(getattr(outer, name, None)):
                yield kind, tensor
                if kind == MASTER and tensor.grad is not None:
                    yield GRADIENTS, tensor.grad
    yield from ((OPTIMIZER, t) for t in _tensors(list(getattr(inner, "state", {}).values())))
    for p in engine.parameters():
        yield from ((PARAMETERS, t) for t in _tensors(getattr(p, "ds_tensor", None)))
        yield from ((GATHERED if hasattr(p, "ds_tensor") else PARAMETERS, t) for t in _tensors(p.data))
        yield from ((GRADIENTS, t) for t in _tensors([p.grad, getattr(p, "grad_accum", None)]))
    yield from ((PARAMETERS, t) for t in engine.buffers())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a value, in lists, dicts and DeepSpeed's own records; local parts of distributed ones."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif type(value).__name__.startswith("IPGBucket"):
        yield from _tensors([value.buffer, getattr(value, "grads", None)])


def _known(engine, optimizer, device: torch.device) -> Known:
    known = {s.address: (s.kind, s.nbytes) for s in states(engine, optimizer) if s.device == device}
    for buffers in workspace.of(device).free.values():
        known |= {address_of(b.raw): (ATTENTION, b.raw.numel()) for b in buffers}
    return known


@contextmanager
def phases(
    engine: nn.Module,
    span: Callable[[str], AbstractContextManager],
    layer_input: Callable[[torch.Tensor], None] = lambda x: None,
    logits: Callable[[torch.Tensor], None] = lambda x: None,
):
    """Enter `span(name)` around the phases of the steps that run inside: "forward", "backward", "optimizer", and "recompute"
    around each decoder layer's second forward, within the backward.

    Args:
        engine: a DeepSpeed engine. Of another module backward and optimizer are not seen, as it has no such methods.
        layer_input, logits: called with what each decoder layer is given, and with what the output embedding returns.
    """
    model = engine.module if isinstance(getattr(engine, "module", None), nn.Module) else engine
    try:
        layers = decoder_layers(model)
    except PreflightError:
        layers = []  # a model with no list of layers: its recompute is part of the backward
    open_spans: list[AbstractContextManager] = []

    def enter(name: str) -> None:
        open_spans.append(span(name))
        open_spans[-1].__enter__()

    def leave() -> None:
        open_spans.pop().__exit__(None, None, None)

    def with_recompute(contexts):
        def made():
            first, again = contexts()
            return first, Reusable(lambda: _spanned(again, span("recompute")))

        return made

    def before_layer(module, args, kwargs):
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor):
            layer_input(hidden)

    def checkpoint_with_recompute(checkpoint):
        def run(function, *args, **kwargs):
            def again(*args, **kwargs):
                with span("recompute") if torch._C._current_graph_task_id() != -1 else nullcontext():
                    return function(*args, **kwargs)

            return checkpoint(again, *args, **kwargs)

        return run

    def around(method: Callable, name: str) -> Callable:
        def call(*args, **kwargs):
            with span(name):
                return method(*args, **kwargs)

        return call

    handles = [
        model.register_forward_pre_hook(lambda *_: enter("forward"), prepend=True),
        model.register_forward_hook(lambda *_: leave(), always_call=True),
    ]
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(before_layer, with_kwargs=True, prepend=True))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        handles.append(head.register_forward_hook(lambda module, args, output: logits(output)))
    # What is recomputed is a layer's forward, inside its hooks: by `offload`, or by the function that transformers was given.
    checkpointing = [(c, c.contexts) for c in _checkpointing_of(model)]
    for handle, contexts in checkpointing:
        handle.contexts = with_recompute(contexts)
    functions = [(m, m._gradient_checkpointing_func) for m in layers if hasattr(m, "_gradient_checkpointing_func")]
    for layer, function in functions:
        layer._gradient_checkpointing_func = checkpoint_with_recompute(function)
    wrapped = [name for name in ("backward", "step") if callable(getattr(engine, name, None))]
    for name in wrapped:
        setattr(engine, name, around(getattr(engine, name), "optimizer" if name == "step" else name))
    try:
        yield
    finally:
        for name in wrapped:
            delattr(engine, name)
        for handle, contexts in checkpointing:
            handle.contexts = contexts
        for layer, function in functions:
            layer._gradient_checkpointing_func = function
        for handle in handles:
            handle.remove()


@contextmanager
def _spanned(inner: AbstractContextManager, outer: AbstractContextManager):
    with outer, inner:
        yield


def _checkpointing_of(model: nn.Module) -> list[Checkpointing]:
    found = (getattr(type(module), "_checkpointing", None) for module in model.modules())
    return list({id(c): c for c in found if isinstance(c, Checkpointing)}.values())


class TracedStorages(TorchDispatchMode):
    """Record what operators allocate and free on the CPU or the meta device, as a snapshot of the caching allocator's format.

    A storage is there from when an operator first takes or returns it, and gone when torch frees it. Not seen: memory inside
    a kernel; other threads; a storage that is resized later; `host.pool()`'s, which stands for the host.

    Args:
        device_type: "cpu" or "meta".
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self._events: list[dict[str, Any]] = []
        self._live: dict[int, int] = {}
        self._finalizers: list[weakref.finalize] = []
        self._frames: dict[tuple[Any, int], dict[str, Any]] = {}

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are there before; to be called before it is entered."""
        for tensor in tensors:
            self._see(tensor, made=False)

    def __exit__(self, *error):
        for finalizer in self._finalizers:
            finalizer.detach()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._see_all((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._see_all(out)
        return out

    def _see_all(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, made=True)

    def snapshot(self) -> dict[str, Any]:
        """The events so far and what is alive, as `torch.cuda.memory._snapshot()` words it; all in one segment."""
        state = {"state": "active_allocated", "frames": []}
        blocks = [{"address": a, "size": n, "requested_size": n, **state} for a, n in self._live.items()]
        total = sum(self._live.values())
        segment = {
            "device": 0, "address": 0, "total_size": total, "allocated_size": total, "active_size": total,
            "requested_size": total, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "frames": [], "blocks": blocks,
        }  # fmt: skip
        return {"segments": [segment], "device_traces": [list(self._events)], "allocator_settings": {}}

    def _see(self, tensor: torch.Tensor, made: bool) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._live or nbytes == 0:
            return
        if self.device_type == "cpu" and storage.data_ptr() in host.pool()._used:
            return
        self._live[address] = nbytes
        if made:
            self._record("alloc", address, nbytes, self._stack())
        finalizer = weakref.finalize(storage, self._gone, address)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def _gone(self, address: int) -> None:
        nbytes = self._live.pop(address)
        self._record("free_requested", address, nbytes, [])
        self._record("free_completed", address, nbytes, [])

    def _record(self, action: str, address: int, nbytes: int, frames: list[dict[str, Any]]) -> None:
        self._events.append(
            {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time.time_ns() // 1000, "frames": frames}
        )

    def _stack(self) -> list[dict[str, Any]]:
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            key = frame.f_code, frame.f_lineno
            if frame.f_code.co_filename != __file__:
                if key not in self._frames:
                    self._frames[key] = {"filename": key[0].co_filename, "line": key[1], "name": key[0].co_name}
                frames.append(self._frames[key])
            frame = frame.f_back
        return frames


@dataclass
class MemoryReport:
    """One recorded step's memory. Made by `recorded`; filled when its block ends.

    Attributes:
        device: the device. analysis: what the recording says.
        measured: peak of allocated bytes that the allocator counted, rounding included; None where there is no allocator.
        reserved: bytes it held at most; outside: bytes in use on the GPU that it knows nothing of: the CUDA context, NCCL,
            other processes. None where there is none.
        host: bytes of this process on the host after the step, by what for (see `host_memory`).
        phases: of the step: name, start and end, in us since 1970.
        error: the exception that ended the step, or None.
    """

    device: torch.device
    analysis: Analysis | None = None
    measured: int | None = None
    reserved: int | None = None
    outside: int | None = None
    host: dict[str, int] = field(default_factory=dict)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    error: BaseException | None = None
    _snapshot: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def peak(self) -> int:
        """Bytes at the peak: measured where there is an allocator, else what the recording adds up to."""
        return self._done().peak if self.measured is None else self.measured

    @property
    def accounted(self) -> float:
        """Share of the measured peak that the blocks add up to."""
        return self._done().peak / max(1, self.peak)

    @property
    def other(self) -> float:
        """Share of the peak that is nobody's."""
        return self._done().by_kind[OTHER] / max(1, self.peak)

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak was reached; "between" the phases."""
        analysis = self._done()
        if analysis.peak_event < 0:
            return "start"
        at = analysis.times_us[analysis.peak_event]
        inside = [(end - start, name) for name, start, end in self.phases if start <= at <= end]
        return min(inside)[1] if inside else "between"

    def table(self, largest: int = 12) -> str:
        """The report as text: what adds up to the peak, the `largest` lines of code in it, the host. GiB = 2**30 bytes."""
        analysis = self._done()
        what = "allocated" if self.measured is not None else "of all tensors that operators made"
        failed = "" if self.error is None else ", of a failed step"
        lines = [f"{self.device} memory at the peak {what}, in {self.peak_phase}{failed}"]
        rows = [(kind, nbytes) for kind, nbytes in analysis.by_kind.items()]
        if self.measured is not None:
            rows.append(("rounding by the allocator", self.measured - analysis.peak))
        rows.append(("sum", self.peak))
        lines += [f"  {name:<28}{nbytes / 2**30:10.3f} GiB {nbytes / max(1, self.peak):7.1%}" for name, nbytes in rows]
        if self.measured is not None:
            lines.append(
                f"reserved {self.reserved / 2**30:.3f} GiB; freed, awaiting another stream {analysis.awaiting / 2**30:.3f}; "
                f"in use outside of the allocator {self.outside / 2**30:.3f}"
            )
        lines.append("largest in it")
        for kind, where, nbytes in analysis.by_where[:largest]:
            lines.append(f"  {nbytes / 2**30:8.3f} GiB  {kind:<20} {where}")
        lines.append("host memory after the step")
        lines += [f"  {name:<40}{nbytes / 2**30:8.3f} GiB" for name, nbytes in self.host.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The table's numbers: GiB, shares of the peak in [0, 1]."""
        analysis = self._done()
        gib = {kind: nbytes / 2**30 for kind, nbytes in analysis.by_kind.items()}
        return {
            "device": str(self.device), "peak_gib": self.peak / 2**30, "peak_phase": self.peak_phase, "by_kind_gib": gib,
            "accounted": self.accounted, "other": self.other, "awaiting_gib": analysis.awaiting / 2**30,
            "measured_peak_gib": None if self.measured is None else self.measured / 2**30,
            "reserved_gib": None if self.reserved is None else self.reserved / 2**30,
            "outside_gib": None if self.outside is None else self.outside / 2**30,
            "largest": [{"kind": k, "where": w, "gib": n / 2**30} for k, w, n in analysis.by_where[:40]],
            "host_gib": {name: nbytes / 2**30 for name, nbytes in self.host.items()},
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }  # fmt: skip

    def snapshot(self, path: str | Path) -> None:
        """Write the recording for the viewer at https://pytorch.org/memory_viz (a pickle; drop it there)."""
        self._done()
        with open(path, "wb") as file:
            pickle.dump(self._snapshot, file)

    def series(self, points: int = 2000) -> tuple[list[float], dict[str, list[float]]]:
        """Memory over the step: times in s from the first event, and GiB of each kind at them.

        Events are joined to `points` intervals; of each the moment of most memory is kept, so the peak is among them."""
        analysis = self._done()
        count = len(analysis.times_us)
        change: list[tuple[str, int]] = [(OTHER, 0)] * count  # an event changes one block
        now = dict.fromkeys(KINDS, 0)
        for block in analysis.blocks:
            if block.born < 0:
                now[block.kind] += block.nbytes
            else:
                change[block.born] = block.kind, block.nbytes
            if block.died < count:
                change[block.died] = block.kind, -block.nbytes
        start, best = (analysis.times_us[0] if count else 0), None
        times, series = [0.0], {kind: [now[kind] / 2**30] for kind in KINDS}
        every = max(1, -(-count // points))
        for i in range(count):
            kind, nbytes = change[i]
            now[kind] += nbytes
            total = sum(now.values())
            if best is None or total > best[0]:
                best = total, i, dict(now)
            if (i + 1) % every == 0 or i + 1 == count:
                times.append((analysis.times_us[best[1]] - start) / 1e6)
                for kind in KINDS:
                    series[kind].append(best[2][kind] / 2**30)
                best = None
        return times, series

    def plot(self, path: str | Path) -> None:
        """Write a stacked-area picture of the step, by what for, with the phases and the peak marked."""
        from matplotlib.figure import Figure

        analysis = self._done()
        times, series = self.series()
        shown = [kind for kind in KINDS if max(series[kind]) > 0]
        figure = Figure(figsize=(11, 5.5), layout="constrained")
        axes = figure.add_subplot()
        colours = {kind: f"C{i}" if i < 10 else "0.6" for i, kind in enumerate(KINDS)}
        areas = [series[kind] for kind in shown]
        made = axes.stackplot(times, *areas, labels=shown, colors=[colours[kind] for kind in shown], step="post")
        for i, area in enumerate(made):
            # With edges, moments that are thinner than a pixel are seen too; an area's edge lies over those above it.
            area.set(linewidth=0.5, edgecolor="face", zorder=1.0 - i / 100)
        start = analysis.times_us[0] if analysis.times_us else 0
        for name, begin, _ in self.phases:
            if name != "recompute":
                axes.axvline((begin - start) / 1e6, color="0.3", linewidth=0.6, linestyle=":")
                axes.text((begin - start) / 1e6, 1.0, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
        peak = analysis.peak / 2**30
        at = 0.0 if analysis.peak_event < 0 else (analysis.times_us[analysis.peak_event] - start) / 1e6
        axes.annotate(
            f"{peak:.3f} GiB in {self.peak_phase}", (at, peak), xytext=(0, 12), textcoords="offset points", ha="center",
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
        axes.set(xlabel="time, s", ylabel="memory, GiB", title=f"{self.device}: memory of one step")
        axes.set(xlim=(0, max(times[-1], 1e-6)), ylim=(0, max(peak * 1.15, 1e-9)))
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.savefig(path, dpi=150)

    def write(self, folder: str | Path, name: str) -> str:
        """Write `name`.txt, .json, .pickle and .png into a folder, which is made; returns the table."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.table()
        (folder / f"{name}.txt").write_text(text + "\n")
        (folder / f"{name}.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        self.snapshot(folder / f"{name}.pickle")
        self.plot(folder / f"{name}.png")
        return text

    def _done(self) -> Analysis:
        if self.analysis is None:
            raise RuntimeError("the step is still being recorded: read the report after the `with recorded(...)` block")
        return self.analysis


@contextmanager
def recorded(engine: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None):
    """Record the memory of what runs inside, one optimizer step say; yields a `MemoryReport`, filled at the end, also where
    the step fails. ValueError where events are missing; a step that failed keeps its own error, with a note, and has no analysis.

    On a GPU: microseconds an allocation, a snapshot of some seconds at the end, and the peak counters start anew. On the CPU
    every operator is watched, several times slower.

    Args:
        engine: a DeepSpeed engine; or a model, with its `optimizer`.
        device: where the step's tensors are; the engine's own by default. "meta" for a model of shapes alone.
    """
    device = _device_of(engine, device)
    cuda = device.type == "cuda"
    if not cuda and device.type not in ("cpu", "meta"):
        raise ValueError(f"device={device}: memory is recorded on cuda, cpu and meta")
    report = MemoryReport(device)
    notes: list[Note] = []

    def note(kind: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.device.type == device.type:
            for tensor in _tensors(value):
                notes.append(Note(address_of(tensor), _now_us(), kind))

    @contextmanager
    def span(name: str):
        start = _now_us()
        try:
            yield
        finally:
            report.phases.append((name, start, _now_us()))

    sizes = {numel(p) * p.element_size() for p in engine.parameters()}
    before = _known(engine, optimizer, device)
    tracer = None if cuda else TracedStorages(device.type)
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        tracer.know(tensor for _, tensor in _state_tensors(engine, optimizer))
        tracer.__enter__()
    try:
        with phases(engine, span, lambda x: note(SAVED, x), lambda x: note(LOSS, x)):
            yield report
    except BaseException as error:
        report.error = error
        raise
    finally:
        if cuda:
            report.measured, report.reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            free, total = torch.cuda.mem_get_info(device)
            report.outside = total - free - torch.cuda.memory_reserved(device)
            report._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(None)
        else:
            tracer.__exit__(None, None, None)
            report._snapshot = tracer.snapshot()
        after, index = _known(engine, optimizer, device), device.index if cuda else 0
        report.host = host_memory(engine, optimizer, device)
        try:
            report.analysis = analyse(report._snapshot, index, before=before, after=after, notes=notes, gradient_sizes=sizes)
        except ValueError as error:
            if report.error is None:
                raise
            # The step's own error goes on: whoever reads it looks for its type (out of memory has an exit status).
            report.error.add_note(f"what its memory was for is not told: {error}")


def host_memory(
    engine: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None
) -> dict[str, int]:
    """This process's memory on the host now, in bytes, by what for. "of it pinned" rows repeat a part of the row before.

    saved inputs: slabs and staging of `offload`. attention outputs: the rest of `host.pool()`, in use or kept for the next
    step; working tensors of `memory.offload_within_layer` among it. states: the engine's tensors on the CPU where it computes
    elsewhere (`offload_optimizer`). torch's pinned memory: blocks of torch's own allocator, rounded up by it. other: the rest of
    the resident set (on the CPU all tensors too);
    below zero where memory that is held was never touched.
    """
    device = _device_of(engine, device)
    held = [c._store.held() for c in _checkpointing_of(engine) if c._store is not None]
    saved, saved_pinned = sum(h for h, _ in held), sum(p for _, p in held)
    pool = host.pool()
    rows = {
        SAVED: saved, f"{SAVED}, of it pinned": saved_pinned,
        "attention outputs": pool.held_bytes - saved, "attention outputs, of it pinned": pool.pinned_bytes - saved_pinned,
    }  # fmt: skip
    named = pool.held_bytes
    if device.type == "cuda":
        for kind in STATES:
            rows[kind] = sum(s.nbytes for s in states(engine, optimizer) if s.kind == kind and s.device.type == "cpu")
            named += rows[kind]
        rows["torch's pinned memory"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    resident = psutil.Process().memory_info().rss
    rows["other"] = resident - named
    rows["resident set of the process"] = resident
    rows["its peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return rows


def summary(engine: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Model states on the device, the peak so far, and the host, as text; nothing need have been recorded."""
    device = _device_of(engine)
    on = [s for s in states(engine, optimizer) if s.device.type == device.type]
    lines = [f"{device} memory"]
    lines += [f"  {kind:<28}{sum(s.nbytes for s in on if s.kind == kind) / 2**30:10.3f} GiB" for kind in STATES]
    lines.append(f"  {'model states':<28}{sum(s.nbytes for s in on) / 2**30:10.3f} GiB")
    if device.type == "cuda":
        peak, held = torch.cuda.max_memory_allocated(device), sum(s.nbytes for s in on)
        lines.append(f"  {'peak allocated':<28}{peak / 2**30:10.3f} GiB")
        told = "what for: train.memory_report: first_step, train.profile: memory"
        lines.append(f"  {'of it above states':<28}{(peak - held) / 2**30:10.3f} GiB ({told})")
        lines.append(f"  {'peak reserved':<28}{torch.cuda.max_memory_reserved(device) / 2**30:10.3f} GiB")
    lines.append("host memory")
    lines += [f"  {name:<40}{nbytes / 2**30:8.3f} GiB" for name, nbytes in host_memory(engine, optimizer, device).items()]
    return "\n".join(lines)


def _device_of(engine: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """The device given or the engine's own, with its index as tensors have it."""
    if device is None:
        device = getattr(engine, "device", None) or next(engine.parameters()).device
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _now_us() -> int:
    return time.time_ns() // 1000
