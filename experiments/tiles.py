"""Time and peak memory of an MLP, a norm and the loss by tile size, beside the same untiled: what the defaults are set from.

    python -m experiments.tiles                                                       # one GPU, Llama3-8B's widths: under a minute
    python -m experiments.tiles --model qwen3-32b --tokens 128K --parts loss --tiles 1K 2K 4K
    python -m experiments.tiles --model toy --tokens 256 --tiles 16 64 none --dtype float32    # seconds, on the CPU
    python -m experiments.tiles --show                                                # from records, nothing is run

Parts, each with the gradients of its input and of all its weights:
  mlp, norm   `tiled.tiled_mlp` and `tiled_norm` as a checkpointed layer runs them: a forward without gradients, a forward, a
              backward from a given gradient; untiled: the model's own module
  loss        `loss.tiled_loss_sum`, forward and backward; untiled: the head's whole logits and `loss.token_loss_sum`. Beside it
              Liger's fused linear cross-entropy, which chooses its own tiles, where liger-kernel and a GPU are there

For every part: one step with nothing cached, whose peak above the inputs (tokens, weights) counts all that the step makes, and
whose gradients are compared with those of the first row; --warmup more; then --rounds rounds in which every row makes one step, in
an order that rotates. On the CPU the peak is counted instead, from the storages that live (`live.LiveStorages`). A row that does
not fit, or is not installed, is recorded with its reason, and the others go on.
One record a row is appended to tiles.jsonl, all of a call under one run_id. The tile proposed for a default is the smallest whose
median time is within 2 % of the fastest tile's: more memory should buy time.

u = tokens x hidden size x 2 bytes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.block import Clock, synchronize
from experiments.runs import command_line, exit_status, last_run, made_by
from upipe import loss, records, tiled
from upipe.config import ConfigError
from upipe.environment import code
from upipe.live import LiveStorages
from upipe.presets import preset_shapes
from upipe.records import Record, format_tokens, parse_tokens, unit_gib

TOY = preset_shapes()["llama3-8b"] | {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}
DEFAULTS = {"mlp": tiled.MLP_TILE_TOKENS, "norm": tiled.NORM_TILE_TOKENS, "loss": loss.LOSS_TILE_TOKENS}
TILES = ("512", "1K", "2K", "4K", "8K", "16K", "none")
WITHIN = 1.02
BOUNDS = {"bfloat16": 5e-2, "float32": 1e-4}
"""Relative difference of gradients from the first row's, above which a row is called wrong."""


@dataclass(frozen=True)
class Way:
    """A row of the table: a part, how it is computed, and the tile in tokens (None: untiled, or Liger's own)."""

    part: str
    implementation: str
    tile: int | None = None

    def __str__(self) -> str:
        return f"{self.part} " + (f"tile {format_tokens(self.tile)}" if self.tile else self.implementation)


class Parts:
    """MLP, norm and head of one layer of a model, random, with inputs for them.

    Args:
        model: a preset of `upipe.presets`, or "toy".
        tokens: rows N. x and the incoming gradient are [1, N, D], labels [1, N].
    """

    def __init__(self, model: str, tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        values = dict(TOY if model == "toy" else preset_shapes()[model])
        config = AutoConfig.for_model(values.pop("model_type"), **values | {"num_hidden_layers": 1}, bos_token_id=None, eos_token_id=None)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.modules = {"mlp": made.model.layers[0].mlp, "norm": made.model.norm, "loss": made.lm_head}
        self.dtype, self.device, self.tokens, self.hidden, self.vocabulary = dtype, device, tokens, config.hidden_size, config.vocab_size
        self.width = config.intermediate_size
        self.random = torch.Generator(device).manual_seed(seed)
        for module in self.modules.values():
            module.to_empty(device=device)
            for weight in module.parameters():
                with torch.no_grad():
                    weight.normal_(0, weight.shape[-1] ** -0.5, generator=self.random)
        like = {"generator": self.random, "device": device, "dtype": dtype}
        self.x = torch.randn(1, tokens, self.hidden, **like).requires_grad_()
        self.grad = torch.randn(1, tokens, self.hidden, **like)
        self.labels = torch.randint(self.vocabulary, (1, tokens), generator=self.random, device=device)

    def forward(self, way: Way) -> torch.Tensor:
        module, x = self.modules[way.part], self.x
        if way.part == "loss":
            if way.implementation == "untiled":
                return loss.token_loss_sum(linear(x, module.weight), self.labels)
            tile = way.tile or DEFAULTS["loss"]
            return loss.tiled_loss_sum(x, module.weight, self.labels, tile_tokens=tile, implementation=way.implementation)
        if way.implementation == "untiled":
            return module(x)
        return (tiled.tiled_mlp if way.part == "mlp" else tiled.tiled_norm)(x, module, way.tile)

    def step(self, way: Way, mark: Callable[[], None] = lambda: None) -> None:
        """Forward (checkpointed parts without gradients first) and backward; `mark` is called between and after."""
        if way.part != "loss":
            with torch.no_grad():
                self.forward(way)
        mark()
        y = self.forward(way)
        mark()
        y.backward(None if way.part == "loss" else self.grad)
        mark()

    def forget(self) -> None:
        self.x.grad = None
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)

    def sampled(self, way: Way) -> list[torch.Tensor]:
        """Some rows of every gradient of a step, in fp32."""
        every = [self.x.grad[0], *(p.grad for p in self.modules[way.part].parameters())]
        return [g[:: max(1, len(g) // 64)].float().clone() for g in every]


class Bench:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace, parts: Parts, made_with: dict[str, Any]) -> None:
        self.options, self.parts, self.made_with = options, parts, made_with
        self.cuda = parts.device.type == "cuda"
        self.done: list[dict[str, Any]] = []

    def run(self) -> None:
        for part in self.options.parts:
            self.part(part, [Way(part, "tiled" if tile else "untiled", tile) for tile in self.options.tiles])

    def part(self, part: str, ways: list[Way]) -> None:
        if part == "loss":
            ways.append(Way("loss", "liger"))
        results: dict[Way, dict[str, Any]] = {way: {"seconds": []} for way in ways}
        first: list[torch.Tensor] | None = None
        for way in ways:
            values = self.attempt(way, lambda w=way: self.peak(w))
            results[way] |= values
            if "gradients" in values:
                gradients = results[way].pop("gradients")
                first = first or gradients
                results[way]["difference"] = worst = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, first))
                if not worst <= BOUNDS[self.options.dtype]:
                    raise AssertionError(f"{way}: gradients differ from the first row's by {worst:.3g}")
        for turn in range(-self.options.warmup, self.options.rounds):
            for index in range(len(ways)):
                way = ways[(index + max(turn, 0)) % len(ways)]
                if results[way].get("outcome"):
                    continue
                values = self.attempt(way, lambda w=way: {"timed": self.timed(w)})
                if "timed" in values and turn >= 0:
                    results[way]["seconds"].append(values["timed"])
                results[way] |= {key: values[key] for key in ("outcome", "reason") if key in values}
        for way in ways:
            self.keep(way, results[way])
        self.proposal(part)

    def attempt(self, way: Way, body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the body returns, or the outcome and reason of a row that cannot be measured here."""
        try:
            if way.implementation == "liger":
                loss.check_implementation("liger")
                if not self.cuda:
                    raise ImportError("liger-kernel's kernels need a GPU")
            return body()
        except ImportError as error:
            said = {"outcome": "refused", "reason": str(error)}
        except torch.OutOfMemoryError as error:
            said = {"outcome": "oom_device", "reason": str(error).split(". ")[0]}
        finally:
            self.parts.forget()
        print(f"{way}: skipped, {said['reason']}", flush=True)
        return said

    def peak(self, way: Way) -> dict[str, Any]:
        """One step with nothing cached -> bytes above the inputs, and some rows of its gradients."""
        parts = self.parts
        parts.forget()
        gc.collect()
        if not self.cuda:
            with LiveStorages("cpu", tables=False) as live:
                live.know(parts.x, parts.grad, parts.labels, *(p for m in parts.modules.values() for p in m.parameters()))
                parts.step(way)
            return {"above": live.peak, "gradients": parts.sampled(way)}
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        parts.step(way)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"above": allocated - before, "allocated": allocated, "reserved": reserved, "gradients": parts.sampled(way)}

    def timed(self, way: Way) -> list[float]:
        """Seconds of a forward without gradients (0 for the loss), a forward and a backward."""
        synchronize(self.parts.device)
        clock = Clock(self.cuda)
        clock.mark()
        self.parts.step(way, clock.mark)
        synchronize(self.parts.device)
        return clock.seconds()

    def keep(self, way: Way, values: dict[str, Any]) -> None:
        parts, options = self.parts, self.options
        record = Record(
            experiment="tiles", method="none", model=options.model, layers=1, tokens=parts.tokens, sp=1, ring=1, dp=1,
            tile_tokens=way.tile, dtype=options.dtype, outcome=values.get("outcome", "ok"), reason=values.get("reason"),
            extra={
                "point": f"{way.part}-{way.implementation}-{format_tokens(way.tile) if way.tile else 'none'}", "part": way.part,
                "implementation": way.implementation, "scope": "block", "hidden_size": parts.hidden, "width": parts.width,
                "vocabulary": parts.vocabulary, "default_tile_tokens": DEFAULTS[way.part], "gradient_difference": values.get("difference"),
            },
        )  # fmt: skip
        if values["seconds"] and record.outcome == "ok":
            times = [sum(row) for row in values["seconds"]]
            record.times_s, record.time_s, record.warmup_steps = times, statistics.median(times), 1 + options.warmup
            named = zip(("first_forward", "forward", "backward"), zip(*values["seconds"]))
            record.extra["parts_s"] = {name: statistics.median(row) for name, row in named}
        if "above" in values:
            record.extra["counted_peak_gib" if not self.cuda else "peak_bytes"] = values["above"] / (1 if self.cuda else 2**30)
        if "allocated" in values:
            record.peak_gib, record.reserved_gib = values["allocated"] / 2**30, values["reserved"] / 2**30
            record.peak_above_inputs_gib = values["above"] / 2**30
            record.peak_units = record.peak_above_inputs_gib / unit_gib(record)
        row = record.to_dict() | self.made_with
        records.append(row, options.results)
        self.done.append(row)
        print(line(row), flush=True)

    def proposal(self, part: str) -> None:
        found = choose(self.done, part)
        if found is not None:
            default = format_tokens(DEFAULTS[part])
            print(f"{part}: the smallest tile within 2 % of the fastest is {format_tokens(found)} (default now {default})", flush=True)


def choose(rows: list[dict[str, Any]], part: str) -> int | None:
    """The smallest tile whose median time is within 2 % of the fastest tile's; None where nothing was timed.

    rows: records of one run."""
    timed = {r["tile_tokens"]: r["time_s"] for r in rows if r["part"] == part and r["tile_tokens"] and r["time_s"]}
    return min((tile for tile, seconds in timed.items() if seconds <= WITHIN * min(timed.values())), default=None)


def line(row: dict[str, Any]) -> str:
    """A record as a line of a table."""
    tile = format_tokens(row["tile_tokens"]) if row["tile_tokens"] else row["implementation"]
    peak = row["peak_above_inputs_gib"] if row["peak_above_inputs_gib"] is not None else row.get("counted_peak_gib")
    time_s = "-" if row["time_s"] is None else f"{row['time_s'] * 1e3:.2f} ms"
    said = row["reason"] or ("-" if peak is None else f"{peak:.4g} GiB above inputs")
    return f"{row['part']:<5} {tile:>8} {time_s:>12}  {said}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.tiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="llama3-8b", choices=[*preset_shapes(), "toy"], help="whose widths (default: %(default)s)")
    add("--tokens", default="64K", metavar="N", help="rows, the tokens of one rank (default: %(default)s)")
    add("--tiles", nargs="+", default=list(TILES), metavar="T", help="tokens a tile, or none for untiled (default: 512 to 16K, none)")
    add("--parts", nargs="+", default=list(DEFAULTS), choices=list(DEFAULTS), help="default: all")
    add("--dtype", default="bfloat16", choices=list(BOUNDS), help="default: %(default)s")
    add("--rounds", type=int, default=5, help="timed steps of every row (default: %(default)s)")
    add("--warmup", type=int, default=1, help="untimed steps of every row after that for memory (default: %(default)s)")
    add("--results", default="experiments/results", metavar="DIR", help="where tiles.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the table of the last run in --results; runs nothing")
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    for name, least in (("rounds", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.rounds > 1 and options.warmup == 0:
        raise ConfigError(f"--warmup 0 with --rounds {options.rounds}: the step for memory fills caches that it emptied; warm up after it")
    try:
        options.tokens = parse_tokens(options.tokens)
        options.tiles = list(dict.fromkeys(None if text == "none" else parse_tokens(text) for text in options.tiles))
    except ValueError as error:
        raise ConfigError(f"--tokens, --tiles: {error}") from None
    code(options.commit)


def show(options: argparse.Namespace) -> int:
    last = last_run(Path(options.results) / "tiles.jsonl")
    print(f"run {last[0]['run_id']}, {last[0]['model']}, {format_tokens(last[0]['tokens'])} tokens, {last[0]['gpu'] or 'CPU'}")
    for row in last:
        print(line(row))
    for part in dict.fromkeys(row["part"] for row in last):
        chosen = choose(last, part)
        if chosen is not None:
            print(f"{part}: {format_tokens(chosen)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0, or 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.show:
            return show(options)
        settle(options)
        cuda = torch.cuda.is_available()
        made_with = made_by(command_line("experiments.tiles", arguments), options.commit, "tiles", gpus=int(cuda))
        device = torch.device("cuda" if cuda else "cpu")
        Bench(options, Parts(options.model, options.tokens, getattr(torch, options.dtype), device), made_with).run()
        return 0

    return exit_status("experiments.tiles", body)


if __name__ == "__main__":
    sys.exit(main())
