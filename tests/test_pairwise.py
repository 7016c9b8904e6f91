"""The generator of the exactness grid covers what it says."""

import itertools

import pytest

from tests.pairwise import pairwise


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
