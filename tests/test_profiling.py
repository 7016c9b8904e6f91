"""The trace's table by phase: intervals against a grid, made-up traces by hand, and a real step."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import training
from upipe import profiling
from upipe.profiling import (
    ATTENTION,
    COPIES,
    EXCHANGES,
    KINDS,
    OTHER,
    PHASES,
    PRODUCTS,
    by_phase,
    kind_of,
    length,
    overlap,
    union,
)


@pytest.mark.parametrize("seed", range(5))
def test_intervals_are_those_of_a_grid(seed):
    rng = random.Random(seed)
    one, other = ([(s := rng.randint(0, 90), s + rng.randint(0, 12)) for _ in range(rng.randint(0, 15))] for _ in range(2))
    a, b = ({t for start, end in spans for t in range(start, end)} for spans in (one, other))
    assert length(one) == len(a) and length(union(one)) == len(a)
    assert overlap(one, other) == overlap(other, one) == len(a & b)
    assert all(x[1] < y[0] for x, y in zip(union(one), union(one)[1:]))


NAMES = {
    ATTENTION: ["void cutlass::flash_fwd_kernel<...>", "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90",
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
                "aten::_scaled_dot_product_flash_attention_for_cpu"],
    PRODUCTS: ["nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn", "aten::addmm", "aten::mm",
               "void cublasLt::splitKreduce_kernel<...>"],
    EXCHANGES: ["ncclDevKernel_SendRecv(...)", "ncclDevKernel_AllGather_RING_LL", "Memcpy PtoP (Device)",
                "gloo:all_to_all", "c10d::alltoall_base_", "record_param_comms"],
    COPIES: ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)", "aten::copy_"],
    OTHER: ["Memset (Device)", "void at::native::vectorized_elementwise_kernel<4, ...>", "aten::add", "_AttentionBlockBackward",
            "finish_heads_kernel", "aten::linear"],
}  # fmt: skip


def test_kinds_by_name():
    wanted = {name: kind for kind, names in NAMES.items() for name in names}
    assert {name: kind_of(name) for name in wanted} == wanted


def span(cat, name, start, end, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid, "args": args}


def annotated():
    phases = (("forward", 0, 100, 1), ("backward", 120, 400, 1), ("recompute", 150, 200, 2), ("optimizer", 400, 450, 1))
    return [span("user_annotation", f"upipe: {name}", start, end, tid) for name, start, end, tid in phases]


def test_gpu_work_belongs_to_the_phase_that_asked_for_it():
    asked = {1: 10, 2: 90, 3: 160, 4: 170, 5: 300, 6: 430, 7: 110}
    launches = [span("cuda_runtime", "cudaLaunchKernel", t, t + 1, tid=3, correlation=n) for n, t in asked.items()]
    events = annotated() + launches + [
        span("kernel", "flash_fwd_kernel", 1000, 2000, tid=7, correlation=1),
        span("kernel", "ncclDevKernel_SendRecv", 1500, 2500, tid=8, correlation=2),      # half of it under the kernel
        span("kernel", "nvjet_tst", 3000, 3400, tid=7, correlation=3),
        span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3300, 3700, tid=9, correlation=4),  # 100 of 400 hidden
        span("kernel", "nvjet_tst", 5000, 5300, tid=7, correlation=5),
        span("gpu_memset", "Memset (Device)", 6000, 6010, tid=7, correlation=6),
        span("kernel", "elementwise_kernel", 6100, 6120, tid=7, correlation=7),
        span("cpu_op", "aten::mm", 20, 40),
    ]  # fmt: skip
    times, gpu = by_phase(events)
    assert gpu and list(times) == list(PHASES)
    forward, recompute, backward, optimizer, rest = times.values()
    assert forward.ms == dict.fromkeys(KINDS, 0.0) | {ATTENTION: 1.0, EXCHANGES: 1.0}
    assert (forward.busy_ms, forward.exposed_ms, forward.host_ms) == (1.5, 0.5, 0.1)
    assert recompute.ms == dict.fromkeys(KINDS, 0.0) | {PRODUCTS: 0.4, COPIES: 0.4}
    assert (recompute.busy_ms, recompute.exposed_ms, recompute.host_ms) == (0.7, pytest.approx(0.3), 0.05)
    assert backward.ms[PRODUCTS] == 0.3 and backward.host_ms == pytest.approx(0.23)
    assert optimizer.ms[OTHER] == 0.01 and rest.ms[OTHER] == 0.02 and rest.host_ms == 0


def test_without_a_gpu_operators_count_without_those_inside_them():
    events = annotated() + [
        span("cpu_op", "aten::linear", 10, 60), span("cpu_op", "aten::addmm", 20, 50), span("cpu_op", "aten::copy_", 20, 25),
        span("cpu_op", "aten::add", 60, 70),
        span("user_annotation", "gloo:all_to_all", 155, 165, tid=5), span("cpu_op", "aten::mm", 160, 190, tid=2),
    ]  # fmt: skip
    times, gpu = by_phase(events)
    assert not gpu
    assert times["forward"].ms == pytest.approx(dict.fromkeys(KINDS, 0.0) | {PRODUCTS: 0.025, COPIES: 0.005, OTHER: 0.03})
    assert times["forward"].busy_ms == pytest.approx(0.06)
    assert times["recompute"].ms[EXCHANGES] == pytest.approx(0.01) and times["recompute"].ms[PRODUCTS] == pytest.approx(0.03)
    assert times["recompute"].exposed_ms == pytest.approx(0.005)


def test_an_operator_of_the_host_is_cut_where_a_phase_ends():
    """An autograd function that runs a layer again is open before, through and after the recompute."""
    around = [span("cpu_op", "CheckpointBackward", 140, 300, tid=2), span("cpu_op", "aten::mm", 160, 190, tid=2)]
    times, _ = by_phase(annotated() + around)
    assert times["recompute"].ms == pytest.approx(dict.fromkeys(KINDS, 0.0) | {PRODUCTS: 0.03, OTHER: 0.02})
    assert times["backward"].ms == pytest.approx(dict.fromkeys(KINDS, 0.0) | {OTHER: 0.11})


def test_a_trace_without_phases_or_without_work_is_refused():
    with pytest.raises(ValueError, match="no phases"):
        by_phase([span("kernel", "x", 0, 1)])
    with pytest.raises(ValueError, match="no kernel and no operator"):
        by_phase(annotated())
    with pytest.raises(ValueError, match="ends in .json"), profiling.trace(nn.Linear(2, 2), "trace.txt"):
        pass


def profiled_steps(folder, mode, fail=False):
    """Three steps of a toy Llama on this rank, the second of them profiled."""
    import deepspeed

    import upipe
    from upipe.build import ModelConfig, build_model
    from upipe.optimize import TrainConfig, build_optimizer, deepspeed_config
    from upipe.profiling import StepProfile

    train = TrainConfig(zero_stage=2)
    ds_config = deepspeed_config(train, cuda=False)
    ds_config["zero_optimization"] |= {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}
    shape = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, vocab_size=64)
    model = build_model(ModelConfig(**shape, checkpointing="non-reentrant"), seed=0)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    optimizer = build_optimizer(model, train, cuda=False)
    engine, *_ = deepspeed.initialize(
        model=model, config=ds_config, mpu=handle.mpu, optimizer=optimizer, dist_init_required=False
    )
    rank = torch.distributed.get_rank()
    profile = StepProfile(mode, engine, folder, step=1, rank=rank)
    tables = []
    for step in range(3):
        ids = torch.randint(64, (1, 128), generator=torch.Generator().manual_seed(step))
        profile.start(step)
        for batch in handle.shard([{"input_ids": ids, "labels": ids}]):
            loss = handle.loss(engine, batch)
            engine.backward(loss)
            if fail and step == 1:
                break
            engine.step()
        if fail and step == 1:
            tables.append(profile.failed(MemoryError("made up")))
            break
        tables.append(profile.stop(step))
    handle.remove()
    made = {"tables": tables}
    if mode == "trace":
        made |= profile._made.to_dict()
    return made


def test_the_trace_of_a_real_step(worlds, tmp_path):
    for rank, got in enumerate(worlds(2).run(profiled_steps, folder=str(tmp_path), mode="trace")):
        assert got["tables"][0] is None and got["tables"][2] is None and not got["gpu"]
        assert got["tables"][1].splitlines()[0] == "ms of torch's operators on the CPU by phase"
        phases = got["phases"]
        for phase in ("forward", "recompute", "backward"):
            assert phases[phase]["ms"][PRODUCTS] > 0 and phases[phase]["ms"][ATTENTION] > 0, phase
            assert max(phases[phase]["ms"].values()) <= phases[phase]["host_ms"] * (1 + 1e-9), phase
        split = got["parts"]["ms"]
        assert sum(split.values()) == pytest.approx(got["parts"]["window_ms"])
        assert all(split[part] > 0 for part in ("projection", "attention", "output", "MLP", "norm", "loss", "optimizer"))
        assert got["parts"]["communication_ms"]["all-to-all"] > 0 and got["parts"]["communication_ms"]["ZeRO"] > 0
        assert "ms of torch's operators on the CPU by part" in got["tables"][1]
        assert phases["optimizer"]["busy_ms"] > 0 and phases["optimizer"]["ms"][ATTENTION] == 0
        with gzip.open(tmp_path / f"trace-rank{rank}.json.gz", "rt") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("upipe: forward") == names.count("upipe: optimizer") == 1
        assert names.count("upipe: recompute") == 2  # layers
        assert (tmp_path / f"trace-rank{rank}.txt").read_text() == got["tables"][1] + "\n"


def test_a_memory_profile_writes_its_files_and_none_writes_nothing(worlds, tmp_path):
    got = worlds(2).run(profiled_steps, folder=str(tmp_path / "profile"), mode="memory")
    assert "memory at the peak" in got[0]["tables"][1]
    assert {p.name for p in (tmp_path / "profile").iterdir()} == {
        f"memory-rank{rank}.{suffix}" for rank in (0, 1) for suffix in ("txt", "json", "pickle", "png")
    }
    assert worlds(2).run(profiled_steps, folder=str(tmp_path / "none"), mode="none")[0]["tables"] == [None] * 3
    assert not (tmp_path / "none").exists()
    told = worlds(2).run(profiled_steps, folder=str(tmp_path / "report"), mode="report")[0]["tables"]
    assert "memory at the peak" in told[1] and told[0] is None and not (tmp_path / "report").exists()


def test_a_profiled_step_that_fails_leaves_its_memory_report(worlds, tmp_path):
    got = worlds(2).run(profiled_steps, folder=str(tmp_path), mode="memory", fail=True)
    assert "of a failed step" in got[0]["tables"][1]
    assert json.loads((tmp_path / "memory-rank0.json").read_text())["error"] == "MemoryError: made up"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_trace_has_its_kernels_in_their_phases(tmp_path):
    class Engine(nn.Module):
        """The methods of an engine that are looked for."""

        def __init__(self):
            super().__init__()
            self.module = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda().to(torch.bfloat16)
            self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)

        def backward(self, loss):
            loss.backward()

        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

    engine = Engine()
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        engine.backward(engine.module(x).float().square().mean())
        engine.step()

    step()
    with profiling.trace(engine, tmp_path / "trace.json.gz") as trace:
        step()
    assert trace.gpu
    # A product forward, two backward; backward is launched by autograd's own thread.
    forward, backward = trace.times["forward"].ms[PRODUCTS], trace.times["backward"].ms[PRODUCTS]
    assert forward > 0 and 1.4 < backward / forward < 2.6, trace.table()
    assert trace.times["optimizer"].busy_ms > 0 and trace.times["optimizer"].ms[PRODUCTS] == 0
    assert trace.parts.ms["optimizer"] > 0 and sum(trace.parts.ms.values()) == pytest.approx(trace.parts.window_ms)


def profiled_run(folder, mode):
    """Losses of a run with and without a profile, and the profile's files."""
    losses = {}
    for profile in ("none", mode):
        run_dir = f"{folder}/{profile}"
        losses[profile] = training.train(training.mapping(folder, train__steps=3, train__profile=profile, train__run_dir=run_dir))["losses"]
        dist.barrier()
    return losses["none"], losses[mode], sorted(p.name for p in Path(folder).glob("*/profile/*"))


@pytest.mark.parametrize("mode", ["memory", "trace"])
@pytest.mark.slow
def test_the_trainer_profiles_its_second_step(worlds, tmp_path, mode):
    """`train.profile` writes next to the run, and the run's losses are those without it."""
    for without, with_profile, files in worlds(2).run(profiled_run, folder=str(tmp_path), mode=mode):
        assert without == with_profile and len(without) == 3
        assert files
