"""What a run records of itself: JSON lines always, TensorBoard and Weights & Biases when asked.

`metrics.jsonl` has one record a step, in order, each step once, also after the run was resumed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from pathlib import Path
from typing import Any

from upipe.config import ConfigError

FILE = "metrics.jsonl"


def check_installed(*, tensorboard: bool, wandb: str | None) -> None:
    """Raises ConfigError where a package that was asked for is missing."""
    for setting, asked, package in (("train.tensorboard", tensorboard, "tensorboard"), ("train.wandb", wandb, "wandb")):
        if asked and importlib.util.find_spec(package) is None:
            off = "false" if package == "tensorboard" else "null"
            raise ConfigError(f"{setting}={asked!r} needs the package {package}: pip install {package}, or set it to {off}")


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run folder; a last line that was cut off by a kill is left out."""
    records = []
    for line in (Path(folder) / FILE).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Metrics:
    """Open the records of the run in `folder` for writing, from step `start` on; what is there of later steps is dropped.

    wandb: the project to log to, or None. config: the run's configuration as a plain mapping, for its page there.
    """

    def __init__(self, folder: Path, *, start: int, tensorboard: bool, wandb: str | None, config: dict[str, Any]):
        kept = [r for r in read_metrics(folder) if r["step"] < start] if start and (folder / FILE).exists() else []
        unfinished = folder / f"{FILE}.new"
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(unfinished, folder / FILE)
        self._file = open(folder / FILE, "a", encoding="utf-8")
        self._board = self._run = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        if wandb is not None:
            import wandb as client

            named = folder / "wandb_id.txt"
            if not (start and named.exists()):
                named.write_text(uuid.uuid4().hex)
            self._run = client.init(
                project=wandb, name=folder.resolve().name, id=named.read_text(), resume="allow", dir=str(folder), config=config
            )

    def write(self, record: dict[str, Any]) -> None:
        """One step's record: "step", and numbers or None by name."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in record.items() if key != "step" and value is not None}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, record["step"])
            self._board.flush()
        if self._run is not None:
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()
