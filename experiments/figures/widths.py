"""The U ablation: step time and peak over U, the query heads a stage computes over all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.figures import style
from experiments.figures.values import Row, Sources, from_record, grouped, pick
from upipe.records import format_tokens

SHAPE = ("experiment", "scope", "model", "layers", "sp", "ring", "gpus", "gpu", "kernel", "attention_output", "overlap", "dx", "offload",
         "tile_tokens", "fused", "memory_only", "tokens")  # fmt: skip
"""What the records of one curve share."""
BASELINES = {"block": "peak above the block's inputs", "model": "peak above the model's states"}
"""What `peak_units` of a scope is counted from."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def sweeps(every: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records that differ in U alone, at least three, by U: of the run with the most of them, the last of such, completed from others."""
    found = []
    ours = [r for r in every if r["method"] == "upipe" and r["heads_per_stage"] and r["gpus"] and r["provenance"] == "measured"]
    for mine in grouped(ours, lambda r: tuple(r.get(name) for name in SHAPE)).values():
        runs = sorted(grouped(mine, lambda r: r["run_id"]).values(), key=lambda run: len({r["heads_per_stage"] for r in run}))
        by_width = {record["heads_per_stage"]: record for run in runs for record in run}
        if len(by_width) >= 3:
            found.append([by_width[width] for width in sorted(by_width)])
    return found


def rows(sources: Sources) -> list[Row]:
    """Step time (s) and peak (u) of every point of a sweep, and the time over that of the widest stage."""
    found = []
    for sweep in sweeps(sources.every):
        made = {metric: [_row(record, metric) for record in sweep] for metric in ("step_time", "peak_units")}
        widest = made["step_time"][-1].value
        over = [
            dataclasses.replace(row, metric="step_time over widest", value=row.value / widest, unit="ratio")
            for row in made["step_time"] if row.value is not None and widest is not None
        ]  # fmt: skip
        found += [*made["step_time"], *over, *made["peak_units"]]
    return found


def _row(record: dict[str, Any], metric: str) -> Row:
    row = from_record(record, metric)
    words = [word for word in row.setting.split(", ") if not word.startswith("U=")]
    return dataclasses.replace(row, setting=", ".join([f"U={record['heads_per_stage']}", record["scope"], *words]))


def draw(found: list[Row]) -> Figure:
    panels = grouped(found, lambda r: (r.model, r.layers, r.gpus, r.gpu, r.kernel, r.setting.split(", ", 1)[1]))
    figure, axes = style.figure(2, max(1, len(panels)), 4.8 * max(1, len(panels)), 6, sharex="col")
    for top in axes[0][1:]:
        # 4 % more in one panel is not to look like four times as much in the next.
        top.sharey(axes[0][0])
    if not panels:
        style.nothing(axes[0][0])
        style.nothing(axes[1][0], "the paper's values (8B, 4 × H100, 512K) were not published")
        return figure
    for (top, bottom), ((model, layers, gpus, gpu, kernel, what), mine) in zip(axes.T, panels.items()):
        by_length = sorted(grouped(mine, lambda r: r.tokens).items())
        for number, (tokens, same) in enumerate(by_length):
            shade = str(0.65 * number / max(1, len(by_length) - 1))
            for axis, metric in ((top, "step_time over widest"), (bottom, "peak_units")):
                points = [(row.width, row.value) for row in pick(same, metric=metric) if row.value is not None]
                if points:
                    text = f"{format_tokens(tokens)} ({points[0][1]:.3f} at U = {points[0][0]})"
                    axis.plot(*zip(*points), color=shade, marker=MARKERS[number % 7], markersize=5, linewidth=1.8, label=text)
            for row in pick(same, metric="step_time", outcome="oom"):
                top.annotate("OOM", (row.width, 0.04), xycoords=top.get_xaxis_transform(), ha="center", fontsize=7, color=shade)
        widths = sorted({row.width for row in mine})
        for axis in (top, bottom):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xticks(widths, [str(width) for width in widths])
            axis.tick_params(labelbottom=True)
        top.axhline(1, color="0.4", linewidth=0.8)
        top.set_ylabel(f"step time / that of U = {widths[-1]}")
        scope, what = what.split(", ", 1)
        bottom.set_ylabel(f"{BASELINES[scope]}\n(u, a rank's bf16 hidden state)")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("U (query heads a stage, all ranks)")
        deep = f"{layers} layers" if scope == "model" else "attention block"
        words = (style.MODELS.get(model, model), deep, what, style.KERNELS.get(kernel, kernel))
        top.set_title(f"{', '.join(words)}\n{gpus} × {gpu}, measured", loc="left")
        top.legend(title="tokens", loc="upper right")
    figure.supxlabel("The paper's values (8B, 4 × H100, 512K) were not published.", fontsize=7.5, color="0.35")
    return figure
