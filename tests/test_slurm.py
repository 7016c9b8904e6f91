"""The batch scripts: as text, and on a real Slurm of two nodes on this machine, on the CPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import points
from tests import slurm_cluster
from upipe import records
from upipe.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    missing = slurm_cluster.missing()
    if missing:
        pytest.skip(f"a Slurm cluster on this machine needs {', '.join(missing)} (Debian: slurm-wlm, munge)")
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def cpu():
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def submit(cluster, folder, script, *arguments, **options):
    """Submit a script; returns the job's number."""
    given = {"gpus_per_node": 0, "cpus_per_task": 1, "mem": "1500M", "chdir": folder} | options
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    settings = {
        "UPIPE_ROOT": ROOT, "UPIPE_PYTHON": sys.executable, "UPIPE_RUNS": folder, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"
    }  # fmt: skip
    kept = cluster.environment
    cluster.environment = kept | {name: str(value) for name, value in settings.items()}
    try:
        return cluster.run("sbatch", "--parsable", *words, ROOT / "slurm" / script, *arguments).strip()
    finally:
        cluster.environment = kept


def ended(cluster, job, out):
    """Whether a job has ended well; a test's failure where it ended otherwise."""
    state = cluster.job(job)["JobState"]
    assert state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "COMPLETED"), f"{state}\n{out.read_text()}"
    return state == "COMPLETED"


def launch(folder, *arguments):
    """What launch.sh would run in a job of one node."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"UPIPE_RUNS": "my runs", "UPIPE_PYTHON": "echo", "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "slurm" / "launch.sh", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "my runs" / "job-7"


def test_a_sweep_s_files_are_copied_before_its_first_attempt(tmp_path):
    """As training's configuration is (the command's copy: tests/test_runner.py); a requeued job leaves the copy as it is."""
    words = ("experiment", "trl_scaling-cpu", "--tokens", "512")
    told, run = launch(tmp_path, *words)
    lines = told.splitlines()
    copied = lines.index(f"-m experiments.run trl_scaling-cpu --copy-to {run}/experiment")
    assert copied < lines.index(f"-m experiments.run trl_scaling-cpu --resume --results {run}/results --logs {run}/logs --tokens 512")
    assert "--copy-to" not in launch(tmp_path, *words)[0]


def test_a_relative_folder_of_runs_is_made_absolute(tmp_path):
    """The configuration in the run folder names the folder, and a YAML file's paths are relative to it."""
    told, run = launch(tmp_path, "train", "my.yaml")
    assert f"train.run_dir={run}/run --save-config {run}/config.yaml" in told
    assert f"train {run}/config.yaml --resume auto" in told and "--copy-to" not in told


def test_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*SCRIPTS, *(ROOT / "slurm").glob("*.sh")]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_smoke_is_signalled_requeued_and_resumed(cluster, tmp_path):
    settings = ["train.steps=60", "data.tokens=128"]
    job = submit(cluster, tmp_path, "smoke.sbatch", *settings)
    run, out = tmp_path / f"smoke-{job}", tmp_path / f"smoke-{job}.out"

    def steps():
        return len(read_metrics(run / "run")) if (run / "run" / "metrics.jsonl").exists() else 0

    cluster.wait(lambda: steps() >= 3 or ended(cluster, job, out), 600, "the third step")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(lambda: int(cluster.job(job)["Restarts"]) == 1, 600, "the requeue")
    saved = list((run / "run" / "checkpoints").glob("step_*/DONE"))
    assert len(saved) == 1
    cluster.wait(lambda: ended(cluster, job, out), 600, "the end")
    told = out.read_text()
    step = int(saved[0].parent.name.removeprefix("step_"))
    assert f"ended by SIGUSR1 after step {step} of 60" in told and f"after {step} steps" in told, told
    assert "ranks   2 = sp 2 (ring 2 x Ulysses 1) x dp 1" in told
    made = read_metrics(run / "run")
    assert [r["step"] for r in made] == list(range(60))
    # The record is that of a run that nobody interrupted, bit for bit.
    words = ["-m", "upipe.cli", "train", str(run / "config.yaml"), f"train.run_dir={tmp_path / 'whole'}", "--nproc", "2"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=cpu(), check=True, timeout=600)
    assert [r["loss"] for r in made] == [r["loss"] for r in read_metrics(tmp_path / "whole")]
    attempts = (run / "attempts.txt").read_text()
    assert re.findall(r"^attempt (\d), ", attempts, re.M) == ["0", "1"]


@pytest.mark.slow
def test_a_sweep_over_two_nodes_is_signalled_requeued_and_resumed(cluster, tmp_path):
    """Points of the runner with a rank on each node; their records, and the planner's prediction in them."""
    job = submit(cluster, tmp_path, "experiment.sbatch", "table3_qwen3_32b-cpu", nodes=2, ntasks_per_node=1)
    run, out = tmp_path / f"experiment-{job}", tmp_path / f"experiment-{job}.out"
    file = run / "results" / "table3_qwen3_32b-cpu.jsonl"
    cluster.wait(lambda: file.exists() or ended(cluster, job, out), 600, "the first record")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(lambda: int(cluster.job(job)["Restarts"]) == 1, 600, "the requeue")
    assert len(records.load(file)) == 1
    cluster.wait(lambda: ended(cluster, job, out), 600, "the end")
    ring, upipe = records.load(file)
    for record in (ring, upipe):
        assert (record["outcome"], record["ring"], record["sp"], record["dp"], len(record["times_s"])) == ("ok", 2, 1, 1, 2)
    assert (ring["method"], upipe["method"]) == ("ring", "upipe")
    # The variant trains in fp32, which the planner has no kernel of a GPU for, and says so.
    assert all(record["predicted"]["declined"].startswith("train.dtype=fp32") for record in (ring, upipe))


def test_scripts_differ_in_what_they_ask_for_alone():
    """Each hands over to the launch file, keeps a time limit, memory and a signal before the limit, and can be requeued."""
    assert {path.stem for path in SCRIPTS} == {
        "table3_llama3_8b", "llama3_8b_5m", "table3_qwen3_32b", "multinode_llama3_8b", "train", "experiment", "smoke", "glm_1m"
    }  # fmt: skip
    for path in SCRIPTS:
        lines = [line for line in path.read_text().splitlines() if line and not re.match(r"# |#!", line)]
        asked = {line.removeprefix("#SBATCH --").split("=")[0] for line in lines[:-1]}
        assert {"nodes", "ntasks-per-node", "gpus-per-node", "mem", "time", "signal", "requeue", "open-mode"} <= asked, path
        assert lines[-1].startswith('exec bash "${UPIPE_ROOT:-$SLURM_SUBMIT_DIR}/slurm/launch.sh" '), path
        mode, *what = lines[-1].split('launch.sh" ')[1].split()
        assert mode in ("train", "experiment") and what[-1] == '"$@"', path
        if mode == "experiment" and len(what) > 1:
            assert what[0] in points.names()
            nodes, tasks = (int(re.search(rf"--{name}=(\d+)", path.read_text())[1]) for name in ("nodes", "ntasks-per-node"))
            found, variant = points.find(what[0])
            assert points.read(found, variant).common["processes"] == nodes * tasks
