"""The record of a finished run of configs/glm_tiny.yaml: held-out loss beside Markov models on the same tokens.

upipe train configs/glm_tiny.yaml --nproc 2
python -m experiments.glm_tiny runs/glm_tiny --results experiments/results
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import yaml

from experiments.runs import exit_status, made_by
from upipe import records
from upipe.baselines import markov_losses
from upipe.config import ConfigError, from_mapping
from upipe.data import build_data, build_tokenizer
from upipe.metrics import read_metrics
from upipe.records import Record
from upipe.trainer import RunConfig


def record(folder: Path, made_with: dict) -> Record:
    """Of a run folder. Raises ConfigError where the run is not over or was not evaluated at its end."""
    run = from_mapping(RunConfig, yaml.safe_load((folder / "config.yaml").read_text()))
    steps = read_metrics(folder)
    if len(steps) != run.train.steps or "eval_loss" not in steps[-1]:
        raise ConfigError(f"{folder} has {len(steps)} of {run.train.steps} steps, or no evaluation after the last (train.eval_every)")
    data = build_data(run.data, build_tokenizer(run.data))
    rows = run.train.eval_batches * run.train.micro_batch_size or None
    times = [step["time_s"] for step in steps[1:]]
    values = {
        "experiment": "glm_tiny", "method": "upipe", "model": run.model.preset, "layers": 4, "tokens": run.data.tokens,
        "sp": run.upipe.sp_size, "ring": 1, "dp": 1, "zero": run.train.zero_stage, "dtype": "float32",
        "loss": statistics.fmean(step["loss"] for step in steps[-10:]), "times_s": times, "time_s": statistics.median(times),
        "warmup_steps": 1, "wall_s": sum(step["time_s"] for step in steps), "steps": len(steps),
        "micro_batch_size": run.train.micro_batch_size, "losses": [round(step["loss"], 4) for step in steps],
        "heldout_loss": steps[-1]["eval_loss"], "heldout_tokens": steps[-1]["eval_tokens"],
        "markov": markov_losses(data.train.stream, data.evaluation, run.data.markov_orders, rows),
    }  # fmt: skip
    return Record.from_dict(values | made_with)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--results", metavar="DIR", help="append the record to DIR/glm_tiny.jsonl")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)

    def body() -> int:
        made_with = made_by("upipe train configs/glm_tiny.yaml --nproc 2", options.commit, "glm_tiny")
        found = record(options.run, made_with)
        print(f"held-out loss {found.extra['heldout_loss']:.4f} nats a base over {found.extra['heldout_tokens']} bases")
        for name, loss in found.extra["markov"].items():
            print(f"  {name:<8} {loss:.4f}")
        if options.results:
            records.append(found, options.results)
        return 0

    return exit_status("experiments.glm_tiny", body)


if __name__ == "__main__":
    sys.exit(main())
