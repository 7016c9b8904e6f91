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

import torch

from upipe.config import ConfigError

REFUSALS = "UPIPE_REFUSALS"
"""Environment variable by which ranks that `launch` started know the folder for what they refuse."""
GRACE_S = 15.0  # for the other ranks to end by themselves, once one has failed


def launch(arguments: list[str], nproc: int) -> int:
    """Run `upipe` with `arguments` as `nproc` ranks on this machine; returns the exit status of the first rank that
    failed, or 0. SIGTERM and SIGUSR1 are passed on to the ranks. What ranks refuse is printed once, at the end. Raises ConfigError
    for an nproc below 1."""
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
    folder = tempfile.TemporaryDirectory(prefix="upipe-")
    environment[REFUSALS] = folder.name
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda got, _: _tell(ranks, got)) for number in numbers]
    try:
        for rank in range(nproc):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment | place, preexec_fn=_end_with_parent))
        return _wait(ranks)
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
    while any(process.poll() is None for process in ranks):
        failed = next((p.returncode for p in ranks if p.returncode), 0)
        if failed and deadline is None:
            status, deadline = failed, time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    status = status or next((p.returncode for p in ranks if p.returncode), 0)
    return 128 - status if status < 0 else status


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
