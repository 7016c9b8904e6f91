"""The planner beside the measured points, and the constants that were fitted on half of them."""

import pytest

from experiments import accuracy
from upipe.plan import rates

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def blocks():
    return accuracy.block_points()


@pytest.fixture(scope="module")
def models():
    return accuracy.model_points()


def test_the_held_out_half(blocks, models):
    """Every held-out point within the bounds aimed at, on at least 16 points; their shapes and settings are not in the fitted half."""
    held = [p for p in blocks + models if not p.fitted]
    assert len(held) >= 16 and len([p for p in blocks if p.fitted]) >= 16
    assert {p.name: p.misses for p in held if p.misses} == {}
    counts = {name: sum(p.off(name) is not None for p in held) for name in accuracy.BOUNDS}
    assert counts["peak"] >= 16 and counts["time"] >= 12 and counts["host"] >= 5
    assert any("Qwen3-32B" in p.name for p in held) and any("8 layers" in p.name for p in held)
    assert "held out, peak" in accuracy.summary(held) and "8 layers" in accuracy.table(held)


def test_misses_of_the_fitted_half(blocks):
    """Peaks have none. Times have two, at 16K tokens, where the host begins kernels more slowly than the GPU runs them."""
    missed = {p.name: p.misses for p in blocks if p.fitted and p.misses}
    assert all(what == ["time"] and name.endswith("16K") for name, what in missed.items()) and len(missed) <= 2


def test_the_constants_are_those_of_the_fit():
    for name, value in accuracy.fit().items():
        assert rates()[name] == pytest.approx(value, rel=0.01), name
