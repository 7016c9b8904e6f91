"""Records: the validator, the file, the names; and every record of the repository."""

import csv
import json
import subprocess
import threading
from pathlib import Path

import pytest

from upipe import cli, environment, records
from upipe.config import ConfigError
from upipe.records import Record, RecordError, append, format_tokens, method_of, parse_tokens, validate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
UNIT = 65536 * 4096 * 2 / 2**30

MODEL = dict(
    run_id="20260101T000000Z-abcdef", experiment="made", provenance="measured", method="upipe", model="llama3-8b", layers=4,
    tokens=131072, sp=2, ring=1, dp=1, zero=3, heads_per_stage=2, kernel="cudnn", attention_output="device", offload="none",
    dtype="bfloat16", outcome="ok", times_s=[8.0, 9.0, 8.5], time_s=8.5, warmup_steps=1,
    tokens_per_s_per_gpu=131072 / 8.5 / 2, peak_gib=30.0, states_gib=20.0, peak_above_states_gib=10.0, peak_units=10.0 / UNIT,
    reserved_gib=32.0, loss=11.9, grad_norm=1.5, gpu="NVIDIA H200", gpus=2, host_gib=256.0, commit="0" * 40, dirty=False,
    versions={"torch": "2.13.0"}, command="python -m experiments.run made", date="2026-01-01T00:00:00Z",
    hidden_size=4096, scope="model", point="0123456789ab",
)
BLOCK = MODEL | dict(
    scope="block", peak_above_states_gib=None, states_gib=None, peak_above_inputs_gib=2.5 * UNIT, peak_units=2.5, layers=1,
)
CPU = MODEL | dict(
    gpu=None, gpus=0, tokens_per_s_per_gpu=None, peak_gib=None, states_gib=None, peak_above_states_gib=None,
    peak_units=None, reserved_gib=None,
)
PREDICTED = MODEL | dict(provenance="predicted", times_s=None, warmup_steps=None, loss=None, grad_norm=None)
ENDED = MODEL | dict(
    outcome="oom_device", reason="OutOfMemoryError: CUDA out of memory.", times_s=None, time_s=None, loss=None,
    tokens_per_s_per_gpu=None, peak_gib=None, states_gib=None, peak_above_states_gib=None, peak_units=None,
)


def made(values, **changes):
    return Record.from_dict(values | changes).to_dict()


@pytest.mark.parametrize("values", [MODEL, BLOCK, CPU, PREDICTED, ENDED], ids=["model", "block", "cpu", "predicted", "ended"])
def test_valid(values):
    assert validate(made(values)) == []
    assert json.loads(json.dumps(made(values))) == made(values)


BAD = {
    "unknown method": (MODEL, dict(method="pytorch-native"), "method='pytorch-native'"),
    "unknown outcome": (MODEL, dict(outcome="oom"), "outcome='oom'"),
    "unknown kernel": (MODEL, dict(kernel="flash2"), "did you mean 'flash'"),
    "unknown offload": (MODEL, dict(offload=True), "offload=True"),
    "unknown dx": (MODEL, dict(dx="bf16"), "dx='bf16'"),
    "unknown dtype": (MODEL, dict(dtype="bf16"), "dtype='bf16'"),
    "length as text": (MODEL, dict(tokens="128K"), "tokens='128K'"),
    "number as text": (MODEL, dict(loss="11.9"), "loss='11.9'"),
    "zero stage": (MODEL, dict(zero=4), "zero=4"),
    "nothing a number": (MODEL, dict(loss=float("nan")), "loss=nan"),
    "infinite": (MODEL, dict(grad_norm=float("inf")), "grad_norm=inf"),
    "not JSON": (MODEL, dict(hidden_sizes={1, 2}), "cannot be written as JSON"),
    "negative": (MODEL, dict(reserved_gib=-1.0), "reserved_gib=-1.0"),
    "no rank": (MODEL, dict(sp=0), "sp=0"),
    "no run": (MODEL, dict(run_id=""), "run_id=''"),
    "no commit": (MODEL, dict(commit=None), "commit=None"),
    "no versions": (MODEL, dict(versions={}), "versions={}"),
    "a path as a name": (MODEL, dict(experiment="../made"), "it names a file"),
    "local date": (MODEL, dict(date="2026-01-01 00:00"), "write UTC as"),
    "no reason": (ENDED, dict(reason=None), "without a reason"),
    "no provenance": (MODEL, dict(provenance="reported"), "provenance='reported'"),
    "predicted with times": (MODEL, dict(provenance="predicted"), "only a run has them"),
    "no GPUs said": (MODEL, dict(gpus=None, tokens_per_s_per_gpu=None), "gpus is null"),
    "GPU without a name": (MODEL, dict(gpu=None), "gpu=None with gpus=2"),
    "memory without a GPU": (CPU, dict(peak_gib=1.0), "peak_gib in a record without a GPU"),
    "ranks": (MODEL, dict(dp=2), "is not sp x ring x dp"),
    "plain and sharded": (MODEL, dict(method="none"), "method='none' with sp=2"),
    "mean for median": (MODEL, dict(time_s=8.6), "not the median"),
    "times without median": (MODEL, dict(time_s=None, tokens_per_s_per_gpu=None), "go together"),
    "no times": (MODEL, dict(times_s=[]), "at least one"),
    "no warm-up": (MODEL, dict(warmup_steps=0), "warmup_steps=0 with 3 timed steps"),
    "warm-up unsaid": (MODEL, dict(warmup_steps=None), "without warmup_steps"),
    "throughput of all GPUs": (MODEL, dict(tokens_per_s_per_gpu=131072 / 8.5), "tokens, time_s and gpus give"),
    "throughput without time": (ENDED, dict(tokens_per_s_per_gpu=1.0), "needs tokens, time_s and gpus"),
    "peak less states": (MODEL, dict(peak_above_states_gib=11.0, peak_units=11.0 / UNIT), "is not peak_gib - states_gib"),
    "units of a model": (MODEL, dict(peak_units=10.2 / UNIT), "(model)"),
    "units of a block": (BLOCK, dict(peak_units=2.53), "(block)"),
    "units of the whole sequence": (MODEL, dict(peak_units=5.0 / UNIT), "(model)"),
    "units without width": (MODEL, dict(hidden_size=None), "hidden_size"),
    "units without a peak": (MODEL, dict(peak_above_states_gib=None), "needs peak_above_states_gib"),
    "reserved below peak": (MODEL, dict(reserved_gib=25.0), "is less than peak_gib"),
    "host layers on the device": (MODEL, dict(attention_output_host_layers=2), "attention_output='device' with"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid(name, tmp_path):
    values, changes, message = BAD[name]
    record = made(values, **changes)
    problems = validate(record)
    assert any(message in problem for problem in problems), problems
    with pytest.raises(RecordError):
        append(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_field_is_there_or_null():
    record = made(MODEL)
    del record["ring"]
    assert validate(record) == ["ring is missing (null where it does not apply)"]


def test_one_step_may_go_without_warm_up_and_batches_count():
    assert validate(made(MODEL, warmup_steps=0, times_s=[8.5])) == []
    four = made(MODEL, micro_batch_size=2, accumulation=2, tokens_per_s_per_gpu=4 * 131072 / 8.5 / 2, peak_units=5.0 / UNIT)
    assert validate(four) == []


def test_extra_keys_may_not_hide_fields():
    with pytest.raises(RecordError, match="loss"):
        Record(extra={"loss": 1.0}).to_dict()


def test_appending_is_whole_lines_from_many_threads(tmp_path):
    threads = [
        threading.Thread(target=lambda n=n: [append(made(MODEL, point=f"{n}-{i}"), tmp_path) for i in range(10)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = records.load(tmp_path / "made.jsonl")
    assert len(read) == 80 and len({r["point"] for r in read}) == 80


def test_a_torn_line_is_named_and_not_grown(tmp_path):
    path = append(made(MODEL), tmp_path)
    with open(path, "a") as file:
        file.write('{"run_id": "half')
    append(made(MODEL), tmp_path)
    with pytest.raises(RecordError, match=r"made.jsonl:2: not JSON"):
        records.read(path)
    assert cli.main(["records", str(path)]) == 1


def test_command_validates_files_and_folders(tmp_path, capsys):
    path = append(made(MODEL), tmp_path)
    assert cli.main(["records", str(tmp_path)]) == 0
    assert "1 records in 1 files, 0 problems" in capsys.readouterr().out
    path.rename(tmp_path / "other.jsonl")
    assert cli.main(["records", str(tmp_path / "other.jsonl")]) == 1
    assert "in the file of 'other'" in capsys.readouterr().err
    assert cli.main(["records", str(tmp_path / "none")]) == 1


def test_all_committed_records_are_valid():
    assert [problem for path in sorted(RESULTS.glob("*.jsonl")) for problem in records.problems_in(path)] == []


PUBLISHED = {
    "upipe": {"upipe", "upipe-8u2r", "upipe-over-usp"},
    "ulysses": {"ulysses", "fsdp+ulysses", "fsdp+ulysses+checkpoint", "fsdp+ulysses+offload"},
    "ring": {"ring", "fsdp2-ring"},
    "usp": {"usp-8u2r"},
    "fpdt": {"fpdt"},
    "native": {"pytorch-native"},
    "alst": {"alst"},
    "none": {
        "default", "fsdp", "naive", "plain-loss", "chunked-loss", "chunked-loss+offload", "no-rescaling", "yarn-4", "one-tensor",
        "four-tensors", "model-and-optimizer", "resident-layer-inputs-before", "resident-layer-inputs-after",
    },
}


def test_published_method_names():
    for ours, theirs in PUBLISHED.items():
        assert {method_of(name) for name in theirs} == {ours}
    assert method_of("router-leak") is None and method_of("skyrl") is None
    with pytest.raises(ValueError, match="did you mean 'pytorch-native'"):
        method_of("pytorch-nativ")


def test_every_published_row_has_a_known_method():
    with open(ROOT / "paper_figures" / "reported.csv") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(rows) > 150
    mapped = {row["method"]: method_of(row["method"]) for row in rows}
    assert {name for name, ours in mapped.items() if ours is not None} == set().union(*PUBLISHED.values())
    assert {row["source"] for row in rows if mapped[row["method"]] is None} <= {"skyrl-glm-1m", "trl-1m-guide"}


@pytest.mark.parametrize(("text", "tokens"), [("128K", 131072), ("1M", 2**20), ("5M", 5 * 2**20), ("512", 512), ("2999", 2999)])
def test_lengths_are_binary(text, tokens):
    assert parse_tokens(text) == tokens and format_tokens(tokens) == text and parse_tokens(format_tokens(tokens)) == tokens


def test_lengths_between_units():
    assert format_tokens(parse_tokens("1.5M")) == "1536K" and format_tokens(500_000) == "500000"
    with pytest.raises(ValueError, match="128K"):
        parse_tokens("1MB")


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_code_is_named_by_its_commit(tmp_path):
    folder = tmp_path.resolve()
    with pytest.raises(ConfigError, match="--commit"):
        environment.code(root=folder)
    assert environment.code("abc123", folder) == ("abc123", None)
    assert environment.code("abc123-dirty", folder) == ("abc123", True)
    git(folder, "init", "-q")
    (folder / "a.py").write_text("1\n")
    git(folder, "add", "a.py")
    git(folder, "commit", "-qm", "one")
    head, dirty = environment.code(root=folder)
    assert len(head) == 40 and dirty is False
    (folder / "experiments" / "results").mkdir(parents=True)
    (folder / "experiments" / "results" / "made.jsonl").write_text("{}\n")
    assert environment.code(head[:12], folder) == (head, False)
    (folder / "b.py").write_text("2\n")
    assert environment.code(root=folder) == (head, True)
    with pytest.raises(ConfigError, match="leave --commit out"):
        environment.code("abc123", folder)
