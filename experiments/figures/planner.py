"""How far the planner is off: predicted over measured, and predicted over published for the paper's own set-up.

A prediction belongs to a measurement where

    a record of provenance "predicted" has its point, model and layers (and in `of` its experiment), or
    the measured record has `predicted`, a mapping with machine and time_s, tokens_per_s_per_gpu or peak_gib, as the runner writes it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.throughput import whole_models
from experiments.figures.values import METRICS, Row, Sources, from_record, from_reported, grouped, model_of, our_method, pick, stack_of

COMPARED = ("step_time", "throughput", "peak", "peak_above_states", "peak_above_inputs")
MARKERS = ("s", "^", "D", "v", "P", "X", "h", "o", "<", ">", "d", "p", "*", "x", "+", "1", "2", "3", "4", "8", "|", "_")
AIMS = {"time": 15, "memory": 5}
"""Percent, of docs/plan.md."""


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
    """The true row of each pair, and by how many percent its prediction is above it."""
    return [(true, 100 * (said.value / true.value - 1)) for true, said in zip(found[::2], found[1::2])]


def draw(found: list[Row]) -> Figure:
    # The legend below has two columns.
    series = {_series(row) for row, _ in errors(found)}
    figure, axes = style.figure(1, 2, 10, 3.4 + 0.17 * len(series) / 2)
    shapes: dict[str, int] = {}
    kinds = (("time", ("step_time", "throughput")), ("memory", ("peak", "peak_above_states", "peak_above_inputs")))
    for axis, (kind, metrics) in zip(axes[0], kinds):
        mine = [(row, off) for row, off in errors(found) if row.metric in metrics]
        aim = AIMS[kind]
        axis.axhspan(-aim, aim, color="0.93", zorder=0)
        axis.axhline(0, color="0.4", linewidth=0.8)
        for same in grouped(mine, lambda p: _series(p[0])).values():
            row = same[0][0]
            _, colour, sign = style.sign(row.method)
            points = sorted((r.tokens, off) for r, off in same)
            if row.mark == "reported":
                axis.plot(*zip(*points), marker=sign, color=colour, linewidth=1, markerfacecolor="white", label=_series(row))
            else:
                marker = MARKERS[shapes.setdefault(_series(row), len(shapes)) % len(MARKERS)]
                axis.plot(*zip(*points), marker, color=colour, markersize=4.5, alpha=0.75, label=_series(row))
        if not mine:
            style.nothing(axis)
            continue
        style.lengths(axis, [row for row, _ in mine])
        axis.set_ylabel({"time": "predicted / true − 1 (%), time", "memory": "predicted / true − 1 (%), peak"}[kind])
        axis.set_title(f"{kind.capitalize()}; grey: the aim, ±{aim} %", loc="left")
    style.legend_below(figure, axes.flat, 2)
    return figure


def _series(row: Row) -> str:
    name = style.sign(row.method)[0]
    if row.mark == "reported":
        return f"{style.model(row)}, {name}, {row.gpus} × {row.gpu}, against reported"
    what = f"{row.layers} layers" if (row.layers or 1) > 1 else "attention block"
    kernel = style.KERNELS.get(row.kernel, row.kernel)
    return f"{style.model(row)}, {what}, {name}, {kernel}, {row.gpus} × {row.gpu}, against measured"
