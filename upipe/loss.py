"""The loss of a sharded sequence, and the one place that knows how its gradient must be scaled.

A rank has the token losses of its own tokens. The wanted gradient is that of (sum over every token of the accumulation
window, all ranks) / (valid tokens of the window, all ranks), which is the unsharded loss of one big batch. DeepSpeed
averages gradients over ranks in one way or another on top, so the local sum is multiplied by what that takes away.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

IGNORE = -100


def gradient_scale(engine) -> float:
    """What this engine or wrapper divides the sum over ranks of local gradients by, besides accumulation steps.

    DeepSpeed: world size / sp in ZeRO 0, 1, 2 and in ZeRO-3 without reduce_scatter; world size in ZeRO-3 with
    reduce_scatter (deepspeed 0.19.8, stage3.py `__avg_scatter_grads`). DistributedDataParallel and fully_shard: world
    size. 1 for a bare module, whose gradients the caller sums over ranks.
    """
    import deepspeed

    world = dist.get_world_size()
    if isinstance(engine, (DistributedDataParallel, FSDPModule)):
        return float(world)
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        return 1.0
    if engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter():
        return float(world)
    return world / engine.sequence_parallel_size


def token_loss_sum(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropy over the valid tokens, fp32 (fp64 for fp64 logits); zero, with a graph, where none is valid.

    Args:
        logits: [B, L, V], any float dtype.
        shift_labels: [B, L] int64, already shifted: the token that position predicts, or -100.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class _ReportedLoss(torch.autograd.Function):
    """Value: the loss over all ranks. Gradient: that of the local sum times a factor."""

    @staticmethod
    def forward(ctx, local_sum, value, factor):
        ctx.save_for_backward(factor)
        ctx.dtype = local_sum.dtype
        return value

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return (grad * factor).to(ctx.dtype), None, None


def global_loss(
    local_sum: torch.Tensor, num_valid: torch.Tensor, accumulation: int, scale: float, group=None
) -> torch.Tensor:
    """Turn a rank's local sum into the loss every rank reports and backpropagates.

    Args:
        local_sum: 0-d, sum of this rank's token losses in this micro-batch.
        num_valid: 0-d integer tensor, valid tokens of the accumulation window over all ranks. Zero counts as one.
        accumulation: micro-batches in the window.
        scale: `gradient_scale(engine)`.
        group: ranks that hold the batch, all of them by default.

    Returns:
        0-d: accumulation * sum over ranks / num_valid. Its mean over the window's micro-batches is the window's mean
        token loss. Divided by the accumulation steps before backward, as DeepSpeed's `backward` does by itself, it gives
        that mean's gradient.
    """
    count = num_valid.clamp(min=1).to(local_sum.dtype)
    total = local_sum.detach().clone()
    dist.all_reduce(total, group=group)
    factor = accumulation / count
    return _ReportedLoss.apply(local_sum, total * factor, factor * scale)
