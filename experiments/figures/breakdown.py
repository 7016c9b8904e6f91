"""Where a step's time goes, from the profiler's summary in a record (`experiments.block_trace.summary`).

The window is divided without rest: computation (by the names of its twelve longest kernels, `upipe.profiling.kind_of`, and
other: all further kernels), exchanges and host copies that no computation hides, idle. A record whose spans were named says more
(`upipe.parts`): its bars, in panels of their own, are by part of the step, each with its exchanges or host copies that nothing hides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.throughput import compared
from experiments.figures.values import Row, Sources, from_record, grouped, run_of
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
    "forward": ("forward", "0.75", ""),
    "backward": ("backward, recomputation in it", "0.4", ""),
    "optimizer": ("optimizer", "white", "||||"),
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
    """Parts (ms) of the last profiled record of each point, and of the last with named parts; of whole models' steps without a profile
    forward, backward, optimizer, of the last record of each point and the baselines of its run."""
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
        split = parts(profile) if profile else {name: 1e3 * s for name, s in record["parts_s"].items()}
        whole = from_record(record, "step_time", setting=_setting(record), unit="ms")
        note = ("step by part" if profile.get("parts_ms") else "profiled step") if profile else "timed step"
        found += [dataclasses.replace(whole, metric=name, value=value, note=note) for name, value in split.items()]
    return found


def _profile(record: dict[str, Any]) -> dict[str, Any] | None:
    profile = record.get("profile") or record.get("trace")
    return profile if isinstance(profile, dict) and "window_ms" in profile else None


def _setting(record: dict[str, Any]) -> str:
    return ", ".join(filter(None, (record.get("scope"), from_record(record, "step_time").setting)))


def draw(found: list[Row]) -> Figure:
    panels = grouped(found, _panel)
    panels = dict(sorted(panels.items(), key=lambda item: (item[0][4], item[0][0], item[0][1] or 0, item[0][5])))
    counts = [len(grouped(mine, lambda r: r.series)) for mine in panels.values()] or [3]
    figure, axes = style.figure(len(counts), 1, 9, 0.27 * sum(counts) + 1.2 * len(counts), height_ratios=[n + 2.2 for n in counts])
    if not panels:
        style.nothing(axes[0][0])
        return figure
    for axis, ((_, layers, gpus, gpu, scope, tokens, note, run), mine) in zip(axes[:, 0], panels.items()):
        bars = grouped(sorted(mine, key=lambda r: r.kernel or ""), lambda r: r.series)
        for place, same in enumerate(bars.values()):
            left, whole = 0.0, sum(row.value for row in same)
            for row in same:
                text, shade, hatch = LOOKS.get(row.metric, (row.metric, "0.95", "\\\\\\\\"))
                axis.barh(place, row.value, left=left, height=0.7, facecolor=shade, edgecolor="0.2", linewidth=0.7, hatch=hatch, label=text)
                if row.value > 0.09 * whole:
                    light = shade not in ("0.25", "0.4")
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if hatch else None
                    look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "k" if light else "w", "bbox": box}
                    axis.text(left + row.value / 2, place, f"{100 * row.value / whole:.0f} %", **look)
                left += row.value
            axis.annotate(f"{left:.0f} ms", (left, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axis.set_yticks(range(len(bars)), [_label(same[0]) for same in bars.values()])
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("time (ms)")
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
