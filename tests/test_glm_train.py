"""`upipe train` of GLM models: the handle, what is refused, the self-check over ranks, Markov baselines, the DNA slice."""

import dataclasses
import lzma
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests import training
from upipe import cli, plan
from upipe.baselines import markov_losses
from upipe.build import ModelConfig, build_model, causal_lm, read_config
from upipe.cli import main
from upipe.config import ConfigError, from_mapping, load, to_mapping
from upipe.data import ChunkDataset
from upipe.documents import read_files
from upipe.glm import Glm5NextForCausalLM, GlmSettings
from upipe.glm.moe import MoEConfig
from upipe.memory import MemoryConfig
from upipe.metrics import read_metrics
from upipe.trainer import RunConfig, Trainer

ROOT = Path(__file__).resolve().parent.parent
DNA = ROOT / "configs" / "dna" / "human_chr22.fa.xz"
SMALL = {"kda": {"heads_per_group": 1}, "moe": {"chunk_tokens": 30}, "hyper_tile_tokens": 17}


def run_of(tmp_path, **changes):
    made = training.mapping(tmp_path, **{"data__tokens": 91, "data__repeat": True, "train__accumulation": 1, **changes})
    return made | {"model": {"preset": "glm-tiny", "checkpointing": "non-reentrant", "glm": SMALL}}


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_trained_model_is_checked_over_ranks(worlds, tmp_path, stage):
    """Zigzag rows that need padding, checkpointed layers, chunks that do not divide, under ZeRO."""
    config = run_of(tmp_path, train__zero_stage=stage, upipe__ring_degree=2)
    passed, text = worlds(2).run(training.checked, config=config)[0]
    assert passed, text


def test_settings_can_be_given_on_the_command_line(tmp_path):
    made = run_of(tmp_path, upipe__sp_size=1) | {"model": {"preset": "glm-tiny"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    words = ["model.glm.kernel=gather", "model.glm.kda.heads_per_group=2"]
    for more in ([], ["model.glm={hyper_tile_tokens: 5}"]):
        found = load(RunConfig, tmp_path / "run.yaml", [*more, *words]).model.glm
        assert (found.kernel, found.kda.heads_per_group, found.moe) == ("gather", 2, MoEConfig())
        assert (found.hyper_tile_tokens == 5) == bool(more)
    assert load(RunConfig, tmp_path / "run.yaml", [*words, "model.glm=null"]).model.glm is None
    with pytest.raises(ConfigError, match="heads_per_group='x'|expected int"):
        load(RunConfig, tmp_path / "run.yaml", ["model.glm.kda.heads_per_group=x"])


def test_settings_reach_the_model_and_the_file_is_read_back(tmp_path):
    config = from_mapping(RunConfig, run_of(tmp_path, upipe__sp_size=1))
    assert config.model.glm == from_mapping(GlmSettings, SMALL) and config.model.glm.moe.chunk_tokens == 30
    again = from_mapping(RunConfig, yaml.safe_load(yaml.safe_dump({**to_mapping(config), "train": {}})))
    assert again.model == config.model
    trainer = Trainer(config, dry_run=True)
    text = trainer.describe()
    trainer.close()
    assert trainer.model.runtime.settings == config.model.glm and "GLM on Glm5NextForCausalLM: 4 layers" in text


@pytest.mark.parametrize("changes, says", [
    ({"upipe": {"heads_per_stage": 4}}, "heads_per_stage=4 with Glm5NextForCausalLM.*heads_per_group"),
    ({"upipe": {"shard_eval": False}}, "shard_eval=False"),
    ({"method": "ring"}, "method=ring with Glm5NextForCausalLM.*use upipe"),
    ({"memory": {"mlp_tokens": 512}}, "mlp_tokens.*tiles of its own"),
    ({"model": {"preset": "glm-tiny", "layers": 5}}, "layers=5: preset='glm-tiny' has 4"),
    ({"model": {"preset": "qwen3-4b", "glm": {}}}, "model.glm is of GLM models alone"),
    ({"model": {"preset": "glm-tiny", "rope_scaling": {"rope_type": "linear"}}}, "rope_scaling with a GLM model"),
])  # fmt: skip
def test_what_is_refused(tmp_path, changes, says):
    made = run_of(tmp_path, upipe__sp_size=1)
    with pytest.raises(ValueError, match=says):
        Trainer(from_mapping(RunConfig, made | changes), dry_run=True).close()


@pytest.mark.parametrize("setting, says", [
    ({"kernel": "foo"}, "kernel='foo': use auto, gather"),
    ({"kda": {"kernel": "foo"}}, "KDA kernel 'foo' is unknown"),
    ({"kda": {"tile_tokens": 2}}, "tile_tokens=2 with 4 taps"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_by_a_dry_run(tmp_path, setting, says):
    made = run_of(tmp_path, upipe__sp_size=1) | {"model": {"preset": "glm-tiny", "glm": setting}}
    with pytest.raises(ValueError, match=says):
        Trainer(from_mapping(RunConfig, made), dry_run=True).close()


def test_accumulation_and_several_rows_are_one_batch(worlds, tmp_path):
    """Two micro-batches of two rows on two ranks, against the plain model: the window's loss and gradients."""
    config = run_of(tmp_path, train__accumulation=2, train__micro_batch_size=2, train__zero_stage=2, upipe__ring_degree=2)
    passed, text = worlds(2).run(training.checked, config=config)[0]
    assert passed, text


def test_ranks_that_do_not_divide_the_heads_and_the_planner(worlds, tmp_path):
    made = run_of(tmp_path, upipe__sp_size=3)
    assert "linear_num_heads=4 on 3 ranks" in worlds(3).run(training.refused, config=made, resume="none")[0]
    with pytest.raises(ConfigError, match="python -m experiments.glm_ablation"):
        plan.described(plan.request("glm-mini", 4096, 1))


def test_saved_streams_are_four_times_as_wide():
    from upipe.build import model_sizes
    from upipe.memory import make_plan

    run = dataclasses.make_dataclass("Run", ["model", "train", "method", "upipe", "memory"])(
        ModelConfig(preset="glm-tiny", checkpointing="non-reentrant"), RunConfig.__dataclass_fields__["train"].default_factory(), "upipe",
        RunConfig.__dataclass_fields__["upipe"].default_factory(), MemoryConfig(offload="pageable"),
    )  # fmt: skip
    made = make_plan(run, 1000, model_sizes(run.model), world=1, local_ranks=1, device_bytes=None, host_bytes=2**34)
    assert made.input_bytes == 1000 * 4 * 64 * 4


def test_a_saved_model_is_built_again(tmp_path):
    model = build_model(ModelConfig(preset="glm-tiny", layers=2), seed=3)
    assert isinstance(model, Glm5NextForCausalLM) and model.training
    model.save_pretrained(tmp_path)
    again = build_model(ModelConfig(pretrained=str(tmp_path)))
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    with torch.device("meta"):
        assert causal_lm(read_config(tmp_path), dtype=torch.float32).config.index_kpool == 4


def slow_markov(train, held, row, k):
    """-log p of order k by its definition, each token by itself."""
    A = len(set(train) | set(held))

    def p(context, token):
        text = "".join(chr(65 + t) for t in train)

        def count(word):
            word = "".join(chr(65 + t) for t in word)
            return sum(text.startswith(word, i) for i in range(len(text)))

        if context is None:
            return 1 / A
        # A context at the very end of the training stream is followed by nothing.
        seen = sum(count([*context, t]) for t in range(A))
        return (count([*context, token]) + A * p(context[1:] if context else None, token)) / (seen + A)

    places = [i for i in range(len(held)) if i % row and i >= 2]
    return sum(-math.log(p(held[i - k : i], held[i])) for i in places) / len(places)


def test_markov_losses_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    train, held = rng.integers(0, 3, 60), rng.integers(0, 3, 26)
    got = markov_losses(train + 65, ChunkDataset(held + 65, 6), 2)
    assert list(got) == ["uniform", "order 0", "order 1", "order 2"] and got["uniform"] == pytest.approx(math.log(3))
    for k in range(3):
        assert got[f"order {k}"] == pytest.approx(slow_markov(list(train), list(held[:24]), 6, k), rel=1e-12)
    assert markov_losses(train, ChunkDataset(held, 6), 0, rows=1) != markov_losses(train, ChunkDataset(held, 6), 0)
    with pytest.raises(ConfigError, match="markov_orders=30 of 3"):
        markov_losses(train, ChunkDataset(held, 6), 30)


def test_the_dna_slice():
    (bases,) = read_files([str(DNA)])
    assert len(bases) == 1_499_088 and set(bases) == set("ACGT") and DNA.stat().st_size < 500_000
    with lzma.open(DNA, "rt") as file:
        assert file.readline().startswith(">human chromosome 22, GRCh37 36007426-38110533")


@pytest.mark.slow
def test_a_short_run_learns_dna(tmp_path, capfd):
    """A third of the steps of configs/glm_tiny.yaml, evaluated on 24 rows."""
    words = ["train.steps=40", "train.eval_every=40", "train.eval_batches=12", f"train.run_dir={tmp_path}"]
    command = [sys.executable, "-m", "upipe.cli", "train", str(ROOT / "configs" / "glm_tiny.yaml"), *words, "--nproc", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_metrics(tmp_path)[-1]["eval_loss"] <= 1.37
    assert "evaluation loss 1.3" in done.stdout and "uniform 1.3863" in done.stdout and "order 8 1.3" in done.stdout
    # 40 steps of 2,048 tokens choose 2 experts each, evaluation not counted.
    assert re.search(r"layer 3: 163840 choices; busiest expert \d has \d\.\d\dx the mean.* busiest of 2 ranks", done.stdout)


@pytest.mark.parametrize("sp_size, started", [(2, 2), (1, None), (10**4, None)])
def test_without_a_launcher_as_many_processes_start_as_share_a_sequence(tmp_path, monkeypatch, sp_size, started):
    """So that `upipe train configs/glm_tiny.yaml` is all. More than there are cores are not: the run is refused as before."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cli.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cli, "Trainer", lambda *_, **__: pytest.fail("here"))
    asked = []
    monkeypatch.setattr(cli, "launch", lambda arguments, nproc, settings: asked.append((arguments[:2], nproc)) or 0)
    made = run_of(tmp_path, upipe__sp_size=sp_size)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    words = ["train", str(tmp_path / "run.yaml")]
    if started is None:
        with pytest.raises(pytest.fail.Exception, match="here"):
            main(words)
    else:
        assert main(words) == 0 and asked == [(words, started)]


def test_presets_are_listed(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "glm-5.3-flash" in out and "313.3" in out and "glm5_next" in out and "0.41 M" in out
