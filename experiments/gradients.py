"""Do the methods compute the same gradients? Those of the first step of each, tensor by tensor, beside the unsharded model's.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    torchrun --standalone --nproc_per_node 8 -m experiments.gradients --layers 32 --tokens 8K 128K \\
        --methods ulysses ring usp:ring=2 upipe:host=12 upipe:device
    torchrun --standalone --nproc_per_node 2 -m experiments.gradients --layers 4 --tokens 8K 64K
    torchrun --standalone --nproc_per_node 2 -m experiments.gradients --layers 4 --tokens 256K --reference none
    torchrun --nproc_per_node 2 -m experiments.gradients --model toy --layers 2 --tokens 256 --reference 256 --kernel reference  # CPU
    python -m experiments.gradients --show                  # from records, nothing is run

Random weights and tokens in bf16 under ZeRO-3, as in `experiments.stack`, whose settings --methods takes. Gradients are read after
the backward of the first step, before clipping, whole, and kept in the host memory of rank 0. There too, once the engines are gone,
run the plain Hugging Face model with the same weights and tokens, at the length --reference: in fp32 (the truth) and in bf16 (what
bf16 costs without us).

Held to:
  - of any two methods, at every length, each tensor's difference: at most 1.5 times the error of the plain bf16 model against fp32
    in that tensor, as measured at the length --reference; of the whole gradient, cosine at least 0.999 and norm to 1e-2;
  - of each method against fp32 at the length --reference, each tensor's error: at most 1.5 times the plain bf16 model's.
Of a single tensor cosine and norm are recorded and not held to a number: where the plain bf16 model is itself 3 % off or more, the
first rule allows a cosine below 0.999. Without a reference (--reference none) tensors are recorded alone.

Differences are norm(a - b) / norm(b), sums in fp64. Every comparison appends a record to gradients.jsonl, with its worst tensors by
name, all of a call under one run_id. Exit status 1 where a rule is broken, 2 for what is refused.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn

import upipe
from experiments import stack
from experiments.block_report import _aligned
from experiments.runs import command_line, exit_status, last_run, new_run_id
from experiments.stack_methods import (
    MODELS,
    Engine,
    Setting,
    Shape,
    Together,
    forget_caches,
    keep_frequencies,
    named_kernel,
    random_tokens,
)
from upipe import kernels, records, workspace
from upipe.build import build_model, causal_lm, count_parameters, hf_config
from upipe.config import ConfigError
from upipe.environment import environment, host_gib
from upipe.records import Record, format_tokens, parse_tokens

BOUND, COSINE, NORM = 1.5, 0.999, 1e-2
"""Times the plain bf16 model's error in a tensor; least cosine and greatest relative difference in norm, of whole gradients."""
DEFAULT = ("ulysses", "ring", "upipe:host", "upipe:device")
REFERENCE = "8K"
PLAIN = "plain bf16"
TRUTH = "plain fp32"
CHUNK = 1 << 24
WORST = 5
"""Tensors named in a record."""

Gradients = dict[str, torch.Tensor]
"""By parameter, whole, on the host."""


@dataclass
class Sums:
    """Of two tensors or more, b the one compared with: squares of a, b and a - b, and products."""

    a: float = 0.0
    b: float = 0.0
    ab: float = 0.0
    off: float = 0.0

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor) -> Sums:
        """Two tensors of one shape and device; in chunks, in fp64."""
        totals = torch.zeros(4, dtype=torch.float64, device=a.device)
        for x, y in zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK)):
            x, y = x.double(), y.double()
            totals += torch.stack([x.dot(x), y.dot(y), x.dot(y), (x - y).square_().sum()])
        return cls(*totals.tolist())

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.a + other.a, self.b + other.b, self.ab + other.ab, self.off + other.off)

    @property
    def error(self) -> float:
        """norm(a - b) / norm(b); 0 where both are zero."""
        return math.sqrt(self.off / self.b) if self.b else (0.0 if self.off == 0 else math.inf)

    @property
    def cosine(self) -> float:
        return self.ab / math.sqrt(self.a * self.b) if self.a and self.b else float(self.a == self.b)

    @property
    def norm_off(self) -> float:
        """How far the norm of a is from b's, over b's."""
        return abs(math.sqrt(self.a / self.b) - 1) if self.b else (0.0 if self.a == 0 else math.inf)


@dataclass
class Comparison:
    """Gradients of one against another's, at one length.

    tensors: by parameter. allowed: error of the plain bf16 model by parameter, None where it was not measured. judged: what holds,
    "tensors" (each at most BOUND times what is allowed) and "whole" (cosine and norm).
    """

    name: str
    against: str
    tokens: int
    tensors: dict[str, Sums]
    allowed: dict[str, float] | None = None
    judged: tuple[str, ...] = ()

    @property
    def whole(self) -> Sums:
        return sum(self.tensors.values(), Sums())

    def ratio(self, tensor: str) -> float | None:
        """A tensor's error over the plain bf16 model's. None where that was not measured."""
        if self.allowed is None:
            return None
        error, allowed = self.tensors[tensor].error, self.allowed[tensor]
        return error / allowed if allowed else (0.0 if error == 0 else math.inf)

    def worst(self) -> list[str]:
        """Tensors by how far they are beyond, or below, what is allowed; by their error where nothing was measured."""
        def far(tensor: str) -> float:
            value = self.tensors[tensor].error if self.allowed is None else self.ratio(tensor)
            return math.inf if math.isnan(value) else value

        return sorted(self.tensors, key=far, reverse=True)

    def broken(self) -> list[str]:
        """What breaks a rule, a sentence each. Written so that a number that is none breaks it."""
        found, whole = [], self.whole
        if "tensors" in self.judged:
            over = [name for name in self.worst() if not self.ratio(name) <= BOUND]
            if over:
                sums = self.tensors[over[0]]
                found.append(
                    f"{len(over)} of {len(self.tensors)} tensors differ by more than {BOUND:g} times the plain bf16 model's error, most "
                    f"{over[0]}: {sums.error:.5f}, {self.ratio(over[0]):.3f} times {self.allowed[over[0]]:.5f}"
                )
        if "whole" in self.judged:
            if not whole.cosine >= COSINE:
                found.append(f"cosine {whole.cosine:.6f} is below {COSINE:g}")
            if not whole.norm_off <= NORM:
                found.append(f"norm {math.sqrt(whole.a):.6g} is {whole.norm_off:.2%} off {math.sqrt(whole.b):.6g}")
        return found

    def fields(self) -> dict[str, Any]:
        """Of its record, None for a number that is none or infinite. Of worst tensors: error, the plain bf16 model's, their ratio,
        cosine, relative difference in norm."""
        whole, worst = self.whole, self.worst()
        least = min(self.tensors, key=lambda name: self.tensors[name].cosine)
        ratios = [self.ratio(name) for name in worst] if self.allowed is not None else []
        return finite({
            "setting": self.name, "against": self.against, "judged": list(self.judged), "passed": not self.broken(),
            "broken": self.broken(),
            "tensors": len(self.tensors), "error": whole.error, "cosine": whole.cosine, "norm_off": whole.norm_off,
            "worst_ratio": ratios[0] if ratios else None, "median_ratio": sorted(ratios)[len(ratios) // 2] if ratios else None,
            "least_cosine": [least, self.tensors[least].cosine],
            "below_cosine": sum(not sums.cosine >= COSINE for sums in self.tensors.values()),
            "beyond_norm": sum(not sums.norm_off <= NORM for sums in self.tensors.values()),
            "worst": [
                {"tensor": name, "error": self.tensors[name].error, "plain_error": None if self.allowed is None else self.allowed[name],
                 "ratio": self.ratio(name), "cosine": self.tensors[name].cosine, "norm_off": self.tensors[name].norm_off}
                for name in worst[:WORST]
            ],
        })  # fmt: skip


def finite(value: Any) -> Any:
    """The same, with None for every number in it that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    methods: dict[int, dict[str, Gradients]], reference: dict[str, Gradients], reference_tokens: int | None, device: torch.device
) -> list[Comparison]:
    """Every comparison there is to make.

    Args:
        methods: by length and setting.
        reference: the plain model's under TRUTH and PLAIN, at the length `reference_tokens`; empty where there is none.
        device: where sums are computed; a tensor of every method is there at once.
    """
    found: dict[tuple[int, str, str], dict[str, Sums]] = {}
    for tokens, settings in methods.items():
        plains = reference if tokens == reference_tokens else {}
        here = plains | settings
        pairs = [(name, TRUTH) for name in here if name != TRUTH] if plains else []
        pairs += [(b, a) for a, b in itertools.combinations(settings, 2)]
        first = next(iter(here.values()))
        different = {name: sorted(set(first) ^ set(grads))[:3] for name, grads in here.items() if set(grads) != set(first)}
        if different:
            raise ValueError(f"gradients of different tensors: {different}")
        for tensor in first:
            parts = {name: grads[tensor].to(device) for name, grads in here.items()}
            for a, b in pairs:
                found.setdefault((tokens, a, b), {})[tensor] = Sums.of(parts[a], parts[b])
    plain = found.get((reference_tokens, PLAIN, TRUTH))
    allowed = None if plain is None else {name: sums.error for name, sums in plain.items()}
    made = []
    for (tokens, name, against), tensors in found.items():
        judged = () if name == PLAIN else ("tensors",) * (allowed is not None) + ("whole",) * (against != TRUTH)
        made.append(Comparison(name, against, tokens, tensors, allowed, judged))
    return made


class Bench:
    """One call of the command on all ranks.

    Args:
        options: of the command line, settled.
        run_id: of its records.
    """

    def __init__(self, options: argparse.Namespace, run_id: str) -> None:
        self.options, self.run_id = options, run_id
        self.lead = dist.get_rank() == 0
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.settings = [Setting.parse(text) for text in options.settings]
        self.shape = Shape(options.model, options.layers, options.sp, options.dtype, "none")
        # Rank 0 runs the plain models and compares while the others wait.
        self.ranks = Together(run_id, seconds=600.0)
        self.weights: Gradients | None = None
        self.methods: dict[int, dict[str, Gradients]] = {tokens: {} for tokens in options.tokens}
        self.told: dict[tuple[int, str], dict[str, float]] = {}

    def say(self, text: str) -> None:
        if self.lead:
            print(f"{time.perf_counter() - self.ranks.started:6.1f} s  {text}", flush=True)

    def run(self) -> list[Comparison]:
        """-> the comparisons; none on other ranks than 0."""
        for key in dict.fromkeys(setting.engine for setting in self.settings):
            self.engine([setting for setting in self.settings if setting.engine == key])
        made = self.compared() if self.lead else []
        self.ranks.every(None)
        return made

    def engine(self, settings: list[Setting]) -> None:
        """A step of each of these settings, which share an engine, at every length."""
        engine = Engine(self.shape, settings, named_kernel(self.options.kernel))
        self.say(f"engine of {', '.join(map(str, settings))}")
        if self.weights is None and self.options.reference is not None:
            self.weights = {}
            for name, parameter in engine.model.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter]):
                    if self.lead:
                        self.weights[name] = parameter.detach().to("cpu", copy=True)
        for tokens, setting in itertools.product(self.options.tokens, settings):
            self.step(engine, setting, tokens)
        engine.close()

    def step(self, engine: Engine, setting: Setting, tokens: int) -> None:
        engine.activate(setting)
        workspace.clear()
        grads: Gradients = {}
        marks = itertools.count(1)

        def mark() -> None:
            # The second of three: after the backward, before the optimizer.
            if next(marks) == 2:
                grads.update(whole_gradients(engine.model, keep=self.lead))

        loss = engine.step(engine.batch(tokens), mark).item()
        norm = engine.after_step()["grad_norm"]
        if not math.isfinite(loss):
            raise FloatingPointError(f"{setting} at {tokens} tokens: the loss is {loss}")
        forget_caches(self.device, host_too=False)
        if self.lead:
            self.methods[tokens][str(setting)] = grads
        self.told[tokens, str(setting)] = {"loss": loss, "grad_norm": finite(norm)}
        self.say(f"{format_tokens(tokens)} {setting}: loss {loss:.6f}, gradient norm {norm:.5g}")

    def compared(self) -> list[Comparison]:
        reference: dict[str, Gradients] = {}
        tokens = self.options.reference
        for name, dtype in ((TRUTH, torch.float32), (PLAIN, torch.bfloat16)) if tokens is not None else ():
            loss, reference[name] = plain_step(self.shape, self.weights, dtype, tokens, self.device)
            forget_caches(self.device, host_too=False)
            norm = math.sqrt(sum(Sums.of(grad, grad).a for grad in reference[name].values()))
            self.told[tokens, name] = {"loss": loss, "grad_norm": norm}
            self.say(f"{format_tokens(tokens)} {name}: loss {loss:.6f}, gradient norm {norm:.5g}")
        self.weights = None
        return compare(self.methods, reference, tokens, self.device)

    def record(self, made: Comparison) -> Record:
        """Of a comparison, without what its environment says."""
        tokens, options = made.tokens, self.options
        values = made.fields() | {
            "point": f"{made.name}-{made.against}-{options.model}-{options.layers}-{options.kernel}-{format_tokens(tokens)}",
            "scope": "model", "reference_tokens": options.reference, "bound": BOUND, "cosine_bound": COSINE, "norm_bound": NORM,
            "loss_against": self.told[tokens, made.against]["loss"], "grad_norm_against": self.told[tokens, made.against]["grad_norm"],
            "data": f"random tokens, seed {self.shape.seed}", "gradients": "of the first step, before clipping, bf16",
        }  # fmt: skip
        if made.name == PLAIN:
            fields: dict[str, Any] = {
                "method": "none", "model": options.model, "layers": options.layers, "tokens": tokens, "sp": 1, "ring": 1,
                "dtype": "bfloat16",
            }
            record = Record(run_id=self.run_id, experiment="gradients", extra=values, **fields)
        else:
            record = stack.described(Setting.parse(made.name), options, self.shape, tokens)
            record.run_id, record.experiment = self.run_id, "gradients"
            record.extra |= values
        told = self.told[tokens, made.name]
        record.loss, record.grad_norm = told["loss"], told["grad_norm"]
        return record


def whole_gradients(model: nn.Module, keep: bool) -> Gradients:
    """Every parameter's whole gradient under ZeRO-3, one after the other; collective. keep: put them on the host, those that bf16
    holds in bf16; others drop them."""
    grads: Gradients = {}
    for name, parameter in model.named_parameters():
        whole = safe_get_full_grad(parameter)
        if whole is None:
            raise RuntimeError(f"{name} has no gradient")
        if keep:
            short = whole.bfloat16()
            grads[name] = (short if torch.equal(short.float(), whole) else whole).to("cpu", copy=True)
    return grads


def plain_step(
    shape: Shape, weights: Gradients, dtype: torch.dtype, tokens: int, device: torch.device
) -> tuple[float, Gradients]:
    """Loss and gradients, on the host, of the plain Hugging Face model with these weights, every layer checkpointed."""
    with torch.device(device):
        model = causal_lm(hf_config(shape.config), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    keep_frequencies(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    ids = random_tokens(shape, model.config.vocab_size, tokens).to(device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: parameter.grad.to("cpu", copy=True) for name, parameter in model.named_parameters()}
    told = loss.detach().item()
    del model, loss
    gc.collect()
    return told, grads


def needed_gib(parameters: int, settings: int, lengths: int, reference: bool) -> tuple[float, float]:
    """-> GiB of the host that rank 0 fills with gradients and weights, and of the GPU that the fp32 model and its gradients take."""
    host = parameters * (2 * settings * lengths + (2 + 4 + 2) * reference)
    return host / 2**30, parameters * 8 * reference / 2**30


def table(found: list[dict[str, Any]]) -> str:
    """Records of one run as text, a line each. error, cosine, norm off: of whole gradients; over bf16: the worst tensor's error over
    the plain bf16 model's, empty where that was not measured; least cosine: of a tensor."""
    rows = [("tokens", "of", "against", "", "error", "cosine", "norm off", "over bf16", "worst tensor", "its error", "least cosine")]
    for r in found:
        worst = r["worst"][0]
        numbers = ((r["error"], ".5f"), (r["cosine"], ".6f"), (r["norm_off"], ".1e"), (worst["ratio"], ".3f"))
        cells = ["" if value is None else format(value, how) for value, how in numbers]
        last = ["" if value is None else f"{value:.5f}" for value in (worst["error"], r["least_cosine"][1])]
        verdict = "" if not r["judged"] else "ok" if r["passed"] else "BROKEN"
        rows.append((format_tokens(r["tokens"]), r["setting"], r["against"], verdict, *cells, worst["tensor"], *last))
    return _aligned([list(row) for row in rows])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.gradients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default="llama3_8b", choices=list(MODELS), help="default: %(default)s")
    add("--layers", type=int, default=4, help="decoder layers, with embedding and head (default: %(default)s)")
    add("--tokens", nargs="+", default=[REFERENCE], metavar="S", help=f"lengths of the sequence over all ranks (default: {REFERENCE})")
    add("--methods", dest="settings", nargs="+", default=list(DEFAULT), metavar="SETTING",
        help=f"two or more, as experiments/stack_methods.py writes settings (default: {' '.join(DEFAULT)})")
    add("--reference", default=REFERENCE, metavar="S",
        help="length at which the unsharded fp32 and bf16 models run, one of --tokens; none: they do not (default: %(default)s)")
    add("--kernel", default="cudnn", choices=kernels.names(), help="default: %(default)s")
    add("--results", default="experiments/results", metavar="DIR", help="where gradients.jsonl is (default: %(default)s)")
    add("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    add("--show", action="store_true", help="print the table of the last run in --results; runs nothing")
    made.set_defaults(**stack.FIXED)
    return made


def settle(options: argparse.Namespace) -> None:
    """Check and complete the options. Raises ConfigError."""
    stack.settle(options)
    if len(options.settings) < 2:
        raise ConfigError(f"--methods {' '.join(options.settings)}: name two or more, whose gradients are compared")
    try:
        options.reference = None if options.reference == "none" else parse_tokens(options.reference)
    except ValueError as error:
        raise ConfigError(f"--reference: {error}; or none") from None
    if options.reference is not None and options.reference not in options.tokens:
        lengths = " ".join(map(format_tokens, options.tokens))
        raise ConfigError(f"--reference {format_tokens(options.reference)} is none of --tokens {lengths}: add it there, or give none")


def settle_ranks(options: argparse.Namespace) -> None:
    """What of the options depends on the running world and machine. Raises ConfigError or PreflightError, on every rank."""
    stack.settle_ranks(options)
    parameters = count_parameters(build_model(Shape(options.model, options.layers, options.sp).config, meta=True))
    on_host, on_device = needed_gib(parameters, len(options.settings), len(options.tokens), options.reference is not None)
    if on_host > 0.9 * host_gib():
        raise ConfigError(
            f"{len(options.settings)} methods at {len(options.tokens)} lengths: {on_host:.0f} GiB of gradients on a host of "
            f"{host_gib():.0f}; use fewer of either, or fewer --layers than {options.layers}"
        )
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
        if on_device > 0.8 * total:
            raise ConfigError(
                f"--reference: the fp32 model and its gradients are {on_device:.0f} GiB on a GPU of {total:.0f}; use --reference none, or "
                f"fewer --layers than {options.layers}"
            )


def show(options: argparse.Namespace) -> int:
    last = last_run(Path(options.results) / "gradients.jsonl")
    print(f"run {last[0]['run_id']}, {last[0]['model']}, {last[0]['layers']} layers, {last[0]['gpu'] or 'CPU'}\n{table(last)}")
    return 0


def run(options: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """Compare on every rank of the running world -> the records, on every rank; rank 0 appends them and prints the table."""
    settle_ranks(options)
    made_with = environment(command, options.commit, gpus=dist.get_world_size() if torch.cuda.is_available() else 0)
    bench = Bench(options, new_run_id())
    rows = [bench.record(made).to_dict() | made_with for made in bench.run()]
    for row in rows:
        records.append(row, options.results)
    rows = bench.ranks.every(rows)[0]
    bench.say(f"run {bench.run_id}, {options.model}, {options.layers} layers, P = {options.sp}\n{table(rows)}")
    for row in rows:
        for problem in row["broken"]:
            bench.say(f"BROKEN: {row['setting']} against {row['against']} at {format_tokens(row['tokens'])}: {problem}")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0; 1 where a rule is broken; 2 for what is refused."""
    options = parser().parse_args(arguments)

    def body() -> int:
        if options.show:
            return show(options)
        settle(options)
        upipe.init_distributed()
        done = run(options, command_line("experiments.gradients", arguments))
        return 0 if all(row["passed"] for row in done) else 1

    return exit_status("experiments.gradients", body)


if __name__ == "__main__":
    sys.exit(main())
