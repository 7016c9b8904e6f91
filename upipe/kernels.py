"""Attention kernels behind one interface: causal forward with log-sum-exp, and backward.

Shapes: B batch, S tokens, h query heads, n kv heads (h a multiple of n), d head dim.
q, out and their gradients are [B, S, h, d], k, v and theirs [B, S, n, d], with any strides whose last is 1;
lse is [B, h, S], fp32 (fp64 for fp64 inputs). `offsets` gives for each batch row the document starts and the end,
(0, s1, ..., S): a query sees the keys of its own document up to itself. None: every row is one document.
`window` W: a query sees itself and the W-1 keys before it, as Hugging Face's `sliding_window` means it.
`softcap` c: scores become c*tanh(scores/c) before the softmax.

| name | where | what it calls |
|---|---|---|
| fa4 | GPU, Hopper and newer | FlashAttention-4, package flash-attn-4 |
| cudnn | GPU, Hopper and newer | cuDNN through torch |
| flash | GPU and CPU | FlashAttention-2 built into torch; on CPU torch's own flash kernel |
| reference | anywhere | plain torch in chunks of queries: any dtype and head dim, slow, memory linear in S |
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

Offsets = tuple[tuple[int, ...], ...]
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """What a kernel is asked to run."""

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False

    @classmethod
    def of(cls, x: torch.Tensor, head_dim: int | None = None, window: bool = False, softcap: bool = False) -> Case:
        """The case of tensors like x, [..., head_dim] unless told otherwise."""
        capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
        return cls(x.device.type, capability, x.dtype, head_dim or x.shape[-1], window, softcap)

    def __str__(self) -> str:
        where = self.device + (f" sm_{self.capability[0]}{self.capability[1]}" if self.device == "cuda" else "")
        mask = (", window" if self.window else "") + (", softcap" if self.softcap else "")
        return f"{str(self.dtype).removeprefix('torch.')}, head_dim {self.head_dim}{mask}, {where}"


class Kernel:
    """Base: runs packed rows document by document over the subclass's dense `_forward` and `_backward`."""

    name = ""

    def declines(self, case: Case) -> str | None:
        """Why this kernel cannot run the case, or None if it can."""
        raise NotImplementedError

    def forward(
        self, q, k, v, scale: float, offsets: Offsets | None = None, window: int | None = None, softcap: float | None = None
    ):
        """-> out, lse."""
        mask = (window, softcap)
        if offsets is None:
            return self._forward(q, k, v, scale, *mask)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=_lse_dtype(q))
        for row, start, end in _documents(offsets):
            part = (slice(row, row + 1), slice(start, end))
            out[part], lse[row : row + 1, :, start:end] = self._forward(
                q[part], k[part], v[part], scale, *mask
            )
        return out, lse

    def backward(
        self, grad, q, k, v, out, lse, scale: float,
        offsets: Offsets | None = None, window: int | None = None, softcap: float | None = None,
    ):
        """-> dq, dk, dv. `out` and `lse` may be those of a softmax with more in its denominator (attention sinks)."""
        mask = (window, softcap)
        if offsets is None:
            return self._backward(grad, q, k, v, out, lse, scale, *mask)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for row, start, end in _documents(offsets):
            part = (slice(row, row + 1), slice(start, end))
            got = self._backward(
                grad[part], q[part], k[part], v[part], out[part],
                lse[row : row + 1, :, start:end].contiguous(), scale, *mask,
            )
            for whole, piece in zip(grads, got):
                whole[part] = piece
        return grads

    def _forward(self, q, k, v, scale, window, softcap):
        raise NotImplementedError

    def _backward(self, grad, q, k, v, out, lse, scale, window, softcap):
        raise NotImplementedError


class FlashAttention4(Kernel):
    name = "fa4"
    head_dims = (32, 64, 96, 128, 192, 256)

    def declines(self, case: Case) -> str | None:
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        if case.device != "cuda" or case.capability < (9, 0):
            return "it needs a GPU of compute capability 9.0 or newer"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        return None

    def _forward(self, q, k, v, scale, window, softcap):
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **self._mask(scale, window, softcap))[:2]
        return out, lse

    def _backward(self, grad, q, k, v, out, lse, scale, window, softcap):
        from flash_attn.cute.interface import _flash_attn_bwd

        return _flash_attn_bwd(q, k, v, out, grad, lse, **self._mask(scale, window, softcap))[:3]

    @staticmethod
    def _mask(scale, window, softcap) -> dict:
        options = {"softmax_scale": scale, "causal": window is None}
        if window is not None:
            options |= {"window_size_left": window - 1, "window_size_right": 0}
        return options if softcap is None else options | {"softcap": softcap}


class CudnnAttention(Kernel):
    name = "cudnn"
    head_dims = (64, 96, 128, 192, 256)

    def declines(self, case: Case) -> str | None:
        if case.window or case.softcap:
            return "through torch it has no window and no softcap"
        if case.device != "cuda" or case.capability < (9, 0):
            return "it needs a GPU of compute capability 9.0 or newer"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        return None

    def _forward(self, q, k, v, scale, window, softcap):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def _backward(self, grad, q, k, v, out, lse, scale, window, softcap):
        grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        seed = offset = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, None, None,
            q.shape[2], k.shape[2], 0.0, True, scale=scale,
        )
        return tuple(g.transpose(1, 2) for g in grads)


class TorchFlashAttention(Kernel):
    name = "flash"
    head_dims = (64, 96, 128, 256)

    def declines(self, case: Case) -> str | None:
        if case.softcap:
            return "it has no softcap"
        if case.device == "cpu" and case.window:
            return "on CPU it has no window"
        if case.device == "cpu":
            return None if case.dtype.is_floating_point else f"it does not take {case.dtype}"
        if case.device != "cuda" or case.capability < (8, 0):
            return "it needs a CPU or a GPU of compute capability 8.0 or newer"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return "on a GPU it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        return None

    def _forward(self, q, k, v, scale, window, softcap):
        if q.is_cuda:
            out, lse, *_ = aten._flash_attention_forward(
                q, k, v, None, None, q.shape[1], k.shape[1], 0.0, window is None, False, scale=scale, **self._window(window)
            )
            return out, lse
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(self, grad, q, k, v, out, lse, scale, window, softcap):
        if q.is_cuda:
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            return aten._flash_attention_backward(
                grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, window is None,
                state, state.new_zeros(()), scale=scale, **self._window(window),
            )
        grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True, scale=scale
        )
        return tuple(g.transpose(1, 2) for g in grads)

    @staticmethod
    def _window(window) -> dict:
        return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class ReferenceAttention(Kernel):
    name = "reference"
    chunk = 512

    def declines(self, case: Case) -> str | None:
        return None if case.dtype.is_floating_point else f"it does not take {case.dtype}"

    def _chunks(self, q, k, scale, window, softcap):
        """For each chunk of queries: its slice, the slice of the t keys it sees some of, scores [B, n, g, c, t] with
        hidden ones at -inf, and d(score)/d(scaled product) where a softcap makes that other than 1."""
        S, n = q.shape[1], k.shape[2]
        wide = _lse_dtype(q)
        grouped = q.unflatten(2, (n, -1)).to(wide)
        for start in range(0, S, self.chunk):
            end = min(start + self.chunk, S)
            first = 0 if window is None else max(0, start - window + 1)
            scores = torch.einsum("bcngd,btnd->bngct", grouped[:, start:end], k[:, first:end].to(wide)) * scale
            slope = None
            if softcap is not None:
                bent = torch.tanh(scores / softcap)
                scores, slope = softcap * bent, 1 - bent.square()
            rows = torch.arange(start, end, device=q.device)[:, None]
            keys = torch.arange(first, end, device=q.device)[None, :]
            hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
            yield slice(start, end), slice(first, end), scores.masked_fill_(hidden, float("-inf")), slope

    def _forward(self, q, k, v, scale, window, softcap):
        wide = _lse_dtype(q)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide)
        for part, keys, scores, _ in self._chunks(q, k, scale, window, softcap):
            chunk_lse = scores.logsumexp(-1)
            probs = scores.sub_(chunk_lse[..., None]).exp_()
            got = torch.einsum("bngct,btnd->bcngd", probs, v[:, keys].to(wide))
            out[:, part] = got.flatten(2, 3).to(q.dtype)
            lse[:, :, part] = chunk_lse.flatten(1, 2)
        return out, lse

    def _backward(self, grad, q, k, v, out, lse, scale, window, softcap):
        wide, n = _lse_dtype(q), k.shape[2]
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
        for part, keys, scores, slope in self._chunks(q, k, scale, window, softcap):
            probs = scores.sub_(lse[:, :, part].unflatten(1, (n, -1))[..., None]).exp_()
            g = grad[:, part].unflatten(2, (n, -1)).to(wide)
            dv[:, keys] += torch.einsum("bngct,bcngd->btnd", probs, g)
            dprobs = torch.einsum("bcngd,btnd->bngct", g, v[:, keys].to(wide))
            dscores = probs * (dprobs - delta[:, :, part].unflatten(1, (n, -1))[..., None]) * scale
            if slope is not None:
                dscores *= slope
            dq[:, part] = torch.einsum("bngct,btnd->bcngd", dscores, k[:, keys].to(wide)).flatten(2, 3).to(q.dtype)
            dk[:, keys] += torch.einsum("bngct,bcngd->btnd", dscores, q[:, part].unflatten(2, (n, -1)).to(wide))
        return dq, dk.to(k.dtype), dv.to(v.dtype)


KERNELS: tuple[Kernel, ...] = (FlashAttention4(), CudnnAttention(), TorchFlashAttention(), ReferenceAttention())
"""Fastest first, as measured on an H200."""


def names() -> tuple[str, ...]:
    return tuple(kernel.name for kernel in KERNELS)


def select(name: str, case: Case) -> Kernel:
    """The kernel of that name, or with "auto" the fastest that takes the case.

    Raises:
        ValueError: the name is unknown, or the kernel declines the case (it says why and which would run).
    """
    willing = [kernel for kernel in KERNELS if kernel.declines(case) is None]
    if name == "auto":
        return willing[0]
    asked = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if asked is None:
        raise ValueError(f"kernel={name!r} is unknown: use auto, {', '.join(names())}")
    reason = asked.declines(case)
    if reason is not None:
        raise ValueError(f"kernel={name!r} cannot run {case}: {reason}. These can: auto, {', '.join(k.name for k in willing)}")
    return asked


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _documents(offsets: Offsets):
    for row, starts in enumerate(offsets):
        for start, end in zip(starts, starts[1:]):
            yield row, start, end
