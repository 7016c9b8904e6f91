"""Published set-ups as the planner has them, beside the published numbers: part of `python -m experiments.predict`.

Table 3 of arXiv 2602.21196, every method and length, on 8 x H100 (Llama3-8B) and 16 (its "Qwen3-32B"); its peaks at 128K and on 16
GPUs; TRL's guide to 1M tokens. Methods are this library's forms under `memory.preset: paper`, not the code that was published, with
FlashAttention-4 in place of 3 (native: cuDNN). On 16 GPUs UPipe and Ulysses are 8 Ulysses x 2 ring ranks, ring and native 16 ring
ranks, as the paper's; FPDT 16 Ulysses ranks. No constant of the planner was fitted to any of these numbers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

from transformers.loss.loss_utils import ForCausalLMLoss

from experiments.table import REPORTED, read_reported
from upipe import plan, simulate
from upipe.plan import Machine, Prediction
from upipe.records import format_tokens

HOST_GIB = 1945.0
GB = 1e9 / 2**30
PRESETS = {"llama3-8b": "llama3-8b", "qwen3-32b": "qwen3-32b-paper"}
METHODS = {
    "native": ("method=native",), "ring": ("method=ring",), "ulysses": ("method=ulysses",), "fpdt": ("method=fpdt",), "upipe": (),
}  # fmt: skip
TWO_NODES = {"ulysses": ("method={name: usp, ring_degree: 2}",), "upipe": ("upipe.ring_degree=2",)}
TRL = {
    # model, GPUs, what of its memory levers is set; its checkpointing is per layer, its ring over all GPUs. Without any lever its loss is
    # of all logits at once, as transformers computes it.
    "example": ("qwen3-8b", "8xH100-80GB", ("memory.loss_tokens=2K", "memory.offload=pinned")),
    "naive": ("qwen3-8b", "8xH100-80GB", ("memory.offload=none",)),
    "levers": ("qwen3-4b", "4xA100-80GB", ("memory.loss_tokens=2K", "memory.offload=pinned")),
}


@dataclass(frozen=True)
class Case:
    """A published number and its prediction. published: None for out of memory. metric: throughput, peak (GiB) or step_time (s)."""

    figure: str
    model: str
    method: str
    tokens: int
    metric: str
    published: float | None
    prediction: Prediction

    @property
    def value(self) -> float | None:
        """What is predicted of it; None where the run does not fit. A peak is that of allocated memory, without the margin."""
        found = self.prediction
        if self.metric == "peak":
            return found.device_gib - found.device["margin"]
        if not found.fits:
            return None
        return found.tokens_per_s_per_gpu if self.metric == "throughput" else found.time_s

    @property
    def agrees(self) -> bool:
        """Of throughput: fits where it was published to fit, and runs out where it was published to run out."""
        return (self.value is None) == (self.published is None)

    @property
    def off(self) -> float | None:
        return None if self.value is None or self.published is None else self.value / self.published - 1

    @property
    def name(self) -> str:
        return f"{self.figure}-{self.model}-{self.method}-{format_tokens(self.tokens)}"


def _predicted(model: str, tokens: int, machine: Machine, words) -> Prediction:
    return plan.predict(plan.request(model, tokens, machine.world, words), machine)


@contextlib.contextmanager
def transformers_loss():
    """While inside, what is simulated anew has transformers' own loss from whole logits: a copy of them in fp32, its log-softmax,
    and gradients of both. This library's, from the same logits, makes no fp32 copy and no second gradient."""

    def token_loss_sum(logits, labels):
        return ForCausalLMLoss(logits, labels, logits.shape[-1], shift_labels=labels)

    with mock.patch.object(simulate.loss, "token_loss_sum", token_loss_sum):
        yield


def _setting(method: str, nodes: int) -> tuple[str, ...]:
    return ("memory.preset=paper", *((nodes > 1 and TWO_NODES.get(method)) or METHODS[method]))


def cases() -> list[Case]:
    """Every published number that is predicted, in the order of reported.csv."""
    found = []
    for row in read_reported(REPORTED):
        source, figure, tokens, value = row["source"], row["figure"], row["tokens"], row["value"]
        if source == "untied-ulysses" and figure in ("table3", "peak-table", "figure5-multinode"):
            method = {"usp-8u2r": "ulysses", "upipe-8u2r": "upipe"}.get(row["method"], row["ours"])
            if row["metric"] not in ("throughput", "peak") or method not in METHODS:
                continue
            nodes = int(row["gpus"]) // 8
            machine = Machine.parse("8xH100-80GB", nodes, HOST_GIB)
            prediction = _predicted(PRESETS[row["model"]], tokens, machine, _setting(method, nodes))
            # On this figure what ran out of memory has no peak.
            metric = "throughput" if row["metric"] == "peak" and value is None else row["metric"]
            found.append(Case(figure, row["model"], method, tokens, metric, value, prediction))
        elif source == "trl-1m-guide" and figure in TRL and tokens == 2**20 and row["metric"] in ("peak", "step_time"):
            model, gpus, words = TRL[figure]
            machine = Machine.parse(gpus, host_gib=HOST_GIB)
            words = ("memory.preset=none", "model.checkpointing=non-reentrant", "method=ring", *words)
            value = value * GB if row["unit"] == "GB" else value
            if figure == "naive":
                with transformers_loss():
                    prediction = plan.predict(plan.request(model, tokens, machine.world, words), machine, kept=False)
            else:
                prediction = _predicted(model, tokens, machine, words)
            found.append(Case(f"trl-{figure}", model, "ring", tokens, row["metric"], value, prediction))
    return found


def rows(found: list[Case]) -> list[list[str]]:
    """A table's rows, published beside predicted."""
    out = [["figure", "model", "method", "tokens", "what", "published", "predicted", "off", "device GiB of usable", "agrees"]]
    for case in found:
        prediction, unit = case.prediction, {"throughput": "tokens/s/GPU", "peak": "peak GiB", "step_time": "s"}[case.metric]
        gpu = prediction.machine.gpu
        out.append([
            case.figure, case.model, case.method, format_tokens(case.tokens), unit,
            "OOM" if case.published is None else f"{case.published:.4g}",
            f"OOM ({prediction.limit})" if case.value is None else f"{case.value:.4g}",
            "" if case.off is None else f"{100 * case.off:+.1f} %", f"{prediction.device_gib:.1f} of {gpu.usable_gib:g}",
            "yes" if case.agrees else "NO",
        ])  # fmt: skip
    return out


def summary(found: list[Case]) -> str:
    """How far predictions agree, in a few lines."""
    fits = [case for case in found if case.metric == "throughput"]
    wrong = [case.name for case in fits if not case.agrees]
    lines = [f"fit or out of memory: {len(fits) - len(wrong)} of {len(fits)} as published; not: {', '.join(wrong) or 'none'}"]
    for method in METHODS:
        offs = [case.off for case in fits if case.method == method and case.off is not None]
        longer = [case.off for case in fits if case.method == method and case.off is not None and case.tokens >= 2**20]
        if offs:
            def span(values: list[float]) -> str:
                return f"{100 * min(values):+.1f} to {100 * max(values):+.1f} %" if values else "none"

            lines.append(f"throughput, {method}: {span(offs)}; from 1M tokens up {span(longer)}")
    return "\n".join(lines)


def extra(case: Case) -> dict[str, Any]:
    """What a record has of the published number."""
    return {"published": case.published, "metric": case.metric, "predicted": case.value, "off": case.off, "agrees": case.agrees,
            "figure": case.figure}  # fmt: skip
