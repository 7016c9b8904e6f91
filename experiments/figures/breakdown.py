"""Where a step's time goes, from the profiler's summary in a record (`experiments.block_trace.summary`).

The window is divided without rest: computation (by the names of its twelve longest kernels, `upipe.profiling.kind_of`, and
other: all further kernels), exchanges and host copies that no computation hides, idle. A record whose spans were named says more
(`upipe.parts`): its bars, in panels of their own, are by part of the step, each with its exchanges or host copies that nothing hides.
The profiler slows the host: beside each profiled step stands the time of the record's step without it.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from experiments.figures import style
from experiments.figures.throughput import compared
from experiments.figures.values import Row, Sources, from_record, grouped, number, pick, run_of
from upipe import parts as named
from upipe import profiling
from upipe.records import format_tokens

LOOKS = {
    "attention": ("attention kernels", "0.25", ""),
    "products": ("products (projections, output, MLP)", "0.6", ""),
    "other": ("other kernels (norms, rotation, copies on the GPU)", "0.85", ""),
    "exchange": ("exchange, exposed", "white", "////"),
    "host copies": ("host copies, exposed", "white", "xxxx"),
    "idle": ("idle", "white", "...."),
}
PART = "part: "
"""What metrics of a step's parts begin with."""
LOOKS |= {
    PART + named.PROJECTION: ("projection (q, k, v)", "0.75", ""),
    PART + named.ALL_TO_ALL: ("all-to-all", "white", "////"),
    PART + named.ATTENTION: ("attention", "0.25", ""),
    PART + named.OUTPUT: ("output projection", "0.9", ""),
    PART + named.MLP: ("MLP", "0.55", ""),
    PART + named.NORM: ("norms", "white", ""),
    PART + named.LOSS: ("loss and head", "0.75", "\\\\\\\\"),
    PART + named.OFFLOAD: ("offload", "white", "xxxx"),
    PART + named.OPTIMIZER: ("optimizer", "white", "||||"),
    PART + named.ZERO: ("ZeRO", "white", "----"),
    PART + named.OTHER: ("other", "0.85", "oo"),
    PART + profiling.IDLE: ("idle", "white", "...."),
}


TIMED = "timed step"
"""The note of a step without a profile."""
UNPROFILED = "the step without the profiler"
HALO = withStroke(linewidth=4.5, foreground="white")


def parts(profile: dict[str, Any]) -> dict[str, float]:
    """A profile's window in ms by part; the parts add up to it."""
    if profile.get("parts_ms"):
        return {PART + part: time for part, time in profile["parts_ms"].items()}
    named = {profiling.ATTENTION: 0.0, profiling.PRODUCTS: 0.0}
    for kernel in profile["top"]:
        kind = profiling.kind_of(kernel["name"])
        if kind in named:
            named[kind] += kernel["ms"]
    communication = profile["communication"]["exposed_ms"]
    exchange = min(profile["nccl"]["exposed_ms"], communication)
    return {
        "attention": named[profiling.ATTENTION],
        "products": named[profiling.PRODUCTS],
        "other": profile["compute_ms"] - sum(named.values()),
        "exchange": exchange,
        "host copies": communication - exchange,
        "idle": profile["idle_ms"],
    }


def rows(sources: Sources) -> list[Row]:
    """Parts (s) of the last profiled record of each point, and of the last with named parts, and the time of its step without the
    profiler; of whole models' steps without a profile forward, backward, optimizer, of the last record of each point and the baselines
    of its run."""
    found = []
    profiled: dict[tuple, dict] = {}
    for record in sources.every:
        if _profile(record):
            key = (record.get(name) for name in ("experiment", "model", "layers", "point"))
            profiled[*key, bool(_profile(record).get("parts_ms"))] = record
    wanted = {id(record) for record in (*profiled.values(), *compared(sources).records)}
    for record in sources.every:
        drawn = _profile(record) or record.get("scope") == "model" and record.get("parts_s")
        if id(record) not in wanted or not drawn or not record["gpus"] or record["outcome"] != "ok":
            continue
        profile = _profile(record)
        split = {name: time / 1e3 for name, time in parts(profile).items()} if profile else record["parts_s"]
        note = ("step by part" if profile.get("parts_ms") else "profiled step") if profile else TIMED
        whole = from_record(record, "step_time", setting=_setting(record), note=note)
        if profile and whole.value is not None and record["time_s"] != record.get("first_s"):
            found.append(whole)  # the first step, which is profiled, is not the timed one
        found += [dataclasses.replace(whole, metric=name, value=value) for name, value in split.items()]
    return found


def _profile(record: dict[str, Any]) -> dict[str, Any] | None:
    profile = record.get("profile") or record.get("trace")
    split = isinstance(profile, dict) and "window_ms" in profile and (profile.get("parts_ms") or "top" in profile)
    return profile if split else None


def _setting(record: dict[str, Any]) -> str:
    return ", ".join(filter(None, (record.get("scope"), from_record(record, "step_time").setting)))


def draw(found: list[Row]) -> Figure:
    """The profiled steps. Those without a profile are in the table: their times are drawn with the throughputs."""
    panels = grouped(pick(found, note=lambda note: note != TIMED), _panel)
    panels = dict(sorted(panels.items(), key=lambda item: (item[0][4], item[0][0], item[0][1] or 0, item[0][5])))
    counts = [len(grouped(mine, lambda r: r.series)) for mine in panels.values()] or [3]
    figure, axes = style.figure(len(counts), 1, 9, 0.29 * sum(counts) + 1.2 * len(counts), height_ratios=[n + 2.2 for n in counts])
    if not panels:
        style.nothing(axes[0][0])
        return figure
    for axis, ((_, layers, gpus, gpu, scope, tokens, note, run), mine) in zip(axes[:, 0], panels.items()):
        bars = grouped(sorted(mine, key=lambda r: r.kernel or ""), lambda r: r.series)
        for place, same in enumerate(bars.values()):
            timed, split = pick(same, metric="step_time"), pick(same, metric=lambda metric: metric != "step_time")
            left, whole = 0.0, sum(row.value for row in split)
            for row in split:
                text, shade, hatch = LOOKS.get(row.metric, (row.metric, "0.95", "\\\\\\\\"))
                axis.barh(place, row.value, left=left, height=0.7, facecolor=shade, edgecolor="0.2", linewidth=0.7, hatch=hatch, label=text)
                if row.value > 0.09 * whole:
                    light = shade not in ("0.25", "0.4")
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if hatch else None
                    look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "k" if light else "w", "bbox": box}
                    axis.text(left + row.value / 2, place, f"{100 * row.value / whole:.0f} %", **look)
                left += row.value
            said = f"{number(left)} s"
            if timed:
                step = timed[0].value
                axis.plot([step] * 2, [place - 0.48, place + 0.48], label=UNPROFILED, color="k", path_effects=[HALO], linewidth=2)
                said += f", {number(step)} s without"
            look = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axis.annotate(said, (max(left, *(row.value for row in timed), 0.0), place), **look)
        axis.set_yticks(range(len(bars)), [textwrap.fill(_label(same[0]), 38) for same in bars.values()], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.36 * max(sum(row.value for row in same if row.metric != "step_time") for same in bars.values()))
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("time (s)")
        deep = f"{layers} layers" if scope == "model" else "attention block"
        note += f", …{run}" if run else ""
        title = f"{style.model(mine[0])}, {deep}, {format_tokens(tokens)} tokens, {gpus} × {gpu}, measured ({note})"
        axis.set_title(title, loc="left", fontsize=8.5)
    style.legend_below(figure, axes[:, 0], 3)
    return figure


def _panel(row: Row) -> tuple:
    """What the bars of a panel have in common. Steps of whole models are compared within a run."""
    scope = row.setting.split(", ")[0]
    return row.model, row.layers, row.gpus, row.gpu, scope, row.tokens, row.note, run_of(row)[-6:] if scope == "model" else ""


def _label(row: Row) -> str:
    return style.name(dataclasses.replace(row, setting=", ".join(row.setting.split(", ")[1:])))
