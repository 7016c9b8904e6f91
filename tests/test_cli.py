"""The command line, the training configuration's derived parts, and the self-check's arithmetic."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from upipe.check import CheckResult, relative_error
from upipe.cli import main, slurm_environment
from upipe.config import ConfigError
from upipe.trainer import TrainConfig, deepspeed_config, learning_rate

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def config(tmp_path):
    shape = dict(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, vocab_size=256)
    file = tmp_path / "tiny.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "model": {"architecture": "qwen3", **shape},
                "data": {"path": str(ROOT / "configs/books/persuasion.txt"), "tokens": 33},
                "train": {"steps": 3, "micro_batch_size": 2, "accumulation": 2, "run_dir": str(tmp_path / "run")},
            }
        )
    )
    return file


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "upipe.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_train_with_check(config, tmp_path):
    """Two processes, sp 2, ZeRO-3, two micro-batches a step, odd length: trains, records, and passes its own check."""
    done = run("train", config, "upipe.sp_size=2", "--nproc", 2, "--check", "train.learning_rate=1e-2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout and "ranks   2 = sp 2 x dp 1" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert abs(records[0]["loss"] - math.log(256)) < 0.3
    assert records[-1]["loss"] < records[0]["loss"]
    for key in ("tokens_per_s", "memory_gib", "grad_norm", "learning_rate", "time_s"):
        assert all(r[key] > 0 for r in records), key
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["upipe"]["sp_size"] == 2
    assert json.loads((tmp_path / "run" / "deepspeed.json").read_text())["gradient_clipping"] == 1.0

    again = run("train", config)
    assert again.returncode == 2
    assert "already holds a run's metrics.jsonl" in again.stderr


def test_dry_run_without_launcher(config, tmp_path):
    done = run("train", config, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Qwen3ForCausalLM" in done.stdout and "ranks   1 = sp 1 x dp 1" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=3"], "did you mean 'steps'"),
        (["--nproc", "0"], "--nproc 0"),
        (["model.vocab_size=null"], "missing: vocab_size"),
    ],
)
def test_refusals_come_before_any_process_starts(config, capsys, arguments, message):
    assert main(["train", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "c.yaml", "--nprocs"], ["train", "c.yaml", "--check", "word"], []])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["demo", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 0
    assert "usage: upipe" in capsys.readouterr().out


def test_slurm_environment():
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "12345",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    found = slurm_environment(step)
    assert found == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "32345"
    }  # fmt: skip
    assert slurm_environment(step | {"RANK": "0"}) == {}
    assert slurm_environment({}) == {}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        slurm_environment({k: v for k, v in step.items() if k != "SLURM_LAUNCH_NODE_IPADDR"})


def test_learning_rate():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, final_lr_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=1.0)) == 1.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_configuration_is_explicit(stage):
    config = deepspeed_config(TrainConfig(zero_stage=stage, gradient_clipping=0.0), cuda=False)
    assert config["gradient_clipping"] == 0.0
    assert config["zero_optimization"]["stage"] == stage
    assert ("stage3_max_live_parameters" in config["zero_optimization"]) == (stage == 3)


def test_relative_error():
    a = torch.tensor([3.0, 4.0])
    assert relative_error(a, a) == 0.0
    assert relative_error(1.5 * a, a) == pytest.approx(0.5)
    assert relative_error(None, a) == 1.0
    assert relative_error(None, None) == relative_error(torch.full((2,), 5e-8), torch.zeros(2)) == 0.0
    assert relative_error(a, None) == math.inf
    assert math.isnan(relative_error(a * math.nan, a))


def test_check_result_fails_on_any_gradient_and_on_nan():
    good = CheckResult("fp32", 1.0, 1.0, {"loss": 1e-6, "w": 9e-5, "b": 0.0})
    assert good.passed and good.worst == "w" and str(good).endswith("PASS")
    for errors in ({"b": 2e-4}, {"b": math.nan}, {"loss": 2e-5}, {"loss": math.nan}):
        bad = CheckResult("fp32", 1.0, 1.0, good.errors | errors)
        assert bad.failed == list(errors) and "FAIL" in str(bad)


def test_bf16_is_measured_by_the_plain_model():
    plain = {"loss": 1e-4, "w": 0.01, "b": 0.0}
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 9e-4, "w": 0.0119, "b": 0.003}, plain).passed
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 9e-4, "w": 0.0121, "b": 0.003}, plain).failed == ["w"]
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 2e-3, "w": 0.01, "b": 0.005}, plain).failed == ["loss", "b"]
