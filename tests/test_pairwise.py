"""The generator of the exactness grid covers what it says."""

import itertools
import math
import random

import pytest

from tests import test_exactness_grid, test_hybrid, test_stack, test_zoo
from tests.pairwise import further, half, pairwise


@pytest.mark.parametrize("factors", [
    {"a": (1, 2), "b": (1, 2)},
    {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (None, 0)},
    {"a": tuple(range(7)), "b": tuple(range(5)), "c": tuple(range(4)), "d": tuple(range(3)), "e": (0, 1)},
])
def test_every_pair_of_values_is_in_some_case(factors):
    cases = pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        met = {(case[a], case[b]) for case in cases}
        assert met == set(itertools.product(factors[a], factors[b]))
    assert all(set(case) == set(factors) for case in cases)
    largest = sorted((len(v) for v in factors.values()), reverse=True)
    assert largest[0] * largest[1] <= len(cases) < 2 * largest[0] * largest[1]


def test_same_seed_same_cases():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    assert pairwise(factors, seed=4) == pairwise(factors, seed=4)


def test_unsatisfiable_pair_is_an_error():
    with pytest.raises(ValueError, match="no allowed case"):
        pairwise({"a": (1, 2), "b": (1, 2)}, allowed=lambda case: case["a"] == 1)


def triples(cases):
    """Those of values of different factors that meet."""
    return {triple for case in cases for triple in itertools.combinations(sorted(case.items()), 3)}


@pytest.mark.parametrize("module, count, share", [
    (test_exactness_grid, 120, 0.975), (test_stack, 110, 0.99), (test_zoo, 80, 0.8), (test_hybrid, 80, 0.9),
], ids=lambda value: getattr(value, "__name__", None))
def test_further_cases_have_more_triples_than_random_ones(module, count, share):
    """With those for pairs, as many as a grid's slow ones have this share of all triples, and more than half as many again at random."""
    factors, rng = module.FACTORS, random.Random(0)
    more = further(factors, count, module.CASES)
    assert more == further(factors, count, module.CASES) and len(more) == count
    drawn = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(3 * count // 2)]
    found = triples(module.CASES + more)
    every = sum(math.prod(len(factors[name]) for name in names) for names in itertools.combinations(factors, 3))
    assert len(found) >= share * every and len(found) > len(triples(module.CASES + drawn))


@pytest.mark.parametrize("sizes", [(4, 2, 3), (4, 4, 3, 2), (2, 4, 2, 3)])
def test_half_of_a_product_has_all_of_any_factors_but_one(sizes):
    factors = {str(i): tuple(range(size)) for i, size in enumerate(sizes)}
    cases = half(**factors)
    assert len(cases) == len(set(cases)) == math.prod(sizes) / 2
    for left_out in range(len(sizes)):
        met = {case[:left_out] + case[left_out + 1 :] for case in cases}
        assert len(met) == math.prod(sizes) / sizes[left_out]
