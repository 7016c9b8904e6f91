"""Memory ladders: Figure 1 of Untied Ulysses (peak at 3M tokens, lever by lever), and how far each lever goes."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.figures import style
from experiments.figures.throughput import PUBLISHED, whole_models
from experiments.figures.values import Row, Sources, from_record, from_reported, grouped, model_of, pick
from upipe.records import format_tokens

TOKENS = 3 * 2**20
CAPACITY = 80
SHOWN = 180
"""GiB of a GPU, and where the axis ends."""
CUT_OFF, FIRST = ", search cut off", " (first step)"
PARTS = {"peak_model": ("model states", "0.55"), "peak_attention": ("attention", "0.8"), "peak_other": ("other", "1.0"),
         "peak_rest": ("all but states", "0.92"), "peak": ("whole peak", "0.7")}  # fmt: skip


def rows(sources: Sources) -> list[Row]:
    """Figure 1 as published; whole Llama3-8B at 3M on 8 GPUs from records, and every point of the experiments called figure1; the longest
    length by lever, published and ours."""
    found = from_reported(r for r in sources.published if r["figure"] == "figure1")
    gpus, layers, _ = PUBLISHED["llama3-8b"]
    for record in whole_models(sources):
        published = (model_of(record["model"]), record["gpus"], record["layers"], record["tokens"]) == ("llama3-8b", gpus, layers, TOKENS)
        if published or record["experiment"].partition("-")[0] == "figure1":
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
    peaks = pick(found, metric=lambda m: m.startswith("peak"))
    # A point is a bar: another with the same setting is no part of it.
    stacks = list(grouped(peaks, lambda r: (r.mark, r.series, r.source)).values())
    full = [parts for parts in stacks if _published(parts[0])]
    capped = grouped((parts for parts in stacks if not _published(parts[0])), lambda parts: _machine(parts[0]))
    longest = pick(found, metric="longest")
    ran = {row.setting for row in pick(longest, mark="measured")}
    # What is predicted of a first step is shown where one was measured.
    longest = [row for row in longest if not row.setting.endswith(FIRST) or row.setting in ran]
    ours = grouped(
        sorted(pick(longest, mark=lambda m: m != "reported"), key=lambda r: r.mark),
        lambda r: (r.note.split(",")[0], r.model, r.layers, r.gpus),
    )
    levers = [len(grouped(mine, _lever)) for mine in capped.values()]
    heights = [len(full), *levers, len(pick(longest, mark="reported")), *(len(mine) for mine in ours.values())] + ([] if ours else [0.2])
    figure, axes = style.figure(len(heights), 1, 9.5, 0.34 * sum(heights) + 1.0 * len(heights), height_ratios=[h + 1.8 for h in heights])
    left = list(axes[:, 0])
    axis = left.pop(0)
    _figure1(axis, full)
    axis.legend(handles=_handles(stacks), loc="lower right")
    for machine, mine in capped.items():
        _capped(left.pop(0), machine, mine)
    _longest(left.pop(0), pick(longest, mark="reported"), "TRL guide: longest length by lever, Qwen3-4B, one 80 GB GPU")
    for axis, ((preset, model, layers, gpus), mine) in zip(left, ours.items()):
        # A measured bar, and under it what is predicted of the same lever.
        names = list(dict.fromkeys(row.setting for row in pick(mine, mark="predicted") + mine))
        title = f"This library: {preset}, {model}, {layers} layers, {gpus} × {mine[0].gpu}, {mine[0].note.split(', ', 1)[1]}"
        _longest(axis, sorted(mine, key=lambda row: names.index(row.setting) - 0.5 * (row.mark == "measured")), title)
    if not ours:
        style.nothing(left[0], f"Longest length by lever on our GPUs: {style.NOTHING}")
    return figure


def _published(row: Row) -> bool:
    """Whether a peak is of the published set-up: published rows do not name their layers."""
    gpus, layers, _ = PUBLISHED["llama3-8b"]
    return (row.gpus, row.layers or layers, row.tokens) == (gpus, layers, TOKENS)


def _machine(row: Row) -> tuple:
    return row.mark, row.model, row.layers, row.gpus, row.gpu


def _lever(parts: list[Row]) -> tuple[str, str, str]:
    """What the points of a lever have in common: method, setting, experiment. The kernel of one that ended before its first step is not
    known."""
    return parts[0].method, parts[0].setting, parts[0].source.partition(",")[0]


def _stack(axis: Axes, place: float, parts: list[Row], end: float, base: float = 0.0) -> None:
    """One bar of a peak's parts with its sum, or OOM where there is none. end: where the axis does; base: where the bar begins."""
    left = 0.0
    for part in parts:
        if part.value is not None:
            look = style.fill(part.mark, "0.2") | {"facecolor": PARTS[part.metric][1]}
            axis.barh(place, part.value, left=base + left, height=0.7, **look)
            left += part.value
    beyond = left > end
    ended = style.ended(parts[0])
    text = " ".join(filter(None, (f"{left:.4g}" if left else "", ended, "→" if beyond else "")))
    axis.annotate(
        text, (base + min(left, end), place), xytext=(-4 if beyond else 3, 0), textcoords="offset points", va="center",
        ha="right" if beyond else "left", fontsize=8, fontweight="bold" if ended else None,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if beyond else None,
    )  # fmt: skip


def _bars(axis: Axes, labels: list[str], end: float) -> None:
    """Names of the bars, the first on top, and where the axis ends."""
    axis.set_yticks(range(len(labels)), map(_wrapped, labels), fontsize=7.5)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, end)


def _handles(stacks: list[list[Row]]) -> list[Patch]:
    """A legend's entries: the parts there are, and the marks."""
    there = {part.metric for parts in stacks for part in parts if part.value is not None}
    shades = [Patch(facecolor=shade, edgecolor="0.2", label=name) for metric, (name, shade) in PARTS.items() if metric in there]
    return [*shades, *style.mark_handles(parts[0].mark for parts in stacks)]


def _figure1(axis: Axes, stacks: list[list[Row]]) -> None:
    labels = []
    for place, parts in enumerate(stacks):
        _stack(axis, place, parts, SHOWN)
        first = parts[0]
        what = first.method if first.mark == "reported" else style.name(first)
        where = "" if first.gpu is None or first.gpu.startswith("H100") else f"{first.gpu}, "
        labels.append(f"{what}, {where}{first.mark}")
    _bars(axis, labels, SHOWN)
    axis.axvline(CAPACITY, color="0.1", linestyle=":", linewidth=1.2)
    axis.annotate("80 GiB", (CAPACITY + 1, 0.03), xycoords=axis.get_xaxis_transform(), fontsize=7.5)
    axis.set_xlabel("peak memory (GiB/GPU); the axis ends at 180")
    axis.set_title("Llama3-8B, 3M tokens, 8 × H100-80GB", loc="left")
    style.missing(axis, [part for parts in stacks for part in parts], (0.98, 0.5))


def _capped(axis: Axes, machine: tuple, stacks: list[list[Row]]) -> None:
    """The levers on a smaller machine: beside each other a column a length, all of one scale."""
    mark, model, layers, gpus, gpu = machine
    levers = grouped(stacks, _lever)
    # What is said of every lever stands in the title.
    shared = [word for word in stacks[0][0].setting.split(", ") if all(word in setting.split(", ") for _, setting, _ in levers)]
    labels = []
    for method, setting, _ in levers:
        words = ", ".join(word for word in setting.split(", ") if word not in shared)
        labels.append(style.sign(method)[0] + (f" ({words})" if words else ""))
    places = {lever: place for place, lever in enumerate(levers)}
    by_length = sorted(grouped(stacks, lambda parts: parts[0].tokens).items())
    most = max([sum(part.value or 0 for part in parts) for parts in stacks] + [1e-9])
    width, ticks = 1.5 * most, [value for value in MaxNLocator(2).tick_values(0, most) if value <= most]
    _bars(axis, labels, width * len(by_length))
    for column, (tokens, mine) in enumerate(by_length):
        for parts in mine:
            _stack(axis, places[_lever(parts)], parts, width, column * width)
        axis.axvline(column * width, color="0.1", linewidth=0.8)
        axis.annotate(format_tokens(tokens), (column * width, 1), xycoords=axis.get_xaxis_transform(), xytext=(3, 2),
                      textcoords="offset points", fontsize=8, fontweight="bold")  # fmt: skip
    starts = [column * width for column in range(len(by_length))]
    axis.set_xticks([start + tick for start in starts for tick in ticks], [f"{tick:g}" for _ in starts for tick in ticks])
    axis.set_xlabel("peak memory (GiB/GPU), by length")
    words = (f"{style.MODELS.get(model, model)}, {layers} layers", f"{gpus} × {gpu}", *filter(None, shared), mark)
    axis.set_title(_wrapped(", ".join(words), 80), loc="left", pad=16)


def _wrapped(text: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(text, width))


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
    axis.tick_params(axis="y", labelsize=7.5)
    axis.set_ylim(len(mine) - 0.4, -0.6)
    axis.set_title(_wrapped(title, 90), loc="left")
