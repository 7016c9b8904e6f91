"""`heads_per_stage: auto`: the narrowest stages that cost no time, from a measured table.

The table, `stage_width.json`, is a list of rows {gpu, kernel, ranks, heads, tokens, ms: {U: milliseconds of a checkpointed
block}, commit}. `python -m experiments.stage_width` makes it anew from the records of `experiments.block`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")
SLACK = 1.02
"""How much slower than the fastest width a narrower one may be."""


@functools.cache
def table() -> tuple[dict, ...]:
    return tuple(json.loads(TABLE.read_text()))


def choose(tokens: int, ranks: int, heads: int, gpu: str | None, kernel: str, rows: tuple[dict, ...] | None = None) -> tuple[int, str]:
    """U, query heads a stage over all ranks, and why.

    The row of this GPU, kernel and number of ranks (and of as many heads, where there is one) whose length is the longest
    of those not above `tokens`, else the shortest: longer sequences need no wider stages. In it, the smallest U whose time
    is within 2 % of the best. Without a row, U = P, the least memory.
    """
    rows = table() if rows is None else rows
    known = [r for r in rows if (r["gpu"], r["kernel"], r["ranks"]) == (gpu, kernel, ranks)]
    known = [r for r in known if r["heads"] == heads] or known
    if not known:
        return ranks, f"no width was measured for {kernel} on {ranks} x {gpu or 'CPU'}: the narrowest"
    below = [r for r in known if r["tokens"] <= tokens]
    row = max(below, key=lambda r: r["tokens"]) if below else min(known, key=lambda r: r["tokens"])
    times = {int(U): ms for U, ms in row["ms"].items()}
    # Another model may have fewer heads than the one measured.
    most = -(-heads // ranks) * ranks
    fitting = {U: ms for U, ms in times.items() if U <= most} or {ranks: 0.0}
    U = min(U for U, ms in fitting.items() if ms <= SLACK * min(fitting.values()))
    return U, f"within 2 % of the fastest at {row['tokens']} tokens"
