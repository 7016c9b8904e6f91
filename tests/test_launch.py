"""Two nodes, played by two launchers of this machine that know each other by the loopback address: a ring across, Ulysses inside."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.test_cli import ROOT, config, environment  # noqa: F401
from upipe import launch
from upipe.comm import node_ranks
from upipe.launch import REFUSALS, refusals, refuse, slurm_environment
from upipe.metrics import read_metrics

PER_NODE = 2


def test_what_ranks_refuse_is_told_once(tmp_path, monkeypatch, capsys):
    def told(*messages):
        for path in tmp_path.iterdir():
            path.unlink()
        for rank, message in enumerate(messages):
            if message:
                monkeypatch.setenv("RANK", str(rank))
                refuse(message)
        return refusals(tmp_path, len(messages))

    monkeypatch.setenv(REFUSALS, str(tmp_path))
    assert told("no", "no", "no") == ["upipe: error: no"]
    assert told("no", "why", "no", None) == ["upipe: error (rank 0, 2): no", "upipe: error (rank 1): why"]
    assert told(None, None) == [] and capsys.readouterr().err == ""
    # Under another launcher each rank says its own.
    monkeypatch.delenv(REFUSALS)
    refuse("no")
    monkeypatch.delenv("RANK")
    refuse("no")
    assert capsys.readouterr().err == "upipe: error (rank 2): no\nupipe: error: no\n"


def ended(tmp_path, monkeypatch, capsys, kills, script):
    """Status of `launch` with ranks that run a shell script in place of the command, and what is printed. kills: the kernel's counts
    before and after."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    counts = iter(kills)
    monkeypatch.setattr(launch.sys, "executable", str(program))
    monkeypatch.setattr(launch, "kernel_kills", lambda: next(counts))
    monkeypatch.setattr(launch, "kernel_log_names", lambda pid: False)
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    settings, started = {"memory": {"offload": "pinned", "optimizer": "cpu"}}, time.monotonic()
    status = launch.launch(["train"], 2, settings)
    assert time.monotonic() - started < 30, "a rank that failed was not seen while another went on"
    return status, capsys.readouterr().err


SECOND_IS_KILLED = 'if [ "$RANK" = 1 ]; then kill -9 $$; fi; exec sleep 60'


def test_a_rank_that_the_kernel_killed_for_memory(tmp_path, monkeypatch, capsys):
    status, told = ended(tmp_path, monkeypatch, capsys, (3, 4), SECOND_IS_KILLED)
    assert status == launch.OUT_OF_MEMORY == 3
    assert "upipe: rank 1: out of host memory (oom_host): SIGKILL by the kernel's out-of-memory killer\n  limit " in told
    assert "memory.optimizer: device (now cpu)" in told and "memory.keep_layers_on_gpu: more" in told
    # The launcher kills the other one, which is not told of.
    assert "rank 0" not in told


@pytest.mark.parametrize(("kills", "why"), [
    ((3, 3), "the kernel reports no out-of-memory kill"), ((None, None), "whether the kernel did it for memory cannot be read here"),
])
def test_a_rank_that_something_else_killed(tmp_path, monkeypatch, capsys, kills, why):
    status, told = ended(tmp_path, monkeypatch, capsys, kills, SECOND_IS_KILLED)
    assert status == 128 + signal.SIGKILL and f"upipe: rank 1: failed (failed): ended by SIGKILL; {why}\n" in told


def test_out_of_memory_is_the_status_also_where_another_rank_ended_first(tmp_path, monkeypatch, capsys):
    """A rank that ran out of memory closes its groups before it ends, at which the others fail."""
    script = 'if [ "$RANK" = 0 ]; then exit 1; fi; sleep 0.2; exit 3'
    assert ended(tmp_path, monkeypatch, capsys, (0,), script) == (3, "")
    assert ended(tmp_path, monkeypatch, capsys, (0,), script.replace("exit 3", "exit 2")) == (1, "")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(node, nodes, port, folder):
    """One agent a node."""
    return [(["torchrun", "--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(PER_NODE), "--master-addr",
              "127.0.0.1", "--master-port", str(port), "-m", "upipe.cli"], {})]


def deepspeed(node, nodes, port, folder):
    """One launcher a node, with a hostfile; each is started where it is, not over ssh."""
    hosts = folder / "hostfile"
    hosts.write_text("".join(f"127.0.0.{n + 1} slots={PER_NODE}\n" for n in range(nodes)))
    return [(["deepspeed", "--hostfile", str(hosts), "--no_ssh", "--node_rank", str(node), "--master_addr", "127.0.0.1",
              "--master_port", str(port), "--module", "upipe.cli"], {})]


def srun(node, nodes, port, folder):
    """What srun does, by its variables: it starts every task with those and no launcher. Slurm itself is not here."""
    return [([sys.executable, "-m", "upipe.cli"],
             {"SLURM_STEP_NUM_TASKS": str(nodes * PER_NODE), "SLURM_PROCID": str(node * PER_NODE + local), "SLURM_LOCALID": str(local),
              "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{nodes})", "SLURM_JOB_ID": str(port - 20000),
              "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for local in range(PER_NODE)]


def launched(launcher, folder, *arguments, nodes=2):
    """Statuses of the processes started, and all that they and theirs printed."""
    port, log = free_port(), folder / "log"
    commands = itertools.chain.from_iterable(launcher(node, nodes, port, folder) for node in range(nodes))
    kept = {k: v for k, v in environment().items() if k not in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")}
    started = []
    try:
        with log.open("wb") as out:
            for command, extra in commands:
                words = [*command, *map(str, arguments)]
                started.append(subprocess.Popen(words, cwd=ROOT, env=kept | extra, stdout=out, stderr=out, start_new_session=True))
        return [process.wait(timeout=400) for process in started], log.read_text()
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end in sight:\n{log.read_text()[-4000:]}")
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_how_many_ranks_a_node_has(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert node_ranks() is None
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert node_ranks() == 3
    step = {"SLURM_STEP_NUM_TASKS": "11", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1", "MASTER_ADDR": "here"}
    assert "LOCAL_WORLD_SIZE" not in slurm_environment(step)
    for node, tasks in enumerate((4, 4, 3)):
        found = slurm_environment(step | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)})
        assert found["LOCAL_WORLD_SIZE"] == str(tasks)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, deepspeed, srun], ids=lambda f: f.__name__)
def test_two_nodes(config, tmp_path, launcher):  # noqa: F811
    """A ring across two nodes of two ranks, Ulysses inside: trains and passes its own check."""
    if launcher is not srun and shutil.which(launcher.__name__, path=environment()["PATH"]) is None:
        pytest.skip(f"{launcher.__name__} is not installed")
    statuses, told = launched(launcher, tmp_path, "train", config, "upipe.sp_size=4", "upipe.ring_degree=2", "--check")
    assert not any(statuses), told
    assert "ranks   4 = sp 4 (ring 2 x Ulysses 2) x dp 1" in told and "PASS" in told
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [0, 1, 2]
