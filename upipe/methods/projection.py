"""From hidden states to rotated q, k and v, the same under every baseline.

Shapes: B batch, L tokens, D hidden, H query heads, K kv heads, d head dim, R rotated dims. The rotation is the attention block's
(`rotary.finish_heads`), with its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from upipe import models
from upipe.rotary import finish_heads, unfinish_heads


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        finish_heads(x.flatten(0, 1), *_rows(x, cos, sin), out=out.flatten(0, 1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        unfinish_heads(grad.flatten(0, 1), *_rows(grad, *ctx.saved_tensors), out=out.flatten(0, 1))
        return out, None, None


def _rows(x, cos, sin):
    return (t.expand(x.shape[0], *t.shape[1:]).reshape(-1, 1, t.shape[-1]) for t in (cos, sin))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, L, h, d]; cos, sin [B or 1, L, R] -> a new tensor like x."""
    return _Rotate.apply(x, cos, sin)


def by_modules(module: nn.Module, architecture: models.Architecture, hidden: torch.Tensor, cos, sin) -> list[torch.Tensor]:
    """q [B, L, H, d], k, v [B, L, K, d] by calling the attention module's own projections and norms."""
    if architecture.fused:
        H, K = architecture.heads(module)
        q, k, v = module.qkv_proj(hidden).split([n * module.head_dim for n in (H, K, K)], dim=-1)
    else:
        q, k, v = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
    if architecture.norm_width == "full":
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (t.unflatten(-1, (-1, module.head_dim)) for t in (q, k, v))
    if architecture.norm_width == "head":
        q, k = module.q_norm(q), module.k_norm(k)
    return [rotate(q, cos, sin), rotate(k, cos, sin), v]


def weights_of(module: nn.Module, architecture: models.Architecture) -> dict[str, torch.Tensor]:
    """What `by_weights` takes, by names of `block.Projections`. Under ZeRO-3 call it inside the module's forward."""
    if architecture.fused:
        return {"wqkv": module.qkv_proj.weight}
    found = {}
    for letter, part in (("q", module.q_proj), ("k", module.k_proj), ("v", module.v_proj)):
        found[f"w{letter}"] = part.weight
        if part.bias is not None:
            found[f"b{letter}"] = part.bias
    if architecture.norm_width is not None:
        found |= {"q_norm": module.q_norm.weight, "k_norm": module.k_norm.weight}
    return found


@dataclass(frozen=True)
class ByWeights:
    """`by_modules` from weights alone, for a function that returns their gradients itself. Fields as of `block.BlockSpec`."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_width: str | None
    norm_eps: float
    norm_offset: float

    @classmethod
    def of(cls, module: nn.Module, architecture: models.Architecture) -> ByWeights:
        norms = architecture.norm_width, architecture.norm_eps(module), architecture.norm_offset
        return cls(*architecture.heads(module), module.head_dim, *norms)

    def __call__(self, hidden: torch.Tensor, weights: dict[str, torch.Tensor], cos, sin) -> list[torch.Tensor]:
        linear = nn.functional.linear
        if "wqkv" in weights:
            widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
            q, k, v = linear(hidden, weights["wqkv"]).split(widths, dim=-1)
        else:
            q, k, v = (linear(hidden, weights[f"w{letter}"], weights.get(f"b{letter}")) for letter in "qkv")
        if self.norm_width == "full":
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.norm_width == "head":
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        return [rotate(q, cos, sin), rotate(k, cos, sin), v]

    def _norm(self, x, weight):
        wide = x if x.dtype == torch.float64 else x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        return (unit * (weight.to(wide.dtype) + self.norm_offset)).to(x.dtype)
