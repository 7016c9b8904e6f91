"""Which Hugging Face attention classes are served, and how each is read.

One entry an architecture, by exact class: a subclass may compute something else. Classes are named, not imported, so a
model that is not used costs no import. Everything here reads; nothing is changed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import nn

from upipe.block import Projections


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture.

    Args:
        name: its `model_type` in a Hugging Face config.
        prefix: of its class names: PrefixAttention computes attention, `decoder` embeds tokens, makes position embeddings
            and runs the layers.
        package: its folder in transformers.models.
        decoder: the decoder's class; PrefixModel unless told.
        norm_width: what its q/k norms run over, "head" or "full" (see `block.BlockSpec`); None: it has none.
        norm_offset: added to the norms' weights.
        fused: q, k and v are one projection, qkv_proj.
        sinks: one learned logit a query head in the softmax's denominator.
        half_angles: cos and sin come for half of the rotated dims.
        window_in_config: the sliding window stands in the config for all layers, not on each module.
        softcap: the module's `attn_logit_softcapping` bends the scores.
        served_as: a line for `upipe models`.
    """

    name: str
    prefix: str
    package: str
    decoder: str = ""
    norm_width: str | None = None
    norm_offset: float = 0.0
    fused: bool = False
    sinks: bool = False
    half_angles: bool = False
    window_in_config: bool = False
    softcap: bool = False
    served_as: str = ""

    @property
    def module_name(self) -> str:
        return f"transformers.models.{self.package}.modeling_{self.package}"

    @property
    def attention_name(self) -> str:
        return f"{self.prefix}Attention"

    @property
    def decoder_name(self) -> str:
        return self.decoder or f"{self.prefix}Model"

    def classes(self) -> tuple[type[nn.Module], type[nn.Module]]:
        """The attention and the decoder class, imported."""
        module = importlib.import_module(self.module_name)
        return getattr(module, self.attention_name), getattr(module, self.decoder_name)

    def is_attention(self, cls: type) -> bool:
        return (cls.__module__, cls.__name__) == (self.module_name, self.attention_name)

    def is_decoder(self, cls: type) -> bool:
        return (cls.__module__, cls.__name__) == (self.module_name, self.decoder_name)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The projections of an attention module."""
        return ("qkv_proj", "o_proj") if self.fused else ("q_proj", "k_proj", "v_proj", "o_proj")

    def projections(self, module: nn.Module) -> Projections:
        """The module's parameters. Under ZeRO-3 call it inside the module's forward, which gathers them."""
        wo, bo = module.o_proj.weight, module.o_proj.bias
        extra = {"sinks": module.sinks} if self.sinks else {}
        if self.norm_width is not None:
            extra |= {"q_norm": module.q_norm.weight, "k_norm": module.k_norm.weight}
        if self.fused:
            return Projections(None, None, None, wo, bo=bo, wqkv=module.qkv_proj.weight, **extra)
        parts = (module.q_proj, module.k_proj, module.v_proj)
        return Projections(*(p.weight for p in parts), wo, *(p.bias for p in parts), bo, **extra)

    def heads(self, module: nn.Module) -> tuple[int, int]:
        """Query and kv heads, from the layers' widths (a partitioned weight has no shape)."""
        H = module.o_proj.in_features // module.head_dim
        if self.fused:
            return H, (module.qkv_proj.out_features // module.head_dim - H) // 2
        return H, module.k_proj.out_features // module.head_dim

    def norm_eps(self, module: nn.Module) -> float:
        if self.norm_width is None:
            return 0.0
        return module.q_norm.eps if hasattr(module.q_norm, "eps") else module.q_norm.variance_epsilon

    def window(self, module: nn.Module) -> int | None:
        """The sliding window of this layer, in tokens, or None where it sees everything before it."""
        return getattr(module.config if self.window_in_config else module, "sliding_window", None)

    def softcap_of(self, module: nn.Module) -> float | None:
        return module.attn_logit_softcapping if self.softcap else None

    def angles(self, position_embeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [B or 1, L, R] over all rotated dims."""
        cos, sin = position_embeddings
        return tuple(torch.cat((t, t), dim=-1) for t in (cos, sin)) if self.half_angles else (cos, sin)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "Llama", "llama", served_as="GQA, optional biases, any RoPE scaling but dynamic and longrope"),
    Architecture("mistral", "Mistral", "mistral", window_in_config=True, served_as="sliding window"),
    Architecture("qwen2", "Qwen2", "qwen2", served_as="q/k/v bias, sliding windows by layer"),
    Architecture("qwen3", "Qwen3", "qwen3", norm_width="head", served_as="q/k norm, sliding windows by layer"),
    Architecture("qwen3_moe", "Qwen3Moe", "qwen3_moe", norm_width="head", served_as="q/k norm, mixture of experts"),
    Architecture("gemma2", "Gemma2", "gemma2", softcap=True, served_as="softcaps, alternating windows, own scale"),
    Architecture(
        "gemma3_text", "Gemma3", "gemma3", decoder="Gemma3TextModel", norm_width="head", norm_offset=1.0,
        served_as="q/k norm, mixed windows, head_dim 256, own scale",
    ),
    Architecture("olmo2", "Olmo2", "olmo2", norm_width="full", served_as="q/k norm over all heads together"),
    Architecture("phi3", "Phi3", "phi3", fused=True, window_in_config=True, served_as="fused projection, partial rotation, sliding window"),
    Architecture(
        "gpt_oss", "GptOss", "gpt_oss", sinks=True, half_angles=True,
        served_as="attention sinks, alternating windows, mixture of experts",
    ),
)


def served() -> str:
    """The served attention classes, for messages."""
    return ", ".join(a.attention_name for a in ARCHITECTURES)


def of_attention(cls: type) -> Architecture | None:
    return next((a for a in ARCHITECTURES if a.is_attention(cls)), None)


def of_decoder(cls: type) -> Architecture | None:
    return next((a for a in ARCHITECTURES if a.is_decoder(cls)), None)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module mixes tokens by a convolution along them, as every linear attention and state space layer does: its
    convolution and its state run across the shards of a sequence. A served attention class mixes them by attention alone."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def recurrent_layers(config) -> list[str]:
    """Kinds of layers in a Hugging Face config's `layer_types` that are not attention over keys."""
    kinds = getattr(config, "layer_types", None) or ()
    return sorted({kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear")})


def of_model_type(model_type: str) -> Architecture | None:
    """By the `model_type` of a Hugging Face config."""
    return next((a for a in ARCHITECTURES if a.name == model_type), None)
