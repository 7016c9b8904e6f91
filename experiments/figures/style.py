"""One look for all figures: fonts, the sign of each method, and fill for the mark, so that greyscale is enough.

Lines: a method is a marker and a shade; its mark is line and fill: reported solid and hollow, measured thick and filled,
predicted dashed and grey-filled. Bars: reported hatched, measured full, predicted dotted. OOM is the word OOM.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import matplotlib
import numpy

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from experiments.figures.values import MARKS, Row, grouped, number, our_method, pick
from upipe.records import format_tokens

LOOK = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 7.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "0.9", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "hatch.linewidth": 0.6, "figure.constrained_layout.use": True, "pdf.fonttype": 42, "legend.frameon": False,
}  # fmt: skip
METHODS = {
    "upipe": ("UPipe", "#08306b", "o"),
    "ulysses": ("Ulysses", "#c8553d", "s"),
    "alst": ("Ulysses (ALST stack)", "#d98c5f", "s"),
    "ring": ("Ring", "#3f8f5b", "^"),
    "usp": ("USP", "#a23b72", "p"),
    "fpdt": ("FPDT", "#d9a514", "D"),
    "native": ("PyTorch native", "#8a8f98", "v"),
    "official-upipe": ("official UPipe", "#5b8fc7", "h"),
    "kernel": ("bare kernel", "#555555", "x"),
    "none": ("no sequence parallelism", "#555555", "X"),
}
HATCH = {"reported": "////", "measured": "", "predicted": "...."}
NOTHING = "no measured value yet"
KERNELS = {"fa4": "FA4", "fa3": "FA3", "fa2": "FA2", "cudnn": "cuDNN"}
MODELS = {"llama3-8b": "Llama3-8B", "qwen3-32b": "Qwen3-32B", "glm-5.3-flash": "GLM-5.3-Flash"}


def look() -> Any:
    """The context in which a figure is drawn."""
    return pyplot.rc_context(LOOK)


def figure(rows: int, columns: int, width: float, height: float, **settings: Any) -> tuple[Figure, Any]:
    """A figure and its axes [rows, columns]. Inches."""
    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, **settings)


def picture(made: Figure, ending: str = "png") -> bytes:
    """A figure as PNG or PDF, the same bytes for the same figure."""
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "ModDate": None}}[ending]
    stream = io.BytesIO()
    with look():
        made.savefig(stream, format=ending, dpi=120, metadata=metadata)
    if ending == "pdf":
        return stream.getvalue()
    # A palette is a third of the bytes.
    smaller = io.BytesIO()
    _with_palette(Image.open(stream).convert("RGB")).save(smaller, format="png", optimize=True)
    return smaller.getvalue()


def _with_palette(image: Image.Image) -> Image.Image:
    """An image in its 256 most frequent colours, those of methods always among them: a palette of averages changes the colours of thin
    lines. Other shades are those between a line and its ground, and become the nearest."""
    red, green, blue = numpy.moveaxis(numpy.asarray(image).astype(numpy.int32), 2, 0)
    codes, where, counts = numpy.unique(red << 16 | green << 8 | blue, return_inverse=True, return_counts=True)
    ours = [int(to_hex(colour)[1:], 16) for _, colour, _ in METHODS.values()]
    counts[numpy.isin(codes, ours)] = red.size
    colours = numpy.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    kept = colours[numpy.argsort(-counts, kind="stable")[:256]]
    nearest = [((some[:, None] - kept) ** 2).sum(2).argmin(1) for some in numpy.array_split(colours, 1 + len(colours) // 1000)]
    smaller = Image.fromarray(numpy.concatenate(nearest)[where].reshape(red.shape).astype(numpy.uint8))
    smaller.putpalette(kept.astype(numpy.uint8).tobytes())
    return smaller


def close(made: Figure) -> None:
    pyplot.close(made)


def sign(method: str) -> tuple[str, str, str]:
    """Label, colour and marker of a method, ours or as reported.csv calls it."""
    return METHODS[method if method in METHODS else our_method(method) or "none"]


def label(row: Row) -> str:
    """What a legend says of a series: method, setting, kernel, mark."""
    return f"{name(row)}, {row.mark}"


def name(row: Row) -> str:
    """A series without its mark."""
    words = ", ".join(filter(None, (row.setting, KERNELS.get(row.kernel, row.kernel))))
    return f"{sign(row.method)[0]}{f' ({words})' if words else ''}"


def model(row: Row) -> str:
    """A model's name."""
    return MODELS.get(row.model, row.model)


def legend_below(made: Figure, axes: Iterable[Axes], columns: int, **settings: Any) -> None:
    """One legend for all panels, each entry once, under them."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(text, handle)
    made.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, **settings)


def lines(axis: Axes, rows: Iterable[Row]) -> None:
    """Every series over lengths. At the first length that ended in OOM the word stands under the curves, with the series' marker."""
    styles: dict[tuple, int] = {}
    taken: list[tuple[int, int]] = []  # tokens, level: words of neighbours stand above each other
    under = axis.get_xaxis_transform()
    for mine in series(rows):
        _, colour, marker = sign(mine[0].method)
        again = styles[(mine[0].mark, marker)] = styles.get((mine[0].mark, marker), -1) + 1
        look = {
            "reported": {"linestyle": "-", "linewidth": 1.1, "markerfacecolor": "white"},
            "measured": {"linestyle": "-", "linewidth": 2.2, "markerfacecolor": colour},
            "predicted": {"linestyle": ("--", ":", "-.")[again % 3], "linewidth": 1.2, "markerfacecolor": "0.8"},
        }[mine[0].mark]
        points = sorted((row.tokens, row.value) for row in mine if row.value is not None and row.outcome == "ok")
        axis.plot(*(zip(*points) if points else ([], [])), color=colour, marker=marker, markersize=5, label=label(mine[0]), **look)
        # Longer ones are out of memory too.
        for row in sorted(pick(mine, outcome="oom"), key=lambda row: row.tokens)[:1]:
            near = {level for tokens, level in taken if 0.6 < tokens / row.tokens < 1.6}
            taken.append((row.tokens, level := min(set(range(len(taken) + 1)) - near)))
            place = 0.03 + 0.06 * level
            face = look["markerfacecolor"]
            axis.plot([row.tokens], [place], marker=marker, color=colour, markerfacecolor=face, markersize=4, transform=under)
            look = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 6, "color": colour}
            axis.annotate(ended(row), (row.tokens, place), xycoords=under, **look)


def lengths(axis: Axes, rows: Iterable[Row]) -> None:
    """A logarithmic axis of lengths, with the lengths there are; labels of a logarithmic y axis are at 1, 2, 5."""
    there = sorted({row.tokens for row in rows if row.tokens})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_minor_locator(NullLocator())
    if axis.get_yscale() == "log":
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    # Of neighbours closer than this only one is written.
    shown = [t for i, t in enumerate(there) if i == 0 or t / there[i - 1] > 1.3 or t == there[-1]]
    axis.set_xticks(shown, [format_tokens(tokens) for tokens in shown], rotation=45 if len(shown) > 7 else 0)
    axis.set_xlabel("sequence length (tokens)")
    if there:
        axis.set_xlim(there[0] / 1.25, there[-1] * 1.45)


def bars(axis: Axes, rows: list[Row], labels: list[str], unit: str) -> None:
    """Horizontal bars, the first on top, each with its value or OOM at its end."""
    places = list(range(len(rows)))
    for place, row in zip(places, rows):
        bar(axis, place, row)
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, 1.18 * max([row.value or 0 for row in rows] + [1e-9]))
    axis.set_xlabel(unit)


def fill(mark: str, colour: str) -> dict[str, Any]:
    """How a bar of a mark is filled, in the colour of what it shows."""
    face = {"reported": "white", "measured": colour, "predicted": "0.93"}[mark]
    return {"facecolor": face, "edgecolor": colour, "hatch": HATCH[mark], "linestyle": "--" if mark == "predicted" else "-"}


def ended(row: Row) -> str:
    """OOM, of whose memory where it is not the device's, or how else a run ended; nothing where it is ok."""
    host = {"oom_host": "OOM (host)", "oom_pinned": "OOM (pinned)"}
    return {"ok": "", "oom": host.get(row.note, "OOM")}.get(row.outcome, row.outcome)


def bar(axis: Axes, place: float, row: Row, more: str = "") -> None:
    """One horizontal bar in the look of its mark, its value, and `more` behind it."""
    axis.barh(place, row.value or 0.0, height=0.7, **fill(row.mark, sign(row.method)[1]))
    value = "" if row.value is None else number(row.value)
    text = " ".join(filter(None, (value, ended(row), more)))
    axis.annotate(text, (row.value or 0.0, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)


def row_title(axis: Axes, place: float, text: str) -> None:
    """A title above a group of horizontal bars, at the left edge of the axis, over whatever lies to its right, further panels too."""
    axis.set_zorder(2)
    axis.patch.set_visible(False)
    axis.text(
        0.0, place, text, transform=axis.get_yaxis_transform(), fontsize=8, fontweight="bold", va="center", in_layout=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def nothing(axis: Axes, what: str = NOTHING) -> None:
    """An empty panel that says so."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, what, transform=axis.transAxes, ha="center", va="center", fontsize=9, color="0.35", wrap=True)


def missing(axis: Axes, rows: Iterable[Row], place: tuple[float, float] = (0.98, 0.98)) -> None:
    """A line in the panel where none of its values was measured."""
    if not any(row.mark == "measured" for row in rows):
        axis.text(*place, NOTHING, transform=axis.transAxes, ha="right", va="top", fontsize=7.5, color="0.35", style="italic")


def mark_handles(marks: Iterable[str]) -> list[Patch]:
    """Entries of a legend that say how each of these marks is filled."""
    there = set(marks)
    return [Patch(**fill(mark, "0.35"), label=mark) for mark in MARKS if mark in there]


def mark_legend(made: Figure, marks: Iterable[str], **settings: Any) -> None:
    """Bars' marks, under the panels."""
    made.legend(handles=mark_handles(marks), loc="outside lower center", ncols=3, **settings)


def series(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by mark, set-up, method and setting: reported first."""
    order = sorted(rows, key=lambda row: MARKS.index(row.mark))
    return list(grouped(order, lambda row: (row.mark, row.model, row.layers, row.gpus, row.gpu, row.series)).values())
