"""The benchmark of blocks at toy size: what it records follows from what it measured, and the table from the records."""

import json

import pytest
import torch

from experiments import kernel_blocks as command
from upipe import blocked, kernel_blocks, kernels, records
from upipe.config import ConfigError
from upipe.environment import code

TOY = ["--kernels", "reference", "--tokens", "48", "96", "--heads", "2,1", "2,2", "--blocks", "16", "64", "--head-dim", "8"]


def named():
    """What names the code outside of a repository."""
    try:
        code()
    except ConfigError:
        return ["--commit", "untracked"]
    return []


def test_records(tmp_path, capsys):
    assert command.main([*TOY, *named(), "--rounds", "3", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = records.load(tmp_path / "kernel_blocks.jsonl")
    want = {(tokens, heads, size) for tokens in (48, 96) for heads in ((2, 1), (2, 2)) for size in (None, 16, 64) if (size or 0) < tokens}
    assert {(r["tokens"], (r["heads"], r["kv_heads"]), r["block_tokens"]) for r in found} == want and len(found) == len(want)
    assert len({r["point"] for r in found}) == len(found) and len({r["run_id"] for r in found}) == 1
    for r in found:
        single = next(o for o in found if (o["tokens"], o["kv_heads"], o["block_tokens"]) == (r["tokens"], r["kv_heads"], None))
        for name, factor in (("forward", 1), ("backward", 2.5)):
            times = sorted(r[f"{name}_times_s"])
            assert len(times) == 3 and r[f"{name}_s"] == times[1] > 0 and r[f"{name}_extra_bytes"] is None
            flops = factor * 2 * r["tokens"] ** 2 * 2 * 8
            assert r[f"{name}_tflops_per_s"] == pytest.approx(flops / r[f"{name}_s"] / 1e12)
            assert r[f"{name}_over_single"] == pytest.approx(r[f"{name}_s"] / single[f"{name}_s"])
        assert r["times_s"] == [a + b for a, b in zip(r["forward_times_s"], r["backward_times_s"])]
        assert (r["block_tokens"] is None) == ("errors" not in r)
        assert r["block_tokens"] is None or 0 < max(r["errors"].values()) < 1e-5
    assert printed.count("blocks of 16:") == 4 and printed.count("single call:") == 4
    assert command.main(["--show", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == printed.splitlines()[:-1]


def test_wrong_blocks_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(blocked.ring, "merge_", lambda *args: None)
    with pytest.raises(AssertionError, match="reference-48-2q1kv in blocks of 16 differs from the single call"):
        command.main([*TOY, *named(), "--results", str(tmp_path)])
    assert not (tmp_path / "kernel_blocks.jsonl").exists()


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    assert command.main([*TOY, *named(), "--results", str(tmp_path), "--seconds", "0"]) == 0
    assert "left out, as they would end after --seconds 0: reference-48-2q1kv, reference-48-2q2kv, reference-96" in capsys.readouterr().out
    assert not (tmp_path / "kernel_blocks.jsonl").exists()


def test_the_usual_selection_takes_under_three_minutes():
    """By the rates that an H200 was measured at: all but compiling, which is not known here; the longest come last."""
    options = command.parser().parse_args([])
    options.commit = "untracked"
    options.tokens, options.blocks = [2**17, 2**18, 2**19], [2**15, 2**16, 2**17]
    options.heads = [command.heads_of(text) for text in options.heads]
    bench = command.Bench(options, torch.device("cpu"), {})
    points = bench.points()
    spent = [bench.seconds(p) for p in points]
    work = [p.flops(128) for p in points]
    assert work == sorted(work) and str(points[-1]) == "fa4-512K-16q4kv"
    assert sum(s for p, s in zip(points, spent) if (p.heads, p.tokens) <= (4, 2**19)) < options.seconds < 180


@pytest.mark.parametrize("arguments, says", [
    (["--heads", "4"], "--heads '4': write QUERY,KV"), (["--heads", "4,3"], "multiple of the second"),
    (["--tokens", "16"], "every length needs a block shorter"), (["--blocks", "wide"], "wide"), (["--rounds", "0"], "--rounds 0"),
    (["--kernels", "fa2"], "fa2"),
])
def test_refused(tmp_path, capsys, arguments, says):
    assert command.main([*TOY, *named(), *arguments, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_kernel_without_such_calls_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "check_kernel", lambda name, case: kernels.FlashAttention3())
    assert command.main([*TOY, *named(), "--results", str(tmp_path)]) == 2
    assert "kernel fa3 (not run by us on any machine) is not served on a ring or in blocks" in capsys.readouterr().err


def of_a_gpu(path, block, forward_s, run_id="a", **changes):
    """A toy record as a GPU would have made it."""
    values = records.read(path)[0] | {
        "run_id": run_id, "block_tokens": block, "point": f"p{block}", "forward_s": forward_s, "backward_s": 2 * forward_s, "gpu": "G",
        "gpus": 1, "kernel": "cudnn", "dtype": "bfloat16", "tokens": 65536}
    return values | changes


def test_table_from_records(tmp_path, capsys):
    command.main([*TOY, *named(), "--tokens", "48", "--results", str(tmp_path / "toy")])
    toy = tmp_path / "toy" / "kernel_blocks.jsonl"
    made = [
        of_a_gpu(toy, None, 1.0, "old"), of_a_gpu(toy, 32768, 0.1, "old"),
        of_a_gpu(toy, None, 1.0), of_a_gpu(toy, 32768, 0.9), of_a_gpu(toy, 16384, 0.95),
        of_a_gpu(toy, None, 1.0, "alone", tokens=131072),
        of_a_gpu(toy, None, 1.0, "cpu", gpu=None, gpus=0, tokens=262144), of_a_gpu(toy, 32768, 0.9, "cpu", gpu=None, gpus=0, tokens=262144),
    ]
    path, table = tmp_path / "kernel_blocks.jsonl", tmp_path / "table.json"
    path.write_text("".join(json.dumps(r) + "\n" for r in made))
    capsys.readouterr()
    assert command.main(["--table", "--results", str(tmp_path), "--table-file", str(table)]) == 0
    (row,) = json.loads(table.read_text())
    assert row["forward"] == {"none": 1000.0, "32768": 900.0, "16384": 950.0} and row["backward"]["32768"] == 1800.0
    assert kernel_blocks.choose("forward", 65536, 2, 1, 8, "G", "cudnn", (row,))[0] == 32768
    assert "forward: blocks of 32K (11.1% faster than the single call" in capsys.readouterr().out
