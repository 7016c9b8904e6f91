"""torch's own context parallelism (torch.distributed.tensor.experimental.context_parallel, a prototype there) as an attention.

Its load balancing is the zigzag order of `layouts.Zigzag`, in which the tokens already are, so nothing is resharded. What it
replaces in torch while it is on is on for a call, forward or backward, alone. k and v go round the ranks whole, by torch's
default in one all-gather; out and gradients are merged in fp32. On the CPU torch has no such attention.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from upipe import reference
from upipe.methods.layouts import Zigzag
from upipe.preflight import PreflightError

PROBE = 256
"""Tokens a rank of the probe of `Native.refuse_if_wrong`."""
BOUND = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Most relative error of out, dq, dk and dv there: rounding gives less than a third of it."""
_KEPT: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Ranks -> a group over them that lives as long as torch.distributed does."""

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Name of a kernel of `upipe.kernels` -> that kernel as torch's context_parallel calls it."""


def check_device(device: str) -> None:
    """Raises ValueError on a CPU."""
    if device != "cuda":
        raise ValueError(
            f"method=native on {device}: torch's context_parallel has ring attention for its GPU kernels alone; use GPUs, or "
            "method=ring, which is the same order of tokens and runs anywhere"
        )


def check_kernel(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernel={name!r} with method=native: torch's context_parallel runs {', '.join(BACKENDS)}; use one, or auto")


class Native:
    """context_parallel over two ranks or more. Collective over the world where these ranks are new.

    Args:
        ranks: of the world, in order.
    """

    def __init__(self, ranks: list[int], device_type: str) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.group, self.device_type = _kept_group(tuple(ranks)), device_type
        self.mesh = DeviceMesh.from_group(self.group, device_type, mesh=torch.tensor(ranks))
        self._errors: dict[tuple, dict[str, float]] = {}

    @contextmanager
    def on(self, like: torch.Tensor, kernel: str):
        """While inside, torch's scaled_dot_product_attention is that of all ranks' tokens, by this kernel."""
        from torch.distributed.tensor.experimental import context_parallel

        # It takes a device and whether to balance from a buffer that it shards; this one nobody reads.
        buffer = torch.zeros(2 * self.mesh.size(), device=like.device)
        with context_parallel(self.mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
            with sdpa_kernel(BACKENDS[kernel]):
                yield

    def attend(self, q, k, v, kernel: str, scale: float) -> torch.Tensor:
        """q [B, L, H, d], k and v [B, L, K, d] in zigzag order -> [B, L, H, d]."""
        return _Native.apply(q, k, v, self, kernel, scale, torch.is_grad_enabled())

    def errors(self, kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
        """The largest relative error over ranks of out, dq, dk and dv of a small attention with GQA, against fp32. Collective."""
        key = kernel, head_dim, dtype
        if key not in self._errors:
            size, rank = self.mesh.size(), dist.get_rank(self.group)
            length, maker = PROBE * size, torch.Generator().manual_seed(0)
            pieces = Zigzag(size).pieces(length, rank)
            mine = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
            # The first call may come without gradients, or in a checkpointed layer's forward: that neither turns them off here nor
            # counts what is saved. Nor may tensors be of inference mode, which autograd takes none of.
            with torch.inference_mode(False), torch.enable_grad(), _saving_itself():
                whole = [torch.randn(1, length, heads, head_dim, generator=maker).to(dtype) for heads in (4, 2, 2, 4)]
                *inputs, grad = (t[:, mine].to(self.device_type) for t in whole)
                q, k, v = (t.to(self.device_type).float().requires_grad_() for t in whole[:3])
                out, _ = reference.attention(q, k, v, head_dim**-0.5)
                wanted = [out, *torch.autograd.grad(out, (q, k, v), whole[3].to(self.device_type).float())]
                inputs = [t.requires_grad_() for t in inputs]
                out = self.attend(*inputs, kernel, head_dim**-0.5)
                got = [out, *torch.autograd.grad(out, inputs, grad)]
            with torch.no_grad():
                far = torch.stack([(g.float() - w[:, mine]).norm() / w[:, mine].norm() for g, w in zip(got, wanted)])
            far = far.nan_to_num(float("inf"))
            dist.all_reduce(far, op=dist.ReduceOp.MAX, group=self.group)
            self._errors[key] = dict(zip(("out", "dq", "dk", "dv"), far.tolist()))
        return self._errors[key]

    def wrong(self, kernel: str, head_dim: int, dtype: torch.dtype) -> bool:
        return max(self.errors(kernel, head_dim, dtype).values()) > BOUND[dtype]

    def refuse_if_wrong(self, kernel: str, head_dim: int, dtype: torch.dtype) -> None:
        """Raises PreflightError on every rank, naming the errors, where torch's attention is not exact here. Collective."""
        errors = self.errors(kernel, head_dim, dtype)
        if self.wrong(kernel, head_dim, dtype):
            told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
            raise PreflightError(
                f"method=native, kernel={kernel}: torch {torch.__version__}'s context_parallel is wrong here. On {PROBE} tokens a rank, "
                f"head_dim={head_dim}, {str(dtype).removeprefix('torch.')}, the relative errors are {told}; {BOUND[dtype]:g} is allowed. "
                f"Use another kernel of {', '.join(BACKENDS)}, or method=ring, which has the same order of tokens"
            )


def _kept_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that is never given back: torch's DTensor remembers a mesh beyond the model that it was made for, and takes one
    over the same ranks for it. Collective over the world at the first call for these ranks."""
    if ranks not in _KEPT:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, ranks)
        for members in sorted(set(every)):
            group = dist.new_group(list(members))
            if members == ranks:
                _KEPT[ranks] = group
    return _KEPT[ranks]


def _attention(native: Native, kernel: str, scale: float, q, k, v) -> tuple[list[torch.Tensor], torch.Tensor]:
    """-> leaves [B, heads, L, d] of q, k and v, and torch's attention of them with its graph."""
    # Copies also where one head or one token is contiguous as it is: a change of it in place would go unseen under `_saving_itself`.
    inner = [t.detach().transpose(1, 2).clone(memory_format=torch.contiguous_format).requires_grad_() for t in (q, k, v)]
    # With gradients in any case: only then do torch's kernels answer with the log-sum-exp that results are merged by.
    with native.on(q, kernel), torch.enable_grad():
        out = torch.nn.functional.scaled_dot_product_attention(*inner, is_causal=True, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
    return inner, out


def _saving_itself() -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, autograd saves tensors whatever hooks are set outside. Detached: an output that is saved as it is keeps its own graph."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)


def _saved_tensors_are_hooked() -> bool:
    """Whether what autograd saves now is replaced, as in a layer that torch checkpoints without re-entering autograd."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


class _Native(torch.autograd.Function):
    """Holds its attention's graph until backward. Where saved tensors are hooked, it saves q, k and v and computes that attention
    again in backward instead: a held graph is either not freed by checkpointing, or has its own tensors replaced, and then the
    whole layer would be computed again within `Native.on`, which does not nest."""

    @staticmethod
    def forward(ctx, q, k, v, native: Native, kernel: str, scale: float, enabled: bool):
        needed = enabled and any(ctx.needs_input_grad)
        again = needed and _saved_tensors_are_hooked()
        with _saving_itself():
            inner, out = _attention(native, kernel, scale, q, k, v)
        ctx.of = native, kernel, scale
        ctx.held = (inner, out) if needed and not again else None
        ctx.save_for_backward(*((q, k, v) if again else ()))
        return out.detach().transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        held, ctx.held, saved = ctx.held, None, ctx.saved_tensors
        if held is None and not saved:
            raise RuntimeError("method=native holds its graph once: compute it again for a second backward (no retain_graph)")
        inner, out = held or _attention(*ctx.of, *saved)
        native, kernel, _ = ctx.of
        with native.on(grad, kernel), torch.enable_grad():
            grads = torch.autograd.grad(out, inner, grad.transpose(1, 2).contiguous())
        return *(g.transpose(1, 2) for g in grads), *(None,) * 4
