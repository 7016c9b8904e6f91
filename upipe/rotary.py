"""Per-head RMS norm and rotary embedding of rows of heads, with their backward, in place on a stage's buffer. A head may be as
wide as the hidden states: that is a layer's own norm.

Shapes: N rows (local tokens x batch), h heads, d head dim, R <= d rotated dims (R < d: a partial rotation, as with
`partial_rotary_factor`; the rest passes through). cos, sin: [N, 1, R] of the rows' own positions, any float dtype.
Arithmetic is fp32 (fp64 for fp64 inputs); results have the input's dtype.

`finish_heads` and `unfinish_heads` are what the block uses: plain torch in chunks of rows, or one Triton kernel
(rotary_triton.py) that reads and writes each element once. `rotate`, `rms_norm` and `rms_norm_backward` are the plain
definitions that both come from.

Rounding: `finish_heads` rounds once, at the end. Hugging Face's bf16 models also round twice in the norm and after
each product of the rotation, so the two differ by those roundings. A projection's bias is the projection's to add: added to
rounded rows it is itself rounded to their last bit, alike for all rows, which no mean over tokens takes away.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

BACKENDS = ("auto", "torch", "triton")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK = 2**20  # elements that plain torch works on at a time: 4 MiB a temporary in fp32
TILE = 1024    # elements of a Triton tile of narrow heads: with 4 warps, one 16-byte load of bf16 a thread
PROGRAMS = 4096
SUMS = 2**23
"""Programs of the Triton kernel at most that each write a partial sum [d] of the weight's gradient in fp32, and their bytes."""


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


def finish_heads(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    out: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    backend: str = "auto",
) -> torch.Tensor:
    """What a projection needs before attention: out = rotate(rms_norm(x)), each part where it is given.

    Args:
        x: [N, h, d], any strides whose last is 1: slices of a [P, N, h*d] buffer, heads of a wider tensor. N and h may be 0.
        cos, sin: [N, 1, R], R even and at most d, any strides (expanded tensors too); None for both: no rotation.
        out: [N, h, d], any float dtype, any strides whose last is 1; x itself (None: x, in place) or memory apart from x's.
        weight: [d], of an RMS norm of each head by itself; its dtype need not be x's.
        eps: of the norm, added to the mean square.
        backend: "torch", "triton" or "auto" (see `choose_backend`).

    Returns:
        out. No autograd: call it where gradients are off.

    Raises:
        ValueError: shapes that do not fit, a last stride that is not 1, an unknown backend, Triton asked for on the CPU.
        TypeError: Triton asked for with a dtype it does not do.
        ImportError: Triton asked for and not installed.
        RuntimeError: gradients are on and an input wants one.
    """
    out = x if out is None else out
    _check(x, cos, sin, out, None, weight)
    if choose_backend(backend, x, cos, sin, out, weight) == "triton":
        _triton().finish(x, cos, sin, out, weight, eps)
        return out
    for rows in _chunks(x):
        w = _wide(x[rows])
        if weight is not None:
            w = rms_norm(w, weight, eps)
        out[rows] = w if cos is None else rotate(w, cos[rows], sin[rows])
    return out


def unfinish_heads(
    grad: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    out: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    weight_grad: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Backward of `finish_heads`: the gradient of its result to that of its x, and of its norm weight.

    Args:
        grad: [N, h, d], as x in `finish_heads`.
        cos, sin: those of the forward; their transpose is applied, so scaled rotations (YaRN) are right too.
        out: [N, h, d], any float dtype, any strides whose last is 1; grad itself (None: grad, in place), raw, or memory
            apart from both.
        raw: [N, h, d], the x of the forward; needed with `weight` only.
        weight, eps: those of the forward.
        weight_grad: [d], fp32 (fp64 with fp64): the weight's gradient is added to it. The sum's order is fixed, so the
            same input gives the same bits.
        backend: see `choose_backend`.

    Returns:
        out. No autograd.

    Raises:
        As `finish_heads`; and ValueError where weight is given without raw, or weight_grad without weight.
    """
    out = grad if out is None else out
    _check(grad, cos, sin, out, raw, weight)
    if weight is not None and raw is None:
        raise ValueError("the backward of a norm needs raw, the projection before the norm: pass raw= [N, h, d]")
    if weight_grad is not None and (weight is None or weight_grad.shape != weight.shape):
        raise ValueError(f"weight_grad {tuple(weight_grad.shape)} needs a weight of the same shape; "
                         f"weight is {None if weight is None else tuple(weight.shape)}")
    if choose_backend(backend, grad, cos, sin, out, raw, weight, weight_grad) == "triton":
        _triton().unfinish(grad, cos, sin, out, raw, weight, eps, weight_grad)
        return out
    for rows in _chunks(grad):
        g = _wide(grad[rows])
        if cos is not None:
            g = rotate(g, cos[rows], sin[rows], inverse=True)
        if weight is not None:
            g, share = rms_norm_backward(g, _wide(raw[rows]), weight, eps)
            if weight_grad is not None:
                weight_grad += share
        out[rows] = g
    return out


def choose_backend(backend: str, *tensors: torch.Tensor | None) -> str:
    """-> "torch" or "triton": what `finish_heads` and `unfinish_heads` run on these tensors under `backend`.

    "auto" is Triton where it is installed, for bf16, fp16 and fp32 on a GPU, and plain torch everywhere else. "triton" on
    CPU tensors works in Triton's interpreter only (TRITON_INTERPRET=1 before triton is first imported).

    Raises:
        ValueError, TypeError, ImportError: `backend` is unknown, or "triton" and cannot run on these tensors.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    given = [t for t in tensors if t is not None]
    odd = [str(t.dtype) for t in given if t.dtype not in TRITON_DTYPES]
    if backend == "auto":
        return "triton" if not odd and all(t.is_cuda for t in given) and _triton() is not None else "torch"
    if backend == "triton":
        if odd:
            raise TypeError(f"the Triton backend does bf16, fp16 and fp32, not {', '.join(odd)}; use backend='torch'")
        if _triton() is None:
            raise ImportError("backend='triton' but triton is not installed; install it or use backend='torch'")
        if not all(t.is_cuda for t in given) and not _triton().INTERPRETED:
            raise ValueError(f"the Triton backend needs GPU tensors, not {sorted({str(t.device) for t in given})}; use "
                             "backend='torch', or set TRITON_INTERPRET=1 before triton is imported")
    return backend


@functools.cache
def _triton():
    """The module of kernels; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from upipe import rotary_triton
    return rotary_triton


def tile_of(half: int, rest: int) -> tuple[int, int, int]:
    """Elements a row of the Triton kernels' tiles of the rotated halves and of the rest, and rows of a tile."""
    half_tile, rest_tile = (1 << max(0, n - 1).bit_length() for n in (half, rest))
    return half_tile, rest_tile, max(1, TILE // max(half_tile, rest_tile))


def sums_of(rows: int, d: int, rows_of_tile: int) -> tuple[int, int]:
    """Programs that write partial sums [d], and tiles that each of them walks: a power of two, as each is compiled."""
    tiles, most = -(-rows // rows_of_tile), max(1, min(PROGRAMS, SUMS // (4 * d)))
    walked = 1 << max(0, -(-tiles // most) - 1).bit_length()
    return -(-tiles // walked), walked


def _chunks(x: torch.Tensor):
    """Slices of x's rows, about `CHUNK` elements each, so that fp32 temporaries stay small beside a large buffer."""
    rows, heads, dims = x.shape
    step = max(1, CHUNK // max(1, heads * dims))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _check(x, cos, sin, out, raw, weight) -> None:
    if x.ndim != 3:
        raise ValueError(f"x must be [N, h, d], not {tuple(x.shape)}")
    N, h, d = x.shape
    if (cos is None) != (sin is None):
        raise ValueError("give both cos and sin, or None for both")
    R = 0 if cos is None else cos.shape[-1]
    if R % 2 or R > d:
        raise ValueError(f"cos has {R} dims to rotate of a head dim of {d}; it must be an even number of at most {d}")
    wanted = {"cos": (cos, (N, 1, R)), "sin": (sin, (N, 1, R)), "out": (out, (N, h, d)), "raw": (raw, (N, h, d)),
              "weight": (weight, (d,))}
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; with x {tuple(x.shape)} it must be {shape}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}; they must be on one device")
    for name, tensor in (("x", x), ("out", out), ("raw", raw)):
        if tensor is not None and tensor.stride(-1) != 1 and d > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last must be 1: pass a contiguous copy")
    given = (x, cos, sin, out, raw, weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise RuntimeError("this works in place and outside autograd: call it under torch.no_grad() or in an autograd Function")
