"""How far the planner is off: predicted over measured, and predicted over published for the paper's own set-up.

A prediction belongs to a measurement where

    a record of provenance "predicted" has its point, model and layers (and in `of` its experiment), or
    the measured record has `predicted`, a mapping with machine and time_s, tokens_per_s_per_gpu or peak_gib, as the runner writes it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.figures import style
from experiments.figures.throughput import whole_models
from experiments.figures.values import (
    MARKS,
    METRICS,
    Row,
    Sources,
    from_record,
    from_reported,
    grouped,
    model_of,
    our_method,
    pick,
    stack_of,
)

COMPARED = ("step_time", "throughput", "peak", "peak_above_states", "peak_above_inputs")
BLOCK = "P"
"""The marker of attention blocks."""
AIMS = {"time": 15, "memory": 5}
"""Percent, of docs/plan.md."""
TICKS = {"time": (5, 15, 30, 60, 120), "memory": (2, 5, 10, 20, 40)}


def rows(sources: Sources) -> list[Row]:
    """Pairs of rows, one after the other: the measured or reported value, and what was predicted of it."""
    return [row for pair in (*_measured(sources), *_published(sources)) for row in pair]


def _measured(sources: Sources) -> list[tuple[Row, Row]]:
    predicted: dict[tuple, list[dict[str, Any]]] = {}
    for r in sources.every:
        if r["provenance"] == "predicted":
            predicted.setdefault(_key(r, r.get("of", r["experiment"])), []).append(r)
    pairs = []
    for record in sources.records:
        # A search's peak is at the length that it found, a forecast's of it at another.
        if record["provenance"] != "measured" or record["outcome"] != "ok" or "longest_tokens" in record:
            continue
        said_of_it = predicted.get(_key(record, record["experiment"]), [])
        # The last said before it was measured, or else the first: what has seen the measurement is no prediction of it.
        plan = next((r for r in reversed(said_of_it) if r["date"] < record["date"]), said_of_it[0] if said_of_it else None)
        own = record.get("predicted")
        if plan is None and isinstance(own, dict) and _same_gpu(record, own):
            plan = record | {METRICS[m][0]: own.get(METRICS[m][0]) for m in COMPARED} | {"provenance": "predicted"}
        for metric in COMPARED if plan is not None else ():
            if metric == "peak" and None not in (record["peak_above_states_gib"], plan.get("peak_above_states_gib")):
                continue        # it has the states of every engine that the process held, which is no error of the plan
            true, said = from_record(record, metric), from_record(plan, metric)
            if metric == "throughput" and pairs and pairs[-1][0].source == true.source and pairs[-1][0].metric == "step_time":
                continue        # the same time once more
            if None not in (true.value, said.value):
                pairs.append((true, dataclasses.replace(said, setting=true.setting, kernel=true.kernel, width=true.width)))
    return pairs


def _same_gpu(record: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether a record's prediction is of the kind of GPU that it ran on: an experiment's hardware may be another."""
    name = (record["gpu"] or "").removeprefix("NVIDIA ").split()
    return bool(name) and name[0] in own.get("machine", "")


def _key(record: dict[str, Any], experiment: str) -> tuple:
    return experiment, model_of(record["model"]), record["layers"], record.get("point")


def _published(sources: Sources) -> list[tuple[Row, Row]]:
    """Throughputs and peaks of the paper beside predictions of its set-up (`stack: paper`)."""
    setup = "paper's set-up"
    wanted = ("throughput", "peak")
    paper = [r for r in sources.published if r["source"] == "untied-ulysses" and r["metric"] in wanted and r["value"] is not None]
    published = from_reported(paper, setting=setup)
    pairs = []
    for record in whole_models(sources):
        if record["provenance"] == "predicted" and stack_of(record) == "paper":
            for metric in wanted:
                said = from_record(record, metric)
                same = pick(published, model=said.model, gpus=said.gpus, tokens=said.tokens, metric=metric)
                # The paper's Ulysses on two nodes is Ulysses inside a node and a ring across: USP.
                theirs = {"usp": ("usp", "ulysses")}.get(said.method, (said.method,))
                same = [row for row in same if our_method(row.method) in theirs]
                pairs += [(dataclasses.replace(row, method=said.method), said) for row in same if said.value is not None]
    return pairs


def errors(found: list[Row]) -> list[tuple[Row, float]]:
    """The true row of each pair, and by how many percent its prediction is above it; of throughputs, in time a step."""
    off = []
    for true, said in zip(found[::2], found[1::2]):
        ratio = true.value / said.value if true.metric == "throughput" else said.value / true.value
        off.append((true, 100 * (ratio - 1)))
    return off


def draw(found: list[Row]) -> Figure:
    """A column of measured values, and one a model of reported ones."""
    off = errors(found)
    columns = grouped(sorted(off, key=lambda p: MARKS.index(p[0].mark), reverse=True), lambda p: _column(p[0]))
    figure, axes = style.figure(2, max(1, len(columns)), 4.3 * max(1, len(columns)), 7.4, sharey="row")
    kinds = (("time", ("step_time", "throughput")), ("memory", ("peak", "peak_above_states", "peak_above_inputs")))
    for line, (kind, metrics) in zip(axes, kinds):
        if not columns:
            style.nothing(line[0])
        for axis, mine in zip(line, columns.values()):
            _panel(axis, kind, [(row, error) for row, error in mine if row.metric in metrics])
        line[0].set_ylabel({"time": "time of a step", "memory": "peak"}[kind] + ", predicted / true − 1 (%)")
    aims = f"±{AIMS['time']} % of time, ±{AIMS['memory']} % of a peak"
    said = f"Grey: the aim, {aims}; linear within it, logarithmic beyond. Points of one length stand beside each other."
    style.legend_below(figure, axes.flat, 4, title=said, title_fontsize=7.5)
    return figure


def _column(row: Row) -> tuple[str, str]:
    return row.mark, row.model if row.mark == "reported" else ""


def _panel(axis: Axes, kind: str, points: list[tuple[Row, float]]) -> None:
    """Errors over lengths, a marker a group; of reported values a line a machine. Beyond the aim the scale is logarithmic: no point is
    outside."""
    if not points:
        return style.nothing(axis, "none")
    aim = AIMS[kind]
    axis.axhspan(-aim, aim, color="0.93", zorder=0)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=aim, linscale=0.6)
    ticks = [-tick for tick in TICKS[kind]] + [0, *TICKS[kind]]
    axis.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
    axis.yaxis.set_minor_locator(NullLocator())
    points = sorted(points, key=lambda p: (_group(p[0]), p[0].gpus, p[0].tokens, p[1]))
    places = _beside([row.tokens for row, _ in points])
    placed = [(row, place, error) for (row, error), place in zip(points, places)]
    for same in grouped(placed, lambda p: (_group(p[0]), p[0].gpus if p[0].mark == "reported" else None)).values():
        row = same[0][0]
        _, colour, marker = style.sign(row.method)
        if row.mark == "reported":
            look = {"linewidth": 1, "markersize": 5, "markerfacecolor": "white"}
        else:
            look = {"linestyle": "", "markersize": 4.5, "markeredgewidth": 0}
        marker = BLOCK if _block(row) else marker
        axis.plot(*zip(*((place, error) for _, place, error in same)), marker=marker, color=colour, label=_group(row), **look)
    style.lengths(axis, [row for row, _ in points])
    axis.set_xlim(min(places) / 1.15, max(places) * 1.15)
    models = " and ".join(sorted({style.model(row) for row, _ in points}))
    counts = " or ".join(map(str, sorted({row.gpus for row, _ in points})))
    gpus = " or ".join(sorted({row.gpu for row, _ in points}))
    axis.set_title(f"{kind.capitalize()}, {points[0][0].mark}: {models},\n{counts} × {gpus}", loc="left")


def _beside(lengths: list[int]) -> list[float]:
    """Where points of these lengths stand: those of one length beside each other, in their order, away from the next length."""
    there = sorted(set(lengths))
    reach = 0.4 * min([1.0, *(math.log2(longer / length) for length, longer in zip(there, there[1:]))])
    before: dict[int, int] = {}
    places = []
    for length in lengths:
        count, number = lengths.count(length), before.get(length, 0)
        before[length] = number + 1
        step = min(0.1, 2 * reach / count)
        places.append(length * 2 ** (step * (number - (count - 1) / 2)))
    return places


def _block(row: Row) -> bool:
    return row.mark != "reported" and (row.layers or 1) == 1


def _group(row: Row) -> str:
    """A legend's entry: all kernels, models and machines of a method."""
    what = "" if row.mark == "reported" else ", attention blocks" if _block(row) else ", whole models"
    return f"{style.sign(row.method)[0]}{what}, {row.mark}"
