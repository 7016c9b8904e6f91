"""The short causal convolution of linear attention: depthwise over a few tokens, then SiLU; documents do not mix.

The convolution runs in fp32 (fp64), as transformers' `causal_conv1d_fn` does with the checkpoint's fp32 weight, on a tile of
tokens at a time: the wide copies are a tile's. A tile reads the K-1 tokens before it too, its halo. Tokens must be in the
order of the sequence, so shards are joined first (`kda`): where the shards meet is then a place like any other.

B batch, S tokens, C channels, K taps.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from upipe.glm.replay import tiles
from upipe.kernels import Offsets
from upipe.loss import wide_dtype
from upipe.preflight import PreflightError

CONV_TILE_TOKENS = 8192


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, offsets: Offsets | None = None, tile_tokens: int = CONV_TILE_TOKENS
) -> torch.Tensor:
    """silu(sum_j weight[:, j] * x[t - (K-1-j)]), of tokens of t's own document only.

    Args:
        x: [B, S, C], in the order of the sequence.
        weight: [C, K]; the last tap is the token's own.
        offsets: for each row of the batch (0, s1, ..., S): where its documents begin; None: a row is a document.
        tile_tokens: tokens at a time, at least K-1.

    Returns:
        [B, S, C], x's dtype. Only x and the weight are kept for backward.

    Raises:
        PreflightError: tile_tokens smaller than the halo.
    """
    check_tile(tile_tokens, weight.shape[1])
    return _ShortConvolution.apply(x, weight, ages(offsets, x), tile_tokens)


def check_tile(tile_tokens: int, taps: int) -> None:
    """A tile holds the halo of the next."""
    if tile_tokens < taps - 1:
        raise PreflightError(
            f"tile_tokens={tile_tokens} with {taps} taps: a tile must hold its neighbour's halo, at least {taps - 1} tokens"
        )


def ages(offsets: Offsets | None, x: torch.Tensor) -> torch.Tensor | None:
    """[B, S] how many tokens of its own document are before each token; None without documents."""
    if offsets is None:
        return None
    S = x.shape[1]
    rows = []
    for starts in offsets:
        begins = torch.tensor(starts[:-1], device=x.device)
        first = torch.zeros(S, dtype=torch.long, device=x.device)
        first[begins] = 1
        rows.append(torch.arange(S, device=x.device) - begins[first.cumsum(0) - 1])
    return torch.stack(rows)


def _taps(x: torch.Tensor, weight: torch.Tensor, age: torch.Tensor | None) -> torch.Tensor:
    """The convolution and SiLU of x [B, T, C], as if nothing were before it."""
    K = weight.shape[1]
    out = x * weight[:, K - 1]
    for lag in range(1, min(K, x.shape[1])):
        before = x[:, :-lag] * weight[:, K - 1 - lag]
        if age is not None:
            before = before * (age[:, lag:, None] >= lag)
        out = out + torch.nn.functional.pad(before, (0, 0, lag, 0))
    return silu(out)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, age, tile_tokens):
        ctx.save_for_backward(x, weight, age)
        ctx.tile_tokens, wide = tile_tokens, wide_dtype(x.dtype)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part in tiles(x.shape[1], tile_tokens):
            begin = _halo(part, weight)
            y = _taps(x[:, begin : part.stop].to(wide), weight.to(wide), None if age is None else age[:, begin : part.stop])
            out[:, part] = y[:, part.start - begin :]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, age = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        wide_type = wide_dtype(x.dtype)
        dw = torch.zeros_like(weight, dtype=wide_type)
        carried = None  # the gradient, unrounded, that a tile has for its halo: the last tokens of the tile before
        for part in reversed(tiles(x.shape[1], ctx.tile_tokens)):
            begin = _halo(part, weight)
            wide, w = (t.detach().to(wide_type).requires_grad_() for t in (x[:, begin : part.stop], weight))
            with torch.enable_grad():
                y = _taps(wide, w, None if age is None else age[:, begin : part.stop])[:, part.start - begin :]
            d_wide, d_w = torch.autograd.grad(y, (wide, w), grad[:, part].to(wide_type))
            if carried is not None:
                d_wide[:, d_wide.shape[1] - carried.shape[1] :] += carried
            carried = d_wide[:, : part.start - begin]
            dx[:, part] = d_wide[:, part.start - begin :]
            dw += d_w
        return dx, dw.to(weight.dtype), None, None


def _halo(part: slice, weight: torch.Tensor) -> int:
    """The first token that a tile reads."""
    return max(part.start - (weight.shape[1] - 1), 0)
