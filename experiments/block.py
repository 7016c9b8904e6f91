"""Time and memory of one attention block under layer checkpointing: UPipe beside DeepSpeed's Ulysses and the bare kernel.

    torchrun --standalone --nproc_per_node 2 -m experiments.block --tokens 256K 512K --kernels cudnn fa4
    torchrun --standalone --nproc_per_node 2 -m experiments.block --modes device host device:U=8 host:overlap=off,dx=bf16
    torchrun --standalone --nproc_per_node 2 -m experiments.block --kernel-rates --kernels cudnn fa4
    python -m experiments.block --model toy --tokens 256 512 --kernels reference      # seconds, on the CPU
    python -m experiments.block --show [--plot block.png]                            # from records, nothing is run

Methods, all in one run and one process group:
  ulysses   DeepSpeed's UlyssesSPAttentionHF on the Hugging Face attention module, around the same kernel (with one rank
            DeepSpeed does nothing: the plain module around the kernel, recorded as method none)
  upipe     upipe.apply on the same module, once for each of --modes
  kernel    kernel calls of the same FLOPs and nothing else: the limit

A step is a forward without gradients, a forward again, and a backward, as in a checkpointed layer. First every method is
compared with the unsharded module at a small length: a wrong one is an error. Then for each kernel and length:
  - one step with nothing cached (no workspace, no cuBLAS workspaces): its peak above the inputs, allocated and reserved,
    all that it makes counted, gradients too;
  - --warmup more steps each, then --rounds rounds, in which every method makes one step, the order rotated, so that power
    limits hit all alike. A step starts at a barrier; CUDA events time it and its three parts; the slowest rank counts.
  - with --profile one more step under torch.profiler: communication and host copies, and how much of them no compute hides.
One record a method, mode, kernel and length is appended to block.jsonl, all of a call under one run_id.

u = local tokens x hidden size x 2 bytes. Of two lengths follow a slope in u and a constant in GiB.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import upipe
from experiments.block_methods import (
    BOUNDS,
    PRESETS,
    Block,
    Inputs,
    Method,
    Mode,
    attention_flops,
    check,
    made,
    relative_error,
)
from experiments.block_report import PARTS, ratios, series, slopes, table
from experiments.block_trace import summary, trace
from experiments.runs import command_line, exit_status, last_run, new_run_id
from upipe import host, kernels, records, workspace
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.preflight import check_kernel
from upipe.records import Record, format_tokens, parse_tokens, unit_gib

DX = {"gemm": "slabs", "bf16": "bfloat16"}
"""A mode's dx -> what records call it."""
RATE_TOKENS = tuple(2**n for n in range(14, 21))
FAR_OFF = 0.1
"""Relative difference of dx from the first method's, at full length, above which a method is called wrong."""


class Clock:
    """Marks on the current stream (on the CPU: of the wall clock), and the seconds between them."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.marks = cuda, []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between neighbouring marks; the work must be done."""
        if self.cuda:
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]
        return [b - a for a, b in itertools.pairwise(self.marks)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Of each value the largest of all ranks."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def timed(run: Callable[[Callable[[], None]], None], device: torch.device) -> list[float]:
    """Seconds of one call: the whole, each part (`run` is given what to call after each), and by the wall clock from before
    it is queued until the device is idle. Each is that of its slowest rank, so parts may add up to more than the whole."""
    clock = Clock(device.type == "cuda")
    dist.barrier()
    synchronize(device)
    started = time.perf_counter()
    clock.mark()
    run(clock.mark)
    synchronize(device)
    wall = time.perf_counter() - started
    parts = clock.seconds()
    return slowest([sum(parts), *parts, wall], device)


def step_seconds(method: Method, inputs: Inputs) -> list[float]:
    """`timed` of a step, its gradients dropped afterwards."""
    method.block.forget_gradients(inputs)
    method.prepare(inputs)
    try:
        return timed(lambda mark: method.step(inputs, mark), method.block.device)
    finally:
        method.release()
        method.block.forget_gradients(inputs)


def one_head(kernel: kernels.Kernel, tensors: tuple[torch.Tensor, ...], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of a forward and of a backward, for each round; each is that of as many calls in a row as take about 50 ms.

    tensors: the output's gradient, q, k, v, each [1, S, 1, d].
    """
    grad, q, k, v = tensors
    scale = q.shape[-1] ** -0.5

    def once(repeats: int) -> list[float]:
        def run(mark):
            for _ in range(repeats):
                out, lse = kernel.forward(q, k, v, scale)
            mark()
            for _ in range(repeats):
                kernel.backward(grad, q, k, v, out, lse, scale)
            mark()

        return [seconds / repeats for seconds in timed(run, device)[1:3]]

    once(1)
    repeats = max(1, min(100, int(0.05 / sum(once(1)))))
    return [once(repeats) for _ in range(rounds)]


def peak(method: Method, inputs: Inputs) -> tuple[dict[str, float], torch.Tensor | None]:
    """One step with nothing cached before it.

    Returns:
        bytes on the rank with the highest peak (none on the CPU): allocated and reserved peak, each also above what was
        there before the step, and pinned host memory of all ranks after it; and some rows of dx [.., D], None for the bare
        kernel.
    """
    device = method.block.device
    method.block.forget_gradients(inputs)
    method.prepare(inputs)
    dist.barrier()
    synchronize(device)
    gc.collect()
    workspace.clear()
    host.pool().clear()
    cuda = device.type == "cuda"
    if cuda:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    method.step(inputs)
    measured: dict[str, float] = {}
    if cuda:
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        mine = {
            "above": allocated - before[0], "reserved_above": reserved - before[1], "allocated": allocated, "reserved": reserved,
            "pinned": host.pool().pinned_bytes,
        }
        every: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        measured = max(every, key=lambda row: row["above"]) | {"pinned": sum(row["pinned"] for row in every)}
    rows = None if inputs.x.grad is None else inputs.x.grad[0, :: max(1, inputs.x.shape[1] // 64)].float().clone()
    method.release()
    method.block.forget_gradients(inputs)
    return measured, rows


def differs(rows: torch.Tensor | None, wanted: torch.Tensor | None, method: Method) -> float | None:
    """How far dx is from the first method's at full length, on the rank where it is farthest; None where there is no other.

    Raises AssertionError above `FAR_OFF`: whatever was timed would not be attention's gradient.
    """
    if rows is None or wanted is None:
        return None
    (error,) = slowest([relative_error(rows, wanted)], method.block.device)
    if not error <= FAR_OFF:
        raise AssertionError(f"{method.label} ({method.kernel.name}): at full length dx differs from the first method's by {error:.3g}")
    return error


def profiled(method: Method, inputs: Inputs) -> dict[str, Any]:
    """`summary` of one step, of the rank that the others wait for: the one whose exchanges take least, since on the others
    they last until it comes. `ranks`: every rank's totals."""
    method.block.forget_gradients(inputs)
    method.prepare(inputs)
    mine = summary(trace(lambda: method.step(inputs), dist.barrier)) | {"rank": dist.get_rank()}
    method.release()
    method.block.forget_gradients(inputs)
    every: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    awaited = min(every, key=lambda row: row["nccl"]["total_ms"])
    return awaited | {"ranks": [{name: row[name] for name in ("rank", "window_ms", "compute_ms", "nccl", "host_copies")} for row in every]}


class Bench:
    """One call of the command on all ranks.

    Args:
        options: of the command line.
        block, run_id: see there.
        made_with: fields of `environment`.
    """

    def __init__(self, options: argparse.Namespace, block: Block, run_id: str, made_with: dict[str, Any]) -> None:
        self.options, self.block, self.run_id, self.made_with = options, block, run_id, made_with
        self.lead, self.cuda = dist.get_rank() == 0, block.device.type == "cuda"
        self.done: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        if self.lead:
            print(text, flush=True)

    def blocks(self) -> None:
        """Every kernel: check the methods, then every length."""
        options, modes = self.options, [Mode.parse(text) for text in self.options.modes]
        for name in options.kernels:
            with made(self.block, self.kernel(name), options.methods, modes) as methods:
                small = max(self.block.P, min(options.check_tokens, options.tokens[0]) // self.block.P * self.block.P)
                for label, errors in check(self.block, methods, small).items():
                    told = ", ".join(f"{key} {value:.2g}" for key, value in errors.items())
                    self.say(f"right at {small} tokens: {label} ({name}): {told}")
                for tokens in options.tokens:
                    self.length(methods, tokens)

    def kernel(self, name: str) -> kernels.Kernel:
        """Raises PreflightError where the kernel is missing or declines."""
        return check_kernel(name, kernels.Case.of(torch.empty(0, dtype=self.block.dtype, device=self.block.device), self.block.d))

    def length(self, methods: list[Method], tokens: int) -> None:
        options, inputs = self.options, self.block.inputs(tokens)
        measured: list[dict[str, Any]] = []
        first: torch.Tensor | None = None
        for method in methods:
            memory, rows = peak(method, inputs)
            measured.append({"memory": memory, "dx_difference": differs(rows, first, method), "seconds": []})
            measured[-1]["workspace_bytes"] = sum(workspace.report().values()) if method.name == "upipe" else None
            first = rows if first is None else first
            said = f": peak {memory['above'] / 2**30:.3f} GiB above inputs" if memory else ""
            self.say(f"{format_tokens(tokens)} {method.kernel.name} {method.label}{said}")
        if not options.memory_only:
            for _, method in itertools.product(range(options.warmup), methods):
                step_seconds(method, inputs)
            for turn in range(options.rounds):
                for index in ((turn + i) % len(methods) for i in range(len(methods))):
                    seconds = step_seconds(methods[index], inputs)
                    measured[index]["seconds"].append(seconds)
                    parts = " + ".join(f"{value * 1e3:.2f}" for value in seconds[1:4])
                    self.say(
                        f"{format_tokens(tokens)} {methods[index].kernel.name} round {turn + 1}: {methods[index].label} "
                        f"{seconds[0] * 1e3:.2f} ms ({parts})"
                    )
        if options.profile:
            for method, values in zip(methods, measured):
                if method.name != "kernel":
                    values["profile"] = profiled(method, inputs)
                    self.say_profile(tokens, method, values["profile"])
        self.keep([self.record(method, inputs, values) for method, values in zip(methods, measured)])

    def say_profile(self, tokens: int, method: Method, profile: dict[str, Any]) -> None:
        self.say(
            f"{format_tokens(tokens)} {method.kernel.name} profile of {method.label}: {profile['window_ms']:.2f} ms, "
            f"idle {profile['idle_ms']:.2f} ms"
        )
        for name in ("nccl", "host_copies", "communication"):
            exposed = profile[name]
            if exposed["total_ms"]:
                self.say(f"    {name}: {exposed['total_ms']:.2f} ms, exposed {exposed['exposed_ms']:.2f} ({exposed['exposed_ratio']:.1%})")
        for row in profile["top"]:
            self.say(f"    {row['ms']:9.2f} ms {row['share']:6.1%} x{row['count']:<4} {row['name']}")

    def record(self, method: Method, inputs: Inputs, values: dict[str, Any]) -> Record:
        block, options, mode = self.block, self.options, method.mode
        seconds, memory = values["seconds"], values["memory"]
        ours = method.name == "upipe"
        times = [row[0] for row in seconds]
        record = Record(
            run_id=self.run_id, experiment="block", method=method.name, model=block.name, layers=1, tokens=inputs.tokens,
            sp=block.P, ring=1, dp=1, heads_per_stage=method.heads_per_stage, kernel=method.kernel.name,
            attention_output=mode.attention_output if mode else "device", overlap=mode.overlap if ours else None,
            dx=DX[mode.dx] if ours else None, offload="none", dtype=str(block.dtype).removeprefix("torch."),
            extra={
                "point": f"{method.label}-{method.kernel.name}-{format_tokens(inputs.tokens)}",
                "scope": "block", "mode": str(mode) if mode else None, "forwards": method.forwards, "hidden_size": block.D,
                "heads": block.H, "kv_heads": block.K, "head_dim": block.d, "inputs_gib": inputs.nbytes / 2**30,
                "weights_gib": block.weights_nbytes / 2**30, "workspace_bytes": values["workspace_bytes"],
                "dx_difference": values["dx_difference"], "profile": values.get("profile"),
                "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
            },
        )
        if seconds:
            record.times_s, record.time_s, record.warmup_steps = times, statistics.median(times), 1 + options.warmup
            flops = attention_flops(inputs.tokens, block.d, block.H, method.forwards) / block.P
            record.extra |= {
                "least_s": min(times), "most_s": max(times),
                "parts_s": {name: statistics.median(row[1 + i] for row in seconds) for i, name in enumerate(PARTS)},
                "wall_s": statistics.median(row[4] for row in seconds),
                "attention_tflops_per_s": flops / record.time_s / 1e12,
            }
        if memory:
            unit = unit_gib(record)
            record.peak_gib, record.reserved_gib = memory["allocated"] / 2**30, memory["reserved"] / 2**30
            record.peak_above_inputs_gib = memory["above"] / 2**30
            record.peak_units = record.peak_above_inputs_gib / unit
            if ours:
                record.host_pinned_gib = memory["pinned"] / 2**30
            record.extra |= {
                "peak_above_inputs_bytes": memory["above"], "reserved_above_inputs_bytes": memory["reserved_above"],
                "reserved_above_inputs_gib": memory["reserved_above"] / 2**30,
                "reserved_units": memory["reserved_above"] / 2**30 / unit, "unit_gib": unit,
            }
        return record

    def keep(self, made: list[Record]) -> None:
        """Add what follows from several records, and append them."""
        rows = [record.to_dict() for record in made]
        for row in rows:
            row |= ratios(row, rows)
        self.done += rows
        ends = slopes(self.done)
        for row in rows:
            end = ends.get(series(row))
            if end is not None and row["tokens"] in end["slope_tokens"]:
                row |= end
            self.append(row)

    def append(self, row: dict[str, Any]) -> None:
        row |= self.made_with
        if self.lead:
            records.append(row, self.options.results)

    def rates(self) -> None:
        """Every kernel and length: TFLOP/s of one head, forward and backward; each rank runs its own."""
        block, d, options = self.block, self.block.d, self.options
        for name, tokens in itertools.product(options.kernels, options.tokens):
            kernel = self.kernel(name)
            generator = torch.Generator(block.device).manual_seed(block.seed)
            like = {"generator": generator, "dtype": block.dtype, "device": block.device}
            grad, q, k, v = (torch.randn(1, tokens, 1, d, **like) for _ in range(4))
            rows = one_head(kernel, (grad, q, k, v), options.rounds, block.device)
            flops = attention_flops(tokens, d, 1, 0) / 2.5
            medians = [statistics.median(part) for part in zip(*rows)]
            times = [sum(row) for row in rows]
            record = Record(
                run_id=self.run_id, experiment="block", method="kernel", model="one-head", tokens=tokens, sp=1, ring=1, dp=block.P,
                kernel=name, dtype=str(block.dtype).removeprefix("torch."), times_s=times, time_s=statistics.median(times), warmup_steps=2,
                extra={
                    "point": f"rates-{name}-d{d}-{format_tokens(tokens)}", "scope": "kernel", "heads": 1, "kv_heads": 1, "head_dim": d,
                    "forward_s": medians[0], "backward_s": medians[1],
                    "forward_tflops_per_s": flops / medians[0] / 1e12, "backward_tflops_per_s": 2.5 * flops / medians[1] / 1e12,
                },
            )
            row = record.to_dict()
            self.say("{kernel} {length}: forward {forward_tflops_per_s:.1f}, backward {backward_tflops_per_s:.1f} TFLOP/s".format(
                length=format_tokens(tokens), **row))
            self.done.append(row)
            self.append(row)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.block", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="llama3_8b", choices=list(PRESETS), help="whose attention block (default: %(default)s)")
    add("--tokens", nargs="+", metavar="S",
        help="lengths of the whole sequence, e.g. 64K (default: 64K 256K 512K; with --kernel-rates 16K to 1M)")
    add("--kernels", nargs="+", default=["cudnn"], choices=kernels.names(), help="attention kernels (default: cudnn)")
    add("--methods", nargs="+", default=["ulysses", "upipe", "kernel"], choices=["ulysses", "upipe", "kernel"], help="default: all")
    add("--modes", nargs="+", default=["device", "host"], metavar="MODE",
        help="of upipe: device or host, then any of overlap=off, dx=bf16, U=HEADS, as in host:overlap=off,dx=bf16 (default: device host)")
    add("--dtype", default="bfloat16", choices=[str(t).removeprefix("torch.") for t in BOUNDS], help="default: %(default)s")
    add("--rounds", type=int, default=5, help="timed steps of every method (default: %(default)s)")
    add("--warmup", type=int, default=1, help="untimed steps of every method after that for memory (default: %(default)s)")
    add("--check-tokens", type=int, default=2048, metavar="S", help="length at which methods are compared first (default: %(default)s)")
    add("--memory-only", action="store_true", help="only the step for memory: no times")
    add("--profile", action="store_true", help="one more step of every method under the profiler (GPU)")
    add("--kernel-rates", action="store_true", help="in place of the methods: one head's forward and backward by kernel and length")
    add("--results", default="experiments/results", metavar="DIR", help="where block.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the table of the last run in --results; runs nothing")
    add("--plot", metavar="FILE", help="draw time and peak of the run (with --show: of the last run in --results) into a picture")
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    for name, least in (("rounds", 1), ("warmup", 0), ("check_tokens", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.rounds > 1 and not options.memory_only and options.warmup == 0:
        raise ConfigError(f"--warmup 0 with --rounds {options.rounds}: the step for memory fills caches that it emptied; warm up after it")
    if options.profile and not torch.cuda.is_available():
        raise ConfigError("--profile needs a GPU: its kernels and copies are what is looked at")
    for text in options.modes:
        Mode.parse(text)
    default = RATE_TOKENS if options.kernel_rates else (2**16, 2**18, 2**19)
    try:
        options.tokens = sorted({parse_tokens(text) for text in options.tokens or default})
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from None
    code(options.commit)


def show(options: argparse.Namespace) -> int:
    last = last_run(Path(options.results) / "block.jsonl")
    print(f"run {last[0]['run_id']}, {last[0]['model']}, {last[0]['gpu'] or 'CPU'}\n{table(last)}")
    if options.plot:
        from experiments.block_plot import draw

        draw(last, options.plot)
    return 0


def run(options: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """Measure on every rank of the running world -> the records, as they were appended; rank 0 prints the table."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    made_with = environment(command, options.commit, gpus=dist.get_world_size() if device.type == "cuda" else 0)
    bench = Bench(options, Block(options.model, getattr(torch, options.dtype), device), new_run_id(), made_with)
    for kernel in options.kernels:
        bench.kernel(kernel)
    for tokens in options.tokens:
        bench.block.check_tokens(tokens)
    if options.kernel_rates:
        bench.rates()
    else:
        bench.blocks()
    bench.say(f"\nrun {bench.run_id}, {bench.block.name}, P = {bench.block.P}, {options.dtype}\n{table(bench.done)}")
    return bench.done


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0, or 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.show:
            return show(options)
        settle(options)
        upipe.init_distributed()
        done = run(options, command_line("experiments.block", arguments))
        if options.plot and dist.get_rank() == 0:
            from experiments.block_plot import draw

            draw(done, options.plot)
        return 0

    return exit_status("experiments.block", body)


if __name__ == "__main__":
    sys.exit(main())
