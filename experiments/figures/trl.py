"""TRL's guide to training at 1M tokens: step time and peak at 1M, and step time over GPUs, beside records of the experiments after it."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.figures import style
from experiments.figures.values import Row, Sources, from_record, from_reported, grouped, pick
from upipe.records import format_tokens

SOURCE, TOKENS = "trl-1m-guide", 2**20
SCALING = ("trl_scaling", f"{SOURCE}, cp-scaling")
"""What the sources of rows of the scaling begin with."""
FASTER = "speed-up over fewest GPUs"
GB = 1e9 / 2**30
"""GiB, the guide's unit of memory."""
CPU = "CPU process"
NAMES = {"qwen3-8b": "Qwen3-8B", "qwen3-4b": "Qwen3-4B", "not-stated": "model not stated"}


def measured(sources: Sources, experiment: str) -> list[dict[str, Any]]:
    """The last measured record of every point of an experiment and its variants."""
    names = (experiment, f"{experiment}-")
    mine = [r for r in sources.records if r["experiment"] == names[0] or r["experiment"].startswith(names[1])]
    return [r for r in mine if r["provenance"] == "measured"]


def predicted(sources: Sources) -> list[dict[str, Any]]:
    """Predictions of the guide's set-ups (`experiments.published`), of each the last."""
    mine = [r for r in sources.records if r["provenance"] == "predicted" and str(r.get("figure")).startswith("trl-")]
    return [same[-1] for same in grouped(mine, lambda r: r["figure"]).values()]


def rows(sources: Sources) -> list[Row]:
    """Step time and peak at 1M, as published, predicted and measured; step time over GPUs and its speed-up, published and measured."""
    theirs = [r for r in sources.published if r["source"] == SOURCE]
    metrics = ("step_time", "peak")
    found = from_reported(r for r in theirs if r["metric"] in metrics and r["tokens"] == TOKENS)
    published = {(f"trl-{r['figure']}", r["metric"]) for r in theirs}
    for record in predicted(sources):
        found += [from_record(record, metric) for metric in metrics if (record["figure"], metric) in published]
    for record in measured(sources, "trl_qwen3_8b_1m"):
        found += [_row(record, metric) for metric in metrics]
    scaling = from_reported(r for r in theirs if r["figure"] == "cp-scaling" and r["metric"] == "step_time")
    scaling += [_row(record, "step_time") for record in measured(sources, "trl_scaling")]
    return [*found, *scaling, *speed_ups(scaling)]


def _row(record: dict[str, Any], metric: str) -> Row:
    row = from_record(record, metric)
    # On the CPU a rank is a process: there the scaling is over processes.
    return row if record["gpus"] else dataclasses.replace(row, gpus=record["processes"], gpu=CPU)


def curves(found: list[Row]) -> list[list[Row]]:
    """Rows of the scaling by what they share but the GPUs, by GPUs."""
    mine = [row for row in found if row.source.startswith(SCALING)]
    shared = grouped(mine, lambda r: (r.mark, r.model, r.layers, r.gpu, r.method, _everywhere(r), r.kernel, r.tokens, r.metric))
    return [sorted(same, key=lambda r: r.gpus) for same in shared.values()]


def _everywhere(row: Row) -> str:
    """A row's setting without its stage width, which goes with the ranks where none is set."""
    return ", ".join(word for word in row.setting.split(", ") if not word.startswith("U="))


def speed_ups(scaling: list[Row]) -> list[Row]:
    """Of every curve how many times faster each number of GPUs is than the fewest that were timed."""
    found = []
    for same in curves(scaling):
        timed = [row for row in same if row.value is not None]
        found += [dataclasses.replace(r, metric=FASTER, value=timed[0].value / r.value, unit="ratio") for r in timed]
    return found


def draw(found: list[Row]) -> Figure:
    at_1m = [row for row in found if not row.source.startswith(SCALING)]
    groups = grouped(at_1m, lambda r: (r.model, r.layers if r.mark == "measured" else None, r.gpus, r.gpu, r.tokens))
    count = sum(len(_bars_of(mine)) + 1.4 for mine in groups.values())
    height = 0.24 * count
    figure, axes = style.figure(2, 2, 10, height + 5.2, height_ratios=[height, 3.2])
    _at_1m(axes[0], groups)
    _scaling(axes[1], found)
    style.legend_below(figure, axes[1], 2)
    return figure


def _bars_of(mine: list[Row]) -> list[list[Row]]:
    """Rows of one bar: one set-up's time and peak."""
    return list(grouped(mine, lambda r: (r.mark, r.series)).values())


def _at_1m(axes: Any, groups: dict[tuple, list[Row]]) -> None:
    left, right = axes
    place, ticks = 0.0, []
    most: dict[str, list[float]] = {"step_time": [1e-9], "peak": [1e-9]}
    for (model, layers, gpus, gpu, tokens), mine in groups.items():
        deep = f", {layers} layers" if layers is not None else ""
        title = f"{NAMES.get(model, model)}{deep}, {format_tokens(tokens)} tokens, {gpus} × {gpu}"
        style.row_title(left, place, title)
        place += 1
        for same in _bars_of(mine):
            ticks.append((place, f"{same[0].method}, reported" if same[0].mark == "reported" else style.label(same[0])))
            for axis, metric in ((left, "step_time"), (right, "peak")):
                for row in pick(same, metric=metric):
                    shown = in_gib(row)
                    style.bar(axis, place, shown, more=f"({row.value:g} GB)" if shown is not row else "")
                    most[metric].append(shown.value or 0)
            place += 1
        place += 0.4
    left.set_yticks(*zip(*ticks))
    right.set_yticks([])
    for axis, metric, text in ((left, "step_time", "step time (s)"), (right, "peak", "peak memory (GiB/GPU)")):
        axis.set_ylim(place, -0.8)
        axis.tick_params(axis="y", labelsize=7.5)
        axis.set_xlim(0, 1.35 * max(most[metric]))
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(text)


def in_gib(row: Row) -> Row:
    """A row in GB as one in GiB; any other as it is."""
    return dataclasses.replace(row, value=row.value * GB, unit="GiB") if row.unit == "GB" and row.value is not None else row


def _scaling(axes: Any, found: list[Row]) -> None:
    faces = {"reported": "white", "predicted": "0.8"}
    for axis, metric, text in zip(axes, ("step_time", FASTER), ("step time (s)", "times faster than on the fewest GPUs")):
        mine = [same for same in curves(found) if same[0].metric == metric]
        for same in mine:
            _, colour, sign = style.sign(same[0].method)
            points = [(row.gpus, row.value) for row in same if row.value is not None]
            width = 2.2 if same[0].mark == "measured" else 1.1
            look = {"color": colour, "marker": sign, "markerfacecolor": faces.get(same[0].mark, colour), "linewidth": width}
            axis.plot(*(zip(*points) if points else ([], [])), label=_curve(same[0]), **look)
            for row in pick(same, value=None):
                said = "OOM" if row.outcome == "oom" else row.outcome
                axis.annotate(said, (row.gpus, 0.04), xycoords=axis.get_xaxis_transform(), ha="center", fontsize=7, color=colour)
        counts = sorted({row.gpus for same in mine for row in same})
        _log2(axis, counts)
        axis.set_ylabel(text)
        style.missing(axis, [row for same in mine for row in same], (0.98, 0.1))
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_locator(NullLocator())
    lowest, highest = axes[0].get_ylim()
    axes[0].set_ylim(lowest / 1.5, highest * 1.5)
    most = max((row.gpus / same[0].gpus for same in curves(found) for row in same if row.metric == FASTER), default=1)
    axes[1].set_ylim(0, 1.1 * most)
    for same in curves(found):
        if same[0].metric == FASTER:
            ideal = [(row.gpus, row.gpus / same[0].gpus) for row in same]
            axes[1].plot(*zip(*ideal), color="0.6", linewidth=0.8, linestyle=":", label="proportional to the GPUs")


def _log2(axis: Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("GPUs (on the CPU: processes)" if counts else "GPUs")


def _curve(row: Row) -> str:
    name = style.name(dataclasses.replace(row, setting=_everywhere(row)))
    layers = f"{row.layers} layers" if row.layers is not None else ""
    return ", ".join(filter(None, (name, NAMES.get(row.model, row.model), layers, row.gpu, format_tokens(row.tokens), row.mark)))
