"""What the kernel says of a process that it killed for memory. Standard library alone, for `experiments.processes` loads this file
without the package."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path


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


def killed_for_memory(kills_before: int | None, kills_after: int | None, named: bool) -> bool | None:
    """Whether the kernel killed a process for memory; None where it does not say.

    Args:
        kills_before, kills_after: `kernel_kills()` when it started and when it had ended.
        named: whether the kernel's log names the process.
    """
    if named:
        return True
    return None if kills_before is None or kills_after is None else kills_after > kills_before


def death(number: int, by_kernel: bool | None) -> tuple[str, str]:
    """The outcome of a process that signal `number` ended, and the reason. by_kernel: as `killed_for_memory` says."""
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return "failed", f"ended by {name}"
    if by_kernel:
        return "oom_host", f"{name} by the kernel's out-of-memory killer"
    known = "whether the kernel did it for memory cannot be read here" if by_kernel is None else "the kernel reports no out-of-memory kill"
    return "failed", f"ended by {name}; {known}"


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
