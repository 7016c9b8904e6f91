"""What `upipe train` says before it starts."""

import time

import pytest

from upipe import plan_check
from upipe.cli import main
from upipe.config import ConfigError
from upipe.plan import Machine, request
from upipe.plan_check import before_training, gpu_of

EIGHT = Machine.parse("8xH100-80GB")


def test_kinds_of_gpus():
    assert gpu_of("NVIDIA H100 80GB HBM3", 79.2).name == "H100-80GB" and gpu_of("NVIDIA H200", 139.8).name == "H200-141GB"
    assert gpu_of("NVIDIA A100-SXM4-40GB", 39.4).name == "A100-40GB" and gpu_of("NVIDIA A100-SXM4-80GB", 79.2).name == "A100-80GB"
    assert gpu_of("NVIDIA L40S", 44.4).name == "L40S-48GB"
    assert gpu_of("NVIDIA H100 NVL", 93.1) is None and gpu_of("NVIDIA GeForce RTX 4090", 23.5) is None


def test_it_tells_what_it_predicts_and_warns():
    fits = before_training(request("llama3-8b", 2**20, 8, ["memory.fused_layers=true", "memory.offload=pinned"]), machine=EIGHT)
    assert len(fits) == 1 and fits[0].endswith("; fits") and "of 77 GiB a GPU" in fits[0]
    run = request("llama3-8b", 12 * 2**20, 8, ["memory.offload=pinned"])
    told = before_training(run, machine=EIGHT)
    assert "does not fit" in told[0] and "run out, by" in told[1] and ": set " in told[1] and "--strict" in told[2]
    with pytest.raises(ConfigError, match="--strict: predicted: .* run out, by .* set "):
        before_training(run, machine=EIGHT, strict=True)


@pytest.mark.slow
def test_what_is_not_kept_is_simulated_at_its_length_within_seconds():
    """The same as the planner's own lines, for settings that plan_layers.json has not."""
    run = request("llama3-8b", 2**21, 8, ["memory.mlp_tokens=4K", "memory.offload=pinned", "upipe.attention_output=device"])
    started = time.process_time()
    (text,) = before_training(run, machine=EIGHT)
    assert time.process_time() - started < 5
    assert f"{plan_check.plan.predict(run, EIGHT).device_gib:.1f} of 77" in text
    for method in ("fpdt", "ring"):
        run = request("llama3-8b", 2**18, 8, [f"method={method}"])
        started = time.process_time()
        assert "GiB a GPU" in before_training(run, machine=EIGHT)[0]
        assert time.process_time() - started < 5, method


def test_what_cannot_be_predicted_is_said_and_only_strict_refuses(monkeypatch):
    run = request("llama3-8b", 2**20, 8)
    assert before_training(run) == []
    monkeypatch.setattr(plan_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan_check, "machine_here", lambda: "Some GPU is none of H100-80GB")
    assert before_training(run) == ["plan    not predicted: Some GPU is none of H100-80GB"]
    with pytest.raises(ConfigError, match="cannot be predicted, Some GPU"):
        before_training(run, strict=True)

    def fails(*args, **options):
        raise KeyError("what")

    monkeypatch.setattr(plan_check.plan, "predict", fails)
    assert before_training(run, machine=EIGHT) == ["plan    not predicted: KeyError: 'what'"]


def test_the_command(monkeypatch, capsys):
    """`--strict` refuses with status 2 before anything is built; `--no-plan` asks nothing."""
    asked = []

    def told(run, strict):
        asked.append(strict)
        raise ConfigError("--strict: does not fit")

    monkeypatch.setattr(plan_check, "before_training", told)
    assert main(["train", "configs/demo.yaml", "upipe.sp_size=1", "--strict"]) == 2 and asked == [True]
    assert "does not fit" in capsys.readouterr().err
    assert main(["train", "configs/demo.yaml", "--no-plan", "upipe.sp_size=3", "--dry-run"]) == 2 and asked == [True]
