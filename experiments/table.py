"""What an experiment's records say so far, as a table: methods by lengths.

    python -m experiments.table NAME
    python -m experiments.table NAME --compare                 and the published numbers of the same model
    python -m experiments.table NAME --compare numbers.csv     from another file of the same columns

A cell is throughput in tokens/s/GPU (on the CPU: seconds a step) and peak device memory in GiB, or how the point ended.
Of several records of one point the last one counts. Measured, predicted and reported rows are never mixed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments import points
from upipe import records
from upipe.config import ConfigError
from upipe.records import RecordError, format_tokens, method_of

REPORTED = points.ROOT / "paper_figures" / "reported.csv"
COLUMNS = (
    "provenance", "model", "layers", "method", "scope", "sp", "ring", "dp", "zero", "heads_per_stage", "kernel",
    "attention_output", "attention_output_host_layers", "offload", "keep_layers_on_gpu", "store_every", "overlap", "dx",
    "tile_tokens", "loss_tokens", "fused", "checkpointing", "allocator_cap_gib", "dtype", "gpus", "gpu", "experiment",
)
"""What tells rows apart. Those that all rows share stand above the table."""
ALWAYS = ("method",)
PARTS = {"throughput": "", "peak": "", "step_time": "", "peak_model": "states", "peak_attention": "attention", "peak_other": "other"}
"""Published metrics that are shown, and the part of a peak that each is of."""


def render(found: list[dict[str, Any]], reported: list[dict[str, Any]] | None = None) -> str:
    """The table as text. found: records; reported: rows of `read_reported`."""
    if not found:
        return "no records yet"
    rows: dict[tuple, dict[int, str]] = {}
    for record in latest(found):
        key = tuple(record.get(name) for name in COLUMNS)
        cells = rows.setdefault(key, {})
        cells[record["tokens"]] = _cell(record)
    shared = [name for i, name in enumerate(COLUMNS) if name not in ALWAYS and len({key[i] for key in rows}) == 1]
    shown = [name for name in COLUMNS if name not in shared]
    lengths = sorted({tokens for cells in rows.values() for tokens in cells if tokens is not None})
    first = dict(zip(COLUMNS, next(iter(rows))))
    head = ", ".join(f"{name} {first[name]}" for name in shared if first[name] is not None)
    body = [[*shown, *map(format_tokens, lengths)]]
    for key, cells in rows.items():
        values = dict(zip(COLUMNS, key))
        body.append([*(_text(values[name]) for name in shown), *(cells.get(tokens, "") for tokens in lengths)])
    text = f"{head}\n{_aligned(body)}\ncells: {_legend(found)}"
    models = {record.get("model") for record in found}
    published = [row for row in reported or () if row["model"] in models]
    return text + ("\n\n" + _render_reported(published) if reported is not None else "")


def read_reported(path: Path) -> list[dict[str, Any]]:
    """Published numbers, one dict a row; `tokens` int, `value` float or None, `ours` our name of the method or None.

    Raises ConfigError for a file that is not there or has other columns.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    rows = list(csv.DictReader(lines))
    wanted = {"source", "figure", "model", "gpus", "gpu", "method", "tokens", "metric", "value", "unit", "status"}
    if not rows or not wanted <= set(rows[0]):
        raise ConfigError(f"{path}: expected a CSV file with the columns {', '.join(sorted(wanted))}")
    for row in rows:
        row["tokens"], row["value"] = int(row["tokens"]), float(row["value"]) if row["value"] else None
        row["ours"] = method_of(row["method"])
    return rows


def latest(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of every point that `supersedes` those before it, in the order in which points first appeared; all of those
    without a point."""
    names, number = ("experiment", "provenance", "model", "layers"), itertools.count()
    return list(last_by(found, lambda r: (*(r[name] for name in names), r.get("point", next(number)))).values())


def last_by(found: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, dict[str, Any]]:
    """By key the last record that `supersedes` those before it, in the order in which keys first appeared."""
    last: dict[Any, dict[str, Any]] = {}
    for record in found:
        of = key(record)
        if of not in last or supersedes(record, last[of]):
            last[of] = record
    return last


def supersedes(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Whether a record takes an older one's place: not where it was cut off before its first timed step and the older has a time, nor
    where it is a search that was cut off and the older one of the same was finished or found more."""
    if newer.get("search_complete") is False and "search_complete" in older:
        # Adam's moments are there or not; without an optimizer that is no difference.
        same = newer.get("optimizer") == "none" or newer.get("moments_before") == older.get("moments_before")
        return not (same and (older["search_complete"] or older["longest_tokens"] > newer["longest_tokens"]))
    return not (newer.get("cut_off") and newer["time_s"] is None and older["time_s"] is not None)


def longest_of(record: dict[str, Any]) -> str:
    """The longest length that a search found to train, as text; of one that was cut off it is the least that it can be."""
    if record["search_complete"]:
        return format_tokens(record["longest_tokens"])
    return f"{format_tokens(record['longest_tokens'])} or more" if record["longest_tokens"] else "not begun"


def _cell(record: dict[str, Any]) -> str:
    if record["outcome"] != "ok":
        return record["outcome"]
    parts = []
    if record["tokens_per_s_per_gpu"] is not None:
        parts.append(f"{record['tokens_per_s_per_gpu']:.1f}")
    elif record["time_s"] is not None:
        parts.append(f"{record['time_s']:.3f} s")
    if record["peak_gib"] is not None:
        parts.append(f"{record['peak_gib']:.2f} GiB")
    return ", ".join(parts) or "ok"


def _legend(found: list[dict[str, Any]]) -> str:
    if any(record["tokens_per_s_per_gpu"] is not None for record in found):
        return "tokens/s/GPU, peak device memory, or how the point ended"
    return "seconds a step (no GPU), or how the point ended"


def _render_reported(rows: list[dict[str, Any]]) -> str:
    """Throughput and peak as published, a row a source, set-up and method."""
    cells: dict[tuple, dict[int, list[str]]] = {}
    for row in rows:
        part = PARTS.get(row["metric"])
        if part is None:
            continue
        key = (row["source"], row["figure"], row["model"], f"{row['gpus']} x {row['gpu']}", row["method"], row["ours"] or "-")
        value = "oom" if row["value"] is None else f"{row['value']:g} {row['unit']}".replace("tokens/s/gpu", "").strip()
        value += f" {part}" * bool(part) + " (oom)" * (row["value"] is not None and row["status"] == "oom")
        cells.setdefault(key, {}).setdefault(row["tokens"], []).append(value)
    if not cells:
        return "reported: no published number for this model"
    lengths = sorted({tokens for row in cells.values() for tokens in row})
    body = [["source", "figure", "model", "gpus", "method", "ours", *map(format_tokens, lengths)]]
    body += [[*key, *(", ".join(row.get(tokens, [])) for tokens in lengths)] for key, row in cells.items()]
    return f"reported (published by others; tokens/s/GPU where no unit stands)\n{_aligned(body)}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="an experiment, or a file of records")
    parser.add_argument("--results", default=str(points.ROOT / "experiments" / "results"), metavar="DIR", help="where NAME.jsonl is")
    published = "add published numbers (paper_figures/reported.csv)"
    parser.add_argument("--compare", nargs="?", const=str(REPORTED), metavar="CSV", help=published)
    options = parser.parse_args(arguments)
    path = Path(options.name) if options.name.endswith(".jsonl") else Path(options.results) / f"{options.name}.jsonl"
    try:
        if not path.exists():
            there = ", ".join(sorted(p.stem for p in path.parent.glob("*.jsonl"))) or "none"
            raise ConfigError(f"{path} is not there; experiments with records: {there}")
        reported = None if options.compare is None else read_reported(Path(options.compare))
        found = records.load(path)
        print(f"{path.stem}: {len(found)} records")
        print(render(found, reported))
    except (ConfigError, RecordError) as error:
        print(f"experiments.table: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
