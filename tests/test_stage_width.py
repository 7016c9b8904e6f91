"""heads_per_stage: auto, and the table it chooses from."""

import json

import pytest
import torch

import upipe
from experiments import stage_width as command
from tests.plain import tiny_model
from upipe import records, stage_width
from upipe.config import from_mapping
from upipe.records import Record
from upipe.stage_width import choose

ROWS = (
    {"gpu": "G", "kernel": "fa4", "ranks": 2, "heads": 32, "tokens": 16384, "ms": {"2": 12.0, "4": 10.3, "8": 10.15, "16": 10.0}},
    {"gpu": "G", "kernel": "fa4", "ranks": 2, "heads": 32, "tokens": 65536, "ms": {"2": 101.0, "4": 100.5, "8": 100.0}},
    {"gpu": "G", "kernel": "fa4", "ranks": 2, "heads": 64, "tokens": 65536, "ms": {"2": 300.0, "32": 200.0, "64": 190.0}},
)


@pytest.mark.parametrize("tokens, heads, expected", [
    (16384, 32, 8),      # the smallest within 2 % of 10.0
    (65536, 32, 2), (1 << 20, 32, 2),
    (1000, 32, 8),       # shorter than any that was measured: as the shortest
    (40000, 32, 8),      # between two: as the shorter
    (16384, 8, 4),       # a model of 8 heads, measured with 32: nothing wider than its own
    (65536, 64, 64),
])
def test_choice(tokens, heads, expected):
    assert choose(tokens, 2, heads, "G", "fa4", ROWS)[0] == expected


@pytest.mark.parametrize("gpu, kernel, ranks", [("H", "fa4", 2), ("G", "cudnn", 2), ("G", "fa4", 4), (None, "reference", 1)])
def test_what_was_not_measured_is_the_narrowest(gpu, kernel, ranks):
    U, why = choose(65536, ranks, 32, gpu, kernel, ROWS)
    assert U == ranks and "no width was measured" in why


def made(U, time_s, run_id="a", **changes):
    values = dict(run_id=run_id, experiment="block", method="upipe", model="llama3-8b", layers=1, tokens=65536, sp=2, ring=1, dp=1,
                  heads_per_stage=U, kernel="fa4", attention_output="device", overlap=True, dx="slabs", dtype="bfloat16",
                  time_s=time_s, times_s=[time_s], warmup_steps=1, gpu="G", commit="c" * 40)
    return Record(**(values | changes), extra={"heads": 32}).to_dict()


def test_table_from_records():
    found = [made(2, 0.2), made(4, 0.1), made(8, 0.09, overlap=False), made(8, 0.05, attention_output="host"),
             made(2, 0.3, run_id="b", tokens=131072), made(2, 0.25, run_id="c"), made(4, 0.24, run_id="c")]
    (row,) = command.rows(found)
    assert row["tokens"] == 65536 and row["ms"] == {"2": 250.0, "4": 240.0}


def test_command_writes_the_table_that_is_read(tmp_path, capsys, monkeypatch):
    path, table = tmp_path / "block.jsonl", tmp_path / "table.json"
    path.write_text("".join(json.dumps(made(U, t)) + "\n" for U, t in ((2, 0.2), (4, 0.1))))
    monkeypatch.setattr(records, "load", lambda p: [json.loads(line) for line in path.read_text().splitlines()])
    assert command.main(["--records", str(path), "--table", str(table)]) == 0
    assert "U = 4" in capsys.readouterr().out
    assert choose(65536, 2, 32, "G", "fa4", tuple(json.loads(table.read_text())))[0] == 4


def test_the_repository_s_table_is_readable():
    for row in stage_width.table():
        assert set(row) >= {"gpu", "kernel", "ranks", "heads", "tokens", "ms", "commit"} and len(row["ms"]) > 1


def test_setting_is_read_from_yaml():
    assert from_mapping(upipe.UPipeConfig, {"heads_per_stage": "auto"}, folder=".").heads_per_stage == "auto"
    assert from_mapping(upipe.UPipeConfig, {"heads_per_stage": 8}, folder=".").heads_per_stage == 8
    with pytest.raises(Exception, match="heads_per_stage"):
        from_mapping(upipe.UPipeConfig, {"heads_per_stage": "wide"}, folder=".")


def run_auto():
    """The width is chosen by the length of each batch, and the result is the same."""
    rows = tuple({"gpu": None, "kernel": "flash", "ranks": 2, "heads": 8, "tokens": t, "ms": ms}
                 for t, ms in ((8, {"2": 9.0, "8": 1.0}), (16, {"2": 1.0, "8": 1.0})))
    before, stage_width.table = stage_width.table, lambda: rows
    model = tiny_model("llama", 8, 2)
    ids = torch.arange(16)[None] % 60
    plain = {n: model(input_ids=ids[:, :n]).logits for n in (8, 16)}
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2, heads_per_stage="auto", kernel="flash"))
    widths = []
    for n in (8, 16):
        (batch,) = handle.shard([{"input_ids": ids[:, :n], "labels": ids[:, :n]}])
        got = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        L = n // 2
        assert torch.allclose(got, plain[n][:, handle.sp_rank * L : (handle.sp_rank + 1) * L], atol=1e-5)
        widths.append(sorted(s.heads_per_stage for s in handle._sharding.schedules.values()))
    handle.remove()
    stage_width.table = before
    return widths


def test_auto_on_ranks(worlds):
    for widths in worlds(2).run(run_auto):
        assert widths == [[2, 8], [2, 8]]
