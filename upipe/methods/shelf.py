"""Tensors of one device kept in page-locked host memory, to be fetched as often as asked, on streams of their own.

On the CPU the same copies are made, so that tests mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from upipe import host


class Kept:
    """A tensor on the shelf."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.written: torch.cuda.Event | None = None


class Fetched:
    """A tensor on its way back to the device."""

    def __init__(self, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._tensor, self._ready = tensor, ready

    def get(self) -> torch.Tensor:
        """The tensor, right for the current stream."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._ready)
            self._tensor.record_stream(stream)
            self._ready = None
        return self._tensor


class Streams:
    """One stream each way of a GPU, none on the CPU; and what went over them.

    Attributes:
        bytes_to_host, bytes_to_device: copied since `start`.
        held, most: bytes on shelves now, and at most since then.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.out, self.back = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self.held = 0
        self.start()

    def start(self) -> None:
        self.bytes_to_host, self.bytes_to_device, self.most = 0, 0, self.held


class Shelf:
    """Host memory of one attention call. `close` gives it back; so does letting go of the shelf.

    Args:
        device: of the tensors.
        streams: shared by the shelves of a model.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.device, self.streams = device, streams
        self._kept: list[Kept] = []

    def keep(self, tensor: torch.Tensor, over: Kept | None = None) -> Kept:
        """A copy of the tensor, begun now; it must not be written to afterwards. over: take the place of that one."""
        kept = over
        if kept is None:
            kept = Kept(host.pool().take(tensor.shape, tensor.dtype, self.device.type == "cuda", host.CHUNKS))
            self._kept.append(kept)
            self.streams.held += tensor.nbytes
            self.streams.most = max(self.streams.most, self.streams.held)
        self.streams.bytes_to_host += tensor.nbytes
        if self.streams.out is None:
            kept.memory.copy_(tensor)
            return kept
        self.streams.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.streams.out):
            # A fetch of what was there before has ended: what it brought went into this tensor.
            kept.memory.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.streams.out)
            kept.written = torch.cuda.Event()
            kept.written.record()
        return kept

    def fetch(self, kept: Kept) -> Fetched:
        """Begin a copy back."""
        self.streams.bytes_to_device += kept.memory.nbytes
        if self.streams.back is None:
            return Fetched(kept.memory.clone(), None)
        with torch.cuda.stream(self.streams.back):
            if kept.written is not None:
                self.streams.back.wait_event(kept.written)
            tensor = torch.empty(kept.memory.shape, dtype=kept.memory.dtype, device=self.device)
            tensor.copy_(kept.memory, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return Fetched(tensor, ready)

    def close(self) -> None:
        """Give the memory back, once every copy has ended."""
        if self._kept and self.streams.out is not None:
            self.streams.out.synchronize()
            self.streams.back.synchronize()
        while self._kept:
            memory = self._kept.pop().memory
            self.streams.held -= memory.nbytes
            host.pool().give(memory)

    def __del__(self) -> None:
        self.close()


def ahead(tasks: Iterable[Any], begin: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """(task, begin(task)) for each task, the next one begun before this one is yielded."""
    waiting: list[tuple[Any, Any]] = []
    for task in tasks:
        waiting.append((task, begin(task)))
        if len(waiting) == 2:
            yield waiting.pop(0)
    yield from waiting
