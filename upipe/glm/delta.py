"""The delta rule of KDA on one device: its definition, the same in matrix products and linear memory, and what may run it.

The recurrence of one head, state M [K, V] in fp32, as in transformers' `recurrent_kimi_delta_attention`:

    M <- diag(exp g_t) M;  M <- M + beta_t k_t (v_t - k_t^T M);  o_t = M^T q_t / sqrt(K)

with q and k scaled to length 1. It takes tokens in the order of the sequence.

B batch, S tokens, H heads, K and V widths of keys and values, n heads of a group, d head dim.
Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from upipe.kernels import Offsets
from upipe.loss import wide_dtype
from upipe.preflight import PreflightError

CHUNK = 16
"""Tokens solved together. Decays are taken relative to the chunk's middle: at a log-decay of -5 a token no factor leaves
exp(+-40), where 64 tokens would overflow fp32."""

STRONGEST = -10.0
"""The strongest log-decay a token for which those factors stay inside fp32."""

SEGMENT_CHUNKS = 64
"""Chunks between two states that are kept for backward: at K = V = 128, 64 bytes a token and head."""


def recurrent_kda(q, k, v, g, beta, offsets: Offsets | None = None) -> torch.Tensor:
    """The definition, token by token in fp64; shapes as `chunk_kda`'s. For tests."""
    dtype = q.dtype
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    firsts = [set(starts[:-1]) for starts in offsets or ((0, q.shape[1]),) * q.shape[0]]
    rows = []
    for b, first in enumerate(firsts):
        out = []
        for t in range(q.shape[1]):
            if t in first:
                state = q.new_zeros(*k.shape[2:], v.shape[-1])
            state = state * g[b, t].exp()[..., None]
            read = torch.einsum("hkv,hk->hv", state, k[b, t])
            state = state + torch.einsum("hk,hv->hkv", k[b, t], (v[b, t] - read) * beta[b, t][:, None])
            out.append(torch.einsum("hkv,hk->hv", state, q[b, t]))
        rows.append(torch.stack(out))
    return torch.stack(rows).to(dtype)


def chunk_kda(q, k, v, g, beta, offsets: Offsets | None = None, segment_chunks: int = SEGMENT_CHUNKS) -> torch.Tensor:
    """KDA in matrix products, in memory linear in S, forward and backward. Computes in fp32 (fp64 for fp64).

    Kept for backward: the inputs, and one state every `segment_chunks` chunks. Backward replays a segment at a time.

    Args:
        q, k: [B, S, H, K], not yet normalised. v: [B, S, H, V].
        g: [B, S, H, K] log-decays, in [STRONGEST, 0]. beta: [B, S, H].
        offsets: for each row (0, s1, ..., S): where its documents begin; the state is zero there.

    Returns:
        [B, S, H, V], q's dtype.

    Raises:
        ValueError: a log-decay below STRONGEST, which would overflow.
    """
    if g.device.type != "meta" and g.numel() and g.amin() < STRONGEST:
        raise ValueError(f"a log-decay of {g.amin():.3g} a token is below {STRONGEST:g}, where chunks of {CHUNK} tokens overflow fp32")
    B, S = q.shape[:2]
    if offsets is not None:  # every row is documents of one long row
        flat = (q, k, v, g, beta)
        starts = tuple(b * S + s for b, row in enumerate(offsets) for s in row[:-1]) + (B * S,)
        return _ChunkKDA.apply(starts, segment_chunks, *(t.reshape(1, B * S, *t.shape[2:]) for t in flat)).view(B, S, *v.shape[2:])
    return _ChunkKDA.apply((0, S), segment_chunks, q, k, v, g, beta)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _plan(starts: tuple[int, ...]) -> tuple[torch.Tensor, list[bool]]:
    """Chunks that begin with each document: the token of each slot, -1 in the empty slots of a document's last chunk (on the
    host), and whether a chunk is its document's first."""
    slots, first = [], []
    for begin, end in zip(starts, starts[1:]):
        chunks = -(-(end - begin) // CHUNK)
        at = torch.arange(begin, begin + chunks * CHUNK)
        slots.append(at.masked_fill_(at >= end, -1))
        first += [i == 0 for i in range(chunks)]
    return torch.cat(slots), first


def _segment(q, k, v, g, beta, state, first: list[bool]):
    """Some chunks: q, k, g [B, N*C, H, K], v [B, N*C, H, V], beta [B, N*C, H], state [B, H, K, V] -> out like v, state.

    With G the decay summed inside the chunk: A[i, j] = beta_i (k_i e^G_i) . (k_j e^-G_j) below the diagonal, and
    (I + A) [U | W] = [beta v | beta k e^G]. Then what is written is U - W M.
    """
    B, T, H, K = k.shape
    N = T // CHUNK
    q, k, v, g, beta = (t.to(state.dtype).view(B, N, CHUNK, H, -1).permute(0, 3, 1, 2, 4) for t in (q, k, v, g, beta))
    q, k = _unit(q) * K**-0.5, _unit(k)
    G = g.cumsum(-2)
    middle = G[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    up, down = (G - middle).exp(), (middle - G).exp()
    whole = G.exp()
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu()
    k_down = (k * down).transpose(-1, -2)
    A = ((k * up * beta) @ k_down).masked_fill(later, 0.0)
    solved = torch.linalg.solve_triangular(A, torch.cat((beta * v, beta * k * whole), -1), upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], K), -1)
    seen = ((q * up) @ k_down).masked_fill(later.triu(1), 0.0)
    q_whole, k_end, end = q * whole, k * (G[..., -1:, :] - G).exp(), whole[..., -1, :, None]
    out = []
    for n in range(N):
        if first[n]:
            state = torch.zeros_like(state)
        wrote = U[:, :, n] - W[:, :, n] @ state
        out.append(q_whole[:, :, n] @ state + seen[:, :, n] @ wrote)
        state = end[:, :, n] * state + k_end[:, :, n].transpose(-1, -2) @ wrote
    return torch.stack(out, 2).permute(0, 2, 3, 1, 4).reshape(B, T, H, -1), state


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, starts, segment_chunks, q, k, v, g, beta):
        tensors = q, k, v, g, beta
        slots, first = _plan(starts)
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=wide_dtype(q.dtype))
        out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
        states = []
        for at in range(0, len(first), segment_chunks):
            states.append(state)
            mine = slots[at * CHUNK : (at + segment_chunks) * CHUNK]
            part, state = _segment(*_taken(tensors, mine), state, first[at : at + segment_chunks])
            _put(out, mine, part)
        ctx.plan, ctx.segment_chunks = (slots, first), segment_chunks
        ctx.save_for_backward(*tensors, *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        slots, first = ctx.plan
        tensors, states = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        d_state = torch.zeros_like(states[0])
        for i in reversed(range(len(states))):
            at = i * ctx.segment_chunks
            mine = slots[at * CHUNK : (at + ctx.segment_chunks) * CHUNK]
            leaves = [t.detach().requires_grad_() for t in (*_taken(tensors, mine), states[i])]
            with torch.enable_grad():
                outs = _segment(*leaves, first[at : at + ctx.segment_chunks])
            (incoming,) = _taken((grad,), mine)
            *got, d_state = torch.autograd.grad(outs, leaves, (incoming.to(outs[0].dtype), d_state), materialize_grads=True)
            del outs, leaves
            for into, part in zip(grads, got):
                _put(into, mine, part)
        return None, None, *grads


def _taken(tensors, slots: torch.Tensor) -> list[torch.Tensor]:
    """The tokens of slots; zeros in empty ones, which neither read, write nor decay."""
    index, empty = (t.to(tensors[0].device) for t in (slots.clamp(min=0), slots < 0))
    return [t.index_select(1, index).masked_fill_(empty.view(1, -1, *[1] * (t.dim() - 2)), 0.0) for t in tensors]


def _put(into: torch.Tensor, slots: torch.Tensor, part: torch.Tensor) -> None:
    """Slots back to their tokens."""
    real = (slots >= 0).nonzero()[:, 0]
    tokens, real = (t.to(into.device) for t in (slots[real], real))
    into.index_copy_(1, tokens, part.index_select(1, real).to(into.dtype))


def log_decay(f: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """g [B, S, n, d] fp32 of `Glm5NextTextForgetGate`. f: [B, S, n, d]; a_log: [n]; dt_bias: [n*d]."""
    wide = wide_dtype(f.dtype)
    rate = a_log.to(wide).exp()[:, None]
    f = f.to(wide) + dt_bias.to(wide).view(f.shape[2:])
    return lower_bound * torch.sigmoid(rate * f) if lower_bound is not None else -rate * softplus(f)


@dataclass(frozen=True)
class KDAKernel:
    """One way to run the delta rule."""

    name: str

    def declines(self, device: str, lower_bound: float | None) -> str | None:
        """Why not, and what would work; None where it runs."""
        raise NotImplementedError

    def __call__(self, q, k, v, f, beta, a_log, dt_bias, lower_bound: float | None, offsets: Offsets | None) -> torch.Tensor:
        """q, k, v, f: [B, S, n, d]; beta: [B, S, n]; a_log: [n]; dt_bias: [n*d] -> [B, S, n, d], differentiable."""
        raise NotImplementedError


class TorchKDA(KDAKernel):
    """`chunk_kda`, on any device."""

    def declines(self, device, lower_bound):
        if lower_bound is None or lower_bound < STRONGEST:
            return f'linear_lower_bound={lower_bound}: in fp32 it must be at least {STRONGEST:g}; use kernel="fla" on a GPU'
        return None

    def __call__(self, q, k, v, f, beta, a_log, dt_bias, lower_bound, offsets):
        return chunk_kda(q, k, v, log_decay(f, a_log, dt_bias, lower_bound), beta, offsets)


class FlaKDA(KDAKernel):
    """`chunk_kda` of flash-linear-attention, with the gate and the unit length of q and k inside the kernel."""

    def declines(self, device, lower_bound):
        if device != "cuda":
            return f'fla needs a GPU and tensors are on {device}: use kernel="torch"'
        if importlib.util.find_spec("fla") is None:
            return 'flash-linear-attention is not installed: pip install flash-linear-attention, or use kernel="torch"'
        if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
            return f'linear_lower_bound={lower_bound}: fla serves -5 to 0; use kernel="torch"'
        return None

    def __call__(self, q, k, v, f, beta, a_log, dt_bias, lower_bound, offsets):
        from fla.ops.kda import chunk_kda as fla_chunk_kda

        B, S = q.shape[:2]
        cu = None
        if offsets is not None:
            starts = [b * S + s for b, row in enumerate(offsets) for s in row[:-1]] + [B * S]
            cu = torch.tensor(starts, device=q.device)
            q, k, v, f, beta = (t.reshape(1, B * S, *t.shape[2:]) for t in (q, k, v, f, beta))
        out, _ = fla_chunk_kda(
            q, k, v, g=f, beta=beta.float(), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=a_log.float(),
            dt_bias=dt_bias.float(), safe_gate=lower_bound is not None, lower_bound=lower_bound, cu_seqlens=cu,
        )  # fmt: skip
        return out.view(B, S, *out.shape[2:])


KERNELS: dict[str, KDAKernel] = {kernel.name: kernel for kernel in (TorchKDA("torch"), FlaKDA("fla"))}


def check_kernel_name(name: str) -> None:
    """Raises PreflightError where there is no such kernel."""
    if name != "auto" and name not in KERNELS:
        raise PreflightError(f"KDA kernel {name!r} is unknown: use auto, {', '.join(KERNELS)}")


def select_kernel(name: str, device: str, lower_bound: float | None) -> KDAKernel:
    """The kernel to use; "auto" is fla on a GPU and torch elsewhere, never another because one is missing.

    Raises:
        PreflightError: it is unknown or cannot run this, and what can.
    """
    check_kernel_name(name)
    asked = ("fla" if device == "cuda" else "torch") if name == "auto" else name
    reason = KERNELS[asked].declines(device, lower_bound)
    if reason is not None:
        raise PreflightError(f"KDA kernel {asked!r}: {reason}")
    return KERNELS[asked]
