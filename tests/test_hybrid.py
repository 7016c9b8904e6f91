"""Ring x Ulysses x data through the product: sharded equals plain Hugging Face in logits, loss and every gradient, fp32, 1e-5.

Real gloo ranks. The default cases cover every pair of values of every two factors, in a world of 4 (ring 2 alone leaves two
data-parallel groups); `slow` adds a sample of the whole product, eight ranks, and an odd Ulysses degree.
"""

import random

import pytest
import torch
import torch.distributed as dist

import upipe
from tests.pairwise import pairwise
from tests.plain import SEQUENCES, assert_close, batch_of, data_of, plain_step, tiny_model
from tests.sharded import OWN_CHECKPOINTING, assert_equal_to_plain, check_tiny, sharded
from tests.test_exactness_grid import stage_width

TOLERANCE = 1e-5
FACTORS = {
    "model": ("llama", "qwen2", "qwen3"),
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (5, 5)),
    "mesh": ((2, 2), (2, 1), (4, 1)),
    "width": ("smallest", "largest"),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "sequence": SEQUENCES,
    "checkpointing": (None, "non-reentrant", "reentrant", *OWN_CHECKPOINTING),
}
CASES = pairwise(FACTORS)


def sample(count, seed):
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in FACTORS.items()} for _ in range(count)]


def name_of(case):
    (heads, kv_heads), (ring, ulysses) = case["heads"], case["mesh"]
    return (f"{case['model']}-{heads}h{kv_heads}kv-ring{ring}-ulysses{ulysses}-{case['width']}-zero{case['zero']}-"
            f"acc{case['accumulation']}-{case['sequence']}-{case['checkpointing'] or 'stored'}")


def check(case):
    """One case, on every rank of the world."""
    (heads, kv_heads), (ring, ulysses) = case["heads"], case["mesh"]
    sp = ring * ulysses

    def model(dtype):
        return tiny_model(case["model"], heads, kv_heads, seed=heads + kv_heads, tied=case["model"] == "qwen2", dtype=dtype)

    data = data_of(case["sequence"], dist.get_world_size() // sp, case["accumulation"])
    plain = plain_step(model(torch.float32), data)
    with sharded(model(torch.float32), sp, stage=case["zero"], heads_per_stage=stage_width(case["width"], heads, ulysses),
                 accumulation=case["accumulation"], checkpointing=case["checkpointing"], ring_degree=ring) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_hybrid_grid(worlds, case):
    worlds(4).run(check, case=case)
