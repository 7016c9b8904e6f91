"""Whole-model training steps by our stack in several settings beside DeepSpeed's ALST stack: time and memory, in one run.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --layers 8 --tokens 256K --settings alst upipe:device upipe:host
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --layers 32 --tokens 512K --once --settings upipe:host=20
    torchrun --standalone --nproc_per_node 1 -m experiments.stack --layers 4 --tokens 256K --settings upipe upipe:U=H
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --model qwen3_32b --layers 4 --tokens 256K
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --layers 8 --tokens 64K 256K --settings \\
        upipe:host,offload=none upipe:host,offload=pinned upipe:host,offload=pageable
    python -m experiments.stack --model toy --layers 2 --tokens 256 --kernel reference     # seconds, on the CPU
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --layers 4 --tokens 128K --profile --settings \\
        ring ulysses upipe:host upipe:device native fpdt          # baselines; then --tokens 256K; and at 512K, with their states apart:
    torchrun --standalone --nproc_per_node 2 -m experiments.stack --layers 4 --tokens 512K --profile --once --short 64K --apart \\
        --settings ring ulysses upipe:host upipe:device native fpdt
    python -m experiments.stack --show                                                    # from records, nothing is run

Random weights in bf16 under ZeRO-3, all with the same ZeRO settings and attention kernel; see `experiments.stack_methods` for how
settings are written and `experiments.alst` for what ALST is. The learning rate is 0, so every step has the same loss: one that
differs from the first setting's by more than 0.1 %, or a gradient norm by more than 5 %, is told and makes the exit status 1.

For each length:
  - each setting makes a step with attention that answers zeros, which fills what is made once (states, host memory), then one
    with nothing cached on the device: its peak, allocated and reserved, above what is held before it (states of every engine
    there is);
  - --warmup more steps each, then --rounds rounds in which every setting makes one step, the order rotated. The slowest rank
    counts.
With --once the step for memory is the timed one too, for lengths where a step takes minutes; a short one of --short tokens comes
before, which compiles kernels. With --apart there is one engine at a time, and each setting makes its rounds by itself, not in
turn with the others. The step for memory also counts the bytes that
attention sends to other ranks (`upipe.traffic`) and, with --profile on GPUs, the communication that no computation hides and what
each part of the step took (`experiments.block_trace`, `upipe.parts`).
A setting that runs out of memory is recorded so, and left out from then on. One record a setting and length is appended to
stack.jsonl, all of a call under one run_id: with --once, --apart or --memory-only when the setting is through, otherwise when all
have made their last round. --time-limit counts from the start of the command (torchrun's, where it is the launcher), and nothing
begins that would end later if it took as long as the last of its kind. Where it, SIGTERM, SIGINT or an error ends the run early,
what was measured is recorded: `cut_off` names what ended it, times_s has the rounds that were made, and is null where only the step for
memory was.

u = local tokens x hidden size x 2 bytes. GiB = 2**30 bytes. Throughput is tokens/s/GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import upipe
from experiments import block_trace
from experiments.block import timed
from experiments.runs import begun, command_line, ended_early, exit_status, last_run, new_run_id
from experiments.stack_methods import (
    METHODS,
    MODELS,
    Engine,
    Setting,
    Shape,
    Together,
    ZeroAttention,
    cap_allocator,
    forget_caches,
    named_kernel,
)
from experiments.stack_report import NORM_BOUND, PARTS, disagreements, ratios, table
from upipe import kernels, outcomes, records, workspace
from upipe.build import hf_config
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.methods import native, ulysses
from upipe.preflight import check_kernel, check_kernel_blocks, check_schedule
from upipe.records import Record, format_tokens, parse_tokens, unit_gib
from upipe.traffic import Traffic

DX = {"gemm": "slabs", "bf16": "bfloat16"}
"""A setting's dx -> what records call it."""
SHORT = 2048
"""Tokens a rank of the step that --once begins with."""
DEFAULT = ("alst", "upipe:device", "upipe:host")
FIXED = {
    "sp": None, "dtype": "bfloat16", "optimizer": "none", "memory_only": False, "once": True, "apart": True, "profile": False, "rounds": 1,
    "warmup": 0, "short": None, "allocator_cap": None,
}
"""Options of a command that takes one step of each setting, and lets nothing else of them be chosen."""


def point_of(setting: Setting, model: str, layers: int, kernel: str, tokens: int, sp: int) -> str:
    """What a record of a setting and length is known by."""
    return f"{setting}-{model}-{layers}-{kernel}-{format_tokens(tokens)}-sp{sp}"


class Bench:
    """One call of the command on all ranks.

    Args:
        options: of the command line.
        run_id: of its records.
        made_with: fields of `environment`.
        started: what --time-limit counts from, of time.perf_counter(); by default now.
    """

    def __init__(self, options: argparse.Namespace, run_id: str, made_with: dict[str, Any], started: float | None = None) -> None:
        self.options, self.run_id, self.made_with = options, run_id, made_with
        self.lead, self.cuda = dist.get_rank() == 0, torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.settings = [Setting.parse(text) for text in options.settings]
        self.shape = Shape(options.model, options.layers, options.sp, options.dtype, options.optimizer)
        self.kernel = named_kernel(options.kernel)
        self.ranks = Together(run_id, started=started)
        self.engines: dict[tuple, Engine] = {}
        self.done: list[dict[str, Any]] = []
        # What is measured and not yet in a record, copied after each step, for a record that another thread makes.
        self.pending: dict[tuple[Setting, int], dict[str, Any]] = {}
        self.lock = threading.Lock()
        # Seconds of the last step, of the last engine made, and of the last steps for memory with their length.
        self.took, self.build_took, self.memory_took = 0.0, 0.0, (1, 0.0)

    def say(self, text: str) -> None:
        if self.lead:
            print(text, flush=True)

    def run(self) -> None:
        with ended_early(self.cut_off):
            self.measure()

    def measure(self) -> None:
        options = self.options
        if options.allocator_cap is not None:
            cap_allocator(options.allocator_cap, self.device)
        conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        if self.cuda and "expandable_segments:True" not in conf:
            self.say("warning: PYTORCH_CUDA_ALLOC_CONF lacks expandable_segments:True; fragments then add to what is reserved")
        for setting in self.settings if not options.apart else ():
            self.build(setting.engine)
        for tokens in options.tokens:
            self.length(tokens)
        while self.engines:
            self.engines.popitem()[1].close()

    def build(self, key: tuple) -> None:
        """The engine of all settings that share it, where there is none."""
        mine = [setting for setting in self.settings if setting.engine == key]
        if key in self.engines or not mine:
            return
        started, before = self.ranks.elapsed(), self.allocated()
        engine = self.engines[key] = Engine(self.shape, mine, self.kernel)
        engine.own_bytes = self.allocated() - before
        seconds = self.build_took = self.ranks.elapsed() - started
        self.say(f"engine of {', '.join(map(str, mine))}: {seconds:.1f} s, {engine.own_bytes / 2**30:.2f} GiB a rank")

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def length(self, tokens: int) -> None:
        options = self.options
        measured = {}
        for setting in list(self.settings):
            # Time grows with the length, or faster.
            needed = self.memory_took[1] * max(1.0, tokens / self.memory_took[0])
            needed += self.build_took if setting.engine not in self.engines else 0.0
            if self.no_time_for(needed):
                reason = f"the {options.time_limit:g} s of --time-limit were over, or would have been: the last one took {needed:.0f} s"
                self.keep([self.failed(setting, tokens, "timeout", reason)])
                continue
            if options.apart:
                for key in [key for key in self.engines if key != setting.engine]:
                    self.engines.pop(key).close()
                self.build(setting.engine)
            started = self.ranks.elapsed()
            outcome = self.memory_step(setting, tokens)
            if isinstance(outcome, dict):
                self.memory_took = tokens, self.ranks.elapsed() - started
                self.note(setting, tokens, outcome)
                if options.once or options.memory_only:
                    self.keep([self.record(setting, tokens, outcome)])
                elif options.apart:
                    self.keep(self.rounds(tokens, {setting: outcome}))
                else:
                    measured[setting] = outcome
                continue
            self.say(f"{format_tokens(tokens)} {setting}: {outcome[0]}, {outcome[1]}")
            self.keep([self.failed(setting, tokens, *outcome)])
            # What ran out of memory has left its engine in an unknown state.
            self.settings.remove(setting)
            self.engines.pop(setting.engine).close()
            self.build(setting.engine)
        if measured:
            self.keep(self.rounds(tokens, measured))

    def rounds(self, tokens: int, measured: dict[Setting, dict[str, Any]]) -> list[Record]:
        """Warm-up and rounds, as far as --time-limit lets them -> a record a setting."""
        cut_off = self.timed_steps(tokens, measured)
        return [self.record(setting, tokens, values, cut_off) for setting, values in measured.items()]

    def timed_steps(self, tokens: int, measured: dict[Setting, dict[str, Any]]) -> str | None:
        """Steps in turn, whose times go to the settings' values -> what cut them off."""
        options, order = self.options, list(measured)
        last = {setting: values["step_took"] for setting, values in measured.items()}
        limit = f"--time-limit {options.time_limit:g}"
        for _, setting in itertools.product(range(options.warmup), order):
            if self.no_time_for(last[setting]):
                self.say(f"{format_tokens(tokens)}: {limit} leaves no time for a warm-up step of {setting}")
                return limit
            self.step(setting, tokens, measured[setting])
            last[setting] = self.took
        for turn in range(options.rounds):
            # Half a round tells nothing.
            if self.no_time_for(sum(last.values())):
                self.say(f"{format_tokens(tokens)}: {limit} leaves no time for round {turn + 1}")
                return limit
            for setting in (order[(turn + i) % len(order)] for i in range(len(order))):
                seconds = self.step(setting, tokens, measured[setting])
                measured[setting]["seconds"].append(seconds)
                last[setting] = self.took
                self.note(setting, tokens, measured[setting])
                parts = " + ".join(f"{value:.3f}" for value in seconds[1:4])
                self.say(f"{format_tokens(tokens)} round {turn + 1}: {setting} {seconds[0]:.3f} s ({parts})")
        return None

    def no_time_for(self, needed: float) -> bool:
        return self.ranks.no_time_for(needed, self.options.time_limit)

    def step(self, setting: Setting, tokens: int, values: dict[str, Any], kernel: kernels.Kernel | None = None) -> list[float]:
        """A step -> seconds as `experiments.block.timed` has them: the whole, forward, backward, optimizer, by the wall clock."""
        started, engine = self.ranks.elapsed(), self.engines[setting.engine]
        engine.activate(setting)
        engine.kernel = self.kernel if kernel is None else kernel
        batch = engine.batch(tokens)
        workspace.clear()
        told: list[torch.Tensor] = []
        seconds = timed(lambda mark: told.append(engine.step(batch, mark)), self.device)
        loss = float(told[0])
        if not math.isfinite(loss):
            raise FloatingPointError(f"{setting} at {tokens} tokens: the loss is {loss}")
        after = engine.after_step()
        if kernel is None or self.options.memory_only:
            values["losses"].append(loss)
            values |= after
        self.took = self.ranks.elapsed() - started
        return seconds

    def memory_step(self, setting: Setting, tokens: int) -> dict[str, Any] | tuple[str, str]:
        """-> what was measured; or outcome and reason where a rank ran out of memory."""
        values: dict[str, Any] = {
            "seconds": [], "losses": [], "memory": {}, "engine_bytes": self.engines[setting.engine].own_bytes, "engines": len(self.engines),
        }
        failed = None
        try:
            forget_caches(self.device)
            if self.options.once and not self.options.memory_only:
                # Kernels are compiled when they are first used.
                self.step(setting, min(tokens, self.options.short or SHORT * self.shape.sp_size), {"losses": []})
            zeros = ZeroAttention(self.kernel, exact=self.options.memory_only)
            prepared = self.step(setting, tokens, values, zeros)[0]
            self.say(f"{format_tokens(tokens)} {setting}: buffers and host memory made in a step without attention, {prepared:.1f} s")
            engine = self.engines[setting.engine]
            engine.engine.empty_partition_cache()
            forget_caches(self.device, host_too=False)
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            states = self.allocated(), torch.cuda.memory_reserved() if self.cuda else 0
            values["losses"].clear()
            seconds = self.watched_step(setting, tokens, values, zeros if self.options.memory_only else None)
            values["first_s"], values["step_took"] = seconds[0], self.took
            if self.options.once and not self.options.memory_only:
                values["seconds"].append(seconds)
        except (RuntimeError, MemoryError, OSError) as error:
            failed = outcomes.classify(error)
            if not failed[0].startswith("oom"):
                raise
            traceback.clear_frames(error.__traceback__)
        every = self.ranks.every(failed)
        if any(every):
            return next(found for found in every if found)
        if self.cuda:
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            mine = {"allocated": allocated, "reserved": reserved, "states": states[0], "reserved_above": reserved - states[1]}
            values["memory"] = max(self.ranks.every(mine), key=lambda row: row["allocated"] - row["states"])
        for key in ("host_pinned", "host_pageable"):
            values[key] = sum(self.ranks.every(values[key]))
        values["bytes_sent"] = self.ranks.every(values["bytes_sent"])
        values |= {"memory_host": {key: values[key] for key in ("host_pinned", "host_pageable")}}
        memory, held = values["memory"], sum(values["memory_host"].values()) / 2**30
        above = f", {(memory['allocated'] - memory['states']) / 2**30:.2f} GiB above states" if self.cuda else ""
        self.say(
            f"{format_tokens(tokens)} {setting}: {seconds[0]:.3f} s{above}, host {held:.2f} GiB, "
            f"loss {values['losses'][0]:.6f}, gradient norm {values['grad_norm']:.5g}"
        )
        return values

    def watched_step(
        self, setting: Setting, tokens: int, values: dict[str, Any], kernel: kernels.Kernel | None
    ) -> list[float]:
        """`step`, with what it sends counted and, where asked for, its trace summed up."""
        seconds: list[float] = []

        def run() -> None:
            with Traffic() as traffic:
                seconds.extend(self.step(setting, tokens, values, kernel))
            values["bytes_sent"], values["messages"] = traffic.sent, traffic.messages

        if self.options.profile:
            engine = self.engines[setting.engine]
            engine.activate(setting)
            values["trace"] = block_trace.parts_of(run, dist.barrier, engine.engine)
        else:
            run()
        return seconds

    def blank(self, setting: Setting, tokens: int) -> Record:
        record = described(setting, self.options, self.shape, tokens)
        record.run_id, record.experiment = self.run_id, "stack"
        return record

    def failed(self, setting: Setting, tokens: int, outcome: str, reason: str) -> Record:
        record = self.blank(setting, tokens)
        record.outcome, record.reason = outcome, reason
        return record

    def record(self, setting: Setting, tokens: int, values: dict[str, Any], cut_off: str | None = None) -> Record:
        """cut_off: what ended the run before all rounds were made."""
        record, memory, seconds = self.blank(setting, tokens), values["memory"], values["seconds"]
        losses = values["losses"]
        record.loss, record.grad_norm = losses[-1], values["grad_norm"]
        record.host_pinned_gib = values["memory_host"]["host_pinned"] / 2**30
        record.host_pageable_gib = values["memory_host"]["host_pageable"] / 2**30
        record.extra |= {
            "losses": losses, "bytes_to_host": values["bytes_to_host"], "bytes_to_device": values["bytes_to_device"],
            "bytes_sent": max(values["bytes_sent"]), "bytes_sent_by_rank": values["bytes_sent"], "messages": values["messages"],
            "trace": values.get("trace"),
            "attention_output_bytes": values["attention_output_bytes"], "gradients_shared": values.get("gradients_shared"),
            "first_s": None if self.options.memory_only else values["first_s"], "engine_gib": values["engine_bytes"] / 2**30,
            "engines": values["engines"], "cut_off": cut_off,
        }
        if seconds:
            record.times_s = [row[0] for row in seconds]
            record.time_s = statistics.median(record.times_s)
            record.warmup_steps = 2 if self.options.once else 2 + self.options.warmup
            record.extra |= {
                "least_s": min(record.times_s), "most_s": max(record.times_s),
                "wall_s": statistics.median(row[4] for row in seconds),
                "parts_s": {name: statistics.median(row[1 + i] for row in seconds) for i, name in enumerate(PARTS)},
            }
            if self.cuda:
                record.tokens_per_s_per_gpu = records.tokens_per_step(record) / record.time_s / dist.get_world_size()
        if memory:
            unit = unit_gib(record)
            sizes = (memory[key] / 2**30 for key in ("allocated", "reserved", "states"))
            record.peak_gib, record.reserved_gib, record.states_gib = sizes
            record.peak_above_states_gib = record.peak_gib - record.states_gib
            record.peak_units = record.peak_above_states_gib / unit
            record.extra |= {"unit_gib": unit, "reserved_above_states_gib": memory["reserved_above"] / 2**30}
        return record

    def note(self, setting: Setting, tokens: int, values: dict[str, Any]) -> None:
        """Remember what is known of a setting between two steps, for `cut_off`."""
        copied = {key: list(value) if isinstance(value, list) else value for key, value in values.items()}
        with self.lock:
            self.pending[setting, tokens] = copied

    def cut_off(self, why: str) -> None:
        """Append a record of each setting that has none yet, of the steps that it made. Waits for no rank and no device: rank 0 has
        what the slowest rank took, and the memory of the one with most, since each step's end."""
        with self.lock:
            left = list(self.pending.items())
            self.pending.clear()
            for (setting, tokens), values in left if self.lead else ():
                try:
                    self.append([self.record(setting, tokens, values, why)])
                except records.RecordError as error:
                    print(f"{format_tokens(tokens)} {setting}: {error}", file=sys.stderr, flush=True)
            self.say(f"cut off: {why}; {len(self.done)} records of run {self.run_id}")

    def keep(self, made: list[Record]) -> None:
        """Append finished records. One that cannot be written is not tried again."""
        with self.lock:
            for record in made:
                self.pending.pop((Setting.parse(record.extra["setting"]), record.tokens), None)
            self.append(made)

    def append(self, made: list[Record]) -> None:
        """Add what follows from them and the length's earlier records, and append them."""
        rows = [record.to_dict() for record in made]
        for row in rows:
            row |= ratios(row, [*self.done, *rows]) | self.made_with
            if self.lead:
                records.append(row, self.options.results)
        self.done += rows


def described(setting: Setting, options: argparse.Namespace, shape: Shape, tokens: int) -> Record:
    """A record of what is known before anything ran, without what says of which run it is."""
    ours, config = setting.name == "upipe", hf_config(shape.config)
    layers, host_layers = options.layers, setting.host_layers
    U = setting.config(options.sp, config.num_attention_heads, "auto").heads_per_stage
    on_host = None if host_layers == 0 else layers if host_layers is None else min(layers, host_layers)
    simulated = f"simulated: allocates what {options.kernel} does, answers zeros"
    method = "none" if setting.name == "ulysses" and options.sp == 1 else METHODS[setting.name]
    ring, ulysses = setting.degrees(options.sp)
    return Record(
        method=method, model=options.model, layers=layers,
        tokens=tokens, sp=ulysses, ring=ring, dp=dist.get_world_size() // options.sp, zero=3,
        heads_per_stage=(ulysses if U is None else U) if ours else None, kernel=options.kernel,
        attention_output="device" if host_layers == 0 else "host",
        attention_output_host_layers=on_host,
        keep_layers_on_gpu=setting.kept(layers),
        store_every=2 if setting.pairs else 1,
        overlap=setting.overlap if ours else None, offload="pinned" if setting.peer else setting.offload,
        dx=DX[setting.dx] if ours else None,
        tile_tokens=None if setting.tiling is None else setting.tiling.mlp_tokens, dtype=options.dtype,
        extra={
            "point": point_of(setting, options.model, layers, options.kernel, tokens, options.sp),
            "scope": "model", "setting": str(setting), "method_form": setting.form, "fused": setting.fused, "pairs": setting.pairs,
            "offload_by": setting.offload_by,
            "block_tokens": setting.block_tokens, "block_tokens_backward": setting.block_tokens_backward,
            "hidden_size": config.hidden_size, "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "vocabulary": config.vocab_size,
            "optimizer": options.optimizer, "allocator_cap_gib": options.allocator_cap, "memory_only": options.memory_only,
            "attention": simulated if options.memory_only else "computed",
            "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
            "data": f"random tokens, seed {shape.seed}",
        },
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.stack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="llama3_8b", choices=list(MODELS), help="default: %(default)s")
    add("--layers", type=int, default=8, help="decoder layers, with embedding and head (default: %(default)s)")
    add("--tokens", nargs="+", default=["256K"], metavar="S", help="lengths of the whole sequence (default: 256K)")
    add("--sp", type=int, metavar="P", help="ranks that share a sequence (default: all)")
    add("--settings", nargs="+", default=list(DEFAULT), metavar="SETTING",
        help=f"NAME:item,... of {', '.join(METHODS)}; see experiments/stack_methods.py (default: {' '.join(DEFAULT)})")
    add("--kernel", default="cudnn", choices=kernels.names(), help="default: %(default)s")
    add("--optimizer", default="adamw", choices=["adamw", "none"],
        help="none: SGD without states, for less memory: 8 bytes a parameter over all ranks, not 16 (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    add("--rounds", type=int, default=3, help="timed steps of every setting (default: %(default)s)")
    add("--warmup", type=int, default=1, help="untimed steps of every setting after that for memory (default: %(default)s)")
    add("--once", action="store_true", help="time the step for memory, and no other")
    add("--short", metavar="S", help=f"length of the step that --once begins with (default: {SHORT} a rank)")
    add("--apart", action="store_true", help="one engine at a time, for lengths at which the states of all do not fit")
    add("--profile", action="store_true", help="trace the step for memory: parts, exposed communication (GPUs)")
    add("--memory-only", action="store_true", help="no times; attention allocates what the kernel does and answers zeros (fa4)")
    add("--allocator-cap", type=float, metavar="GIB", help="most that torch's allocator may take of the device")
    add("--time-limit", type=float, default=570.0, metavar="S",
        help="from the start of the command: begin nothing that would end later (default: %(default)g)")
    add("--results", default="experiments/results", metavar="DIR", help="where stack.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the table of the last run in --results; runs nothing")
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    for name, least in (("rounds", 1), ("warmup", 0), ("layers", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least {least}")
    parsed = [Setting.parse(text) for text in options.settings]
    twice = sorted({str(s) for s in parsed if parsed.count(s) > 1})
    if twice:
        raise ConfigError(f"--settings has {', '.join(twice)} twice")
    if options.profile and not torch.cuda.is_available():
        raise ConfigError("--profile needs GPUs: their kernels and copies are what is looked at; leave it out")
    try:
        options.short = None if options.short is None else parse_tokens(options.short)
        options.tokens = sorted({parse_tokens(str(text)) for text in options.tokens})
    except ValueError as error:
        raise ConfigError(f"--tokens, --short: {error}") from None
    code(options.commit)


def settle_ranks(options: argparse.Namespace) -> None:
    """What of the options depends on the running world. Raises ConfigError or PreflightError, on every rank."""
    world = dist.get_world_size()
    options.sp = world if options.sp is None else options.sp
    if options.sp < 1 or world % options.sp:
        raise ConfigError(f"--sp {options.sp} does not divide the {world} ranks")
    config = hf_config(Shape(options.model, options.layers, options.sp).config)
    for tokens in options.tokens:
        if tokens % options.sp:
            raise ConfigError(f"tokens={tokens} on {options.sp} ranks: use a multiple of {options.sp}")
    for text in options.settings:
        setting = Setting.parse(text)
        if setting.name == "plain" and options.sp > 1:
            raise ConfigError(f"setting {text!r} shares no sequence: use --sp 1, not {options.sp}")
        _check_method(setting, options, config)
        if max(setting.host_layers or 0, 2 * setting.pairs) > options.layers:
            raise ConfigError(f"setting {text!r}: there are {options.layers} layers")
        U = setting.config(options.sp, config.num_attention_heads, "auto").heads_per_stage
        check_schedule(config.num_attention_heads, config.num_key_value_heads, setting.degrees(options.sp)[1], U)
    if options.memory_only:
        heads = config.num_attention_heads // options.sp, config.num_key_value_heads // options.sp
        if named_kernel(options.kernel).backward_bytes(1024, *heads, config.head_dim) is None:
            raise ConfigError(
                f"--memory-only with --kernel {options.kernel}: what its backward holds has not been measured; use fa4"
            )
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        example = torch.empty(0, dtype=getattr(torch, options.dtype), device=device)
        check_kernel(options.kernel, kernels.Case.of(example, config.head_dim))


def _check_method(setting: Setting, options: argparse.Namespace, config: Any) -> None:
    """Refuse what a method cannot run. Raises ConfigError."""
    if setting.method is None:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        setting.method.layout(options.sp)
        setting.degrees(options.sp)
        if setting.name == "ulysses":
            ulysses.check_heads(config.num_attention_heads, config.num_key_value_heads, options.sp)
        if setting.name == "native" and options.sp > 1:
            native.check_device(device)
            native.check_kernel(options.kernel)
        check_kernel_blocks(setting.config(options.sp, config.num_attention_heads, options.kernel))
    except ValueError as error:
        raise ConfigError(f"setting {str(setting)!r}: {error}") from None


def show(options: argparse.Namespace) -> int:
    last = last_run(Path(options.results) / "stack.jsonl")
    print(f"run {last[0]['run_id']}, {last[0]['model']}, {last[0]['layers']} layers, {last[0]['gpu'] or 'CPU'}\n{table(last)}")
    return 0


def run(options: argparse.Namespace, command: str, started: float | None = None) -> list[dict[str, Any]]:
    """Measure on every rank of the running world -> the records, as they were appended; rank 0 prints the table.

    started: what --time-limit counts from, of time.perf_counter(); by default now.
    """
    settle_ranks(options)
    made_with = environment(command, options.commit, gpus=dist.get_world_size() if torch.cuda.is_available() else 0)
    bench = Bench(options, new_run_id(), made_with, started)
    bench.run()
    what = f"{options.model}, {options.layers} layers, P = {options.sp}, {options.dtype}"
    bench.say(f"\nrun {bench.run_id}, {what}\n{table(bench.done)}")
    for problem in disagreements(bench.done):
        bench.say(f"DIFFERS (bound of the gradient norm {NORM_BOUND:.0%}): {problem}")
    return bench.done


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0; 1 where settings disagree; 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.show:
            return show(options)
        settle(options)
        upipe.init_distributed()
        return 1 if disagreements(run(options, command_line("experiments.stack", arguments), begun())) else 0

    return exit_status("experiments.stack", body)


if __name__ == "__main__":
    sys.exit(main())
