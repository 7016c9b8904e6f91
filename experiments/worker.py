"""The processes of one point: the launcher, and its ranks.

    python -m experiments.worker torchrun FOLDER PARENT   becomes torchrun, and dies with process PARENT, the runner
    python -m experiments.worker srun FOLDER PARENT       becomes srun, a task a rank, and does so too; its tasks die with Slurm's step
    python -m experiments.worker rank FOLDER [PARENT]     one rank; dies with process PARENT, its launcher

FOLDER has `point.json`, what to run. Every rank leaves `rank-<n>.json` there: how it ended, and, from rank 0, the record.
A rank runs in a child of its process. The parent imports nothing large and waits, so a rank that is killed still gets
an outcome: out of host memory where the kernel says that it killed for memory meanwhile, failed otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from experiments.processes import die_with_parent, oom_killer


def torchrun(folder: Path, parent: int) -> None:
    """Replace this process by torchrun with the point's ranks."""
    die_with_parent(parent)
    processes = _processes(folder)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # exec keeps the process id, so torchrun is the process that the ranks are told to die with.
    rank_words = ["-m", "experiments.worker", "rank", str(folder), str(os.getpid())]
    os.execv(sys.executable, [sys.executable, *words, *rank_words])


def srun(folder: Path, parent: int) -> None:
    """Replace this process by srun with the point's ranks, on as few nodes of the job as have so many tasks."""
    die_with_parent(parent)
    processes = _processes(folder)
    per_node = min(processes, int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_JOB_NUM_NODES"]))
    words = [f"--ntasks={processes}", f"--ntasks-per-node={per_node}", f"--nodes={-(-processes // per_node)}"]
    # Ranks that wait in a collective for one that failed are ended after a while.
    words += ["--kill-on-bad-exit=0", "--wait=60", *os.environ.get("UPIPE_SRUN", "").split()]
    python = os.environ.get("UPIPE_PYTHON", sys.executable).split()
    os.execvp("srun", ["srun", *words, *python, "-m", "experiments.worker", "rank", str(folder)])


def _processes(folder: Path) -> int:
    return json.loads((folder / "point.json").read_text())["processes"]


def rank(folder: Path, launcher: int | None = None) -> int:
    """Run one rank in a child process and see to its result; returns 0 where it has one that is ok."""
    die_with_parent(os.getppid() if launcher is None else launcher)
    number, kills, parent = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"]), oom_killer.kernel_kills(), os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os._exit(_work(folder, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and not (folder / f"rank-{number}.json").exists():
        named = code == -signal.SIGKILL and oom_killer.kernel_log_names(child)
        by_kernel = oom_killer.killed_for_memory(kills, oom_killer.kernel_kills(), named)
        outcome, reason = oom_killer.death(-code, by_kernel)
        leave(folder, number, {"outcome": outcome, "reason": reason, "signal": -code})
    return int(code != 0)


def leave(folder: Path, number: int, result: dict[str, Any]) -> None:
    """Write a rank's result, whole or not at all."""
    path = folder / f"rank-{number}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"rank": number, "time": time.time(), **result}))
    os.replace(part, path)


def _work(folder: Path, number: int) -> int:
    """The rank itself; returns the exit status of the child. Ends without Python's clean-up, which can hang after a
    failed collective."""
    try:
        from experiments import points
        from upipe.config import from_mapping
        from upipe.environment import gpu_name
        from upipe.launch import slurm_environment

        os.environ.update(slurm_environment(os.environ))
        task = json.loads((folder / "point.json").read_text())
        kind = points.kind_of(task["kind"])
        record = kind.run(from_mapping(kind.Point, task["settings"], folder=task["folder"]))
        result = {"outcome": "ok"}
        if number == 0:
            result["record"] = record.to_dict()
            result["gpu"] = gpu_name() if task["gpus"] else None
        leave(folder, number, result)
        return 0
    except BaseException as error:
        import torch

        from upipe.outcomes import classify

        outcome, reason = classify(error)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
        leave(folder, number, {"outcome": outcome, "reason": reason, "gpu": gpu})
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] in (["torchrun"], ["srun"]) and len(words) == 3:
        {"torchrun": torchrun, "srun": srun}[words[0]](Path(words[1]), int(words[2]))
    if words[:1] == ["rank"] and len(words) in (2, 3):
        return rank(Path(words[1]), *map(int, words[2:]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
