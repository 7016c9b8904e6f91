"""Published model shapes by name, for models with random weights.

Each is the Hugging Face configuration that its authors published, special tokens left out.

| preset | what it is | parameters |
| --- | --- | --- |
| llama3-8b | Llama 3.1 8B (Llama 3 8B's shape, with the RoPE scaling to 128K tokens) | 8 030 261 248 |
| qwen3-4b | Qwen3-4B, tied embeddings | 4 022 468 096 |
| qwen3-8b | Qwen3-8B | 8 190 735 360 |
| qwen3-32b | Qwen3-32B | 32 762 123 264 |
| qwen3-32b-paper | "Qwen3-32B" as the UPipe paper (arXiv 2602.21196) measured it | 32 519 623 680 |

The paper's has Qwen3-32B's widths but no q/k norm, so it is of Llama's architecture, with Llama's vocabulary. What the
paper does not say of it, RoPE and the norms' epsilon, is Llama 3.1's here.
"""

from __future__ import annotations

from typing import Any


def preset_shapes() -> dict[str, dict[str, Any]]:
    """Preset name -> keyword arguments of its Hugging Face configuration, `model_type` among them."""
    llama = {
        "model_type": "llama",
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }
    qwen = {
        "model_type": "qwen3",
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    }
    qwen_32b = _widths(5120, 64, 64, 8, 25600)
    return {
        "llama3-8b": llama | _widths(4096, 32, 32, 8, 14336),
        "qwen3-4b": qwen | _widths(2560, 36, 32, 8, 9728) | {"tie_word_embeddings": True},
        "qwen3-8b": qwen | _widths(4096, 36, 32, 8, 12288),
        "qwen3-32b": qwen | qwen_32b,
        "qwen3-32b-paper": llama | qwen_32b,
    }


def _widths(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }
