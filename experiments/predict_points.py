"""What the planner says of attention blocks that were measured, as records beside them: `predict_points.jsonl`.

    python -m experiments.predict_points --results experiments/results

One record, provenance "predicted", a point of block.jsonl of this library's block: `of` names the experiment, `point` the point;
peak above inputs and time as `experiments.accuracy` judges them. Points whose kernel has not been measured with that many heads a
call are named and left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments import points
from experiments.accuracy import block_simulated, block_time
from experiments.runs import command_line, exit_status, made_by
from experiments.table import latest
from upipe import records
from upipe.plan import rates
from upipe.records import FIELDS, Record

RESULTS = points.ROOT / "experiments" / "results"
RAN = ("times_s", "warmup_steps", "loss", "grad_norm", "reserved_gib", "peak_units", "peak_gib", "tokens_per_s_per_gpu")
"""Fields that only a run has, or that are not predicted of a block."""


def prediction(record: dict[str, Any], made_with: dict[str, Any]) -> Record:
    """What is predicted of a measured block. Raises ValueError where its kernel's memory is not known."""
    peak = block_simulated(record) + rates()["workspace_gib"]
    values = {name: record[name] for name in FIELDS} | dict.fromkeys(RAN) | made_with
    values |= {"experiment": "predict_points", "provenance": "predicted", "time_s": block_time(record), "peak_above_inputs_gib": peak}
    values |= {name: record[name] for name in ("gpu", "gpus", "host_gib")}
    extra = {"of": record["experiment"], "point": record["point"], "scope": "block", "hidden_size": record["hidden_size"]}
    return Record.from_dict(values | extra)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="DIR", help="append records to DIR/predict_points.jsonl; without it they are only counted")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)

    def body() -> int:
        made_with = made_by(command_line("experiments.predict_points", arguments).strip(), options.commit, "predict")
        kept = 0
        for record in latest(records.load(RESULTS / "block.jsonl")):
            if record["method"] != "upipe" or record["outcome"] != "ok" or record.get("scope") != "block":
                continue
            try:
                made = prediction(record, made_with)
            except ValueError as error:
                print(f"{record['point']}: left out: {error}")
                continue
            kept += 1
            if options.results:
                records.append(made, Path(options.results))
        print(f"{kept} predictions")
        return 0

    return exit_status("experiments.predict_points", body)


if __name__ == "__main__":
    sys.exit(main())
