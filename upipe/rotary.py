"""Rotary position embedding and per-head RMS norm on rows of heads, with their backward. Plain torch.

Shapes: N rows (local tokens x batch), h heads, d head dim, R <= d rotated dims (R < d: a partial rotation, as with
`partial_rotary_factor`; the rest passes through). cos, sin: [N, 1, R] of the rows' own positions, any float dtype.
Arithmetic is fp32 (fp64 for fp64 inputs); results have the input's dtype.
"""

from __future__ import annotations

import torch


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate dims (i, i + R/2) of every head by the row's angle i, as Llama, Qwen2 and Qwen3 do.

    Args:
        x: [N, h, d].
        cos, sin: [N, 1, R]; scaled rotations (YaRN) carry their factor in both.
        inverse: apply the transpose, which is the backward pass (and the inverse where cos^2 + sin^2 = 1).

    Returns:
        [N, h, d], a new tensor.
    """
    half = cos.shape[-1] // 2
    cos, sin, w = _wide(cos), _wide(sin), _wide(x)
    a, b = w[..., :half], w[..., half : 2 * half]
    ca, cb, sa, sb = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    if inverse:
        first, second = a * ca + b * sb, b * cb - a * sa
    else:
        first, second = a * ca - b * sa, b * cb + a * sb
    return torch.cat((first, second, w[..., 2 * half :]), dim=-1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim. x: [N, h, d], weight: [d]."""
    w = _wide(x)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps) * _wide(weight)).to(x.dtype)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm`: for x, [N, h, d] in x's dtype, and for the weight, [d] in fp32 (fp64)."""
    w, g = _wide(x), _wide(grad)
    inv = torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    unit = w * inv
    scaled = g * _wide(weight)
    grad_x = inv * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (g * unit).flatten(0, -2).sum(0)
