"""Zigzag ring attention: an attention kernel that works on a sequence shared by the ranks of a ring.

Shapes: R ring ranks, B batch, C tokens of a run, h query heads, n kv heads, d head dim. Ring rank r holds runs r and
2R-1-r of a sequence of 2R*C tokens (`zigzag`). q, out and their gradients are [B, 2C, h, d], k, v and theirs
[B, 2C, n, d], lse [B, h, 2C]: all of the rank's own tokens; out and lse are of attention over the whole sequence.

A rank's own keys are one causal call: its first run is before its second. Of another rank's keys, those of an earlier
rank's first run are seen by all of its queries, and both of a later rank's runs by its second run: one call without a
mask, of the same work for every pair. In a packed row the one document that reaches across is seen.

What travels, in step t = 1 ... R-1: k and v of rank r go to rank r+t, just the run or runs that are seen there, and the dk
and dv made there come straight back. Against passing them on from neighbour to neighbour this sends three quarters of
the bytes of k and v, three eighths of those of fp32 dk and dv, and no fp32 gradient lies in a buffer to be sent; it asks
that any two ring ranks reach each other, as over NVLink or a switch. q does not travel: with out and lse it is never
narrower than k and v, and in a backward it would be followed by an fp32 dq.

Forward: own keys, then steps 1 to R-1; each step's keys arrive under the call before. Backward: steps, then own keys, so
that dq may be written over out and k and v arrive in the places of dk and dv; the first step's keys are waited for, what
comes after them travels under a call. Sums are taken in fp32 (fp64 for fp64); with R = 2, where each has two terms as the
kernel left them, without a buffer for it. Messages are batches of isend and irecv, which the current stream waits for.

Sources: ring attention arXiv 2310.01889; zigzag order see `zigzag`; merging by log-sum-exp as in FlashAttention-2, arXiv
2307.08691 section 3.1; a backward of part of the keys from out and lse of all is exact, section 3.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from upipe import zigzag
from upipe.kernels import (
    Case,
    CudnnAttention,
    FlashAttention4,
    Kernel,
    Offsets,
    ReferenceAttention,
    TorchFlashAttention,
)

MERGE_TILE = 2**24
"""Elements of two results that are merged at a time, so that fp32 copies stay small."""


class FullFlashAttention4(FlashAttention4):
    """Without a causal mask, as the other classes named Full: every query sees every key, whose numbers may differ."""

    @staticmethod
    def _options(scale, mask, device) -> dict:
        return FlashAttention4._options(scale, mask, device) | {"causal": False}


class FullCudnnAttention(CudnnAttention):
    """See `CudnnAttention` for what is split and why."""

    causal = False

    def _forward(self, q, k, v, scale, mask, out):
        if 1 in (q.shape[1], k.shape[1]):
            return FullReferenceAttention()._forward(q, k, v, scale, mask, out)
        return super()._forward(q, k, v, scale, mask, out)

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        if 1 in (q.shape[1], k.shape[1]):
            return FullReferenceAttention()._backward(grad, q, k, v, out, lse, scale, mask, dq, dk, dv)
        if k.numel() <= self.most:
            return super()._backward(grad, q, k, v, out, lse, scale, mask, dq, dk, dv)
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        if kv_heads == 1:
            raise ValueError(
                f"cudnn with {k.shape[1]} keys of head dim {k.shape[3]} in {k.shape[0]} rows: its backward is right up to "
                f"{self.most} elements a head at least, here are {k.numel()}; use fa4"
            )
        grads = [torch.empty_like(like) if buffer is None else buffer for buffer, like in zip((dq, dk, dv), (q, k, v))]
        for kv in range(kv_heads):
            part, own = slice(kv * group, (kv + 1) * group), slice(kv, kv + 1)
            got = self._backward(
                grad[:, :, part], q[:, :, part], k[:, :, own], v[:, :, own], out[:, :, part], lse[:, part], scale, mask,
                None, None, None,
            )
            for target, heads, result in zip(grads, (part, own, own), got):
                target[:, :, heads] = result
        return tuple(grads)


class FullTorchFlashAttention(TorchFlashAttention):
    causal = False


class FullReferenceAttention(ReferenceAttention):
    def _chunks(self, q, k, scale, window, softcap):
        grouped, wide = q.unflatten(2, (k.shape[2], -1)), torch.float64 if q.dtype == torch.float64 else torch.float32
        for start in range(0, q.shape[1], self.chunk):
            part = slice(start, min(start + self.chunk, q.shape[1]))
            scores = torch.einsum("bcngd,btnd->bngct", grouped[:, part].to(wide), k.to(wide)) * scale
            slope = None
            if softcap is not None:
                bent = torch.tanh(scores / softcap)
                scores, slope = softcap * bent, 1 - bent.square()
            yield part, slice(0, k.shape[1]), scores, slope


FULL: dict[type[Kernel], type[Kernel]] = {
    FlashAttention4: FullFlashAttention4,
    CudnnAttention: FullCudnnAttention,
    TorchFlashAttention: FullTorchFlashAttention,
    ReferenceAttention: FullReferenceAttention,
}
"""The class of a kernel's calls without a causal mask."""


def full_of(kernel: Kernel) -> Kernel:
    """The kernel without a causal mask: forward and backward as of `Kernel`, where k and v may have another number of tokens
    than q; neither `offsets` nor `window`.

    Raises:
        ValueError: there is none, naming the kernels that have one.
    """
    if hasattr(kernel, "without_mask"):
        return kernel.without_mask()
    if type(kernel) not in FULL:
        raise ValueError(f"kernel {kernel} is not served on a ring or in blocks, which need calls without a causal mask: use {_served()}")
    return FULL[type(kernel)]()


def _served() -> str:
    return ", ".join(kernel.name for kernel in FULL)


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add the attention of the same queries to other keys, in place.

    Args:
        out, part: [B, S, h, d]; the sum is taken in lse's dtype and rounded to out's.
        lse, part_lse: [B, h, S], fp32 (fp64 for fp64 inputs).
    """
    size = max(1, MERGE_TILE // out[:, 0].numel())
    for start in range(0, out.shape[1], size):
        rows = slice(start, start + size)
        both = torch.logaddexp(lse[:, :, rows], part_lse[:, :, rows])
        kept, added = ((share[:, :, rows] - both).exp_().transpose(1, 2)[..., None] for share in (lse, part_lse))
        target = out[:, rows]
        if target.dtype == lse.dtype:
            target.mul_(kept).addcmul_(part[:, rows], added)
        else:
            target.copy_(target.to(lse.dtype).mul_(kept).addcmul_(part[:, rows], added))
        lse[:, :, rows] = both


class Messages:
    """Tensors on their way. Both sides must be left alone until `arrive`."""

    def __init__(self, works: list, sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        self.works, self.sent, self.received = works, sent, received

    def arrive(self) -> list[torch.Tensor]:
        """-> what was received. On a GPU the current stream waits, not the caller."""
        for work in self.works:
            work.wait()
        received, self.works, self.sent, self.received = self.received, [], [], []
        return received


class Ring:
    """The ranks of a ring and their messages.

    Args:
        group: process group of the ring, in ring order; of its own, so that no message waits for another group's.
    """

    def __init__(self, group) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, target: int, send: list[torch.Tensor], source: int, receive: list[torch.Tensor]) -> Messages:
        """Begin to send contiguous tensors to one ring rank and to receive as many from one. Every rank of the ring must call
        it, as a backend may set up the group with its first message."""
        target, source = (dist.get_global_rank(self.group, rank) for rank in (target, source))
        batch = [dist.P2POp(dist.isend, tensor, target, self.group, tag) for tag, tensor in enumerate(send)]
        batch += [dist.P2POp(dist.irecv, tensor, source, self.group, tag) for tag, tensor in enumerate(receive)]
        return Messages(dist.batch_isend_irecv(batch), send, receive)


class _Sum:
    """A sum of terms that each cover some batch rows and tokens of a tensor [B, 2C, heads, d]. One term alone is kept as it
    came; from the second on the sum is in fp32."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.only: tuple[slice, slice, torch.Tensor] | None = None
        self.total: torch.Tensor | None = None

    def add(self, rows: slice, tokens: slice, term: torch.Tensor) -> None:
        if self.total is None and self.only is None:
            self.only = rows, tokens, term
            return
        if self.total is None:
            self.total = torch.zeros(self.like.shape, dtype=_wide(self.like), device=self.like.device)
            self.total[self.only[0], self.only[1]] = self.only[2]
            self.only = None
        self.total[rows, tokens] += term

    def add_to(self, target: torch.Tensor) -> None:
        if self.only is not None:
            rows, tokens, term = self.only
            target[rows, tokens] += term
        elif self.total is not None:
            target += self.total


@dataclass(frozen=True)
class _Plan:
    """What is seen. home: document boundaries of the own two runs, None for one document a row. visible: for each step from 1
    on the rectangles (batch rows, queries, keys) of the rank whose keys come then."""

    run: int
    home: Offsets | None
    visible: tuple[tuple[tuple[slice, slice, slice], ...], ...]


class RingAttention(Kernel):
    """A kernel over a ring: takes a rank's two runs, answers with attention of the whole sequence.

    `offsets` are boundaries in the whole sequence, (0, s1, ..., 2R*C), the same on every rank of the ring; every rank must
    make the same calls in the same order. Attributes as of the kernel it wraps. Beside what that kernel holds and its
    arguments, dq, dk and dv among them, a backward with R = 2 holds at most (3n + h) * 2C * B * d elements (a step's dk and dv
    on both ways, and dq); with R > 2 also fp32 sums of dq, dk and dv and one more step's k and v.

    Args:
        kernel: runs each call.
        group: process group of the ring, in ring order, at least two ranks; or a `Ring`.
        full: the kernel without a causal mask; None: that of `full_of`.

    Raises:
        ValueError: a ring of one rank (`on_ring` then gives the kernel itself); a kernel that is not served.
    """

    def __init__(self, kernel: Kernel, group, full: Kernel | None = None) -> None:
        self.kernel, self.full = kernel, full_of(kernel) if full is None else full
        self.ring = group if isinstance(group, Ring) else Ring(group)
        if self.ring.size < 2:
            raise ValueError(f"a ring of {self.ring.size} rank: it needs at least 2; on one the kernel itself does, see on_ring")
        self.name, self.untested, self.deterministic = kernel.name, kernel.untested, kernel.deterministic
        self.writes_gradients, self.dq_over_out = kernel.writes_gradients, kernel.dq_over_out
        self._last: tuple[tuple, _Plan] | None = None

    def __str__(self) -> str:
        return f"{self.kernel} on a ring of {self.ring.size}"

    def declines(self, case: Case) -> str | None:
        if case.window:
            return f"a sliding window on a ring of {self.ring.size} is not served: use a ring of 1"
        return self.kernel.declines(case)

    def forward(self, q, k, v, scale, offsets=None, window=None, softcap=None, out=None):
        """See `Kernel.forward`.

        Raises:
            ValueError: a window; an odd number of tokens; offsets of another batch or length.
        """
        plan = self._plan(q, offsets, window)
        outgoing = [_packed(t) for t in (k, v)]
        arriving = self._send_kv(outgoing, plan, 1)
        out, lse = self.kernel.forward(q, k, v, scale, plan.home, None, softcap, out=out)
        # With one visitor no query's result is merged twice, nor rounded on the way.
        total = out if self.ring.size == 2 else out.to(lse.dtype)
        for step in range(1, self.ring.size):
            came = arriving.arrive()
            if step + 1 < self.ring.size:
                arriving = self._send_kv(outgoing, plan, step + 1)
            for rows, queries, keys in plan.visible[step - 1]:
                part, part_lse = self.full.forward(q[rows, queries], *_rows(came, rows, keys), scale, softcap=softcap)
                merge_(total[rows, queries], lse[rows, :, queries], part, part_lse)
        return (out if total is out else out.copy_(total)), lse

    def backward(
        self, grad, q, k, v, out, lse, scale, offsets=None, window=None, softcap=None, dq=None, dk=None, dv=None
    ):
        """See `Kernel.backward`; raises as `forward` does."""
        plan = self._plan(q, offsets, window)
        outgoing = [_packed(t) for t in (k, v)]
        # Until the last call nothing else is in dk and dv.
        landing = [t.transpose(0, 1) for t in (dk, dv) if t is not None and t.transpose(0, 1).is_contiguous()]
        landing = landing if len(landing) == 2 else None
        sums = [_Sum(t) for t in (q, k, v)]
        arriving, returning = self._send_kv(outgoing, plan, 1, landing), None
        for step in range(1, self.ring.size):
            came = arriving.arrive()
            if step + 1 < self.ring.size:
                arriving = self._send_kv(outgoing, plan, step + 1, landing if step % 2 == 0 else None)
            shares = self._step_backward(grad, q, came, out, lse, scale, softcap, plan.visible[step - 1], sums[0])
            if returning is not None:
                self._collect(returning, sums)
            returning = self._send_shares(shares, plan, step)
        came = shares = outgoing = landing = None
        grads = self.kernel.backward(grad, q, k, v, out, lse, scale, plan.home, None, softcap, dq=dq, dk=dk, dv=dv)
        self._collect(returning, sums)
        for total, result in zip(sums, grads):
            total.add_to(result)
        return grads

    def _step_backward(self, grad, q, came, out, lse, scale, softcap, rectangles, dq_sum: _Sum) -> list[torch.Tensor]:
        """dk and dv of what came, [rows, B, n, d]; dq is added."""
        everything = [(slice(0, q.shape[0]), slice(0, len(came[0])))]
        whole = [(rows, keys) for rows, _, keys in rectangles] == everything
        if whole and not self.full.writes_gradients:
            shares = None
        else:
            shares = [torch.empty_like(t) if whole else torch.zeros_like(t) for t in came]
        for rows, queries, keys in rectangles:
            mine = rows, queries
            buffers = (None, None, None)
            if shares is not None:
                buffers = (torch.empty_like(q[mine]), *_rows(shares, rows, keys))
            dq, *got = self.full.backward(
                grad[mine], q[mine], *_rows(came, rows, keys), out[mine], lse[rows, :, queries], scale, softcap=softcap,
                **dict(zip(("dq", "dk", "dv"), buffers)),
            )
            dq_sum.add(rows, queries, dq)
        return shares if shares is not None else [_packed(t) for t in got]

    def _send_kv(self, outgoing, plan: _Plan, step: int, landing=None) -> Messages:
        """Begin step's exchange of k and v, [rows, B, n, d]."""
        ring = self.ring
        target, source = (ring.rank + step) % ring.size, (ring.rank - step) % ring.size
        send = zigzag.sent_rows(plan.run, ring.rank, target)
        rows = zigzag.sent_rows(plan.run, source, ring.rank)
        receive = [t.new_empty(rows, *t.shape[1:]) for t in outgoing] if landing is None else [t[:rows] for t in landing]
        return ring.exchange(target, [t[:send] for t in outgoing], source, receive)

    def _send_shares(self, shares, plan: _Plan, step: int) -> Messages:
        """Begin to send the dk and dv of a step home, and to receive those of this rank's keys."""
        ring = self.ring
        target, source = (ring.rank - step) % ring.size, (ring.rank + step) % ring.size
        rows = zigzag.sent_rows(plan.run, ring.rank, source)
        return ring.exchange(target, shares, source, [t.new_empty(rows, *t.shape[1:]) for t in shares])

    @staticmethod
    def _collect(returning: Messages, sums: list[_Sum]) -> None:
        for total, share in zip(sums[1:], returning.arrive()):
            total.add(slice(0, share.shape[1]), slice(0, share.shape[0]), share.transpose(0, 1))

    def _plan(self, q: torch.Tensor, offsets: Offsets | None, window: int | None) -> _Plan:
        B, tokens = q.shape[:2]
        size, rank = self.ring.size, self.ring.rank
        if window is not None:
            raise ValueError(f"kernel {self} was given window={window}: it serves none; use a ring of 1")
        if tokens % 2:
            raise ValueError(f"kernel {self} was given {tokens} tokens a rank: two equal runs are an even number")
        if offsets is not None and (len(offsets) != B or any(starts[-1] != size * tokens for starts in offsets)):
            ends = sorted({starts[-1] for starts in offsets})
            raise ValueError(
                f"kernel {self} was given offsets of {len(offsets)} rows that end at {ends}: "
                f"there are {B} rows, and the whole sequence has {size} x {tokens} = {size * tokens} tokens"
            )
        key = B, tokens, offsets
        if self._last is None or self._last[0] != key:
            self._last = key, _plan_of(B, tokens // 2, size, rank, offsets)
        return self._last[1]


def _plan_of(B: int, run: int, size: int, rank: int, offsets: Offsets | None) -> _Plan:
    starts = [(0, 2 * size * run)] * B if offsets is None else offsets
    home = tuple(zigzag.home(row, run, size, rank) for row in starts)
    visible = []
    for step in range(1, size):
        seen = [zigzag.visible(row, run, size, rank, (rank - step) % size) for row in starts]
        alike = all(part == seen[0] for part in seen)
        groups = [(slice(0, B), seen[0])] if alike else [(slice(row, row + 1), part) for row, part in enumerate(seen)]
        visible.append(tuple((rows, *part) for rows, part in groups if part is not None))
    return _Plan(run, None if all(bounds == (0, 2 * run) for bounds in home) else home, tuple(visible))


def on_ring(kernel: Kernel, group) -> Kernel:
    """The kernel over a ring: itself where the group is None or has one rank, `RingAttention` otherwise."""
    return kernel if group is None or dist.get_world_size(group) == 1 else RingAttention(kernel, group)


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _packed(t: torch.Tensor) -> torch.Tensor:
    """[B, S, n, d] -> contiguous [S, B, n, d]: no copy of all heads of a stage buffer, nor of one row."""
    return t.transpose(0, 1).contiguous()


def _rows(tensors: list[torch.Tensor], rows: slice, tokens: slice) -> list[torch.Tensor]:
    """Parts [B, tokens, n, d] of tensors [S, B, n, d]."""
    return [t.transpose(0, 1)[rows, tokens] for t in tensors]
