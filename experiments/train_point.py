"""A point of kind `train`: optimizer steps of a model under DeepSpeed with UPipe or a baseline, timed one by one.

Weights and tokens are random, from the seed; every step has new tokens. The model, optimizer and DeepSpeed
configuration are those of `upipe train`. A step is timed from a barrier to a device synchronisation: forward and
backward passes of its micro-batches and the optimizer step, without making the batch; the slowest rank counts.
Memory is that of the timed steps, of the rank with the highest peak; on the CPU there is none to report.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import upipe
from experiments import block_trace
from upipe import host, kernels, memory
from upipe import plan as planner
from upipe.build import ModelConfig, build_model, build_partitioned_model, hf_config, model_sizes, wants_zero_init
from upipe.config import ConfigError, Length
from upipe.data import DataConfig
from upipe.environment import host_gib
from upipe.memory import MemoryConfig, Stack
from upipe.methods import config as methods
from upipe.methods.ulysses import check_heads
from upipe.preflight import PreflightError, check_ring_degree, check_schedule
from upipe.records import Record, tokens_per_step, unit_gib
from upipe.trainer import RunConfig, TrainConfig, build_optimizer, deepspeed_config

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DX = {"gemm": "slabs", "bf16": "bfloat16"}


@dataclass
class Point:
    """Settings of a point.

    tokens: S. processes: ranks of the run, one a GPU; sp x dp. model_name: what records call the model. device: "cpu"
    runs on the CPU even where there are GPUs. train.steps: all optimizer steps; the first `untimed_steps` of them warm
    up, none only where a single step is asked for. profile: one more step under the profiler, whose parts are the record's
    `trace` (`block_trace.parts_of`). allocator_cap_gib: the most that torch's allocator may take of each GPU; null: all.
    Of `train`, run_dir and overwrite mean nothing here.
    """

    model_name: str
    model: ModelConfig
    tokens: Length
    processes: int
    method: methods.Name = "upipe"
    device: Literal["cuda", "cpu"] = "cuda"
    untimed_steps: int = 1
    profile: bool = False
    allocator_cap_gib: float | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    upipe: upipe.UPipeConfig = field(default_factory=upipe.UPipeConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @classmethod
    def filled(cls, mapping: dict[str, Any], folder: str | Path = ".") -> dict[str, Any]:
        """The mapping with what its preset sets; `config.from_mapping` asks."""
        return memory.fill(mapping, mapping.get("tokens"), folder)

    def __post_init__(self):
        memory.check(self)
        for name, least in (("tokens", 2), ("processes", 1), ("untimed_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.train.profile != "none":
            raise ValueError(f"train.profile={self.train.profile}: a point writes no files of a run; use profile: true, for a step by part")
        if self.untimed_steps >= self.train.steps:
            raise ValueError(f"untimed_steps={self.untimed_steps} of train.steps={self.train.steps}: leave one to be timed")
        if self.untimed_steps == 0 and self.train.steps > 1:
            raise ValueError(f"untimed_steps=0 with train.steps={self.train.steps}: warm up, or ask for a single step")
        cap = self.allocator_cap_gib
        if cap is not None and (cap <= 0 or self.device == "cpu"):
            raise ValueError(f"allocator_cap_gib={cap} with device={self.device}: a positive number of GiB of a GPU, or null")


def record(point: Point) -> Record:
    """What is known of a point before it runs."""
    shape, sp = _shape(point.model), point.upipe.sp_size
    ours, fits = point.method == "upipe", sp > 0 and point.processes % sp == 0
    try:
        ring, ulysses = _degrees(point) if fits else (1, None)
    except ValueError:  # refused when it runs, and by `verdict`
        ring, ulysses = point.upipe.ring_degree, None
    U = {None: ulysses, "auto": None}.get(point.upipe.heads_per_stage, point.upipe.heads_per_stage)
    return Record(
        method=point.method, model=point.model_name, layers=shape.num_hidden_layers, tokens=point.tokens,
        sp=ulysses, ring=ring, dp=point.processes // sp if fits else None, zero=point.train.zero_stage,
        heads_per_stage=U if ours else None, kernel=None if point.upipe.kernel == "auto" else point.upipe.kernel,
        attention_output=point.upipe.attention_output, overlap=point.upipe.overlap if ours else None,
        dx=DX[point.upipe.dx] if ours else None, keep_layers_on_gpu=None, store_every=point.memory.store_every,
        offload=None if point.memory.offload == "auto" else point.memory.offload,
        tile_tokens=point.memory.mlp_tokens, dtype=DTYPES[point.train.dtype], warmup_steps=point.untimed_steps,
        extra={
            "scope": "model", "method_form": methods.FORMS[point.method], "device": point.device,
            "processes": point.processes, "hidden_size": shape.hidden_size,
            "heads": shape.num_attention_heads, "kv_heads": shape.num_key_value_heads,
            "micro_batch_size": point.train.micro_batch_size, "accumulation": point.train.accumulation,
            "allocator_cap_gib": point.allocator_cap_gib, "checkpointing": point.model.checkpointing,
            "loss_tokens": point.memory.loss_tokens, "fused": point.memory.fused_layers, "memory": dataclasses.asdict(point.memory),
            "data": f"random tokens, seed {point.train.seed}",
        },
    )


def verdict(point: Point) -> str:
    """Whether the head schedule and the ranks fit together: "ok", or the refusal."""
    shape, sp = _shape(point.model), point.upipe.sp_size
    if sp < 1 or point.processes % sp:
        works = [n for n in range(1, point.processes + 1) if point.processes % n == 0]
        return f"refused: sp_size={sp} does not divide the {point.processes} processes: use one of {works}"
    heads = shape.num_attention_heads, shape.num_key_value_heads
    try:
        check_schedule(*heads, _degrees(point)[1], point.upipe.heads_per_stage)
        if point.method == "ulysses":
            check_heads(*heads, sp)
    except ValueError as error:
        return f"refused: {error}"
    return "ok"


def predict(point: Point, machine: planner.Machine) -> dict[str, Any]:
    """What the planner says of a point on a machine, in GiB a GPU, GiB a node, seconds a step and tokens/s/GPU; or why it says nothing."""
    data = DataConfig(path="random tokens", tokens=point.tokens)
    if point.allocator_cap_gib is not None:
        gpu, cap = machine.gpu, point.allocator_cap_gib
        gpu = dataclasses.replace(gpu, usable_gib=min(cap, gpu.usable_gib), memory_gib=min(cap, gpu.memory_gib))
        machine = dataclasses.replace(machine, gpu=gpu)
    try:
        run = RunConfig(point.model, data, point.train, methods.of(point.method), point.upipe, point.memory)
        found = planner.predict(run, machine)
    except ValueError as error:
        return {"machine": str(machine), "declined": str(error)}
    return {
        "machine": str(machine), "fits": found.fits, "limit": found.limit, "device_gib": found.device_gib,
        "device_usable_gib": machine.gpu.usable_gib, "host_gib": found.host_gib, "host_usable_gib": machine.host_gib,
        "peak_gib": found.device_gib - found.device["margin"], "time_s": found.time_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu, "kernel": found.kernel,
    }  # fmt: skip


def run(point: Point) -> Record:
    """Train and measure; collective over the launched ranks.

    Raises PreflightError or ConfigError before the first step for what is refused, FloatingPointError where the loss is
    not finite, and what torch raises where memory runs out.
    """
    cuda = point.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ConfigError("device=cuda: there is no GPU here; device=cpu runs on the CPU")
    # torch 2.13 deprecates collectives under the names that DeepSpeed calls, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    upipe.init_distributed()
    if dist.get_world_size() != point.processes:
        raise ConfigError(f"processes={point.processes}, but the world has {dist.get_world_size()}")
    device_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if cuda else None
    if point.allocator_cap_gib is not None:
        from experiments.stack_methods import cap_allocator

        cap_allocator(point.allocator_cap_gib, torch.device("cuda", torch.cuda.current_device()))
        device_bytes = int(point.allocator_cap_gib * memory.GIB)
    sizes = model_sizes(point.model)
    ds_config = deepspeed_config(point.train, point.memory, cuda=cuda, layer_parameters=sizes.layer_parameters)
    plan = memory.make_plan(
        point, point.tokens, sizes, world=point.processes, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", point.processes)),
        device_bytes=device_bytes, host_bytes=int(host_gib() * memory.GIB),
    )  # fmt: skip
    described = plan.model(point.model)
    if wants_zero_init(described, zero_stage=point.train.zero_stage, cuda=cuda):
        model = build_partitioned_model(described, ds_config, seed=point.train.seed)
    else:
        model = build_model(described, seed=point.train.seed)
    vocabulary = model.config.vocab_size
    stack = memory.apply_stack(model, plan, point.upipe, ds_config, point.method)
    handle = stack.handle
    _check_kernel(point, model, handle.device)
    engine = _engine(model, ds_config, handle, point.train, cuda)
    steps = _Steps(engine, handle, cuda, stack)
    measured = steps.run(_batches(point, vocabulary, handle.dp_rank), point.train.steps, point.untimed_steps, point.profile)
    done = record(point)
    used = sorted(set(handle.kernels.values()))
    done.kernel = used[0] if len(used) == 1 else None
    done.dp = handle.dp_size
    done.heads_per_stage = handle.widths[0] if len(handle.widths) == 1 else None
    done.extra |= {
        "parameters": sizes.parameters, "kernels": used, "losses": measured.pop("losses"), "plan": plan.describe(),
        "report": handle.report().splitlines(), "sent_layers": plan.sent_layers, "host_steps": measured.pop("host_steps"),
        "trace": measured.pop("trace"),
    }
    done = done.updated(measured)
    if point.upipe.attention_output == "host":
        done.attention_output_host_layers = plan.attention_layers
    if plan.checkpointing is not None:
        done.offload, done.keep_layers_on_gpu = plan.checkpointing.offload, plan.kept_layers
    held, pinned = _on_host()
    done.host_pinned_gib = (done.host_pinned_gib or 0.0) + pinned
    done.host_pageable_gib = held - pinned
    if cuda:
        done.tokens_per_s_per_gpu = tokens_per_step(done) / done.time_s / point.processes
        done.peak_units = done.peak_above_states_gib / unit_gib(done)
    stack.remove()
    dist.destroy_process_group()
    return done


def _engine(model, ds_config: dict, handle, config: TrainConfig, cuda: bool) -> Any:
    import deepspeed

    optimizer = build_optimizer(model, config, cuda=cuda)
    engine, *_ = deepspeed.initialize(
        model=model, config=ds_config, mpu=handle.mpu, optimizer=optimizer, dist_init_required=False
    )
    return engine


def _check_kernel(point: Point, model, device: torch.device) -> None:
    """Refuse a kernel that declines the case now rather than in the first forward pass."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        kernels.select(
            point.upipe.kernel, kernels.Case(device.type, capability, getattr(torch, DTYPES[point.train.dtype]), head_dim)
        )
    except ValueError as error:
        raise PreflightError(str(error)) from None


def _batches(point: Point, vocabulary: int, dp_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Global batches without end: [B, S] random tokens that depend on the seed, the data-parallel rank and the count."""
    generator = torch.Generator().manual_seed(point.train.seed * 1_000_003 + dp_rank)
    while True:
        ids = torch.randint(vocabulary, (point.train.micro_batch_size, point.tokens), generator=generator)
        yield {"input_ids": ids, "labels": ids}


class _Steps:
    """Runs and measures optimizer steps."""

    def __init__(self, engine, handle, cuda: bool, stack: Stack | None = None):
        self.engine, self.handle, self.cuda, self.stack = engine, handle, cuda, stack

    def run(self, batches: Iterator[dict], steps: int, untimed: int, profile: bool = False) -> dict[str, Any]:
        """-> the fields of a record that only a run can fill, `losses`, that of every step, `host_steps`, what each moved and held
        on the host, and `trace`, of one more step under the profiler, or None."""
        accumulation = self.engine.gradient_accumulation_steps()
        shards = iter(self.handle.shard(batches, accumulation=accumulation))
        seconds, losses, moved = [], [], []
        for step in range(steps):
            if self.cuda and step == untimed:
                torch.cuda.reset_peak_memory_stats()
            window = [next(shards) for _ in range(accumulation)]
            elapsed, loss = self._step(window)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step} is {loss}")
            moved.append({} if self.stack is None else self.stack.end_step())
            seconds.append(elapsed)
            losses.append(loss)
        norm = self.engine.get_global_grad_norm()
        times = self._slowest(seconds[untimed:])
        fields = {
            "times_s": times, "time_s": statistics.median(times), "losses": losses, "loss": losses[-1],
            "grad_norm": None if norm is None else float(norm), "host_steps": moved,
        }
        fields |= self._memory() if self.cuda else {}
        # Last: it changes neither times nor peaks of the others.
        return fields | {"trace": self._traced([next(shards) for _ in range(accumulation)]) if profile else None}

    def _traced(self, window: list[dict]) -> dict[str, Any]:
        """A step under the profiler, of rank 0 in the record."""
        found = block_trace.parts_of(lambda: self._step(window), dist.barrier, self.engine)
        if self.stack is not None:
            self.stack.end_step()
        return found

    def _step(self, window: list[dict]) -> tuple[float, float]:
        """One optimizer step -> its seconds on this rank, and its loss."""
        dist.barrier()
        self._synchronise()
        started = time.perf_counter()
        parts = []
        for batch in window:
            loss = self.handle.loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            parts.append(loss.detach())
        self._synchronise()
        return time.perf_counter() - started, float(torch.stack(parts).mean())

    def _synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _slowest(self, seconds: list[float]) -> list[float]:
        times = torch.tensor(seconds, dtype=torch.float64, device=self.handle.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()

    def _memory(self) -> dict[str, float]:
        """Device memory in GiB, of the rank with the highest peak; pinned host memory of all ranks together."""
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        # ZeRO-3 may hold on to gathered parameters between steps; states are without them.
        self.engine.empty_partition_cache()
        states = torch.cuda.memory_allocated()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, (peak, reserved, states, pinned))
        peak, reserved, states, _ = max(every)
        return {
            "peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30, "states_gib": states / 2**30,
            "peak_above_states_gib": (peak - states) / 2**30, "host_pinned_gib": sum(row[3] for row in every) / 2**30,
        }


def _on_host() -> tuple[float, float]:
    """Host memory of upipe's own blocks in GiB, all ranks together: all of it, and the pinned part."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (host.pool().held_bytes, host.pool().pinned_bytes))
    return tuple(sum(column) / 2**30 for column in zip(*every))


def _degrees(point: Point) -> tuple[int, int]:
    """(ring, Ulysses) degrees of a point's method. Raises ValueError."""
    upipe = point.upipe
    if point.method != "upipe":
        return methods.of(point.method).degrees(upipe.sp_size)
    check_ring_degree(upipe.sp_size, upipe.ring_degree, None)
    return upipe.ring_degree, upipe.ulysses_degree


def _shape(model: ModelConfig) -> Any:
    """The Hugging Face configuration of a model that may be a shape or a checkpoint."""
    if model.pretrained is None:
        return hf_config(model)
    from transformers import AutoConfig

    extra = {} if model.gguf_file is None else {"gguf_file": model.gguf_file}
    return AutoConfig.from_pretrained(model.pretrained, **extra)
