"""What the planner says of the ladder's levers, and the experiment of Figure 1: the levers as they run, forecasts beside what was found."""

import dataclasses
import json
from functools import partial

import pytest

from experiments import figures, ladder, ladder_forecast, points, run, table, train_point
from experiments.figures import claims
from experiments.stack_methods import Setting
from upipe import plan, records, simulate
from upipe.config import ConfigError
from upipe.environment import code
from upipe.plan import Machine

MADE = {"run_id": "r", "commit": "0" * 40, "command": "c", "date": "2026-01-01T00:00:00Z", "versions": {"torch": "2"}}
TOY = ("--model", "toy", "--kernel", "cudnn", "--grain", "1K", "--most", "16K")


def commit():
    """Names the code where the suite runs outside a checkout."""
    try:
        code()
        return []
    except ConfigError:
        return ["--commit", "0" * 40]


def options(*words):
    made = ladder.parser().parse_args([*commit(), *words])
    ladder.settle(made)
    return made


def forecasts(*words):
    told = options(*words)
    return told, ladder_forecast.forecasts(told, ladder.PRESETS[told.preset], MADE, say=lambda text: None)


def test_each_lever_has_the_longest_length_that_fits():
    told, made = forecasts("--preset", "figure1", *TOY, "--cap", "0.6", "--rungs", "plain", "+ tiled loss", "one function a layer")
    assert [r.extra["rung"] for r in made] == ["plain", "+ tiled loss", "one function a layer"]
    lengths = [r.extra["longest_tokens"] for r in made]
    assert lengths == sorted(lengths) and 0 < lengths[0] < lengths[1]
    machine = Machine.parse("2xH200")
    for r in made:
        assert not records.validate(r) and r.provenance == "predicted" and (r.extra["of"], r.experiment) == ("ladder", "predict_points")
        assert (r.sp, r.dp) == ((1, 2) if r.method == "none" else (2, 1)) and r.reserved_gib <= told.cap
        setting, n = Setting.parse(r.extra["setting"]), r.extra["longest_tokens"]
        with ladder_forecast.as_the_ladder_runs(setting):
            need = partial(ladder_forecast.needed, setting, "toy", 2, machine=machine, kernel="cudnn")
            assert need(tokens=n).with_margin == pytest.approx(r.reserved_gib)
            assert n == told.most or need(tokens=n + 1024).with_margin > told.cap
            first = r.extra["longest_first_step_tokens"]
            assert first >= n and need(tokens=first, first_step=True).with_margin <= told.cap
            # Two moments in fp32 of a model in bf16.
            gone = need(tokens=n).states - need(tokens=n, first_step=True).states
            assert gone == pytest.approx(need(tokens=n).prediction.device["optimizer"] * 2 / 3)


def test_nothing_fits_and_a_lever_that_is_unknown():
    (none,) = forecasts("--preset", "figure1", *TOY, "--cap", "0.01", "--rungs", "plain")[1]
    assert not records.validate(none) and (none.outcome, none.extra["longest_tokens"]) == ("oom_device", 0) and "1K" in none.reason
    said, told = [], options("--preset", "figure1", *TOY)
    preset = dataclasses.replace(ladder.PRESETS["figure1"], rungs=(ladder.Rung("theirs", "alst"),))
    assert ladder_forecast.forecasts(told, preset, MADE, said.append) == []
    assert said == ["theirs: left out: setting 'alst:offload=pinned': the planner does not know DeepSpeed's own tiles"]


def test_the_other_layers_of_trls_ladder_are_counted():
    machine, need = Machine.parse("1xH200"), partial(ladder_forecast.needed, model="qwen3_4b", layers=4, tokens=4096, kernel="fa4")
    saved = 32 * 4096 * 2560 * 2 / 2**30
    for text, inputs in (("plain:offload=none,tiles=off,loss=hf", saved), ("plain:offload=pinned", 0.0)):
        setting = Setting.parse(text)
        with ladder_forecast.as_the_ladder_runs(setting):
            alone = need(setting, machine=machine, optimizer="none")
            whole = need(setting, machine=machine, optimizer="none", states_gib=20.0, others=32)
            assert whole.states == 20 and whole.peak - 20 == pytest.approx(alone.peak - alone.states + inputs)
            with pytest.raises(ConfigError, match="were to hold 1.0"):
                need(setting, machine=machine, optimizer="none", states_gib=1.0)


def test_the_ladders_own_loss_and_attention_module_are_simulated(monkeypatch):
    """The loss in fp32 holds more than this library's; transformers' module runs where the ladder leaves it; all is put back."""
    used, plain = [], ladder_forecast.UlyssesAttention
    monkeypatch.setattr(ladder_forecast, "UlyssesAttention", lambda *args: used.append(text) or plain(*args))
    before = simulate.apply_method, simulate.loss.token_loss_sum, plan._simulated, plan.peaks_of, simulate.cached
    machine, need = Machine.parse("2xH200"), partial(ladder_forecast.needed, model="llama3_8b", layers=2, tokens=16384, kernel="fa4")
    found = {}
    for text in ("ulysses:offload=none,tiles=off,loss=hf", "ulysses:offload=none,tiles=off", "ulysses:rope=model", "ulysses"):
        with ladder_forecast.as_the_ladder_runs(Setting.parse(text)):
            found[text] = need(Setting.parse(text), machine=machine).prediction
    whole, ours = (found[f"ulysses:offload=none,tiles=off{more}"].phases["loss"] for more in (",loss=hf", ""))
    assert whole - ours > 4 * 8192 * 128256 / 2**30
    assert used == ["ulysses:rope=model"]
    assert (simulate.apply_method, simulate.loss.token_loss_sum, plan._simulated, plan.peaks_of, simulate.cached) == before


def test_the_search():
    for most in (1, 5, 96, 97):
        for limit in (0, 1, 7, 64, 95, 96, 200):
            asked = []

            def fits(n, limit=limit, asked=asked):
                asked.append(n)
                return n <= 3 * limit

            assert ladder_forecast.longest(fits, 3, 3 * most) == 3 * min(limit, most)
            assert len(asked) == len(set(asked)) and max(asked) <= 3 * most


def test_beside_what_was_found():
    said = {"preset": "p", "model": "m", "layers": 2, "cap_gib": 8.0, "date": "2026-01-02", "longest_first_step_tokens": None}
    said = [said | {"rung": str(i), "longest_tokens": 80 * 1024} for i in range(5)]
    true = said[0] | {"longest_tokens": 100 * 1024, "search_complete": True, "date": "2026-01-01"}
    cut, first = true | {"rung": "1", "search_complete": False, "date": "2026-01-03"}, true | {"rung": "3"}
    open_end = cut | {"rung": "4", "longest_tokens": 64 * 1024}
    said[3] = said[3] | {"longest_first_step_tokens": 110 * 1024}
    rows = ladder_forecast.beside(said, [true, cut, true | {"rung": "2", "cap_gib": 9.0}, first, open_end])[1:]
    assert [row[3:] for row in rows] == [
        ["100K", "-20 %", "after it was measured"], ["100K or more", "-20 %", "true"], ["not yet", "", "true"],
        ["100K", "-20 % to +10 %", "after it was measured"], ["64K or more", "", "true"],
    ]  # fmt: skip


def test_the_command_and_the_figure(tmp_path, capsys):
    """Kept as predictions, apart from what was measured; the ladder's own table and the claims do not have them."""
    words = ["--preset", "figure1", *TOY, "--cap", "0.6", "--rungs", "+ UPipe", "--results", str(tmp_path), *commit()]
    assert ladder.main([*words, "--predict"]) == 0 and not list(tmp_path.iterdir())
    assert ladder.main([*words, "--predict", "--keep"]) == 0
    assert "not yet" in capsys.readouterr().out and [p.name for p in tmp_path.iterdir()] == ["predict_points.jsonl"]
    (record,) = records.load(tmp_path / "predict_points.jsonl")
    assert ladder.main([*words, "--show"]) == 2
    rows = figures.FAMILIES["memory-ladder"].rows(figures.load(tmp_path))
    mine = [row for row in rows if row.setting.startswith("+ UPipe")]
    assert [(row.mark, row.value) for row in mine] == [
        ("predicted", record["longest_tokens"]), ("predicted", record["longest_first_step_tokens"])
    ]  # fmt: skip

    def labels(rows):
        picture = figures.FAMILIES["memory-ladder"].draw(rows)
        found = [label.get_text() for axis in picture.axes for label in axis.get_yticklabels()]
        figures.style.close(picture)
        return [text for text in found if text.startswith("+ UPipe")]

    # A first step's forecast stands beside a measured first step alone.
    first = dataclasses.replace(mine[1], mark="measured")
    assert labels(rows) == ["+ UPipe, predicted"]
    assert labels([*rows, first]) == ["+ UPipe, predicted", "+ UPipe (first step), measured", "+ UPipe (first step), predicted"]
    assert "*measured*" not in claims.eightfold(figures.load(tmp_path))[1]


def test_the_planners_figure_compares_no_peaks_at_two_lengths():
    sources = figures.load()
    said = {r["point"] for r in sources.records if r.get("of") == "ladder"}
    assert {"trl-plain loss", "figure1-+ UPipe"} <= said
    assert not [row for row in figures.FAMILIES["planner"].rows(sources) if row.source.split(", ", 2)[-1] in said]


def point(**changes):
    path, variant = points.find("figure1-2gpu")
    specs = points.expand(points.read(path, variant), path.parent)
    return dataclasses.replace(specs[-1].point, **changes)


def test_a_cap_on_the_allocator_is_what_a_point_is_predicted_for():
    machine, one = Machine.parse("2xH200"), point(tokens=16384)
    found = {cap: train_point.predict(dataclasses.replace(one, allocator_cap_gib=cap), machine) for cap in (None, 28.0, 12.0, 999.0)}
    assert [found[cap]["device_usable_gib"] for cap in (28.0, 12.0)] == [28.0, 12.0]
    assert found[None] == found[999.0] and found[28.0]["fits"] and not found[12.0]["fits"] and found[12.0]["limit"] == "device"
    assert train_point.record(one).extra["allocator_cap_gib"] == 28
    for cap in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"allocator_cap_gib={cap} with device=cuda"):
            point(allocator_cap_gib=cap)
    with pytest.raises(ValueError, match="allocator_cap_gib=28.0 with device=cpu"):
        point(device="cpu", allocator_cap_gib=28.0)


def test_levers_have_rows_of_their_own():
    """No two levers of Figure 1 are one row of a table, and the published bars stand beside them."""
    path, variant = points.find("figure1")
    specs = points.expand(points.read(path, variant), path.parent)
    made = [train_point.record(spec.point).to_dict() | {"experiment": "figure1", "point": spec.key} for spec in specs]
    text = table.render(made, table.read_reported(table.REPORTED))
    ours, published = text.split("\n\n")
    assert len(ours.splitlines()) == 2 + len(specs) + 1
    bar = next(line for line in published.splitlines() if "fsdp+ulysses+offload" in line)
    assert "15 GiB states (oom), 33 GiB attention (oom), 368 GiB other (oom)" in bar
    assert "15 GiB states, 19.5 GiB attention, 16.6 GiB other" in published


@pytest.mark.slow
def test_what_was_published_to_fit_is_predicted_to(capsys):
    """At 3M tokens on 8 H100s; on two GPUs each lever but default fits at some length that is not the longest."""
    levers = ("default", "fsdp", "fsdp+ulysses", "fsdp+ulysses+checkpoint", "fsdp+ulysses+offload", None, "alst", "upipe")
    rows = [r for r in table.read_reported(table.REPORTED) if r["figure"] == "figure1"]
    status = {r["method"]: r["status"] for r in rows}
    assert run.main(["figure1", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " x cuda  " in line]
    assert len(lines) == len(levers) + 2
    for name, line in zip(levers, lines):
        assert name is None or ("  fits: " in line) == (status[name] != "oom"), line
    path, variant = points.find("figure1-2gpu")
    machine, fits = Machine.parse("2xH200", host_gib=256), {}
    for spec in points.expand(points.read(path, variant), path.parent):
        lever = json.dumps({k: v for k, v in spec.settings.items() if k != "tokens"}, sort_keys=True)
        fits.setdefault(lever, []).append(train_point.predict(spec.point, machine)["fits"])
    counts = [sum(found) for found in fits.values()]
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
