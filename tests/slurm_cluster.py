"""A Slurm cluster of two nodes on this machine, for tests: munged, slurmctld and two slurmd, all in one folder, gone afterwards."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("node1", "node2")


def missing() -> list[str]:
    """Programs that are not installed, and "root" for another user."""
    found = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return found + ([] if os.geteuid() == 0 else ["root"])


class Cluster:
    """Use as a context; `run` calls Slurm's commands on it."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        # Jobs first: a slurmd that ends leaves their processes behind.
        with contextlib.suppress(Exception):
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root")
            self.run("scancel", "--user=root")
            self.wait(lambda: not self.run("squeue", "--noheader").strip(), 30)
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *words: object) -> str:
        """Output of a command. Raises RuntimeError, with what it said, where it fails."""
        done = subprocess.run(list(map(str, words)), env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        return dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", number).split() if "=" in word)

    def wait(self, holds, seconds: float, what: str = "that") -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {seconds:g} s\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in sorted(self.folder.glob("*.log")))

    def _start(self) -> None:
        here, ports = self.folder, _free_ports(1 + len(NODES))
        host = socket.gethostname()
        key = here / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:])
        )
        (here / "slurm.conf").write_text(f"""
ClusterName=upipe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={here}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        (here / "state").mkdir()
        munge = [f"--{name}={here}/munge.{end}" for name, end in (
            ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"), ("log-file", "log"))]  # fmt: skip
        self._daemon("munged", "--foreground", "--force", *munge)
        self.wait((here / "munge.socket").exists, 20, "munged's start")
        self._daemon("slurmctld", "-D", "-f", here / "slurm.conf")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name, "-f", here / "slurm.conf")
        self.wait(lambda: self._idle() == len(NODES), 60, "two idle nodes")

    def _daemon(self, *words: object) -> None:
        with open(self.folder / f"out-{len(self.started)}-{words[0]}.log", "w") as log:
            self.started.append(subprocess.Popen(
                list(map(str, words)), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            ))  # fmt: skip

    def _idle(self) -> int:
        try:
            return self.run("sinfo", "--noheader", "--Node", "--states=idle").count("idle")
        except RuntimeError:
            return 0


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
