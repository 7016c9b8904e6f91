"""Attention kernels behind one interface: causal forward with log-sum-exp, and backward.

Shapes: B batch, S tokens, h query heads, n kv heads (h a multiple of n), d head dim.
q, out and their gradients are [B, S, h, d], k, v and theirs [B, S, n, d], with any strides whose last is 1, such as some
heads of a wider [S, B, heads, d] buffer; lse is [B, h, S], fp32 (fp64 for fp64 inputs), of any strides. What a kernel
cannot take as it lies it copies. `offsets` gives for each batch row the document starts and the end, (0, s1, ..., S): a
query sees the keys of its own document up to itself. None: every row is one document.
`window` W: a query sees itself and the W-1 keys before it, as Hugging Face's `sliding_window` means it.
`softcap` c: scores become c*tanh(scores/c) before the softmax.

| name | where | what it calls | head dims | window, softcap | `out=`, `dq=` ... | deterministic |
|---|---|---|---|---|---|---|
| fa4 | GPU, Hopper and newer | FlashAttention-4, package flash-attn-4 | 32, 64, 96, 128, 192, 256 | both | written directly | on request |
| cudnn | GPU, Hopper and newer | cuDNN through torch | 64, 96, 128, 192, 256 | neither | copied to | unknown |
| flash | GPU from Ampere on; CPU | FlashAttention-2 built into torch; on CPU torch's own flash kernel | 64, 96, 128, 256; CPU any | GPU window | copied to | on request; CPU always |
| reference | anywhere | plain torch in chunks of queries: any dtype, slow, memory linear in S | any | both | written directly | always |
| fa3 | GPU, Hopper | package flash-attn-3; not run by us on any machine | 64, 96, 128, 192, 256 | both | `dq=` ... directly | on request |
| fa2 | GPU from Ampere on | package flash-attn; not run by us on any machine | multiples of 8 to 256 | both | `dq=` ... directly | on request |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Offsets = tuple[tuple[int, ...], ...]
aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


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


@dataclass(frozen=True)
class Mask:
    """What one call of a kernel hides, beside the future. documents: boundaries (0, s1, ..., S) inside its one row; only
    kernels whose `_runs` yields more than one document a call are given any."""

    window: int | None = None
    softcap: float | None = None
    documents: tuple[int, ...] | None = None


class Kernel:
    """Base: checks buffers, runs packed rows document by document over the subclass's `_forward` and `_backward`, and
    copies to the buffers what those did not write there.

    Attributes:
        name: what `select` knows it by.
        untested: where it has never run, that; empty for kernels that the tests run.
        writes_gradients: whether `backward` writes dq, dk and dv where it is told to, if they are aligned to 16 bytes;
            otherwise it makes its own and copies them there.
        dq_over_out: whether `backward` may be handed `out` itself as `dq`.
        deterministic: whether two backward passes give the same bits: "always", "on request" (under
            torch.use_deterministic_algorithms(True), with warn_only or without), or "unknown".
        causal: whether a query sees the keys up to its own only; False in the kernels of `upipe.ring`, where it sees all.
    """

    name = ""
    untested = ""
    writes_gradients = False
    dq_over_out = False
    deterministic = "unknown"
    causal = True

    def __str__(self) -> str:
        return self.name + (f" ({self.untested})" if self.untested else "")

    def declines(self, case: Case) -> str | None:
        """Why this kernel cannot run the case, or None if it can."""
        raise NotImplementedError

    def backward_bytes(self, tokens: int, heads: int, kv_heads: int, head_dim: int, keys: int | None = None) -> int | None:
        """Bytes of device memory that `backward` holds at its peak beside its arguments, for one row of `tokens` with
        bf16 inputs that need no copy and dq, dk, dv buffers handed in. None where it has not been measured. keys: tokens of k
        and v where they are others, by the same formula."""
        return None

    def heads_at_once(self, rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int | None:
        """Query heads, of one kv head, of each of the calls that `backward` makes one after another; None where it makes one of all
        heads. Raises ValueError for what it cannot run."""
        return None

    def forward(
        self, q, k, v, scale: float,
        offsets: Offsets | None = None, window: int | None = None, softcap: float | None = None, out=None,
    ):
        """-> out, lse. With `out` given, a tensor like q, the result is in it, and it is what is returned.

        Raises:
            ValueError: the buffer differs from q in shape, dtype or device.
        """
        _check_buffer("out", out, q)
        if offsets is None:
            got, lse = self._forward(q, k, v, scale, Mask(window, softcap), out)
            return _into(out, got), lse
        out = torch.empty_like(q) if out is None else out
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=_lse_dtype(q))
        for row, starts in self._runs(offsets):
            part, mask = _part(row, starts), _mask_of(starts, window, softcap)
            got, part_lse = self._forward(q[part], k[part], v[part], scale, mask, out[part])
            _into(out[part], got)
            lse[row : row + 1, :, starts[0] : starts[-1]] = part_lse
        return out, lse

    def backward(
        self, grad, q, k, v, out, lse, scale: float,
        offsets: Offsets | None = None, window: int | None = None, softcap: float | None = None,
        dq=None, dk=None, dv=None,
    ):
        """-> dq, dk, dv. `out` and `lse` may be those of a softmax with more in its denominator (attention sinks).

        With dq (dk, dv) given, a tensor like q (k, v), the result is in it, and it is what is returned. `dq` may be the very
        memory of `out`, same start and strides, where `dq_over_out` says so. Buffers share no memory otherwise.

        Raises:
            ValueError: a buffer differs from what it is the gradient of in shape, dtype or device; dq is out's memory but
                `dq_over_out` is False.
        """
        buffers = (dq, dk, dv)
        for name, buffer, like in zip(("dq", "dk", "dv"), buffers, (q, k, v)):
            _check_buffer(name, buffer, like)
        shared = dq is not None and not dq.is_meta and dq.numel() and dq.data_ptr() == out.data_ptr()
        if shared and not self.dq_over_out:
            raise ValueError(f"kernel {self} was handed out's memory as dq but dq_over_out is False: give dq memory of its own")
        if offsets is None:
            got = self._backward(grad, q, k, v, out, lse, scale, Mask(window, softcap), *buffers)
            return tuple(map(_into, buffers, got))
        buffers = tuple(torch.empty_like(like) if buffer is None else buffer for buffer, like in zip(buffers, (q, k, v)))
        for row, starts in self._runs(offsets):
            part, mask = _part(row, starts), _mask_of(starts, window, softcap)
            pieces = [buffer[part] for buffer in buffers]
            part_lse = lse[row : row + 1, :, starts[0] : starts[-1]]
            got = self._backward(grad[part], q[part], k[part], v[part], out[part], part_lse, scale, mask, *pieces)
            for piece, result in zip(pieces, got):
                _into(piece, result)
        return buffers

    def _runs(self, offsets: Offsets) -> Iterator[tuple[int, tuple[int, ...]]]:
        """For each call: the batch row, and the boundaries of the documents in it."""
        for row, starts in enumerate(offsets):
            for pair in zip(starts, starts[1:]):
                yield row, pair

    def _forward(self, q, k, v, scale, mask: Mask, out):
        """-> out, lse; the first in `out` (which may be None) if the kernel can write there."""
        raise NotImplementedError

    def _backward(self, grad, q, k, v, out, lse, scale, mask: Mask, dq, dk, dv):
        """-> dq, dk, dv; each in its buffer (which may be None) if the kernel can write there."""
        raise NotImplementedError


class FlashAttention4(Kernel):
    """Sources: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36, `_flash_attn_fwd` and `_flash_attn_bwd`.

    Its backward is silently wrong at head dim 80. It copies inputs that are not aligned to 16 bytes; outputs must be.
    `out` is read by the backward's first kernel only and dq written by its last or, on Blackwell with head dim 256, by one
    that does not read out; all run on one stream. Bit-equal on request was measured at head dim 128.
    """

    name = "fa4"
    writes_gradients = True
    dq_over_out = True
    deterministic = "on request"
    head_dims = (32, 64, 96, 128, 192, 256)
    many = 8
    """Rows of more documents than this run as one call over all of them."""

    def declines(self, case: Case) -> str | None:
        missing = _missing("flash-attn-4", "flash_attn.cute")
        if missing is not None:
            return missing
        if case.device != "cuda" or case.capability < (9, 0):
            return "it needs a GPU of compute capability 9.0 or newer"
        if case.capability >= (12, 0):
            return "its backward for compute capability 12 has no softcap and no deterministic order; it takes 9.0 to 11"
        if case.dtype not in HALVES:
            return "it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        if case.capability >= (10, 0) and case.head_dim == 192:
            return "on Blackwell it takes head dim 192 only with values of 128"
        if case.capability >= (10, 0) and case.head_dim == 256 and case.softcap:
            return "on Blackwell its backward has no softcap at head dim 256"
        return None

    def backward_bytes(self, tokens: int, heads: int, kv_heads: int, head_dim: int, keys: int | None = None) -> int:
        """See `Kernel`. An fp32 dq (measured on an H200: 2.0 times tokens*d*2 bytes a query head), two fp32 numbers a query,
        and with fewer kv heads than query heads an fp32 dk and dv (by its source), to within a block of 128 tokens. Packed
        rows of many documents pad each to whole blocks: up to a quarter more, in rows of 32,768 tokens and more."""
        wide = -(-head_dim // 32) * 32
        summed = 2 * kv_heads * (keys or tokens) * wide * 4 if heads > kv_heads else 0
        return heads * tokens * (wide + 2) * 4 + summed

    def _runs(self, offsets):
        # Padding to blocks grows with the number of documents, hence the bound on those of one call. A deterministic order
        # of packed documents has not been tested.
        for row, starts in enumerate(offsets):
            packed = len(starts) - 1 > self.many and not torch.are_deterministic_algorithms_enabled()
            size = max(64, starts[-1] // 512) if packed else 1
            for first in range(0, len(starts) - 1, size):
                yield row, starts[first : first + size + 1]

    def _forward(self, q, k, v, scale, mask, out):
        from flash_attn.cute.interface import _flash_attn_fwd

        options = self._options(scale, mask, q.device) | {"return_lse": True}
        out = out if _is_aligned(out) else None
        if mask.documents is None:
            return _flash_attn_fwd(q, k, v, out=out, **options)[:2]
        got, lse = _flash_attn_fwd(q[0], k[0], v[0], out=None if out is None else out[0], **options)[:2]
        return got[None], lse[None]

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        from flash_attn.cute.interface import _flash_attn_bwd

        options = self._options(scale, mask, q.device) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        inputs = (q, k, v, out, grad, lse.contiguous())
        buffers = {name: t for name, t in (("dq", dq), ("dk", dk), ("dv", dv)) if _is_aligned(t)}
        if mask.documents is None:
            return _flash_attn_bwd(*inputs, **buffers, **options)[:3]
        got = _flash_attn_bwd(*(t[0] for t in inputs), **{name: t[0] for name, t in buffers.items()}, **options)[:3]
        return tuple(t[None] for t in got)

    @staticmethod
    def _options(scale, mask: Mask, device) -> dict:
        options = {"softmax_scale": scale, "causal": mask.window is None}
        if mask.window is not None:
            options |= {"window_size_left": mask.window - 1, "window_size_right": 0}
        if mask.softcap is not None:
            options["softcap"] = mask.softcap
        if mask.documents is not None:
            starts = torch.tensor(mask.documents, dtype=torch.int32, device=device)
            longest = max(end - start for start, end in zip(mask.documents, mask.documents[1:]))
            options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return options


class CudnnAttention(Kernel):
    """Sources: aten/src/ATen/native/cudnn/MHA.cpp, native/transformers/cuda/attention_backward.cu and sdp_utils.cpp of PyTorch.

    torch caches a backward plan by the shapes and strides of q, k and v alone, so out, its gradient and lse must always be
    handed over in one layout: a plan made for other strides would be run on them silently. It allocates its outputs: dq over
    out saves nothing while it runs, only afterwards. cuDNN takes no sequence of one token (pytorch/pytorch#138531); a packed
    document of one token goes through `ReferenceAttention`. Its backward is wrong, silently, where q has more than 2^31
    elements (measured: 65,536 tokens of 264 heads of 128), so calls are split by heads at `most` elements.
    """

    name = "cudnn"
    dq_over_out = True
    most = 2**30
    head_dims = (64, 96, 128, 192, 256)

    def declines(self, case: Case) -> str | None:
        if case.window or case.softcap:
            return "through torch it has no window and no softcap"
        if case.device != "cuda" or case.capability < (9, 0):
            return "it needs a GPU of compute capability 9.0 or newer"
        if case.dtype not in HALVES:
            return "it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        if case.head_dim > 128 and case.capability != (9, 0):
            return "through torch it takes head dims over 128 on compute capability 9.0 only"
        return None

    def backward_bytes(self, tokens: int, heads: int, kv_heads: int, head_dim: int, keys: int | None = None) -> int:
        """See `Kernel`. As long as the queries: dq, an fp32 sum of it and an fp32 number a query. As long as the keys: dk and dv and,
        with fewer kv heads than query heads, both of every query head, before they are added up (include/cudnn_frontend/node/
        scaled_dot_product_flash_attention.h of NVIDIA/cudnn-frontend). With as many keys as queries measured on an H200, to 1 KiB
        (experiments/results/kernel_blocks.jsonl); with other numbers by the source."""
        of_keys = kv_heads + (heads if heads > kv_heads else 0)
        return heads * tokens * (6 * head_dim + 4) + of_keys * (tokens if keys is None else keys) * 4 * head_dim

    def heads_at_once(self, rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int | None:
        """See `Kernel`; calls of at most `most` elements of q."""
        each = rows * tokens * head_dim
        if each * heads <= self.most:
            return None
        if each > self.most:
            raise ValueError(f"cudnn with {tokens} tokens of head dim {head_dim} in {rows} rows: its backward is right up to "
                             f"{self.most} elements a head at least, here are {each}; use fa4")
        return max(1, min(heads // kv_heads, self.most // each))

    def _forward(self, q, k, v, scale, mask, out):
        if q.shape[1] == 1:
            return ReferenceAttention()._forward(q, k, v, scale, mask, out)
        q, k, v = (t.transpose(1, 2) for t in _aligned(q, k, v))
        got, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal, False, scale=scale)
        return got.transpose(1, 2), lse.squeeze(-1)

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        if q.shape[1] == 1:
            return ReferenceAttention()._backward(grad, q, k, v, out, lse, scale, mask, dq, dk, dv)
        group, step = q.shape[2] // k.shape[2], self.heads_at_once(*q.shape[:3], k.shape[2], q.shape[3])
        if step is None:
            return self._dense_backward(grad, q, k, v, out, lse, scale)
        grads = [torch.empty_like(like) if buffer is None else buffer for buffer, like in zip((dq, dk, dv), (q, k, v))]
        for kv in range(k.shape[2]):
            sums: list = [None, None]
            for first in range(kv * group, (kv + 1) * group, step):
                part = slice(first, min(first + step, (kv + 1) * group))
                own = slice(kv, kv + 1)
                got = self._dense_backward(
                    grad[:, :, part], q[:, :, part], k[:, :, own], v[:, :, own], out[:, :, part], lse[:, part], scale
                )
                grads[0][:, :, part] = got[0]
                sums = [g if total is None else total.float().add_(g) for total, g in zip(sums, got[1:])]
            for grad_of, total in zip(grads[1:], sums):
                grad_of[:, :, own] = total
        return tuple(grads)

    def _dense_backward(self, grad, q, k, v, out, lse, scale):
        q, k, v, grad, out = (t.transpose(1, 2) for t in _aligned(q, k, v, grad.contiguous(), out.contiguous()))
        seed = offset = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, offset, None, None, None,
            q.shape[2], k.shape[2], 0.0, self.causal, scale=scale,
        )
        return tuple(g.transpose(1, 2) for g in grads)


@contextlib.contextmanager
def _deterministic_if_asked() -> Iterator[None]:
    """torch's flash backward warns, and runs in any order, where deterministic algorithms are asked for with warn_only."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class TorchFlashAttention(Kernel):
    """Sources: aten/src/ATen/native/transformers/cuda/attention_backward.cu and flash_attn/flash_api.cpp of PyTorch.

    On a GPU it copies out and its gradient where they are not contiguous, and wants lse contiguous. On CPU it takes any
    strides, and runs repeat bit for bit. It allocates its outputs, so dq over out saves nothing while it runs.
    """

    name = "flash"
    dq_over_out = True
    deterministic = "on request"
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
        if case.dtype not in HALVES:
            return "on a GPU it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims tested right forward and backward: {', '.join(map(str, self.head_dims))}"
        return None

    def _forward(self, q, k, v, scale, mask, out):
        if q.is_cuda:
            got, lse, *_ = aten._flash_attention_forward(
                *_aligned(q, k, v), None, None, q.shape[1], k.shape[1], 0.0, self.causal and mask.window is None, False,
                scale=scale, **self._window(mask.window),
            )
            return got, lse
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        got, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, self.causal, scale=scale)
        return got.transpose(1, 2), lse

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        if q.is_cuda:
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            with _deterministic_if_asked():
                return aten._flash_attention_backward(
                    *_aligned(grad, q, k, v, out), lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0,
                    self.causal and mask.window is None, state, state.new_zeros(()), scale=scale, **self._window(mask.window),
                )
        grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, self.causal, scale=scale
        )
        return tuple(g.transpose(1, 2) for g in grads)

    @staticmethod
    def _window(window) -> dict:
        return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class ReferenceAttention(Kernel):
    """The sum of grad*out is taken of all rows before the first of dq is written, so dq may be out."""

    name = "reference"
    writes_gradients = True
    dq_over_out = True
    deterministic = "always"
    chunk = 512

    def declines(self, case: Case) -> str | None:
        return None if case.dtype.is_floating_point else f"it does not take {case.dtype}"

    def _chunks(self, q, k, scale, window, softcap):
        """For each chunk of queries: its slice, the slice of the t keys it sees some of, scores [B, n, g, c, t] with
        hidden ones at -inf, and d(score)/d(scaled product) where a softcap makes that other than 1."""
        S, n = q.shape[1], k.shape[2]
        wide = _lse_dtype(q)
        grouped = q.unflatten(2, (n, -1))
        for start in range(0, S, self.chunk):
            end = min(start + self.chunk, S)
            first = 0 if window is None else max(0, start - window + 1)
            scores = torch.einsum("bcngd,btnd->bngct", grouped[:, start:end].to(wide), k[:, first:end].to(wide)) * scale
            slope = None
            if softcap is not None:
                bent = torch.tanh(scores / softcap)
                scores, slope = softcap * bent, 1 - bent.square()
            rows = torch.arange(start, end, device=q.device)[:, None]
            keys = torch.arange(first, end, device=q.device)[None, :]
            hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
            yield slice(start, end), slice(first, end), scores.masked_fill_(hidden, float("-inf")), slope

    def _forward(self, q, k, v, scale, mask, out):
        wide = _lse_dtype(q)
        out = torch.empty_like(q) if out is None else out
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide)
        for part, keys, scores, _ in self._chunks(q, k, scale, mask.window, mask.softcap):
            chunk_lse = scores.logsumexp(-1)
            probs = scores.sub_(chunk_lse[..., None]).exp_()
            got = torch.einsum("bngct,btnd->bcngd", probs, v[:, keys].to(wide))
            out[:, part] = got.flatten(2, 3).to(q.dtype)
            lse[:, :, part] = chunk_lse.flatten(1, 2)
        return out, lse

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        wide, n = _lse_dtype(q), k.shape[2]
        dq = torch.empty_like(q) if dq is None else dq
        dk_sum, dv_sum = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
        for part, keys, scores, slope in self._chunks(q, k, scale, mask.window, mask.softcap):
            probs = scores.sub_(lse[:, :, part].unflatten(1, (n, -1))[..., None]).exp_()
            g = grad[:, part].unflatten(2, (n, -1)).to(wide)
            dv_sum[:, keys] += torch.einsum("bngct,bcngd->btnd", probs, g)
            dprobs = torch.einsum("bcngd,btnd->bngct", g, v[:, keys].to(wide))
            dscores = probs * (dprobs - delta[:, :, part].unflatten(1, (n, -1))[..., None]) * scale
            if slope is not None:
                dscores *= slope
            dq[:, part] = torch.einsum("bngct,btnd->bcngd", dscores, k[:, keys].to(wide)).flatten(2, 3).to(q.dtype)
            dk_sum[:, keys] += torch.einsum("bngct,bcngd->btnd", dscores, q[:, part].unflatten(2, (n, -1)).to(wide))
        dk = dk_sum.to(k.dtype) if dk is None else dk.copy_(dk_sum)
        dv = dv_sum.to(v.dtype) if dv is None else dv.copy_(dv_sum)
        return dq, dk, dv


class FlashAttention3(Kernel):
    """Source: hopper/flash_attn_interface.py of Dao-AILab/flash-attention (commit 01afd16), the module that package
    flash-attn-3 installs. Older builds name the arguments otherwise and fail by a TypeError."""

    name = "fa3"
    untested = "not run by us on any machine"
    writes_gradients = True
    deterministic = "on request"
    head_dims = (64, 96, 128, 192, 256)

    def declines(self, case: Case) -> str | None:
        missing = _missing("flash-attn-3", "flash_attn_interface")
        if missing is not None:
            return missing
        if case.device != "cuda" or case.capability[0] != 9:
            return "it needs a GPU of compute capability 9"
        if case.dtype not in HALVES:
            return "it takes bfloat16 and float16"
        if case.head_dim not in self.head_dims:
            return f"head dims it has kernels for: {', '.join(map(str, self.head_dims))}"
        return None

    def _forward(self, q, k, v, scale, mask, out):
        from flash_attn_interface import _flash_attn_forward

        q, k, v = _aligned(q, k, v)
        return _flash_attn_forward(q, k, v, causal=mask.window is None, **_package_options(scale, mask))[:2]

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        from flash_attn_interface import _flash_attn_backward

        grad, q, k, v, out = _aligned(grad, q, k, v, out)
        grads = _aligned_buffers((dq, dk, dv), (q, k, v))
        _flash_attn_backward(
            grad, q, k, v, out, lse.contiguous(), **dict(zip(("dq", "dk", "dv"), grads)), is_causal=mask.window is None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_package_options(scale, mask),
        )
        return grads


class FlashAttention2(Kernel):
    """Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.3.post2. FlashAttention-4 installs into a package of the
    same name, without that module."""

    name = "fa2"
    untested = "not run by us on any machine"
    writes_gradients = True
    deterministic = "on request"

    def declines(self, case: Case) -> str | None:
        missing = _missing("flash-attn", "flash_attn.flash_attn_interface")
        if missing is not None:
            return missing
        if case.device != "cuda" or case.capability < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        if case.dtype not in HALVES:
            return "it takes bfloat16 and float16"
        if case.head_dim % 8 or case.head_dim > 256:
            return "it takes head dims that are multiples of 8, up to 256"
        return None

    def _forward(self, q, k, v, scale, mask, out):
        from flash_attn.flash_attn_interface import _flash_attn_forward

        q, k, v = _aligned(q, k, v)
        return _flash_attn_forward(
            q, k, v, dropout_p=0.0, causal=mask.window is None, alibi_slopes=None, return_softmax=False,
            **_package_options(scale, mask),
        )[:2]

    def _backward(self, grad, q, k, v, out, lse, scale, mask, dq, dk, dv):
        from flash_attn.flash_attn_interface import _flash_attn_backward

        grad, q, k, v, out = _aligned(grad, q, k, v, out)
        grads = _aligned_buffers((dq, dk, dv), (q, k, v))
        _flash_attn_backward(
            grad, q, k, v, out, lse.contiguous(), *grads, dropout_p=0.0, causal=mask.window is None, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_package_options(scale, mask),
        )
        return grads


KERNELS: tuple[Kernel, ...] = (
    FlashAttention4(), CudnnAttention(), TorchFlashAttention(), ReferenceAttention(), FlashAttention3(), FlashAttention2()
)
"""Fastest first, as measured on an H200; then those that are run only when asked for by name."""


def names() -> tuple[str, ...]:
    return tuple(kernel.name for kernel in KERNELS)


def described() -> str:
    """The names for a message, each with what has to be known about it: "fa4, ..., fa2 (not run by us on any machine)"."""
    return ", ".join(map(str, KERNELS))


def select(name: str, case: Case) -> Kernel:
    """The kernel of that name, or with "auto" the fastest that takes the case and has been tested.

    Raises:
        ValueError: the name is unknown, the kernel declines the case (it says why and which would run), or all decline it.
    """
    willing = [kernel for kernel in KERNELS if kernel.declines(case) is None]
    if name == "auto":
        tested = [kernel for kernel in willing if not kernel.untested]
        if not tested:
            raise ValueError(f"no kernel takes {case}: {'; '.join(f'{k}: {k.declines(case)}' for k in KERNELS)}")
        return tested[0]
    asked = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if asked is None:
        raise ValueError(f"kernel={name!r} is unknown: use auto, {described()}")
    reason = asked.declines(case)
    if reason is not None:
        raise ValueError(f"kernel={name!r} cannot run {case}: {reason}. These can: auto, {', '.join(map(str, willing))}")
    return asked


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _part(row: int, starts: tuple[int, ...]) -> tuple[slice, slice]:
    return slice(row, row + 1), slice(starts[0], starts[-1])


def _mask_of(starts: tuple[int, ...], window: int | None, softcap: float | None) -> Mask:
    return Mask(window, softcap, tuple(s - starts[0] for s in starts) if len(starts) > 2 else None)


def _check_buffer(name: str, buffer: torch.Tensor | None, like: torch.Tensor) -> None:
    if buffer is None:
        return
    have, want = ((list(t.shape), t.dtype, str(t.device)) for t in (buffer, like))
    if have != want:
        raise ValueError(f"buffer {name} is {have}, it must be {want}")


def _into(buffer: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """The buffer with the result in it; the result where there is no buffer."""
    if buffer is None:
        return result
    if buffer.data_ptr() != result.data_ptr():
        buffer.copy_(result)
    return buffer


def _is_aligned(t: torch.Tensor | None) -> bool:
    """Whether GPU kernels can use t as it lies: last stride 1, its start and other strides multiples of 16 bytes."""
    if t is None or t.stride(-1) != 1 or t.data_ptr() % 16:
        return False
    return all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])


def _aligned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _aligned_buffers(buffers, likes) -> list[torch.Tensor]:
    return [buffer if _is_aligned(buffer) else torch.empty_like(like) for buffer, like in zip(buffers, likes)]


def _package_options(scale: float, mask: Mask) -> dict:
    """Options as FlashAttention-2 and -3 name them, forward and backward; -1 leaves a side of the window open."""
    left, right = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    return {"softmax_scale": scale, "window_size_left": left, "window_size_right": right, "softcap": mask.softcap or 0.0}


def _missing(package: str, module: str) -> str | None:
    """Why the module of a package cannot be had, or None. Imports its parent packages, not itself."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            return f"the package {package} cannot be imported: {error}"
        found = False
    except ImportError as error:
        return f"the package {package} cannot be imported: {error}"
    return None if found else f"the package {package} is not installed"
