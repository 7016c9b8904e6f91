"""Manifold-constrained hyper-connections (mHC): n residual streams a token, read and written by each layer through learned weights.

    post, comb, y = collapse(connection, X);  X <- expand(X, F(norm(y)), post, comb)

`collapse` is transformers' `Glm5NextTextHyperConnection`: from the fp32 RMS-normalised flat streams one projection to
(2 + n) n numbers a token; pre = sigmoid + eps, post = 2 sigmoid, comb = softmax made doubly stochastic by Sinkhorn-Knopp
iterations; y = sum_i pre_i X_i. `expand`: stream j becomes post_j y + sum_i comb[i, j] X_i.

Per token that is n*D fp32 numbers for the projection, as many for its norm and again for the products with pre, and
2 iterations' worth of n*n matrices for Sinkhorn. None of it need be kept: streams are alive as the residual anyway.

| recompute | kept between forward and backward for one site, beside X, y and what F keeps |
| --- | --- |
| none | everything above |
| selective | post and comb; the rest is computed again from X in backward, a tile of tokens at a time |
| full | nothing: the layer is checkpointed (`upipe.offload`), and X, the layer's input, may go to the host |

All three give the same bits in fp32. B batch, L tokens, n streams, D hidden. Source: arXiv 2512.24880.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from upipe.glm.replay import by_rows
from upipe.loss import wide_dtype

if TYPE_CHECKING:
    from upipe.glm.sparse import GlmRuntime

Recompute = Literal["none", "selective"]

HYPER_TILE_TOKENS = 2048
"""Tokens a tile: at 4 streams of 4096 the fp32 copies of a tile are 128 MiB each."""


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[..., n, n] logits -> positive matrices whose columns sum to 1, and rows nearly: softmax over rows, then columns and rows
    normalised in turn, columns first and last; eps is added to the softmax and to every divisor."""
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(
    connection: nn.Module, streams: torch.Tensor, recompute: Recompute = "selective", tile_tokens: int = HYPER_TILE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a site reads, and how it will write.

    Args:
        connection: transformers' `Glm5NextTextHyperConnection`, whose parameters are used and whose forward is not.
        streams: [B, L, n, D].
        recompute: "selective", or "none" to keep intermediate results for backward.
        tile_tokens: tokens at a time.

    Returns:
        post [B, L, n] and comb [B, L, n, n], fp32 (fp64); y [B, L, D] in the streams' dtype.
    """
    if recompute not in ("none", "selective"):
        raise ValueError(f"recompute={recompute!r}: use none or selective here; full is the layer's checkpointing (upipe.offload)")
    n, eps, iterations = connection.hc_mult, connection.hc_eps, connection.hc_sinkhorn_iters
    norm_eps = connection.input_norm.eps

    def site(X, fn, base, scale):
        wide = wide_dtype(X.dtype)
        flat = X.flatten(1).to(wide)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        pre_w, post_w, comb_w = linear(flat, fn.to(wide)).split((n, n, n * n), -1)
        pre_b, post_b, comb_b = base.split((n, n, n * n))
        pre = torch.sigmoid(pre_w * scale[0] + pre_b) + eps
        post = 2 * torch.sigmoid(post_w * scale[1] + post_b)
        comb = sinkhorn((comb_w * scale[2] + comb_b).unflatten(-1, (n, n)), iterations, eps)
        return post, comb, (pre[..., None] * X).sum(1).to(X.dtype)

    parameters = connection.fn, connection.base, connection.scale
    post, comb, y = by_rows(site, tile_tokens, (streams.flatten(0, 1),), parameters, recompute == "selective")
    return tuple(t.unflatten(0, streams.shape[:2]) for t in (post, comb, y))


def expand(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a site: post (x) y + comb^T streams, in the streams' dtype.

    Args:
        streams: [B, L, n, D] before it. y: [B, L, D], what the layer made. post, comb: as `collapse` returned them.

    Returns:
        [B, L, n, D].
    """
    dtype = streams.dtype
    return post.to(dtype)[..., None] * y[..., None, :] + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)


class HyperConnection(Glm5NextTextHyperConnection):
    """`Glm5NextTextHyperConnection` that keeps only its streams; its parameters, under its names. `runtime` is set where a model's
    modules are replaced."""

    runtime: GlmRuntime

    def forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`collapse`."""
        return collapse(self, hidden_streams, self.runtime.settings.hyper_recompute, self.runtime.settings.hyper_tile_tokens)

    def expand(self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """`expand`."""
        return expand(streams, y, post, comb)
