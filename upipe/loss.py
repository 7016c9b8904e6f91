"""The loss of a sharded sequence, and the one place that knows how its gradient must be scaled.

A rank has the token losses of its own tokens. The wanted gradient is that of (sum over every token of the accumulation
window, all ranks) / (valid tokens of the window, all ranks), which is the unsharded loss of one big batch. DeepSpeed
averages gradients over ranks in one way or another on top, so the local sum is multiplied by what that takes away.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
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
    return _CrossEntropySum.apply(logits.flatten(0, 1), shift_labels.flatten())


class _CrossEntropySum(torch.autograd.Function):
    """In chunks of rows, so that the logits never exist in fp32 as a whole. logits: [N, V], labels: [N]."""

    CHUNK_ELEMENTS = 1 << 26

    @staticmethod
    def chunks(logits, labels):
        """Yield for each chunk: its slice, logits in fp32 (fp64), labels with 0 where ignored, which rows are valid."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = max(1, _CrossEntropySum.CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            valid = labels[part] != IGNORE
            yield part, logits[part].to(wide), labels[part].where(valid, 0)[:, None], valid

    @staticmethod
    def forward(ctx, logits, labels):
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for _, x, target, valid in _CrossEntropySum.chunks(logits, labels):
            token_losses = -x.log_softmax(-1).gather(1, target)[:, 0]
            total += token_losses.where(valid, 0).sum(dtype=torch.float64)
        ctx.save_for_backward(logits, labels)
        return total.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, labels = ctx.saved_tensors
        out = torch.empty_like(logits)
        for part, x, target, valid in _CrossEntropySum.chunks(logits, labels):
            # Not exp(x - logsumexp): rounding the sum once for a whole row would tilt its gradient.
            probs = x.log_softmax(-1).exp_()
            probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))
            out[part] = probs.mul_(torch.where(valid, grad, 0)[:, None])
        return out, None


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
