"""Two nodes: 8 Ulysses ranks inside a node, a ring of 2 across (8u2r): peak memory, and throughput over USP's."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.figure import Figure

from experiments.figures import style
from experiments.figures.throughput import PUBLISHED, whole_models
from experiments.figures.values import Row, Sources, from_record, from_reported, model_of, over_ulysses, pick, ranks


def two_nodes(sources: Sources) -> list[dict[str, Any]]:
    """Records of the curve's model at full depth on more GPUs than a node has, with a ring.

    Table 3's rings in one node, and its other model on two, are other points.
    """
    gpus, layers, _ = PUBLISHED["llama3-8b"]  # Table 3's is one node
    mine = [r for r in whole_models(sources) if model_of(r["model"]) == "llama3-8b" and r["layers"] == layers]
    return [r for r in mine if r["gpus"] > gpus and (r["ring"] or 1) > 1]


def rows(sources: Sources) -> list[Row]:
    """The published curves (digitised), and ours of its set-up (`two_nodes`)."""
    published = [r for r in sources.published if r["figure"] == "figure5-multinode"]
    found = from_reported(r for r in published if r["metric"] == "peak")
    ratio = {"metric": "throughput over Ulysses", "method": "upipe-8u2r"}
    found += from_reported((r for r in published if r["metric"] == "throughput_ratio"), **ratio)
    ours = []
    for record in two_nodes(sources):
        for metric in ("peak", "throughput"):
            row = from_record(record, metric)
            # UPipe's own setting may have them already.
            words = dict.fromkeys((ranks(record), *row.setting.split(", ")))
            ours.append(dataclasses.replace(row, setting=", ".join(filter(None, words))))
    return [*found, *ours, *over_ulysses(ours)]


def draw(found: list[Row]) -> Figure:
    figure, axes = style.figure(1, 2, 10, 4)
    left, right = axes[0]
    style.lines(left, pick(found, metric="peak"))
    left.axhline(80, color="0.1", linestyle=":", linewidth=1.2)
    left.annotate("80 GiB", (0.01, 80), xycoords=left.get_yaxis_transform(), va="bottom", fontsize=7.5)
    left.set_ylim(0, 92)
    left.set_ylabel("peak memory (GiB/GPU)")
    left.legend(loc="upper left", bbox_to_anchor=(0, 0.84))
    style.missing(left, found)
    style.lines(right, pick(found, metric="throughput over Ulysses"))
    right.axhline(1, color="0.4", linewidth=0.8)
    right.set_ylim(0.9, max([1.05, *(1.02 * row.value for row in pick(found, metric="throughput over Ulysses"))]))
    right.set_ylabel("throughput / USP's (same mark)")
    right.legend(loc="lower right")
    for axis in (left, right):
        style.lengths(axis, found)
    left.set_title("Llama3-8B, 2 × 8 H100-80GB, 8u2r", loc="left")
    right.set_title("read off the published plots: ±0.1 GiB, ±0.002", loc="left")
    return figure
