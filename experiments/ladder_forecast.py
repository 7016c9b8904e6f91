"""What the planner says of a ladder, before or without a GPU: part of `python -m experiments.ladder --predict`.

For each lever the longest multiple of --grain whose device memory, margin included, is within the cap; host memory is not looked at,
as the ladder's is not. A layer and the loss are simulated anew at every length that is asked for, as the ladder runs them: where a
rung has transformers' own attention module or loss, these. What the planner does not know is named and left out.

What it cannot know: the ladder goes by what torch's allocator reserves under the cap, where cached blocks of other sizes may be in the
way, and the planner by what is allocated. Its margin stands for that and was not fitted to any ladder.

Two lengths a lever with Adam. `longest_tokens`: of every step, Adam's two moments there. `longest_first_step_tokens`: of the first
step, where they are not there until its gradients are done. The ladder makes its engine anew after each length that did not fit, so
what it finds lies between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

from torch import nn

from experiments import forecast, points
from experiments.alst import UlyssesAttention
from experiments.stack import DX
from experiments.stack_methods import METHODS, MODELS, Setting
from experiments.table import last_by, longest_of
from upipe import plan, simulate
from upipe.config import ConfigError, from_mapping
from upipe.methods.apply import MethodSharding
from upipe.methods.simulated import Group
from upipe.plan import GIB, MARGIN_GIB, MARGIN_SHARE, Machine, Prediction
from upipe.records import Record, format_tokens
from upipe.trainer import RunConfig


def hf_loss(logits, labels):
    """The ladder's loss under `loss=hf`: of all logits at once, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def transformers_attention(model, method, config):
    """Stands for `apply_method` where the ladder leaves the model's attention module as it is, and the kernel alone is its attention."""
    groups = mock.Mock(sp_group=Group(config.sp_size))
    return UlyssesAttention(model, groups, lambda: MethodSharding.kernel(None, None))


@contextlib.contextmanager
def as_the_ladder_runs(setting: Setting) -> Iterator[None]:
    """While inside, the planner simulates a setting's own loss and attention module, at the very length that is asked for."""
    found: dict[Any, simulate.Peaks] = {}

    def simulated(case: simulate.Case, lengths: tuple[int, ...] | None = None) -> simulate.Peaks:
        if (case, lengths) not in found:
            found[case, lengths] = simulate.simulate(case, lengths)
        return found[case, lengths]

    with contextlib.ExitStack() as stack:
        # Kept results are of this library's own parts.
        stack.enter_context(mock.patch.object(simulate, "cached", lambda case: None))
        stack.enter_context(mock.patch.multiple(plan, _simulated=simulated, peaks_of=simulated))
        if setting.loss == "hf" and not setting.tiled_loss:
            stack.enter_context(mock.patch.object(simulate.loss, "token_loss_sum", hf_loss))
        if setting.method is None:
            stack.enter_context(mock.patch.object(simulate, "apply_method", transformers_attention))
        yield


def run_of(setting: Setting, model: str, layers: int, tokens: int, sp: int, kernel: str) -> RunConfig:
    """A rung's setting as a configuration. Raises ConfigError for what has none."""
    if setting.name == "alst":
        raise ConfigError(f"setting {str(setting)!r}: the planner does not know DeepSpeed's own tiles")
    tiles, config = setting.tiling, setting.config(sp, forecast.hf_config_of(model, layers).num_attention_heads, kernel)
    memory: dict[str, Any] = {
        "mlp_tokens": tiles and tiles.mlp_tokens, "norm_tokens": tiles and tiles.norm_tokens, "loss_tokens": tiles and tiles.loss_tokens,
        "offload": setting.offload, "fused_layers": setting.fused, "prefetch": setting.prefetch,
    }  # fmt: skip
    return from_mapping(RunConfig, {
        "model": MODELS[model] | {"layers": layers, "checkpointing": "non-reentrant" if setting.checkpoint else "none"},
        "train": {"dtype": "bf16", "gradient_dtype": "bf16", "zero_stage": 3}, "method": {"name": METHODS[setting.name]},
        "upipe": dataclasses.asdict(config), "memory": memory,
        "data": {"path": str(points.ROOT / "configs" / "books" / "persuasion.txt"), "tokens": tokens},
    })  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Needed:
    """Device memory of a rung at a length in GiB: allocated at the peak, and with the planner's margin. states: of these."""

    prediction: Prediction
    peak: float
    states: float

    @property
    def with_margin(self) -> float:
        return self.peak * (1 + MARGIN_SHARE) + MARGIN_GIB


def needed(
    setting: Setting, model: str, layers: int, tokens: int, machine: Machine, kernel: str, *, optimizer: str = "adamw",
    states_gib: float | None = None, others: int = 0, first_step: bool = False,
) -> Needed:
    """Of one length, inside of `as_the_ladder_runs`.

    Args:
        model, layers, kernel, optimizer: the ladder's options.
        states_gib: what states are filled up to; None: those of the layers trained.
        others: layers that are not trained, whose saved inputs are held where nothing is offloaded.
        first_step: Adam's moments are not there yet.
    """
    sp = 1 if setting.name == "plain" else machine.world
    run = run_of(setting, model, layers, tokens, sp, kernel)
    found = plan.predict(run, machine, only_here=True)
    parts = {name: size for name, size in found.device.items() if name != "margin"}
    states = sum(parts[name] for name in forecast.STATES)
    if optimizer == "none" or first_step:
        states -= parts["optimizer"] * 2 / 3    # of Adam's; fp32 master weights DeepSpeed keeps whatever the optimizer is
    own, states = states, states if states_gib is None else states_gib
    if own > states:
        raise ConfigError(f"{layers} layers with optimizer {optimizer} hold {own:.1f} GiB, and all were to hold {states:.1f}")
    text = forecast.hf_config_of(model, layers)
    inputs = others * -(-tokens // sp) * text.hidden_size * 2 / GIB if setting.offload == "none" else 0.0
    peak = sum(size for name, size in parts.items() if name not in forecast.STATES) + states + inputs
    if first_step:
        # By its end the moments are there.
        peak = max(peak, (found.phases["optimizer step"] - MARGIN_GIB) / (1 + MARGIN_SHARE))
    return Needed(found, peak, states)


def longest(fits: Callable[[int], bool], grain: int, most: int) -> int:
    """The longest multiple of `grain` up to `most` that fits, 0 for none; where one does not fit no longer one does."""
    low, high, step = 0, most // grain + 1, 1
    while low + step < high and fits((low + step) * grain):
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * grain) else (low, middle)
    return low * grain


def _fits(ask: Callable[..., Needed], cap: float, first_step: bool, tokens: int) -> bool:
    return ask(tokens=tokens, first_step=first_step).with_margin <= cap


def forecasts(options: argparse.Namespace, preset: Any, made_with: dict[str, Any], say: Callable[[str], None] = print) -> list[Record]:
    """A record a lever of a preset, as the options have it (`ladder.settle`); levers that the planner does not know are named."""
    machine = Machine.parse(f"{preset.gpus}xH200", host_gib=forecast.HOST_GIB * preset.gpus)
    machine = dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, usable_gib=options.cap))
    others = (preset.all_layers or options.layers) - options.layers
    made = []
    for rung in preset.rungs:
        if options.rungs and rung.label not in options.rungs:
            continue
        setting = Setting.parse(rung.setting)
        ask = cache(partial(
            needed, setting, options.model, options.layers, machine=machine, kernel=options.kernel, optimizer=options.optimizer,
            states_gib=preset.states_gib, others=others,
        ))  # fmt: skip
        kinds = (False, True) if options.optimizer == "adamw" else (False,)
        try:
            with as_the_ladder_runs(setting):
                lengths = {kind: longest(partial(_fits, ask, options.cap, kind), options.grain, options.most) for kind in kinds}
                least = ask(tokens=lengths[False] or options.grain, first_step=False)
        except ConfigError as error:
            say(f"{rung.label}: left out: {error}")
            continue
        say(f"{rung.label}: {format_tokens(lengths[False])}" + (
            f", a first step {format_tokens(lengths[True])}" if True in lengths else ""))  # fmt: skip
        made.append(record_of(options, rung, setting, least, lengths).updated(made_with | {
            "experiment": "predict_points", "of": "ladder", "constants": forecast.constants(), "gpu": machine.gpu.name,
            "gpus": machine.world, "host_gib": machine.host_gib,
        }))  # fmt: skip
    return made


def record_of(options: argparse.Namespace, rung: Any, setting: Setting, at: Needed, lengths: dict[bool, int]) -> Record:
    """A forecast of a lever, without what says where it was made."""
    found, tokens = at.prediction, lengths[False]
    sp, ours = found.run.upipe.sp_size, setting.name == "upipe"
    config = forecast.hf_config_of(options.model, options.layers)
    made = Record(
        provenance="predicted", method="none" if sp == 1 and not ours else METHODS[setting.name], model=options.model,
        layers=options.layers, tokens=found.tokens, sp=sp, ring=1, dp=found.machine.world // sp, zero=3,
        heads_per_stage=sp if ours else None, kernel=found.kernel, attention_output="host" if found.attention_layers else "device",
        overlap=setting.overlap if ours else None, offload=setting.offload, dx=DX[setting.dx] if ours else None,
        tile_tokens=found.run.memory.mlp_tokens, dtype="bfloat16",
        peak_gib=at.peak, states_gib=at.states, reserved_gib=at.with_margin, peak_above_states_gib=at.peak - at.states,
        extra={
            "point": f"{options.preset}-{rung.label}", "scope": "model", "preset": options.preset, "rung": rung.label,
            "setting": str(setting), "longest_tokens": tokens, "longest_first_step_tokens": lengths.get(True), "search_complete": True,
            "grain": options.grain, "most": options.most, "cap_gib": options.cap, "memory_only": True, "optimizer": options.optimizer,
            "hidden_size": config.hidden_size, "phase": found.phase, "device": found.device,
        },
    )  # fmt: skip
    if not tokens:
        made.outcome, made.reason = "oom_device", f"not even {format_tokens(options.grain)} fits in {options.cap:g} GiB"
    return made


def beside(said: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[list[str]]:
    """A table's rows: forecasts, and what a search of the same preset, model, layers and cap found, the last by lever that `supersedes`.

    Where a search was cut off, what it found is the least that the length can be, and no difference is told unless the forecast is
    below it.
    """
    rows = [["lever", "predicted", "of a first step", "measured", "off", "forecast"]]
    search = operator.itemgetter("preset", "rung", "model", "layers", "cap_gib")
    last = last_by((r for r in measured if r["longest_tokens"] or r["search_complete"]), search)
    for r in said:
        true, first = last.get(search(r)), r["longest_first_step_tokens"]
        cells = [r["rung"], format_tokens(r["longest_tokens"]), "" if first is None else format_tokens(first)]
        if true is None:
            rows.append([*cells, "not yet", "", "true"])
            continue
        length, open_end = true["longest_tokens"], not true["search_complete"]
        ends = [n for n in (r["longest_tokens"], first) if n is not None]
        off = ""
        if length and not (open_end and max(ends) >= length):
            off = " to ".join(f"{100 * (n / length - 1):+.0f} %" for n in ends)
        rows.append([*cells, longest_of(true), off, "true" if r["date"] < true["date"] else "after it was measured"])
    return rows
