"""The sweep runner, end to end with real processes, and how it tells outcomes apart."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from experiments import merge, points, run, table, worker
from experiments.processes import kill_tree
from upipe import records
from upipe.config import ConfigError
from upipe.oom_killer import death, kernel_kills, killed_for_memory
from upipe.outcomes import classify
from upipe.preflight import PreflightError

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "0" * 40


def write(folder, name="made", **keys):
    """An experiment of the test kind; returns its file."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"about": "a test", "kind": "tests.runner_points", **keys}))
    return path


def arguments(path, folder, *more):
    """The runner's arguments. The code has a name of its own where the suite runs outside a checkout."""
    try:
        run.code()
        named = []
    except ConfigError:
        named = ["--commit", COMMIT]
    return [str(path), "--results", str(folder / "results"), "--logs", str(folder / "logs"), *named, *more]


def results(folder, name="made"):
    return records.load(folder / "results" / f"{name}.jsonl")


def processes_naming(text):
    """Processes of this machine whose command line has `text`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(text in word for word in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return [pid for pid in found if pid != os.getpid()]


def check_toy(made):
    for r in made:
        assert r["outcome"] == "ok" and r["sp"] == 2 and r["zero"] == 3 and r["dtype"] == "float32"
        assert r["kernel"] == "flash" and len(r["times_s"]) == 3 and r["warmup_steps"] == 1 and r["grad_norm"] > 0
        assert r["peak_gib"] is None and r["gpu"] is None and r["gpus"] == 0 and r["tokens_per_s_per_gpu"] is None
        assert r["settings"]["upipe"]["heads_per_stage"] == r["heads_per_stage"]
        # Random bytes: the loss of a model that knows nothing is ln 256.
        assert r["loss"] == r["losses"][-1] == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.slow
def test_toy_sweep_end_to_end(tmp_path, capsys):
    assert run.main(arguments("toy-cpu", tmp_path)) == 0
    made = results(tmp_path, "toy-cpu")
    check_toy(made)
    assert {(r["tokens"], r["heads_per_stage"]) for r in made} == {(512, 2), (1024, 2), (512, 4), (1024, 4)}
    assert len({r["run_id"] for r in made}) == 1
    # The stage width changes neither weights nor tokens, so the losses are those of one model.
    for tokens in (512, 1024):
        narrow, wide = (r["losses"] for r in made if r["tokens"] == tokens)
        assert narrow == pytest.approx(wide, rel=1e-5)
    out = capsys.readouterr().out
    assert "heads_per_stage  512" in out and "upipe 1K heads_per_stage=4: ok" in out and "4 records appended" in out
    # The points are done: nothing is left to run.
    assert run.main(arguments("toy-cpu", tmp_path, "--resume")) == 0
    assert results(tmp_path, "toy-cpu") == made


@pytest.mark.slow
def test_refused_failed_and_killed(tmp_path):
    path = write(
        tmp_path,
        points=[{"ending": "refused"}, {"ending": "error"}, {"ending": "sigkill", "processes": 2}],
    )
    assert run.main(arguments(path, tmp_path)) == 1
    refused, error, killed = results(tmp_path)
    assert refused["outcome"] == "refused" and "use one of 2, 4, 6, 8" in refused["reason"]
    assert error["outcome"] == "failed" and error["reason"] == "rank 0: ValueError: no such thing"
    assert killed["outcome"] == "failed" and killed["reason"].startswith("rank 1: ended by SIGKILL")
    assert refused["loss"] is None and refused["tokens"] == 1024
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.slow
def test_timeout_ends_every_process(tmp_path):
    path = write(tmp_path, points=[{"ending": "hang", "processes": 2}])
    assert run.main(arguments(path, tmp_path, "--timeout", "4")) == 1
    (record,) = results(tmp_path)
    assert record["outcome"] == "timeout" and "4 s" in record["reason"]
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.slow
def test_killed_runner_leaves_nothing_and_resume_reruns_one_point(tmp_path):
    path = write(tmp_path, common={"seconds": 3.0, "processes": 2}, grid={"tokens": ["1K", "2K", "3K"]})
    command = [sys.executable, "-m", "experiments.run", *arguments(path, tmp_path)]
    runner = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    file = tmp_path / "results" / "made.jsonl"
    deadline = time.monotonic() + 120
    try:
        # One record is there and the second point's ranks are at work.
        while not (file.exists() and len(list((tmp_path / "logs").glob("made/*/001-*/point.json"))) == 1):
            assert time.monotonic() < deadline and runner.poll() is None
            time.sleep(0.05)
        while len([p for p in processes_naming(str(tmp_path)) if p != runner.pid]) < 3:
            assert time.monotonic() < deadline and runner.poll() is None
            time.sleep(0.05)
    finally:
        runner.kill()
        runner.wait()
    while processes_naming(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = results(tmp_path)
    assert [r["tokens"] for r in before] == [1024]
    assert run.main(arguments(path, tmp_path, "--resume")) == 0
    after = results(tmp_path)
    assert after[0] == before[0] and [r["tokens"] for r in after] == [1024, 2048, 3072]
    assert {r["outcome"] for r in after} == {"ok"}


def pinned_statement(error):
    """Raises `error` as torch does: inside a function of torch's own files, called with pin_memory=True."""
    names = {}
    file = str(Path(torch.__file__).parent / "made_up.py")
    exec(compile("def empty(error, pin_memory):\n    raise error\n", file, "exec"), names)
    names["empty"](error, pin_memory=True)


def raise_it(error):
    raise error


def chained(error):
    try:
        raise error
    except RuntimeError as cause:
        raise ValueError("a wrapper") from cause


REGISTER = "cudaHostRegister failed with error code 2"
CASES = {
    "device": (lambda: raise_it(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")), "oom_device"),
    "driver": (lambda: raise_it(torch.AcceleratorError("CUDA error: out of memory\nmore")), "oom_device"),
    "cublas": (lambda: raise_it(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...")), "oom_device"),
    "wrapped": (lambda: chained(torch.OutOfMemoryError("CUDA out of memory.")), "oom_device"),
    "pinned": (lambda: pinned_statement(torch.AcceleratorError("CUDA error: out of memory")), "oom_pinned"),
    "registered": (lambda: raise_it(RuntimeError(REGISTER)), "oom_pinned"),
    "no pinning without a GPU": (lambda: pinned_statement(RuntimeError("Cannot access accelerator device")), "failed"),
    "host": (lambda: bytearray(1 << 60), "oom_host"),
    "host, torch": (lambda: torch.empty(10**15), "oom_host"),
    "refused": (lambda: raise_it(PreflightError("sp_size=3")), "refused"),
    "configuration": (lambda: raise_it(ConfigError("kind='x'")), "refused"),
    "other": (lambda: raise_it(RuntimeError("Connection closed by peer")), "failed"),
}


@pytest.mark.parametrize("name", CASES)
def test_outcome_by_cause(name):
    function, outcome = CASES[name]
    with pytest.raises(Exception) as caught:
        function()
    got, reason = classify(caught.value)
    assert got == outcome
    assert type(caught.value if name != "wrapped" else caught.value.__cause__).__name__ in reason and "\n" not in reason


def test_worker_leaves_the_outcome_of_what_its_kind_raises(tmp_path, monkeypatch, capfd):
    from tests import runner_points

    (tmp_path / "point.json").write_text(json.dumps(
        {"kind": "tests.runner_points", "settings": {}, "folder": str(tmp_path), "processes": 1, "gpus": 0}
    ))
    for name, (function, outcome) in CASES.items():
        monkeypatch.setattr(runner_points, "run", lambda point, function=function: function())
        assert worker._work(tmp_path, 0) == 1
        ended = run.read_ending(tmp_path, 1)
        assert (name, ended.outcome) == (name, outcome) and ended.reason.startswith("rank 0: ")


def test_sigkill_is_out_of_memory_only_where_the_kernel_says_so():
    def ended(number, before, after, named):
        return death(number, killed_for_memory(before, after, named))

    assert ended(9, 3, 4, False)[0] == "oom_host"
    assert ended(9, None, None, True)[0] == "oom_host"
    assert ended(9, 3, 3, False) == ("failed", "ended by SIGKILL; the kernel reports no out-of-memory kill")
    assert ended(9, None, None, False) == ("failed", "ended by SIGKILL; whether the kernel did it for memory cannot be read here")
    assert ended(11, 3, 4, False) == ("failed", "ended by SIGSEGV")


def test_what_waits_for_a_rank_imports_nothing_large():
    code = "import sys, experiments.worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert not {"torch", "upipe", "numpy"} & set(loaded)


def test_kernel_kills_reads_both_kinds_of_control_group(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "a/b").mkdir(parents=True)
    (groups / "memory").mkdir()
    assert kernel_kills(proc, groups) is None
    (proc / "self/cgroup").write_text("0::/a/b\n")
    assert kernel_kills(proc, groups) is None
    (groups / "a/b/memory.events").write_text("low 0\noom 5\noom_kill 2\noom_group_kill 9\n")
    assert kernel_kills(proc, groups) == 2
    # In a container the path is another namespace's, and its own group is the mount's root.
    (proc / "self/cgroup").write_text("9:cpu:/x\n4:memory:/elsewhere\n0::/\n")
    (groups / "memory/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert kernel_kills(proc, groups) == 7


def test_ending_prefers_the_cause_over_its_echoes(tmp_path):
    (tmp_path / "log.txt").write_text("torchrun: error: port in use\n\n")
    assert "port in use" in run.read_ending(tmp_path, 2).reason
    worker.leave(tmp_path, 0, {"outcome": "failed", "reason": "RuntimeError: Connection closed by peer"})
    worker.leave(tmp_path, 1, {"outcome": "failed", "reason": "ended by SIGKILL", "signal": 9})
    assert run.read_ending(tmp_path, 3).reason == "rank 1: ended by SIGKILL"
    worker.leave(tmp_path, 2, {"outcome": "oom_device", "reason": "OutOfMemoryError: CUDA out of memory."})
    assert run.read_ending(tmp_path, 3).outcome == "oom_device"


def test_kill_tree_reaches_other_sessions(tmp_path):
    inner = "import time; time.sleep(99)"
    script = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}, sys.argv[1]], start_new_session=True)\n"
        "time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    while len(processes_naming(str(tmp_path))) < 2:
        time.sleep(0.02)
    kill_tree(process.pid)
    process.wait()
    assert processes_naming(str(tmp_path)) == []


def test_every_experiment_of_the_repository_can_be_listed(capsys):
    assert run.main([]) == 0
    listed = capsys.readouterr().out
    for name in points.names():
        assert name in listed
        path, variant = points.find(name)
        experiment = points.read(path, variant)
        specs = points.expand(experiment, path.parent)
        kind = points.kind_of(experiment.kind)
        assert [spec.label for spec in specs if kind.verdict(spec.point) != "ok"] == [], name
    published = [n for n in points.names() if points.find(n)[1] is None and points.read(points.find(n)[0]).hardware is not None]
    assert len(published) == 9 and {f"{name}-{end}" for name in published for end in ("2gpu", "cpu")} <= set(points.names())


@pytest.fixture(scope="module")
def ran():
    """Records of small variants' points, by what names their settings."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in points.names() if points.find(name)[1] == "cpu"])
def test_small_variants_run(tmp_path, ran, name):
    """The points of every published experiment with a toy model: each trains, and has what the planner said in its record. One whose
    settings another's point has is not run again: the runner finds that point's record as its own, and goes on from it."""
    path, variant = points.find(name)
    keys = {spec.key for spec in points.expand(points.read(path, variant), path.parent)}
    for key in keys & ran.keys():
        records.append(records.Record.from_dict(ran[key]).updated({"experiment": name}), tmp_path / "results")
    assert run.main(arguments(name, tmp_path, "--resume")) == 0
    made = results(tmp_path, name)
    assert len(made) == len(keys) and {r["point"] for r in made} == keys
    ran.update({r["point"]: r for r in made})
    for r in made:
        assert r["outcome"] == "ok" and r["loss"] == pytest.approx(math.log(256), abs=0.2), r["reason"]
        assert bool(r["trace"]) == name.startswith("breakdown")
        if r["trace"]:
            split = r["trace"]["parts_ms"]
            assert sum(split.values()) == pytest.approx(r["trace"]["window_ms"]) and r["trace"]["communication_ms"]["all-to-all"] > 0
            assert min(split[part] for part in ("projection", "attention", "output", "MLP", "norm", "loss", "offload", "optimizer")) > 0
        # These train in fp32, which the planner has no kernel of a GPU for, and says so.
        assert "fits" in r["predicted"] or r["predicted"]["declined"].startswith("train.dtype=fp32"), r["predicted"]


VERDICTS = r"fits: device [\d.]+ of \d|does not fit, (device|host) memory runs out: device [\d.]+ of \d|not predicted: \w"


def check_dry_run(name, out):
    """A line a point, in their order, with the planner's verdict; "ok" where the experiment names no hardware to predict for."""
    path, variant = points.find(name)
    experiment = points.read(path, variant)
    keys = [spec.key for spec in points.expand(experiment, path.parent)]
    lines = re.findall(r"^  ([0-9a-f]{12})  (.+)$", out, re.M)
    assert [key for key, _ in lines] == keys, name
    wanted = VERDICTS if experiment.hardware is not None else r"ok$"
    assert [line for _, line in lines if len(re.findall(rf"  (?:{wanted})", line)) != 1] == [], name


@pytest.mark.parametrize("name", ["toy-cpu", "table3_qwen3_32b-cpu", "u_ablation-2gpu"])
def test_a_dry_run_says_of_every_point_whether_it_fits(capsys, name):
    assert run.main([name, "--dry-run"]) == 0
    check_dry_run(name, capsys.readouterr().out)


@pytest.mark.slow
def test_every_dry_run_takes_less_than_a_minute_of_a_cpu(capsys):
    for name in points.names():
        started = time.process_time()
        assert run.main([name, "--dry-run"]) == 0
        assert time.process_time() - started < 60, name
        check_dry_run(name, capsys.readouterr().out)


@pytest.mark.slow
def test_the_largest_dry_run_takes_less_than_a_minute_of_a_cpu_in_a_new_process():
    """Where nothing of it was counted before."""

    def count(name):
        path, variant = points.find(name)
        experiment = points.read(path, variant)
        return len(points.expand(experiment, path.parent)) if experiment.hardware is not None else 0

    largest = max(points.names(), key=count)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "experiments.run", largest, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    check_dry_run(largest, done.stdout)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60, largest


def test_an_experiment_s_files_are_copied_with_those_it_is_like(tmp_path, capsys):
    """And can be read there as they were; nothing is run."""
    assert run.main(["trl_scaling-cpu", "--copy-to", str(tmp_path / "copies")]) == 0
    assert capsys.readouterr().out == ""
    copies = {path.name: path.read_text() for path in (tmp_path / "copies").iterdir()}
    names = ("trl_scaling.yaml", "trl_qwen3_8b_1m.yaml", "table3_llama3_8b.yaml")
    assert copies == {name: (ROOT / "experiments" / name).read_text() for name in names}
    assert points.read(tmp_path / "copies" / "trl_scaling.yaml", "cpu") == points.read(*points.find("trl_scaling-cpu"))
    assert run.main(["trl_scalling", "--copy-to", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists() and "no experiment 'trl_scalling'" in capsys.readouterr().err


def test_variants_are_merged_over_what_they_are_like(tmp_path):
    write(
        tmp_path, "first", timeout_s=9, common={"seconds": 1, "ending": "error"}, grid={"tokens": ["1K", "2K"]},
        variants={"cpu": {"common": {"ending": None}, "grid": {"tokens": ["4K"]}}, "other": {"about": "another"}},
    )
    second = tmp_path / "second.yaml"
    second.write_text(yaml.safe_dump({"about": "of it", "like": "first", "common": {"seconds": 2}, "variants": {"other": None}}))
    path, variant = points.find(f"{second}:cpu")
    assert points.name_of(path, variant) == "second-cpu"
    whole, part = points.read(path), points.read(path, variant)
    assert whole.about == part.about == "of it" and whole.timeout_s == 9 and set(whole.variants) == {"cpu"}
    assert whole.common == {"seconds": 2, "ending": "error"} and whole.grid == {"tokens": ["1K", "2K"]}
    assert part.common == {"seconds": 2} and part.grid == {"tokens": ["4K"]}
    for wrong, message in ((f"{second}:other", "no experiment"), ("u_ablation-3gpu", "no experiment 'u_ablation-3gpu'")):
        with pytest.raises(ConfigError, match=message):
            points.find(wrong)
    for like, message in (("second", "like itself"), ("third", "third.yaml is not there")):
        second.write_text(yaml.safe_dump({"about": "of it", "like": like}))
        with pytest.raises(ConfigError, match=message):
            points.read(second)


@pytest.mark.slow
def test_points_that_the_planner_says_do_not_fit_run_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    from tests import runner_points

    def predict(point, machine):
        return {"machine": str(machine), "fits": point.tokens < 2048, "limit": "host", "device_gib": 1.0, "device_usable_gib": 77.0,
                "host_gib": 9.0, "host_usable_gib": machine.host_gib, "time_s": 1.0, "tokens_per_s_per_gpu": 2.0}  # fmt: skip

    monkeypatch.setattr(runner_points, "predict", predict, raising=False)
    path = write(tmp_path, common={"processes": 2}, grid={"tokens": ["1K", "2K"]}, hardware={"gpus": "8xH100-80GB", "host_gib": 5.0})
    assert run.main(arguments(path, tmp_path, "--dry-run")) == 0
    told = capsys.readouterr().out
    assert "fits: device 1.0 of 77 GiB" in told and "does not fit, host memory runs out" in told and "2 x H100-80GB, 5 GiB" in told
    assert run.main(arguments(path, tmp_path)) == 0
    assert [(r["tokens"], r["outcome"], r["predicted"]["fits"]) for r in results(tmp_path)] == [(1024, "ok", True), (2048, "ok", False)]
    assert run.main(arguments(path, tmp_path, "--skip-unfit", "--dry-run")) == 0
    assert "1 points" in capsys.readouterr().out


def test_points_are_crossed_with_the_grid(tmp_path):
    path = write(
        tmp_path, common={"seconds": 1}, points=[{"processes": 2}, {"processes": 1}], grid={"tokens": ["1K", 2048]}
    )
    specs = points.expand(points.read(path), tmp_path)
    assert [(s.point.processes, s.point.tokens) for s in specs] == [(2, 1024), (2, 2048), (1, 1024), (1, 2048)]
    assert [s.label for s in specs][:2] == ["upipe 1K processes=2", "upipe 2K processes=2"]
    assert points.select(specs, None, ["2K"]) == [specs[1], specs[3]]
    again = points.expand(points.read(write(tmp_path, common={"processes": 2, "seconds": 1}, grid={"tokens": [1024]})), tmp_path)
    assert again[0].key == specs[0].key


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "nothing"}, "there are: train"),
        ({"common": {"procesess": 2}}, "did you mean 'processes'"),
        ({"grid": {"tokens": []}}, "expected a list"),
        ({"grid": {"tokens": ["1K", 1024]}}, "same settings"),
        ({"common": {"tokens": "1 KB"}}, "not a length"),
        ({"common": {"ending": "badly"}}, "allowed are"),
        ({"sweep": {}}, "unknown key 'sweep'"),
    ],
)
def test_bad_experiments_are_refused(tmp_path, capsys, keys, message):
    assert run.main([str(write(tmp_path, **keys)), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy-cpu", "--method", "fpdt"], "there are upipe"),
        (["toy-cpu", "--tokens", "7K"], "there are 512, 1K"),
        (["toy"], "no experiment 'toy'"),
        (["toy-cpu", "--timeout", "0"], "must be positive"),
    ],
)
def test_bad_requests_are_refused(capsys, words, message):
    assert run.main([*words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="this machine has the GPUs")
def test_too_few_gpus_are_said_before_anything_runs(tmp_path, capsys):
    assert run.main(arguments("llama3_8b_4layers-2gpu", tmp_path)) == 2
    assert "needs 2 GPUs" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def made_record(**values):
    machine = {"gpus": 0, "commit": COMMIT, "command": "c", "date": "2026-01-01T00:00:00Z", "versions": {"torch": "2"}}
    return records.Record(run_id="r", experiment="e", model="llama3-8b", tokens=131072).updated({**machine, **values})


def test_merge_appends_once_and_refuses_what_is_invalid(tmp_path, capsys):
    source, target = tmp_path / "from", tmp_path / "into"
    for point in ("a", "b"):
        records.append(made_record(point=point), source)
    records.append(made_record(point="a"), target)
    with open(source / "e.jsonl", "a") as file:
        file.write(json.dumps(made_record(point="c", outcome="failed").to_dict()) + "\n")
        file.write(json.dumps(made_record(point="b", loss=2.0).to_dict()) + "\n")
    assert merge.main([str(source), "--into", str(target)]) == 1
    captured = capsys.readouterr()
    assert "1 records appended, 1 were there already, 2 refused" in captured.out
    assert "without a reason" in captured.err and "another record of point b" in captured.err
    assert [r["point"] for r in records.load(target / "e.jsonl")] == ["a", "b"]


def test_table_shows_the_last_record_of_a_point_and_published_numbers_apart(tmp_path, capsys):
    gpu = {"gpu": "NVIDIA H200", "gpus": 2, "sp": 2, "dp": 1, "warmup_steps": 1}
    timed = {"time_s": 16.0, "times_s": [16.0], "tokens_per_s_per_gpu": 4096.0}
    full = {**gpu, **timed, "peak_gib": 21.5, "states_gib": 11.5, "peak_above_states_gib": 10.0, "reserved_gib": 30.0}
    records.append(made_record(point="a", **gpu, outcome="failed", reason="once"), tmp_path)
    records.append(made_record(point="a", **full), tmp_path)
    records.append(made_record(point="b", **gpu, outcome="oom_device", reason="x").updated({"tokens": 262144}), tmp_path)
    assert table.main(["e", "--results", str(tmp_path), "--compare"]) == 0
    out = capsys.readouterr().out
    measured, reported = out.split("reported (published")
    assert "4096.0, 21.50 GiB" in measured and "oom_device" in measured and "failed" not in measured
    assert "128K" in measured and "2281.05" not in measured
    assert "2281.05" in reported and "qwen3-32b" not in reported
    assert table.main(["nothing", "--results", str(tmp_path)]) == 2
    assert "experiments with records: e" in capsys.readouterr().err


def test_interrupted_runner_ends_its_point(tmp_path):
    path = write(tmp_path, points=[{"ending": "hang"}])
    runner = subprocess.Popen([sys.executable, "-m", "experiments.run", *arguments(path, tmp_path)], cwd=ROOT)
    while not list((tmp_path / "logs").glob("made/*/*/log.txt")):
        assert runner.poll() is None
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=30) == 130
    # A launcher that was just being started notices by itself that its runner is gone.
    deadline = time.monotonic() + 20
    while processes_naming(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_naming(str(tmp_path)) == [] and results(tmp_path) == []
