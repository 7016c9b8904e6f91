"""What follows from several records of `experiments.stack`: ratios between settings, disagreements, the table."""

from __future__ import annotations

from typing import Any

from experiments.block_report import _aligned
from upipe.records import format_tokens

PARTS = ("forward", "backward", "optimizer")
"""Of a step, in order."""
LOSS_BOUND, NORM_BOUND = 1e-3, 5e-2
"""Relative differences from the first setting's, of the loss and of the gradient's norm, that rounding in bf16 may make."""


def ratios(record: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Record extras: time and peak above states over another setting's of the same length, where both are there.

    over_alst: over ALST's. over_none: over the same setting's without offload. over_all_heads: over the same setting's with all
    heads in one stage (U = H). Each with `_rounds`, [least, most] of the rounds taken one by one, and `_peak`. And how far
    loss and gradient norm are from ALST's.
    """
    found: dict[str, Any] = {}
    same = [r for r in others if r["tokens"] == record["tokens"] and r["outcome"] == "ok"]
    if record["outcome"] != "ok":
        return found
    for name, base in (
        ("over_alst", _named(same, "alst")), ("over_none", _other(record, same, "offload", "none")),
        ("over_all_heads", _other(record, same, "heads_per_stage", _all_heads(record))),
    ):
        if base is None:
            continue
        if None not in (record["time_s"], base["time_s"]):
            rounds = [mine / its for mine, its in zip(record["times_s"], base["times_s"])]
            found |= {name: record["time_s"] / base["time_s"], f"{name}_rounds": [min(rounds), max(rounds)]}
        if None not in (record["peak_above_states_gib"], base["peak_above_states_gib"]):
            found[f"{name}_peak"] = record["peak_above_states_gib"] / base["peak_above_states_gib"]
        if name == "over_alst":
            found["loss_off_alst"] = _off(record["loss"], base["loss"])
            found["norm_off_alst"] = _off(record["grad_norm"], base["grad_norm"])
    return found


def _named(found: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((r for r in found if r["setting"].partition(":")[0] == name), None)


def _all_heads(record: dict[str, Any]) -> int | None:
    return None if record["heads_per_stage"] is None else -(-record["heads"] // record["sp"]) * record["sp"]


SETTINGS = (
    "method", "heads_per_stage", "attention_output", "attention_output_host_layers", "overlap", "dx", "offload", "tile_tokens",
    "fused", "block_tokens", "block_tokens_backward",
)


def _other(record: dict[str, Any], found: list[dict[str, Any]], field: str, value: Any) -> dict[str, Any] | None:
    """The record that differs in one field alone, where it has this value. keep_layers_on_gpu and offload_by go with offload."""
    if value is None or record[field] in (None, value):
        return None
    same = [name for name in (*SETTINGS, *(() if field == "offload" else ("offload_by",))) if name != field]
    return next((r for r in found if r[field] == value and all(r.get(name) == record.get(name) for name in same)), None)


def _off(mine: float, its: float) -> float:
    return abs(mine - its) / abs(its)


def disagreements(found: list[dict[str, Any]]) -> list[str]:
    """Settings whose loss or gradient norm at a length is further from the first setting's than rounding explains."""
    problems = []
    for tokens in dict.fromkeys(r["tokens"] for r in found):
        here = [r for r in found if r["tokens"] == tokens and r["outcome"] == "ok"]
        for r in here[1:]:
            for name, bound in (("loss", LOSS_BOUND), ("grad_norm", NORM_BOUND)):
                # Written so that a number that is none counts as different.
                if not _off(r[name], here[0][name]) <= bound:
                    other = f"of {here[0]['setting']} {here[0][name]:.6g}"
                    problems.append(f"{name} of {r['setting']} at {format_tokens(tokens)}: {r[name]:.6g}, {other}")
    return problems


COLUMNS = (
    "tokens", "setting", "outcome", "s", "least", "most", *PARTS, "/alst", "/none", "/U=H", "tok/s/GPU", "states", "peak GiB",
    "above GiB", "above u", "peak/alst", "peak/U=H", "reserved above", "host GiB", "moved GiB", "sent GiB", "exposed ms", "loss",
    "norm",
)


def table(found: list[dict[str, Any]]) -> str:
    """Records of one run as text, a line each. s: seconds a step; above: states; moved: to the host a step, of one rank; sent: to
    other ranks by attention; exposed: communication that no computation hides. Ratios are over all of these records: each has in it
    those over records that were written before."""
    lines = [COLUMNS, *(_line(r | ratios(r, found)) for r in found)]
    shown = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines[1:])]
    return _aligned([[line[i] for i in shown] for line in lines]) if shown else "no records"


def _line(r: dict[str, Any]) -> list[str]:
    def number(value, digits=3, scale=1.0):
        return "" if value is None else f"{value * scale:.{digits}f}"

    parts = r.get("parts_s") or {}
    pools = (r["host_pinned_gib"], r["host_pageable_gib"])
    return [
        format_tokens(r["tokens"]), r["setting"], "cut off" if r.get("cut_off") else "" if r["outcome"] == "ok" else r["outcome"],
        *(number(value) for value in (r["time_s"], r.get("least_s"), r.get("most_s"))),
        *(number(parts.get(name)) for name in PARTS),
        *(number(r.get(name)) for name in ("over_alst", "over_none", "over_all_heads")), number(r["tokens_per_s_per_gpu"], 1),
        number(r["states_gib"], 2), number(r["peak_gib"], 2), number(r["peak_above_states_gib"]), number(r["peak_units"]),
        number(r.get("over_alst_peak")), number(r.get("over_all_heads_peak")), number(r.get("reserved_above_states_gib"), 2),
        "" if None in pools else number(sum(pools), 2), number(r.get("bytes_to_host"), 2, 2**-30),
        number(r.get("bytes_sent"), 2, 2**-30), number((r.get("trace") or {}).get("communication", {}).get("exposed_ms"), 1),
        number(r["loss"], 5), number(r["grad_norm"], 5),
    ]
