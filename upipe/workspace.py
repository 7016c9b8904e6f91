"""The workspace: stage buffers of the attention block, kept from call to call.

A call takes buffers, gives them back, and at its end the workspace keeps as many of each size as a forward needs. What
only a backward needs beyond that goes back to the device's allocator whenever it is idle, because an attention kernel's
own memory, and between forward and backward the block's result, must fit beside the buffers. Sizes are exact. One
workspace a device, for every layer, model and step of the process.

Reuse needs no synchronisation: a buffer is given back on the compute stream, after that stream has waited for whatever
else used it. A call on another stream than the last one's waits for that one to end and starts with new buffers.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager

import torch


class Buffer:
    """Bytes of one size. `view` reads them as a tensor that begins at the first byte.

    Args:
        raw: [bytes] uint8.
        pooled: whether a workspace takes it back; False for memory of another's.
        role: what it is used for now.
    """

    __slots__ = ("raw", "pooled", "role")

    def __init__(self, raw: torch.Tensor, pooled: bool = True, role: str = "") -> None:
        self.raw, self.pooled, self.role = raw, pooled, role

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        numel = math.prod(shape)
        return self.raw[: numel * dtype.itemsize].view(dtype).view(shape)


class Workspace:
    """Free buffers of one device by size in bytes. `roles`: bytes in use by what for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[int, list[Buffer]] = {}
        self.roles: Counter[str] = Counter()
        self._out: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._keep: Counter[int] = Counter()
        self._end: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @property
    def bytes(self) -> int:
        """Bytes held now, in use or not."""
        return sum(size * (len(self.free.get(size, ())) + self._out[size]) for size in self.free.keys() | self._out.keys())

    def take(self, nbytes: int, role: str = "") -> Buffer:
        """A buffer of exactly so many bytes, with anything in it."""
        self._out[nbytes] += 1
        self._most[nbytes] = max(self._most[nbytes], self._out[nbytes])
        self.roles[role] += nbytes
        free = self.free.get(nbytes)
        buffer = free.pop() if free else Buffer(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        buffer.role = role
        return buffer

    def give(self, buffer: Buffer) -> None:
        if not buffer.pooled:
            return
        size = buffer.raw.numel()
        self._out[size] -= 1
        self.roles[buffer.role] -= size
        self.free.setdefault(size, []).append(buffer)

    def trim(self) -> None:
        """Free idle buffers beyond what a forward needs in all."""
        for size in list(self.free):
            del self.free[size][max(0, self._keep[size] - self._out[size]) :]
            if not self.free[size]:
                del self.free[size]

    def release_idle(self) -> None:
        """Free all idle buffers: for work that needs none and much else."""
        self.free.clear()

    @contextmanager
    def call(self, forward: bool):
        """One forward or backward of a block. What it took and did not give back, after an error say, is forgotten."""
        self._out.clear()
        self._most.clear()
        self.roles.clear()
        self._start()
        try:
            yield self
        finally:
            self._out.clear()
            if forward:
                self._keep = self._keep | self._most if self._most.keys() <= self._keep.keys() else Counter(self._most)
            self.trim()
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                self._end = stream, stream.record_event()

    def _start(self) -> None:
        # The allocator takes memory back for the stream that it was made on, so only that one may use it.
        if self._end is not None and torch.cuda.current_stream(self.device) != self._end[0]:
            self.clear()

    def clear(self) -> None:
        """Free every buffer. Those of a call that runs now stay with it."""
        if self._end is not None:
            self._end[1].synchronize()
        self.free.clear()
        self._keep.clear()


_workspaces: dict[torch.device, Workspace] = {}


def of(device: torch.device) -> Workspace:
    """The process's workspace on a device."""
    if device not in _workspaces:
        _workspaces[device] = Workspace(device)
    return _workspaces[device]


def report() -> dict[str, int]:
    """Bytes that the workspaces hold, by device."""
    return {str(device): space.bytes for device, space in _workspaces.items()}


def clear() -> None:
    """Free every workspace's buffers; the next call makes its own."""
    for space in _workspaces.values():
        space.clear()


def poison() -> None:
    """Fill every free buffer with 0xFF bytes, which are NaN in every floating dtype: for tests that nothing stale is read."""
    for space in _workspaces.values():
        for buffers in space.free.values():
            for buffer in buffers:
                buffer.raw.fill_(0xFF)
