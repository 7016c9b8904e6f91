"""What the planner says of whole-model points before they are measured, and how it did once they are.

    python -m experiments.forecast PART ... --results experiments/results    # parts of stack-2gpu.sh that call experiments.stack
    python -m experiments.forecast --judge                                   # forecasts beside what was measured after them

A forecast is a record of provenance "predicted" in predict_points.jsonl, `of: stack`, with the `point` that the measured record will
have; the points are those of the script's own commands. Its `constants` is a digest of plan_rates.json, and `engines` says how many
engines' states are held at once. Judged is a measurement by the last forecast that is older than it, for as many engines if there is
one (its states only then); a point measured without any is named. Errors are predicted over measured, less one.

peak: above the states that the step begins with, GiB. states: of every engine there is. host: page-locked and ordinary memory of all
ranks, GiB. time: seconds a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import operator
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments import points, stack
from experiments.runs import command_line, exit_status, made_by
from experiments.stack_methods import METHODS, MODELS, Setting
from experiments.table import last_by
from upipe import plan, records
from upipe.build import ModelConfig, hf_config
from upipe.config import ConfigError, from_mapping
from upipe.methods import config as methods
from upipe.plan import Machine, Prediction
from upipe.records import Record, format_tokens
from upipe.trainer import RunConfig

RESULTS = points.ROOT / "experiments" / "results"
SCRIPT = points.ROOT / "experiments" / "stack-2gpu.sh"
PARTS = (
    "methods", "methods512K", "whole", "qwen", "512K", "1M", "breakdown", "blocks", "blocks1M", "widths", "offload", "within", "alst",
    "one", "one-offload",
)  # fmt: skip
HOST_GIB = 251.77 / 2
"""A GPU, of the machine with two H200s that the points are measured on, as records of it say; the one with one H200 has half of it."""
STATES = ("parameters", "gradients", "optimizer", "buckets")
"""Components that a step begins with."""
BOUNDS = {"peak": 0.05, "host": 0.03, "time": 0.15, "states": 0.01}
"""Relative errors aimed at."""


def predict(
    setting: Setting, model: str, layers: int, tokens: int, sp: int, kernel: str, machine: Machine, kept: bool = False
) -> Prediction:
    """A setting of `experiments.stack` as the planner has it. Raises ConfigError for what it does not know.

    Args:
        model, layers, tokens, sp, kernel: options of that command. kept: use plan_layers.json.
    """
    if METHODS[setting.name] not in methods.NAMES:
        raise ConfigError(f"method {setting.name}: unknown to the planner")
    if setting.name == "plain" or setting.rope != "ours" or (setting.loss != "sum" and not setting.tiled_loss):
        raise ConfigError(f"setting {str(setting)!r} is not one that the planner knows")
    if setting.peer:
        raise ConfigError(f"setting {str(setting)!r}: the planner does not know the offload of {setting.offload}")
    tiles, method = setting.tiling, {"name": setting.name}
    if setting.method is not None:
        method = {key: value for key, value in dataclasses.asdict(setting.method).items() if value is not None}
    config = setting.config(sp, hf_config_of(model, layers).num_attention_heads, kernel)
    memory: dict[str, Any] = {
        "mlp_tokens": tiles and tiles.mlp_tokens, "norm_tokens": tiles and tiles.norm_tokens, "loss_tokens": tiles and tiles.loss_tokens,
        "offload": setting.offload, "fused_layers": setting.fused, "prefetch": setting.prefetch,
        "offload_within_layer": setting.within,
    }  # fmt: skip
    if setting.keep is not None:
        memory["keep_layers_on_gpu"] = setting.keep
    if setting.pairs:
        memory |= {"store_every": 2, "pairs": setting.pairs}
    run = from_mapping(RunConfig, {
        "model": MODELS[model] | {"layers": layers, "checkpointing": "non-reentrant" if setting.checkpoint else "none"},
        "train": {"dtype": "bf16", "gradient_dtype": "bf16", "zero_stage": 3}, "method": method,
        "upipe": dataclasses.asdict(config), "memory": memory,
        "data": {"path": str(points.ROOT / "configs" / "books" / "persuasion.txt"), "tokens": tokens},
    })  # fmt: skip
    return plan.predict(run, machine, kept=kept)


def hf_config_of(model: str, layers: int) -> Any:
    return hf_config(ModelConfig(**MODELS[model], layers=layers))


def above_states(found: Prediction) -> float:
    """GiB of the peak that a step adds, without margin."""
    return found.device_gib - found.device["margin"] - sum(found.device[name] for name in STATES)


def states_of(found: Prediction, stepped: int, fresh: int) -> float:
    """GiB of so many engines that have made a step, and of those that have not: Adam's two moments of fp32 come with the first, two
    thirds of what is `optimizer` afterwards."""
    whole = sum(found.device[name] for name in STATES)
    return stepped * whole + fresh * (whole - found.device["optimizer"] * 2 / 3)


def commands(part: str) -> list[str]:
    """The arguments of `experiments.stack` in a part of the script, and the ranks before them, as the script itself calls it."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / "torchrun"
        stand_in.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        stand_in.chmod(0o755)
        paths = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(["bash", str(SCRIPT), part], capture_output=True, text=True, env=paths)
    words = done.stdout.split("\n")[:-1]
    if done.returncode or "experiments.stack" not in words:
        raise ConfigError(f"part {part!r} of {SCRIPT.name} does not call experiments.stack: use {', '.join(PARTS)}")
    return [words[words.index("--nproc_per_node") + 1], *words[words.index("experiments.stack") + 1 :]]


def forecasts(part: str, made_with: dict[str, Any]) -> list[Record]:
    """Of every point of a part; settings that the planner does not know are named and left out."""
    ranks, *words = commands(part)
    options = stack.parser().parse_args(words)
    options.commit = made_with["commit"]
    options.profile = False     # is refused without a GPU, and changes no point
    stack.settle(options)
    sp, machine = options.sp or int(ranks), Machine.parse(f"{ranks}xH200", host_gib=HOST_GIB * int(ranks))
    settings = [Setting.parse(text) for text in options.settings]
    engines = list(dict.fromkeys(setting.engine for setting in settings))
    made = []
    for index, tokens in enumerate(options.tokens):
        for setting in settings:
            try:
                found = predict(setting, options.model, options.layers, tokens, sp, options.kernel, machine)
            except ConfigError as error:
                print(f"{part}, {setting}: left out: {error}")
                continue
            # Engines in front of this one in the order of the settings have made a step; at further lengths, all of them.
            stepped = 1 if options.apart else engines.index(setting.engine) + 1 if index == 0 else len(engines)
            fresh = 0 if options.apart else len(engines) - stepped
            if options.optimizer == "none":     # whose engines stay as Adam's are before their first step
                stepped, fresh = 0, stepped + fresh
            made.append(record_of(found, setting, options, sp, stepped, fresh).updated(made_with | {
                "experiment": "predict_points", "of": "stack", "part": part, "constants": constants(), "gpu": found.machine.gpu.name,
                "gpus": found.machine.world, "host_gib": found.machine.host_gib,
            }))  # fmt: skip
    return made


def record_of(found: Prediction, setting: Setting, options: argparse.Namespace, sp: int, stepped: int, fresh: int) -> Record:
    """A forecast, without what says where it was made."""
    above, states, held = above_states(found), states_of(found, stepped, fresh), found.step_host_gib
    others = states - sum(found.device[name] for name in STATES)
    pageable = found.host["layer inputs"] if setting.offload == "pageable" else 0.0
    outcome = "ok"
    if found.device_gib + others > found.machine.gpu.usable_gib:
        outcome = "oom_device"
    elif found.host_gib > found.machine.host_gib:
        outcome = "oom_host"
    ring, ulysses = plan.degrees(found.run)
    ours, config = setting.name == "upipe", hf_config_of(options.model, options.layers)
    return Record(
        provenance="predicted", method=METHODS[setting.name], model=options.model, layers=options.layers, tokens=found.tokens,
        sp=ulysses, ring=ring, dp=found.machine.world // sp, zero=3,
        heads_per_stage=found.run.upipe.heads_per_stage or sp if ours else None,
        kernel=found.kernel, attention_output="host" if found.attention_layers else "device",
        attention_output_host_layers=found.attention_layers or None, store_every=2 if setting.pairs else 1,
        overlap=setting.overlap if ours else None, offload=setting.offload, dx=stack.DX[setting.dx] if ours else None,
        tile_tokens=found.run.memory.mlp_tokens, dtype="bfloat16", outcome=outcome,
        reason=None if outcome == "ok" else f"{found.device_gib + others:.1f} GiB a GPU, {found.host_gib:.1f} of host memory",
        time_s=found.time_s, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu, peak_gib=above + states, states_gib=states,
        peak_above_states_gib=above, host_pinned_gib=held - pageable, host_pageable_gib=pageable,
        extra={"point": stack.point_of(setting, options.model, options.layers, options.kernel, found.tokens, sp), "scope": "model",
               "setting": str(setting), "hidden_size": config.hidden_size, "engines": stepped + fresh, "phase": found.phase,
               "device": found.device, "host": found.host, "time": found.time},
    )  # fmt: skip


def off(predicted: float | None, measured: float | None) -> float | None:
    """Predicted over measured, less one; None where one is not there."""
    return None if predicted is None or not measured else predicted / measured - 1


def constants() -> str:
    """A digest of plan_rates.json."""
    return hashlib.sha256((points.ROOT / "upipe" / "plan_rates.json").read_bytes()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A measured point beside the forecast that was made before it: values by quantity, GiB and seconds; None: none."""

    name: str
    part: str
    constants: str
    commit: str
    outcomes: tuple[str, str]
    measured: dict[str, float | None]
    predicted: dict[str, float | None]

    def off(self, quantity: str) -> float | None:
        return off(self.predicted[quantity], self.measured[quantity])

    @property
    def misses(self) -> list[str]:
        missed = [name for name, bound in BOUNDS.items() if self.off(name) is not None and abs(self.off(name)) > bound]
        return missed if self.outcomes[0] == self.outcomes[1] else [*missed, "outcome"]


def forecasts_in(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in found if r["provenance"] == "predicted" and r.get("of") == "stack"]


def last_before(record: dict[str, Any], said: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last forecast of a measured point that is older than the measurement; of those for as many engines, where there are any.
    Otherwise its states are not to be compared."""
    before = [r for r in said if r["point"] == record["point"] and r["date"] < record["date"]]
    alike = [r for r in before if r.get("engines") == record.get("engines")]
    # By date, not by place: a file that is merged in later may have older ones.
    return sorted(alike or before, key=lambda r: r["date"])[-1] if before else None


def judge(found: list[dict[str, Any]]) -> tuple[list[Judged], list[str]]:
    """Of records of both kinds: measured points with a forecast older than them, the last measurement of each; and the points that
    were measured after the first forecast without one of their own."""
    said = forecasts_in(found)
    measurements = (r for r in found if r["provenance"] == "measured" and r["experiment"] == "stack" and not r["memory_only"])
    ran = last_by(measurements, operator.itemgetter("point"))
    begun = min((r["date"] for r in said), default="9")
    judged, without = [], []
    for point, record in ran.items():
        if record["outcome"] not in ("ok", "oom_device", "oom_host", "oom_pinned"):
            continue
        last = last_before(record, said)
        if last is not None:
            name = f"{MODEL_NAMES.get(record['model'], record['model'])}, {record['layers']} layers, {record['setting']}, "
            name += f"{record['kernel']}, {format_tokens(record['tokens'])}"
            predicted = measured(last)
            if last.get("engines") != record.get("engines"):
                predicted["states"] = None  # they are all engines' of the process
            outcomes = record["outcome"], last["outcome"]
            judged.append(Judged(name, last["part"], last["constants"], last["commit"], outcomes, measured(record), predicted))
        elif record["date"] > begun:
            without.append(point)
    return judged, without


MODEL_NAMES = {"llama3_8b": "Llama3-8B", "qwen3_32b": "Qwen3-32B"}


def measured(record: dict[str, Any]) -> dict[str, float | None]:
    """Of a record of `experiments.stack`, or a forecast of one: GiB above states and on the host, page-locked or not; seconds."""
    host = None if record["host_pinned_gib"] is None else record["host_pinned_gib"] + (record["host_pageable_gib"] or 0.0)
    return {"peak": record["peak_above_states_gib"], "host": host, "time": record["time_s"], "states": record["states_gib"]}


def table(judged: list[Judged]) -> str:
    """A Markdown table of the points, and one that sums them up."""
    lines = ["| measured after its forecast | GiB measured | forecast | off | host off | s measured | forecast | off | over the bound |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for point in judged:
        cells = [point.name]
        for name in ("peak", "host", "time"):
            off = point.off(name)
            three = ["", "", ""] if off is None else [
                f"{point.measured[name]:.3f}", f"{point.predicted[name]:.3f}", f"{100 * off:+.1f} %"
            ]  # fmt: skip
            cells += three[2:] if name == "host" else three
        text = "; ".join(point.misses)
        cells.append(text.replace("outcome", f"{point.outcomes[0]}, forecast {point.outcomes[1]}"))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | points | median | worst | over the bound |", "| --- | --- | --- | --- | --- |"]
    for name, bound in BOUNDS.items():
        offs = [abs(point.off(name)) for point in judged if point.off(name) is not None]
        if offs:
            lines.append(
                f"| {name} | {len(offs)} | {100 * statistics.median(offs):.1f} % | {100 * max(offs):.1f} % | "
                f"{sum(off > bound for off in offs)} over {100 * bound:g} % |"
            )
    other = sum(point.outcomes[0] != point.outcomes[1] for point in judged)
    lines.append(f"| fits or not | {len(judged)} | | | {other} otherwise |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of experiments/stack-2gpu.sh: {', '.join(PARTS)}")
    parser.add_argument("--judge", action="store_true", help="tables of forecasts beside what was measured after them")
    parser.add_argument("--results", metavar="DIR", help="append forecasts to DIR/predict_points.jsonl; with --judge where records are")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)

    def body() -> int:
        if options.judge == bool(options.parts):
            raise ConfigError(f"give parts to forecast ({', '.join(PARTS)}), or --judge")
        unknown = [part for part in options.parts if part not in PARTS]
        if unknown:
            raise ConfigError(f"part {unknown[0]!r} is none of {', '.join(PARTS)}")
        if options.judge:
            folder = Path(options.results or RESULTS)
            judged, without = judge([r for name in ("predict_points", "stack") for r in records.load(folder / f"{name}.jsonl")])
            if not judged:
                raise ConfigError(f"{folder}: no point of stack.jsonl was measured after a forecast of it")
            made = sorted({(point.commit[:7], point.constants) for point in judged})
            print("forecast by " + "; ".join(f"{commit}, constants {digest}" for commit, digest in made))
            print(f"constants now: {constants()}\n\n{table(judged)}")
            for point in without:
                print(f"measured without a forecast: {point}")
            return 0
        made_with = made_by(command_line("experiments.forecast", arguments).strip(), options.commit, "forecast")
        for part in options.parts:
            for record in forecasts(part, made_with):
                print(f"{record.extra['point']}: {record.outcome}, {record.peak_above_states_gib:.2f} GiB above states of "
                      f"{record.states_gib:.2f}, host {record.host_pinned_gib + record.host_pageable_gib:.2f}, {record.time_s:.2f} s")
                if options.results:
                    records.append(record, options.results)
        return 0

    return exit_status("experiments.forecast", body)


if __name__ == "__main__":
    sys.exit(main())
