"""Build the model to train: random weights in a given shape, or a pretrained checkpoint from a local folder.

What comes out is a plain Hugging Face causal LM, float32, on the CPU; parallelism is applied to it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from upipe.config import ConfigError, File, Length

_SHAPE = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size")


@dataclass
class ModelConfig:
    """The model, and how its activations are kept.

    With `pretrained` (a folder that `from_pretrained` reads; `gguf_file` names a GGUF file in it) the shape is the
    checkpoint's, and none may be given here. Without it all of the shape must be: hidden_size, layers, heads (query),
    kv_heads, intermediate_size, vocab_size; head_dim defaults to hidden_size / heads.

    checkpointing: recompute each decoder layer in the backward pass ("non-reentrant" is torch's recommended form).
    """

    architecture: Literal["llama", "qwen2", "qwen3"] = "llama"
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    max_positions: Length = 131072
    pretrained: File | None = None
    gguf_file: str | None = None
    checkpointing: Literal["none", "non-reentrant", "reentrant"] = "none"

    def __post_init__(self):
        given = [name for name in (*_SHAPE, "head_dim") if getattr(self, name) is not None]
        if self.pretrained is not None:
            if given:
                raise ValueError(f"pretrained={self.pretrained!r} brings its own shape; leave out {', '.join(given)}")
            return
        if self.gguf_file is not None:
            raise ValueError(f"gguf_file={self.gguf_file!r} needs pretrained, the folder that the file is in")
        missing = [name for name in _SHAPE if name not in given]
        if missing:
            raise ValueError(f"give the whole shape, or pretrained; missing: {', '.join(missing)}")
        for name in given:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}; give head_dim as well"
            )


def hf_config(config: ModelConfig) -> Any:
    """The Hugging Face configuration of the shape in `config`, which must not name a pretrained checkpoint."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[config.architecture]
    head_dim = config.head_dim if config.head_dim is not None else config.hidden_size // config.heads
    if config.architecture == "qwen2" and head_dim * config.heads != config.hidden_size:
        raise ConfigError(
            f"model.head_dim={head_dim}: Qwen2 has head_dim = hidden_size / heads = {config.hidden_size / config.heads:g}"
        )
    shape = {} if config.architecture == "qwen2" else {"head_dim": head_dim}
    return cls(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **shape,
    )


def build_model(config: ModelConfig, *, seed: int = 0) -> nn.Module:
    """The model of `config`: float32, on the CPU, in training mode, with activation checkpointing as asked.

    Random weights depend on the shape and `seed` alone, so every rank that builds it has the same; the caller's random
    state is left as it was. Raises ConfigError where the pretrained folder is not there.
    """
    from transformers import AutoModelForCausalLM

    if config.pretrained is not None:
        if not Path(config.pretrained).is_dir():
            raise ConfigError(f"model.pretrained={config.pretrained!r} is not a folder")
        extra = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
        model = AutoModelForCausalLM.from_pretrained(config.pretrained, dtype=torch.float32, **extra)
        model.config.use_cache = False
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.float32)
    if config.checkpointing != "none":
        enable_checkpointing(model, reentrant=config.checkpointing == "reentrant")
    return model.train()


def enable_checkpointing(model: nn.Module, *, reentrant: bool) -> None:
    """Recompute every decoder layer in the backward pass. transformers 5.24 renamed the method; both names work."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def count_parameters(model: nn.Module) -> int:
    """Parameters of `model`, tied ones once, partitioned ones (ZeRO-3) in full."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
