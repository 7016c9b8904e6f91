"""Which Hugging Face attention classes are served, and how each is read.

One entry a class, by exact class: a subclass may compute something else. Everything here reads; nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from upipe.block import Projections


@dataclass(frozen=True)
class Architecture:
    """How to read one attention class.

    Args:
        attention: the attention class.
        decoder: the class of the module that embeds tokens, makes position embeddings and runs the layers.
        qk_norm: whether q_norm and k_norm are RMS norms over each head.
    """

    name: str
    attention: type[nn.Module]
    decoder: type[nn.Module]
    qk_norm: bool = False

    def projections(self, module: nn.Module) -> Projections:
        """The module's parameters. Under ZeRO-3 call it inside the module's forward, which gathers them."""
        linear = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
        norms = (module.q_norm.weight, module.k_norm.weight) if self.qk_norm else (None, None)
        return Projections(*(m.weight for m in linear), *(m.bias for m in linear), *norms)

    def head_dim(self, module: nn.Module) -> int:
        return module.head_dim

    def heads(self, module: nn.Module) -> tuple[int, int]:
        """Query and kv heads, from the layers' widths (a partitioned weight has no shape)."""
        return module.q_proj.out_features // module.head_dim, module.k_proj.out_features // module.head_dim

    def scale(self, module: nn.Module) -> float:
        return module.scaling

    def norm_eps(self, module: nn.Module) -> float:
        return module.q_norm.variance_epsilon if self.qk_norm else 0.0

    def window(self, module: nn.Module) -> int | None:
        return getattr(module, "sliding_window", None)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", modeling_llama.LlamaAttention, modeling_llama.LlamaModel),
    Architecture("qwen2", modeling_qwen2.Qwen2Attention, modeling_qwen2.Qwen2Model),
    Architecture("qwen3", modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3Model, qk_norm=True),
)


def served() -> str:
    """The served attention classes, for messages."""
    return ", ".join(a.attention.__name__ for a in ARCHITECTURES)


def of_attention(cls: type) -> Architecture | None:
    return next((a for a in ARCHITECTURES if a.attention is cls), None)


def of_model_type(model_type: str) -> Architecture | None:
    """By the `model_type` of a Hugging Face config."""
    return next((a for a in ARCHITECTURES if a.name == model_type), None)
