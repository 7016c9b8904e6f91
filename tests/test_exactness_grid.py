"""The exactness grid: sharded equals plain Hugging Face in logits, loss and every parameter's gradient, fp32, 1e-5.

Real gloo ranks; sequence-parallel groups of 1, 2 and 4 inside a world of 4, the rest data-parallel with different data.
The default cases cover every pair of values of every two factors; `slow` adds cases of the whole product, for triples.
"""

import pytest
import torch.distributed as dist

from tests.pairwise import further, pairwise
from tests.plain import SEQUENCES, data_of, plain_step, shifted, tiny_model
from tests.sharded import assert_equal_to_plain, sharded

FACTORS = {
    "model": ("llama", "qwen2", "qwen3"),
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (28, 7), (5, 5), (3, 3)),
    "sp": (1, 2, 4),
    "width": ("smallest", "middle", "largest"),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "sequence": SEQUENCES,
    "checkpointing": (None, "non-reentrant", "reentrant"),
}
CASES = pairwise(FACTORS)
TOLERANCE = 1e-5


def name_of(case):
    heads, kv_heads = case["heads"]
    return (f"{case['model']}-{heads}h{kv_heads}kv-sp{case['sp']}-{case['width']}-zero{case['zero']}-"
            f"acc{case['accumulation']}-{case['sequence']}-{case['checkpointing'] or 'stored'}")


def stage_width(width, heads, sp):
    """Query heads a stage over all ranks; None is the library's default, the smallest."""
    most = -(-heads // sp)
    return {"smallest": None, "middle": sp * max(1, most // 2), "largest": sp * most}[width]


def check(case):
    """One case of the grid, on every rank of the world."""
    heads, kv_heads = case["heads"]
    sp = case["sp"]

    def model():
        return tiny_model(case["model"], heads, kv_heads, seed=heads + kv_heads, tied=case["model"] == "qwen2")

    data = data_of(case["sequence"], dist.get_world_size() // sp, case["accumulation"])
    plain = plain_step(model(), data)
    counts = {sum(int((shifted(b) != -100).sum()) for b in row) for row in data}
    assert len(counts) == len(data), "every data-parallel rank must have its own number of valid tokens"
    with sharded(model(), sp, stage=case["zero"], heads_per_stage=stage_width(case["width"], heads, sp),
                 accumulation=case["accumulation"], checkpointing=case["checkpointing"]) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_grid(worlds, case):
    worlds(4).run(check, case=case)


EIGHT_RANKS = [
    {"model": "qwen2", "heads": (28, 7), "sp": 8, "width": "smallest", "zero": 3, "accumulation": 1, "sequence": "packed",
     "checkpointing": "non-reentrant"},
    {"model": "llama", "heads": (28, 7), "sp": 4, "width": "middle", "zero": 2, "accumulation": 2, "sequence": "odd",
     "checkpointing": None},
]


@pytest.mark.parametrize("case", EIGHT_RANKS, ids=name_of)
@pytest.mark.slow
def test_eight_ranks(worlds, case):
    worlds(8).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", further(FACTORS, 120, CASES, seed=1), ids=name_of)
def test_grid_sample(worlds, case):
    worlds(4).run(check, case=case)
