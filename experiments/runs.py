"""What the measuring commands share: a run's name, the last run of a file of records, and how a command ends."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from upipe import records
from upipe.config import ConfigError
from upipe.environment import environment
from upipe.preflight import PreflightError


def command_line(name: str, arguments: list[str] | None) -> str:
    """How a command was called, for its records. arguments: None for the process's own."""
    return f"python -m {name} " + " ".join(sys.argv[1:] if arguments is None else arguments)


def made_by(command: str, commit: str | None, ending: str, gpus: int = 0) -> dict[str, Any]:
    """What a record says of the code, machine and command it was made by, in one process; the run is named by its time and an ending."""
    found = environment(command, commit, gpus=gpus)
    return found | {"run_id": found["date"].replace("-", "").replace(":", "") + "-" + ending}


def new_run_id() -> str:
    """A name from time and chance; the same on every rank where a world is running."""
    name = [time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(3)]
    if dist.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        dist.broadcast_object_list(name, device=device)
    return name[0]


def last_run(path: Path, **having: Any) -> list[dict[str, Any]]:
    """Records of the last run in a file, of those with such fields. Raises ConfigError where there is none."""
    found = [record for record in records.load(path) if all(record.get(key) == value for key, value in having.items())]
    if not found:
        of = "".join(f" with {key}={value}" for key, value in having.items())
        raise ConfigError(f"{path}: no records{of}")
    return [record for record in found if record["run_id"] == found[-1]["run_id"]]


def exit_status(name: str, body: Callable[[], int]) -> int:
    """What the body of a command returns; 2 and one line on stderr for what is refused. It ends the running world."""
    try:
        status = body()
    except (ConfigError, PreflightError, records.RecordError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    # Not after other errors: on one rank alone it would wait for the others.
    if dist.is_initialized():
        dist.destroy_process_group()
    return status
