"""Processes that end together, and what the kernel says about one that it killed. Standard library and psutil alone, so
that a rank can look after itself before it imports anything large."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends, whatever it is doing then; it stays in force
    across exec. Ends the process at once where `parent`, the process id expected, is its parent no more. Linux only;
    elsewhere it does the last part alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_tree(pid: int, patience_s: float = 30.0) -> None:
    """Kill a process and all its descendants, whatever sessions they are in, and wait until they are gone.

    Raises RuntimeError, with the process ids, where some are still there after `patience_s` seconds.
    """
    import psutil

    try:
        top = psutil.Process(pid)
        tree = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            # Nothing that is being killed may start anything more.
            process.suspend()
            tree += [child for child in process.children(recursive=True) if child not in tree]
        except psutil.NoSuchProcess:
            continue
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(tree, timeout=patience_s)
    left = [process.pid for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise RuntimeError(f"processes {left} did not end within {patience_s:.0f} s of SIGKILL")


def kernel_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of this process's control group the kernel's out-of-memory killer has ended so far, or None
    where the kernel does not say. A process that dies by SIGKILL while this number rises was out of host memory."""
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    counts = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = (cgroups, cgroups / "unified"), "memory.events"
        elif "memory" in controllers.split(","):
            roots, name = (cgroups / "memory",), "memory.oom_control"
        else:
            continue
        # Inside a container the group's own path may be the mount's root.
        for folder in [root / part for root in roots for part in (path.lstrip("/"), "")]:
            count = _oom_kill(folder / name)
            if count is not None:
                counts.append(count)
                break
    return max(counts, default=None)


def kernel_log_names(pid: int) -> bool:
    """Whether the kernel's log, where it can be read, says that the out-of-memory killer ended this process."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and f"Killed process {pid} " in done.stdout


def _oom_kill(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None
