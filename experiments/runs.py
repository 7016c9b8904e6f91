"""What the measuring commands share: when a command began, a run's name, the last run of a file of records, and how a command ends,
also early."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from upipe import outcomes, records
from upipe.config import ConfigError
from upipe.environment import environment
from upipe.preflight import PreflightError

IMPORTED = time.perf_counter()
"""When this module was."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def begun() -> float:
    """When the command began, as time.perf_counter() has it: this process, or the torchrun that started it. Where the system does not
    say (it is not Linux), when this module was imported."""
    try:
        pid: int | str = "self"
        if "TORCHELASTIC_RUN_ID" in os.environ and b"torch" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            pid = os.getppid()
        # Field 22 of proc(5), in clock ticks since the machine started; the second, a name in parentheses, may have spaces.
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        now, age = time.perf_counter(), time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return IMPORTED
    return min(IMPORTED, now - age) if ticks else IMPORTED


@contextlib.contextmanager
def ended_early(keep: Callable[[str], None]) -> Iterator[None]:
    """Within it, SIGTERM and SIGINT call keep(name of the signal) and end the process with 128 + their number; what is raised in it
    calls keep(reason) on its way. Only in the main thread.

    keep runs in a thread of its own, for a signal: the main thread may wait for a GPU or another rank for longer than whoever sends
    SIGTERM waits before SIGKILL, and Python runs handlers in the main thread alone, between two of its instructions. So keep must
    be safe against what the main thread does meanwhile, and wait for nobody.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while number := os.read(reading, 1):
            if number[0] not in SIGNALS:
                continue
            try:
                keep(signal.Signals(number[0]).name)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(128 + number[0])

    watcher = threading.Thread(target=watch, daemon=True)
    # A handler of Python's, so that its number is written to the pipe.
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    except BaseException as error:
        keep(outcomes.reason(error))
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writing)
        watcher.join()
        os.close(reading)


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
