"""Attention over a group of ranks as one autograd function: Ulysses inside, a ring across, or either, or neither.

Shapes: L local tokens, S those of a Ulysses group (P*L), B batch, H query heads, K kv heads, h and n those of one rank, d head
dim. An all-to-all gives a rank all S tokens of h heads; there the kernel, on a ring of several such ranks a
`ring.RingAttention`, answers with attention over the whole sequence; a second one brings the result back. With fewer kv heads
than ranks, or a kv group that ranks cut, kv heads go to several ranks and their gradients are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from upipe.heads import to_heads, to_tokens
from upipe.kernels import Kernel, Offsets
from upipe.schedule import HeadSchedule, RankStage


@dataclass(frozen=True)
class Heads:
    """Which heads each of P Ulysses ranks has.

    Args:
        shares: of each rank, all its heads in one stage.
        rank, group: this rank's place and the process group; None where P = 1.
    """

    shares: tuple[RankStage, ...]
    rank: int
    group: object | None

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int, rank: int, group) -> Heads:
        """Any numbers of heads. Raises ValueError where heads is no multiple of kv_heads."""
        return cls(HeadSchedule(heads, kv_heads, ranks, -(-heads // ranks) * ranks).table[0], rank, group if ranks > 1 else None)

    @property
    def mine(self) -> RankStage:
        return self.shares[self.rank]

    def calls(self) -> list[tuple[slice, slice]]:
        """For each kernel call of this rank its query and its kv heads, as slices of those that it has."""
        q, kv = self.mine.q_heads, self.mine.kv_arriving
        return [
            (slice(c.q_first - q.start, c.q_first - q.start + c.q_count), slice(c.kv_first - kv.start, c.kv_first - kv.start + c.kv_count))
            for c in self.mine.calls
        ]

    def gather(self, t: torch.Tensor, kv: bool = False) -> torch.Tensor:
        """[B, L, H or K, d] of every rank -> [B, S, h or n, d]."""
        if self.group is None:
            return t
        ranges = [share.kv_arriving if kv else share.q_heads for share in self.shares]
        return to_heads(t.transpose(0, 1), ranges, self.rank, self.group).transpose(0, 1)

    def scatter(self, t: torch.Tensor, kv_heads: int | None = None) -> torch.Tensor:
        """[B, S, h, d] of every rank -> [B, L, H, d]; with kv_heads, K, [B, S, n, d] -> [B, L, K, d], replicas summed."""
        if self.group is None:
            return t
        ranges = [share.q_heads if kv_heads is None else share.kv_arriving for share in self.shares]
        got = to_tokens(t.transpose(0, 1), [len(r) for r in ranges], self.group).transpose(0, 1)
        order = [head for r in ranges for head in r]
        if kv_heads is None or len(order) == kv_heads:
            return got
        wide = torch.float64 if got.dtype == torch.float64 else torch.float32
        total = got.new_zeros(*got.shape[:2], kv_heads, got.shape[3], dtype=wide)
        total.index_add_(2, torch.tensor(order, device=got.device), got.to(wide))
        return total.to(got.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, heads: Heads, kernel: Kernel, scale, offsets, window, softcap):
        q, k, v = heads.gather(q), heads.gather(k, kv=True), heads.gather(v, kv=True)
        out = torch.empty(q.shape[1], q.shape[0], *q.shape[2:], dtype=q.dtype, device=q.device).transpose(0, 1)
        sums = []
        for a, b in heads.calls():
            _, lse = kernel.forward(q[:, :, a], k[:, :, b], v[:, :, b], scale, offsets, window, softcap, out=out[:, :, a])
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.heads, ctx.kernel, ctx.scale, ctx.masks = heads, kernel, scale, (offsets, window, softcap)
        return heads.scatter(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, *sums = ctx.saved_tensors
        heads: Heads = ctx.heads
        grad = heads.gather(grad)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for (a, b), lse in zip(heads.calls(), sums):
            ctx.kernel.backward(
                grad[:, :, a],
                q[:, :, a],
                k[:, :, b],
                v[:, :, b],
                out[:, :, a],
                lse,
                ctx.scale,
                *ctx.masks,
                dq=dq[:, :, a],
                dk=dk[:, :, b],
                dv=dv[:, :, b],
            )
        kv_heads = 1 + max(head for share in heads.shares for head in share.kv_arriving)
        return heads.scatter(dq), heads.scatter(dk, kv_heads), heads.scatter(dv, kv_heads), *(None,) * 6


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    kernel: Kernel,
    scale: float,
    offsets: Offsets | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's tokens over the whole sequence; saves the gathered q, k, v, output and log-sum-exp.

    Args:
        q, k, v: [B, L, H, d] and [B, L, K, d], rotated.
        kernel: takes [B, S, h, d]; on a ring `ring.on_ring` of one.
        scale, offsets, window, softcap: see `upipe.kernels`; offsets are those of the whole sequence.

    Returns:
        [B, L, H, d].
    """
    return _Attention.apply(q, k, v, heads, kernel, scale, offsets, window, softcap)


def local_attention(q, k, v, kernel: Kernel, scale: float, offsets=None, window=None, softcap=None) -> torch.Tensor:
    """`attention` of one rank: q [B, S, h, d], k and v [B, S, n, d] -> [B, S, h, d]."""
    heads = Heads.of(q.shape[2], k.shape[2], 1, 0, None)
    return attention(q, k, v, heads, kernel, scale, offsets, window, softcap)
