"""All-to-alls between tokens and heads: from this rank's tokens of all heads to the whole sequence of its own heads, and back.

Shapes: P ranks, L local tokens, S = P*L, B batch, H heads, d head dim. Heads need not divide evenly: each rank has a range of
them, which may be empty or overlap another's (replicated kv heads).
"""

from __future__ import annotations

import torch

from upipe.comm import all_to_all


class Exchange(torch.autograd.Function):
    """`comm.all_to_all` whose backward is the exchange the other way."""

    @staticmethod
    def forward(ctx, flat, send_sizes, recv_sizes, group):
        ctx.back = (recv_sizes, send_sizes, group)
        return all_to_all(flat, send_sizes, recv_sizes, group).view(-1)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad.contiguous(), *ctx.back), None, None, None


def to_heads(tokens: torch.Tensor, heads: list[range], rank: int, group) -> torch.Tensor:
    """[L, B, H, d] of every rank -> the whole sequence of heads[rank], [S, B, len(heads[rank]), d]."""
    L, B, _, d = tokens.shape
    flat = torch.cat([tokens[:, :, h.start : h.stop].reshape(-1) for h in heads])
    mine = len(heads[rank])
    got = Exchange.apply(flat, [L * B * len(h) * d for h in heads], [L * B * mine * d] * len(heads), group)
    return got.view(len(heads) * L, B, mine, d)


def to_tokens(whole: torch.Tensor, counts: list[int], group) -> torch.Tensor:
    """[S, B, own heads, d] of every rank -> this rank's tokens of all of them, [L, B, sum(counts), d]."""
    S, B, _, d = whole.shape
    L = S // len(counts)
    sizes = [L * B * n * d for n in counts]
    got = Exchange.apply(whole.reshape(-1), [whole.numel() // len(counts)] * len(counts), sizes, group)
    return torch.cat([t.view(L, B, n, d) for t, n in zip(got.split(sizes), counts)], dim=2)
