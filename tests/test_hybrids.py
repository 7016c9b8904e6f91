"""Hybrids of attention and recurrent layers are refused by name under sequence sharding, from their config and from the model."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import upipe
from tests.plain import tiny_config, tiny_model
from upipe import models, preflight

HYBRIDS = {
    "qwen3_next": ("linear_attention", "Qwen3NextGatedDeltaNet"),
    "kimi_linear": ("linear_attention", "KimiLinearDeltaAttention"),
    "qwen3_5_text": ("linear_attention", "Qwen3_5GatedDeltaNet"),
    "mamba": ((), "MambaMixer"),
    "recurrent_gemma": ((), "RecurrentGemmaRecurrentBlock"),
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_refused_by_name(model_type):
    kind, module = HYBRIDS[model_type]
    config = AutoConfig.for_model(model_type, hidden_size=32, num_hidden_layers=4, vocab_size=61, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if kind:
        with pytest.raises(upipe.PreflightError, match=f"'{model_type}' has .*{kind} layers.*state and convolution.*upipe.glm"):
            preflight.check_config(config)
    with pytest.raises(upipe.PreflightError, match=f"{module}.*shard to shard.*train other hybrids unsharded"):
        upipe.apply(model, upipe.UPipeConfig(sp_size=1))


def test_a_recurrent_layer_beside_served_attention_is_refused():
    """All its attention is served; one layer's convolution is not."""
    model = tiny_model("llama", 4, 2)
    assert len(preflight.find_attention(model)) == 2 and not models.recurrent_layers(tiny_config("qwen2", 4, 2))
    model.model.layers[0].mlp.add_module("mix", nn.Conv1d(4, 4, 3))
    with pytest.raises(upipe.PreflightError, match="LlamaMLP.*shard to shard"):
        preflight.find_attention(model)
