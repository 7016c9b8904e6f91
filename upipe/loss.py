"""The loss of a sharded sequence, and the one place that knows how its gradient must be scaled.

A rank has the token losses of its own tokens. The wanted gradient is that of (sum over every token of the accumulation
window, all ranks) / (valid tokens of the window, all ranks), which is the unsharded loss of one big batch. DeepSpeed
averages gradients over ranks in one way or another on top, so the local sum is multiplied by what that takes away.

The local sum comes from logits (`token_loss_sum`), or from hidden states and the head's weight without the logits ever
existing as a whole (`tiled_loss_sum`). Symbols: N rows (tokens of the batch), D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

IGNORE = -100
LOSS_TILE_TOKENS = 2048     # rows of logits at a time: fp32 and bf16 of them are 1.5 GiB at a vocabulary of 128K
IMPLEMENTATIONS = ("tiled", "liger")


@dataclass(frozen=True)
class LossTerms:
    """What a token's loss is, besides cross-entropy.

    Args:
        softcap: c, bends logits to c * tanh(logits / c) (Gemma 2's `final_logit_softcapping`); None: not.
        z_loss: factor on the square of the log-sum-exp of the logits, added to each valid token's loss.
        label_smoothing: as in torch.nn.functional.cross_entropy, from 0 up to 1.

    Raises:
        ValueError: a value outside of its range.
    """

    softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be positive, or None for no cap")
        if not self.z_loss >= 0:
            raise ValueError(f"z_loss={self.z_loss} must not be negative; 0 turns it off")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be from 0 to 1")


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


def token_loss_sum(logits: torch.Tensor, shift_labels: torch.Tensor, terms: LossTerms | None = None) -> torch.Tensor:
    """Sum of token losses over the valid tokens, fp32 (fp64 for fp64 logits); zero, with a graph, where none is valid.

    Args:
        logits: [B, L, V], any float dtype; left as they are.
        shift_labels: [B, L] int64, already shifted: the token that position predicts, or -100.
        terms: what is added to cross-entropy; nothing by default. A model with a final softcap gives capped logits already.
    """
    return _CrossEntropySum.apply(terms or LossTerms(), logits.flatten(0, 1), shift_labels.flatten())


def tiled_loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    shift_labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    terms: LossTerms | None = None,
    tile_tokens: int = LOSS_TILE_TOKENS,
    fp32_grads: bool = True,
    reuse_hidden: bool = False,
    implementation: str = "tiled",
) -> torch.Tensor:
    """`token_loss_sum` of the logits hidden @ weight^T + bias, which exist for `tile_tokens` rows at a time.

    Gradients are computed in the forward pass, while a tile's logits exist, and multiplied by the incoming gradient in
    the backward pass: three matrix products a tile in place of the four of a recomputation, and the same peak, since
    nothing comes between the forward and the backward of a loss. Held until backward: the gradient of hidden (as large
    as it) and of the weight. hidden itself is not kept. Without gradients (torch.no_grad) neither is made.

    Matrix products take their operands in the dtype given and accumulate in fp32; softcap, softmax and losses are fp32
    (fp64 for fp64). On a GPU the logits come out in fp32; on a CPU bf16 products are rounded to bf16 first. There is no
    fp32 copy of the weight.

    Args:
        hidden: [B, L, D], what the head takes.
        weight, bias: [V, D] and [V] of the head, in hidden's dtype. A weight shared with the embedding gets its gradient
            from each use, as with logits. Under ZeRO-3 call this inside the head's forward (`tiled.apply_tiling` does).
        shift_labels: [B, L] int64, already shifted; -100 is ignored.
        terms: softcap, z-loss, label smoothing.
        tile_tokens: rows of logits at a time.
        fp32_grads: sum the weight's gradient over tiles in fp32 (V * D * 4 bytes until backward), not in its own dtype.
        reuse_hidden: write the gradient of hidden over hidden, which is then destroyed: one [B, L, D] less. Only where
            nothing else reads hidden afterwards; autograd raises in backward where an operation had saved it.
        implementation: "tiled"; or "liger", the fused linear cross-entropy of liger-kernel (a GPU and Triton), which
            chooses its own tiles and rounds logits to the weight's dtype.

    Returns:
        0-d fp32 (fp64 for fp64), the sum over valid tokens.

    Raises:
        ValueError, TypeError, ImportError: settings or dtypes that do not fit; liger-kernel is not installed.
    """
    terms = terms or LossTerms()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: use one of {', '.join(IMPLEMENTATIONS)}")
    if isinstance(tile_tokens, bool) or not isinstance(tile_tokens, int) or tile_tokens < 1:
        raise ValueError(f"tile_tokens={tile_tokens!r} must be a positive number of tokens")
    if hidden.shape[:-1] != shift_labels.shape:
        raise ValueError(f"hidden states {tuple(hidden.shape)} and labels {tuple(shift_labels.shape)}: one label a token is needed")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise TypeError(f"hidden states are {hidden.dtype} but the head's {name} is {t.dtype}: cast the model to one dtype")
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), shift_labels.reshape(-1)
    if implementation == "liger":
        return _liger_loss_sum(rows, weight, labels, bias, terms, fp32_grads)
    if reuse_hidden and (rows.data_ptr() != hidden.data_ptr() or not rows.is_contiguous() or (hidden.is_leaf and hidden.requires_grad)):
        raise ValueError("reuse_hidden needs contiguous hidden states that are no leaf of the graph: set it to False")
    return _TiledLossSum.apply(terms, tile_tokens, fp32_grads, reuse_hidden, torch.is_grad_enabled(), rows, weight, bias, labels)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 (fp64) from operands in their own dtype. On a CPU a bf16 product is rounded to bf16 on the way."""
    wide = wide_dtype(a.dtype)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a, b).to(wide)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a^T @ b in place, summed in total's dtype: a's own or fp32. total [m, n], a [k, m], b [k, n]."""
    if total.dtype == a.dtype or not a.is_cuda:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
    elif _adds_into_fp32(a.device, a.dtype):
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        step = max(1, (1 << 25) // total.shape[1])
        for start in range(0, total.shape[0], step):
            total[start : start + step] += product(a[:, start : start + step].t(), b)


@functools.cache
def _adds_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a bf16 product into an fp32 matrix; some versions want both in one dtype."""
    total, a = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _tile_loss(x: torch.Tensor, labels: torch.Tensor, terms: LossTerms, with_grad: bool) -> torch.Tensor:
    """Sum of the losses of some rows, fp64.

    x: [T, V] logits in fp32 or fp64. Used as working memory; afterwards, with_grad, it has the gradient of the sum for the
    logits as they were given, and zero in rows without a label.
    """
    valid = labels != IGNORE
    target = labels.where(valid, 0)[:, None]
    bent = None
    if terms.softcap is not None:
        bent = x.div_(terms.softcap).tanh_()
        x = bent * terms.softcap
    top = x.amax(-1, keepdim=True)
    x.sub_(top)
    picked = x.gather(1, target)
    mean = x.mean(-1, keepdim=True) if terms.label_smoothing else 0.0
    total = x.exp_().sum(-1, keepdim=True)
    log_total = total.log()
    sure = 1.0 - terms.label_smoothing
    losses = log_total - sure * picked - terms.label_smoothing * mean
    if terms.z_loss:
        losses = losses + terms.z_loss * (log_total + top).square()
    if with_grad:
        # Divided by the sum itself, not exp(x - logsumexp): rounding a logarithm once for a whole row would tilt its gradient.
        x.div_(total)
        if terms.z_loss:
            x.mul_(1.0 + 2.0 * terms.z_loss * (log_total + top))
        if terms.label_smoothing:
            x.sub_(terms.label_smoothing / x.shape[1])
        x.scatter_add_(1, target, x.new_full(target.shape, -sure))
        x.masked_fill_(~valid[:, None], 0.0)
        if bent is not None:
            bent.square_().neg_().add_(1.0).mul_(x)
    return losses[:, 0].where(valid, 0).sum(dtype=torch.float64)


class _CrossEntropySum(torch.autograd.Function):
    """In chunks of rows, so that the logits never exist in fp32 as a whole. logits: [N, V], labels: [N]."""

    CHUNK_ELEMENTS = 1 << 26

    @staticmethod
    def chunks(logits, labels):
        """Yield for each chunk: its slice, a copy of its logits in fp32 (fp64), its labels."""
        rows = max(1, _CrossEntropySum.CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            yield part, logits[part].to(wide_dtype(logits.dtype), copy=True), labels[part]

    @staticmethod
    def forward(ctx, terms, logits, labels):
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for _, x, target in _CrossEntropySum.chunks(logits, labels):
            total += _tile_loss(x, target, terms, with_grad=False)
        ctx.terms = terms
        ctx.save_for_backward(logits, labels)
        return total.to(wide_dtype(logits.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, labels = ctx.saved_tensors
        out = torch.empty_like(logits)
        for part, x, target in _CrossEntropySum.chunks(logits, labels):
            _tile_loss(x, target, ctx.terms, with_grad=True)
            out[part] = x.mul_(grad)
        return None, out, None


class _TiledLossSum(torch.autograd.Function):
    """hidden: [N, D], weight: [V, D], bias: [V] or None, labels: [N]."""

    @staticmethod
    def forward(ctx, terms, tile_tokens, fp32_grads, reuse_hidden, enabled, hidden, weight, bias, labels):
        wide = wide_dtype(hidden.dtype)
        wants_h, wants_w, wants_b = (enabled and needed for needed in ctx.needs_input_grad[5:8])
        dh = (hidden.detach() if reuse_hidden else torch.empty_like(hidden)) if wants_h else None
        dw = torch.zeros_like(weight, dtype=wide if fp32_grads else weight.dtype) if wants_w else None
        db = torch.zeros_like(bias, dtype=wide) if wants_b else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], tile_tokens):
            part = slice(start, start + tile_tokens)
            x = product(hidden[part], weight.t())
            if bias is not None:
                x += bias
            total += _tile_loss(x, labels[part], terms, with_grad=wants_h or wants_w or wants_b)
            if db is not None:
                db += x.sum(0)
            x = x.to(weight.dtype)
            if dw is not None:
                add_product(dw, x, hidden[part])
            if dh is not None:
                torch.mm(x, weight, out=dh[part])
            del x
        ctx.tile_tokens, ctx.used = tile_tokens, False
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(dh, dw, db)
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.used:
            raise RuntimeError("the tiled loss holds its gradients once: compute it again for a second backward (no retain_graph)")
        ctx.used = True
        dh, dw, db = ctx.saved_tensors
        # A bf16 tensor times a 0-d tensor would round the factor to bf16, the same error in every element.
        for t in (dh, dw):
            for start in range(0, 0 if t is None else t.shape[0], ctx.tile_tokens):
                part = t[start : start + ctx.tile_tokens]
                part.copy_(part.to(grad.dtype) * grad)
        db = None if db is None else db * grad
        dtypes = ctx.dtypes
        return (None,) * 5 + (dh, None if dw is None else dw.to(dtypes[0]), None if db is None else db.to(dtypes[1]), None)


def check_implementation(implementation: str) -> None:
    """That a loss implementation is known and installed.

    Raises:
        ValueError, ImportError: with what would work.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: use one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "liger":
        _liger()


def _liger():
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise ImportError(
            f"implementation='liger' needs liger-kernel and Triton ({error}): pip install liger-kernel, or use implementation='tiled'"
        ) from None
    return liger_fused_linear_cross_entropy


def _liger_loss_sum(hidden, weight, labels, bias, terms: LossTerms, fp32_grads: bool) -> torch.Tensor:
    """liger-kernel's fused linear cross-entropy (read at 0.8.5) with the same meaning of every term."""
    fused = _liger()
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and trained and not hidden.requires_grad:
        raise ValueError(
            "implementation='liger' gives the head no gradient where the hidden states need none (all below is frozen): use 'tiled'"
        )
    return fused(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=IGNORE,
        lse_square_scale=terms.z_loss,
        label_smoothing=terms.label_smoothing,
        reduction="sum",
        softcap=terms.softcap,
        accum_dtype=wide_dtype(weight.dtype) if fp32_grads else None,
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
