"""Host memory, exactly sized, page-locked where asked and reused; and device tensors parked in it beside computation.

torch's own pinned allocator rounds a block up to a power of two (2.25 GiB becomes 4), which at millions of tokens is the
difference between fitting and not. In `HostPool` a block is an anonymous mapping of whole pages, registered with CUDA as it
is.

`HostStore` sends tensors to the host and brings them back, on CUDA streams of its own. Its ordering rules: the compute
stream is asked for at every call. A copy to the host waits for the compute stream as it stood at `send`; the tensor is let
go only behind the end of that copy. A buffer that comes back is allocated on the compute stream, the copy into it waits for
that point, and the compute stream waits for the copy. A slab's last copy, either way, is waited for before it is written
again.

Units: bytes. Without a GPU there is nothing to register with and no stream; bookkeeping and copies are the same.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
import mmap
import os
import resource
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary, finalize

import torch

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE


SAVED, RING, OUTPUTS, WORKING, CHUNKS = (
    "saved inputs", "the ring of pageable copies", "attention outputs", "working tensors of a layer", "chunks of fpdt",
)  # fmt: skip
WORKS = {
    SAVED: "offload: pageable, pinned_fallback: true, a larger keep_layers_on_gpu, fewer layers or fewer tokens",
    RING: "a larger ulimit -l, or offload: none",
    OUTPUTS: "attention_output_layers: auto or a smaller number, attention_output: device, a larger ulimit -l, or fewer tokens",
    WORKING: "offload: pageable, offload_within_layer: false, a larger ulimit -l, or fewer tokens",
    CHUNKS: "a larger ulimit -l, a larger sp_size, fewer tokens or another method",
}
"""What host memory is taken for -> what works where it cannot be page-locked."""


class PinnedHostMemoryError(RuntimeError):
    """Pinned (page-locked) host memory could not be had. `upipe.outcomes` tells it from the device's and from ordinary host
    memory.

    memory: what it was for, one of WORKS; None: not said.
    """

    def __init__(self, message: str, memory: str | None = None) -> None:
        super().__init__(message)
        self.memory = memory


@dataclass
class _Block:
    memory: torch.Tensor  # uint8, whole pages
    pinned: bool

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostPool:
    """Blocks of host memory, each of exactly the bytes asked for, rounded up to whole pages. Safe to use from threads.

    held_bytes and pinned_bytes count all blocks, in use or free. Page-locking takes a while (seconds for tens of GiB), once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[_Block]] = {}
        self._used: dict[int, _Block] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.held_bytes = 0
        self.pinned_bytes = 0
        atexit.register(self._at_exit)

    def take(self, shape, dtype: torch.dtype, pinned: bool = True, memory: str | None = None) -> torch.Tensor:
        """A contiguous CPU tensor of unset values, to be given back with `give`; it keeps its memory until then.

        Args:
            shape: a sequence of sizes, or their product as an int.
            pinned: page-locked, so that copies to and from a GPU run beside computation.
            memory: what it is for, one of WORKS, which an error says.

        Raises:
            PinnedHostMemoryError: the memory cannot be page-locked, with the numbers and what would work.
            OSError: ENOMEM, the system has no such memory at all.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        wanted = math.prod(shape) * dtype.itemsize
        nbytes = max(1, -(-wanted // PAGE)) * PAGE
        with self._lock:
            free = self._free.get((nbytes, pinned))
            block = free.pop() if free else self._make(nbytes, pinned, memory)
            self._used[_base(block.memory)] = block
        return block.memory[:wanted].view(dtype).view(shape)

    def give(self, tensor: torch.Tensor, keep: bool = True) -> None:
        """Take back a tensor that `take` returned, for reuse or (keep=False) to the system at once. Nothing may read or write
        it any more, copies under way included."""
        with self._lock:
            block = self._used.pop(_base(tensor), None)
            if block is None:
                raise ValueError(f"a tensor of {tuple(tensor.shape)} that this pool did not hand out, or was given back before")
            if keep:
                self._free.setdefault((block.nbytes, block.pinned), []).append(block)
            else:
                self._release(block)

    def clear(self) -> None:
        """Return every free block to the system. Blocks in use stay."""
        with self._lock:
            for blocks in self._free.values():
                while blocks:
                    self._release(blocks.pop())

    def _make(self, nbytes: int, pinned: bool, purpose: str | None) -> _Block:
        memory = _map(nbytes)
        if pinned:
            failed = _register(memory.data_ptr(), nbytes)
            if failed is not None and any(pin and blocks for (_, pin), blocks in self._free.items()):
                self.clear()
                failed = _register(memory.data_ptr(), nbytes)
            if failed is not None:
                raise PinnedHostMemoryError(_refusal(nbytes, self.pinned_bytes, self.held_bytes, failed, purpose), purpose)
        self.held_bytes += nbytes
        self.pinned_bytes += nbytes * pinned
        return _Block(memory, pinned)

    def _release(self, block: _Block) -> None:
        if block.pinned:
            _unregister(block.memory.data_ptr())
        self.held_bytes -= block.nbytes
        self.pinned_bytes -= block.nbytes * block.pinned

    def _at_exit(self) -> None:
        """CUDA must forget the pages before the process gives them up; a forked child never registered any."""
        if os.getpid() != self._pid:
            return
        try:
            if self.pinned_bytes and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.clear()
            for block in self._used.values():
                if block.pinned:
                    _unregister(block.memory.data_ptr())
        except RuntimeError:
            pass  # after a CUDA error, which was raised where it happened, nothing can be unregistered
        self._used.clear()


@functools.cache
def pool() -> HostPool:
    """The pool of this process."""
    return HostPool()


class _Slab:
    """Host memory of one parked tensor. `event` and `future` end its last use; `buffer` is a device tensor which that use
    may still be writing, kept until the use has ended."""

    def __init__(self, nbytes: int, pinned: bool):
        self.memory = pool().take((nbytes,), torch.uint8, pinned=pinned, memory=SAVED)
        self.pinned = pinned
        self.event: torch.cuda.Event | None = None
        self.future: Future | None = None
        self.buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def settle(self) -> None:
        """Block until nothing reads or writes it, and return it to the pool's system memory."""
        if self.future is not None:
            self.event = self.future.result()
        if self.event is not None:
            self.event.synchronize()
        self.buffer = None
        pool().give(self.memory, keep=False)


class Parked:
    """A tensor on its way to the host, there, or on its way back. Letting go of it gives its slab back.

    serial: its place in the order in which tensors were sent.
    """

    def __init__(self, serial: int, x: torch.Tensor, stride: tuple[int, ...], slab: _Slab):
        self.serial, self.slab = serial, slab
        self.shape, self.stride, self.dtype, self.device = x.shape, stride, x.dtype, x.device
        self.nbytes = x.numel() * x.element_size()
        self.source: torch.Tensor | None = None
        self.sent: torch.cuda.Event | Future | None = None
        self.buffer: torch.Tensor | None = None
        self.buffer_stream: torch.cuda.Stream | None = None
        self.arrived: torch.cuda.Event | Future | None = None
        self.free_slab: Callable[[], Any] | None = None


class _Lane:
    """One direction of copies: a CUDA stream and, for pageable slabs, a thread with a ring of page-locked chunks."""

    def __init__(self, device: torch.device, chunk: int, chunks: int, name: str):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._chunk, self._chunks = chunk, chunks
        self._ring: list[torch.Tensor] = []
        self._busy: list[torch.cuda.Event | None] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"offload-{name}")

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self.stream.wait_event(event)

    def entered(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self, blocking: bool = False) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event(blocking=blocking)
        event.record(self.stream)
        return event

    @property
    def staging_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._ring)

    def submit(self, copy: Callable, *args) -> Future:
        """Run `copy(*args)` in the lane's thread, on its stream; the future's result is the event that ends it."""
        while len(self._ring) < self._chunks:
            self._ring.append(pool().take((self._chunk,), torch.uint8, pinned=True, memory=RING))
            self._busy.append(None)
        return self._thread.submit(self._run, copy, *args)

    def _run(self, copy: Callable, *args):
        # Grad mode and the current stream and device belong to a thread.
        with torch.no_grad(), self.entered():
            return copy(*args)

    def to_host(self, source: torch.Tensor, slab: _Slab, ready: torch.cuda.Event | None) -> None:
        """Chunks of `source` (flat bytes) by the ring into the slab; the next chunk is on its way while one is stored."""
        self.wait(ready)
        coming: deque = deque()

        def store():
            chunk, event, start, end = coming.popleft()
            if event is not None:
                event.synchronize()
            slab.memory[start:end].copy_(chunk[: end - start])

        for i, start in enumerate(range(0, source.numel(), self._chunk)):
            if len(coming) == len(self._ring):
                store()
            end = min(start + self._chunk, source.numel())
            chunk = self._ring[i % len(self._ring)]
            chunk[: end - start].copy_(source[start:end], non_blocking=True)
            coming.append((chunk, self.mark(blocking=True), start, end))
        while coming:
            store()

    def to_device(self, target: torch.Tensor, slab: _Slab, ready: torch.cuda.Event | None, sent: Future):
        """Chunks of the slab by the ring into `target` (flat bytes). Returns the event behind the last."""
        sent.result()
        self.wait(ready)
        for i, start in enumerate(range(0, target.numel(), self._chunk)):
            n = i % len(self._ring)
            if self._busy[n] is not None:
                self._busy[n].synchronize()
            end = min(start + self._chunk, target.numel())
            self._ring[n][: end - start].copy_(slab.memory[start:end])
            target[start:end].copy_(self._ring[n][: end - start], non_blocking=True)
            self._busy[n] = self.mark(blocking=True)
        return self.mark(blocking=True)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self.stream is not None:
            self.stream.synchronize()
        while self._ring:
            pool().give(self._ring.pop(), keep=False)


class HostStore:
    """Tensors of one device parked on the host, to come back in about the reverse order.

    Args:
        mode: "pinned": slabs are page-locked, and the GPU copies straight to and from them. "pageable": slabs are ordinary
            memory, filled and read by a thread through a small page-locked ring for each direction, so that the copies still
            run beside computation.
        pinned_fallback: where page-locking fails, say so and make further slabs pageable, instead of raising.
        chunk, chunks: the rings: chunks of so many bytes.
    """

    def __init__(
        self,
        mode: Literal["pinned", "pageable"],
        device: torch.device,
        *,
        pinned_fallback: bool = False,
        chunk: int = 64 << 20,
        chunks: int = 3,
    ) -> None:
        self.mode, self.device = mode, device
        self.bytes_to_host = self.bytes_to_device = 0
        self._pinned_fallback = pinned_fallback
        self._down, self._up = _Lane(device, chunk, chunks, "to-host"), _Lane(device, chunk, chunks, "to-device")
        self._slabs: list[_Slab] = []
        self._free: list[_Slab] = []
        self._sending: Future | None = None
        self._serials = itertools.count()
        self._waiting: WeakValueDictionary[int, Parked] = WeakValueDictionary()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def staging_bytes(self) -> int:
        return self._down.staging_bytes + self._up.staging_bytes

    def held(self) -> tuple[int, int]:
        """Bytes on the host, and the page-locked part of them."""
        pinned = sum(slab.nbytes for slab in self._slabs if slab.pinned) + self.staging_bytes
        return pinned + sum(slab.nbytes for slab in self._slabs if not slab.pinned), pinned

    def send(self, x: torch.Tensor) -> Parked:
        """Start x on its way to the host. `settle` must follow before x is let go or changed.

        Raises:
            PinnedHostMemoryError: no page-locked memory for it, and no fallback was allowed.
        """
        if x.device != self.device:
            raise ValueError(f"a tensor on {x.device} was sent to the host from a store for {self.device}: use a store a device")
        flat, stride = _flat_bytes(x)
        slab = self._slab(flat.numel())
        saved = Parked(next(self._serials), x, stride, slab)
        saved.free_slab = finalize(saved, self._free.append, slab)
        saved.free_slab.atexit = False
        self._waiting[saved.serial] = saved
        ready = _mark_compute(self.device)
        if slab.pinned:
            self._down.wait(ready)
            self._down.wait(slab.event)
            with self._down.entered():
                slab.memory[: saved.nbytes].copy_(flat, non_blocking=True)
            saved.source, saved.sent = flat, self._down.mark()
            slab.event = saved.sent
        else:
            # At most one earlier copy is still under way: it bounds the inputs that live on the device for it.
            if self._sending is not None:
                self._sending.result()
            saved.sent = self._sending = slab.future = self._down.submit(self._down.to_host, flat, slab, ready)
        self.bytes_to_host += saved.nbytes
        return saved

    def settle(self, saved: Parked) -> None:
        """Make the compute stream wait for the copy, so that the tensor's memory may be used anew when it is let go. A
        pageable copy's thread holds the tensor itself until it has it all."""
        if saved.source is not None:
            _compute_waits(self.device, saved.sent)
            saved.source = None

    def finish(self, saved: Parked) -> None:
        """Let what the compute stream does from now on write over the tensor that was sent."""
        if isinstance(saved.sent, Future):
            saved.sent.result()
        else:
            _compute_waits(self.device, saved.sent)

    def receive(self, saved: Parked, last: bool = True) -> torch.Tensor:
        """The tensor again, right for the current stream, with its strides if it filled its memory. last: it is not needed
        again, and its slab is free; False: it stays on the host, to be received once more."""
        self._fetch(saved)
        event = saved.arrived.result() if isinstance(saved.arrived, Future) else saved.arrived
        _compute_waits(self.device, event)
        x, saved.buffer, saved.slab.buffer = saved.buffer, None, None
        if saved.buffer_stream is not None and saved.buffer_stream != torch.cuda.current_stream(self.device):
            x.record_stream(torch.cuda.current_stream(self.device))
        saved.slab.event, saved.slab.future, saved.arrived = event, None, None
        if last:
            del self._waiting[saved.serial]
            saved.free_slab()
        return x

    def read(self, saved: Parked) -> torch.Tensor:
        """The tensor where it lies on the host, with its shape and strides. What waits for the current stream may read it, until
        `release`."""
        self.finish(saved)
        return saved.slab.memory[: saved.nbytes].view(saved.dtype).as_strided(saved.shape, saved.stride)

    def release(self, saved: Parked, event: torch.cuda.Event | None) -> None:
        """It is not needed again, and its slab is free. event: the end of the last `read`'s use."""
        saved.slab.event, saved.slab.future = event, None
        del self._waiting[saved.serial]
        saved.free_slab()

    def holds(self, saved: Parked) -> bool:
        """Whether it can still be received."""
        return saved.serial in self._waiting

    def prefetch(self, before: int) -> None:
        """Start the newest tensor sent before serial `before` on its way back."""
        serial = max((s for s in self._waiting.keys() if s < before), default=None)
        saved = None if serial is None else self._waiting.get(serial)
        if saved is not None:
            self._fetch(saved)

    def next_serial(self) -> int:
        """A place in the order for something that is not sent."""
        return next(self._serials)

    def _fetch(self, saved: Parked) -> None:
        if saved.buffer is not None:
            return
        slab = saved.slab
        saved.buffer = slab.buffer = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=self.device)
        saved.buffer_stream = None if self.device.type != "cuda" else torch.cuda.current_stream(self.device)
        flat, ready = _dense_bytes(saved.buffer), _mark_compute(self.device)
        if slab.pinned:
            self._up.wait(ready)
            self._up.wait(saved.sent)
            with self._up.entered():
                flat.copy_(slab.memory[: saved.nbytes], non_blocking=True)
            saved.arrived = slab.event = self._up.mark()
        else:
            saved.arrived = slab.future = self._up.submit(self._up.to_device, flat, slab, ready, saved.sent)
        self.bytes_to_device += saved.nbytes

    def _slab(self, nbytes: int) -> _Slab:
        """A free slab that holds nbytes, the smallest; else a new one of exactly that, in the place of a free one too small."""
        free = [self._free.pop() for _ in range(len(self._free))]
        fit = min((slab for slab in free if slab.nbytes >= nbytes), key=lambda slab: slab.nbytes, default=None)
        spare = [slab for slab in free if slab is not fit]
        if fit is None and spare:
            small = min(spare, key=lambda slab: slab.nbytes)
            spare.remove(small)
            self._drop(small)
        self._free.extend(spare)
        if fit is None:
            fit = self._new(nbytes)
            self._slabs.append(fit)
        if fit.future is not None:
            fit.event, fit.future = fit.future.result(), None
        if fit.buffer is not None:
            # Fetched for a backward that never came: the copy into it must end before its memory is used anew.
            _compute_waits(self.device, fit.event)
            fit.buffer = None
        return fit

    def _new(self, nbytes: int) -> _Slab:
        if self.mode == "pinned":
            try:
                return _Slab(nbytes, pinned=True)
            except PinnedHostMemoryError as error:
                if not self._pinned_fallback:
                    raise
                logger.warning("falling back to pageable offload, as pinned_fallback asks: %s", error)
                self.mode = "pageable"
        return _Slab(nbytes, pinned=False)

    def _drop(self, slab: _Slab) -> None:
        self._slabs.remove(slab)
        slab.settle()

    def close(self) -> int:
        """Return the host memory to the system. Returns how many tensors have not come back; their memory stays."""
        while self._free:
            self._drop(self._free.pop())
        if not self._slabs:
            self._down.close()
            self._up.close()
        return len(self._slabs)


def _flat_bytes(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """x as flat uint8, and the strides to make it again from that. Without a copy where its elements fill their memory in some
    order; that order is kept in any case, as kernels sum in another order where it changes."""
    x = x.detach()
    if x.is_contiguous():
        return _dense_bytes(x), torch.empty(x.shape, device="meta").stride()
    stride = torch.empty_like(x, device="meta").stride()
    if stride != x.stride():
        x = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    return _dense_bytes(x), stride


def _dense_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _mark_compute(device: torch.device) -> torch.cuda.Event | None:
    """An event at the end of what the current stream has been given so far."""
    return None if device.type != "cuda" else torch.cuda.current_stream(device).record_event()


def _compute_waits(device: torch.device, event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _map(nbytes: int) -> torch.Tensor:
    """Private anonymous pages as a uint8 tensor; they go back to the system when the last tensor over them dies."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a hint: a kernel without huge pages is slower to touch them, no more
    return torch.frombuffer(memory, dtype=torch.uint8)


def _register(address: int, nbytes: int) -> str | None:
    """Page-lock a range. Returns None, or CUDA's words for why it could not."""
    if not torch.cuda.is_available():
        return None
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, nbytes, 0))
    if code == 0:
        return None
    try:
        # CUDA keeps the error until it is asked for, and the next kernel, innocent, would raise it: ask now.
        torch.ones(1, device="cuda") + 1
    except RuntimeError:
        pass
    return f"{cudart.cudaGetErrorString(cudart.cudaError(code))} ({code})"


def _unregister(address: int) -> None:
    if not torch.cuda.is_available():
        return
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    if code != 0:
        raise RuntimeError(f"cudaHostUnregister of {address:#x} failed with code {code}")


def _refusal(nbytes: int, pinned: int, held: int, why: str, memory: str | None) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit_text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    return (
        f"pinned host memory{'' if memory is None else f' for {memory}'}: cudaHostRegister of {nbytes} bytes ({nbytes / 2**30:.2f} GiB) "
        f"failed with {why!r}; this process has {pinned} bytes ({pinned / 2**30:.2f} GiB) pinned and {held} held already, ulimit -l is "
        f"{limit_text}. Use {WORKS[memory or SAVED]}"
    )
