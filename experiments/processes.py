"""Processes that end together, and what the kernel says about one that it killed. Standard library and psutil alone, so
that a rank can look after itself before it imports anything large."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# By its path: the package would bring torch along.
_spec = importlib.util.spec_from_file_location("oom_killer", Path(__file__).resolve().parent.parent / "upipe" / "oom_killer.py")
oom_killer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oom_killer)


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
