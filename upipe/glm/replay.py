"""A function of rows computed a tile of rows at a time, of which only the inputs are kept: backward computes it again.

Tiles are replayed last to first, the order in which autograd itself would visit them, so that with fp32 parameters the
gradients have the bits of the same tiles differentiated without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import once_differentiable

from upipe.loss import wide_dtype


def check_positive(name: str, value: object) -> None:
    """Raises ValueError where a setting is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def tiles(rows: int, size: int) -> list[slice]:
    """The rows in tiles of `size`, the last one shorter where it does not divide; one empty tile of no rows."""
    return [slice(a, min(a + size, rows)) for a in range(0, max(rows, 1), size)]


def by_rows(
    function: Callable[..., tuple[torch.Tensor, ...]],
    size: int,
    rows: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] = (),
    recompute: bool = True,
) -> tuple[torch.Tensor, ...]:
    """function(*rows, *parameters), in tiles.

    Args:
        function: differentiable, each row of its outputs a function of the same rows of its inputs and of the parameters.
        size: rows a tile.
        rows: [N, ...] each.
        parameters: whole, so that ZeRO-3 may part with them between forward and backward; their gradients are summed over
            tiles in fp32 (fp64) and rounded once.
        recompute: False: autograd keeps what the function makes; the same values and, in fp32, the same gradients.

    Returns:
        A tuple of [N, ...].
    """
    if not recompute:
        parts = [function(*(t[part] for t in rows), *parameters) for part in tiles(rows[0].shape[0], size)]
        return tuple(torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts))
    return _ByRows.apply(function, size, len(rows), *rows, *parameters)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, size, count, *tensors):
        ctx.function, ctx.size, ctx.count = function, size, count
        ctx.save_for_backward(*tensors)
        rows, parameters = tensors[:count], tensors[count:]
        parts = tiles(rows[0].shape[0], size)
        outs: tuple[torch.Tensor, ...] = ()
        for part in parts:
            made = function(*(t[part] for t in rows), *parameters)
            if len(parts) == 1:
                return made
            outs = outs or tuple(t.new_empty(rows[0].shape[0], *t.shape[1:]) for t in made)
            for out, t in zip(outs, made):
                out[part] = t
            del made
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        count, needed = ctx.count, ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        parts = tiles(tensors[0].shape[0], ctx.size)
        sums: list[torch.Tensor | None] = [None] * len(tensors)
        for part in reversed(parts):
            leaves = [t[part] if i < count else t for i, t in enumerate(tensors)]
            leaves = [t.detach().requires_grad_(need) for t, need in zip(leaves, needed)]
            wanted = [i for i, need in enumerate(needed) if need]
            with torch.enable_grad():
                outs = ctx.function(*leaves)
            pairs = [(out, grad[part]) for out, grad in zip(outs, grads) if grad is not None and out.requires_grad]
            del outs
            got = torch.autograd.grad(
                [out for out, _ in pairs], [leaves[i] for i in wanted], [grad for _, grad in pairs], allow_unused=True
            )
            del pairs, leaves
            for i, grad in zip(wanted, got):
                _add(sums, i, grad, tensors[i], part if i < count else None, len(parts))
            del got
        return None, None, None, *rounded(sums, tensors, needed)


def rounded(sums: list[torch.Tensor | None], like: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """Sums in the dtypes of what they are gradients of, in the same list, so that each wide one is free before the next is made;
    None where no gradient is needed."""
    for i, (t, need) in enumerate(zip(like, needed)):
        sums[i] = sums[i].to(t.dtype) if need and sums[i] is not None else None
    return sums


def _add(sums: list, i: int, grad: torch.Tensor | None, like: torch.Tensor, part: slice | None, parts: int) -> None:
    if grad is None:
        return
    if parts == 1:
        sums[i] = grad
    elif part is not None:
        sums[i] = torch.zeros_like(like, memory_format=torch.contiguous_format) if sums[i] is None else sums[i]
        sums[i][part] = grad
    elif sums[i] is None:
        sums[i] = grad.to(wide_dtype(grad.dtype), copy=True)
    else:
        sums[i] += grad
