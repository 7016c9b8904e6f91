"""The planner beside the measured points, and the constants that were fitted on half of them."""

import pytest

from experiments import accuracy
from upipe import records
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


def test_every_point_of_a_file_of_whole_models(tmp_path, capsys):
    """Baselines and a ring too; what did not run, or is not known to the planner, is named."""
    stored = [r for r in records.load(accuracy.RESULTS / "stack.jsonl") if r["setting"] == "upipe:host,offload=pinned" and r["time_s"]]
    base = next(r for r in stored if r["layers"] == 8)
    short = base | {"layers": 2, "tokens": 65536, "run_id": "made-up", "loss": 1.0}
    device = {"attention_output": "device", "attention_output_host_layers": None, "host_pinned_gib": 0.5}
    baseline = device | {"heads_per_stage": None, "overlap": None, "dx": None}
    for change in (
        baseline | {"method": "ulysses", "setting": "ulysses:offload=pinned"},
        baseline | {"method": "usp", "setting": "usp:ring=2,offload=pinned", "sp": 1, "ring": 2},
        device | {"setting": "upipe:device,ring=2,offload=pinned", "sp": 1, "ring": 2, "heads_per_stage": 1},
        {"method": "alst", "setting": "alst:offload=pinned"}, {"outcome": "oom_device", "reason": "made up"},
    ):
        values = short | change | {"tokens_per_s_per_gpu": None, "peak_units": None, "point": change.get("setting", "host")}
        records.append(values, tmp_path)
    given = ["--stack", "--results", str(tmp_path), "--run", "made-up"]
    status = accuracy.main(given)
    if status == 2:
        status = accuracy.main([*given, "--commit", "untracked"])
    assert status == 0
    found, printed = records.load(tmp_path / "accuracy.jsonl"), capsys.readouterr().out
    assert [(r["method"], r["sp"], r["ring"], r["of_run"]) for r in found] == [
        ("ulysses", 2, 1, "made-up"), ("usp", 1, 2, "made-up"), ("upipe", 1, 2, "made-up")]
    for r in found:
        assert r["provenance"] == "predicted" and r["off"]["time"] == pytest.approx(r["time_s"] / base["time_s"] - 1)
        assert r["measured"]["host"] == 0.5 and r["off"]["host"] == pytest.approx(r["host_pinned_gib"] / 0.5 - 1)
    assert "alst: unknown to the planner" in printed and "oom_device, made up" in printed
    assert accuracy.main([*given[:-1], "another"]) == 2


@pytest.mark.parametrize("given", [["--results", "x"], ["--run", "20261130T000000Z-000000"], ["--fit", "--results", "x"]])
def test_what_goes_with_stack_alone_is_refused_without_it(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        accuracy.main(given)
    assert "go with --stack" in capsys.readouterr().err
