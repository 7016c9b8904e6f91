"""The block benchmark at toy size: what it compares is right, what it records follows from what it measured."""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from experiments import block, block_methods, block_report, block_trace
from experiments.block_methods import Block, Inputs, Mode
from experiments.stack_methods import Setting
from upipe import kernels, records
from upipe.config import ConfigError

MODES = ("device", "host", "device:overlap=off", "host:overlap=off,dx=bf16")


def options(folder, *more):
    """Of a run on the toy; outside of a repository the code is given a name."""
    given = block.parser().parse_args(["--model", "toy", "--results", str(folder), *more])
    try:
        block.settle(given)
    except ConfigError as error:
        if "not a git checkout" not in str(error):
            raise
        given.commit = "untracked"
        block.settle(given)
    return given


def _bench(folder, *more):
    """-> what rank 0 printed, what every rank returned."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        done = block.run(options(folder, *more), "test")
    return printed.getvalue(), done


def _run(folder, arguments):
    return _bench(folder, *arguments)


@pytest.mark.parametrize("ranks,kernel,modes", [
    (1, "reference", ("device", "host")), pytest.param(2, "flash", (*MODES, "device:U=4"), marks=pytest.mark.slow),
])
def test_every_method_and_mode(worlds, tmp_path, ranks, kernel, modes):
    arguments = ["--tokens", "64", "128", "--dtype", "float32", "--kernels", kernel, "--rounds", "3", "--modes", *modes]
    results = worlds(ranks).run(_run, folder=str(tmp_path), arguments=arguments)
    printed, done = results[0]
    assert all(text == "" for text, _ in results[1:])
    found = records.load(tmp_path / "block.jsonl")
    assert found == json.loads(json.dumps(done))

    plain = "ulysses" if ranks > 1 else "none"
    wanted = {(plain, None, 2), ("kernel", "device", 2), ("kernel", "host", 1)}
    wanted |= {("upipe", mode, 1 if mode.startswith("host") else 2) for mode in modes}
    for tokens in (64, 128):
        here = [r for r in found if r["tokens"] == tokens]
        assert {(r["method"], r["mode"], r["forwards"]) for r in here} == wanted and len(here) == len(wanted)
        for r in here:
            _check_numbers(r, here, plain)
    assert {(r["kernel"], r["sp"], r["dp"]) for r in found} == {(kernel, ranks, 1)}
    assert len({r["run_id"] for r in found}) == 1 and len({r["point"] for r in found}) == len(found)
    settings = {r["mode"]: (r["attention_output"], r["overlap"], r["dx"], r["heads_per_stage"]) for r in found if r["method"] == "upipe"}
    assert settings["device"] == ("device", True, "slabs", ranks) and settings["host"] == ("host", True, "slabs", ranks)
    if ranks == 2:
        assert settings["device:U=4"] == ("device", True, "slabs", 4)
        assert settings["host:overlap=off,dx=bf16"] == ("host", False, "bfloat16", 2)

    lines = block_report.table(found).splitlines()
    assert len(lines) == 1 + len(found) and printed.rstrip().endswith(block_report.table(found))
    for line, r in zip(lines[1:], found):
        assert f"{r['time_s'] * 1e3:.2f}" in line.split() and f"{r['over_kernel']:.3f}" in line.split()
    timed = [line.split(": ")[1] for line in printed.splitlines() if line.startswith(f"64 {kernel} round")]
    for line, first in zip(timed[:: len(wanted)], (plain, "upipe device", "upipe host"), strict=True):
        assert line.startswith(first), "who begins a round changes"


def _check_numbers(r, here, plain):
    assert (r["gpus"], r["peak_units"], r["peak_above_inputs_gib"], r["reserved_gib"]) == (0, None, None, None)
    assert r["dtype"] == "float32" and r["layers"] == 1 and r["warmup_steps"] == 2
    assert len(r["times_s"]) == 3 and r["time_s"] == statistics.median(r["times_s"])
    assert (r["least_s"], r["most_s"]) == (min(r["times_s"]), max(r["times_s"]))
    parts = r["parts_s"]
    assert parts["first_forward"] > 0 and parts["backward"] > 0
    assert r["wall_s"] >= r["least_s"] and sum(parts.values()) < 3 * r["most_s"]
    if r["method"] == "kernel" and r["forwards"] == 1:
        assert parts["second_forward"] < parts["first_forward"] / 5
    (base,) = [b for b in here if b["method"] == plain]
    (limit,) = [b for b in here if b["method"] == "kernel" and b["forwards"] == r["forwards"]]
    assert r["over_ulysses"] == pytest.approx(r["time_s"] / base["time_s"])
    assert r["over_kernel"] == pytest.approx(r["time_s"] / limit["time_s"])
    by_round = [mine / its for mine, its in zip(r["times_s"], limit["times_s"])]
    assert r["over_kernel_rounds"] == pytest.approx([min(by_round), max(by_round)])
    work = r["attention_tflops_per_s"] * 1e12 * r["time_s"] * r["sp"]
    assert work == pytest.approx((r["forwards"] + 2.5) * 2 * r["tokens"] ** 2 * 8 * 16)
    if r["method"] in ("upipe", plain):
        assert (r["dx_difference"] is None) == (r["method"] == plain)
        assert r["dx_difference"] is None or r["dx_difference"] < 1e-4


def test_bf16(worlds, tmp_path):
    arguments = ["--tokens", "128", "--kernels", "flash", "--rounds", "1", "--modes", *MODES]
    printed, _ = worlds(2).run(_run, folder=str(tmp_path), arguments=arguments)[0]
    assert printed.count("right at 128 tokens") == 1 + len(MODES)
    assert {r["dtype"] for r in records.load(tmp_path / "block.jsonl")} == {"bfloat16"}


def test_published_shapes():
    assert {name: (block_methods.preset_shapes()[preset]["hidden_size"], block_methods.preset_shapes()[preset]["num_attention_heads"])
            for name, preset in block_methods.PRESETS.items() if name != "toy"} == {"llama3_8b": (4096, 32), "qwen3_32b": (5120, 64)}


def _toy(dtype=torch.float32):
    return Block("toy", dtype, torch.device("cpu"))


def _wrong_methods():
    toy, kernel = _toy(), kernels.select("reference", kernels.Case.of(torch.empty(0), 16))
    with block_methods.made(toy, kernel, ["ulysses", "kernel"], []) as methods:
        assert set(block_methods.check(toy, methods, 32)) == {methods[0].label}
        plain = methods[0]
        plain.attention.scaling *= 1.01
        with pytest.raises(AssertionError, match="relative errors"):
            block_methods.check(toy, methods, 32)
        plain.attention.scaling /= 1.01

        plain.forwards = 1
        with pytest.raises(AssertionError, match="'forward': .* forwards and a backward"):
            block_methods.check(toy, methods, 32)
        plain.forwards = 2

        step = plain.step

        def careless(inputs, mark=block_methods.nothing, keep=block_methods.nothing):
            step(inputs, mark, keep)
            inputs.grad.mul_(2)

        plain.step = careless
        with pytest.raises(AssertionError, match="wrote into"):
            block_methods.check(toy, methods, 32)
        rows = torch.randn(4, 8)
        assert block.differs(rows * 1.01, rows, plain) == pytest.approx(0.01, rel=1e-3)
        assert block.differs(None, rows, plain) is None and block.differs(rows, None, plain) is None
        for bad in (rows * 1.2, rows * float("nan")):
            with pytest.raises(AssertionError, match="differs from the first"):
                block.differs(bad, rows, plain)
    assert "forward" not in vars(kernel) and methods[0].implementation not in block_methods.ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_a_wrong_method_is_never_timed(worlds):
    worlds(1).run(_wrong_methods)
    worlds(2).run(_wrong_methods)


class _Traced(torch.autograd.Function):
    """2x, which notes in its backward whether its result is alive."""

    alive: list[bool] = []
    result: weakref.ref

    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        _Traced.result = weakref.ref(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        _Traced.alive.append(_Traced.result() is not None)
        return 2 * grad


def test_a_step_is_a_checkpointed_layers(monkeypatch):
    """Two forwards, the first without a graph, each in its context; the result is gone when the backward starts."""
    seen = []
    monkeypatch.setattr(_Traced, "alive", [])

    @contextlib.contextmanager
    def context(name):
        seen.append(name)
        yield
        seen.append(f"{name} over")

    def run(inputs):
        seen.append(f"forward {torch.is_grad_enabled()}")
        return _Traced.apply(inputs.x)

    x, grad = torch.randn(1, 3, 4, requires_grad=True), torch.randn(1, 3, 4)
    inputs = Inputs(3, x, grad, *[torch.zeros(())] * 3)
    block_methods.checkpointed(run, inputs, lambda: (context("first"), context("again")), mark=lambda: seen.append("mark"))
    assert seen == ["first", "forward False", "first over", "mark", "again", "forward True", "again over", "mark", "mark"]
    assert _Traced.alive == [False] and torch.equal(x.grad, 2 * grad)
    x.grad, kept = None, []
    block_methods.checkpointed(run, inputs, lambda: (nullcontext(), nullcontext()), keep=kept.append)
    assert len(kept) == 2 and _Traced.alive == [False, True]


def _faked_memory(folder):
    """A run whose peaks are made up, as if on GPUs, through the records and the table."""
    P = dist.get_world_size()
    given = options(
        folder, "--tokens", "64", "128", "256", "--dtype", "float32", "--kernels", "flash", "--rounds", "1", "--modes", "device"
    )
    made_with = {**block.environment("test", given.commit, gpus=0), "gpu": "a GPU", "gpus": P}
    bench = block.Bench(given, _toy(), "run", made_with)
    measure = block.peak

    def faked(method, inputs):
        unit = inputs.x.numel() * 2
        above = {"upipe": 2.5 * unit + 3000, "kernel": 7.0 * unit}.get(method.name, 10 * unit + 100)
        _, rows = measure(method, inputs)
        return {"above": above, "reserved_above": above + unit, "allocated": above + 1e6, "reserved": above + 2e6, "pinned": 4096}, rows

    block.peak = faked
    try:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            bench.blocks()
        return block_report.table(bench.done)
    finally:
        block.peak = measure


def test_peaks_in_bytes_gib_and_units(worlds, tmp_path):
    table = worlds(2).run(_faked_memory, folder=str(tmp_path))[0]
    found = records.load(tmp_path / "block.jsonl")
    for r in found:
        unit = r["tokens"] // 2 * 64 * 2
        above = {"upipe": 2.5 * unit + 3000, "kernel": 7 * unit, "ulysses": 10 * unit + 100}[r["method"]]
        assert r["peak_above_inputs_bytes"] == above and r["peak_above_inputs_gib"] == pytest.approx(above / 2**30)
        assert r["peak_units"] == pytest.approx(above / unit) and r["reserved_units"] == pytest.approx(above / unit + 1)
        assert r["host_pinned_gib"] == (4096 / 2**30 if r["method"] == "upipe" else None)
        assert r["inputs_gib"] * 2**30 == 2 * unit * 2 + 2 * r["tokens"] // 2 * 16 * 4 + r["tokens"] // 2 * 8
        assert ("slope_units" in r) == (r["tokens"] > 64)
        if "slope_units" in r:
            assert r["slope_tokens"] == [r["tokens"] // 2, r["tokens"]]
            slope, constant = {"upipe": (2.5, 3000), "kernel": (7, 0), "ulysses": (10, 100)}[r["method"]]
            assert r["slope_units"] == pytest.approx(slope) and r["constant_gib"] == pytest.approx(constant / 2**30, abs=1e-12)
            assert r["reserved_slope_units"] == pytest.approx(slope + 1)
    assert "slope u" in table.splitlines()[0]


def test_slopes_are_between_256k_and_512k_where_both_ran():
    def record(tokens, peak, **more):
        return {"tokens": tokens, "peak_above_inputs_gib": peak, "reserved_above_inputs_gib": peak, "hidden_size": 4096, "sp": 2,
                "ring": 1, "run_id": "r", "model": "m", "kernel": "fa4", "method": "upipe", "mode": "device", "heads_per_stage": 2,
                "dtype": "bfloat16"} | more

    K = 1024                                         # u is 1 GiB at 256K: 128K local tokens of 8 KiB
    several = [record(n * K, peak) for n, peak in ((64, 9.0), (256, 2.75), (512, 5.25), (1024, 99.0))]
    (end,) = block_report.slopes(several).values()
    assert end["slope_tokens"] == [256 * K, 512 * K]
    assert end["slope_units"] == pytest.approx(2.5) and end["constant_gib"] == pytest.approx(0.25)
    (end,) = block_report.slopes([record(64 * K, 1.0), record(256 * K, 4.0), record(128 * K, 2.0)]).values()
    assert end["slope_tokens"] == [128 * K, 256 * K] and end["slope_units"] == pytest.approx(4.0)
    assert block_report.slopes([record(64 * K, 1.0), record(128 * K, 2.0, mode="host"), record(128 * K, None)]) == {}


def test_ratios_take_the_kernel_of_as_many_forwards():
    def record(method, forwards, *times):
        return {"method": method, "forwards": forwards, "times_s": list(times), "time_s": statistics.median(times)}

    rows = [record("ulysses", 2, 4.0, 8.0, 6.0), record("kernel", 2, 2.0, 4.0, 3.0), record("kernel", 1, 1.0, 1.0, 2.0)]
    got = block_report.ratios(record("upipe", 1, 3.0, 2.0, 4.0), rows)
    assert got == {"over_ulysses": 0.5, "over_ulysses_rounds": [0.25, 0.75], "over_kernel": 3.0, "over_kernel_rounds": [2.0, 3.0]}
    assert block_report.ratios(record("upipe", 2, 3.0), rows[1:])["over_kernel"] == 1.0
    assert "over_ulysses" not in block_report.ratios(record("upipe", 2, 3.0), rows[1:])
    assert block_report.ratios({"times_s": None}, rows) == {}


def test_modes():
    assert Mode.parse("device") == Mode() and Mode.parse("host:overlap=off,dx=bf16,U=8") == Mode("host", False, "bf16", 8)
    for text in ("device", "host", "device:U=4", "host:U=8,overlap=off,dx=bf16"):
        assert str(Mode.parse(text)) == text
    for text in ("disk", "host:overlap", "host:overlap=maybe", "device:dx=fp8", "device:U=x", "device:V=3"):
        with pytest.raises(ConfigError, match="mode"):
            Mode.parse(text)
    assert {f.name for f in dataclasses.fields(Mode)} == {"attention_output", "overlap", "dx", "heads_per_stage"}


def test_intervals_against_counting():
    """On a grid of integers a span is a set of cells."""
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([(s := rng.randrange(30), s + rng.randrange(6)) for _ in range(rng.randrange(8))] for _ in range(2))
        cells = [{c for start, end in spans for c in range(start, end)} for spans in (a, b)]
        joined = block_trace.union(a)
        assert {c for s, e in joined for c in range(s, e)} == cells[0]
        assert all(s < e for s, e in joined) and all(x[1] < y[0] for x, y in itertools.pairwise(joined))
        assert block_trace.length(a) == len(cells[0])
        assert block_trace.overlap(a, b) == len(cells[0] & cells[1])
        got = block_trace.exposure(a, b)
        assert got["total_ms"] * 1e3 == pytest.approx(len(cells[0]))
        assert got["exposed_ms"] * 1e3 == pytest.approx(len(cells[0] - cells[1]))
        assert got["exposed_ratio"] == (pytest.approx(len(cells[0] - cells[1]) / len(cells[0])) if cells[0] else None)


def event(category, name, start, duration):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


TRACE = [
    event("kernel", "ncclDevKernel_AllReduce", 0, 50),
    event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 60, 5),
    event("kernel", "flash_fwd", 100, 40),
    event("kernel", "flash_fwd", 160, 40),
    event("kernel", "ncclDevKernel_SendRecv", 130, 30),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 150, 20),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 210, 10),
    event("gpu_memset", "Memset (Device)", 230, 10),
    event("cuda_runtime", "cudaLaunchKernel", 90, 400),
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 900},
    {"ph": "M", "name": "process_name"},
]


def test_trace_summary():
    with pytest.raises(ValueError, match="no spin_kernel"):
        block_trace.after_marker(TRACE[2:])
    got = block_trace.summary(block_trace.after_marker(TRACE))
    assert got["window_ms"] == pytest.approx(0.140) and got["busy_ms"] == pytest.approx(0.120) and got["idle_ms"] == pytest.approx(0.020)
    assert got["compute_ms"] == pytest.approx(0.100)
    assert got["nccl"] == pytest.approx({"total_ms": 0.030, "exposed_ms": 0.020, "exposed_ratio": 2 / 3})
    assert got["host_copies"] == pytest.approx({"total_ms": 0.020, "exposed_ms": 0.010, "exposed_ratio": 0.5})
    assert got["communication"] == pytest.approx({"total_ms": 0.040, "exposed_ms": 0.020, "exposed_ratio": 0.5})
    assert got["top"][0] == {"name": "flash_fwd", "ms": pytest.approx(0.080), "share": pytest.approx(4 / 7), "count": 2}
    assert [row["name"] for row in got["top"][1:3]] == ["ncclDevKernel_SendRecv", "Memcpy DtoH (Device -> Pinned)"]
    alone = block_trace.summary([event("kernel", "gemm", 5, 10)])
    assert alone["communication"] == {"total_ms": 0.0, "exposed_ms": 0.0, "exposed_ratio": None}
    with pytest.raises(ValueError, match="no GPU event"):
        block_trace.summary(TRACE[-3:])


def test_kernel_rates(worlds, tmp_path):
    arguments = ["--kernel-rates", "--tokens", "64", "256", "--kernels", "reference", "flash", "--dtype", "float32", "--rounds", "2"]
    printed, _ = worlds(2).run(_run, folder=str(tmp_path), arguments=arguments)[0]
    found = records.load(tmp_path / "block.jsonl")
    assert [(r["kernel"], r["tokens"]) for r in found] == list(itertools.product(("reference", "flash"), (64, 256)))
    for r in found:
        flops = 2 * r["tokens"] ** 2 * 16
        assert r["forward_tflops_per_s"] * r["forward_s"] * 1e12 == pytest.approx(flops)
        assert r["backward_tflops_per_s"] * r["backward_s"] * 1e12 == pytest.approx(2.5 * flops)
        assert (r["method"], r["sp"], r["dp"], len(r["times_s"])) == ("kernel", 1, 2, 2)
    assert printed.rstrip().endswith(block_report.table(found)) and len(block_report.table(found).splitlines()) == 5


def test_refusals(tmp_path, capsys):
    for arguments, says in (
        (["--warmup", "0"], "warm up after it"), (["--rounds", "0"], "at least 1"), (["--modes", "disk"], "device or host"),
        (["--tokens", "many"], "many"), (["--show", "--results", str(tmp_path)], "no records"),
        *([(["--profile"], "needs a GPU")] if not torch.cuda.is_available() else []),
    ):
        assert block.main(["--model", "toy", *arguments]) == 2
        assert says in capsys.readouterr().err


def _refused_in_a_run(folder):
    for arguments, says in (
        (["--tokens", "65"], "multiple of 2"), (["--tokens", "64", "--modes", "device:U=3"], "heads_per_stage=3"), ([], "kernel='cudnn'"),
    ):
        with pytest.raises(ValueError, match=says):
            _bench(folder, *(["--kernels", "flash"] if arguments else []), *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN's kernel runs here")
def test_refusals_of_a_run(worlds, tmp_path):
    worlds(2).run(_refused_in_a_run, folder=str(tmp_path))
    assert not (tmp_path / "block.jsonl").exists()


@pytest.mark.slow
def test_the_command(tmp_path):
    """Alone, then the table and the picture from its records."""
    is_checkout = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True).returncode == 0
    common = [sys.executable, "-m", "experiments.block", "--results", str(tmp_path)]
    arguments = ["--model", "toy", "--tokens", "64", "--kernels", "reference", "--memory-only"]
    arguments += [] if is_checkout else ["--commit", "untracked"]
    done = subprocess.run([*common, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = records.load(tmp_path / "block.jsonl")
    assert [r["method"] for r in found] == ["none", "upipe", "upipe", "kernel", "kernel"] and {r["time_s"] for r in found} == {None}
    table = block_report.table(found)
    assert done.stdout.rstrip().endswith(table)
    shown = subprocess.run([*common, "--show", "--plot", str(tmp_path / "block.png")], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and table in shown.stdout, shown.stderr[-2000:]
    assert (tmp_path / "block.png").read_bytes().startswith(b"\x89PNG")


def test_plot(tmp_path):
    """Curves are what the records say."""
    from matplotlib import pyplot

    from experiments import block_plot

    base = {"scope": "block", "kernel": "fa4", "model": "m", "sp": 2, "gpu": None, "dtype": "bfloat16", "time_s": 1.0}
    found = [
        base | {"method": method, "mode": mode, "tokens": n, "over_ulysses": ratio, "peak_units": peak}
        for method, mode, n, ratio, peak in (
            ("ulysses", None, 128, 1.0, 10.0), ("upipe", "host", 256, 0.8, 2.5), ("upipe", "host", 128, 0.9, 2.6)
        )
    ]
    figure, axis = pyplot.subplots()
    block_plot._panel(axis, found, "peak_units", "peak")
    assert {line.get_label(): line.get_xydata().tolist() for line in axis.lines} == {
        "ulysses": [[128, 10.0]], "upipe host": [[128, 2.6], [256, 2.5]]}
    pyplot.close(figure)
    block_plot.draw(found, str(tmp_path / "all.svg"))
    assert "time over Ulysses" in (tmp_path / "all.svg").read_text() or (tmp_path / "all.svg").stat().st_size > 1000
    with pytest.raises(ValueError, match="nothing to draw"):
        block_plot.draw([base | {"scope": "kernel"}], str(tmp_path / "none.svg"))


def parts_of(script):
    """What a script says it knows when it is given none of it."""
    told = subprocess.run(["bash", Path(block.__file__).with_name(script), "nonsense"], capture_output=True, text=True)
    assert told.returncode == 2
    return re.split(r",? or |, ", told.stderr.split(": ", 1)[1].strip())


SCRIPTS = {script: parts_of(script) for script in ("block-2gpu.sh", "eight-gpu.sh", "stack-2gpu.sh")}


def test_the_scripts_tell_every_part():
    for script, parts in SCRIPTS.items():
        text = Path(block.__file__).with_name(script).read_text()
        assert sorted(parts) == sorted(re.findall(r"^([\w-]+)\)", text, re.MULTILINE)), script
        assert all(re.search(rf"^#   {part} ", text, re.MULTILINE) for part in parts), script


@pytest.mark.parametrize("script, part", [(script, part) for script, parts in SCRIPTS.items() for part in parts])
def test_the_scripts_commands_are_understood(tmp_path, script, part):
    """The scripts' parts with launchers that only write down what they were to run."""
    log = tmp_path / "log"
    for name in ("torchrun", "python"):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
        stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", Path(block.__file__).with_name(script), part, "--results", "out"], check=True, env=environment)
    for line in log.read_text().splitlines():
        words = line.split()
        module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        made = importlib.import_module(module)
        given = made.parser().parse_args(arguments)
        assert str(given.results) == "out"
        if module == "experiments.block":
            options("out", *(word for word in arguments if word != "--profile"))
        # Which needs a GPU.
        given.profile = False
        if module in ("experiments.stack", "experiments.gradients"):
            try:
                made.settle(given)
            except ConfigError as error:
                assert "not a git checkout" in str(error)
        for setting in getattr(given, "settings", ()):
            Setting.parse(setting)
    if script == "eight-gpu.sh":
        log.rename(tmp_path / "ran")
        shown = subprocess.run(
            ["bash", Path(block.__file__).with_name(script), part, "--show-commands", "--results", "out"], check=True, env=environment,
            capture_output=True, text=True,
        ).stdout.splitlines()
        assert not log.exists() and [line.split(" ", 1)[1] for line in shown] == (tmp_path / "ran").read_text().splitlines()
