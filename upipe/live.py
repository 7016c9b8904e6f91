"""Counting live memory without a device: every tensor storage that lives while a function runs, on the meta device (or the CPU).

The real code runs, on tensors that have shapes and no values, so a count takes milliseconds at any length. It sees what
torch allocates through operators. Not counted: what a kernel takes inside itself (the attention kernels' is stood in for
by `SimulatedAttention`, from their measured `backward_bytes`), the CUDA context, NCCL, fragmentation.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upipe import rotary, workspace
from upipe.kernels import Case, Kernel
from upipe.ring import Messages, Ring

BUFFERS = "idle stage buffers"


class LiveStorages(TorchDispatchMode):
    """Count the bytes of storages on a device that were made inside and are alive.

        with LiveStorages() as live:
            function()
        live.peak, live.at_peak

    Args:
        device: "meta", or "cpu" for code that looks at values.
        tables: False: keep no at_peak, which takes most of the time.

    Attributes:
        now, peak: bytes.
        at_peak: bytes by what they are, when the peak was reached: stage buffers of the workspace by their role, other
            storages by the line that made them.
    """

    def __init__(self, device: str = "meta", tables: bool = True) -> None:
        super().__init__()
        self.device, self.tables = torch.device(device), tables
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._live: dict[int, tuple[int, str]] = {}
        self._known: set[int] = set()

    def know(self, *tensors: torch.Tensor) -> None:
        """Tensors whose memory is the caller's: never counted."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known.add(storage._cdata)

    def start(self) -> None:
        """Begin a new peak from what lives now."""
        self.peak = self.now
        self.at_peak = self._by_line()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        size = storage.nbytes()
        self._live[key] = size, _line() if self.tables else ""
        weakref.finalize(storage, self._gone, key)
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = self._by_line()

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)[0]

    def _by_line(self) -> Counter[str]:
        if not self.tables:
            return Counter()
        lines: Counter[str] = Counter()
        for size, line in self._live.values():
            lines[line] += size
        roles = +workspace.of(self.device).roles
        lines[BUFFERS] -= roles.total()
        return +lines + roles


def _line() -> str:
    """The innermost line outside of torch and of this file; the workspace's buffers go by roles."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == workspace.__file__:
            return BUFFERS
        if path != __file__ and "/torch/" not in path:
            return f"{Path(path).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def finish_heads(x, cos, sin, out=None, **options):
    """Stands for the Triton kernel of `rotary.finish_heads`, which allocates nothing."""
    return x if out is None else out


def unfinish_heads(grad, cos, sin, out=None, raw=None, weight=None, eps=0.0, weight_grad=None):
    """Stands for that of `rotary.unfinish_heads`: allocates its partial sums of the weight's gradient."""
    if weight_grad is not None:
        rows, _, d = grad.shape
        half = 0 if cos is None else cos.shape[-1] // 2
        programs, _ = rotary.sums_of(rows, d, rotary.tile_of(half, d - 2 * half)[2])
        weight_grad += torch.empty(programs, d, dtype=torch.float32, device=grad.device).sum(0)
    return grad if out is None else out


class SimulatedAttention(Kernel):
    """Stands for a kernel: allocates what it allocates and computes nothing.

    Args:
        of: the kernel. Its backward must have been measured (`Kernel.backward_bytes`).

    Attributes:
        before_backward: called before each backward, where it is not None.
    """

    before_backward: Callable[[], None] | None = None

    def __init__(self, of: Kernel) -> None:
        self.of = of
        self.name = f"simulated {of.name}"
        self.writes_gradients, self.dq_over_out = of.writes_gradients, of.dq_over_out

    def declines(self, case: Case) -> str | None:
        return None

    def without_mask(self) -> SimulatedAttention:
        """What stands for its calls without a causal mask (`ring.full_of`)."""
        return self

    def forward(self, q, k, v, scale, offsets=None, window=None, softcap=None, out=None):
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        # Only a kernel that writes where it is told makes no output of its own.
        got = None if out is not None and self.writes_gradients else torch.empty_like(q)
        return (got if out is None else out), lse

    def backward(self, grad, q, k, v, out, lse, scale, offsets=None, window=None, softcap=None, dq=None, dk=None, dv=None):
        if self.before_backward is not None:
            self.before_backward()
        B, S, h, d = q.shape
        step = self.of.heads_at_once(B, S, h, k.shape[2], d)
        if step is not None:
            return self._backward_in_parts(step, grad, q, k, v, out, lse, (dq, dk, dv))
        held = self._held(S, h, k.shape[2], d, k.shape[1])
        if self.writes_gradients:
            dq, dk, dv = (torch.empty_like(t) if given is None else given for t, given in zip((q, k, v), (dq, dk, dv)))
            workspace = q.new_empty(held, dtype=torch.uint8)
            del workspace
            return dq, dk, dv
        made = [torch.empty_like(t) for t in (q, k, v)]
        workspace = q.new_empty(max(0, held - sum(t.numel() * t.itemsize for t in made)), dtype=torch.uint8)
        del workspace
        # In the buffers, where there are any: the caller may look at nothing else.
        return tuple(mine if given is None else given for mine, given in zip(made, (dq, dk, dv)))

    def _held(self, *case: int) -> int:
        held = self.of.backward_bytes(*case)
        if held is None:
            raise ValueError(f"what {self.of.name}'s backward holds with {case[1]} query and {case[2]} kv heads has not been measured")
        return held

    def _backward_in_parts(self, step: int, grad, q, k, v, out, lse, buffers):
        """Of a kernel that makes its own gradients and is called for a few heads of one kv head at a time; two kv heads stand for all."""
        grads = tuple(torch.empty_like(t) if given is None else given for t, given in zip((q, k, v), buffers))
        group, made = q.shape[2] // k.shape[2], ()
        for kv in range(min(2, k.shape[2])):
            sums = ()
            for first in range(kv * group, (kv + 1) * group, step):
                part = slice(first, min(first + step, (kv + 1) * group))
                # It takes packed gradients and results. What the call before answered is there until this one has.
                packed = [t.contiguous() for t in (grad[:, :, part], out[:, :, part], lse[:, part])]
                now = [torch.empty_like(t) for t in (q[:, :, part], k[:, :, :1], v[:, :, :1])]
                held = self._held(q.shape[1], part.stop - part.start, 1, q.shape[3], k.shape[1])
                workspace = q.new_empty(max(0, held - sum(t.numel() * t.itemsize for t in now)), dtype=torch.uint8)
                del workspace, packed
                made = now
                del now
                sums = made[1:] if not sums else [total.float().add_(t) for total, t in zip(sums, made[1:])]
        return grads


class SimulatedRing(Ring):
    """A ring without its other ranks: what is to be received is there at once, without values."""

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size

    def exchange(self, target, send, source, receive) -> Messages:
        return Messages([], send, receive)
