"""torch's own context parallelism (torch.distributed.tensor.experimental.context_parallel, a prototype there) as an attention.

Its load balancing is the zigzag order of `layouts.Zigzag`, in which the tokens already are, so nothing is resharded. What it
replaces in torch while it is on is on for a call, forward or backward, alone. k and v go round the ranks whole, by torch's
default in one all-gather; out and gradients are merged in fp32. On the CPU torch has no such attention.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    """context_parallel over a process group, which has to have two ranks or more.

    Args:
        ranks: world ranks of the group in order.
    """

    def __init__(self, group, ranks: list[int], device_type: str) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.mesh = DeviceMesh.from_group(group, device_type, mesh=torch.tensor(ranks))

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


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, native: Native, kernel: str, scale: float, enabled: bool):
        needed = enabled and any(ctx.needs_input_grad)
        # With gradients in any case: only then do torch's kernels answer with the log-sum-exp that results are merged by.
        inner = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
        with native.on(q, kernel), torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*inner, is_causal=True, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
        ctx.native, ctx.kernel = native, kernel
        ctx.inner, ctx.out = (inner, out) if needed else (None, None)
        return out.detach().transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inner, out, ctx.inner, ctx.out = ctx.inner, ctx.out, None, None
        if out is None:
            raise RuntimeError("method=native holds its graph once: compute it again for a second backward (no retain_graph)")
        with ctx.native.on(grad, ctx.kernel), torch.enable_grad():
            grads = torch.autograd.grad(out, inner, grad.transpose(1, 2).contiguous())
        return *(g.transpose(1, 2) for g in grads), *(None,) * 4
