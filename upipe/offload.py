"""Activation checkpointing of decoder layers that saves exactly the layer's input, and parks it on the host.

Each decoder layer's forward becomes one autograd function: it runs without a graph, saves the hidden states it was given
and nothing else, and in backward runs again and is differentiated. cos/sin, masks and positions are the same objects for
all layers and are only referred to. Module hooks (FSDP2's, ZeRO-3's) stay outside and so fire once.

Where a saved input lives:

    none      on the device
    pinned    in a page-locked slab of exactly its bytes; the copies run on streams of their own beside computation
    pageable  in ordinary host memory; a thread moves it chunk by chunk through a small page-locked ring, also on a stream
              of its own. For lengths at which the host has memory, but not that much that may be page-locked

Beyond what the host holds, one stored input can serve a pair of layers: of the second layer's input nothing is kept. Its
backward runs the first layer's forward again for it, then its own forward and backward; then comes the first layer's. So a
pair costs one more forward of its first layer, without attention where the attention output is on the host, and another
fetch; the first's stored input is not on the device meanwhile, if it was sent.

Slabs are made once and reused every step (`upipe.host`). On CPU the same copies are made, so that tests mean something.

B batch, L local tokens, D hidden; u = B x L x D x bytes of the dtype, one saved input.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from upipe.block import peeking
from upipe.host import HostStore, Parked
from upipe.preflight import PreflightError

logger = logging.getLogger(__name__)

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Around the first forward of a call, and around its recompute; in pairs the second is entered twice."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How decoder layers are checkpointed.

    Args:
        offload: where saved inputs live, see the module.
        keep_layers_on_gpu: of the inputs that are stored, the last n stay on the device. "auto": 1, as the last is needed back at
            once; 0 where the last serves a pair, as there it would be beside the second layer's.
        pairs: of so many pairs of layers, from the first layer on, only the first one's input is stored, see the module.
        pinned_fallback: where page-locked memory runs out, say so and go on pageable, instead of raising.
        prefetch: fetch the next input while a layer's backward runs, for one more u on the device. False: fetch it when it is
            needed, which at 55 GB/s costs 20 ms a GiB and layer.
        preserve_rng: replay the random state in the recompute. "auto": for layers with dropout.
        staging_mib, staging_chunks: the page-locked ring of each direction under "pageable": chunks of so many MiB.
        leave_on_host: an input that was sent is not fetched: the layer that is run again gets a tensor of its shape alone, and reads
            it from the host (`input_on_host`), as fused layers with an offload of their own do. All stored inputs are sent, none is
            prefetched, and what is made again for the second layer of a pair goes to the host too.
    """

    offload: Literal["none", "pinned", "pageable"] = "none"
    keep_layers_on_gpu: int | Literal["auto"] = "auto"
    pinned_fallback: bool = False
    prefetch: bool = True
    preserve_rng: bool | Literal["auto"] = "auto"
    staging_mib: int = 64
    staging_chunks: int = 3
    pairs: int = 0
    leave_on_host: bool = False

    def __post_init__(self):
        if self.leave_on_host and (self.offload == "none" or self.prefetch or self.keep_layers_on_gpu not in (0, "auto")):
            raise ValueError(
                f"leave_on_host=True with offload={self.offload!r}, keep_layers_on_gpu={self.keep_layers_on_gpu!r}, "
                f"prefetch={self.prefetch}: every input is to be on the host alone; use offload=\"pinned\" or \"pageable\", "
                "keep_layers_on_gpu=0, prefetch=False"
            )
        for name, allowed in (("offload", ("none", "pinned", "pageable")), ("preserve_rng", (True, False, "auto"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
        if self.keep_layers_on_gpu != "auto" and not _whole(self.keep_layers_on_gpu):
            raise ValueError(f"keep_layers_on_gpu={self.keep_layers_on_gpu!r}: must be a number of layers, 0 or more, or auto")
        if not _whole(self.pairs):
            raise ValueError(f"pairs={self.pairs!r}: must be a number of pairs of layers, 0 or more")
        for name in ("staging_mib", "staging_chunks"):
            if not _whole(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a whole number")
        if self.staging_mib < 1 or self.staging_chunks < 2:
            raise ValueError(f"staging_mib={self.staging_mib}, staging_chunks={self.staging_chunks}: at least 1 MiB and 2 chunks")

    def stored(self, layers: int) -> list[int]:
        """The layers of `layers` whose input is stored. Raises ValueError for more pairs than there are."""
        check_pairs(self.pairs, layers)
        return [*range(0, 2 * self.pairs, 2), *range(2 * self.pairs, layers)]

    def kept(self, layers: int) -> int:
        """How many of the stored inputs, the last ones, stay on the device."""
        stored = len(self.stored(layers))
        if self.offload == "none":
            return stored
        auto = 0 if 2 * self.pairs == layers or self.leave_on_host else 1
        return min(stored, auto if self.keep_layers_on_gpu == "auto" else self.keep_layers_on_gpu)

    def sent(self, layers: int) -> int:
        """How many inputs go to the host."""
        return len(self.stored(layers)) - self.kept(layers)


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_pairs(pairs: int, layers: int) -> None:
    """Raises ValueError for more pairs than there are."""
    if 2 * pairs > layers:
        raise ValueError(f"pairs={pairs} of {layers} layers: at most {layers // 2}")


class OffloadError(RuntimeError):
    """Offload that did nothing, or that was used in a way which would give stale values."""


@dataclass(frozen=True)
class StepReport:
    """What checkpointing did since the last `end_step`. Bytes of this process.

    Args:
        offload: where inputs were sent at the end of the step: "pageable" after a fallback.
        layer_calls: checkpointed layer calls; kept_calls: those whose input stayed on the device; paired_calls: those whose input
            was not kept, but made again from the layer before.
        bytes_to_host, bytes_to_device: moved. Equal where every call had its backward, but what serves a pair comes back twice. Under
            `leave_on_host` a layer's own reads are not among them (`FusedLayers.moved`).
        host_bytes: held on the host now, slabs and staging; pinned_bytes: the page-locked part of them.
        waiting: sent inputs whose backward has not come yet.
        gradients_shared: incoming gradients that something else held too, so that the layer's backward could not free them
            (one more u while it ran).
    """

    offload: str
    layer_calls: int
    kept_calls: int
    paired_calls: int
    bytes_to_host: int
    bytes_to_device: int
    host_bytes: int
    pinned_bytes: int
    waiting: int
    gradients_shared: int


class HostInput:
    """A layer's input where it lies on the host, for the layer that runs again.

    tensor: [B, L, D]. taken: whether the layer asked for it. done: set by the layer, the end of its last read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.taken = tensor, False
        self.done: torch.cuda.Event | None = None


class _Given(threading.local):
    input: HostInput | None = None


_given = _Given()


def input_on_host() -> HostInput | None:
    """The input of the layer that runs again now, under `CheckpointConfig.leave_on_host`: the one it is called with has no values."""
    if _given.input is not None:
        _given.input.taken = True
    return _given.input


@contextmanager
def giving(given: HostInput | None):
    """`input_on_host` inside."""
    before, _given.input = _given.input, given
    try:
        yield
    finally:
        _given.input = before


class _Call:
    """One checkpointed call of a layer: what it takes to run it again."""

    def __init__(self, handle: Checkpointing, layer: nn.Module, plain: Callable, device: torch.device, args: tuple, kwargs: dict):
        self.handle, self.layer, self.plain, self.args, self.kwargs = handle, layer, plain, args, kwargs
        self.device = device
        self.first, self.again = handle.contexts()
        self.saved: Parked | None = None
        self.serial = -1
        # Of the first of a pair, where its input stays on the device: that, and its version. Of the second: the first.
        self.kept: tuple[torch.Tensor, int] | None = None
        self.pair: _Call | None = None
        self.overwritable = False
        self.rng = None
        if handle.config.preserve_rng is True or (handle.config.preserve_rng == "auto" and _draws(layer)):
            self.rng = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.autocast: AbstractContextManager = nullcontext()
        if torch.amp.is_autocast_available(device.type):
            self.autocast = torch.autocast(
                device.type,
                dtype=torch.get_autocast_dtype(device.type),
                enabled=torch.is_autocast_enabled(device.type),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )

    def run(self, hidden: torch.Tensor):
        with self.first:
            return self.plain(self.layer, hidden, *self.args, **self.kwargs)

    def run_again(self, hidden: torch.Tensor):
        with self._as_before():
            with torch.enable_grad(), self.again:
                return self.plain(self.layer, hidden, *self.args, **self.kwargs)

    def output_again(self) -> torch.Tensor:
        """Its first output, without a graph: the input of the pair's second layer. What its own backward needs stays."""
        store = self.handle._store
        if self.kept is not None:
            x, version = self.kept
            if x._version != version:
                raise OffloadError(f"the input of a {type(self.layer).__name__}, which serves a pair of layers, was changed in place")
        elif self.saved is not None and store.holds(self.saved):
            x = store.receive(self.saved, last=False)
        else:
            raise RuntimeError(_GONE)
        # By its __call__: hooks of ZeRO-3 and FSDP2 gather its parameters, which the second layer's backward does not.
        with self._as_before(), torch.no_grad(), peeking(), self.again:
            outputs = self.layer(x.detach(), *self.args, **self.kwargs)
        return _first(outputs)

    @contextmanager
    def _as_before(self):
        """Random state and autocast of the first forward."""
        with ExitStack() as stack:
            if self.rng is not None:
                stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
                torch.set_rng_state(self.rng[0])
                if self.rng[1] is not None:
                    torch.cuda.set_rng_state(self.rng[1], self.device)
            stack.enter_context(self.autocast)
            yield


class _Checkpointed(torch.autograd.Function):
    """One layer call. `switch` is an empty tensor that requires a gradient, so that the output does where hidden does not."""

    @staticmethod
    def forward(ctx, call: _Call, hidden: torch.Tensor, switch: torch.Tensor):
        ctx.set_materialize_grads(False)
        ctx.call = call
        if call.saved is None and call.pair is None:
            ctx.save_for_backward(hidden)
        return call.run(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        call: _Call = ctx.call
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpointed layers take no torch.autograd.grad and no backward(inputs=...): call loss.backward()"
            )
        if call is None:
            raise RuntimeError(_GONE)
        ctx.call = None  # a loss that is kept alive must not keep masks and angles alive
        shared = _shared(gradients)
        handle = call.handle
        parked = given = None
        if handle.config.leave_on_host:
            parked = call.saved if call.pair is None else handle._sent_again(call.pair.output_again())
            if not handle._store.holds(parked):
                raise RuntimeError(_GONE)
            given = HostInput(handle._store.read(parked))
            x = torch.full((1,), torch.nan, dtype=parked.dtype, device=parked.device).expand(parked.shape)
        elif call.pair is not None:
            x = call.pair.output_again()
        else:
            x = ctx.saved_tensors[0] if call.saved is None else handle._store.receive(call.saved)
            call.kept = None
        if handle._store is not None and handle.config.prefetch:
            handle._store.prefetch(call.serial)
        # Always differentiated by its input: ZeRO-3 releases a module's parameters when its input's gradient comes.
        x = x.detach().requires_grad_()
        with giving(given):
            outputs = call.run_again(x)
        if given is not None and not given.taken:
            raise OffloadError(
                f"{type(call.layer).__name__} did not read its input from the host, where leave_on_host=True leaves it: that is for "
                "layers of upipe.layer.apply_fused_layers with an offload; set it to False"
            )
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        wanted = [
            (i, output) for i, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradients[i] is not None
        ]  # fmt: skip
        if not wanted:
            if parked is not None:
                handle._store.release(parked, given.done)
            return None, None, None
        # The gradients are taken out of the tensors that the engine holds while this function runs, and handed to the graph
        # of the layer as its only holder: it frees them, or adds to them in place, when it has used them.
        box = [gradients[i] if shared[i] else _taken(gradients[i]) for i, _ in wanted]
        handle._count("gradients_shared", sum(shared[i] for i, _ in wanted))
        with torch.enable_grad():
            root = get_gradient_edge(_Root.apply(box, *(output for _, output in wanted)))
        del outputs, wanted, gradients, box
        _backward(root, x.device)
        if parked is not None:
            handle._store.release(parked, given.done)
        return None, x.grad if ctx.needs_input_grad[1] else None, None


_GONE = "a second backward through a checkpointed layer: its input is gone; run the forward again"


def _first(outputs) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


class _Root(torch.autograd.Function):
    """A scalar on top of a layer's outputs, whose backward hands them their gradients out of a list and forgets them."""

    @staticmethod
    def forward(ctx, box: list[torch.Tensor], *outputs: torch.Tensor):
        ctx.box = box
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        box, ctx.box = ctx.box, None
        gradients = tuple(box)
        box.clear()
        return None, *gradients


def _backward(root: GradientEdge, device: torch.device) -> None:
    torch.autograd.backward([root], [torch.ones((), device=device)])


def _holders(tensors: tuple, i: int) -> tuple[int, int, int]:
    """References to a tensor from Python and from C++, and to its memory."""
    if not hasattr(torch.Tensor, "_use_count"):
        return 0, 0, 0
    return sys.getrefcount(tensors[i]), tensors[i]._use_count(), torch._C._storage_Use_Count(tensors[i].untyped_storage()._cdata)


class _Probe(torch.autograd.Function):
    """Counts the holders of a gradient that the engine alone holds, as this version of torch has them."""

    @staticmethod
    def forward(ctx, counts: list, x: torch.Tensor):
        ctx.counts = counts
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.counts.append(_holders(gradients, 0))
        return None, None


@functools.cache
def _sole_holders(device: torch.device) -> tuple[int, int, int]:
    counts: list[tuple[int, int, int]] = []
    with torch.enable_grad():
        x = torch.zeros(2, device=device, requires_grad=True)
        (_Probe.apply(counts, x) * 2.0).sum().backward()
    return counts[0]


def _shared(gradients: tuple) -> list[bool]:
    """For each gradient whether something besides the engine may hold it or its memory."""
    flags = []
    for i in range(len(gradients)):
        if gradients[i] is None:
            flags.append(False)
            continue
        sole, found = _sole_holders(gradients[i].device), _holders(gradients, i)
        flags.append(0 in found or gradients[i]._is_view() or any(a > b for a, b in zip(found, sole)))
    return flags


def _taken(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's memory in a new tensor; the old one is left empty."""
    taken = gradient.detach()
    gradient.data = gradient.new_empty(0)
    return taken


def _draws(layer: nn.Module) -> bool:
    """Whether a layer draws random numbers now, as far as its modules show."""
    return any(
        module.training and (isinstance(module, _DropoutNd) and module.p > 0 or getattr(module, "attention_dropout", 0.0) > 0)
        for module in layer.modules()
    )


_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")


def _layer_forward(plain: Callable) -> Callable:
    """`forward` of a checkpointed layer class."""

    @torch.compiler.disable
    def forward(self, *args, **kwargs):
        handle: Checkpointing = self._checkpointing
        if handle.closed or not (self.training and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        return handle._checkpoint(self, plain, args, kwargs)

    return forward


class Checkpointing:
    """Checkpointing that was put on a model's layers. Made by `apply_checkpointing`."""

    def __init__(self, layers: list[nn.Module], config: CheckpointConfig, contexts: Contexts):
        self.config, self.contexts, self.closed = config, contexts, False
        self._layers = layers
        n = len(layers)
        self._sent_below = [*config.stored(n), n][config.sent(n)]
        # The first call of a pair whose second has not come, what it returned, and the version of that.
        self._open: tuple[_Call, torch.Tensor, int] | None = None
        self._store: HostStore | None = None
        self._current: _Call | None = None
        self._counts = dict.fromkeys(("layer_calls", "kept_calls", "paired_calls", "gradients_shared"), 0)
        self._untrained = 0
        self._last: StepReport | None = None

    def __deepcopy__(self, memo):
        return self

    def input_overwritable(self) -> bool:
        """For a layer that wants to write over its input in the forward pass; to be called inside its forward.

        Returns:
            True: this is a checkpointed first forward whose input is on the host, or will be before what the current stream
            does next. False: it is saved where it is, or nothing is checkpointed, and must not be changed.
        """
        call = self._current
        if call is None or call.saved is None:
            return False
        self._store.finish(call.saved)
        call.overwritable = True
        return True

    def end_step(self) -> StepReport:
        """What was done since the last call, and a new count. To be called after every optimizer step.

        Raises:
            OffloadError: layers were to be sent, and nothing was though they, or layers before them, are trained.
        """
        store, counts, self._open = self._store, self._counts, None
        held, pinned = (0, 0) if store is None else store.held()
        report = StepReport(
            offload=self.config.offload if store is None else store.mode,
            bytes_to_host=0 if store is None else store.bytes_to_host,
            bytes_to_device=0 if store is None else store.bytes_to_device,
            host_bytes=held,
            pinned_bytes=pinned,
            waiting=0 if store is None else store.waiting,
            **counts,
        )
        self._counts = dict.fromkeys(counts, 0)
        untrained, self._untrained = self._untrained, 0
        if store is not None:
            store.bytes_to_host = store.bytes_to_device = 0
        self._last = report
        # Below the first layer that is trained no input is needed.
        if self._sent_below > 0 and report.bytes_to_host == 0 and not untrained:
            raise OffloadError(
                f"offload={self.config.offload} moved nothing in this step: {self.config.sent(len(self._layers))} of "
                f"{len(self._layers)} layers were to be sent, {report.layer_calls} layer calls were checkpointed. Run the forward pass "
                f"of the checkpointed model in train mode with gradients enabled, or set keep_layers_on_gpu={len(self._layers)} or "
                "offload: none"
            )
        return report

    def report(self) -> str:
        """What is saved where, and the last step's numbers, as text. GiB = 2**30 bytes."""
        n, pairs = len(self._layers), self.config.pairs
        kept, sent = (self.config.kept(n), self.config.sent(n)) if n else (0, 0)
        lines = [f"checkpointing, offload {self.config.offload}: {kept} layer inputs on the device, {sent} on the host"]
        lines += [f"{pairs} pairs of layers: one stored input for both"] * (pairs > 0)
        last = self._last
        if last is not None:
            lines.append(
                f"last step: {last.layer_calls} layer calls, {last.bytes_to_host / 2**30:.2f} GiB to the host, "
                f"{last.bytes_to_device / 2**30:.2f} back, {last.host_bytes / 2**30:.2f} held there "
                f"({last.pinned_bytes / 2**30:.2f} pinned)"
            )
            if last.offload != self.config.offload:
                lines.append(f"pinned host memory ran out: offload went on {last.offload}")
            if last.gradients_shared:
                lines.append(f"{last.gradients_shared} incoming gradients were held elsewhere too: one more u of memory")
        return "\n".join(lines)

    def remove(self) -> None:
        """Make the layers plain again and return the host memory. Inputs whose backward has not come keep theirs: call it
        again when their losses are gone.

        Raises:
            PreflightError: a layer was given another class since (fully_shard does that).
        """
        for layer in self._layers:
            if "_checkpointing" not in vars(type(layer)):
                raise PreflightError(
                    f"{type(layer).__name__} was subclassed after checkpointing was put on: undo that (fully_shard cannot be)"
                )
        for layer in self._layers:
            layer.__class__ = type(layer).__mro__[1]
            del layer._checkpoint_index
        self._layers, self.closed = [], True
        if self._store is not None:
            waiting = self._store.close()
            if waiting:
                logger.warning("%d layer inputs on the host wait for a backward: call remove() again later", waiting)

    def _sent_again(self, x: torch.Tensor) -> Parked:
        """The input of a pair's second layer, made again, on its way to the host."""
        parked = self._store.send(x)
        self._store.settle(parked)
        return parked

    def _count(self, name: str, n: int = 1) -> None:
        self._counts[name] += n

    def _checkpoint(self, layer: nn.Module, plain: Callable, args: tuple, kwargs: dict):
        hidden, args, kwargs = _split(layer, args, kwargs)
        if not hidden.requires_grad and not any(p.requires_grad for p in layer.parameters()):
            self._untrained += 1
            return plain(layer, hidden, *args, **kwargs)
        call = _Call(self, layer, plain, hidden.device, args, kwargs)
        self._count("layer_calls")
        index, pairs, before, self._open = layer._checkpoint_index, self.config.pairs, self._open, None
        if index < 2 * pairs and index % 2:
            call.pair = _pair_of(before, index, self._layers, hidden)
            self._count("paired_calls")
            call.serial = -1 if self._store is None else self._store.next_serial()
        elif index < self._sent_below:
            if self._store is None:
                config = self.config
                self._store = HostStore(
                    config.offload, hidden.device, pinned_fallback=config.pinned_fallback, chunk=config.staging_mib << 20,
                    chunks=config.staging_chunks,
                )  # fmt: skip
            call.saved = self._store.send(hidden)
            call.serial = call.saved.serial
        else:
            self._count("kept_calls")
            call.serial = -1 if self._store is None else self._store.next_serial()
            if index < 2 * pairs:
                call.kept = hidden.detach(), hidden._version
        version, outer, self._current = hidden._version, self._current, call
        try:
            out = _Checkpointed.apply(call, hidden, torch.empty(0, requires_grad=True))
        finally:
            self._current = outer
            if call.saved is not None:
                self._store.settle(call.saved)
        if call.saved is not None and hidden._version != version and not call.overwritable:
            raise OffloadError(
                f"{type(layer).__name__} changed its input in place while it was being copied to the host: "
                "call input_overwritable() first, and change it only where that returns True"
            )
        if index < 2 * pairs and call.pair is None:
            made = _first(out)
            self._open = call, made.detach(), made._version
        return out


def _pair_of(before: tuple[_Call, torch.Tensor, int] | None, index: int, layers: list[nn.Module], hidden: torch.Tensor) -> _Call:
    """The call of the layer before, whose output `hidden` must be."""
    first, made, version = before or (None, None, 0)
    if first is None or first.layer is not layers[index - 1] or hidden._version != version or not _same_memory(made, hidden):
        raise OffloadError(
            f"{type(layers[index]).__name__} {index} is not given what layer {index - 1} returned, as it is: one stored input serves "
            "two layers only where they follow each other with nothing between, and both are trained. Use fewer pairs, or none"
        )
    return first


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _split(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, tuple, dict]:
    """Hidden states, and the other arguments; refuses what a recompute would get wrong."""
    name = type(layer).__name__
    if getattr(layer, "gradient_checkpointing", False):
        raise PreflightError(f"transformers' own checkpointing is on too ({name}): call model.gradient_checkpointing_disable()")
    if args:
        hidden, args = args[0], args[1:]
    else:
        kwargs = dict(kwargs)
        hidden = kwargs.pop("hidden_states", None)
    if not isinstance(hidden, torch.Tensor):
        raise PreflightError(f"{name} was called without hidden states: give them first, or as hidden_states=")
    for cache in _CACHES:
        if kwargs.get(cache) is not None:
            raise PreflightError(f"{name} was given a key/value cache, {cache}, which a recompute fills twice: use_cache=False")
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise PreflightError(
                f"{name} was given a second tensor that requires a gradient, {tuple(value.shape)}: only hidden states carry one "
                "through a checkpointed layer; detach it, or turn checkpointing off"
            )
    return hidden, args, kwargs


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model. Raises PreflightError where it has none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise PreflightError(f"{type(model).__name__}: its decoder has no list `layers`; give them by layers=[...]")
    return list(layers)


def apply_checkpointing(
    model: nn.Module,
    config: CheckpointConfig | None = None,
    *,
    contexts: Contexts = lambda: (nullcontext(), nullcontext()),
    layers: list[nn.Module] | None = None,
) -> Checkpointing:
    """Checkpoint every decoder layer of a model, in place: before DeepSpeed, DDP or fully_shard wrap it, beside `upipe.apply`.

    Only forward passes in train mode with gradients enabled are checkpointed. Compiled models run checkpointed layers eagerly.

    Args:
        model: a Hugging Face model; its own checkpointing must be off.
        config: settings; as given or all defaults (inputs saved on the device).
        contexts: called once a layer call: the context managers around its first forward and around its recompute.
        layers: the layers in the order they run; the decoder's unless told.

    Returns:
        The handle, with `end_step()`, `report()` and `remove()`.

    Raises:
        PreflightError: before anything is changed.
    """
    config = CheckpointConfig() if config is None else config
    layers = decoder_layers(model) if layers is None else list(layers)
    try:
        check_pairs(config.pairs, len(layers))
    except ValueError as error:
        raise PreflightError(str(error)) from None
    for i, layer in enumerate(layers):
        if layer in layers[:i]:
            raise PreflightError(f"layer {i} is layer {layers.index(layer)} once more: a layer that runs twice cannot be checkpointed here")
        if hasattr(layer, "_checkpointing"):
            raise PreflightError(f"checkpointing is on layer {i} already: call remove() on its handle first")
        if "forward" in vars(layer):
            raise PreflightError(f"layer {i} has a forward set on the instance, which would not be checkpointed: undo that first")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise PreflightError("transformers' own checkpointing is on: call model.gradient_checkpointing_disable()")
    handle = Checkpointing(layers, config, contexts)
    subclasses: dict[type, type] = {}
    for i, layer in enumerate(layers):
        cls = type(layer)
        if cls not in subclasses:
            # It keeps the name of its base, by which transformers and wrapping policies find layers.
            members = {"_checkpointing": handle, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            subclasses[cls] = type(cls.__name__, (cls,), members | {"forward": _layer_forward(cls.forward)})
        layer.__class__ = subclasses[cls]
        layer._checkpoint_index = i
    return handle
