"""Make upipe/stage_width.json, from which `heads_per_stage: auto` chooses, out of the records of experiments.block.

    torchrun --standalone --nproc_per_node 2 -m experiments.block --methods upipe --tokens 16K 64K 256K --kernels fa4 cudnn \\
        --modes device device:U=4 device:U=8 device:U=16 device:U=32
    python -m experiments.stage_width

Counted are runs of one run_id that timed `device` (overlap on, dx as one product) at two widths or more; of several the
newest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from upipe import records, stage_width


def rows(found: list[dict]) -> list[dict]:
    """Rows of the table, from records in the order they were made."""
    groups: dict[tuple, dict] = {}
    for r in found:
        if (r["experiment"], r["method"], r["outcome"]) != ("block", "upipe", "ok") or r["time_s"] is None:
            continue
        if (r["attention_output"], r["overlap"], r["dx"]) != ("device", True, "slabs"):
            continue
        key = (r["run_id"], r["gpu"], r["kernel"], r["sp"], r["model"], r["tokens"])
        row = groups.setdefault(key, {"gpu": r["gpu"], "kernel": r["kernel"], "ranks": r["sp"], "heads": r["heads"],
                                      "tokens": r["tokens"], "ms": {}, "commit": r["commit"]})
        row["ms"][r["heads_per_stage"]] = round(1e3 * r["time_s"], 3)
    newest: dict[tuple, dict] = {}
    for row in groups.values():
        if len(row["ms"]) > 1:
            newest[row["gpu"] or "", row["kernel"], row["ranks"], row["heads"], row["tokens"]] = row
    return [newest[key] | {"ms": {str(U): ms for U, ms in sorted(newest[key]["ms"].items())}} for key in sorted(newest)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", default="experiments/results/block.jsonl", type=Path, help="(default: %(default)s)")
    parser.add_argument("--table", default=stage_width.TABLE, type=Path, help="what to write (default: upipe/stage_width.json)")
    options = parser.parse_args(arguments)
    made = rows(records.load(options.records))
    options.table.write_text(json.dumps(made, indent=1) + "\n")
    for row in made:
        U, why = stage_width.choose(row["tokens"], row["ranks"], row["heads"], row["gpu"], row["kernel"], tuple(made))
        print(f"{row['gpu']}, {row['kernel']}, {row['ranks']} ranks, {row['tokens']} tokens: U = {U} ({why})")
    print(f"{len(made)} rows in {options.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
