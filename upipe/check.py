"""The self-check: the sharded model's loss and every gradient against the plain, unsharded model's.

The plain model is built anew on the first rank with the weights gathered from the engine, and is Hugging Face's own
forward with `labels` on the whole batch (with a z-loss or label smoothing: torch's cross-entropy of its logits). Errors
are relative: |a - b| / |b| in the 2-norm, in float64; where the reference is zero the error is |a| and at most ABSOLUTE
is allowed. No parameter is left out.

In fp32 the loss must agree to LOSS and every gradient to GRADIENT. In bf16 there is no exact answer to agree with:
the error of the plain bf16 model against the plain fp32 model with the same (bf16-rounded) weights is the measure, and
the sharded model's error against that same fp32 model may be RATIO times it, gradient by gradient. On one batch that
ratio is half luck, for a plain model with another attention kernel too, so errors are pooled, root of the sum of
squares, over several batches. The loss, a single number whose own error may be zero by luck, passes up to
LOSS_FLOOR too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from upipe.loss import IGNORE, LossTerms

LOSS = 1e-5
GRADIENT = 1e-4
ABSOLUTE = 1e-7
RATIO = 1.2
LOSS_FLOOR = 1e-3


@dataclass
class CheckResult:
    """What the check found; the same on every rank. Errors are relative to the plain fp32 model. `plain` holds the
    errors of the plain bf16 model, and is empty in fp32. "loss" in `errors` and `plain` is the loss; with several batches
    `loss` and `reference_loss` are their means, and errors are pooled."""

    dtype: str
    loss: float
    reference_loss: float
    errors: dict[str, float]
    plain: dict[str, float] = field(default_factory=dict)
    batches: int = 1

    def allowed(self, name: str) -> float:
        """The greatest error of the gradient `name`, or of the "loss", that passes."""
        if self.dtype == "fp32":
            return LOSS if name == "loss" else GRADIENT
        return max(RATIO * self.plain[name], LOSS_FLOOR if name == "loss" else 0.0)

    @property
    def failed(self) -> list[str]:
        """Names of what is out of bounds."""
        # Written so that a NaN fails.
        return [name for name, error in self.errors.items() if not error <= self.allowed(name)]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def worst(self) -> str:
        """The name of the gradient that is worst in proportion to what is allowed."""
        names = [name for name in self.errors if name != "loss"]
        return max(names, key=lambda name: _orderable(self.errors[name] / self.allowed(name)))

    def __str__(self) -> str:
        worst = self.worst
        lines = [
            f"self-check in {self.dtype}: sharded under DeepSpeed against the unsharded model, "
            + ("one batch" if self.batches == 1 else f"errors over {self.batches} batches"),
            f"  loss      sharded {self.loss:.7f}   unsharded {self.reference_loss:.7f}   "
            f"relative error {self.errors['loss']:.2e} (allowed {self.allowed('loss'):.2e})",
            f"  gradients worst of {len(self.errors) - 1}: {worst}   "
            f"relative error {self.errors[worst]:.2e} (allowed {self.allowed(worst):.2e})",
        ]
        if self.plain:
            lines.append(
                f"  (errors against the unsharded fp32 model; allowed is {RATIO} times the unsharded bf16 model's own: "
                f"loss {self.plain['loss']:.2e}, {worst} {self.plain[worst]:.2e})"
            )
        for name in self.failed[:10]:
            lines.append(f"  out of bounds: {name} {self.errors[name]:.2e} (allowed {self.allowed(name):.2e})")
        lines.append("PASS" if self.passed else f"FAIL: {len(self.failed)} of {len(self.errors)} out of bounds")
        return "\n".join(lines)


def self_check(
    engine: Any,
    handle: Any,
    build_reference: Callable[[], nn.Module],
    batches: list[dict[str, Tensor]],
    *,
    accumulation: int = 1,
    terms: LossTerms | None = None,
) -> CheckResult:
    """Run the check; collective, every rank calls it with the same arguments.

    engine: the DeepSpeed engine of a model that UPipe is applied to, at an accumulation boundary.
    build_reference: builds the plain fp32 model in training mode; called on the first rank, its weights are replaced.
    batches: global batches of one accumulation window each, [N, S] tensors on the CPU (input_ids and labels at least),
    where N = dp_size * accumulation * B; the rows go to the data-parallel ranks in order, then to the micro-batches.

    terms: of the loss that the engine trains on, besides cross-entropy and the model's own softcap.

    The engine is stepped between batches with a learning rate of 0, which clears its gradients and leaves the weights; its
    optimizer is of no use afterwards.
    Raises ValueError where N does not divide.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    weights, pools, pair = _full_weights(engine), (_Pool(), _Pool()), [0.0, 0.0]
    dtype = "bf16" if engine.bfloat16_enabled() else "fp32"
    models: dict[torch.dtype, nn.Module] = {}
    if dist.get_rank() == 0:
        wanted = (torch.float32, torch.bfloat16) if dtype == "bf16" else (torch.float32,)
        models = {kind: _plain_model(build_reference(), weights, handle.device, kind) for kind in wanted}
    for number, batch in enumerate(batches):
        loss, gradients = _sharded_gradients(engine, handle, batch, accumulation, step=number + 1 < len(batches))
        if dist.get_rank() != 0:
            continue
        reference_loss, reference = _plain_gradients(models[torch.float32], batch, handle.device, terms)
        pools[0].add(loss, gradients, reference_loss, reference)
        pair = [pair[0] + loss / len(batches), pair[1] + reference_loss / len(batches)]
        if dtype == "bf16":
            plain_loss, plain = _plain_gradients(models[torch.bfloat16], batch, handle.device, terms)
            pools[1].add(plain_loss, plain, reference_loss, reference)
    box = [None]
    if dist.get_rank() == 0:
        box = [CheckResult(dtype, *pair, pools[0].errors(), pools[1].errors(), len(batches))]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _sharded_gradients(
    engine: Any, handle: Any, batch: dict[str, Tensor], accumulation: int, *, step: bool
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and full gradients of one accumulation window under the engine."""
    rows = batch["input_ids"].shape[0]
    if rows % (handle.dp_size * accumulation):
        raise ValueError(
            f"a batch of {rows} rows does not divide over {handle.dp_size} data-parallel ranks x {accumulation} "
            f"micro-batches; give a multiple of {handle.dp_size * accumulation}"
        )
    micro_batches = list(_micro_batches(batch, handle.dp_size, handle.dp_rank, accumulation))
    loss, gradients = 0.0, {}
    for i, micro in enumerate(handle.shard(micro_batches, accumulation=accumulation)):
        value = handle.loss(engine, micro)
        engine.backward(value)
        loss += float(value.detach()) / accumulation
        last = i == accumulation - 1
        if last:
            gradients = _full_gradients(engine)
        if step or not last:
            engine.step()
    return loss, gradients


class _Pool:
    """Squares of errors and of references, summed over batches, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(
        self, loss: float, gradients: dict[str, Tensor | None], reference_loss: float, reference: dict[str, Tensor | None]
    ) -> None:
        if gradients.keys() != reference.keys():
            raise ValueError(f"parameters differ: {sorted(gradients.keys() ^ reference.keys())}")
        self._add("loss", (loss - reference_loss) ** 2, reference_loss**2)
        for name in reference:
            self._add(name, *_squares(gradients[name], reference[name]))

    def _add(self, name: str, error: float, size: float) -> None:
        have = self.sums.setdefault(name, [0.0, 0.0])
        have[0] += error
        have[1] += size

    def errors(self) -> dict[str, float]:
        """Relative errors; where the reference is zero in every batch: 0 up to ABSOLUTE in absolute terms, else infinite."""
        return {
            name: math.sqrt(error / size) if size > 0 else (0.0 if math.sqrt(error) <= ABSOLUTE else math.inf)
            for name, (error, size) in self.sums.items()
        }


def _squares(value: Tensor | None, reference: Tensor | None) -> tuple[float, float]:
    """|value - reference|^2 and |reference|^2 in float64. None counts as zero."""
    if value is None and reference is None:
        return 0.0, 0.0
    value = torch.zeros_like(reference) if value is None else value
    reference = torch.zeros_like(value) if reference is None else reference
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    value, reference = value.to(reference.device).double(), reference.double()
    return float((value - reference).square().sum()), float(reference.square().sum())


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """|value - reference| / |reference| in float64. None counts as zero. Where the reference is zero: 0 up to ABSOLUTE
    in absolute terms, else infinite."""
    pool = _Pool()
    pool._add("x", *_squares(value, reference))
    return pool.errors()["x"]


def _micro_batches(
    batch: dict[str, Tensor], dp_size: int, dp_rank: int, accumulation: int
) -> Iterator[dict[str, Tensor]]:
    size = batch["input_ids"].shape[0] // (dp_size * accumulation)
    for i in range(accumulation):
        first = (dp_rank * accumulation + i) * size
        yield {key: value[first : first + size] for key, value in batch.items()}


def _full_gradients(engine: Any) -> dict[str, Tensor | None]:
    """Every parameter's full gradient, by name, on the CPU of the first rank; all ranks gather in the same order."""
    from deepspeed.utils import safe_get_full_grad

    gradients = {}
    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if dist.get_rank() == 0:
            gradients[name] = None if gradient is None else gradient.detach().cpu().clone()
    return gradients


def _full_weights(engine: Any) -> dict[str, Tensor]:
    """Every parameter's full value, by name, on the CPU of the first rank, gathered one at a time under ZeRO-3."""
    import deepspeed

    weights = {}
    for name, parameter in engine.module.named_parameters():
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().cpu().clone()
    return weights


def _plain_model(model: nn.Module, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The plain model with `weights` in `dtype`; buffers (rotary frequencies) stay float32."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].to(device=device, dtype=dtype)
    return model.to(device)


def _plain_gradients(
    model: nn.Module, batch: dict[str, Tensor], device: torch.device, terms: LossTerms | None = None
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of a plain model; they stay on its device, and the model keeps none."""
    output = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False)
    loss = output.loss
    if terms is not None and (terms.z_loss or terms.label_smoothing):
        logits, labels = output.logits.float(), pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:].to(device)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, label_smoothing=terms.label_smoothing)
        loss = loss + terms.z_loss * logits.logsumexp(-1)[labels != IGNORE].square().mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients


def _orderable(value: float) -> float:
    return math.inf if math.isnan(value) else value
