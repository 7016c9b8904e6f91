"""experiments.tiles: the command that the tiles' defaults are set from."""

import pytest
import torch

from experiments import tiles
from upipe import loss, records

COMMAND = ["--model", "toy", "--tokens", "256", "--tiles", "16", "100", "none", "--dtype", "float32", "--rounds", "2", "--commit"]


@pytest.fixture
def commit():
    return tiles.code(None)[0]


def test_rows_of_every_part(tmp_path, capsys, monkeypatch, commit):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tiles.main([*COMMAND, commit, "--results", str(tmp_path)]) == 0
    rows = records.load(tmp_path / "tiles.jsonl")
    assert [(r["part"], r["implementation"], r["tile_tokens"]) for r in rows] == [
        (part, "tiled" if tile else "untiled", tile) for part in ("mlp", "norm", "loss") for tile in (16, 100, None)
    ] + [("loss", "liger", None)]
    *measured, liger = rows
    assert liger["outcome"] == "refused" and "liger-kernel" in liger["reason"] and liger["time_s"] is None
    for r in measured:
        assert r["outcome"] == "ok" and len(r["times_s"]) == 2 and r["warmup_steps"] == 2 and r["gradient_difference"] < 1e-5
        assert sum(r["parts_s"].values()) == pytest.approx(r["time_s"], rel=0.5)
    for part in ("mlp", "loss"):
        small, large, untiled = (r["counted_peak_gib"] for r in rows if r["part"] == part and r["implementation"] != "liger")
        assert small < large < untiled, part
    # Whole logits and their gradient, [256, 512] each, against a tile's.
    assert untiled * 2**30 >= 2 * 256 * 512 * 4
    capsys.readouterr()
    assert tiles.main(["--show", "--results", str(tmp_path)]) == 0
    assert "toy, 256 tokens, CPU" in (shown := capsys.readouterr().out) and "untiled" in shown


def test_wrong_gradients_are_no_measurement(tmp_path, monkeypatch, commit):
    plain = loss.token_loss_sum
    monkeypatch.setattr(loss, "token_loss_sum", lambda *a: 2 * plain(*a))
    with pytest.raises(AssertionError, match="loss untiled: gradients differ"):
        tiles.main([*COMMAND, commit, "--parts", "loss", "--results", str(tmp_path)])


def test_a_row_that_does_not_fit_is_recorded(tmp_path, monkeypatch, commit):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15 GiB. More.")

    monkeypatch.setattr(loss, "token_loss_sum", full)
    assert tiles.main([*COMMAND, commit, "--parts", "loss", "--results", str(tmp_path)]) == 0
    (row,) = [r for r in records.load(tmp_path / "tiles.jsonl") if r["implementation"] == "untiled"]
    assert (row["outcome"], row["reason"], row["time_s"]) == ("oom_device", "CUDA out of memory", None)


def test_proposal_is_the_smallest_that_is_nearly_the_fastest():
    rows = [{"part": "mlp", "tile_tokens": t, "time_s": s} for t, s in ((512, 1.3), (2048, 1.02), (8192, 1.0), (None, 0.5), (64, None))]
    assert tiles.choose(rows, "mlp") == 2048 and tiles.choose(rows, "loss") is None


@pytest.mark.parametrize("words, said", [
    (["--tiles", "many"], "many"), (["--rounds", "0"], "--rounds 0"), (["--warmup", "0"], "warm up after it"),
])
def test_refusals(words, said, tmp_path, capsys):
    assert tiles.main([*words, "--model", "toy", "--results", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        tiles.main(["--help"])
    assert ended.value.code == 0 and "--tiles" in capsys.readouterr().out
