"""Every method of sharing attention equals plain Hugging Face in logits, loss and every parameter's gradient, fp32, 1e-5.

Real gloo ranks in a world of 4, those that share no sequence data-parallel with different data. The cases cover every pair of
values of every two factors a method has; a few of them run by default.
"""

import pytest
import torch.distributed as dist

from tests.pairwise import pairwise
from tests.plain import SEQUENCES, data_of, plain_step, shifted, tiny_model
from tests.sharded import assert_equal_to_plain, sharded
from upipe.methods import MethodConfig

TOLERANCE = 1e-5
DEGREES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))


FACTORS = {
    "degrees": DEGREES,
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (28, 7), (5, 5)),
    "sequence": SEQUENCES,
    "model": ("llama", "qwen2", "qwen3"),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "checkpointing": (None, "non-reentrant", "reentrant"),
    "chunk": (None,),
}
WITHIN = tuple(d for d in DEGREES if d[0] == 1)
METHODS = {
    "ring": {"degrees": tuple(d for d in DEGREES if d[1] == 1)},
    "usp": {},
    "fpdt": {"degrees": WITHIN, "chunk": (4, 8, 16)},
    # DeepSpeed's class shares heads evenly alone.
    "ulysses": {"degrees": WITHIN, "heads": ((8, 8), (8, 2), (8, 1))},
}
CASES = [case for seed, (method, some) in enumerate(METHODS.items())
         for case in pairwise({"method": (method,), **FACTORS, **some}, seed)]


def few(cases):
    """For each method and degrees above one rank, less two, the packed case with most to go wrong."""
    chosen = {}
    for case in cases:
        (ring, ulysses), (_, kv_heads) = case["degrees"], case["heads"]
        key = case["method"], case["degrees"]
        if ring * ulysses < 2 or key in (("ulysses", (1, 4)), ("usp", (1, 2)), ("usp", (2, 1))):
            continue
        rank = (case["sequence"] == "packed", kv_heads < ulysses, case["zero"] == 3, case["accumulation"] == 1)
        if key not in chosen or rank > chosen[key][0]:
            chosen[key] = rank, case
    return [case for _, case in chosen.values()]


FEW = few(CASES)


def name_of(case):
    ring, ulysses = case["degrees"]
    heads, kv_heads = case["heads"]
    return (f"{case['method']}-{ring}x{ulysses}-{case['model']}-{heads}h{kv_heads}kv-{case['sequence']}-zero{case['zero']}-"
            f"acc{case['accumulation']}-{case['checkpointing'] or 'stored'}-{case['chunk']}")


def config_of(case):
    method = case["method"]
    return MethodConfig(method, case["degrees"][0] if method in ("ring", "usp") else None, case["chunk"] if method == "fpdt" else None)


def check(case):
    """One case, on every rank of the world."""
    heads, kv_heads = case["heads"]
    sp = case["degrees"][0] * case["degrees"][1]

    def model():
        return tiny_model(case["model"], heads, kv_heads, seed=heads + kv_heads, tied=case["model"] == "qwen2")

    data = data_of(case["sequence"], dist.get_world_size() // sp, case["accumulation"])
    plain = plain_step(model(), data)
    counts = {sum(int((shifted(b) != -100).sum()) for b in row) for row in data}
    assert len(counts) == len(data), "every data-parallel rank must have its own number of valid tokens"
    with sharded(model(), sp, stage=case["zero"], accumulation=case["accumulation"], checkpointing=case["checkpointing"],
                 method=config_of(case)) as (handle, engine):
        assert handle.method == config_of(case)
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)
        assert handle.kernels and case["method"] in handle.report()


@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_methods(worlds, case):
    worlds(4).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW], ids=name_of)
def test_methods_in_full(worlds, case):
    worlds(4).run(check, case=case)


EIGHT_RANKS = [
    {"method": "usp", "degrees": (2, 4), "heads": (28, 7), "sequence": "packed", "model": "qwen2", "zero": 3, "accumulation": 1,
     "checkpointing": "non-reentrant", "chunk": None},
    {"method": "usp", "degrees": (4, 2), "heads": (6, 2), "sequence": "odd", "model": "qwen3", "zero": 2, "accumulation": 2,
     "checkpointing": None, "chunk": None},
    {"method": "fpdt", "degrees": (1, 8), "heads": (8, 2), "sequence": "packed", "model": "llama", "zero": 3, "accumulation": 1,
     "checkpointing": "non-reentrant", "chunk": 8},
    {"method": "ring", "degrees": (8, 1), "heads": (5, 5), "sequence": "packed", "model": "llama", "zero": 3, "accumulation": 1,
     "checkpointing": None, "chunk": None},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_RANKS, ids=name_of)
def test_methods_on_eight_ranks(worlds, case):
    worlds(8).run(check, case=case)
