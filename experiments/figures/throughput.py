"""Table 3 of Untied Ulysses (arXiv 2602.21196): throughput of every method over lengths, peak memory for the same, and its variant
on fewer GPUs or with fewer layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.values import (
    BASELINES,
    Row,
    Sources,
    from_record,
    from_reported,
    grouped,
    model_of,
    our_method,
    over_ulysses,
    pick,
    run_of,
    stack_of,
)
from experiments.table import latest
from upipe.records import format_tokens

PUBLISHED = {"llama3-8b": (8, 32, "Llama3-8B"), "qwen3-32b": (16, 64, "Qwen3-32B")}
"""Model -> GPUs and decoder layers of Table 3, and its name."""
NODE, CAPACITY = 8, 80
"""GPUs of a node of Table 3, and GiB of each."""


def whole_models(sources: Sources) -> list[dict[str, Any]]:
    """The last record of every point of a whole model, published models on GPUs, and of predictions of one set-up the last.

    Searches for the longest length and forecasts of measurements (the planner's figure has those) are left out.
    """
    found: dict[Any, dict[str, Any]] = {}
    for number, record in enumerate(sources.records):
        search = "longest_tokens" in record or str(record.get("point", "")).startswith("longest")
        if (
            search
            or record["experiment"] == "predict_points"
            or record.get("scope") != "model"
            or not record["gpus"]
            or model_of(record["model"]) not in PUBLISHED
        ):
            continue
        same = ("model", "layers", "gpus", "gpu", "method", "ring", "tokens")
        key = (stack_of(record), *(record[name] for name in same)) if stack_of(record) else number
        found[key] = record
    return list(found.values())


def compared(sources: Sources) -> Sources:
    """The sources with, beside the last record of each measured whole model, the last whose run has a baseline at that model and length;
    and with what else their runs had there: a comparison is of one run."""

    def measured(record: dict[str, Any]) -> bool:
        return record["provenance"] == "measured" and record.get("scope") == "model" and record.get("point") is not None

    def sweep(record: dict[str, Any]) -> tuple:
        return tuple(record[name] for name in ("experiment", "run_id", "model", "layers", "tokens", "kernel"))

    models = list(filter(measured, sources.every))
    beside = {sweep(r) for r in models if r["method"] in BASELINES and r["outcome"] == "ok"}
    chosen = latest(r for r in models if sweep(r) in beside)
    sweeps = {sweep(r) for r in [*chosen, *filter(measured, sources.records)]}
    more = [*(r for r in models if sweep(r) in sweeps and r["outcome"] == "ok"), *chosen]
    return dataclasses.replace(sources, records=list({id(r): r for r in [*more, *sources.records]}.values()))


def is_published_size(record: dict[str, Any]) -> bool:
    """Whether a whole model of Table 3 has all its layers and runs on as many GPUs."""
    return (record["gpus"], record["layers"]) == PUBLISHED[model_of(record["model"])][:2]


def rows(sources: Sources) -> list[Row]:
    """Table 3 and the peaks beside it as published, and records of its models at full depth on as many GPUs."""
    found = from_reported(r for r in sources.published if r["source"] == "untied-ulysses" and r["figure"] in ("table3", "peak-table"))
    for record in whole_models(compared(sources)):
        if is_published_size(record):
            found += [from_record(record, metric) for metric in ("throughput", "peak")]
    return [*found, *over_ulysses(found)]


def draw(found: list[Row]) -> Figure:
    figure, axes = style.figure(3, 2, 10, 11.5, height_ratios=[1.25, 1, 1])
    found = [_on_its_gpu(row) for row in found]
    for column, (model, (gpus, layers, name)) in enumerate(PUBLISHED.items()):
        mine = pick(found, model=model)
        top, bottom, peaks = axes[:, column]
        style.lines(top, pick(mine, metric="throughput"))
        # Under the curves: the band of OOM.
        top.set_yscale("log")
        low, high = top.get_ylim()
        top.set_ylim(low / 3, high)
        top.set_title(f"{name}, {layers} layers, {gpus} × H100-80GB", loc="left")
        top.set_ylabel("throughput (tokens/s/GPU)")
        style.missing(top, mine)
        style.lines(bottom, pick(mine, metric="throughput over Ulysses"))
        bottom.axhline(1, color="0.4", linewidth=0.8)
        bottom.set_ylim(0, max([1.1, *(1.05 * row.value for row in pick(found, metric="throughput over Ulysses"))]))
        bottom.set_ylabel("throughput / Ulysses' (same mark)")
        style.lines(peaks, pick(mine, metric="peak"))
        for row in pick(mine, metric="peak", mark="reported"):  # single points, on which predictions lie
            _, colour, sign = style.sign(row.method)
            peaks.plot([row.tokens], [row.value], marker=sign, markersize=10, markerfacecolor="none", color=colour)
            place = {"xytext": (-4, 16), "textcoords": "offset points", "ha": "left", "fontsize": 7.5}
            peaks.annotate(f"{row.value:g} GiB reported", (row.tokens, row.value), **place)
        peaks.axhline(CAPACITY, color="0.1", linestyle=":", linewidth=1.2)
        # Measured on a larger GPU, a peak may be above it.
        highest = [row.value for row in pick(mine, metric="peak", outcome="ok") if row.value is not None]
        peaks.set_ylim(0, 1.1 * max([CAPACITY, *highest]))
        peaks.annotate(f"{CAPACITY} GiB", (0.01, CAPACITY), xycoords=peaks.get_yaxis_transform(), va="bottom", fontsize=7.5)
        peaks.set_ylabel("peak memory (GiB/GPU)")
        for axis in (top, bottom, peaks):
            style.lengths(axis, mine)
    style.legend_below(figure, axes.flat, 4)
    return figure


def _on_its_gpu(row: Row) -> Row:
    """A measured row with its GPU in the setting: a title's is the published one."""
    return dataclasses.replace(row, setting=", ".join(filter(None, (row.setting, row.gpu)))) if row.mark == "measured" else row


def rows_2gpu(sources: Sources) -> list[Row]:
    """Whole models with fewer layers or on fewer GPUs than published: throughput, peak above states, both over Ulysses'; beside them
    the published throughputs of the same methods and lengths over Ulysses'."""
    found = []
    for record in whole_models(compared(sources)):
        gpus, layers, _ = PUBLISHED[model_of(record["model"])]
        if record["gpus"] <= gpus and record["layers"] <= layers and not is_published_size(record):
            timed = record["tokens_per_s_per_gpu"] is not None or record["outcome"] != "ok"
            found += [from_record(record, metric) for metric in (["throughput"] if timed else []) + ["peak_above_states"]]
    found.sort(key=lambda r: (r.model, r.gpus or 0, r.layers or 0, r.tokens or 0, r.kernel or "", r.mark, run_of(r), r.method))
    mine = {(row.model, our_method(row.method), row.tokens) for row in found}
    published = over_ulysses(from_reported(r for r in sources.published if (r["source"], r["figure"]) == ("untied-ulysses", "table3")))
    beside = [row for row in published if (row.model, our_method(row.method), row.tokens) in mine and our_method(row.method) != "ulysses"]
    return [*found, *over_ulysses(found), *over_ulysses(found, "peak_above_states"), *beside]


def draw_2gpu(found: list[Row]) -> Figure:
    published, found = pick(found, mark="reported"), [row for row in found if row.mark != "reported"]
    reported = {(row.model, our_method(row.method), row.tokens): row.value for row in published}
    groups = grouped(found, lambda r: (r.model, r.layers, r.gpus, r.gpu, r.tokens, run_of(r)))
    count = sum(len(grouped(mine, lambda r: (r.mark, r.series))) + 1.4 for mine in groups.values())
    figure, axes = style.figure(1, 2, 10, max(2.4, 0.24 * count + 1.1), sharey=True)
    left, right = axes[0]
    if not found:
        style.nothing(left)
        style.nothing(right)
        return figure
    place, ticks = 0.0, []
    for (model, layers, gpus, gpu, tokens, sweep), mine in groups.items():
        file, run = sweep.split(".jsonl, ")
        title = f"{PUBLISHED[model][2]}, {layers} of {PUBLISHED[model][1]} layers, {format_tokens(tokens)} tokens, {gpus} × {gpu}"
        title += f" ({file}, …{run[-6:]})"
        style.row_title(left, place, title)
        place += 1
        for same in grouped(mine, lambda r: (r.mark, r.series)).values():
            ticks.append((place, style.name(same[0])))
            _bars(left, place, same, "throughput", reported.get((model, our_method(same[0].method), tokens)))
            _bars(right, place, same, "peak_above_states")
            place += 1
        place += 0.4
    left.set_yticks(*zip(*ticks))
    left.set_ylim(place, -0.8)
    left.tick_params(axis="y", labelsize=7.5)
    labels = (("throughput", "throughput (tokens/s/GPU)"), ("peak_above_states", "peak above states (GiB/GPU)"))
    for axis, (metric, text) in zip((left, right), labels):
        axis.set_xlabel(text)
        axis.locator_params(axis="x", nbins=4)
        axis.set_xlim(0, 1.35 * max([row.value or 0 for row in pick(found, metric=metric)] + [1e-9]))
        axis.grid(axis="y", visible=False)
    style.mark_legend(
        figure,
        (row.mark for row in found),
        title="(×): over Ulysses' of the same sweep and kernel; [×]: the same ratio as published for Table 3's depth and GPUs",
        title_fontsize=7.5,
    )
    return figure


def _bars(axis: Axes, place: float, same: list[Row], metric: str, published: float | None = None) -> None:
    value, ratio = pick(same, metric=metric), pick(same, metric=f"{metric} over Ulysses")
    if value:
        more = f"({ratio[0].value:.2f}×)" if ratio else ""
        style.bar(axis, place, value[0], more=f"{more} [{published:.2f}×]" if ratio and published is not None else more)
    else:
        axis.annotate("not timed", (0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5, color="0.35")
