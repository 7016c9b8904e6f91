"""Time and memory of one causal attention call, and of the same in blocks (`upipe.blocked`), on one GPU.

    python -m experiments.kernel_blocks                                       # on a GPU, under three minutes
    python -m experiments.kernel_blocks --kernels cudnn --tokens 512K --heads 16,4 --blocks 64K --rounds 1      # about a minute
    python -m experiments.kernel_blocks --kernels flash --tokens 128K 512K 1M --heads 2,1 --seconds 500
    python -m experiments.kernel_blocks --show                                # the last run, from its records
    python -m experiments.kernel_blocks --table                               # upipe/kernel_blocks.json from all records

A point is a kernel, a length and the query and kv heads of a call. The single call and each block size that is shorter are its
rivals. Each first runs once, forward and backward, which compiles what it needs: its result must be the single call's to within
rounding, and its peak above arguments and results is taken (on a GPU; a forward's log-sum-exp is in it). Then --rounds rounds, in
which every rival is timed, forward and backward by itself, the order rotated, so that a power limit hits all alike; short calls are
repeated to 50 ms. One record a rival is appended to kernel_blocks.jsonl, all of a command under one run_id. Points run by their work,
least first; one that would, by the rate so far, end after --seconds is left out and named.

What to do with the records: `--table` makes upipe/kernel_blocks.json anew, from which `upipe.kernel_block_tokens: auto` (and
`kernel_block_tokens_backward: auto`) choose; of several runs of a point the newest counts. Commit both files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.block import Clock, synchronize
from experiments.runs import command_line, exit_status, last_run, new_run_id
from upipe import blocked, kernel_blocks, kernels, records
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.preflight import check_kernel
from upipe.records import Record, format_tokens, parse_tokens

PASSES = ("forward", "backward")
HEAD_DIM = 128
USUAL = 450e12
"""FLOP/s that a GPU is taken to reach before a kernel was timed."""
FAR_OFF = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Relative difference from the single call above which blocks are called wrong."""


@dataclass(frozen=True)
class Point:
    """heads, kv_heads: of a call."""

    kernel: str
    tokens: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.kernel}-{format_tokens(self.tokens)}-{self.heads}q{self.kv_heads}kv"

    def flops(self, head_dim: int) -> float:
        """Of a causal forward; a backward has 2.5 times as many."""
        return 2.0 * self.tokens**2 * self.heads * head_dim

    def rivals(self, blocks: list[int]) -> list[int | None]:
        """Tokens of a block, None for the single call."""
        return [None, *(size for size in blocks if size < self.tokens)]


def name_of(size: int | None) -> str:
    return "single call" if size is None else f"blocks of {format_tokens(size)}"


class Tensors:
    """What a call takes and gives, bf16 on a GPU: grad, q, k, v, out, lse; dq, dk, dv."""

    def __init__(self, point: Point, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        like = {"generator": generator, "dtype": dtype, "device": device}
        self.grad, self.q, self.k, self.v = (
            torch.randn(1, point.tokens, heads, head_dim, **like) for heads in (point.heads, point.heads, point.kv_heads, point.kv_heads)
        )
        self.out, self.scale = torch.empty_like(self.q), head_dim**-0.5
        self.grads = [torch.empty_like(t) for t in (self.q, self.k, self.v)]
        self.lse: torch.Tensor | None = None

    def forward(self, kernel: kernels.Kernel) -> None:
        _, self.lse = kernel.forward(self.q, self.k, self.v, self.scale, out=self.out)

    def backward(self, kernel: kernels.Kernel) -> None:
        dq, dk, dv = self.grads
        kernel.backward(self.grad, self.q, self.k, self.v, self.out, self.lse, self.scale, dq=dq, dk=dk, dv=dv)

    def results(self) -> list[torch.Tensor]:
        return [self.out, *self.grads]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over that of b, a head at a time, as a whole fp32 copy may not fit."""
    parts = [
        ((a[:, :, h].float() - b[:, :, h].float()).square().sum(dtype=torch.float64), b[:, :, h].float().square().sum(dtype=torch.float64))
        for h in range(b.shape[2])
    ]
    return float((sum(p for p, _ in parts) / sum(w for _, w in parts)).sqrt())


class Bench:
    """One process, one device. made_with: fields of `environment`, and `run_id`. done: the records."""

    def __init__(self, options: argparse.Namespace, device: torch.device, made_with: dict[str, Any]) -> None:
        self.options, self.device, self.made_with = options, device, made_with
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.started, self.done = time.perf_counter(), []
        self.rates: dict[str, float] = {}

    def points(self) -> list[Point]:
        options = self.options
        found = [Point(*values, *heads) for *values, heads in itertools.product(options.kernels, options.tokens, options.heads)]
        return sorted(found, key=lambda p: (p.flops(1), -p.tokens))

    def seconds(self, point: Point) -> float:
        """How long a point will take by the kernel's slowest rate at the last: its first run, and the rounds."""
        rate = self.rates.get(point.kernel, USUAL)
        return 3.5 * point.flops(self.options.head_dim) * len(point.rivals(self.options.blocks)) * (1 + self.options.rounds) / rate

    def run(self) -> list[Point]:
        """Every point there is time for -> those left out."""
        left_out = []
        for point in self.points():
            if time.perf_counter() - self.started + self.seconds(point) > self.options.seconds:
                left_out.append(point)
                continue
            self.measure(point)
        return left_out

    def kernel(self, name: str, size: int | None) -> kernels.Kernel:
        """Raises ConfigError for a kernel that does not run here, or not in blocks."""
        size = "none" if size is None else size
        try:
            one = check_kernel(name, kernels.Case.of(torch.empty(0, dtype=self.dtype, device=self.device), self.options.head_dim))
            return blocked.in_blocks(one, size, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def measure(self, point: Point) -> None:
        options = self.options
        rivals = {size: self.kernel(point.kernel, size) for size in point.rivals(options.blocks)}
        tensors = Tensors(point, options.head_dim, self.dtype, self.device)
        first: dict[int | None, dict[str, Any]] = {}
        single: list[torch.Tensor] = []
        for size, kernel in rivals.items():
            first[size] = {f"{name}_extra_bytes": self.extra_bytes(kernel, tensors, name) for name in PASSES}
            if size is None:
                single = [t.clone() for t in tensors.results()]
            else:
                first[size]["errors"] = self.compared(point, size, tensors.results(), single)
        single.clear()
        times: dict[int | None, dict[str, list[float]]] = {size: {name: [] for name in PASSES} for size in rivals}
        order = list(rivals)
        for turn in range(options.rounds):
            for size in order[turn % len(order) :] + order[: turn % len(order)]:
                for name in PASSES:
                    times[size][name].append(self.timed(rivals[size], tensors, name, point))
        medians = {size: {name: statistics.median(of[name]) for name in PASSES} for size, of in times.items()}
        self.rates[point.kernel] = min(3.5 * point.flops(options.head_dim) / sum(of.values()) for of in medians.values())
        for size in rivals:
            self.record(point, size, times[size], medians, first[size])

    def extra_bytes(self, kernel: kernels.Kernel, tensors: Tensors, name: str) -> int | None:
        """Run a pass -> its peak above what is there before it, lse in it; None without a GPU."""
        synchronize(self.device)
        if self.device.type != "cuda":
            getattr(tensors, name)(kernel)
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(tensors, name)(kernel)
        synchronize(self.device)
        return torch.cuda.max_memory_allocated() - before

    def compared(self, point: Point, size: int, got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, float]:
        """Relative differences from the single call's. Raises AssertionError where one is too large."""
        errors = {name: relative(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), got, want)}
        if not max(errors.values()) <= FAR_OFF[self.dtype]:
            raise AssertionError(f"{point} in {name_of(size)} differs from the single call by {errors}")
        return errors

    def timed(self, kernel: kernels.Kernel, tensors: Tensors, name: str, point: Point) -> float:
        """Seconds of a pass, of as many in a row as take about 50 ms on a GPU."""
        fast = point.flops(self.options.head_dim) / USUAL
        repeats = max(1, min(100, int(0.05 / fast))) if self.device.type == "cuda" else 1
        clock = Clock(self.device.type == "cuda")
        synchronize(self.device)
        clock.mark()
        for _ in range(repeats):
            getattr(tensors, name)(kernel)
        clock.mark()
        synchronize(self.device)
        return clock.seconds()[0] / repeats

    def record(self, point: Point, size: int | None, times, medians, first: dict[str, Any]) -> None:
        both = [sum(pair) for pair in zip(*times.values())]
        extra: dict[str, Any] = {
            "point": f"{point}-{'single' if size is None else format_tokens(size)}", "scope": "kernel", "heads": point.heads,
            "kv_heads": point.kv_heads, "head_dim": self.options.head_dim, "block_tokens": size,
        }
        for name, factor in zip(PASSES, (1.0, 2.5)):
            flops = factor * point.flops(self.options.head_dim)
            extra |= {
                f"{name}_s": medians[size][name], f"{name}_times_s": times[name],
                f"{name}_tflops_per_s": flops / medians[size][name] / 1e12,
                f"{name}_over_single": medians[size][name] / medians[None][name],
            }
        row = Record(
            experiment="kernel_blocks", method="kernel", model="one-call", tokens=point.tokens, sp=1, ring=1, dp=1, kernel=point.kernel,
            dtype=str(self.dtype).removeprefix("torch."), times_s=both, time_s=statistics.median(both), warmup_steps=1, extra=extra | first,
        ).updated(self.made_with).to_dict()
        records.append(row, self.options.results)
        self.done.append(row)
        print(line(row), flush=True)


def line(r: dict[str, Any]) -> str:
    """A record in words."""
    passes = [
        f"{name} {r[f'{name}_s'] * 1e3:.1f} ms, {r[f'{name}_tflops_per_s']:.0f} TFLOP/s, {r[f'{name}_over_single']:.3f} of the single call"
        + ("" if r[f"{name}_extra_bytes"] is None else f", {r[f'{name}_extra_bytes'] / 2**20:.0f} MiB")
        for name in PASSES
    ]
    what = f"{r['kernel']} {format_tokens(r['tokens'])}, {r['heads']} heads on {r['kv_heads']}, {name_of(r['block_tokens'])}"
    return f"{what}: {'; '.join(passes)}"


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of upipe/kernel_blocks.json, from records in the order they were made: GPU runs in bf16 of a single call and blocks."""
    groups: dict[tuple, dict[str, Any]] = {}
    for r in found:
        if (r["experiment"], r["outcome"], r["dtype"]) != ("kernel_blocks", "ok", "bfloat16") or r["gpu"] is None:
            continue
        names = ("gpu", "kernel", "heads", "kv_heads", "head_dim", "tokens")
        key = tuple(r[name] for name in names)
        made = groups.setdefault((r["run_id"], *key), dict(zip(names, key)) | {name: {} for name in PASSES} | {"commit": r["commit"]})
        for name in PASSES:
            made[name]["none" if r["block_tokens"] is None else str(r["block_tokens"])] = round(1e3 * r[f"{name}_s"], 3)
    newest = {key[1:]: made for key, made in groups.items() if "none" in made["forward"] and len(made["forward"]) > 1}
    return [newest[key] for key in sorted(newest)]


def write_table(options: argparse.Namespace) -> int:
    made = rows(records.load(Path(options.results) / "kernel_blocks.jsonl"))
    Path(options.table_file).write_text(json.dumps(made, indent=1) + "\n")
    for row in made:
        for name in PASSES:
            where = row["tokens"], row["heads"], row["kv_heads"], row["head_dim"], row["gpu"], row["kernel"]
            size, why = kernel_blocks.choose(name, *where, tuple(made))
            call = f"{row['tokens']} tokens, {row['heads']} heads on {row['kv_heads']}"
            print(f"{row['gpu']}, {row['kernel']}, {call}, {name}: {name_of(size)} ({why})")
    print(f"{len(made)} rows in {options.table_file}")
    return 0


def heads_of(text: str) -> tuple[int, int]:
    """From "16,4". Raises ConfigError."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) % int(parts[1]):
        raise ConfigError(f"--heads {text!r}: write QUERY,KV heads of a call, the first a multiple of the second, as 16,4")
    return int(parts[0]), int(parts[1])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.kernel_blocks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--kernels", nargs="+", default=["cudnn", "fa4"], choices=kernels.names(), help="default: cudnn fa4")
    add("--tokens", nargs="+", default=["128K", "256K", "512K"], metavar="S", help="lengths (default: 128K 256K 512K)")
    add("--heads", nargs="+", default=["2,1", "4,1", "16,4"], metavar="Q,KV", help="heads of a call (default: 2,1 4,1 16,4)")
    add("--blocks", nargs="+", default=["32K", "64K", "128K"], metavar="C", help="beside the single call (default: 32K 64K 128K)")
    add("--head-dim", type=int, default=HEAD_DIM, help="default: %(default)s")
    add("--rounds", type=int, default=2, help="timed runs of every rival (default: %(default)s)")
    add("--seconds", type=float, default=160.0, help="no point is begun that would end later (default: %(default)s)")
    add("--results", default="experiments/results", metavar="DIR", help="where kernel_blocks.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the last run in --results; runs nothing")
    add("--table", action="store_true", help="write the table that auto reads from all records in --results; runs nothing")
    add("--table-file", default=kernel_blocks.TABLE, metavar="FILE", help="with --table (default: upipe/kernel_blocks.json)")
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    try:
        options.tokens, options.blocks = (sorted({parse_tokens(text) for text in texts}) for texts in (options.tokens, options.blocks))
    except ValueError as error:
        raise ConfigError(f"--tokens, --blocks: {error}") from None
    options.heads = [heads_of(text) for text in options.heads]
    for name in ("rounds", "head_dim"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if min(options.blocks) < 1 or min(options.blocks) >= min(options.tokens):
        raise ConfigError(f"--blocks {options.blocks} with --tokens {options.tokens}: every length needs a block shorter than it")
    code(options.commit)


def run(options: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """Measure -> the records, as they were appended."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if cuda:
        torch.zeros(1, device=device)  # a GPU is asked for its name where it is in use
    bench = Bench(options, device, environment(command, options.commit, gpus=int(cuda)) | {"run_id": new_run_id()})
    for name in options.kernels:
        bench.kernel(name, min(options.blocks))
    left_out = bench.run()
    if left_out:
        print(f"left out, as they would end after --seconds {options.seconds:g}: {', '.join(map(str, left_out))}")
    print(f"run {bench.made_with['run_id']}: {len(bench.done)} records, {time.perf_counter() - bench.started:.0f} s")
    return bench.done


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0, or 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.table:
            return write_table(options)
        if options.show:
            print("\n".join(map(line, last_run(Path(options.results) / "kernel_blocks.jsonl"))))
            return 0
        settle(options)
        run(options, command_line("experiments.kernel_blocks", arguments))
        return 0

    return exit_status("experiments.kernel_blocks", body)


if __name__ == "__main__":
    sys.exit(main())
