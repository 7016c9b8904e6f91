"""Forecasts of whole-model points: the script's own points, made before they are measured, judged by nothing made after."""

import functools
import json
from types import SimpleNamespace

import pytest

from experiments import accuracy, forecast, stack
from upipe import records, simulate
from upipe.config import ConfigError
from upipe.plan import Machine, gpus


@pytest.fixture
def quick(monkeypatch):
    """Simulated at two short lengths."""
    monkeypatch.setattr(simulate, "simulate", functools.partial(simulate.simulate, lengths=(2048, 4096)))


TOY = {"model": "toy", "layers": 2, "tokens": 4096, "sp": 2, "kernel": "cudnn"}


def test_points_are_those_of_the_script():
    """Every part that is offered calls experiments.stack, on as many GPUs as its table of parts says."""
    for part in forecast.PARTS:
        ranks, *words = forecast.commands(part)
        assert ranks == ("1" if part.startswith("one") else "2"), part
        stack.parser().parse_args(words)
    assert "--once" in forecast.commands("methods512K") and "native" in forecast.commands("methods")
    with pytest.raises(ConfigError, match="'trl'"):
        forecast.commands("trl")


@pytest.mark.parametrize("text", ["upipe:host=1", "upipe:device,layer=fused,U=4", "ulysses", "ring", "fpdt:chunk=1K", "native",
                                  "upipe:host,offload=pageable", "upipe:device,offload=none,tiles=off"])  # fmt: skip
def test_settings_are_planned_as_they_are_written(text, quick):
    setting = stack.Setting.parse(text)
    found = forecast.predict(setting, **TOY, machine=Machine(gpus()["H200-141GB"], 2))
    assert found.run.method.name == setting.name and found.kernel == "cudnn" and found.layers == 2
    assert found.run.memory.offload == setting.offload and found.run.memory.fused_layers == setting.fused
    assert found.sent_layers == (setting.offload != "none")
    assert found.attention_layers == (1 if text == "upipe:host=1" else 2 if setting.host_layers is None else 0)
    assert (found.run.upipe.heads_per_stage == 4) == ("U=4" in text)
    assert forecast.above_states(found) > 0 and (found.step_host_gib > 0) == (setting.offload != "none" or setting.name == "fpdt")


def test_no_item_of_a_setting_is_lost(quick):
    """A ring, blocks of attention calls and working tensors on the host are planned too."""
    machine = Machine(gpus()["H200-141GB"], 2)
    found = forecast.predict(stack.Setting.parse("upipe:device,ring=2,blocks=1K,blocks_backward=512"), **TOY, machine=machine).run.upipe
    assert (found.ring_degree, found.kernel_block_tokens, found.kernel_block_tokens_backward) == (2, 1024, 512)
    assert forecast.predict(stack.Setting.parse("ring:blocks=1K"), **TOY, machine=machine).run.upipe.kernel_block_tokens == 1024
    within = forecast.predict(stack.Setting.parse("upipe:device,layer=fused,prefetch=off,within=on"), **TOY, machine=machine)
    assert within.run.memory.offload_within_layer and within.step_host_gib > within.host["layer inputs"] > 0


def test_states_of_several_engines(quick):
    """As measured of 8 layers of Llama3-8B on two GPUs: 32.87 GiB where one of two engines has made a step, 43.28 where both have."""
    found = forecast.predict(stack.Setting.parse("upipe:device"), "llama3_8b", 8, 2**18, 2, "cudnn", Machine(gpus()["H200-141GB"], 2))
    assert forecast.states_of(found, 1, 1) == pytest.approx(32.868, abs=0.01)
    assert forecast.states_of(found, 2, 0) == pytest.approx(43.282, abs=0.01)
    with pytest.raises(ConfigError, match="rope=model"):
        forecast.predict(stack.Setting.parse("ulysses:rope=model"), **TOY, machine=Machine(gpus()["H200-141GB"], 2))


def test_states_without_adams(quick, monkeypatch):
    """SGD keeps none, so an engine stays as it is made: 8 bytes a parameter, not 16, and the buckets."""
    found = {}
    for optimizer in ("adamw", "none"):
        words = f"--model toy --layers 2 --tokens 4K --kernel cudnn --settings upipe:device --optimizer {optimizer}"
        monkeypatch.setattr(forecast, "commands", lambda part, words=words: ["2", *words.split()])
        (record,) = forecast.forecasts("one", {"commit": None})
        found[optimizer] = record
        assert record.host_gib == pytest.approx(251.77)
    adam, none = found["adamw"], found["none"]
    moments = adam.extra["device"]["optimizer"] * 2 / 3
    assert moments > 0 and none.states_gib == pytest.approx(adam.states_gib - moments)
    assert none.peak_above_states_gib == adam.peak_above_states_gib


def made(date, point="a", provenance="measured", **values):
    of = {"of": "stack", "part": "methods", "constants": "c", "commit": "abcdef0"} if provenance == "predicted" else {"memory_only": False}
    return {
        "experiment": "stack", "provenance": provenance, "date": date, "point": point, "outcome": "ok", "model": "llama3_8b", "layers": 4,
        "setting": "ring", "kernel": "cudnn", "tokens": 2**18, "host_pinned_gib": 10.0, "host_pageable_gib": 0.0, "time_s": 10.0,
        "peak_above_states_gib": 8.0, "states_gib": 20.0,
    } | of | values  # fmt: skip


def test_a_forecast_for_as_many_engines_goes_before_a_later_one():
    said = [made(f"2026-01-0{day}", provenance="predicted", engines=engines) for day, engines in ((1, 1), (2, 5), (4, 1))]
    for engines, date in ((1, "2026-01-01"), (5, "2026-01-02"), (2, "2026-01-02")):
        assert forecast.last_before(made("2026-01-03", engines=engines), said)["date"] == date


def test_states_of_other_engines_are_not_judged():
    measured, said = made("2026-01-03", engines=3), made("2026-01-01", provenance="predicted", engines=1)
    alike = made("2026-01-01", provenance="predicted", engines=3)
    (other,), _ = forecast.judge([said | {"states_gib": said["states_gib"] / 3}, measured])
    (same,), _ = forecast.judge([alike | {"states_gib": alike["states_gib"] / 3}, measured])
    assert other.misses == [] and same.misses == ["states"] and other.off("peak") == same.off("peak") == 0


def test_the_last_forecast_is_the_last_by_date():
    """Not by place: an older file may be merged in later."""
    said = [made(f"2026-01-0{day}", provenance="predicted") for day in (2, 1)]
    assert forecast.last_before(made("2026-01-03"), said)["date"] == "2026-01-02"


def test_only_forecasts_older_than_the_measurement_judge():
    said = [made("2026-01-01", provenance="predicted", time_s=12.0), made("2026-01-03", provenance="predicted", time_s=10.0)]
    (one,), without = forecast.judge([*said, made("2026-01-02"), made("2026-01-02", "b"), made("2025-01-02", "c")])
    assert one.off("time") == pytest.approx(0.2) and one.misses == ["time"] and one.off("peak") == 0
    assert without == ["b"]
    assert "+20.0 %" in forecast.table([one]) and "1 over 15 %" in forecast.table([one])
    assert forecast.judge([said[1], made("2026-01-02")])[0] == []


def test_an_outcome_that_was_not_forecast_is_a_miss():
    gone = dict.fromkeys(("peak_above_states_gib", "states_gib", "time_s", "host_pinned_gib", "host_pageable_gib"))
    found = [made("2026-01-01", provenance="predicted"), made("2026-01-02", outcome="oom_device", **gone)]
    (one,), _ = forecast.judge(found)
    assert one.misses == ["outcome"] and "oom_device, forecast ok" in forecast.table([one]) and "1 otherwise" in forecast.table([one])


def test_a_record_without_a_time_is_judged_by_its_memory():
    """Cut off after the step for memory; it hides no whole one that was measured before it, and a later whole one hides it."""
    said, cut = made("2026-01-01", provenance="predicted"), {"cut_off": "SIGTERM", "time_s": None}
    (one,), _ = forecast.judge([said, made("2026-01-02", **cut, peak_above_states_gib=4.0)])
    assert one.off("time") is None and one.misses == ["peak"] and "+100.0 %" in forecast.table([one])
    for order in (1, -1):
        found = [made("2026-01-02", time_s=20.0), made("2026-01-03", **cut)][::order]
        (one,), _ = forecast.judge([said, *found])
        assert one.off("time") == pytest.approx(-0.5)


def test_forecasts_are_records_and_leave_the_held_out_half_alone(tmp_path, monkeypatch, capsys):
    kept = forecast.RESULTS / "predict_points.jsonl"
    said = forecast.forecasts_in(records.load(kept))
    assert {r["part"] for r in said} >= {"methods", "methods512K", "whole", "qwen", "1M", "offload"}
    assert len({r["constants"] for r in said}) == 1 and not any(r["dirty"] for r in said)
    before = [r for r in records.load(accuracy.RESULTS / "stack.jsonl") if r["method"] == "upipe" and r["date"] < said[0]["date"]]
    assert len(before) >= 5
    old = next(r for r in before if r["point"] in {each["point"] for each in said})
    newer = old | {"date": "2999-01-01T00:00:00Z"}
    assert forecast.last_before(newer, said) is not None and forecast.last_before(old, said) is None
    for name in ("stack", "predict_points"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (said if name == "predict_points" else [newer])))
    assert forecast.main(["--judge", "--results", str(tmp_path)]) == 0
    assert "Llama3-8B, 8 layers" in capsys.readouterr().out
    assert forecast.main(["--judge", "methods"]) == 2 and forecast.main(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_step_that_makes_adams_moments_is_told_from_the_records():
    """After a step that DeepSpeed skipped: the states that a measured step began with have the moments of fewer engines."""
    run = [r for r in records.load(accuracy.RESULTS / "stack.jsonl") if r["run_id"] == "20261130T030107Z-89fa02"]
    again = [r for r in records.load(accuracy.RESULTS / "stack.jsonl") if r["run_id"] == "20261130T030717Z-a1e268"]
    prediction = SimpleNamespace(
        device=dict.fromkeys(accuracy.STATES, 0.0) | {"optimizer": 10.746},
        phases={"backward": 1.02 * 5 + 0.5, "optimizer step": 1.02 * 3.6 + 0.5 + 1.02 * 10.746},
    )
    prediction.phases["backward"] += 1.02 * 10.746
    made = [(r["method"], r["tokens"] // 1024) for of in (run, again) for i, r in enumerate(of)
            if accuracy.makes_moments(r, of[:i], prediction)]
    assert made == [("ring", 128), ("ulysses", 128), ("native", 128)]
    assert accuracy.above_first_states(prediction) == pytest.approx(3.6 + 10.746 * 2 / 3)
