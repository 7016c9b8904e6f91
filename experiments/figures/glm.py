"""The ablation of SkyRL's GLM-5.3-Flash guide (64 B200s), records of GLM models where there are any, and the memory that is predicted
without each of the fixes here (`experiments.glm_ablation`)."""

from __future__ import annotations

import dataclasses

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.values import Row, Sources, from_record, from_reported, grouped, number, pick
from upipe.records import format_tokens

SHOWN = {"peak": "peak memory (GiB/GPU)", "peak_indexer": "indexer's memory (GiB)", "step_time": "step time (s)",
         "throughput_total": "throughput (tokens/s, all GPUs)"}  # fmt: skip
FIX = "memory of the part named"
WITH, WITHOUT = ", with it", ", without"


def rows(sources: Sources) -> list[Row]:
    """What the guide prints, time and peak of every record of a model called glm-something, and the ablation's predictions."""
    found = from_reported(r for r in sources.published if r["source"] == "skyrl-glm-1m")
    for record in sources.records:
        if str(record["model"]).lower().startswith("glm") and record["gpus"] and record.get("scope") == "model":
            for metric in ("step_time", "peak"):
                row = from_record(record, metric)
                what = record.get("ablation") or record.get("setting") or row.setting
                if row.value is not None or row.outcome != "ok":
                    found.append(dataclasses.replace(row, setting=str(what)))
    return found + ablation(sources)


def ablation(sources: Sources) -> list[Row]:
    """The newest predictions of `experiments.glm_ablation`: the published set-up's peak, and for each fix and number of ranks that
    share a sequence what the layer, or the sum named, takes with the fix and without it."""
    newest = {(r["sp"], r["fix_off"], r["layer_kind"]): r for r in sources.every if r["experiment"] == "glm_ablation"}
    found = []
    for (ranks, fix, kind), r in newest.items():
        if kind == "model":
            found.append(from_record(r, "peak", setting="sequence over 16, ZeRO-3 over 64"))
            continue
        made = dataclasses.replace(from_record(r, "peak"), metric=FIX, gpus=ranks, note=r["basis"])
        if fix == "none turned off":
            found.append(dataclasses.replace(made, setting=f"{kind}, all fixes"))
            continue
        off = f"{fix} ({kind})"
        found.append(dataclasses.replace(made, setting=off + WITH, value=r["with_fix_gib"]))
        found.append(dataclasses.replace(made, setting=off + WITHOUT))
    return found


def draw(found: list[Row]) -> Figure:
    panels = grouped(pick(found, metric=lambda m: m in SHOWN), lambda r: (r.metric, r.mark, r.model, r.gpus, r.gpu))
    fixes = {ranks: _most(mine) for ranks, mine in grouped(pick(found, metric=FIX), lambda row: row.gpus).items()}
    counts = [*map(len, panels.values()), *(2 * len(mine) for mine in fixes.values())]
    measured = pick(found, mark="measured")
    heights = counts + ([] if measured else [1])
    figure, axes = style.figure(len(heights), 1, 9, 0.26 * sum(heights) + 1.1 * len(heights), height_ratios=[n + 2 for n in heights])
    for axis, ((metric, mark, model, gpus, gpu), mine) in zip(axes[:, 0], panels.items()):
        mine = sorted(mine, key=lambda row: row.tokens)
        style.bars(axis, mine, [f"{row.setting or row.method}, {format_tokens(row.tokens)}" for row in mine], SHOWN[metric])
        axis.set_title(f"{style.MODELS.get(model, model)}, {gpus} × {gpu}, {mark}", loc="left")
    for axis, (ranks, mine) in zip(axes[len(panels) :, 0], fixes.items()):
        _pairs(axis, mine)
        axis.set_title(f"1M tokens over {ranks} ranks, each fix turned off, predicted", loc="left")
    if not measured:
        style.nothing(axes[-1][0], f"GLM models on our GPUs: {style.NOTHING}")
    return figure


def _most(found: list[Row]) -> list[tuple[Row, Row]]:
    """(with, without) of each fix, for the layer kind that it matters most to."""
    pairs: dict[str, tuple[Row, Row]] = {}
    for off in found:
        if off.setting.endswith(WITHOUT):
            name = off.setting.removesuffix(WITHOUT)
            (on,) = pick(found, setting=name + WITH)
            fix = name.partition(" (")[0]
            pairs[fix] = max(pairs.get(fix, (on, off)), (on, off), key=lambda pair: abs(pair[1].value - pair[0].value))
    return list(pairs.values())


def _pairs(axis: Axes, pairs: list[tuple[Row, Row]]) -> None:
    """Two bars a fix: with it, and below that without."""
    for place, (on, off) in enumerate(pairs):
        for row, where, colour, what in ((on, -0.2, "0.55", "with it"), (off, 0.2, style.sign(off.method)[1], "without")):
            axis.barh(place + where, row.value, 0.38, label=what if place == 0 else None, **style.fill(row.mark, colour))
            text = (row.value, place + where)
            axis.annotate(number(row.value), text, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
    names = [off.setting.removesuffix(WITHOUT).replace(" (", "\n(") for _, off in pairs]
    axis.set_yticks(range(len(pairs)), names, fontsize=7)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(0, 8 * max(row.value for pair in pairs for row in pair))
    axis.set_xlabel("GiB a GPU (logarithmic above 1)")
    axis.legend(loc="lower right")
