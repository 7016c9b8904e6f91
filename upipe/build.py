"""Build the model to train: random weights in a given or published shape, or a pretrained checkpoint.

What comes out is a plain Hugging Face causal LM; parallelism is applied to it afterwards.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from upipe.block import checkpoint_contexts
from upipe.config import ConfigError, FileOrName, Length
from upipe.glm import Glm5NextForCausalLM, GlmRuntime, GlmSettings, GlmTextConfig
from upipe.glm import preset as glm_preset
from upipe.glm.config import preset_shapes as glm_shapes
from upipe.presets import preset_shapes

_SHAPE = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "vocab_size")


@dataclass
class ModelConfig:
    """The model, and how its activations are kept.

    One of three gives the shape. `pretrained` (a folder, or a name, that `from_pretrained` reads; `gguf_file` names a
    GGUF file in it) brings shape and weights. `preset` brings a published shape with random weights, `layers` of its
    decoder layers (all unless told); see `upipe.presets`. Otherwise all of the shape must be given: hidden_size, layers,
    heads (query), kv_heads, intermediate_size, vocab_size; head_dim defaults to hidden_size / heads, rope_theta to 10000,
    max_positions (the longest sequence the model is said to take) to 131072.

    rope_scaling: RoPE scaling for any of the three, as in a Hugging Face configuration, e.g. {rope_type: yarn, factor: 4.0,
    original_max_position_embeddings: 32768}; rope_theta stays the model's own unless it is among them.
    glm: how a GLM model computes (`upipe.glm.GlmSettings`); for its presets and checkpoints alone.
    checkpointing: recompute each decoder layer in the backward pass ("non-reentrant" is torch's recommended form).
    zero_init: under ZeRO-3 make random weights partitioned from the start (`deepspeed.zero.Init`), never whole on any
    rank; "auto" where there is a GPU. The values depend on the seed alone, but differ from those made whole.
    """

    architecture: Literal["llama", "qwen2", "qwen3"] | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    tie_embeddings: bool | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    max_positions: Length | None = None
    preset: Literal[
        "llama3-8b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "qwen3-32b-paper", "glm-5.3-flash", "glm-mini", "glm-tiny"
    ] | None = None  # fmt: skip
    pretrained: FileOrName | None = None
    gguf_file: str | None = None
    glm: GlmSettings | None = None
    checkpointing: Literal["none", "non-reentrant", "reentrant"] = "none"
    zero_init: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self):
        names = (*_SHAPE, "head_dim", "architecture", "tie_embeddings", "rope_theta", "max_positions")
        given = [name for name in names if getattr(self, name) is not None]
        for name in (n for n in (*_SHAPE, "head_dim") if n in given):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.gguf_file is not None and self.pretrained is None:
            raise ValueError(f"gguf_file={self.gguf_file!r} needs pretrained, the folder that the file is in")
        if self.pretrained is not None:
            if given or self.preset is not None:
                given += ["preset"] * (self.preset is not None)
                raise ValueError(f"pretrained={self.pretrained!r} brings its own shape; leave out {', '.join(given)}")
            if self.zero_init == "always":
                raise ValueError("zero_init=always makes random weights; with pretrained use auto or never")
            return
        if self.preset is not None:
            others = [name for name in given if name != "layers"]
            if others:
                raise ValueError(f"preset={self.preset!r} brings its own shape but for layers; leave out {', '.join(others)}")
            published = (glm_shapes() | preset_shapes())[self.preset]["num_hidden_layers"]
            if self.layers is not None and self.layers > published:
                raise ValueError(f"layers={self.layers}: preset={self.preset!r} has {published}; give at most that")
            return
        if self.glm is not None:
            raise ValueError("glm is of GLM models alone: give one of their presets or checkpoints, or leave it out")
        missing = [name for name in _SHAPE if name not in given]
        if missing:
            raise ValueError(f"give the whole shape, a preset, or pretrained; missing: {', '.join(missing)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}; give head_dim as well"
            )


def hf_config(config: ModelConfig) -> Any:
    """The Hugging Face configuration of the model in `config`. Raises ConfigError where a pretrained one cannot be read."""
    from transformers import AutoConfig

    if config.pretrained is not None:
        extra = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
        try:
            found = read_config(config.pretrained, **extra)
        except (OSError, ValueError, ImportError) as error:
            what = "" if Path(config.pretrained).is_dir() else " is not a folder, and as a name"
            raise ConfigError(f"model.pretrained={config.pretrained!r}{what} cannot be loaded: {error}") from error
        found.use_cache = False
    elif config.preset in glm_shapes():
        found = glm_preset(config.preset, **({} if config.layers is None else {"num_hidden_layers": config.layers}))
    elif config.preset is not None:
        shape = preset_shapes()[config.preset] | ({} if config.layers is None else {"num_hidden_layers": config.layers})
        found = AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=False)
    else:
        found = _given_shape(config)
    if config.glm is not None and not is_glm(found):
        raise ConfigError(f"model.glm is of GLM models alone, and this one's type is {found.model_type!r}; leave it out")
    if config.rope_scaling is not None:
        if is_glm(found):
            raise ConfigError("model.rope_scaling with a GLM model, which has no rotary embedding; leave it out")
        if "rope_type" not in config.rope_scaling:
            raise ConfigError(f"model.rope_scaling={config.rope_scaling}: give rope_type (linear, yarn or llama3), and what it needs")
        theta = found.rope_parameters["rope_theta"]
        found.rope_parameters = {"rope_theta": theta} | config.rope_scaling
    return found


def is_glm(described: Any) -> bool:
    """Whether a Hugging Face configuration is of GLM-5.3-Flash, the model of `upipe.glm`."""
    return described.model_type.startswith("glm5_next")


def read_config(folder: str | Path, **extra) -> Any:
    """The Hugging Face configuration in a folder, or of a name, with which `causal_lm` makes its model."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder, **extra)
    return GlmTextConfig.from_pretrained(folder) if is_glm(found) else found


def causal_lm(described: Any, *, dtype: torch.dtype) -> nn.Module:
    """The causal LM of a configuration with random weights."""
    from transformers import AutoModelForCausalLM

    return (Glm5NextForCausalLM._from_config if is_glm(described) else AutoModelForCausalLM.from_config)(described, dtype=dtype)


def _given_shape(config: ModelConfig) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    architecture = config.architecture or "llama"
    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[architecture]
    head_dim = config.head_dim if config.head_dim is not None else config.hidden_size // config.heads
    if architecture == "qwen2" and head_dim * config.heads != config.hidden_size:
        raise ConfigError(
            f"model.head_dim={head_dim}: Qwen2 has head_dim = hidden_size / heads = {config.hidden_size / config.heads:g}"
        )
    shape = {} if architecture == "qwen2" else {"head_dim": head_dim}
    return cls(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=131072 if config.max_positions is None else config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0 if config.rope_theta is None else config.rope_theta},
        tie_word_embeddings=bool(config.tie_embeddings),
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **shape,
    )


def build_model(config: ModelConfig, *, seed: int = 0, meta: bool = False) -> nn.Module:
    """The model of `config`: float32, on the CPU, in training mode, with activation checkpointing as asked.

    Random weights depend on the shape and `seed` alone, so every rank that builds it has the same; the caller's random
    state is left as it was. meta: shapes alone, on the meta device, in an instant. Raises ConfigError where the pretrained
    model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    described = hf_config(config)
    if meta:
        with torch.device("meta"):
            model = causal_lm(described, dtype=torch.float32)
    elif config.pretrained is not None:
        extra = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
        cls = Glm5NextForCausalLM if is_glm(described) else AutoModelForCausalLM
        model = cls.from_pretrained(config.pretrained, config=described, dtype=torch.float32, **extra)
        model.config.use_cache = False
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = causal_lm(described, dtype=torch.float32)
    return _in_training(model, config)


def wants_zero_init(config: ModelConfig, *, zero_stage: int, cuda: bool) -> bool:
    """Whether to make the model with `build_partitioned_model`. Raises ConfigError where it is asked for and cannot be."""
    if config.zero_init == "always" and zero_stage != 3:
        raise ConfigError(f"model.zero_init=always needs train.zero_stage=3, not {zero_stage}")
    return config.zero_init == "always" or (config.zero_init == "auto" and cuda and zero_stage == 3 and config.pretrained is None)


def build_partitioned_model(config: ModelConfig, ds_config: dict[str, Any], *, seed: int = 0) -> nn.Module:
    """The random model of `config` with its parameters made and kept partitioned over all ranks (ZeRO-3), in the dtype
    of `ds_config`, on this rank's device. Collective. Weights come from the first rank and depend on `seed` alone; the
    caller's random state is left as it was."""
    from transformers.integrations import HfDeepSpeedConfig

    dtype = torch.bfloat16 if ds_config["bf16"]["enabled"] else torch.float32
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # transformers makes models under deepspeed.zero.Init, and fills them module by module, while this object is alive.
    under_zero3 = HfDeepSpeedConfig(ds_config)
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            model = causal_lm(hf_config(config), dtype=dtype)
    finally:
        del under_zero3
        gc.collect()
    return _in_training(model, config)


def _in_training(model: nn.Module, config: ModelConfig) -> nn.Module:
    if config.glm is not None:
        model.use(GlmRuntime(config.glm))
    if config.checkpointing != "none":
        enable_checkpointing(model, reentrant=config.checkpointing == "reentrant")
    return model.train()


def enable_checkpointing(model: nn.Module, *, reentrant: bool) -> None:
    """Recompute every decoder layer in the backward pass. transformers 5.24 renamed the method; both names work.

    The non-reentrant form also tells attention blocks which forward is the first of its call.
    """
    options = {"use_reentrant": reentrant} | ({} if reentrant else {"context_fn": contexts_of(model)})
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def contexts_of(model: nn.Module):
    """The contexts of a checkpointed layer's first forward and its recompute: the model's own, or the attention block's."""
    return getattr(model, "checkpoint_contexts", checkpoint_contexts)


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of a model, whole: parameters; decoder layers and the parameters of the largest; hidden size D; query heads H and
    the width of the attention output, H * d; vocabulary V; residual streams between layers, of D each; kv heads, None for H."""

    parameters: int
    layers: int
    layer_parameters: int
    hidden_size: int
    heads: int
    attention_width: int
    vocab_size: int
    streams: int = 1
    kv_heads: int | None = None


def model_sizes(config: ModelConfig) -> ModelSizes:
    """The sizes of the model of `config`, from shapes alone. Raises ConfigError as `hf_config` does."""
    model = build_model(config, meta=True)
    described, parameters = model.config.get_text_config(), count_parameters(model)
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    # A model without a list of layers is refused when UPipe is applied, by name.
    largest = max(map(count_parameters, layers)) if layers else parameters // described.num_hidden_layers
    head_dim = getattr(described, "head_dim", None) or described.hidden_size // described.num_attention_heads
    return ModelSizes(
        parameters, described.num_hidden_layers, largest, described.hidden_size, described.num_attention_heads,
        described.num_attention_heads * head_dim, described.vocab_size, getattr(described, "hc_mult", 1),
        getattr(described, "num_key_value_heads", None),
    )  # fmt: skip


def count_parameters(model: nn.Module) -> int:
    """Parameters of `model`, tied ones once, partitioned ones (ZeRO-3) in full."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def longest_served(described: Any) -> int:
    """Positions that a Hugging Face configuration says its model takes: max_position_embeddings, or what its RoPE
    scaling stretches the original length to, whichever is more."""
    rope = getattr(described, "rope_parameters", None) or {}
    longest = described.max_position_embeddings
    if rope.get("rope_type", "default") == "default":
        return longest
    original = rope.get("original_max_position_embeddings") or longest
    return max(longest, int(original * rope.get("factor", 1.0)))
