"""Triton kernels of rotary.py: RMS norm and rotation of rows of heads in one pass over memory, and their backward.

A program has ROWS rows and walks their heads, so a row's cos and sin are read once. The rotated dims are two tiles,
[0, R/2) and [R/2, R), each loaded and stored by itself: no gather, no shuffle, any R; the dims from R on are a third.
A program loads all of a head before it stores any of it, and heads and rows of different programs do not meet: in place
is safe. Offsets of rows are 64-bit; heads are walked by moving pointers. Arithmetic is fp32.

Needs triton (tested with 3.6); rotary.py checks the arguments and imports this module only when it is asked for.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from upipe import rotary

WIDEST: tl.constexpr = tl.constexpr(8192)
"""Of a wider tile a thread has no registers for the norm's weight beside the rest, and reads it again for each row."""

SUM_ROWS, COLUMNS = 256, 16
"""Tile of `_add_sums`: 64 bytes of a row; with few columns there are programs enough for narrow heads too."""


@triton.jit(do_not_specialize=["rows"])
def _finish(
    x, out, cos, sin, weight, x_n, x_h, out_n, out_h, cos_n, cos_d, sin_n, sin_d, rows, eps,
    heads: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr, ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    if HALF > 0:
        i = tl.arange(0, HALF_TILE)[None, :]
        wide_i = i.to(tl.int64)
        at = inside & (i < HALF)
        cos_a = tl.load(cos + row * cos_n + wide_i * cos_d, mask=at, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + row * cos_n + (wide_i + HALF) * cos_d, mask=at, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + row * sin_n + wide_i * sin_d, mask=at, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + row * sin_n + (wide_i + HALF) * sin_d, mask=at, other=0.0).to(tl.float32)
        if weight is not None:
            weight_a = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
            weight_b = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        rest = inside & (j < D)
        if weight is not None:
            weight_c = tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)

    for _head in range(heads):
        if HALF > 0:
            a = tl.load(x + row * x_n + i, mask=at, other=0.0).to(tl.float32)
            b = tl.load(x + row * x_n + HALF + i, mask=at, other=0.0).to(tl.float32)
        if D > 2 * HALF:
            c = tl.load(x + row * x_n + j, mask=rest, other=0.0).to(tl.float32)
        if weight is not None:
            squares = tl.zeros([ROWS, 1], tl.float32)
            if HALF > 0:
                squares += tl.sum(a * a + b * b, axis=1, keep_dims=True)
            if D > 2 * HALF:
                squares += tl.sum(c * c, axis=1, keep_dims=True)
            inverse = tl.rsqrt(squares / D + eps)
            if HALF > 0:
                a = a * inverse * weight_a
                b = b * inverse * weight_b
            if D > 2 * HALF:
                c = c * inverse * weight_c
        if HALF > 0:
            tl.store(out + row * out_n + i, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=at)
            tl.store(out + row * out_n + HALF + i, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=at)
        if D > 2 * HALF:
            tl.store(out + row * out_n + j, c.to(out.dtype.element_ty), mask=rest)
        x += x_h
        out += out_h


@triton.jit(do_not_specialize=["rows"])
def _unfinish(
    grad, out, cos, sin, raw, weight, partial, grad_n, grad_h, out_n, out_h, raw_n, raw_h,
    cos_n, cos_d, sin_n, sin_d, rows, eps,
    blocks: tl.constexpr, heads: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr, ROWS: tl.constexpr,
):
    if HALF > 0:
        i = tl.arange(0, HALF_TILE)[None, :]
        wide_i = i.to(tl.int64)
        if weight is not None:
            weight_a = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
            weight_b = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        if partial is not None:
            sum_a = tl.zeros([ROWS, HALF_TILE], tl.float32)
            sum_b = tl.zeros([ROWS, HALF_TILE], tl.float32)
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        if weight is not None and REST_TILE <= WIDEST:
            weight_c = tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)
        if partial is not None:
            sum_c = tl.zeros([ROWS, REST_TILE], tl.float32)

    row = tl.program_id(0).to(tl.int64) * blocks * ROWS + tl.arange(0, ROWS)[:, None]
    for _block in range(blocks):
        inside = row < rows
        if HALF > 0:
            at = inside & (i < HALF)
            cos_a = tl.load(cos + row * cos_n + wide_i * cos_d, mask=at, other=0.0).to(tl.float32)
            cos_b = tl.load(cos + row * cos_n + (wide_i + HALF) * cos_d, mask=at, other=0.0).to(tl.float32)
            sin_a = tl.load(sin + row * sin_n + wide_i * sin_d, mask=at, other=0.0).to(tl.float32)
            sin_b = tl.load(sin + row * sin_n + (wide_i + HALF) * sin_d, mask=at, other=0.0).to(tl.float32)
        if D > 2 * HALF:
            rest = inside & (j < D)
        grad_head = grad
        out_head = out
        if weight is not None:
            raw_head = raw
        for _head in range(heads):
            if HALF > 0:
                a = tl.load(grad_head + row * grad_n + i, mask=at, other=0.0).to(tl.float32)
                b = tl.load(grad_head + row * grad_n + HALF + i, mask=at, other=0.0).to(tl.float32)
                turned = a * cos_a + b * sin_b
                b = b * cos_b - a * sin_a
                a = turned
            if D > 2 * HALF:
                c = tl.load(grad_head + row * grad_n + j, mask=rest, other=0.0).to(tl.float32)
            if weight is not None:
                squares = tl.zeros([ROWS, 1], tl.float32)
                if HALF > 0:
                    unit_a = tl.load(raw_head + row * raw_n + i, mask=at, other=0.0).to(tl.float32)
                    unit_b = tl.load(raw_head + row * raw_n + HALF + i, mask=at, other=0.0).to(tl.float32)
                    squares += tl.sum(unit_a * unit_a + unit_b * unit_b, axis=1, keep_dims=True)
                if D > 2 * HALF:
                    unit_c = tl.load(raw_head + row * raw_n + j, mask=rest, other=0.0).to(tl.float32)
                    squares += tl.sum(unit_c * unit_c, axis=1, keep_dims=True)
                # Rows past the end would be 0 * inf with eps = 0, and their NaN would reach the sums.
                inverse = tl.where(inside, tl.rsqrt(squares / D + eps), 0.0)
                mean = tl.zeros([ROWS, 1], tl.float32)
                if HALF > 0:
                    unit_a *= inverse
                    unit_b *= inverse
                    if partial is not None:
                        sum_a += a * unit_a
                        sum_b += b * unit_b
                    a *= weight_a
                    b *= weight_b
                    mean += tl.sum(a * unit_a + b * unit_b, axis=1, keep_dims=True)
                if D > 2 * HALF:
                    unit_c *= inverse
                    if partial is not None:
                        sum_c += c * unit_c
                    if REST_TILE > WIDEST:
                        weight_c = tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)
                    c *= weight_c
                    mean += tl.sum(c * unit_c, axis=1, keep_dims=True)
                mean = mean / D
                if HALF > 0:
                    a = inverse * (a - unit_a * mean)
                    b = inverse * (b - unit_b * mean)
                if D > 2 * HALF:
                    c = inverse * (c - unit_c * mean)
                raw_head += raw_h
            if HALF > 0:
                tl.store(out_head + row * out_n + i, a.to(out.dtype.element_ty), mask=at)
                tl.store(out_head + row * out_n + HALF + i, b.to(out.dtype.element_ty), mask=at)
            if D > 2 * HALF:
                tl.store(out_head + row * out_n + j, c.to(out.dtype.element_ty), mask=rest)
            grad_head += grad_h
            out_head += out_h
        row += ROWS

    if partial is not None:
        mine = partial + tl.program_id(0).to(tl.int64) * D
        if HALF > 0:
            tl.store(mine + i, tl.sum(sum_a, axis=0, keep_dims=True), mask=i < HALF)
            tl.store(mine + HALF + i, tl.sum(sum_b, axis=0, keep_dims=True), mask=i < HALF)
        if D > 2 * HALF:
            tl.store(mine + j, tl.sum(sum_c, axis=0, keep_dims=True), mask=j < D)


@triton.jit(do_not_specialize=["programs"])
def _add_sums(
    partial, weight_grad, weight_grad_d, programs, turns: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """weight_grad [D] += the sum of partial [programs, D], in an order of its own; torch's sum would take up to twice its bytes."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for turn in range(turns):
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + row * D + i[None, :], mask=(row < programs) & (i < D)[None, :], other=0.0)
    at = weight_grad + i * weight_grad_d
    tl.store(at, tl.load(at, mask=i < D, other=0.0) + tl.sum(total, axis=0), mask=i < D)


INTERPRETED = not isinstance(_finish, triton.runtime.JITFunction)


def finish(x, cos, sin, out, weight, eps) -> None:
    """`rotary.finish_heads` with arguments that it has checked."""
    tiles = _tiles(x, cos, out, changed=weight is not None)
    if not _is_work(x, tiles):
        return
    rows = x.shape[0]
    with _on(x):
        _finish[(triton.cdiv(rows, tiles["ROWS"]),)](
            x, out, cos, sin, _flat(weight), *_strides(x), *_strides(out), *_table(cos), *_table(sin),
            rows, eps, **tiles, num_warps=_warps(tiles),
        )


def unfinish(grad, cos, sin, out, raw, weight, eps, weight_grad) -> None:
    """`rotary.unfinish_heads` with arguments that it has checked."""
    tiles = _tiles(grad, cos, out, changed=weight is not None)
    if not _is_work(grad, tiles):
        return
    rows, _, d = grad.shape
    programs, blocks, partial = triton.cdiv(rows, tiles["ROWS"]), 1, None
    if weight is None:
        raw = None
    if weight_grad is not None:
        programs, blocks = rotary.sums_of(rows, d, tiles["ROWS"])
        partial = torch.empty(programs, d, dtype=torch.float32, device=grad.device)
    with _on(grad):
        _unfinish[(programs,)](
            grad, out, cos, sin, raw, _flat(weight), partial, *_strides(grad), *_strides(out), *_strides(raw),
            *_table(cos), *_table(sin), rows, eps, blocks, **tiles, num_warps=_warps(tiles),
        )
        if weight_grad is not None:
            turns = triton.next_power_of_2(triton.cdiv(programs, SUM_ROWS))  # each is compiled
            _add_sums[(triton.cdiv(d, COLUMNS),)](partial, weight_grad, weight_grad.stride(0), programs, turns, d, SUM_ROWS, COLUMNS)


def _tiles(x, cos, out, changed: bool) -> dict:
    """Sizes a kernel is compiled for. In place, dims beyond R that nothing changes are left alone: D is then R."""
    half = 0 if cos is None else cos.shape[-1] // 2
    in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype
    dims = 2 * half if in_place and not changed else x.shape[2]
    half_tile, rest_tile, rows = rotary.tile_of(half, dims - 2 * half)
    return {"heads": x.shape[1], "D": dims, "HALF": half, "HALF_TILE": half_tile, "REST_TILE": rest_tile, "ROWS": rows}


def _warps(tiles) -> int:
    """4 for tiles of narrow heads; of a tile wider than `rotary.TILE` so many that a thread has 16 elements a tensor, and at most 16:
    more leave a thread too few registers."""
    return min(16, max(4, max(tiles["HALF_TILE"], tiles["REST_TILE"]) // 512))


def _is_work(x, tiles) -> bool:
    return x.numel() > 0 and tiles["D"] > 0


def _on(x):
    """Triton launches on the current device, which need not be x's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _strides(x) -> tuple[int, int]:
    """Of rows and heads; a single head's stride means nothing, and 0 keeps it from making one more kernel."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)


def _table(cos) -> tuple[int, int]:
    return (0, 0) if cos is None else (cos.stride(0), cos.stride(2))


def _flat(parameter):
    return None if parameter is None else parameter.contiguous()
