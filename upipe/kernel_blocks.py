"""`kernel_block_tokens: auto`: in what blocks a kernel's causal call is fastest, from a measured table.

The table, `kernel_blocks.json`, is a list of rows {gpu, kernel, heads, kv_heads, head_dim, tokens, forward: {block: milliseconds},
backward: {block: milliseconds}, commit} with the block "none" for the single call. `python -m experiments.kernel_blocks --table`
makes it anew from that command's records. What is not in the table is a single call.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

TABLE = Path(__file__).with_suffix(".json")
GAIN = 1.01
"""How much slower than the fastest blocks the single call must be for these to be used: measured times differ by less."""


@functools.cache
def table() -> tuple[dict, ...]:
    return tuple(json.loads(TABLE.read_text()))


def measured(gpu: str | None, kernel: str, rows: tuple[dict, ...] | None = None) -> tuple[dict, ...]:
    """The rows of a GPU and kernel."""
    return tuple(row for row in (table() if rows is None else rows) if (row["gpu"], row["kernel"]) == (gpu, kernel))


def settled(tokens: Iterable[int | str], gpu: str | None, kernel: str) -> tuple[int | str, ...]:
    """Each of some `blocked.Tokens`; "auto" is "none" where nothing of the GPU and kernel was measured."""
    known = measured(gpu, kernel)
    return tuple("none" if value == "auto" and not known else value for value in tokens)


def choose(
    direction: Literal["forward", "backward"], tokens: int, heads: int, kv_heads: int, head_dim: int, gpu: str | None, kernel: str,
    rows: tuple[dict, ...] | None = None,
) -> tuple[int | None, str]:
    """Tokens of a block, None for the single call, and why.

    Of this GPU's and kernel's rows of this head dim those with the nearest number of query heads a kv head, then of query heads;
    of these the longest not above `tokens`: shorter sequences gain less. In it the fastest blocks, if the single call is over 1 %
    slower.
    """
    row = nearest(tokens, heads, kv_heads, head_dim, gpu, kernel, rows)
    if row is None:
        return None, f"nothing was measured for {kernel} up to {tokens} tokens of head dim {head_dim} on {gpu or 'CPU'}"
    times, where = row[direction], f"{row['heads']} heads on {row['kv_heads']} at {row['tokens']} tokens"
    block = _fastest(times)
    if block is None:
        return None, f"no blocks are over 1 % faster with {where}"
    return block, f"{times['none'] / times[str(block)] - 1:.1%} faster than the single call with {where}"


def _fastest(times: dict[str, float]) -> int | None:
    """The fastest blocks of a row; None where the single call is as fast, but for `GAIN`."""
    ms, block = min((ms, int(block)) for block, ms in times.items() if block != "none")
    return block if times["none"] > GAIN * ms else None


def nearest(
    tokens: int, heads: int, kv_heads: int, head_dim: int, gpu: str | None, kernel: str, rows: tuple[dict, ...] | None = None
) -> dict | None:
    """The row by which such a call is judged, see `choose`; None where there is none."""
    known = [row for row in measured(gpu, kernel, rows) if row["head_dim"] == head_dim and row["tokens"] <= tokens]

    def apart(row: dict) -> tuple[float, float]:
        group = row["heads"] / row["kv_heads"]
        return abs(math.log(group * kv_heads / heads)), abs(math.log(row["heads"] / heads))

    least = min(map(apart, known), default=None)
    return max((row for row in known if apart(row) == least), key=lambda row: row["tokens"], default=None)


def speed(
    size: int | str, direction: Literal["forward", "backward"], tokens: int, heads: int, kv_heads: int, head_dim: int, gpu: str | None,
    kernel: str, rows: tuple[dict, ...] | None = None,
) -> float:
    """How many times as fast as the single call a causal call in blocks is, in the row that it is judged by.

    Args:
        size: a `blocked.Tokens`. Blocks that were not measured there are taken to be as fast as the single call.
    """
    row = nearest(tokens, heads, kv_heads, head_dim, gpu, kernel, rows)
    if row is None:
        return 1.0
    times = row[direction]
    block = _fastest(times) if size == "auto" else size
    return times["none"] / times[str(block)] if str(block) in times else 1.0
