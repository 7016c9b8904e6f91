"""The ablations: each fix turned off costs memory, the line through two lengths holds, collectives' stand-ins, records and figure."""

import pytest
import torch.distributed as dist

from experiments import figures, glm_ablation
from experiments.figures import claims, glm
from experiments.glm_ablation import FIXES, KINDS, LINE, SilentSplit, as_record, at, few_experts, reported, simulate
from tests.glm_modules import random
from upipe import records
from upipe.environment import environment
from upipe.glm import TokenSplit

NAMED = {fix.name: fix for fix in FIXES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_each_fix_turned_off_costs_memory(name):
    fix = NAMED[name]
    on, off = (at(fix.kinds[0], 8, 16384, f) for f in (None, fix))
    if name == "no router state kept":
        assert on.left == 0 < off.left
    elif name == "KDA gathers the hidden state":
        assert off.peak != on.peak
    else:
        assert off.peak > on.peak


@pytest.mark.slow
def test_the_line_is_straight(monkeypatch):
    kind = "KDA + dense MLP"
    short, long = (simulate(kind, 4, length) for length in (16384, 32768))
    middle = short.along(long, 0.5)
    third = simulate(kind, 4, 24576)
    assert third.peak == pytest.approx(middle.peak, rel=0.01) and third.kept == pytest.approx(middle.kept, rel=0.01)
    monkeypatch.setattr(glm_ablation, "LINE", (16384, 24576))
    assert at(kind, 4, 32768 + 8192).peak == pytest.approx(short.along(third, 3.0).peak)
    assert LINE[0] >= 2 * 8192 and set(KINDS) == set(glm_ablation.COUNTS) and sum(glm_ablation.COUNTS.values()) == 45


def shapes_of_a_real_split():
    """What `SilentSplit` gives has the shapes of the real collectives'."""
    real = TokenSplit.of(dist.group.WORLD)
    silent = SilentSplit(None, real.ring, real.ulysses, real.rank)
    local = random(2, 12, 3)
    for name, x in (("all_gather", local), ("gathered", local), ("reduced", random(2, 24, 3))):
        assert getattr(real, name)(x).shape == getattr(silent, name)(x).shape


def test_collectives_are_stood_in_for(worlds):
    worlds(2).run(shapes_of_a_real_split)
    counts = few_experts(random(100).long(), 288)
    assert len(counts) == 290 and sum(counts) == 100 and counts[0] == counts[-1] == 0


def test_records_are_rows_of_the_figure(tmp_path):
    """The newest of each fix, layer kind and number of ranks; drawn with it and without, predicted, never as a run."""
    made = environment("python -m experiments.glm_ablation") | {"run_id": "x"}
    for size in (2.0**31, 2.0**32):
        row = {"fix": "mHC recomputed", "kind": "KDA + MoE", "with": 2.0**30, "without": size, "basis": "simulated"}
        records.append(as_record(row, 2**20, 8, made), tmp_path)
    row = {"fix": "none turned off", "kind": "model", "with": 2.0**33, "without": 2.0**33, "basis": "simulated a layer"}
    records.append(as_record(row, 2**20, 16, made).updated({"gpus": 64, "gpu": "B200"}), tmp_path)
    sources = figures.load(tmp_path)
    rows = [row for row in figures.FAMILIES["glm"].rows(sources) if row.mark != "reported"]
    assert {row.mark for row in rows} == {"predicted"}
    found = [(row.metric, row.gpus, row.setting, row.value) for row in rows]
    what = "mHC recomputed (KDA + MoE)"
    assert found == [
        (glm.FIX, 8, f"{what}, with it", 1.0), (glm.FIX, 8, f"{what}, without", 4.0), ("peak", 64, "sequence over 16, ZeRO-3 over 64", 8.0),
    ]  # fmt: skip
    assert "Not measured" in claims.glm(sources)[1]
    figures.make("glm", sources, tmp_path / "out")
    assert (tmp_path / "out" / "glm.png").stat().st_size > 10_000
    found = reported(NAMED["indexer in chunks"])
    assert [(r["method"], r["value"]) for r in found][:2] == [("indexer-unchunked", 64), ("indexer-chunked", 2.3)]
