"""Time and peak of `experiments.block`'s methods over lengths, drawn from its records."""

from __future__ import annotations

from typing import Any

from upipe.records import format_tokens


def draw(found: list[dict[str, Any]], path: str) -> None:
    """Two panels a kernel: time over Ulysses' (over the bare kernel's where Ulysses did not run; seconds where neither
    did) and peak above the inputs in u, each over the length.

    Args:
        found: records of one run, those of scope "block".
        path: where the picture goes; its ending says its format.

    Raises ValueError where there is no such record.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [record for record in found if record.get("scope") == "block"]
    if not found:
        raise ValueError("no record of a block: nothing to draw")
    names = list(dict.fromkeys(record["kernel"] for record in found))
    figure, axes = pyplot.subplots(2, len(names), figsize=(5.5 * len(names), 7), squeeze=False, sharex=True)
    for column, kernel in enumerate(names):
        mine = [record for record in found if record["kernel"] == kernel]
        key, title = next(
            (pair for pair in (("over_ulysses", "time over Ulysses"), ("over_kernel", "time over the bare kernel"))
             if any(pair[0] in record for record in mine)), ("time_s", "seconds a step"))
        _panel(axes[0][column], mine, key, f"{kernel}, {title}")
        _panel(axes[1][column], mine, "peak_units", "peak above inputs (u)")
    first = found[0]
    figure.suptitle(f"{first['model']} block, {first['sp']} x {first['gpu'] or 'CPU'}, {first['dtype']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis, found: list[dict[str, Any]], key: str, title: str) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in found:
        if record.get(key) is not None:
            label = " ".join(filter(None, (record["method"], record["mode"])))
            curves.setdefault(label, []).append((record["tokens"], record[key]))
    for label, points in curves.items():
        axis.plot(*zip(*sorted(points)), marker="o", label=label)
    lengths = sorted({record["tokens"] for record in found})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [format_tokens(tokens) for tokens in lengths])
    axis.set_title(title)
    axis.set_ylim(bottom=0)
    if curves:
        axis.legend(fontsize=8)
