"""Published shapes, models made partitioned, and sequences longer than a model is made for."""

import logging

import pytest
import torch

from tests import training
from upipe.build import ModelConfig, build_model, count_parameters, hf_config, longest_served
from upipe.cli import main
from upipe.config import ConfigError, from_mapping
from upipe.presets import preset_shapes
from upipe.trainer import RunConfig, Trainer

PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-32b-paper": 32_519_623_680,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    model = build_model(ModelConfig(preset=name), meta=True)
    assert count_parameters(model) == PARAMETERS[name]
    assert hasattr(model.model.layers[0].self_attn, "q_norm") == (name.startswith("qwen3") and name != "qwen3-32b-paper")


def test_every_preset_is_tested_and_can_be_asked_for():
    assert set(preset_shapes()) == set(PARAMETERS)


def test_a_preset_is_shortened_by_layers():
    whole, short = (hf_config(ModelConfig(preset="llama3-8b", layers=n)) for n in (None, 4))
    assert (whole.num_hidden_layers, short.num_hidden_layers) == (32, 4)
    assert short.rope_parameters == whole.rope_parameters and short.rope_parameters["rope_theta"] == 500000.0
    assert short.vocab_size == 128256
    assert count_parameters(build_model(ModelConfig(preset="llama3-8b", layers=4), meta=True)) == 1_923_125_248


def _long(tmp_path, **changes):
    changes = dict(data__tokens=12, model__max_positions=8, upipe__sp_size=1) | changes
    return from_mapping(RunConfig, training.mapping(tmp_path, **changes))


def test_T44_longer_than_the_model_is_made_for_is_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "upipe.trainer"):
        Trainer(_long(tmp_path), dry_run=True).close()
    (record,) = [r for r in caplog.records if r.name == "upipe.trainer"]
    for part in ("up to 12 tokens", "the 8 positions", "data.tokens=8", "factor: 2.0"):
        assert part in record.getMessage()
    caplog.clear()
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    for quiet in (dict(data__tokens=8), dict(model__rope_scaling=scaled), dict(model__max_positions=12)):
        Trainer(_long(tmp_path, **quiet), dry_run=True).close()
    assert not [r for r in caplog.records if r.name == "upipe.trainer"]


def test_T44_yarn_keeps_rope_theta(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    config = hf_config(ModelConfig(preset="qwen3-8b", rope_scaling=scaling))
    assert config.rope_parameters["rope_theta"] == 1000000.0
    assert longest_served(config) == 163840
    folder = str(tmp_path / "pretrained")
    build_model(ModelConfig(**training.SHAPE, rope_theta=77.0)).save_pretrained(folder)
    model = build_model(ModelConfig(pretrained=folder, rope_scaling=scaling))
    assert model.config.rope_parameters == scaling | {"rope_theta": 77.0}
    assert type(model.model.rotary_emb)(model.config).attention_scaling == model.model.rotary_emb.attention_scaling != 1.0
    with pytest.raises(ConfigError, match="give rope_type"):
        hf_config(ModelConfig(preset="qwen3-8b", rope_scaling={"factor": 2.0}))


def test_a_model_made_partitioned_depends_on_the_seed_alone(worlds, tmp_path):
    def weights(run, seed, world=2, state=0, **changes):
        config = training.mapping(
            tmp_path, model__zero_init="always", train__seed=seed, train__run_dir=str(tmp_path / run), upipe__sp_size=world, **changes
        )
        return worlds(world).run(training.partitioned, config=config, state=state)

    a, b = weights("a", 3)
    again, one, other = weights("b", 3, state=5)[1], weights("c", 3, world=1, state=6)[0], weights("d", 4)[0]
    for name, value in a.items():
        assert torch.equal(value, b[name]) and torch.equal(value, again[name]) and torch.equal(value, one[name])
        assert not torch.equal(value, other[name]) or "norm" in name
        assert (value == 1).all() if "norm" in name else abs(float(value.std()) - 0.02) < 0.004, name


def test_a_model_made_partitioned_in_bf16_keeps_its_frequencies(worlds, tmp_path):
    """Rotary frequencies rounded to bf16 would be wrong by whole turns far into a sequence."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = training.mapping(tmp_path, model__zero_init="always", model__rope_scaling=scaling, train__dtype="bf16")
    dtypes, found = worlds(2).run(training.frequencies, config=config)[0]
    assert dtypes == {torch.bfloat16}
    plain = build_model(ModelConfig(**training.SHAPE, rope_scaling=scaling)).model.rotary_emb.inv_freq
    assert found.dtype == torch.float32 and torch.equal(found, plain)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_partitioned_trains_exactly(worlds, tmp_path, tied):
    config = training.mapping(tmp_path, model__zero_init="always", model__tie_embeddings=tied, model__architecture="qwen3")
    passed, text = worlds(2).run(training.checked, config=config)[0]
    assert passed, text


def test_models_lists_what_is_served(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for word in ("LlamaAttention", "qwen3_moe", "sliding window", "qwen3-32b-paper", "8.03 B parameters"):
        assert word in out
