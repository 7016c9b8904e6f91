"""Where and with what a measurement was made: the code's commit, package versions, the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from upipe.config import ConfigError

DATE = "%Y-%m-%dT%H:%M:%SZ"


def environment(command: str, commit: str | None = None, *, gpus: int = 0) -> dict[str, Any]:
    """The fields of a record that say where and with what it was made: commit, dirty, versions, gpu, gpus, host_gib, command,
    date (UTC, now).

    Args:
        command: as one would type it.
        commit: names the code where there is no repository, "-dirty" at its end if it was changed.
        gpus: GPUs of the run, 0 on the CPU.

    Raises ConfigError where the code has no name, or is a repository at another commit than the one given.
    """
    head, dirty = code(commit)
    return {
        "gpu": gpu_name() if gpus else None,
        "gpus": gpus,
        "host_gib": host_gib(),
        "commit": head,
        "dirty": dirty,
        "versions": versions(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime(DATE),
    }


def code(commit: str | None = None, root: Path | None = None) -> tuple[str, bool | None]:
    """The commit of the code in `root` (by default the checkout that this package lies in), and whether the code differs
    from it: changed or new files other than results and figures. See `environment` for `commit` and what is raised."""
    root = root or Path(__file__).resolve().parent.parent
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "HEAD") if top is not None and Path(top) == root else None
    if head is None:
        if not commit:
            raise ConfigError(f"{root} is not a git checkout with a commit: name the code with --commit SHA")
        return commit.removesuffix("-dirty"), True if commit.endswith("-dirty") else None
    if commit and not head.startswith(commit.removesuffix("-dirty")):
        raise ConfigError(f"--commit {commit}: {root} is a git checkout at {head}; leave --commit out")
    products = [f":(exclude){path}" for path in ("experiments/results", "paper_figures", "notebooks", "runs")]
    return head, bool(_git(root, "status", "--porcelain", "--", ".", *products))


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, Any]:
    """Versions of Python, torch, deepspeed, transformers and the kernels' packages; None for what is not there."""
    import torch

    found: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    for name in ("deepspeed", "transformers", "triton", "flash-attn-4", "flash-attn-3", "flash-attn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    return found


def gpu_name() -> str | None:
    """The first GPU's name. Asked of torch only in a process that uses its GPU already: the driver context that asking
    makes would take device memory from a run beside it."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def host_gib() -> float:
    """Memory of this host in GiB: the whole machine's, or the limit of this process's container where that is less."""
    import psutil

    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return round(total / 2**30, 2)
