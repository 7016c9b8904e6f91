"""Start the ranks of a run on this machine, or read what srun has started."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from upipe import outcomes
from upipe.config import ConfigError
from upipe.oom_killer import kernel_kills, kernel_log_names, killed_for_memory

OUT_OF_MEMORY = 3
"""Exit status of a run that ran out of memory, the device's or the host's."""
REFUSALS = "UPIPE_REFUSALS"
"""Environment variable by which ranks that `launch` started know the folder for what they refuse."""
GRACE_S = 15.0  # for the other ranks to end by themselves, once one has failed


def launch(arguments: list[str], nproc: int, settings: dict[str, Any] | None = None) -> int:
    """Run `upipe` with `arguments` as `nproc` ranks on this machine.

    SIGTERM and SIGUSR1 are passed on to the ranks. What ranks refuse is printed once, at the end; and of ranks that were killed,
    whether the kernel did it for memory, and what would help then.

    Args:
        settings: the run's configuration, for that advice (`outcomes.explain`).

    Returns:
        The exit status of the first rank that failed, or 0; OUT_OF_MEMORY where a rank ran out of memory, whichever ended first.

    Raises:
        ConfigError: an nproc below 1.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: must be at least 1")
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    elif "PYTORCH_ALLOC_CONF" not in environment:
        # Fragments take gigabytes at long lengths otherwise.
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environment |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(_free_port())
    command = [sys.executable, "-m", "upipe.cli", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[subprocess.Popen] = []
    kills = kernel_kills()
    folder = tempfile.TemporaryDirectory(prefix="upipe-")
    environment[REFUSALS] = folder.name
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda got, _: _tell(ranks, got)) for number in numbers]
    try:
        for rank in range(nproc):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment | place, preexec_fn=_end_with_parent))
        status = _wait(ranks)
        # Here, before those that are left are killed below.
        killed = _killed(ranks, kills, settings or {})
        for rank, ended in killed:
            print(f"upipe: rank {rank}: {ended}", file=sys.stderr)
        short = any(ended.outcome == "oom_host" for _, ended in killed) or any(p.returncode == OUT_OF_MEMORY for p in ranks)
        return OUT_OF_MEMORY if short else status
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for process in ranks:
            process.wait()
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
        for line in refusals(Path(folder.name), nproc):
            print(line, file=sys.stderr)
        folder.cleanup()


def refuse(message: str) -> None:
    """Tell what this process refuses: on stderr, or to the `launch` that started it as one of its ranks."""
    rank = os.environ.get("RANK")
    if rank is not None and REFUSALS in os.environ:
        (Path(os.environ[REFUSALS]) / rank).write_text(message)
        return
    # A message may concern one rank alone, so each that has one says it.
    print(f"upipe: error{'' if rank is None else f' (rank {rank})'}: {message}", file=sys.stderr)


def refusals(folder: Path, nproc: int) -> list[str]:
    """What ranks left in a folder, a line a message, with the ranks where not all of them have it."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(int(path.name) for path in folder.iterdir()):
        ranks.setdefault((folder / str(rank)).read_text(), []).append(rank)
    whose = {message: "" if len(of) == nproc else f" (rank {', '.join(map(str, of))})" for message, of in ranks.items()}
    return [f"upipe: error{of}: {message}" for message, of in whose.items()]


def _wait(ranks: list[subprocess.Popen]) -> int:
    """Until all have ended, or GRACE_S after one has failed."""
    status, deadline = 0, None
    # Of every rank each time: one that has failed is seen while others go on.
    while None in (codes := [process.poll() for process in ranks]):
        failed = next(filter(None, codes), 0)
        if failed and deadline is None:
            status, deadline = failed, time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    status = status or next(filter(None, codes), 0)
    return 128 - status if status < 0 else status


def _killed(ranks: list[subprocess.Popen], kills_before: int | None, settings: dict[str, Any]) -> list[tuple[int, outcomes.Explanation]]:
    """How the ranks ended that SIGKILL ended, each with its number."""
    found = [(rank, process.pid) for rank, process in enumerate(ranks) if process.poll() == -signal.SIGKILL]
    kills = kernel_kills() if found else None
    return [
        (rank, outcomes.killed(signal.SIGKILL, killed_for_memory(kills_before, kills, kernel_log_names(pid)), settings))
        for rank, pid in found
    ]


def _tell(ranks: list[subprocess.Popen], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _end_with_parent() -> None:
    """On Linux, have this process killed when the one that started it dies: ranks left over would go on writing."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def slurm_environment(environment) -> dict[str, str]:
    """The launcher variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) of a process that srun
    started; empty where another launcher has set RANK, or where this is no step of several tasks."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if "RANK" in environment or tasks is None or int(tasks) < 2:
        return {}
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ConfigError("under srun set MASTER_ADDR to the first node's address (SLURM_LAUNCH_NODE_IPADDR is unset)")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(environment["SLURM_JOB_ID"]) % 20000),
    } | _tasks_here(environment)


def _tasks_here(environment) -> dict[str, str]:
    """LOCAL_WORLD_SIZE from SLURM_STEP_TASKS_PER_NODE, tasks of each node as in "4(x2),3"; empty where that is not set."""
    counts: list[str] = []
    for part in filter(None, environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        tasks, _, times = part.partition("(x")
        counts += [tasks] * int(times.rstrip(")") or 1)
    return {"LOCAL_WORLD_SIZE": counts[int(environment.get("SLURM_NODEID", 0))]} if counts else {}
