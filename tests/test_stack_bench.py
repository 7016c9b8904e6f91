"""The whole-model benchmark and the ladder at toy size: every setting trains the same model, records follow from what was
measured, the search finds the longest length."""

import contextlib
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from experiments import ladder, stack, stack_report
from experiments.alst import chunks
from experiments.runs import begun, new_run_id
from experiments.stack_methods import Engine, Setting, Shape, Together, ZeroAttention, named_kernel
from tests.plain import assert_close
from tests.sharded import gradients
from tests.world import RankFailure, World
from upipe import kernels, records
from upipe.config import ConfigError

GIB = 2**30
SETTINGS = (
    "alst", "upipe:device", "upipe:host", "upipe:host=1,offload=pageable", "upipe:device,U=H,offload=none,overlap=off",
    "upipe:host,dx=bf16,prefetch=off",
)


def named(parser, settle, arguments):
    """Settled options; outside of a repository the code is given a name."""
    given = parser().parse_args(arguments)
    try:
        settle(given)
    except ConfigError as error:
        if "not a git checkout" not in str(error):
            raise
        given = parser().parse_args([*arguments, "--commit", "untracked"])
        settle(given)
    return given


TOY = ("--model", "toy", "--layers", "2", "--dtype", "float32")


def _stack(folder, arguments):
    """-> what was printed, the records, what disagrees."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        done = stack.run(named(stack.parser, stack.settle, [*TOY, "--results", folder, *arguments]), "test")
    return printed.getvalue(), done, stack_report.disagreements(done)


# settings


def test_settings_are_written_as_they_are_read():
    assert Setting.parse("upipe") == Setting()
    assert Setting.parse("upipe:host=3,U=8,overlap=off,dx=bf16,offload=pageable,keep=2,pairs=1,prefetch=off,tiles=mlp") == Setting(
        "upipe", 3, 8, False, "bf16", True, "pageable", 2, False, "mlp", pairs=1
    )
    assert Setting.parse("upipe:host,U=H,layer=fused").heads_per_stage == -1 and Setting.parse("upipe:host").host_layers is None
    assert Setting.parse("plain:checkpoint=off").offload == "none"
    for text in (
        *SETTINGS, "plain:checkpoint=off,tiles=off,loss=hf", "ulysses:tiles=loss", "alst:offload=none,tiles=off",
        "upipe:layer=fused", "upipe:layer=fused,prefetch=off,within=on,offload=pageable", "upipe:host,ring=2", "ring",
        "usp:ring=2", "fpdt:chunk=4096,tiles=off", "native:offload=none", "ulysses:rope=model",
        "upipe:host,offload=transformers", "ring:offload=deepspeed",
        "upipe:host,blocks=64K,layer=fused", "fpdt:blocks_backward=auto", "ring:blocks=32K,blocks_backward=none",
        *(rung.setting for preset in ladder.PRESETS.values() for rung in preset.rungs),
    ):
        setting = Setting.parse(text)
        assert Setting.parse(str(setting)) == setting
    for text, says in (
        ("fsdp", "alst, plain, upipe, ulysses, ring"), ("alst:U=4", "none of"), ("upipe:host=x", "host"),
        ("upipe:overlap=maybe", "on|off"),
        ("upipe:device=3", "device"), ("upipe:host,checkpoint=off", "checkpoint=on"),
        ("upipe:checkpoint=off,offload=pinned", "checkpoint=on"),
        ("alst:offload=pageable", "pinned|none"), ("alst:tiles=loss", "on|off"), ("ulysses:host", "none of"),
        ("ring:ring=2", "none of"), ("upipe:ring=0", "ring=RANKS"), ("fpdt:chunk=x", "TOKENS"), ("native:rope=model", "none of"),
        ("upipe:layer=fused,dx=bf16", "dx=gemm"), ("upipe:layer=fused,within=on", "prefetch=off"),
        ("upipe:blocks=0", "TOKENS|none|auto"), ("ring:blocks=wide", "TOKENS|none|auto"), ("native:blocks=64K", "none of"),
        ("upipe:offload=disk", "none|pinned|pageable"), ("upipe:offload=deepspeed,layer=fused", "layer=parts"),
        ("ring:offload=transformers,keep=2", "without keep"), ("alst:offload=transformers", "pinned|none"),
    ):
        with pytest.raises(ConfigError, match=says.replace("|", r"\|")):
            Setting.parse(text)


def test_a_setting_s_blocks_are_those_of_its_kernel():
    groups = SimpleNamespace(ring_size=1)
    engine = SimpleNamespace(kernel=named_kernel("reference"), device=torch.device("cpu"), groups=groups, _blocked={}, _on_ring={})
    whole, cut = Setting.parse("upipe"), Setting.parse("upipe:blocks=32,blocks_backward=16")
    assert Engine.kernel_of(engine, whole) is engine.kernel
    assert str(Engine.kernel_of(engine, cut)) == "reference, forward in blocks of 32, backward in blocks of 16"
    assert Engine.kernel_of(engine, cut) is Engine.kernel_of(engine, cut)
    engine.kernel = ZeroAttention(named_kernel("cudnn"))
    assert Engine.kernel_of(engine, cut).measured_as == "cudnn"


def test_chunks_are_as_many_as_torch_makes():
    for rows in range(1, 40):
        for wanted in range(1, 12):
            assert chunks(rows, wanted) == len(torch.zeros(rows, 1).chunk(wanted))


def test_zero_attention_allocates_as_the_kernel_and_answers_zeros():
    fa4 = named_kernel("fa4")
    q, k = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16)
    kernel = ZeroAttention(fa4)
    out, lse = kernel.forward(q, k, k, 0.25)
    assert out.shape == q.shape and not out.any() and lse.shape == (1, 4, 64) and not lse.any()
    for given in ({}, {"dq": torch.ones_like(q), "dk": torch.ones_like(k), "dv": torch.ones_like(k)}):
        grads = kernel.backward(out, q, k, k, out, lse, 0.25, **given)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape] and not any(g.any() for g in grads)
    with pytest.raises(ValueError, match="not been measured"):
        ZeroAttention(named_kernel("flash")).backward(out, q, k, k, out, lse, 0.25)
    assert not ZeroAttention(named_kernel("flash"), exact=False).backward(out, q, k, k, out, lse, 0.25)[0].any()
    with pytest.raises(ConfigError, match="fa4"):
        named_kernel("fa9")


# every setting trains the same model

ENGINES = (
    ("alst",), ("alst:offload=none,tiles=off",), ("ulysses:tiles=loss",), ("ulysses:checkpoint=off,tiles=off,loss=hf",),
    ("upipe:device", "upipe:host=1", "upipe:host,dx=bf16", "upipe:device,blocks=32,blocks_backward=16"), (
        "upipe:host,layer=fused", "upipe:device,layer=fused,offload=none", "upipe:host=1,layer=fused,prefetch=off,within=on",
    ),
    ("upipe:tiles=off,offload=none",), ("ring",), ("usp:ring=2,checkpoint=off",),
    ("upipe:host,ring=2", "upipe:device,U=H,ring=2"), ("fpdt:chunk=32",), ("ulysses:rope=model",),
    ("ulysses:blocks=32,blocks_backward=16",),
    ("upipe:host,offload=transformers", "upipe:device,offload=transformers"), ("upipe:host=1,offload=deepspeed",),
    ("ulysses:offload=transformers",),
)


def _gradients(engines, dtype):
    """For each setting loss and whole gradients; every engine's settings twice, in turn."""
    found = {}
    for texts in engines:
        settings = [Setting.parse(text) for text in texts]
        engine = Engine(Shape("toy", 2, dist.get_world_size(), dtype), settings, named_kernel("reference"))
        batch = engine.batch(96)
        for setting in settings * 2:
            engine.activate(setting)
            step, engine.engine.step = engine.engine.step, lambda: None
            loss = engine.step(batch)
            grads = gradients(engine.engine)
            engine.engine.step = step
            step()
            engine.after_step()
            found.setdefault(str(setting), []).append((float(loss), grads))
            del step
        held = [engine.engine, engine.model, engine.engine.optimizer, *engine.engine.optimizer.fp32_partitioned_groups_flat]
        held = [weakref.ref(each) for each in held]
        engine.close()
        left = [type(each()).__name__ for each in held if each() is not None]
        assert not left, f"{texts}: {left} of a closed engine"
    return found if dist.get_rank() == 0 else None


@pytest.mark.parametrize("ranks,engines,dtype,bound", [
    pytest.param(2, ENGINES, "float32", 1e-5, marks=pytest.mark.slow),
    (1, (("plain:checkpoint=off,tiles=off,loss=hf",), ENGINES[0], ENGINES[4]), "float32", 1e-5),
    (2, (("ulysses:rope=model",), ("upipe:host,ring=2", "upipe:device,U=H,ring=2"), *ENGINES[-3:-1]), "float32", 1e-5),
    (2, (("alst:offload=none,tiles=off",), ("alst",), ("upipe:device",)), "bfloat16", 5e-2),
])
def test_every_setting_has_the_same_loss_and_gradients(worlds, ranks, engines, dtype, bound):
    found = worlds(ranks).run(_gradients, engines=engines, dtype=dtype)[0]
    assert len(found) == sum(len(texts) for texts in engines)
    (first_loss, first), _ = next(iter(found.values()))
    for label, times in found.items():
        for loss, grads in times:
            assert loss == pytest.approx(first_loss, rel=1e-6 if dtype == "float32" else 1e-3), label
            assert set(grads) == set(first)
            for name, grad in grads.items():
                assert_close(f"{label}: gradient of {name}", grad, first[name], bound)


# the benchmark


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stack(worlds, tmp_path, ranks):
    lengths = (64, 128) if ranks == 1 else (64,)
    few = ["--kernel", "reference", "--rounds", "2", "--warmup", "0"]
    arguments = ["--tokens", *map(str, lengths), *few, "--settings", *SETTINGS]
    results = worlds(ranks).run(_stack, folder=str(tmp_path), arguments=arguments)
    printed, done, problems = results[0]
    assert problems == [] and all(text == "" for text, _, _ in results[1:])
    found = records.load(tmp_path / "stack.jsonl")
    assert found == json.loads(json.dumps(done)) and len({r["run_id"] for r in found}) == 1
    assert [(r["tokens"], r["setting"]) for r in found] == [(n, str(Setting.parse(s))) for n in lengths for s in SETTINGS]
    assert len({r["point"] for r in found}) == len(found)
    table = stack_report.table(found)
    assert printed.rstrip().endswith(table) and len(table.splitlines()) == 1 + len(found)
    for r in found:
        _check(r, found, ranks)
    order = [line.split(": ")[1].split(" ")[0] for line in printed.splitlines() if line.startswith("64 round")]
    begins = [str(Setting.parse(text)) for text in SETTINGS[:2]]
    assert order[:: len(SETTINGS)] == begins, "who begins changes"


def _check(r, found, ranks):
    """Numbers of a record that follow from its settings and from each other. Toy: 2 layers, D 64, 8 heads of 16, fp32."""
    L, setting = r["tokens"] // ranks, r["setting"]
    assert (r["sp"], r["dp"], r["zero"], r["gpus"], r["peak_gib"], r["tokens_per_s_per_gpu"]) == (ranks, 1, 3, 0, None, None)
    assert r["method"] == setting.partition(":")[0] and len(r["times_s"]) == 2 and r["time_s"] == statistics.median(r["times_s"])
    assert (r["warmup_steps"], r["kernel"], r["attention"], r["engines"]) == (2, "reference", "computed", 2)
    base = next(b for b in found if b["tokens"] == r["tokens"] and b["method"] == "alst")
    assert r["over_alst"] == r["time_s"] / base["time_s"] and r["loss_off_alst"] < 1e-5 and r["norm_off_alst"] < 1e-5
    if setting.startswith("alst"):
        assert r["bytes_to_host"] == 0, "DeepSpeed's offload moves nothing without a GPU"
        return
    sent = 1 if r["offload"] != "none" else 0
    out_layers = {"device": 0, "host=1": 1, "host": 2}[setting.partition(":")[2].split(",")[0]]
    outputs = out_layers * (L * 8 * 16 * 4 + 8 // ranks * r["tokens"] * 4)
    assert r["bytes_to_host"] == r["bytes_to_device"] == sent * L * 64 * 4 + outputs
    assert r["attention_output_host_layers"] == (out_layers or None)
    assert r["attention_output"] == ("host" if out_layers else "device")
    assert r["heads_per_stage"] == (8 if "U=H" in setting else ranks)
    pages = r["host_pinned_gib"] * GIB + r["host_pageable_gib"] * GIB
    assert pages >= ranks * r["bytes_to_host"] and (r["host_pageable_gib"] > 0) == (r["offload"] == "pageable")


@pytest.mark.slow
def test_rounds_of_settings_apart(worlds, tmp_path):
    arguments = ["--tokens", "64", "--apart", "--rounds", "2", "--warmup", "0", "--kernel", "reference", "--settings"]
    printed, done, problems = worlds(1).run(_stack, folder=str(tmp_path), arguments=[*arguments, "plain", "upipe:host", "upipe:device"])[0]
    assert problems == [] and [(r["engines"], len(r["times_s"]), r["warmup_steps"]) for r in done] == [(1, 2, 2)] * 3
    turns = [line.split(": ")[1].split(" ")[0].split(",")[0] for line in printed.splitlines() if line.startswith("64 round")]
    assert turns == ["plain:offload=pinned"] * 2 + ["upipe:host"] * 2 + ["upipe:device"] * 2


@pytest.mark.slow
def test_baselines_apart(worlds, tmp_path):
    """One engine at a time; records say what ran, over which ranks, and what it sent."""
    settings = ["ring", "fpdt:chunk=32", "upipe:device"]
    arguments = ["--tokens", "128", "--once", "--apart", "--short", "32", "--kernel", "reference", "--settings", *settings]
    _, done, problems = worlds(2).run(_stack, folder=str(tmp_path), arguments=arguments)[0]
    assert problems == [] and [r["method"] for r in done] == ["ring", "fpdt", "upipe"]
    assert [(r["sp"], r["ring"], r["engines"], len(r["times_s"])) for r in done] == [(1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1)]
    assert "not DeepSpeed's" in done[1]["method_form"] and done[1]["bytes_to_host"] > done[0]["bytes_to_host"] > 0
    # 2 layers, 64 tokens a rank, 8 query and 4 kv heads of 16 in fp32: see docs/methods.md.
    keys = 64 // 2 * 2 * 4 * 16 * 4
    assert done[0]["bytes_sent_by_rank"] == [2 * 5 * keys, 2 * 7 * keys]
    assert done[1]["bytes_sent_by_rank"] == [2 * 3 * 64 * (2 * 8 + 2 * 4) * 16 * 4 // 2] * 2
    assert done[2]["bytes_sent"] > 0


@pytest.mark.slow
def test_memory_only_and_a_time_limit(worlds, tmp_path):
    arguments = ["--tokens", "64", "--memory-only", "--kernel", "fa4", "--settings", "upipe:host", "ulysses"]
    printed, done, problems = worlds(2).run(_stack, folder=str(tmp_path), arguments=arguments)[0]
    assert problems == [] and [r["times_s"] for r in done] == [None, None] and "round" not in printed
    assert all(r["memory_only"] and r["attention"].startswith("simulated") and r["first_s"] is None for r in done)
    short = ["--tokens", "64", "--kernel", "reference", "--settings", "upipe:device", "upipe:host"]
    _, done, _ = worlds(1).run(_stack, folder=str(tmp_path), arguments=[*short, "--time-limit", "0"])[0]
    assert [r["outcome"] for r in done] == ["timeout"] * 2
    _, done, _ = worlds(1).run(_stack, folder=str(tmp_path), arguments=[*short, "--once"])[0]
    assert [(r["warmup_steps"], len(r["times_s"]), r["outcome"]) for r in done] == [(2, 1, "ok")] * 2
    records.load(tmp_path / "stack.jsonl")


def _out_of_memory(folder):
    """ALST runs out of memory in its step; the others go on."""
    step = Engine.step

    def failing(self, batch, mark=lambda: None):
        if self.alst is not None and self.tokens > 64:
            raise torch.OutOfMemoryError("made up")
        return step(self, batch, mark)

    Engine.step = failing
    try:
        few = ["--kernel", "reference", "--rounds", "1", "--warmup", "0", "--settings", "alst", "upipe:device"]
        return _stack(folder, ["--tokens", "64", "128", "256", *few])
    finally:
        Engine.step = step


def test_a_setting_that_runs_out_of_memory_is_recorded_and_left_out(worlds, tmp_path):
    _, done, _ = worlds(1).run(_out_of_memory, folder=str(tmp_path))[0]
    assert [(r["tokens"], r["method"], r["outcome"]) for r in done] == [
        (64, "alst", "ok"), (64, "upipe", "ok"), (128, "alst", "oom_device"), (128, "upipe", "ok"), (256, "upipe", "ok"),
    ]
    assert done[2]["reason"] == "OutOfMemoryError: made up" and records.load(tmp_path / "stack.jsonl")
    assert "over_alst" in done[1] and "over_alst" not in done[3]


# ends before the end

TWO = ("plain", "upipe:device")
ROUNDS = ("--tokens", "64", "--kernel", "reference", "--rounds", "3", "--warmup", "0", "--settings", *TWO)


@contextlib.contextmanager
def at_step(act):
    """act(n) before the n-th step of any engine, from 1."""
    step, count = Engine.step, [0]

    def counted(self, batch, mark=lambda: None):
        count[0] += 1
        act(count[0])
        return step(self, batch, mark)

    Engine.step = counted
    try:
        yield
    finally:
        Engine.step = step


def _signalled(folder, arguments, last, number, of=_stack, **more):
    """Rank 0 is signalled in the step after `last`, where it waits in C for a rank that never comes."""

    def act(n):
        if n > last and dist.get_rank() == 0:
            os.kill(os.getpid(), number)
            dist.distributed_c10d._get_default_store().wait(["never"])

    with at_step(act):
        of(folder, arguments=arguments, **more)


def _end(ranks, status, **call):
    world = World(ranks)
    try:
        with pytest.raises(RankFailure, match=f"exit code {status}"):
            world.run(_signalled, **call)
    finally:
        world.close()


@pytest.mark.parametrize("ranks,settings,number,last,times", [
    # 4 steps for memory, a round, and the second's of the next.
    pytest.param(2, ("ulysses", "upipe:device"), signal.SIGTERM, 7, [1, 2], marks=pytest.mark.slow),
    (1, TWO, signal.SIGINT, 4, [None, None]),
    (1, TWO, signal.SIGTERM, 3, [None]),
])
def test_what_was_measured_outlives_a_signal(tmp_path, ranks, settings, number, last, times):
    _end(ranks, 128 + number, folder=str(tmp_path), arguments=[*ROUNDS[:-2], *settings], last=last, number=number)
    found = records.load(tmp_path / "stack.jsonl")
    assert [r["times_s"] and len(r["times_s"]) for r in found] == times
    assert [r["setting"] for r in found] == [str(Setting.parse(text)) for text in settings[: len(times)]]
    for r in found:
        assert r["cut_off"] == signal.Signals(number).name and r["outcome"] == "ok" and r["loss"] > 0 and r["grad_norm"] > 0
        assert len(r["losses"]) == 1 + len(r["times_s"] or ()) and r["host_pinned_gib"] is not None
        assert (r["warmup_steps"] is None) == (r["times_s"] is None)
    assert stack_report.disagreements(found) == [] and stack_report.table(found).count("cut off") == len(found)


@pytest.mark.parametrize("more,times", [
    (("--once",), 1), pytest.param(("--apart", "--rounds", "2", "--warmup", "0"), 2, marks=pytest.mark.slow),
])
def test_a_setting_that_is_through_is_recorded_at_once(worlds, tmp_path, more, times):
    """Before the next one's first step; and once, though the run is ended in that."""
    steps = 3 if times == 1 else 4
    arguments = ["--tokens", "64", "--kernel", "reference", *more, "--settings", *TWO]
    seen = worlds(1).run(_seen_at, folder=str(tmp_path / "seen"), arguments=arguments, step=steps + 1)[0]
    assert [(r["method"], len(r["times_s"]), r["cut_off"]) for r in seen] == [("none", times, None)]
    assert [r["method"] for r in records.load(tmp_path / "seen" / "stack.jsonl")] == ["none", "upipe"]
    _end(1, 143, folder=str(tmp_path), arguments=arguments, last=steps, number=signal.SIGTERM)
    (one,) = records.load(tmp_path / "stack.jsonl")
    assert one["cut_off"] is None and len(one["times_s"]) == times


def _seen_at(folder, arguments, step):
    """The records there are when a step begins."""
    seen = []
    with at_step(lambda n: seen.extend(records.load(os.path.join(folder, "stack.jsonl"))) if n == step else None):
        _stack(folder, arguments)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
    return seen


def _failing(folder, arguments, step):
    def act(n):
        if n == step:
            raise ValueError("made up")

    with at_step(act), pytest.raises(ValueError, match="made up"):
        _stack(folder, arguments)


def test_what_was_measured_outlives_an_error(worlds, tmp_path):
    worlds(1).run(_failing, folder=str(tmp_path), arguments=list(ROUNDS), step=7)
    found = records.load(tmp_path / "stack.jsonl")
    assert [(len(r["times_s"]), r["cut_off"]) for r in found] == [(1, "ValueError: made up")] * 2


def _slowly(folder, arguments):
    """Every step takes 30 s more, by the clock of the time limit."""
    init, clocks = Together.__init__, []

    def remember(self, *args, **options):
        init(self, *args, **options)
        clocks.append(self)

    def act(n):
        clocks[-1].started -= 30

    Together.__init__ = remember
    try:
        with at_step(act):
            return _stack(folder, arguments)
    finally:
        Together.__init__ = init


@pytest.mark.parametrize("limit,expected", [
    (100, [("timeout", None), ("ok", 1)]),       # 60 s of the first's memory, which leaves no time for the second's, and a step
    (175, [("ok", None)] * 2),                   # 120 s for memory; a round takes 60
    (185, [("ok", 1)] * 2),
    (1000, [("ok", 3)] * 2),
])
def test_a_time_limit_is_kept(worlds, tmp_path, limit, expected):
    arguments = [*ROUNDS, "--time-limit", str(limit)]
    printed, done, _ = worlds(1).run(_slowly, folder=str(tmp_path), arguments=arguments)[0]
    assert [(r["outcome"], r["times_s"] and len(r["times_s"])) for r in done] == expected
    assert records.load(tmp_path / "stack.jsonl") == json.loads(json.dumps(done))
    cut = [r["cut_off"] for r in done if r["outcome"] == "ok"]
    assert cut == [None if limit == 1000 else f"--time-limit {limit}"] * len(cut)
    assert ("leaves no time for round" in printed) == (limit != 1000)


def test_a_command_began_before_it_imported_this():
    started = time.perf_counter()
    source = "import time; time.sleep(0.5); from experiments import runs; print(time.perf_counter() - runs.begun())"
    said = float(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout)
    assert 0.5 < said < time.perf_counter() - started + 0.1
    assert begun() < started


def test_ratios_and_disagreements():
    def record(setting, time, peak, **more):
        base = {"tokens": 64, "outcome": "ok", "setting": setting, "method": setting.partition(":")[0], "time_s": time,
                "times_s": [time] * 2, "peak_above_states_gib": peak, "loss": 2.0, "grad_norm": 1.0,
                "heads_per_stage": 2, "heads": 8, "sp": 2,
                "attention_output": "device", "attention_output_host_layers": None, "overlap": True, "dx": "slabs",
                "offload": "pinned", "tile_tokens": 8192, "fused": False}
        return base | more

    rows = [
        record("alst:a", 4.0, 8.0, heads_per_stage=None), record("upipe:a", 2.0, 4.0),
        record("upipe:b", 1.6, None, offload="none"),
        record("upipe:c", 1.0, 16.0, heads_per_stage=8), record("upipe:d", 9.0, 9.0, offload="none", overlap=False),
        record("upipe:e", None, None, outcome="oom_device"),
    ]
    got = stack_report.ratios(rows[1], rows)
    assert got == {
        "over_alst": 0.5, "over_alst_rounds": [0.5, 0.5], "over_alst_peak": 0.5, "loss_off_alst": 0.0, "norm_off_alst": 0.0,
        "over_none": 1.25, "over_none_rounds": [1.25, 1.25], "over_all_heads": 2.0, "over_all_heads_rounds": [2.0, 2.0],
        "over_all_heads_peak": 0.25,
    }
    assert "over_none" not in stack_report.ratios(rows[4], rows) and stack_report.ratios(rows[5], rows) == {}
    assert stack_report.disagreements(rows) == []
    rows[1] |= {"loss": 2.01}
    rows[2] |= {"grad_norm": float("nan")}
    assert [p.split(" at ")[0] for p in stack_report.disagreements(rows)] == ["loss of upipe:a", "grad_norm of upipe:b"]


def test_refusals(tmp_path, capsys):
    for main, arguments, says in (
        (stack.main, ["--rounds", "0"], "at least 1"), (stack.main, ["--settings", "fsdp"], "alst, plain"),
        (stack.main, ["--settings", "upipe", "upipe:device"], "twice"), (stack.main, ["--tokens", "many"], "many"),
        (stack.main, ["--show", "--results", str(tmp_path)], "no records"),
        (ladder.main, ["--preset", "trl", "--rungs", "+ magic"], "plain loss"),
        (ladder.main, ["--preset", "trl", "--layers", "99"], "36"),
        (ladder.main, ["--preset", "figure1", "--most", "1K"], "at least one grain"),
        (ladder.main, ["--preset", "figure1", "--show", "--results", str(tmp_path)], "no records"),
    ):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err, arguments


def _refused_in_a_world(folder):
    for arguments, says in (
        (["--settings", "native"], "method=native on cpu"), (["--settings", "usp:ring=3"], "use one of 1, 2"),
        (["--settings", "upipe:ring=3"], "'upipe:device,ring=3.*: ring=3 does not divide the 2 ranks.*use one of 1, 2"),
        (["--tokens", "65"], "multiple of 2"), (["--sp", "3"], "does not divide"), (["--settings", "plain"], "--sp 1"),
        (["--settings", "upipe:host=3"], "2 layers"), (["--settings", "upipe:U=3"], "heads_per_stage=3"),
        (["--memory-only", "--kernel", "reference"], "not been measured"),
    ):
        with pytest.raises(ValueError, match=says):
            _stack(folder, ["--kernel", "reference", "--tokens", "64", *arguments])
    for arguments, says in (
        (["--grain", "65"], "multiple of 2"), (["--grain", "64"], "needs a GPU"),
        (["--memory-only", "--kernel", "flash"], "not been measured"),
    ):
        given = ["--preset", "figure1", "--kernel", "reference", "--most", "1K", "--grain", "64", *arguments]
        options = named(ladder.parser, ladder.settle, given)
        with pytest.raises(ValueError, match=says):
            ladder.run(options, "test", None if "GPU" in says else (lambda setting, tokens: 0))


def _agree(name):
    ranks = Together(name, seconds=0.5)
    told = ranks.every({"rank": dist.get_rank()}), ranks.seconds(), new_run_id()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not answer for 0.5 s"):
            ranks.every(0)
    return told


def test_ranks_agree_or_say_who_is_lost(worlds, tmp_path):
    first, second = worlds(2).run(_agree, name=str(tmp_path))
    assert first == second and first[0] == [{"rank": 0}, {"rank": 1}]
    # A run is named the same way where no world is running.
    names = {first[2], new_run_id(), new_run_id()}
    assert len(names) == 3 and all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", name) for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refusals_of_a_run(worlds, tmp_path):
    worlds(2).run(_refused_in_a_world, folder=str(tmp_path))
    assert not (tmp_path / "stack.jsonl").exists()


# the ladder


@pytest.mark.parametrize("bent", [0.0, 0.3])
def test_search_finds_the_longest_length_in_few_steps(bent):
    """Made-up memory, a line or a curve: compared with trying every length."""
    for per_token in (1.0, 7.0, 33.0):
        for constant in (0.0, 500.0, 5000.0):
            for most in (64, 1000, 4096):
                def peak(tokens, per_token=per_token, constant=constant, most=most):
                    return constant + per_token * tokens * (1 + bent * tokens / most)

                tried = []

                def probe(tokens, peak=peak, tried=tried):
                    tried.append(tokens)
                    return peak(tokens) if peak(tokens) <= 4000 else None

                found = ladder.search(probe, 4000, 8, 40, most)
                fits = [n for n in range(8, most + 1, 8) if peak(n) <= 4000]
                assert found.complete and found.longest == (fits[-1] if fits else 0)
                assert found.shortest_not == (None if len(fits) == most // 8 else 8 * (len(fits) + 1))
                assert len(tried) == len(set(tried)) <= 14 and set(found.peaks) == set(tried)


@pytest.mark.parametrize("expected", [8, 96, 100, 260, 1000, 4096])
def test_search_from_a_forecast(expected):
    """Whatever was expected, the same is found; with a forecast within 5 % in few steps."""
    for limit in (0, 8, 92, 96, 104, 252, 256, 260, 272, 900, 996, 4088, 4096):
        tried = []

        def probe(tokens, tried=tried, limit=limit):
            tried.append(tokens)
            return 1.0 if tokens <= limit else None

        found = ladder.search(probe, 1000, 4, expected, 4096, expected=True)
        assert found.complete and found.longest == limit
        assert found.shortest_not == (None if limit == 4096 else limit + 4) and tried[0] == expected
        assert len(tried) == len(set(tried)) <= 20 and (abs(expected - limit) > 0.05 * limit or len(tried) <= 7)


def test_a_lever_is_expected_at_its_last_forecast(tmp_path):
    options = named(ladder.parser, ladder.settle, ["--preset", "trl", "--forecasts", str(tmp_path)])
    assert ladder.forecast_of(options) == {}
    committed = records.load("experiments/results/predict_points.jsonl")
    said = next(r for r in committed if r.get("preset") == "trl" and r["rung"] == "+ offload")
    rows = [
        said | {"longest_tokens": 4096}, said | {"longest_tokens": 8192}, said | {"rung": "+ UPipe", "longest_tokens": 16384},
        said | {"cap_gib": 1.0, "longest_tokens": 12}, said | {"of": "stack", "longest_tokens": 14},
    ]  # fmt: skip
    (tmp_path / "predict_points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ladder.forecast_of(options) == {"+ offload": 8192, "+ UPipe": 16384}
    figure1 = named(ladder.parser, ladder.settle, ["--preset", "figure1"])
    assert set(ladder.forecast_of(figure1)) == {rung.label for rung in ladder.PRESETS["figure1"].rungs}


def test_search_where_the_allocator_gives_back_what_it_cached():
    """GiB as an H200 under a cap of 77 had them at these K tokens: the last is lower than the one before, and no line leads on."""
    measured = {72: 39.17, 144: 56.71, 224: 74.76, 232: 76.62, 236: 75.11}
    tried = []

    def probe(tokens):
        tried.append(tokens)
        return measured.get(tokens, 76.0) if tokens <= 260 else None

    found = ladder.search(probe, 77, 4, 72, 4096)
    assert found.complete and (found.longest, found.shortest_not) == (260, 264)
    assert 236 in tried and len(tried) <= 14 and max(tried) <= 2 * 236


def test_search_that_is_cut_off():
    def probe(tokens):
        if tokens > 80:
            raise ladder.TimeIsUp
        return float(tokens)

    found = ladder.search(probe, 1000, 8, 40, 4096)
    assert (found.longest, found.shortest_not, found.complete) == (80, None, False)


def made_up(setting, tokens):
    """Bytes: every lever takes something off."""
    per_token = 32 - 4 * setting.checkpoint - 4 * (setting.offload != "none") - 8 * setting.tiled_loss
    per_token -= 4 * (setting.tiles == "on") + 4 * (setting.name == "upipe") + 3 * (setting.host_layers is None)
    return tokens * per_token * (2 if setting.name == "plain" else 1) * 2**20


def _ladder(folder, preset, arguments=()):
    printed = io.StringIO()
    lengths = ["--grain", "32", "--first", "64", "--most", "512", "--cap", "4"]
    arguments = ["--preset", preset, *TOY, *lengths, "--results", folder, *arguments]
    with contextlib.redirect_stdout(printed):
        done = ladder.run(named(ladder.parser, ladder.settle, arguments), "test", made_up)
    return printed.getvalue(), done


@pytest.mark.parametrize("ranks,preset,rungs,more", [
    pytest.param(1, "trl", ("plain loss", "+ offload"), ("--kernel", "reference"), marks=pytest.mark.slow),
    pytest.param(2, "figure1", None, ("--memory-only",), marks=pytest.mark.slow),
    pytest.param(1, "trl", None, ("--memory-only",), marks=pytest.mark.slow),
])
def test_ladder(worlds, tmp_path, ranks, preset, rungs, more):
    arguments = [*more, *(["--rungs", *rungs] if rungs else [])]
    printed, done = worlds(ranks).run(_ladder, folder=str(tmp_path), preset=preset, arguments=arguments, timeout=300)[0]
    found = records.load(tmp_path / "ladder.jsonl")
    assert found == json.loads(json.dumps(done))
    assert tuple(r["rung"] for r in found) == (rungs or tuple(rung.label for rung in ladder.PRESETS[preset].rungs))
    for r in found:
        setting = Setting.parse(r["setting"])
        fits = [n for n in range(32, 513, 32) if made_up(setting, n) <= 4 * GIB]
        assert r["search_complete"] and r["outcome"] == "ok" and r["longest_tokens"] == r["tokens"] == fits[-1]
        assert r["memory"] == "by arithmetic" and r["memory_only"] == ("--memory-only" in more) and r["peak_gib"] is None
        assert (r["sp"], r["dp"]) == ((1, ranks) if setting.name == "plain" else (ranks, 1))
        assert r["others_inputs_gib"] == (34 * r["tokens"] * 64 * 4 / GIB if preset == "trl" and r["offload"] == "none" else 0)
    told = {"plain loss": 32768, "tiled loss": 163840, "+ offload": 262144} if preset == "trl" else {}
    assert [r["reported_tokens"] for r in found] == [told.get(r["rung"]) for r in found]
    assert printed.rstrip().endswith(ladder.table(found))
    ladder.draw(found, str(tmp_path / "ladder.png"))
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def _steps(folder):
    """Tokens of every step of a search; None where an engine is made."""
    seen, step, made = [], Engine.step, Engine.__init__

    def init(self, *args, **options):
        seen.append(None)
        made(self, *args, **options)

    def stepped(self, batch, *args):
        seen.append(batch["input_ids"].numel())
        return step(self, batch, *args)

    with mock.patch.object(Engine, "__init__", init), mock.patch.object(Engine, "step", stepped):
        _ladder(folder, "figure1", ["--rungs", "plain", "+ UPipe", "--memory-only"])
    return seen


@pytest.mark.slow
def test_every_length_is_tried_with_adam_s_moments_there(worlds, tmp_path):
    seen = worlds(2).run(_steps, folder=str(tmp_path), timeout=300)[0]
    first = [after for before, after in itertools.pairwise(seen) if before is None]
    # A grain of 32 tokens: on the one rank of plain, and half of it on each of two.
    assert (first[0], first[-1], set(first)) == (32, 16, {32, 16})
    assert all(tokens > 16 for tokens in seen if tokens is not None and tokens not in first)


@pytest.mark.slow
def test_a_ladder_on_which_nothing_fits_or_time_is_short(worlds, tmp_path):
    more = ["--rungs", "+ UPipe", "--memory-only"]
    _, (none,) = worlds(2).run(_ladder, folder=str(tmp_path), preset="figure1", arguments=[*more, "--cap", "0.1"])[0]
    assert (none["outcome"], none["longest_tokens"], none["tokens"]) == ("oom_device", 0, 32) and "not even 32" in none["reason"]
    said, cut = worlds(2).run(_ladder, folder=str(tmp_path), preset="figure1", arguments=[*more, "--time-limit", "0"])[0]
    assert cut == [] and "+ UPipe: not begun" in said
    assert len(records.load(tmp_path / "ladder.jsonl")) == 1


def test_a_search_outlives_a_signal(tmp_path):
    """Of a lever's search what was tried is recorded: 64 tokens, which fit, and 128, which do not."""
    more = ["--rungs", "tiled loss", "--memory-only"]
    _end(1, 143, folder=str(tmp_path), arguments=more, last=2, number=signal.SIGTERM, of=_ladder, preset="trl")
    (one,) = records.load(tmp_path / "ladder.jsonl")
    assert (one["outcome"], one["search_complete"], one["cut_off"]) == ("timeout", False, "SIGTERM") and "SIGTERM" in one["reason"]
    assert (list(one["tried"]), one["longest_tokens"], one["tokens"]) == (["64", "128"], 64, 64) and one["loss"] > 0
    assert one["tried"]["128"] is None and one["shortest_that_does_not_fit"] == 128


def test_the_figure_has_the_records_lengths(tmp_path, monkeypatch):
    from matplotlib import axes

    bars, marks = [], []
    monkeypatch.setattr(axes.Axes, "barh", lambda self, y, width, **k: bars.append(list(width)))
    plain_plot = axes.Axes.plot

    def plot(self, x, y, *args, **options):
        marks.append((list(x), list(y)))
        return plain_plot(self, x, y, *args, **options)

    monkeypatch.setattr(axes.Axes, "plot", plot)
    base = {"search_complete": True, "model": "m", "layers": 2, "gpus": 0, "gpu": None, "cap_gib": 28.0, "memory_only": True}
    rows = [base | {"rung": str(i), "longest_tokens": 1024 * i, "reported_tokens": 2048 if i == 2 else None} for i in (1, 2, 3)]
    ladder.draw(rows, str(tmp_path / "a.png"))
    assert bars == [[1024, 2048, 3072]] and marks == [([2048], [1])]
    with pytest.raises(ValueError, match="nothing to draw"):
        ladder.draw([], str(tmp_path / "b.png"))


@pytest.mark.slow
def test_the_command(tmp_path):
    """Alone, as one process; then its table from the records."""
    is_checkout = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True).returncode == 0
    common = [sys.executable, "-m", "experiments.stack", "--results", str(tmp_path)]
    arguments = [*TOY, "--tokens", "64", "--kernel", "reference", "--rounds", "1", "--settings", "alst", "upipe:host"]
    arguments += [] if is_checkout else ["--commit", "untracked"]
    done = subprocess.run([*common, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = records.load(tmp_path / "stack.jsonl")
    assert [r["method"] for r in found] == ["alst", "upipe"]
    shown = subprocess.run([*common, "--show"], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and stack_report.table(found) in shown.stdout, shown.stderr[-2000:]


def test_every_kernel_of_a_preset_can_be_simulated():
    """--memory-only needs to know what fa4's backward holds, with the heads of every lever."""
    for heads, kv_heads in ((32, 8), (16, 4), (1, 1), (2, 1)):
        assert named_kernel("fa4").backward_bytes(1024, heads, kv_heads, 128) > 0
    assert "fa4" in kernels.names()
