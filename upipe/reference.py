"""The slow, obvious definitions that every fast path is compared with, forward and backward (through autograd).

Shapes: B batch, S tokens, H query heads, K kv heads, d head dim, D hidden size. Nothing here is distributed.
"""

from __future__ import annotations

import torch


def document_mask(
    tokens: int, offsets: tuple[tuple[int, ...], ...] | None, batch: int, window: int | None = None
) -> torch.Tensor:
    """[B, 1, S, S] bool, true where a query (row) may see a key (column): causal, inside one document.

    offsets: for each batch row the document starts and the end, (0, s1, ..., S); None: one document a row.
    window: a query sees itself and the window - 1 keys before it; None: all before it.
    """
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window is not None:
        causal &= torch.ones(tokens, tokens, dtype=torch.bool).triu(1 - window)
    if offsets is None:
        return causal.expand(batch, 1, tokens, tokens)
    document = torch.zeros(batch, tokens, dtype=torch.long)
    for row, starts in enumerate(offsets):
        for start in starts[1:-1]:
            document[row, start:] += 1
    return (causal & (document[:, :, None] == document[:, None, :]))[:, None]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    offsets: tuple[tuple[int, ...], ...] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention. q: [B, S, H, d], k, v: [B, S, K, d] -> out [B, S, H, d], log-sum-exp [B, H, S].

    softcap c: scores become c*tanh(scores/c).
    """
    B, S, H, _ = q.shape
    g = H // k.shape[2]
    k, v = k.repeat_interleave(g, dim=2), v.repeat_interleave(g, dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~document_mask(S, offsets, B, window).to(scores.device), float("-inf"))
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [B, S, h, d]; cos, sin: [B, S, R], R <= d."""
    R = cos.shape[-1]
    turned, rest = x[..., :R], x[..., R:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
    return torch.cat((turned, rest), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention_block(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    wo: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    scale: float,
    bq: torch.Tensor | None = None,
    bk: torch.Tensor | None = None,
    bv: torch.Tensor | None = None,
    bo: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offsets: tuple[tuple[int, ...], ...] | None = None,
) -> torch.Tensor:
    """Projection, bias, q/k norm, rotation, attention, output projection: x [B, S, D] -> [B, S, D]."""
    linear = torch.nn.functional.linear
    q, k, v = (
        linear(x, w, b).unflatten(-1, (-1, head_dim)) for w, b in ((wq, bq), (wk, bk), (wv, bv))
    )
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    out, _ = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, scale, offsets)
    return linear(out.flatten(2), wo, bo)
