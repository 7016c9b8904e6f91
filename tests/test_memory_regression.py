"""Memory of the attention block, a decoder layer and the loss at P = 8: a change of 1 % fails.

Peaks in u (local tokens x hidden size x 2 bytes) at 64K local tokens, FlashAttention-4, tiles of 8192 (loss: 2048) tokens. Those of
the block on two GPUs were measured (`tests/test_accuracy.py`); these, of eight, are simulated by the same code. A change that is meant
changes the number here and `docs/plan.md`.
"""

import pytest

from experiments.live import SHAPES, block_peak
from upipe import simulate
from upipe.build import ModelConfig, hf_config
from upipe.simulate import Case, shape_of

TOKENS = 65536
TILES = {"mlp_tokens": 8192, "norm_tokens": 8192, "loss_tokens": 2048}
NAMES = {"llama3-8b": "llama3_8b", "qwen3-32b": "qwen3_32b"}


@pytest.mark.parametrize("model, units", [("llama3-8b", 5.336), ("qwen3-32b", 5.156)])
@pytest.mark.parametrize("output", ["device", "host"])
def test_block(model, units, output):
    """Above its input and the incoming gradient."""
    shape = SHAPES[NAMES[model]]
    peak, _ = block_peak(TOKENS, 8, **shape, attention_output=output, tables=False)
    assert peak / (2 * shape["hidden"] * TOKENS) == pytest.approx(units, rel=0.01)


@pytest.mark.parametrize("model, settings, forward, loss, backward", [
    ("llama3-8b", {}, 8.564, 13.664, 11.892),
    ("llama3-8b", {"fused": True}, 4.837, 10.914, 8.056),
    ("llama3-8b", {"fused": True, "overlap": False}, 3.220, 10.914, 7.056),
    ("qwen3-32b", {}, 8.751, 13.670, 15.020),
    ("qwen3-32b", {"fused": True}, 5.176, 11.470, 9.395),
])  # fmt: skip
def test_layer_and_loss(model, settings, forward, loss, backward):
    """Inputs counted."""
    peaks = simulate.simulate(Case(shape_of(hf_config(ModelConfig(preset=model))), 8, "fa4", **TILES, **settings), (TOKENS,))
    unit = 2 * SHAPES[NAMES[model]]["hidden"] * TOKENS
    found = [getattr(peaks, phase)[0] / unit for phase in ("forward", "loss", "backward")]
    assert found == pytest.approx([forward, loss, backward], rel=0.01)
