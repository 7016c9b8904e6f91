"""What stands for other ranks, the host and torch's GPU operators when a baseline's memory is simulated (`upipe.simulate`).

The methods' own code runs, DeepSpeed's class and torch's ring templates included. What is exchanged is only made, what goes to the
host is not counted on the device, a kernel holds what `SimulatedAttention` holds. Not seen: memory that a copy stream keeps a
little longer than its last use.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.autograd.function import once_differentiable

from upipe import heads, host
from upipe.live import LiveStorages, SimulatedAttention
from upipe.methods import apply, fpdt, native, shelf, ulysses


class Group:
    """A process group of which only this rank is there."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.ranks, self.mine, self.group_name = size, rank, "simulated"


_DIST = SimpleNamespace(
    ProcessGroup=Group, get_world_size=lambda group: group.ranks, get_rank=lambda group=None: 0 if group is None else group.mine,
    get_process_group_ranks=lambda group: list(range(group.ranks)), all_gather=lambda *args, **options: None,
)  # fmt: skip


class Pool:
    """Stands for `host.pool()`: memory that the device's count leaves out. Attributes: held, most: bytes."""

    def __init__(self) -> None:
        self.held = self.most = 0
        self.live: LiveStorages | None = None
        self._given: list[torch.Tensor] = []  # alive, or another storage may be known by the name of one that is gone

    def take(self, shape, dtype, pinned=False, memory=None) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            made = torch.empty(shape, dtype=dtype, device="meta")
        if self.live is not None:
            self.live.know(made)
        self.held += made.nbytes
        self.most = max(self.most, self.held)
        return made

    def give(self, memory: torch.Tensor) -> None:
        self.held -= memory.nbytes
        self._given.append(memory)


class GpuKernel:
    """The name of a kernel that torch's context_parallel calls itself."""

    def __init__(self, of: SimulatedAttention, name: str) -> None:
        self.of, self.name = of, name


class SimulatedNative(native.Native):
    """torch's context_parallel as its source has it, with the kernel's stand-in for the operator.

    Args:
        kernel: allocates for a call. rank, size: of the ring.
    """

    def __init__(self, kernel: SimulatedAttention, rank: int, size: int) -> None:
        self.kernel, self.group = kernel, Group(size, rank)

    def errors(self, kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
        """None: there is nothing to compute here."""
        return {"out": 0.0}

    @contextlib.contextmanager
    def on(self, like: torch.Tensor, kernel: str):
        def sdpa(q, k, v, is_causal=False, scale=None, enable_gqa=False):
            return _TorchRing.apply(q, k, v, self, scale)

        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", sdpa), _torch_ring(self.group):
            yield

    def forward(self, query, key, value, is_causal=False, scale=None, **_):
        out, lse = self.kernel.forward(*(t.transpose(1, 2) for t in (query, key, value)), scale)
        return out.transpose(1, 2), lse

    def backward(self, grad_out, query, key, value, out, logsumexp, is_causal=False, scale=None, **_):
        grads = self.kernel.backward(*(t.transpose(1, 2) for t in (grad_out, query, key, value, out)), logsumexp, scale)
        return tuple(g.transpose(1, 2) for g in grads)


def _templates():
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


@contextlib.contextmanager
def _torch_ring(group: Group):
    """torch's ring templates, alone on a rank."""
    templates = _templates()
    permute = SimpleNamespace(
        permute_tensor=lambda t, *args: torch.empty_like(t),
        all_gather_single=lambda t, gather_dim, group: t.new_empty(group.ranks * t.numel()),
        all_gather_tensor=lambda t, gather_dim, group: t.new_empty(group.ranks * t.numel()),
    )
    with mock.patch.multiple(templates, dist=_DIST, ft_c=permute, _maybe_wait=lambda t: t):
        yield


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, native: SimulatedNative, scale):
        out, lse = _templates()._templated_ring_attention(native.group, 2, native.forward, q, k, v, is_causal=True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.native, ctx.scale = native, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        ring = _templates()._templated_ring_attention_backward
        grads = ring(ctx.native.group, 2, ctx.native.backward, grad, "grad_out", q, k, v, out, lse, True, scale=ctx.scale)
        return *grads[:3], None, None


def _received(flat, send_sizes, recv_sizes, group):
    return flat.new_empty(sum(recv_sizes))


@contextlib.contextmanager
def without_other_ranks(kernel, pool: Pool, groups, merge, ring_rank: int):
    """While inside `apply_method` puts a baseline on a model as if the other ranks were there.

    Args:
        kernel: stands for the attention kernel. groups: in place of `SequenceParallelGroups`. merge: in place of `ring.merge_`.
    """
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.sequence import layer as sequence_layer

    patches = [
        mock.patch.multiple(apply, init_distributed=lambda: None, SequenceParallelGroups=groups, dist=_DIST, node_ranks=lambda: None),
        mock.patch.object(native, "check_device", lambda device: None),
        mock.patch.object(native, "Native", lambda ranks, device: SimulatedNative(kernel, ring_rank, len(ranks))),
        mock.patch.object(heads, "all_to_all", _received),
        mock.patch.object(fpdt, "merge_", merge),
        mock.patch.object(shelf, "host", SimpleNamespace(pool=lambda: pool, CHUNKS=host.CHUNKS)),
        mock.patch.object(ulysses, "dist", _DIST),
        mock.patch.multiple(ulysses_sp, dist=_DIST),
        mock.patch.multiple(sequence_layer, dist=_DIST),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
