"""What follows from several records of `experiments.block`: slopes over lengths, ratios between methods, the table."""

from __future__ import annotations

from typing import Any

from upipe.records import Record, format_tokens, unit_gib

PARTS = ("first_forward", "second_forward", "backward")
"""Of a step, in order."""
SLOPE = (2**18, 2**19)
"""The lengths that a slope is taken between, where both ran; otherwise the two longest."""


def slope(short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """Peak above inputs = slope_units x u + constant_gib, through two records of different lengths. Record extras."""
    units = [unit_gib(Record.from_dict(r)) for r in (short, long)]
    found: dict[str, Any] = {"slope_tokens": [short["tokens"], long["tokens"]]}
    for prefix, name in (("", "peak_above_inputs_gib"), ("reserved_", "reserved_above_inputs_gib")):
        slope_units = (long[name] - short[name]) / (units[1] - units[0])
        found |= {f"{prefix}slope_units": slope_units, f"{prefix}constant_gib": short[name] - slope_units * units[0]}
    return found


def slopes(found: list[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """`slope` of every series (method, mode, kernel, ...) with peaks at two lengths: 256K and 512K, or the two longest."""
    by_series: dict[tuple, dict[int, dict]] = {}
    for record in found:
        if record["peak_above_inputs_gib"] is not None:
            by_series.setdefault(series(record), {})[record["tokens"]] = record
    ends = {}
    for key, by_length in by_series.items():
        lengths = SLOPE if set(SLOPE) <= set(by_length) else sorted(by_length)[-2:]
        if len(lengths) == 2:
            ends[key] = slope(*(by_length[n] for n in lengths))
    return ends


def series(record: dict[str, Any]) -> tuple:
    """What the records of one curve over lengths share."""
    return tuple(record[name] for name in ("run_id", "model", "sp", "kernel", "method", "mode", "heads_per_stage", "dtype"))


def ratios(record: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Record extras: time over Ulysses' and over the bare kernel's of as many forwards, where they ran at this kernel and length.

    Each is the ratio of the medians, and [least, most] of the rounds taken one by one.
    """
    found: dict[str, Any] = {}
    if record["times_s"] is None:
        return found
    for name, methods in (("over_ulysses", ("ulysses", "none")), ("over_kernel", ("kernel",))):
        base = [r for r in others if r["method"] in methods and (name == "over_ulysses" or r["forwards"] == record["forwards"])]
        if base:
            rounds = [mine / its for mine, its in zip(record["times_s"], base[0]["times_s"])]
            found |= {name: record["time_s"] / base[0]["time_s"], f"{name}_rounds": [min(rounds), max(rounds)]}
    return found


COLUMNS = (
    "tokens", "kernel", "method", "mode", "U", "ms", "least", "most", "forward", "again", "backward", "/ulysses", "/kernel", "TFLOP/s",
    "peak u", "peak GiB", "reserved u", "slope u", "+ GiB", "exposed",
)


def table(found: list[dict[str, Any]]) -> str:
    """Records of one run as text: a line a method, mode, kernel and length; and the kernels' rates, where there are any."""
    lines = [COLUMNS] + [_line(r) for r in found if r.get("scope") == "block"]
    shown = [i for i in range(len(COLUMNS)) if len(lines) > 1 and any(line[i] for line in lines[1:])]
    texts = [_aligned([[line[i] for i in shown] for line in lines])] if shown else []
    rates = [r for r in found if r.get("scope") == "kernel"]
    if rates:
        cells = [
            [format_tokens(r["tokens"]), r["kernel"], *(f"{r[f'{part}_{unit}'] * scale:.{digits}f}" for part in ("forward", "backward")
             for unit, scale, digits in (("s", 1e3, 3), ("tflops_per_s", 1, 1)))]
            for r in rates
        ]
        texts.append(_aligned([["tokens", "kernel", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"], *cells]))
    return "\n\n".join(texts) or "no records"


def _line(record: dict[str, Any]) -> list[str]:
    def number(value, digits=3, scale=1.0):
        return "" if value is None else f"{value * scale:.{digits}f}"

    parts = record.get("parts_s") or {}
    exposed = ((record["profile"] or {}).get("communication") or {}).get("exposed_ratio")
    return [
        format_tokens(record["tokens"]), record["kernel"], record["method"], record["mode"] or "", str(record["heads_per_stage"] or ""),
        *(number(value, 2, 1e3) for value in (record["time_s"], record.get("least_s"), record.get("most_s"))),
        *(number(parts.get(name), 2, 1e3) for name in PARTS),
        number(record.get("over_ulysses")), number(record.get("over_kernel")), number(record.get("attention_tflops_per_s"), 1),
        number(record["peak_units"]), number(record["peak_above_inputs_gib"]), number(record.get("reserved_units")),
        number(record.get("slope_units")), number(record.get("constant_gib")), number(exposed),
    ]


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
