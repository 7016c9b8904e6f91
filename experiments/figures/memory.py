"""Memory ladders: Figure 1 of Untied Ulysses (peak at 3M tokens, lever by lever), and how far each lever goes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.throughput import PUBLISHED, whole_models
from experiments.figures.values import Row, Sources, from_record, from_reported, grouped, model_of, pick
from upipe.records import format_tokens

TOKENS = 3 * 2**20
CAPACITY = 80
SHOWN = 180
"""GiB of a GPU, and where the axis ends."""
CUT_OFF, FIRST = ", search cut off", " (first step)"
PARTS = {"peak_model": ("model states", "0.35"), "peak_attention": ("attention", "0.75"), "peak_other": ("other", "1.0"),
         "peak_rest": ("all but states", "0.9")}  # fmt: skip


def rows(sources: Sources) -> list[Row]:
    """Figure 1 as published; whole Llama3-8B at 3M on 8 GPUs from records; the longest length by lever, published and ours."""
    found = from_reported(r for r in sources.published if r["figure"] == "figure1")
    gpus, layers, _ = PUBLISHED["llama3-8b"]
    for record in whole_models(sources):
        if (model_of(record["model"]), record["gpus"], record["layers"], record["tokens"]) == ("llama3-8b", gpus, layers, TOKENS):
            found += _split(record)
    found += from_reported((r for r in sources.published if (r["figure"], r["metric"]) == ("levers", "max_tokens")), metric="longest")
    for record in sources.records:
        begun = record.get("longest_tokens") or record.get("search_complete")
        if begun and record["gpus"]:
            how = ", by the planner" if record["provenance"] == "predicted" else ", attention simulated" if record["memory_only"] else ""
            note = f"preset {record['preset']}, {record['cap_gib']:g} GiB{how}" + ("" if record["search_complete"] else CUT_OFF)
            value = float(record["longest_tokens"]) or None
            made = from_record(record, "longest", value=value, setting=lever(record), note=note)
            found.append(made)
            first = record.get("longest_first_step_tokens")
            if first is not None:
                found.append(dataclasses.replace(made, value=float(first) or None, setting=f"{made.setting}{FIRST}"))
    return found


def lever(record: dict[str, Any]) -> str:
    """A record's lever; of earlier searches with Adam the lengths are those of an engine's first step, without its moments."""
    old = record["provenance"] == "measured" and record["optimizer"] != "none" and not record.get("moments_before")
    return record["rung"] + FIRST * old


def _split(record: dict[str, Any]) -> list[Row]:
    """States and the rest of a record's peak."""
    peak = from_record(record, "peak")
    if peak.value is None or record["states_gib"] is None:
        return [peak]
    rest = dataclasses.replace(peak, metric="peak_rest", value=peak.value - record["states_gib"])
    return [dataclasses.replace(peak, metric="peak_model", value=record["states_gib"]), rest]


def draw(found: list[Row]) -> Figure:
    stacks = grouped(pick(found, metric=lambda m: m.startswith("peak")), lambda r: (r.mark, r.series))
    longest = pick(found, metric="longest")
    ours = grouped(
        sorted(pick(longest, mark=lambda m: m != "reported"), key=lambda r: r.mark),
        lambda r: (r.note.split(",")[0], r.model, r.layers, r.gpus),
    )
    heights = [len(stacks), len(pick(longest, mark="reported")), *(len(mine) for mine in ours.values())] + ([] if ours else [0.2])
    figure, axes = style.figure(len(heights), 1, 8.5, 0.34 * sum(heights) + 1.0 * len(heights), height_ratios=[h + 1.8 for h in heights])
    _figure1(axes[0][0], list(stacks.values()))
    _longest(axes[1][0], pick(longest, mark="reported"), "TRL guide: longest length by lever, Qwen3-4B, one 80 GB GPU")
    for axis, ((preset, model, layers, gpus), mine) in zip(axes[2:, 0], ours.items()):
        # A measured bar, and under it what is predicted of the same lever.
        names = list(dict.fromkeys(row.setting for row in pick(mine, mark="predicted") + mine))
        title = f"This library: {preset}, {model}, {layers} layers, {gpus} × {mine[0].gpu}, {mine[0].note.split(', ', 1)[1]}"
        _longest(axis, sorted(mine, key=lambda row: names.index(row.setting) - 0.5 * (row.mark == "measured")), title)
    if not ours:
        style.nothing(axes[2][0], f"Longest length by lever on our GPUs: {style.NOTHING}")
    return figure


def _figure1(axis: Axes, stacks: list[list[Row]]) -> None:
    labels = []
    for place, parts in enumerate(stacks):
        left = 0.0
        for part in parts:
            name, shade = PARTS.get(part.metric, ("peak", "0.6"))
            ours = {"hatch": style.HATCH["predicted"], "linestyle": "--"} if part.mark == "predicted" else {}
            axis.barh(place, part.value or 0, left=left, height=0.7, facecolor=shade, edgecolor="0.2", label=name, **ours)
            left += part.value or 0
        oom = " OOM" if parts[0].outcome == "oom" else ""
        beyond = " →" if left > SHOWN else ""
        axis.annotate(
            f"{left:.4g}{oom}{beyond}", (min(left, SHOWN), place), xytext=(-4 if beyond else 3, 0), textcoords="offset points", va="center",
            ha="right" if beyond else "left", fontsize=8, fontweight="bold" if oom else None,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if beyond else None,
        )  # fmt: skip
        what = parts[0].method if parts[0].mark == "reported" else style.name(parts[0])
        labels.append(f"{what}, {parts[0].mark}")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, SHOWN)
    axis.axvline(CAPACITY, color="0.1", linestyle=":", linewidth=1.2)
    axis.annotate("80 GiB", (CAPACITY + 1, 0.03), xycoords=axis.get_xaxis_transform(), fontsize=7.5)
    axis.set_xlabel("peak memory (GiB/GPU); the axis ends at 180")
    axis.set_title("Llama3-8B, 3M tokens, 8 × H100-80GB", loc="left")
    handles: dict[str, Any] = {}
    for handle, text in zip(*axis.get_legend_handles_labels()):
        handles.setdefault(text, handle)
    axis.legend(handles.values(), handles.keys(), loc="lower right")
    style.missing(axis, [part for parts in stacks for part in parts], (0.98, 0.42))


def _longest(axis: Axes, mine: list[Row], title: str) -> None:
    if not mine:
        return style.nothing(axis, "no published value")
    labels = [f"{row.setting or row.method}, {f'{row.gpus} GPUs, ' if row.gpus != mine[0].gpus else ''}{row.mark}" for row in mine]
    style.bars(axis, mine, labels, "longest sequence that trains (tokens)")
    step = 2 ** max(10, math.ceil(math.log2(max(row.value or 1 for row in mine) / 8)))
    axis.set_xticks(ticks := range(0, int(axis.get_xlim()[1]), step), map(format_tokens, ticks))
    for text, row in zip(axis.texts, mine):
        length = format_tokens(int(row.value)) if row.value else "OOM"
        text.set_text(f"{length} or more: the search was cut off" if row.note.endswith(CUT_OFF) else length)
    axis.set_title(title, loc="left")
