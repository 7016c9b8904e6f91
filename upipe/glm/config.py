"""Configurations of GLM-5.3-Flash's text model (transformers' `glm5_next_text`), its settings here, and shapes by name.

| preset | what it is | parameters |
| --- | --- | --- |
| glm-5.3-flash | GLM-5.3-Flash without its MTP layer and vision tower; 45 layers, 11 of them sparse attention | 313.3 B |
| glm-tiny | 64 channels, 4 layers (3 KDA, 1 sparse; 1 of experts), 64 tokens selected: for a CPU | 0.4 M |
| glm-mini | the same layer with 1,024 channels, 8 layers (6 KDA, 2 sparse) and a vocabulary of bytes, for one GPU | 0.24 B |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from upipe.glm.hyper import HYPER_TILE_TOKENS, Recompute
from upipe.glm.kda import KDAConfig
from upipe.glm.moe import MoEConfig
from upipe.glm.replay import check_positive
from upipe.loss import LOSS_TILE_TOKENS

SCORE_BYTES = 1 << 31  # of per-head index scores, fp32, at a time
GATHER_BYTES = 1 << 28  # of gathered latents, fp32, at a time


class GlmTextConfig(Glm5NextTextConfig):
    """`Glm5NextTextConfig` whose `index_kpool` must be given.

    transformers' default of 16 is not the published checkpoint's 4, and a wrong pool size changes which tokens are seen
    without changing any shape but that of `index_kpool_compress_ape`.

    Raises:
        ValueError: no index_kpool.
    """

    has_no_defaults_at_init = True
    index_kpool: int = 0

    def __post_init__(self, **kwargs):
        if self.index_kpool == 0:
            raise ValueError(
                "index_kpool is not given: read it from the checkpoint's config.json (GLM-5.3-Flash has 4), or set it; there is no default"
            )
        super().__post_init__(**kwargs)


def check_config(config: Glm5NextTextConfig) -> None:
    """What the sparse attention here cannot compute as transformers does.

    Raises:
        ValueError: naming the values and what would work.
    """
    if config.index_kpool > 1 and not config.index_kpool_always_select_tail:
        raise ValueError(
            f"index_kpool_always_select_tail=False with index_kpool={config.index_kpool}: the first {config.index_kpool - 1} tokens of "
            "a document would see no key at all; set it to True"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config.hidden_act!r}: the convolutions and experts here are SiLU's; set it to silu")
    if config.attention_dropout:
        raise ValueError(f"attention_dropout={config.attention_dropout}: the sparse path has none; set it to 0")
    if config.output_router_logits:
        raise ValueError("output_router_logits=True: the loss has no load-balancing term; set it to False")


@dataclass(frozen=True)
class GlmSettings:
    """How the model computes; nothing here changes a value beyond rounding.

    Args:
        kernel: of sparse attention: a name in `sparse.KERNELS`, or "auto", the first that takes the shape.
        allow_dense: attend densely under a mask where the sparse kernel declines a shape; otherwise that is an error.
        score_bytes: per-head index scores (fp32) that may exist at a time.
        gather_bytes: gathered latents (fp32) that may exist at a time in the torch kernel.
        loss_tile_tokens: rows of logits at a time.
        kda, moe: of linear attention and of the mixture of experts.
        hyper_recompute, hyper_tile_tokens: of the hyper-connections (`hyper.collapse`).
    """

    kernel: str = "auto"
    allow_dense: bool = False
    score_bytes: int = SCORE_BYTES
    gather_bytes: int = GATHER_BYTES
    loss_tile_tokens: int = LOSS_TILE_TOKENS
    kda: KDAConfig = field(default_factory=KDAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    hyper_recompute: Recompute = "selective"
    hyper_tile_tokens: int = HYPER_TILE_TOKENS

    def __post_init__(self) -> None:
        for name in ("score_bytes", "gather_bytes", "loss_tile_tokens", "hyper_tile_tokens"):
            value = getattr(self, name)
            check_positive(name, value)
        if self.hyper_recompute not in ("none", "selective"):
            raise ValueError(f"hyper_recompute={self.hyper_recompute!r}: use none or selective; full is a layer's checkpointing")


def preset_shapes() -> dict[str, dict[str, Any]]:
    """Preset name -> keyword arguments of `GlmTextConfig`."""
    flash = {
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
    }
    mini = {
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "q_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "linear_num_heads": 16,
    }
    tiny = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": 64,
        "index_head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    }
    return {"glm-5.3-flash": flash, "glm-mini": flash | mini, "glm-tiny": flash | tiny}


def preset(name: str, **changes: Any) -> GlmTextConfig:
    """The configuration of a preset, with some values changed, e.g. `num_hidden_layers`.

    Raises:
        ValueError: no such preset.
    """
    shapes = preset_shapes()
    if name not in shapes:
        raise ValueError(f"preset {name!r} is none of {', '.join(shapes)}")
    return GlmTextConfig(**shapes[name] | {"pad_token_id": None, "use_cache": False} | changes)
