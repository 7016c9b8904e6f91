"""The longest sequence that trains under a cap on device memory, with one lever after another: data and figure.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    torchrun --standalone --nproc_per_node 2 -m experiments.ladder --preset figure1 --memory-only --plot ladder_figure1.png
    torchrun --standalone --nproc_per_node 1 -m experiments.ladder --preset trl --memory-only --plot ladder_trl.png
    python -m experiments.ladder --show --preset trl --plot ladder_trl.png        # from records, nothing is run
    python -m experiments.ladder --predict --preset trl                           # what the planner says, without a GPU

Presets:
  figure1   the levers of Figure 1 of Untied Ulysses (arXiv 2602.21196): two layers of Llama3-8B, all ranks of the world (two
            GPUs), 28 GiB. Adam's states are on the device. At its end, beside the figure's, each decoder layer as one function.
  trl       those of TRL's guide to training at a million tokens: Qwen3-4B, one GPU, 77 GiB. Four of its 36 layers are trained;
            the others' states, up to the guide's 22 GB in all, and, where nothing is offloaded, the others' saved inputs are held
            as memory that nothing uses. Beside the guide's own lengths, on 80 GB with its own software.

For each lever single optimizer steps are run in this process, on an engine that has made one of --grain tokens (Adam's moments come
with it; records before `moments_before` are of an engine's first step), until lengths --grain tokens apart do and do not fit. The
search begins at what --forecasts say of the lever; without a forecast with two short steps, and then at the length that a line through
their peaks gives. A step that runs out of memory ends in
OutOfMemoryError; its engine is thrown away and made anew. With --memory-only attention allocates what the kernel does and
computes nothing, so that long lengths take seconds; the record says so.
One record a lever is appended to ladder.jsonl: the longest length that trained, its peak, and every length that was tried. Where
--time-limit, SIGTERM, SIGINT or an error ends a search early, its record says so (search_complete, cut_off) and has what is known;
a lever that was not begun has none.

With --predict nothing is run: see `experiments.ladder_forecast`. It is printed beside what ladder.jsonl in --results
has; with --keep its records, provenance "predicted", go to predict_points.jsonl there (`of: ladder`).
"""

from __future__ import annotations

import argparse
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import upipe
from experiments.block_report import _aligned
from experiments.runs import begun, command_line, ended_early, exit_status, last_run, made_by, new_run_id
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
from experiments.table import REPORTED, longest_of, read_reported
from upipe import kernels, outcomes, records
from upipe.build import hf_config
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.preflight import check_kernel
from upipe.records import Record, format_tokens, parse_tokens, unit_gib


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: what it adds, the setting, and what the source calls it (the method of reported.csv)."""

    label: str
    setting: str
    reported: str | None = None


@dataclass(frozen=True)
class Preset:
    """A ladder. states_gib: states of the whole model, all its layers; None: those of the layers trained. gpus: how many a prediction
    is for."""

    model: str
    layers: int
    cap_gib: float
    optimizer: str
    rungs: tuple[Rung, ...]
    states_gib: float | None = None
    all_layers: int | None = None
    source: str | None = None
    gpus: int = 2


PRESETS = {
    "figure1": Preset(
        "llama3_8b", 2, 28.0, "adamw",
        (
            Rung("plain", "plain:checkpoint=off,tiles=off,loss=hf"),
            Rung("+ Ulysses", "ulysses:rope=model,checkpoint=off,tiles=off,loss=hf"),
            Rung("+ checkpoint", "ulysses:rope=model,offload=none,tiles=off,loss=hf"),
            Rung("+ offload", "ulysses:rope=model,offload=pinned,tiles=off,loss=hf"),
            Rung("+ tiled loss", "ulysses:rope=model,offload=pinned,tiles=loss"),
            Rung("+ tiled MLP", "ulysses:rope=model,offload=pinned"),
            Rung("+ UPipe", "upipe:device,offload=pinned"),
            Rung("+ output on host", "upipe:host,offload=pinned"),
            Rung("one function a layer", "upipe:host,layer=fused,offload=pinned"),
        ),
    ),
    "trl": Preset(
        "qwen3_4b", 4, 77.0, "none",
        (
            Rung("plain loss", "plain:offload=none,tiles=off,loss=hf", "plain-loss"),
            Rung("tiled loss", "plain:offload=none,tiles=loss", "chunked-loss"),
            Rung("+ offload", "plain:offload=pinned,tiles=loss", "chunked-loss+offload"),
            Rung("+ tiled MLP", "plain:offload=pinned"),
            Rung("+ UPipe", "upipe:device,offload=pinned"),
        ),
        states_gib=22e9 / 2**30, all_layers=36, source="trl-1m-guide", gpus=1,
    ),
}


class TimeIsUp(Exception):
    """No time is left for another step."""


@dataclass
class Found:
    """What a search found: the longest length that fits (0: none), the shortest that does not (None: none met), and whether they
    are a grain apart or the longest allowed fits; peaks: bytes by length, None where it did not fit."""

    longest: int = 0
    shortest_not: int | None = None
    complete: bool = False
    peaks: dict[int, float | None] = field(default_factory=dict)


def search(
    probe: Callable[[int], float | None], cap: float, grain: int, first: int, most: int, expected: bool = False,
) -> Found:  # fmt: skip
    """Find the longest multiple of `grain` up to `most` that fits.

    From an expected length the search goes up or down by a 64th of it, twice that and so on, and then to the middle. Else the line
    through the two longest peaks says where to look, if it rises: peaks near the cap may not, where the allocator gives cached blocks
    back. From there the search goes up by one grain, two, four, or down by one and then to the middle; with no line, to twice the
    longest, or to the middle.

    Args:
        probe: tokens -> peak in bytes, or None where it does not fit; raises TimeIsUp.
        cap: bytes there are.
        grain, first, most: tokens: what lengths are multiples of, about where to begin, and the longest to be tried.
        expected: whether `first` is a forecast of the result.
    """
    found, limit, misses = Found(), most // grain, 0
    n = min(max(1, first // grain), limit)
    stride = max(1, n // 64) if expected else 1
    while True:
        try:
            peak = found.peaks[n * grain] = probe(n * grain)
        except TimeIsUp:
            return found
        if peak is None:
            found.shortest_not, misses = n * grain, misses + 1
        else:
            found.longest, misses = n * grain, 0
        low, high = found.longest // grain, limit + 1 if found.shortest_not is None else found.shortest_not // grain
        if high - low <= 1:
            found.complete = True
            return found
        fits = sorted(m for m, peak in found.peaks.items() if peak is not None)
        if expected and fits and found.shortest_not is not None:
            n = (low + high) // 2
        elif expected:
            n, stride = low + stride if fits else high - stride, 2 * stride
        elif len(fits) < 2:
            n = 2 * low if fits else high // 2
        else:
            a, b = fits[-2:]
            slope = (found.peaks[b] - found.peaks[a]) / (b - a) * grain
            if slope <= 0:
                n = min(2 * low, (low + high) // 2)
            else:
                n = low + int((cap - found.peaks[b]) / slope)
            if n <= low:
                n, stride = low + stride, 2 * stride
            elif n >= high:
                n = high - 1 if misses < 2 else (low + high) // 2
        n = min(max(n, low + 1), high - 1)


def forecast_of(options: argparse.Namespace) -> dict[str, int]:
    """Lever -> the longest length that the planner's last forecast of it says, of those in --forecasts."""
    same = {"of": "ladder", "provenance": "predicted", "preset": options.preset, "model": options.model, "layers": options.layers,
            "cap_gib": options.cap, "optimizer": options.optimizer}  # fmt: skip
    path = Path(options.forecasts) / "predict_points.jsonl"
    found = records.load(path) if path.exists() else []
    return {r["rung"]: r["longest_tokens"] for r in found if all(r.get(name) == value for name, value in same.items())}


class Ladder:
    """One call of the command on all ranks.

    Args:
        options: of the command line.
        run_id: of its records.
        made_with: fields of `environment`.
        arithmetic: (setting, tokens) -> bytes: stands for the memory where there is no GPU. The steps run all the same.
        started: what --time-limit counts from, of time.perf_counter(); by default now.
    """

    def __init__(
        self, options: argparse.Namespace, run_id: str, made_with: dict[str, Any],
        arithmetic: Callable[[Setting, int], float] | None = None, started: float | None = None,
    ) -> None:
        self.options, self.run_id, self.made_with, self.arithmetic = options, run_id, made_with, arithmetic
        self.preset = PRESETS[options.preset]
        self.lead, self.cuda = dist.get_rank() == 0, torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.kernel = named_kernel(options.kernel)
        self.ranks = Together(run_id, started=started)
        self.done: list[dict[str, Any]] = []
        self.engine: Engine | None = None
        self.ballast: list[torch.Tensor] = []
        self.left = 0
        # What is being searched, and what was found of it up to now, for a record that another thread makes.
        self.now: tuple[Rung, Setting, Shape] | None = None
        self.expected: int | None = None
        self.peaks: dict[int, float | None] = {}
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        if self.lead:
            print(text, flush=True)

    def run(self) -> None:
        with ended_early(self.cut_off):
            self.climb()

    def climb(self) -> None:
        rungs = [rung for rung in self.preset.rungs if not self.options.rungs or rung.label in self.options.rungs]
        first, said = self.options.first, forecast_of(self.options)
        for rung in rungs:
            found = self.rung(rung, first, said.get(rung.label))
            # What a lever adds is seldom taken away by the next.
            first = max(first, found.longest // 2)

    def rung(self, rung: Rung, first: int, expected: int | None) -> Found:
        setting = Setting.parse(rung.setting)
        sp = 1 if setting.name == "plain" else dist.get_world_size()
        shape = Shape(self.options.model, self.options.layers, sp, self.options.dtype, self.options.optimizer)
        self.facts: dict[int, dict[str, Any]] = {}
        with self.lock:
            self.now, self.peaks = (rung, setting, shape), {}
        options = self.options
        self.expected, first = expected, expected or first
        found = search(
            lambda tokens: self.probe(rung, setting, shape, tokens), self.cap, options.grain, first, options.most, bool(expected)
        )
        self.close()
        if not found.complete and not found.peaks:
            self.say(f"{rung.label}: not begun, and not recorded")
            return found
        cut = "" if found.complete else ", the search was not finished"
        self.say(f"{rung.label}: {format_tokens(found.longest)} trains{cut}")
        self.keep(self.record(rung, setting, shape, found))
        return found

    @property
    def cap(self) -> float:
        return self.options.cap * 2**30

    def probe(self, rung: Rung, setting: Setting, shape: Shape, tokens: int) -> float | None:
        """One step -> reserved bytes at its peak, of the rank with most; None where it does not fit on some rank."""
        # An engine takes about as long to make as a step.
        if self.ranks.no_time_for(15.0 * self.cuda, self.options.time_limit):
            self.say(f"{rung.label}: --time-limit leaves no time for {format_tokens(tokens)}")
            raise TimeIsUp
        failed, fact = None, {}
        try:
            fact = self.step(setting, shape, tokens)
        except (RuntimeError, MemoryError) as error:
            failed = outcomes.classify(error)
            if failed[0] != "oom_device":
                raise
            traceback.clear_frames(error.__traceback__)
        every = self.ranks.every((failed, fact))
        if any(row[0] for row in every):
            with self.lock:
                self.peaks[tokens] = None
            self.close()
            self.say(f"{rung.label}: {format_tokens(tokens)} does not fit in {self.options.cap:g} GiB")
            return None
        facts = max((row[1] for row in every), key=lambda row: row["reserved"])
        with self.lock:
            self.facts[tokens], self.peaks[tokens] = facts, facts["reserved"]
        self.say(f"{rung.label}: {format_tokens(tokens)} fits, {facts['reserved'] / 2**30:.2f} GiB reserved")
        return facts["reserved"]

    def step(self, setting: Setting, shape: Shape, tokens: int) -> dict[str, Any]:
        """A step under the cap -> bytes of this rank. Raises what torch raises where memory runs out."""
        self.ballast.clear()
        if self.engine is None:
            self.build(setting, shape)
        engine = self.engine
        forget_caches(self.device)
        ballast = self.held_for_the_others(setting, shape, tokens)
        self.ballast += [torch.empty(size, dtype=torch.uint8, device=self.device) for size in ballast.values() if size]
        states = torch.cuda.memory_allocated() - sum(ballast.values()) if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = float(engine.step(engine.batch(tokens)))
        after = engine.after_step()
        self.ballast.clear()
        if self.cuda:
            most = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            peak = {name: size - self.left for name, size in most.items()}
        elif self.arithmetic is None:
            raise ConfigError("the ladder needs a GPU: its memory is what is searched")
        else:
            peak = dict.fromkeys(("allocated", "reserved"), self.arithmetic(setting, tokens))
            if peak["reserved"] > self.cap:
                raise torch.OutOfMemoryError(f"{peak['reserved']} bytes by arithmetic")
        return peak | {"states": states - self.left, "loss": loss, "ballast": ballast, "after": after}

    def build(self, setting: Setting, shape: Shape) -> None:
        forget_caches(self.device)
        if self.cuda:
            # What an earlier engine may have left behind is no part of this one's.
            self.left = torch.cuda.memory_allocated()
            cap_allocator(self.options.cap + self.left / 2**30, self.device)
        kernel = ZeroAttention(self.kernel) if self.options.memory_only else self.kernel
        self.engine = Engine(shape, [setting], kernel)
        self.engine.activate(setting)
        if shape.optimizer != "none":
            # Adam's moments come with the first step, and every later one has them.
            self.engine.step(self.engine.batch(self.options.grain))

    def held_for_the_others(self, setting: Setting, shape: Shape, tokens: int) -> dict[str, int]:
        """Bytes that the layers which are not trained would hold on the device: their states, and the inputs saved for them."""
        options, preset = self.options, self.preset
        if preset.states_gib is None:
            return {"states": 0, "inputs": 0}
        own = torch.cuda.memory_allocated() - self.left if self.cuda else 0
        others = preset.all_layers - options.layers
        saved = tokens // shape.sp_size * self.engine.model.config.hidden_size * getattr(torch, options.dtype).itemsize
        if self.cuda and own > preset.states_gib * 2**30:
            raise ConfigError(
                f"--layers {options.layers} with --optimizer {options.optimizer} hold {own / 2**30:.1f} GiB, and all "
                f"{preset.all_layers} were to hold {preset.states_gib:.1f}: train fewer layers, or --optimizer none"
            )
        return {
            "states": int(preset.states_gib * 2**30) - own if self.cuda else 0,
            "inputs": others * saved if setting.offload == "none" else 0,
        }

    def close(self) -> None:
        """Throw the engine away, whatever state it is in."""
        self.ballast.clear()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
        forget_caches(self.device)

    def record(self, rung: Rung, setting: Setting, shape: Shape, found: Found, cut_off: str | None = None) -> Record:
        """cut_off: what ended the search before it was complete, if not --time-limit."""
        options, preset, ours = self.options, self.preset, setting.name == "upipe"
        config = hf_config(shape.config)
        rank_count = dist.get_world_size()
        if cut_off is None and not found.complete:
            cut_off = f"--time-limit {options.time_limit:g}"
        simulated = f"simulated: allocates what {self.kernel.name} does, answers zeros"
        made = Record(
            run_id=self.run_id, experiment="ladder", method="none" if shape.sp_size == 1 and not ours else METHODS[setting.name],
            model=options.model, layers=options.layers, tokens=found.longest or options.grain, sp=shape.sp_size, ring=1,
            dp=rank_count // shape.sp_size, zero=3, heads_per_stage=shape.sp_size if ours else None, kernel=self.kernel.name,
            attention_output="device" if setting.host_layers == 0 else "host", overlap=setting.overlap if ours else None,
            offload=setting.offload, dtype=options.dtype,
            tile_tokens=None if setting.tiling is None else setting.tiling.mlp_tokens,
            extra={
                "point": f"{options.preset}-{rung.label}", "scope": "model", "preset": options.preset, "rung": rung.label,
                "setting": str(setting), "longest_tokens": found.longest, "shortest_that_does_not_fit": found.shortest_not,
                "search_complete": found.complete, "cut_off": cut_off, "grain": options.grain, "most": options.most, "cap_gib": options.cap,
                "memory_only": options.memory_only, "optimizer": options.optimizer, "moments_before": True,
                "expected_tokens": self.expected,
                "hidden_size": config.hidden_size,
                "attention": simulated if options.memory_only else "computed",
                "tried": {format_tokens(n): None if peak is None else peak / 2**30 for n, peak in sorted(found.peaks.items())},
                "reported_tokens": reported(preset.source, rung.reported),
                "memory": "by arithmetic" if self.arithmetic else "measured",
            },
        )
        if found.longest == 0:
            made.outcome, made.reason = "oom_device", f"not even {format_tokens(options.grain)} fits in {options.cap:g} GiB"
        if not found.complete:
            made.outcome, made.reason = "timeout", f"the search was cut off by {cut_off}"
        fact = self.facts.get(found.longest)
        if fact is None:
            return made
        made.loss, made.grad_norm = fact["loss"], fact["after"]["grad_norm"]
        others = (preset.all_layers or options.layers) - options.layers
        u = unit_gib(made)
        made.extra |= {
            "others_states_gib": fact["ballast"]["states"] / 2**30, "others_inputs_gib": fact["ballast"]["inputs"] / 2**30,
            "others_inputs_on_host_gib": others * u if setting.offload != "none" else 0.0,
            "left_by_earlier_gib": self.left / 2**30,
            "bytes_to_host": fact["after"]["bytes_to_host"],
        }
        made.host_pinned_gib = fact["after"]["host_pinned"] / 2**30
        if self.cuda:
            made.peak_gib, made.reserved_gib = fact["allocated"] / 2**30, fact["reserved"] / 2**30
            made.states_gib = (fact["states"] + fact["ballast"]["states"]) / 2**30
            made.peak_above_states_gib = made.peak_gib - made.states_gib
            made.peak_units = made.peak_above_states_gib / u
        return made

    def cut_off(self, why: str) -> None:
        """Append the record of the search that is being made, if a step of it was. Waits for no rank and no device."""
        with self.lock:
            if self.now is None or not self.peaks:
                return
            fits = [tokens for tokens, peak in self.peaks.items() if peak is not None]
            shortest_not = min((tokens for tokens, peak in self.peaks.items() if peak is None), default=None)
            found = Found(max(fits, default=0), shortest_not, False, dict(self.peaks))
            now, self.now = self.now, None
            self.append(self.record(*now, found, why))
            self.say(f"{now[0].label}: cut off: {why}; {format_tokens(found.longest)} trains")

    def keep(self, record: Record) -> None:
        with self.lock:
            self.now = None
            self.append(record)

    def append(self, record: Record) -> None:
        row = record.to_dict() | self.made_with
        self.done.append(row)
        if self.lead:
            records.append(row, self.options.results)


def reported(source: str | None, method: str | None) -> int | None:
    """The longest length that a source reports for a method, from reported.csv."""
    if source is None or method is None:
        return None
    for row in read_reported(REPORTED):
        if row["source"].endswith(source) and row["method"] == method and row["metric"] == "max_tokens":
            return int(row["value"])
    raise ConfigError(f"{REPORTED}: no max_tokens of {source}, {method}")


def table(found: list[dict[str, Any]]) -> str:
    """Records of one run as text, a line each."""
    rows = [["lever", "longest", "does not fit", "times plain", "peak GiB", "above states u", "reported"]]
    base = found[0]["longest_tokens"] if found else 0
    for r in found:
        rows.append([
            r["rung"], longest_of(r),
            "" if r["shortest_that_does_not_fit"] is None else format_tokens(r["shortest_that_does_not_fit"]),
            f"{r['longest_tokens'] / base:.2f}" if base and r["longest_tokens"] else "",
            "" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}",
            "" if r["peak_units"] is None else f"{r['peak_units']:.2f}",
            "" if r["reported_tokens"] is None else format_tokens(r["reported_tokens"]),
        ])
    return _aligned(rows)


def draw(found: list[dict[str, Any]], path: str) -> None:
    """A bar a lever, the longest length that trained; beside it the source's own, where it says one.

    Args:
        found: records of one run. path: where the picture goes; its ending says its format.

    Raises ValueError where there are none.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not found:
        raise ValueError("no record of a ladder: nothing to draw")
    first = found[0]
    figure, axis = pyplot.subplots(figsize=(8, 0.55 * len(found) + 1.6))
    places = list(range(len(found)))
    axis.barh(places, [r["longest_tokens"] for r in found], color="#3b6ea5", height=0.55, label="upipe's run")
    for place, r in zip(places, found):
        axis.annotate(longest_of(r), (r["longest_tokens"], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    told = [(place, r["reported_tokens"]) for place, r in zip(places, found) if r["reported_tokens"] is not None]
    if told:
        lengths, heights = [tokens for _, tokens in told], [place for place, _ in told]
        axis.plot(lengths, heights, "D", color="#c0504d", label="reported by the source")
        axis.legend(fontsize=8, loc="lower right")
    axis.set_yticks(places, [r["rung"] for r in found])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel("longest sequence that trains (tokens)")
    ticks = axis.get_xticks()
    axis.set_xticks([t for t in ticks if t >= 0], [f"{t / 1024:g}K" for t in ticks if t >= 0])
    gpus = f"{first['gpus']} x {first['gpu']}" if first["gpu"] else "by arithmetic"
    how = ", attention simulated" if first["memory_only"] else ""
    axis.set_title(f"{first['model']}, {first['layers']} layers, {gpus}, {first['cap_gib']:g} GiB each{how}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--preset", required=True, choices=list(PRESETS), help="which ladder")
    add("--rungs", nargs="+", metavar="LEVER", help="only these levers, by their labels, e.g. '+ UPipe'")
    add("--model", choices=list(MODELS), help="default: the preset's")
    add("--layers", type=int, help="decoder layers trained (default: the preset's)")
    add("--cap", type=float, metavar="GIB", help="most that torch's allocator may take of each device (default: the preset's)")
    add("--optimizer", choices=["adamw", "none"], help="none: SGD without states (default: the preset's)")
    add("--kernel", default="fa4", choices=kernels.names(), help="default: %(default)s")
    add("--memory-only", action="store_true", help="attention allocates what the kernel does and computes nothing")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    add("--grain", default="4K", metavar="S", help="lengths are multiples of it (default: %(default)s)")
    add("--first", default="16K", metavar="S", help="length to begin with (default: %(default)s)")
    add("--forecasts", default="experiments/results", metavar="DIR",
        help="begin at the lengths in DIR/predict_points.jsonl, which --predict --keep writes (default: %(default)s)")
    add("--most", default="4M", metavar="S", help="longest length to try (default: %(default)s)")
    add("--time-limit", type=float, default=560.0, metavar="S",
        help="from the start of the command: begin no step after it; record what is known (default: %(default)g)")
    add("--results", default="experiments/results", metavar="DIR", help="where ladder.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the table of the preset's last run in --results; runs nothing")
    add("--predict", action="store_true", help="what the planner says of each lever, without a GPU; nothing is run")
    add("--keep", action="store_true", help="with --predict: append the predictions to predict_points.jsonl in --results")
    add("--plot", metavar="FILE",
        help="draw the run (with --show: the preset's last run in --results) into a picture, as FILE.png")
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    preset = PRESETS[options.preset]
    given_by = {"model": preset.model, "layers": preset.layers, "cap": preset.cap_gib, "optimizer": preset.optimizer}
    for name, given in given_by.items():
        if getattr(options, name) is None:
            setattr(options, name, given)
    for name in ("grain", "first", "most"):
        try:
            setattr(options, name, parse_tokens(getattr(options, name)))
        except ValueError as error:
            raise ConfigError(f"--{name}: {error}") from None
    if options.grain < 1 or options.most < options.grain:
        raise ConfigError(f"--grain {options.grain} and --most {options.most}: at least one grain must be tried")
    if options.layers < 1 or preset.all_layers is not None and options.layers > preset.all_layers:
        raise ConfigError(f"--layers {options.layers}: from 1 to {preset.all_layers or 'the model has'}")
    labels = [rung.label for rung in preset.rungs]
    unknown = sorted(set(options.rungs or ()) - set(labels))
    if unknown:
        raise ConfigError(f"--rungs {unknown}: --preset {options.preset} has {labels}")
    code(options.commit)


def settle_ranks(options: argparse.Namespace, arithmetic: bool) -> None:
    """What depends on the running world and machine. Raises ConfigError or PreflightError, on every rank."""
    world = dist.get_world_size()
    if options.grain % world:
        raise ConfigError(f"--grain {options.grain} on {world} ranks: use a multiple of {world}")
    if options.preset == "trl" and world != 1:
        raise ConfigError(f"--preset trl is for one GPU, here are {world} ranks: --nproc_per_node 1")
    if not torch.cuda.is_available() and not arithmetic:
        raise ConfigError("the ladder needs a GPU: its memory is what is searched")
    config = hf_config(Shape(options.model, options.layers, 1).config)
    if not options.memory_only:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        example = torch.empty(0, dtype=getattr(torch, options.dtype), device=device)
        check_kernel(options.kernel, kernels.Case.of(example, config.head_dim))
        return
    heads = config.num_attention_heads, config.num_key_value_heads
    if named_kernel(options.kernel).backward_bytes(1024, *heads, config.head_dim) is None:
        raise ConfigError(
            f"--memory-only with --kernel {options.kernel}: what its backward holds has not been measured; use fa4"
        )


def run(
    options: argparse.Namespace, command: str, arithmetic: Callable[[Setting, int], float] | None = None, started: float | None = None
) -> list[dict[str, Any]]:
    """Search on every rank of the running world -> the records, as they were appended; rank 0 prints the table.

    started: what --time-limit counts from, of time.perf_counter(); by default now.
    """
    settle_ranks(options, arithmetic is not None)
    made_with = environment(command, options.commit, gpus=dist.get_world_size() if torch.cuda.is_available() else 0)
    ladder = Ladder(options, new_run_id(), made_with, arithmetic, started)
    ladder.run()
    what = f"{options.preset}, {options.model}, {options.layers} layers, {options.cap:g} GiB"
    ladder.say(f"\nrun {ladder.run_id}, {what}\n{table(ladder.done)}")
    return ladder.done


def predict(options: argparse.Namespace, command: str) -> int:
    """Print what the planner says of the preset's levers beside what was measured, and with --keep append it."""
    # Its simulation is of no use to a run on GPUs.
    from experiments import ladder_forecast

    made_with, results = made_by(command, options.commit, "predict"), Path(options.results)
    made = ladder_forecast.forecasts(options, PRESETS[options.preset], made_with)
    for record in made if options.keep else ():
        records.append(record, results)
    rows = ladder_forecast.beside([record.to_dict() for record in made], records.load(results / "ladder.jsonl"))
    print(f"\npredicted: {options.preset}, {options.model}, {options.layers} layers, {options.cap:g} GiB\n{_aligned(rows)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0, or 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.show:
            found = last_run(Path(options.results) / "ladder.jsonl", preset=options.preset, provenance="measured")
            print(f"run {found[0]['run_id']}, {found[0]['model']}, {found[0]['gpu'] or 'CPU'}\n{table(found)}")
        elif options.predict:
            settle(options)
            return predict(options, command_line("experiments.ladder", arguments).strip())
        else:
            settle(options)
            upipe.init_distributed()
            found = run(options, command_line("experiments.ladder", arguments), started=begun())
        if options.plot and (options.show or dist.get_rank() == 0):
            draw(found, options.plot)
        return 0

    return exit_status("experiments.ladder", body)


if __name__ == "__main__":
    sys.exit(main())
