"""The command line, evaluation and records, the training configuration's derived parts, and the self-check's arithmetic."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests import training
from upipe import cli, host, outcomes
from upipe.check import CheckResult, relative_error
from upipe.cli import INTERRUPTED, main
from upipe.config import ConfigError, from_mapping, load
from upipe.launch import slurm_environment
from upipe.metrics import read_metrics
from upipe.trainer import RunConfig, TrainConfig, Trainer, deepspeed_config, learning_rate

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


def environment():
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}


def run(*arguments, command=(sys.executable, "-m", "upipe.cli")):
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def test_saved_configuration_is_read_as_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data.tokens=1K", "train.run_dir=here", "upipe.attention_output=device"]
    assert main(["train", str(ROOT / "configs/llama3_8b_512k.yaml"), *words, "--save-config", "saved.yaml"]) == 0
    saved, given = load(RunConfig, "saved.yaml"), load(RunConfig, ROOT / "configs/llama3_8b_512k.yaml", words)
    assert saved == given and Path(saved.data.path).is_absolute() and saved.data.tokens == 1024
    assert main(["train", str(ROOT / "configs/demo.yaml"), "--save-config", "no/saved.yaml"]) == 2


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
    """The plan of a model that few machines could hold, in seconds."""
    overrides = [f"model.{word}" for word in ("preset=qwen3-32b", "architecture=null", *(f"{n}=null" for n in training.SHAPE))]
    done = run("train", config, *overrides, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Qwen3ForCausalLM, 32762.12 M parameters, 64 layers" in done.stdout and "ranks   1 = sp 1 x dp 1" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"data__tokens": 10**6}, {"upipe__kernel": "none"}, {"train__eval_every": 1}, {"upipe__sp_size": 2}])
def test_a_dry_run_refuses_what_a_run_would(tmp_path, worlds, change):
    config = training.mapping(tmp_path, **{"upipe__sp_size": 1} | change)
    assert worlds(1).run(training.refused, config=config, resume="none")[0]
    with pytest.raises(ValueError):
        Trainer(from_mapping(RunConfig, config), dry_run=True).close()


@pytest.mark.slow
def test_a_signal_ends_a_run_with_its_own_status_and_resume_goes_on(config, tmp_path):
    """SIGTERM to the command that started the ranks: 75 after a checkpoint; then --resume auto ends at the last step."""
    arguments = ["train", str(config), "upipe.sp_size=2", "train.steps=400", "--nproc", "2", "--resume", "auto"]
    started = subprocess.Popen(
        [sys.executable, "-m", "upipe.cli", *arguments], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    records = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_text().count("\n") >= 3):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate(timeout=120)
    assert started.returncode == INTERRUPTED, told
    assert "ended by SIGTERM after step" in told
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    done = run(*[a.replace("=400", f"={step + 2}") for a in arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == list(range(step + 2))
    exported = run("export", tmp_path / "run", tmp_path / "plain")
    assert exported.returncode == 0 and (tmp_path / "plain" / "model.safetensors").exists(), exported.stderr


@pytest.mark.slow
def test_a_refusal_on_the_ranks_is_the_status_of_the_command(config):
    done = run("train", config, "upipe.sp_size=3", "--nproc", 2)
    assert done.returncode == 2 and done.stderr.count("sp_size=3 does not divide the world of 2 processes") == 1, done.stderr
    assert "upipe: error: sp_size=3" in done.stderr and "(rank" not in done.stderr


class Short:
    """A trainer whose first step runs out of memory."""

    is_main, error, closed = True, None, 0

    def __init__(self, config, *, resume, dry_run):
        assert config.upipe.heads_per_stage == "auto"

    def describe(self):
        return "a run"

    def fit(self, caught):
        raise self.error

    def close(self):
        Short.closed += 1


@pytest.mark.parametrize(("error", "outcome", "numbers", "helps"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.25 GiB "
                            "is free."), "oom_device", "asked 20.00 GiB, limit 139.80 GiB, free 12.25 GiB",
     "upipe.heads_per_stage: 1 (now auto)"),
    (MemoryError(), "oom_host", "limit ", "upipe.attention_output_layers: fewer (now auto)"),
    (host.PinnedHostMemoryError("pinned host memory: cudaHostRegister of 4096 bytes failed"), "oom_pinned", "asked 4.00 KiB",
     "memory.pinned_fallback: true (now false)"),
])  # fmt: skip
def test_a_run_out_of_memory_ends_with_its_own_status(config, capsys, monkeypatch, error, outcome, numbers, helps):
    monkeypatch.setattr(cli, "Trainer", Short)
    monkeypatch.setattr(Short, "error", error)
    monkeypatch.delenv("RANK", raising=False)
    closed, words = Short.closed, ["train", str(config), "memory.preset=fastest", "upipe.sp_size=1", "--no-plan"]
    assert main(words) == 3 and Short.closed == closed + 1
    told = capsys.readouterr().err
    assert f"\nupipe: {outcomes.NAMES[outcome]} ({outcome}): {type(error).__name__}" in told and "in fit\n" in told
    assert numbers in told and f"\n    {helps} - " in told
    # What is no lack of memory is raised as it is.
    monkeypatch.setattr(Short, "error", ValueError("something else"))
    with pytest.raises(ValueError, match="something else"):
        main(words)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers(config, tmp_path, launcher):
    """Two ranks on the CPU under each launcher: sp 2."""
    if shutil.which(launcher, path=environment()["PATH"]) is None:
        pytest.skip(f"{launcher} is not installed")
    command = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "upipe.cli"],
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--module", "upipe.cli"],
    }[launcher]
    done = run("train", config, "upipe.sp_size=2", command=command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks   2 = sp 2 x dp 1" in done.stdout + done.stderr
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.slow
def test_evaluation_is_the_same_at_any_number_of_ranks(worlds, tmp_path):
    """7 rows with unequal valid tokens (packed documents), at sp 1, sp 2, and 2 data-parallel ranks, which 7 does not divide."""
    texts = [tmp_path / f"{i}.txt" for i in range(40)]
    for i, text in enumerate(texts):
        text.write_text(chr(65 + i) * (3 + i % 7))
    found = {}
    for world, sp in [(1, 1), (2, 2), (2, 1)]:
        config = training.mapping(
            tmp_path, data__path=[str(t) for t in texts], data__packing="documents", data__eval_fraction=0.4, upipe__sp_size=sp,
            train__steps=4, train__eval_every=2, train__eval_batches=7, train__run_dir=str(tmp_path / f"{world}{sp}"),
            train__learning_rate=0.0, train__accumulation=1,
        )  # fmt: skip
        results = worlds(world).run(training.evaluated, config=config)
        assert all(r["before"] == results[0]["before"] for r in results)
        found[world, sp] = results[0]
        # The weights stand still at a learning rate of 0, so the loss does.
        records = results[0]["records"]
        assert ["eval_loss" in r for r in records] == [False, True, False, True]
        assert records[3]["eval_loss"] == pytest.approx(results[0]["before"][0], rel=1e-6)
    reference, tokens = found[1, 1]["before"]
    for result in found.values():
        assert result["before"][0] == pytest.approx(reference, rel=1e-6) and result["before"][1] == tokens > 0


@pytest.mark.parametrize(("world", "sp", "times"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_T46_tokens_are_counted_once(worlds, tmp_path, world, sp, times):
    """The ranks of a group share a sequence: its tokens count once, and so does the rate that is made of them."""
    config = training.mapping(tmp_path, upipe__sp_size=sp, train__steps=2, data__eval_fraction=0.1)
    result = worlds(world).run(training.evaluated, config=config)[0]
    assert result["step_tokens"] == times * 2 * training.TOKENS
    for record in result["records"]:
        assert record["tokens"] == (record["step"] + 1) * result["step_tokens"]
        assert record["tokens_per_s"] * record["time_s"] == pytest.approx(result["step_tokens"])


def test_tensorboard_has_the_records(worlds, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = training.mapping(tmp_path, upipe__sp_size=1, train__steps=2, train__tensorboard=True, data__eval_fraction=0.2)
    records = worlds(1).run(training.evaluated, config=config)[0]["records"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([r["loss"] for r in records])
    assert [e.step for e in events.Scalars("tokens_per_s")] == [0, 1]


@pytest.mark.parametrize(("key", "value", "package"), [("wandb", "project", "wandb"), ("tensorboard", True, "tensorboard")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, key, value, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    config = training.mapping(tmp_path, **{f"train__{key}": value})
    with pytest.raises(ConfigError, match=f"train.{key}={value!r} needs the package {package}: pip install {package}"):
        Trainer(from_mapping(RunConfig, config))


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_packed_training_passes_the_self_check(worlds, tmp_path, packing):
    texts = [tmp_path / f"{i}.txt" for i in range(12)]
    for i, text in enumerate(texts):
        text.write_text("".join(chr(40 + (i * j) % 80) for j in range(3 + 5 * i)))
    given = dict(data__path=[str(t) for t in texts], data__packing=packing, data__tokens=21, train__micro_batch_size=2)
    config = training.mapping(tmp_path, **given)
    passed, text = worlds(2).run(training.checked, config=config)[0]
    assert passed, text


def test_training_goes_on_from_a_pretrained_folder(worlds, tmp_path):
    from upipe.build import ModelConfig, build_model

    build_model(ModelConfig(**training.SHAPE), seed=5).save_pretrained(tmp_path / "model")
    losses = {}
    for run, seed, model in [("a", 5, None), ("b", 5, "model"), ("c", 6, None), ("d", 6, "model")]:
        config = training.mapping(tmp_path, train__steps=1, train__seed=seed, train__run_dir=str(tmp_path / run))
        if model is not None:
            config["model"] = {"pretrained": str(tmp_path / model)}
        losses[run] = worlds(2).run(training.train, config=config)[0]["losses"]
    assert losses["a"] == losses["b"] and losses["c"] != losses["d"]
    told = worlds(2).run(training.refused, config=config | {"model": {"pretrained": "no/such"}}, resume="auto")[0]
    assert "model.pretrained='no/such' is not a folder, and as a name cannot be loaded" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=3"], "did you mean 'steps'"),
        (["--nproc", "0"], "--nproc 0"),
        (["model.vocab_size=null"], "missing: vocab_size"),
        (["train.zero_stage=0", "train.dtype=bf16"], "use zero_stage=1, or gradient_dtype=bf16"),
        (["train.keep_last=-1"], "keep_last=-1: must be a finite number, not negative"),
    ],
)
def test_refusals_come_before_any_process_starts(config, capsys, arguments, message):
    assert main(["train", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "c.yaml", "--nprocs"], ["train", "c.yaml", "--check", "word"], ["models", "a=b"], []])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["demo", "--help"], ["export", "-h"], ["models", "-h"]])
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
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 9e-4, "w": 0.0119, "b": 0.0}, plain).passed
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 9e-4, "w": 0.0121, "b": 0.0}, plain).failed == ["w"]
    assert CheckResult("bf16", 1.0, 1.0, {"loss": 2e-3, "w": 0.01, "b": 0.003}, plain).failed == ["loss", "b"]
