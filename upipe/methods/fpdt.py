"""Attention in chunks of the sequence with the rest on the host, the method of FPDT (Ulysses-Offload, arXiv 2408.16978).

This library's form, not DeepSpeed's layers (`deepspeed.sequence.fpdt_layer` of 0.19.8): those need flash-attn 2's private
functions, a bias on one joint projection, a length that chunks divide, one document a row, and a GPU for their offload.

Shapes: P ranks, B batch, D hidden, n chunks of C tokens of the sequence, c = C/P those of a rank (`layouts.Chunked`), H, K heads of
all ranks, h, m (kv) of one, d head dim.

A chunk's q, k and v are projected, rotated, and given to the ranks by heads. Its queries see its own keys in one causal call and
those of each earlier chunk, fetched from the host while the kernel works, in one call without a mask; results merge by
log-sum-exp in fp32. q, k, v, result and log-sum-exp of each chunk go to the host. Backward: for each chunk of keys all chunks of
queries from it on; dk and dv are summed on the device, dq of each chunk on the host, in fp32; after its last, q, k and v of the
chunk are projected again for the gradients of input and weights. On the device are a few chunks, and [B, L, ...] only as input and
result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from upipe.kernels import Kernel, Offsets
from upipe.methods.core import Heads
from upipe.methods.layouts import chunk_home, chunk_visible
from upipe.methods.projection import ByWeights
from upipe.methods.shelf import Kept, Shelf, Streams, ahead
from upipe.ring import merge_


@dataclass(frozen=True)
class Call:
    """One attention. chunks: n. full: the kernel without a causal mask. offsets: of the whole sequence. names: of the weights."""

    chunks: int
    project: ByWeights
    heads: Heads
    kernel: Kernel
    full: Kernel
    scale: float
    offsets: Offsets | None
    softcap: float | None
    streams: Streams
    names: tuple[str, ...]

    def home(self, size: int, chunk: int) -> Offsets | None:
        """Document boundaries inside a chunk."""
        if self.offsets is None:
            return None
        found = tuple(chunk_home(row, size, chunk) for row in self.offsets)
        return None if all(row == (0, size) for row in found) else found

    def visible(self, batch: int, size: int, chunk: int, earlier: int) -> list[tuple[slice, slice, slice]]:
        """What a chunk sees of an earlier one: batch rows, queries, keys."""
        if self.offsets is None:
            return [(slice(0, batch), slice(0, size), slice(0, size))]
        seen = [chunk_visible(row, size, chunk, earlier) for row in self.offsets]
        if all(part == seen[0] for part in seen):
            return [] if seen[0] is None else [(slice(0, batch), *seen[0])]
        return [(slice(row, row + 1), *part) for row, part in enumerate(seen) if part is not None]


@dataclass
class _Chunk:
    """What of a chunk is on the host."""

    k: Kept
    v: Kept
    q: Kept | None = None
    out: Kept | None = None
    lse: Kept | None = None
    grad: Kept | None = None
    dq: Kept | None = None


class _Fpdt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, enabled: bool, hidden, cos, sin, *weights):
        needed = enabled and any(ctx.needs_input_grad)
        B, L, _ = hidden.shape
        own = L // call.chunks
        shelf, kept = Shelf(hidden.device, call.streams), []
        result = hidden.new_empty(B, L, call.project.heads, call.project.head_dim)
        for i in range(call.chunks):
            part = slice(i * own, (i + 1) * own)
            q, k, v = _project(call, hidden, weights, cos, sin, part)
            q, k, v = call.heads.gather(q), call.heads.gather(k, kv=True), call.heads.gather(v, kv=True)
            kept.append(_Chunk(shelf.keep(k), shelf.keep(v)))
            out, lse = _forward(call, shelf, kept, i, q, k, v)
            if needed:
                kept[i].q, kept[i].out, kept[i].lse = shelf.keep(q), shelf.keep(out), shelf.keep(lse)
            result[:, part] = call.heads.scatter(out)
        if not needed:
            shelf.close()
            return result
        ctx.save_for_backward(hidden, cos, sin, *weights)
        ctx.call, ctx.shelf, ctx.kept = call, shelf, kept
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        call, shelf, kept = ctx.call, ctx.shelf, ctx.kept
        if kept is None:
            raise RuntimeError("method=fpdt keeps its chunks once: compute it again for a second backward (no retain_graph)")
        ctx.kept = ctx.shelf = None
        hidden, cos, sin, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2], *ctx.needs_input_grad[5:]
        own = hidden.shape[1] // call.chunks
        dx = torch.empty_like(hidden) if wanted[0] else None
        sums: list[torch.Tensor | None] = [None] * len(weights)
        for j in range(call.chunks):
            grads = _backward(call, shelf, kept, j, grad)
            part = slice(j * own, (j + 1) * own)
            with torch.enable_grad():
                x = hidden[:, part].detach().requires_grad_(wanted[0])
                leaves = [w.detach().requires_grad_(need) for w, need in zip(weights, wanted[1:])]
                outputs = _project(call, x, leaves, cos[:, part], sin[:, part])
            inputs = [t for t, need in zip((x, *leaves), wanted) if need]
            got = iter(torch.autograd.grad(outputs, inputs, grads))
            if wanted[0]:
                dx[:, part] = next(got)
            for i, need in enumerate(wanted[1:]):
                if need:
                    share = next(got)
                    sums[i] = share.to(_wide(share)) if sums[i] is None else sums[i].add_(share)
        shelf.close()
        return None, None, dx, None, None, *(None if s is None else s.to(w.dtype) for s, w in zip(sums, weights))


def _project(call: Call, hidden, weights, cos, sin, part: slice = slice(None)) -> list[torch.Tensor]:
    return call.project(hidden[:, part], dict(zip(call.names, weights)), cos[:, part], sin[:, part])


def _forward(call: Call, shelf: Shelf, kept: list[_Chunk], i: int, q, k, v):
    """Attention of a chunk's queries: out [B, C, h, d], lse [B, h, C]."""
    B, C = q.shape[:2]
    out, lse = torch.empty_like(q), q.new_empty(B, q.shape[2], C, dtype=_wide(q))
    for a, b in call.heads.calls():
        _, lse[:, a] = call.kernel.forward(
            q[:, :, a], k[:, :, b], v[:, :, b], call.scale, call.home(C, i), None, call.softcap, out=out[:, :, a]
        )
    seen = {j: call.visible(B, C, i, j) for j in range(i)}
    seen = {j: rectangles for j, rectangles in seen.items() if rectangles}
    if not seen:
        return out, lse
    total = out.to(lse.dtype)
    for j, fetched in ahead(seen, lambda j: (shelf.fetch(kept[j].k), shelf.fetch(kept[j].v))):
        k, v = (t.get() for t in fetched)
        for rows, queries, keys in seen[j]:
            for a, b in call.heads.calls():
                part, part_lse = call.full.forward(
                    q[rows, queries, a], k[rows, keys, b], v[rows, keys, b], call.scale, softcap=call.softcap
                )
                merge_(total[rows, queries, a], lse[rows, a, queries], part, part_lse)
    return total.to(q.dtype), lse


def _backward(call: Call, shelf: Shelf, kept: list[_Chunk], j: int, grad) -> list[torch.Tensor]:
    """Gradients of a chunk's q [B, c, H, d] and k, v [B, c, K, d], from its keys' part in the chunks from j on; those of the
    chunks before have added theirs to dq."""
    n = call.chunks
    own = grad.shape[1] // n
    if j == 0:
        for i in range(n):
            kept[i].grad = shelf.keep(call.heads.gather(grad[:, i * own : (i + 1) * own]))
    k, v = shelf.fetch(kept[j].k).get(), shelf.fetch(kept[j].v).get()
    B, C = k.shape[:2]
    dk, dv = (torch.zeros(t.shape, dtype=_wide(t), device=t.device) for t in (k, v))
    seen = {i: call.visible(B, C, i, j) for i in range(j + 1, n)}
    tasks = [j, *(i for i, rectangles in seen.items() if rectangles)]
    for i, fetched in ahead(tasks, lambda i: [shelf.fetch(t) for t in (kept[i].grad, kept[i].q, kept[i].out, kept[i].lse)]):
        before = None if kept[i].dq is None else shelf.fetch(kept[i].dq)
        g, q, out, lse = (t.get() for t in fetched)
        dq = torch.zeros(q.shape, dtype=dk.dtype, device=q.device)
        whole = [(slice(0, B), slice(0, C), slice(0, C))]
        for rows, queries, keys in whole if i == j else seen[i]:
            kernel, offsets = (call.kernel, call.home(C, j)) if i == j else (call.full, None)
            for a, b in call.heads.calls():
                got = kernel.backward(
                    g[rows, queries, a],
                    q[rows, queries, a],
                    k[rows, keys, b],
                    v[rows, keys, b],
                    out[rows, queries, a],
                    lse[rows, a, queries],
                    call.scale,
                    offsets,
                    None,
                    call.softcap,
                )
                for total, part, heads, share in zip((dq, dk, dv), (queries, keys, keys), (a, b, b), got):
                    total[rows, part, heads] += share
        if before is not None:
            dq += before.get()
        if i == j:
            finished = dq
        else:
            kept[i].dq = shelf.keep(dq, over=kept[i].dq)
    dq, dk, dv = (t.to(k.dtype) for t in (finished, dk, dv))
    kv_heads = call.project.kv_heads
    return [call.heads.scatter(dq), call.heads.scatter(dk, kv_heads), call.heads.scatter(dv, kv_heads)]


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def attention(hidden: torch.Tensor, weights: dict[str, torch.Tensor], cos, sin, call: Call) -> torch.Tensor:
    """Projection, rotation and attention of this rank's tokens.

    Args:
        hidden: [B, L, D], L = n*c tokens in the order of `layouts.Chunked`.
        weights: as `projection.weights_of` names them, in the order of call.names.
        cos, sin: [B or 1, L, R] of these tokens.

    Returns:
        [B, L, H, d], before the output projection.
    """
    return _Fpdt.apply(call, torch.is_grad_enabled(), hidden, cos, sin, *weights.values())
