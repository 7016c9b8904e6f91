"""The planner beside what was measured on H200s: constants fitted on half of the points, judged on the other half.

    python -m experiments.accuracy          # the table, from the records
    python -m experiments.accuracy --fit    # and the constants that the fitted half gives, for plan_rates.json
    python -m experiments.accuracy --stack --results DIR    # every point of DIR/stack.jsonl, of all methods

A point is one configuration; one that was measured in several runs counts once, with the median. Fitted: one attention block of
Llama3-8B on two GPUs at 16K, 64K and 256K tokens. Held out, all of shapes or settings that the fit has not seen: 512K and 128K tokens,
Qwen3-32B, one GPU, Ulysses, and whole models of 4 and 8 layers with their loss, offload and optimizer. Attention's rates are of the
bare kernel (`plan_rates.json`), in runs of their own.

Peak: of a block above its inputs, of a whole model above the states that it began with. Host: page-locked memory of a node. States:
parameters, gradients, optimizer and buckets. Points measured after a forecast of them are judged by `experiments.forecast`, not here.

--stack: the planner's error for each point of `experiments.stack` that ran, whatever its method, a line and a record of provenance
"predicted" each (accuracy.jsonl in the same folder: `of_run`, `point`, `measured`, `off`), and by name what it has no prediction for.
No point is fitted or judged there: the exit status is 0.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import forecast, points
from experiments.forecast import BOUNDS, RESULTS, STATES
from experiments.live import block_peak
from experiments.predict import record_of
from experiments.runs import command_line, exit_status, made_by
from experiments.stack_methods import Setting
from upipe import plan, records
from upipe.config import ConfigError, from_mapping
from upipe.plan import GIB, Machine, Prediction, rates
from upipe.presets import preset_shapes
from upipe.records import Record, format_tokens
from upipe.trainer import RunConfig


@dataclass(frozen=True)
class Point:
    """A configuration with what was measured and predicted of it: GiB and seconds, None where there is none."""

    name: str
    fitted: bool
    measured: dict[str, float | None]
    predicted: dict[str, float | None]

    def off(self, quantity: str) -> float | None:
        """Predicted over measured, less one."""
        return forecast.off(self.predicted.get(quantity), self.measured.get(quantity))

    @property
    def misses(self) -> list[str]:
        return [name for name, bound in BOUNDS.items() if self.off(name) is not None and abs(self.off(name)) > bound]


def _ok(name: str) -> list[dict[str, Any]]:
    return [r for r in records.load(RESULTS / f"{name}.jsonl") if r["outcome"] == "ok"]


def blocks() -> dict[tuple, list[dict[str, Any]]]:
    """Measured attention blocks of UPipe by configuration."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for r in _ok("block"):
        if r["method"] == "upipe":
            key = (r["hidden_size"], r["heads"], r["sp"], r["tokens"], r["kernel"], r["heads_per_stage"], r["attention_output"],
                   r["overlap"], r["dx"])  # fmt: skip
            found.setdefault(key, []).append(r)
    return found


def is_fitted(record: dict[str, Any]) -> bool:
    return record["hidden_size"] == 4096 and record["sp"] == 2 and format_tokens(record["tokens"]) in ("16K", "64K", "256K")


def block_work(record: dict[str, Any]) -> dict[str, float]:
    """Of a checkpointed attention block: seconds of attention, FLOPs of products, seconds of exchanges, stages that are begun."""
    machine = Machine.parse(f"{record['gpus']}xH200")
    S, sp, D = record["tokens"], record["sp"], record["hidden_size"]
    H, K, d = record["heads"], record["kv_heads"], record["head_dim"]
    twice = record["attention_output"] == "device"
    flops = 2 * S * S * d * H / sp
    attention = flops * (1 + twice) / plan._tflops(record["kernel"], "forward", S, machine) / 1e12
    attention += 2.5 * flops / plan._tflops(record["kernel"], "backward", S, machine) / 1e12
    sent = S / sp * d * 2 * (sp - 1) / sp * ((2 * H + 2 * K) * (1 + twice) + 4 * H + 4 * K)
    return {
        "attention": attention, "flops": 2 * S / sp * D * d * ((2 * H + 2 * K) * (3 + twice) + H + 2 * K),
        "exchange": sent / machine.gpu.link_gb_s / 1e9, "stages": H / record["heads_per_stage"],
    }  # fmt: skip


def block_time(record: dict[str, Any]) -> float:
    """Predicted seconds: the GPU's work, or what it takes the host to begin it."""
    work, table = block_work(record), rates()
    exposed = table["exposed_exchange"] if record["overlap"] else 1.0
    seconds = work["attention"] + work["flops"] / table["gemm_heads"] / 1e12 + work["exchange"] * exposed
    return max(seconds, table["launch_layer_s"] + table["launch_stage_s"] * work["stages"])


def block_simulated(record: dict[str, Any]) -> float:
    """GiB above the inputs, without `workspace_gib`."""
    modes = {"attention_output": record["attention_output"], "overlap": record["overlap"],
             "dx": {"slabs": "gemm"}.get(record["dx"], "bf16")}  # fmt: skip
    shape = {"heads": record["heads"], "kv_heads": record["kv_heads"], "head_dim": record["head_dim"], "hidden": record["hidden_size"]}
    settings = {"kernel": record["kernel"], "heads_per_stage": record["heads_per_stage"], "tables": False}
    return _peak_gib(record["tokens"] // record["sp"], record["sp"], **shape, **settings, **modes)


@functools.cache
def _peak_gib(*args, **settings) -> float:
    return block_peak(*args, **settings)[0] / GIB


def block_points() -> list[Point]:
    found = []
    for group in blocks().values():
        r = group[0]
        fitted = is_fitted(r)
        model = "Llama3-8B" if r["hidden_size"] == 4096 else "Qwen3-32B"
        modes = ("" if r["overlap"] else ", no overlap") + ("" if r["dx"] == "slabs" else ", dx in bf16")
        name = f"block {model}, P {r['sp']}, U {r['heads_per_stage']}, {r['kernel']}, {r['attention_output']}{modes}"
        name += f", {format_tokens(r['tokens'])}"
        measured = {
            "peak": statistics.median(x["peak_above_inputs_gib"] for x in group), "time": statistics.median(x["time_s"] for x in group)
        }
        predicted = {"peak": block_simulated(r) + rates()["workspace_gib"], "time": block_time(r)}
        found.append(Point(name, fitted, measured, predicted))
    return found


def stack_prediction(record: dict[str, Any]) -> Prediction:
    """A setting of `experiments.stack` as the planner has it. Raises ConfigError for what it does not know."""
    if record["model"].replace("_", "-") not in preset_shapes():
        raise ConfigError(f"model {record['model']}: no preset of the planner")
    sp = record["sp"] * (record["ring"] or 1)
    setting = Setting.parse(record["setting"])
    return forecast.predict(setting, record["model"], record["layers"], record["tokens"], sp, record["kernel"], machine_of(record))


def machine_of(record: dict[str, Any]) -> Machine:
    """What a record was measured on. Raises ConfigError for a machine that the planner does not know."""
    if not record["gpus"]:
        raise ConfigError("no GPU")
    return Machine.parse(f"{record['gpus']}x{record['gpu'].removeprefix('NVIDIA ').split()[0]}", host_gib=record["host_gib"])


def makes_moments(record: dict[str, Any], earlier: list[dict[str, Any]], prediction: Prediction) -> bool:
    """Whether Adam's moments were first made in the step that was measured, because DeepSpeed had skipped the one before it: what it
    began with then has the moments of no more engines than others had been measured before. earlier: records of its run before it."""
    if record.get("engine_gib") is None or record.get("optimizer") == "none":
        return False
    mine = Setting.parse(record["setting"]).engine
    others = len({Setting.parse(r["setting"]).engine for r in earlier} - {mine})
    moments = record["states_gib"] - record["engines"] * record["engine_gib"]
    # Those that were closed (`--apart`) hold none.
    return round(moments / (prediction.device["optimizer"] * 2 / 3)) <= min(others, record["engines"] - 1)


def above_first_states(prediction: Prediction) -> float:
    """`forecast.above_states` of a step that begins without Adam's moments and makes them when the optimizer steps."""
    states = sum(prediction.device[name] for name in STATES)
    above = {phase: (total - plan.MARGIN_GIB) / (1 + plan.MARGIN_SHARE) - states for phase, total in prediction.phases.items()}
    above["optimizer step"] += prediction.device["optimizer"] * 2 / 3
    return max(above.values())


def stack_point(record: dict[str, Any], prediction: Prediction, earlier: list[dict[str, Any]] | tuple = ()) -> Point:
    """A point of `experiments.stack` beside what is predicted of it. earlier: records of its run before it."""
    # Two engines' states are in what it began with; buckets are made with an engine.
    name = f"{record['layers']} layers, {record['setting']}, {record['kernel']}, {format_tokens(record['tokens'])}"
    above = forecast.above_states(prediction)
    if makes_moments(record, list(earlier), prediction):
        above, name = above_first_states(prediction), f"{name}, Adam's moments made in it"
    return Point(
        name, False, {quantity: forecast.measured(record)[quantity] for quantity in ("peak", "host", "time")},
        {"peak": above, "host": prediction.step_host_gib, "time": prediction.time_s},
    )  # fmt: skip


def stack_points(folder: Path, runs: list[str] | None, made_with: dict[str, Any]) -> tuple[list[Point], list[Record], list[str]]:
    """Points of the stack.jsonl in a folder, their records, and a line for each without a prediction. runs: of these run_ids alone.

    Raises ConfigError where there are none.
    """
    measured = [r for r in records.load(folder / "stack.jsonl") if not runs or r["run_id"] in runs]
    if not measured:
        raise ConfigError(f"{folder / 'stack.jsonl'}: no records{f' of run {runs}' if runs else ''}")
    found, kept, left_out = [], [], []
    for i, r in enumerate(measured):
        where = f"{r['run_id']} {r['layers']} layers, {r['setting']}, {format_tokens(r['tokens'])}"
        if r["outcome"] != "ok":
            left_out.append(f"{where}: {r['outcome']}, {r['reason']}")
            continue
        try:
            prediction = stack_prediction(r)
        except ValueError as error:
            left_out.append(f"{where}: {error}")
            continue
        point = stack_point(r, prediction, [e for e in measured[:i] if e["run_id"] == r["run_id"]])
        found.append(point)
        off = {name: point.off(name) for name in BOUNDS}
        record = record_of(prediction, r["point"], made_with, of="stack", of_run=r["run_id"], measured=point.measured, off=off)
        kept.append(record.updated({"experiment": "accuracy", "layers": r["layers"]}))
    return found, kept, left_out


def model_points() -> list[Point]:
    """Whole models: those of `experiments.stack`, and one without tiles or offload."""
    found, said = [], forecast.forecasts_in(records.load(RESULTS / "predict_points.jsonl"))
    for r in _ok("stack"):
        # The planner does not have other libraries' offload.
        if r["method"] != "upipe" or Setting.parse(r["setting"]).peer or forecast.last_before(r, said) is not None:
            continue
        found.append(stack_point(r, stack_prediction(r)))
    for r in _ok("llama3_8b_4layers-2gpu"):
        settings = r["settings"]
        run = from_mapping(RunConfig, {
            "model": settings["model"], "train": settings["train"], "upipe": settings["upipe"] | {"kernel": r["kernel"]},
            # DeepSpeed's defaults, which that run had.
            "memory": {"reduce_bucket_parameters": 500_000_000, "prefetch_parameters": 50_000_000},
            "data": {"path": str(points.ROOT / "configs" / "books" / "persuasion.txt"), "tokens": r["tokens"]},
        })  # fmt: skip
        prediction = plan.predict(run, Machine.parse(f"{r['gpus']}xH200", host_gib=r["host_gib"]))
        peak = prediction.device_gib - prediction.device["margin"]
        name = f"{r['layers']} layers, untiled, {r['kernel']}, {format_tokens(r['tokens'])}, states included"
        states = sum(prediction.device[name] for name in STATES)
        found.append(Point(
            name, False, {"peak": r["peak_gib"], "time": r["time_s"], "states": r["states_gib"]},
            {"peak": peak, "time": prediction.time_s, "states": states},
        ))  # fmt: skip
    return found


def fit() -> dict[str, float]:
    """The constants of `plan_rates.json` that were fitted, from the fitted half alone, each by least squares of relative errors."""
    import numpy

    fitted = [group for group in blocks().values() if is_fitted(group[0])]
    peaks = [(statistics.median(r["peak_above_inputs_gib"] for r in g), block_simulated(g[0])) for g in fitted]
    weights = [1 / measured**2 for measured, _ in peaks]
    workspace = sum(w * (m - s) for w, (m, s) in zip(weights, peaks)) / sum(weights)
    rows, starts = [], []
    for group in fitted:
        work, seconds = block_work(group[0]), statistics.median(r["time_s"] for r in group)
        if format_tokens(group[0]["tokens"]) == "16K":
            starts.append(([1, work["stages"]], seconds))
        else:
            # Exchanges grow as products do, so that their share cannot be told from these; it was measured by itself.
            exposed = rates()["exposed_exchange"] if group[0]["overlap"] else 1.0
            rows.append((work["flops"] / 1e12, seconds - work["attention"] - work["exchange"] * exposed, seconds))
    per_tflop = sum(x * left / seconds**2 for x, left, seconds in rows) / sum((x / seconds) ** 2 for x, _, seconds in rows)
    a = numpy.array([[x / seconds for x in xs] for xs, seconds in starts])
    layer, stage = numpy.linalg.lstsq(a, numpy.ones(len(starts)), rcond=None)[0]
    return {"workspace_gib": workspace, "gemm_heads": 1 / per_tflop, "launch_layer_s": layer, "launch_stage_s": stage}


def table(found: list[Point]) -> str:
    rows = [["point", "half", *(f"{name} {what}" for name in BOUNDS for what in ("measured", "predicted", "off")), "over the bound"]]
    for point in sorted(found, key=lambda p: not p.fitted):
        cells = []
        for name in BOUNDS:
            off = point.off(name)
            cells += [""] * 3 if off is None else [f"{point.measured[name]:.3f}", f"{point.predicted[name]:.3f}", f"{100 * off:+.1f} %"]
        rows.append([point.name, "fitted" if point.fitted else "held out", *cells, ", ".join(point.misses)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def summary(found: list[Point]) -> str:
    lines = []
    for half in (True, False):
        for name, bound in BOUNDS.items():
            offs = [abs(p.off(name)) for p in found if p.fitted == half and p.off(name) is not None]
            if offs:
                over = sum(off > bound for off in offs)
                lines.append(
                    f"{'fitted' if half else 'held out'}, {name}: {len(offs)} points, median {100 * statistics.median(offs):.1f} %, worst "
                    f"{100 * max(offs):.1f} %, over {100 * bound:g} %: {over}"
                )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--fit", action="store_true", help="print what the fitted half gives, beside what plan_rates.json has")
    made.add_argument("--stack", action="store_true", help="every point of stack.jsonl in --results instead, and records of them")
    made.add_argument("--run", nargs="+", metavar="RUN_ID", help="with --stack: points of these runs alone")
    made.add_argument("--results", type=Path, metavar="DIR", help="of --stack; by default the project's own")
    made.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.stack and (options.results or options.run):
        parser().error("--results and --run go with --stack: without it the points are the project's own")

    def stack() -> int:
        made_with = made_by(command_line("experiments.accuracy", arguments).strip(), options.commit, "accuracy")
        folder = options.results or RESULTS
        found, kept, left_out = stack_points(folder, options.run, made_with)
        for record in kept:
            records.append(record, folder)
        print(table(found) + "".join(f"\nno prediction: {line}" for line in left_out) + f"\n\n{summary(found)}")
        return 0

    if options.stack:
        return exit_status("experiments.accuracy", stack)
    if options.fit:
        for name, value in fit().items():
            print(f"{name}: {value:.4g} (plan_rates.json: {rates()[name]:.4g})")
    found = block_points() + model_points()
    print(f"{table(found)}\n\n{summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
