"""The ablation of SkyRL's GLM-5.3-Flash guide (64 B200s), and records of GLM models where there are any."""

from __future__ import annotations

import dataclasses

from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.values import Row, Sources, from_record, from_reported, grouped, pick
from upipe.records import format_tokens

SHOWN = {"peak": "peak memory (GiB/GPU)", "peak_indexer": "indexer's memory (GiB)", "step_time": "step time (s)",
         "throughput_total": "throughput (tokens/s, all GPUs)"}  # fmt: skip


def rows(sources: Sources) -> list[Row]:
    """What the guide prints, and time and peak of every record of a model called glm-something."""
    found = from_reported(r for r in sources.published if r["source"] == "skyrl-glm-1m")
    for record in sources.records:
        if str(record["model"]).lower().startswith("glm") and record["gpus"] and record.get("scope") == "model":
            for metric in ("step_time", "peak"):
                row = from_record(record, metric)
                what = record.get("ablation") or record.get("setting") or row.setting
                if row.value is not None or row.outcome != "ok":
                    found.append(dataclasses.replace(row, setting=str(what)))
    return found


def draw(found: list[Row]) -> Figure:
    panels = grouped(pick(found, metric=lambda m: m in SHOWN), lambda r: (r.metric, r.mark, r.model, r.gpus, r.gpu))
    counts = [len(mine) for mine in panels.values()]
    measured = pick(found, mark="measured")
    heights = counts + ([] if measured else [1])
    figure, axes = style.figure(len(heights), 1, 8, 0.26 * sum(heights) + 1.1 * len(heights), height_ratios=[n + 2 for n in heights])
    for axis, ((metric, mark, model, gpus, gpu), mine) in zip(axes[:, 0], panels.items()):
        mine = sorted(mine, key=lambda row: row.tokens)
        style.bars(axis, mine, [f"{row.setting or row.method}, {format_tokens(row.tokens)}" for row in mine], SHOWN[metric])
        axis.set_title(f"{style.MODELS.get(model, model)}, {gpus} × {gpu}, {mark}", loc="left")
    if not measured:
        style.nothing(axes[-1][0], f"GLM models on our GPUs: {style.NOTHING}")
    return figure
