"""Whether a run fits, which memory ends first, and how long a step takes: before anything is started, on any machine.

    run = request("llama3-8b", 5 * 2**20, machine, ["memory.fused_layers=true"])
    predict(run, machine).text()

Memory of a rank's GPU, by phase of a step (first forwards, loss, backward of a layer and of its attention, optimizer):

    states      parameters, gradients, master weights and Adam's states by ZeRO stage and dtypes
    buffers     what ZeRO-3 has gathered (`stage3_max_live_parameters` and the prefetch bucket, or the head; in attention's backward a
                layer and the embedding) and two gradient buckets
    inputs      saved inputs on the device, and the one that is prefetched
    work        a layer or the loss, simulated with the real code: `upipe.simulate`
    cuBLAS      its workspaces, fitted on half of the measured points (experiments/accuracy.py)
    margin      MARGIN_SHARE of all that, and MARGIN_GIB: fragments, small tensors; assumed

against what the allocator can have (`usable_gib`: CUDA context and NCCL are off it). Host memory of a node: sent inputs in exactly
sized slabs, attention outputs, an optimizer there, and what `memory.system_bytes` leaves to the system; that is assumed.

Time: executed FLOPs over rates, bytes over links, what overlap hides taken off (`plan_rates.json`, with the source of each
number; H200 measured, other GPUs scaled from data sheets). Not modelled: loading, evaluation, checkpoints, stragglers.

Units: bytes inside, GiB = 2**30 bytes outside; binary lengths; tokens/s/GPU counts each token once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import logging
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from upipe import blocked, kernel_blocks, layer, models, preflight, simulate, stage_width
from upipe.apply import host_layers
from upipe.block import BlockSpec
from upipe.build import ModelConfig, hf_config, is_glm, model_sizes
from upipe.config import ConfigError, load, to_mapping
from upipe.glm.config import preset_shapes as glm_shapes
from upipe.memory import make_plan, system_bytes
from upipe.methods import config as methods
from upipe.methods.layouts import Zigzag
from upipe.optimize import deepspeed_config
from upipe.presets import preset_shapes
from upipe.records import format_tokens
from upipe.schedule import HeadSchedule
from upipe.simulate import Case, peaks_of, shape_of
from upipe.trainer import RunConfig

GIB = 2**30
MARGIN_SHARE, MARGIN_GIB = 0.02, 0.5
GRAIN = 32768
"""Lengths that `max_tokens` tries are multiples of this."""
LONGEST = 2**24
"""Tokens: a head of 128 has 2**31 elements then, more than kernels index with 32 bits."""
SUB_GROUP = 10**9  # DeepSpeed's stage3 sub_group_size: parameters stepped at a time

GROWING = (
    "work of a layer", "work of the loss", "saved inputs", "prefetched input", "layer inputs", "attention outputs", "attention chunks",
    "working tensors",
)  # fmt: skip
"""Components that grow with the sequence."""

CANDIDATES: dict[str, tuple[str, ...]] = {
    "fused layers, attention output on the host": ("memory.preset=fastest", "memory.fused_layers=true", "memory.offload=pinned"),
    "fused layers": ("memory.preset=fastest", "memory.fused_layers=true", "memory.offload=pinned", "upipe.attention_output=device"),
    "fused layers, no overlap": (
        "memory.preset=lowest_memory", "memory.fused_layers=true", "upipe.attention_output_layers=auto", "memory.prefetch=false",
    ),
    "fused layers, inputs kept where they fit": ("memory.preset=fastest", "memory.fused_layers=true"),
    "fused layers, optimizer on the host": (
        "memory.preset=lowest_memory", "memory.fused_layers=true", "upipe.attention_output_layers=auto", "memory.optimizer=cpu",
    ),
    "fused layers, working tensors on the host": (
        "memory.preset=lowest_memory", "memory.fused_layers=true", "upipe.attention_output_layers=auto", "memory.prefetch=false",
        "memory.offload_within_layer=true",
    ),
    "modules": ("memory.preset=fastest", "memory.fused_layers=false"),
}  # fmt: skip
"""What `fit` tries, by name; each also with one stored input for two layers (`with_pairs`)."""
LEAST = CANDIDATES["fused layers, working tensors on the host"], CANDIDATES["fused layers, no overlap"]
"""The least device memory of these without an optimizer on the host, and the least besides with less on the host."""
BASELINE_CANDIDATES: dict[str, tuple[str, ...]] = {
    "inputs kept where they fit": ("memory.preset=fastest",),
    "inputs on the host": ("memory.preset=fastest", "memory.offload=pinned"),
    "no prefetch": ("memory.preset=fastest", "memory.offload=pinned", "memory.prefetch=false"),
    "optimizer on the host": ("memory.preset=fastest", "memory.offload=pinned", "memory.prefetch=false", "memory.optimizer=cpu"),
}
"""The same under another method than UPipe."""
RATED_AS = {"fa3": "fa4", "fa2": "flash"}
"""Kernels without a measured rate, and those whose rate they are given."""
MERGED_BYTES = {"ring": (18, 12), "usp": (18, 12), "native": (50, 20), "fpdt": (18, 32)}
"""Bytes of device memory that a method moves an element of q, forward and backward, for each visit of other tokens' keys: merging of
results and sums in fp32, counted from the code."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; see gpus_source in plan_rates.json."""

    name: str
    tflops: float
    memory_gib: float
    usable_gib: float
    hbm_gb_s: float
    link_gb_s: float
    network_gb_s: float
    pinned_gb_s: float
    pageable_to_host_gb_s: float
    pageable_to_device_gb_s: float
    kernel: str
    provenance: str


@functools.cache
def rates() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("plan_rates.json").read_text())


@functools.cache
def gpus() -> dict[str, Gpu]:
    return {name: Gpu(name, **values) for name, values in rates()["gpus"].items()}


@dataclass(frozen=True)
class Machine:
    """`nodes` hosts of `per_node` GPUs and `host_gib` GiB each."""

    gpu: Gpu
    per_node: int
    nodes: int = 1
    host_gib: float = 1945.0

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    @classmethod
    def parse(cls, text: str, nodes: int = 1, host_gib: float = 1945.0) -> Machine:
        """From "8xH100-80GB", the GPUs of one node. Raises ConfigError with the choices."""
        match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w-]*)", text.strip())
        names = [] if match is None else [n for n in gpus() if match[2].lower() in (n.lower(), n.split("-")[0].lower())]
        if not names or int(match[1] or 1) < 1:
            near = difflib.get_close_matches((match[2] if match else text).upper(), gpus(), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--gpus {text!r}: write NUMBERxKIND for one node, as 8xH100-80GB; kinds: {', '.join(gpus())}{hint}")
        if len(names) > 1:
            raise ConfigError(f"--gpus {text!r} may be {' or '.join(names)}: say which")
        if nodes < 1 or not 0 < host_gib < math.inf:
            raise ConfigError(f"--nodes {nodes}, --host-gib {host_gib:g}: both must be positive numbers, such as 2 and 1945")
        return cls(gpus()[names[0]], int(match[1] or 1), nodes, host_gib)

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.gpu.name}, {self.host_gib:g} GiB of host memory a node"


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


GIVEN_BY = dict.fromkeys(("model", "model.preset", "model.pretrained", "model.architecture"), "--model") | dict.fromkeys(
    ("data", "data.tokens"), "--tokens or --max-tokens"
)
"""Settings that options of the command have in hand."""


def _model_section(model: str) -> dict[str, Any]:
    if model in preset_shapes() | glm_shapes():
        return {"preset": model}
    if not Path(model).exists() and not _HUB_NAME.fullmatch(model):
        near = difflib.get_close_matches(model, preset_shapes(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"--model {model!r} is neither a preset, a folder, nor a Hugging Face name (OWNER/NAME){hint}; presets: "
            f"{', '.join(preset_shapes())}"
        )
    return {"pretrained": model}


def request(model: str, tokens: int, world: int, words: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The configuration of a run, as `upipe train` reads it: bf16 with bf16 gradients, ZeRO-3, all ranks on one sequence and
    preset "fastest", with the settings given in words (`section.key=value`) in their place. Raises ConfigError."""
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens}: at least 2, so that one has a target")
    given = sorted({word.partition("=")[0] for word in words} & set(GIVEN_BY))
    if given:
        raise ConfigError(f"{given[0]} is given by {GIVEN_BY[given[0]]}: leave {given[0]}=... out")
    mapping = {
        "model": _model_section(model),
        "data": {"path": str(Path(__file__).resolve().parent.parent / "configs" / "books" / "persuasion.txt"), "repeat": True},
        "train": {"dtype": "bf16", "gradient_dtype": "bf16", "zero_stage": 3},
        "upipe": {"sp_size": world},
    }
    words = list(words)
    if {"method=none", "method.name=none"} & set(words):
        mapping["upipe"]["sp_size"] = 1
    if not any(word.startswith(("memory.preset=", "memory={")) for word in words):
        words.insert(0, "memory.preset=fastest")
    mapping["data"]["tokens"] = tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(mapping))
        return load(RunConfig, path, words)


@functools.cache
def _described(model: str) -> tuple[Any, Any, str]:
    """Hugging Face configuration, sizes and shape of a model section, as JSON."""
    config = ModelConfig(**json.loads(model))
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    # Without a network it tells of each of its attempts; one line is enough.
    hub.setLevel(logging.ERROR)
    try:
        described = hf_config(config)
    except ConfigError as error:
        # The hub's own messages are long.
        raise ConfigError(f"{' '.join(str(error).split())[:300].rstrip('. ')}; presets: {', '.join(preset_shapes())}") from error
    finally:
        hub.setLevel(before)
    if is_glm(described):
        raise ConfigError("upipe plan does not know GLM models: python -m experiments.glm_ablation predicts their memory")
    kind = described.get_text_config().model_type
    if models.of_model_type(kind) is None:
        served = ", ".join(each.name for each in models.ARCHITECTURES)
        raise ConfigError(f"{config.pretrained or config.architecture}: a model of type {kind!r} is not served; types: {served}")
    return described, model_sizes(config), shape_of(described)


def described(run: RunConfig) -> tuple[Any, Any, str]:
    values = dataclasses.asdict(run.model) | {"checkpointing": "none"}
    return _described(json.dumps(values))


def degrees(run: RunConfig) -> tuple[int, int]:
    """(R, P) of a run."""
    if run.method.name == "upipe":
        return run.upipe.ring_degree, run.upipe.ulysses_degree
    return run.method.degrees(run.upipe.sp_size)


def cases_of(run: RunConfig, shape: str, kernel: str, width: int | None, gpu: str | None = None) -> dict[str, Case]:
    """What is to be simulated for a run: of layers by where their attention output is. width: U; None for P. gpu: its name in tables
    of measured times."""
    memory, upipe = run.memory, run.upipe
    blocks = blocks_of(run, kernel, gpu)
    checkpointing = "own" if memory.offload != "none" else {"none": "none"}.get(run.model.checkpointing, "model")
    ring, ranks = degrees(run)
    if run.method.name != "upipe":
        chunk = run.method.chunk_tokens
        return {"device": Case(
            shape, ranks, kernel, None, "device", True, "gemm", memory.mlp_tokens, memory.norm_tokens, memory.loss_tokens,
            memory.fp32_grads, memory.reuse_grad, False, checkpointing, run.train.micro_batch_size, run.train.dtype, ring,
            run.method.name, chunk, *blocks,
        )}  # fmt: skip
    host = Case(
        shape, ranks, kernel, None if width == ranks else width, upipe.attention_output, upipe.overlap, upipe.dx,
        memory.mlp_tokens, memory.norm_tokens, memory.loss_tokens, memory.fp32_grads, memory.reuse_grad, memory.fused_layers,
        checkpointing, run.train.micro_batch_size, run.train.dtype, upipe.ring_degree, "upipe", None, *blocks,
        offload_within_layer=memory.offload_within_layer,
    )  # fmt: skip
    if memory.fused_layers:
        # The same to the byte: what is fetched goes where it would be made again, by fewer buffers.
        return dict.fromkeys(("host", "device"), dataclasses.replace(host, attention_output="device"))
    if upipe.attention_output == "device" or upipe.attention_output_layers is None:
        return {upipe.attention_output: host}
    return {output: dataclasses.replace(host, attention_output=output) for output in ("host", "device")}


def blocks_of(run: RunConfig, kernel: str, gpu: str | None) -> tuple[int | str, int | str, str | None]:
    """Blocks of a kernel's forward and backward, and the GPU by whose table "auto" is settled. "auto" is "none" where that has nothing."""
    blocks = kernel_blocks.settled((run.upipe.kernel_block_tokens, run.upipe.kernel_block_tokens_backward), gpu, kernel)
    return *blocks, gpu if "auto" in blocks else None


def table_name(machine: Machine) -> str:
    """The machine's GPU as tables of measured times name it."""
    return f"NVIDIA {machine.gpu.name.split('-')[0]}"


def kernel_of(run: RunConfig, machine: Machine, head_dim: int) -> str:
    """The attention kernel by name: the one set, or the fastest of the GPU for this head dim."""
    if run.upipe.kernel != "auto":
        return run.upipe.kernel
    if run.method.name == "native" and run.upipe.sp_size > 1:
        return "flash" if machine.gpu.kernel == "flash" else "cudnn"
    if machine.gpu.kernel == "fa4" and head_dim not in (32, 64, 96, 128, 192, 256):
        return "flash"
    return machine.gpu.kernel


def _tflops(kernel: str, direction: str, tokens: int, machine: Machine) -> float:
    """Attention's rate at a length: measured on the H200, between lengths by a line, beyond them the nearest; times the ratio
    of the GPUs' data sheets."""
    table = rates()["attention"].get(RATED_AS.get(kernel, kernel))
    if table is None:
        raise ConfigError(f"upipe.kernel={kernel}: no rate was measured; use auto, {', '.join(rates()['attention'])}")
    points = sorted((int(n), rate) for n, rate in table[direction].items())
    (low, a), (high, b) = points[0], points[-1]
    rate = a + (b - a) * min(1.0, max(0.0, (tokens - low) / (high - low)))
    return rate * machine.gpu.tflops / gpus()["H200-141GB"].tflops


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run on a machine.

    device: components in GiB of the phase that binds. phases: GiB of each phase, margin included. host: components in GiB of
    a node. limit: "device" or "host", the one that runs out (first, as the sequence grows). time: seconds by what takes them.
    sent_layers, attention_layers: inputs and attention outputs on the host. pairs: of layers with one stored input.
    """

    run: RunConfig
    machine: Machine
    kernel: str
    phase: str
    phases: dict[str, float]
    device: dict[str, float]
    host: dict[str, float]
    time: dict[str, float]
    layers: int
    sent_layers: int
    attention_layers: int
    pairs: int
    kept: bool

    @property
    def tokens(self) -> int:
        return self.run.data.tokens

    @property
    def step_host_gib(self) -> float:
        """What a step itself holds on a node's host, the ring that pageable copies go through with it: no optimizer or system."""
        return sum(self.host[name] for name in ("layer inputs", "attention outputs", "working tensors", "attention chunks", "staging"))

    @property
    def device_gib(self) -> float:
        return sum(self.device.values())

    @property
    def host_gib(self) -> float:
        return sum(self.host.values())

    @property
    def time_s(self) -> float:
        return sum(self.time.values())

    @property
    def headroom(self) -> dict[str, float]:
        """GiB left, of a GPU and of a node's host; negative where it does not fit."""
        return {"device": self.machine.gpu.usable_gib - self.device_gib, "host": self.machine.host_gib - self.host_gib}

    @property
    def room(self) -> dict[str, float]:
        """The same for something else: attention outputs of as many layers as there is room for give way."""
        give_way = self.host["attention outputs"] * (self.run.upipe.attention_output_layers == "auto")
        return self.headroom | {"host": self.headroom["host"] + give_way}

    @property
    def fits(self) -> bool:
        return min(self.headroom.values()) >= 0

    @property
    def limit(self) -> str:
        left, parts = self.room, {"device": self.device, "host": dict(self.host)}
        parts["host"]["attention outputs"] -= left["host"] - self.headroom["host"]
        # How much longer the sequence could be, by the part that grows with it.
        longer = {memory: left[memory] / max(1e-9, sum(parts[memory].get(name, 0.0) for name in GROWING)) for memory in left}
        return min(longer, key=longer.get)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        train = self.run.train
        step = self.tokens * train.micro_batch_size * train.accumulation * (self.machine.world // self.run.upipe.sp_size)
        return step / self.time_s / self.machine.world

    def advice(self) -> str:
        """The setting to change for the limit that binds, one line."""
        memory, upipe, ours = self.run.memory, self.run.upipe, self.run.method.name == "upipe"
        fusable = described(self.run)[0].get_text_config().model_type in layer.SERVED
        if self.limit == "host":
            spare, lacking = self.layers // 2 - self.pairs, math.ceil(-self.headroom["host"] / self.input_gib)
            more = self.pairs + (lacking if 0 < lacking <= spare else spare)
            steps = [
                ("upipe.attention_output_layers=auto", self.attention_layers and upipe.attention_output_layers != "auto"),
                (f"memory.store_every=2 memory.pairs={more}", spare > 0 and memory.offload in ("pinned", "pageable")),
                ("memory.optimizer=device", self.headroom["device"] > 0.8 * self.host["optimizer"] / self.machine.per_node > 0),
                (
                    "memory.offload_within_layer=false",
                    memory.offload_within_layer and self.headroom["device"] > 4 * self.input_gib / self.machine.per_node,
                ),
                (
                    "memory.keep_layers_on_gpu=2 or more",
                    not memory.offload_within_layer and self.headroom["device"] > 2 * self.device.get("saved inputs", 0.0) + 8,
                ),
            ]
            rest = "more host memory or more nodes with a larger upipe.sp_size"
        else:
            states = sum(self.device.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
            alone = states > self.machine.gpu.usable_gib    # nothing that shortens a step's own memory would do
            steps = [
                ("train.zero_stage=3", alone and self.run.train.zero_stage < 3 and self.machine.world > 1),
                ("memory.optimizer=cpu", alone and memory.optimizer == "device" and self.run.train.zero_stage > 0
                 and states - self.device["optimizer"] < self.machine.gpu.usable_gib),
                ("more GPUs", alone),
                ("memory.loss_tokens=2K", memory.loss_tokens is None),
                ("memory.offload=pinned", memory.offload == "none" or (memory.offload == "auto" and self.sent_layers < self.layers - 1)),
                ("memory.mlp_tokens=8K memory.norm_tokens=8K", memory.mlp_tokens is None or memory.norm_tokens is None),
                ("method=upipe", not ours),
                ("memory.fused_layers=true upipe.dx=gemm", not memory.fused_layers and fusable),
                ("upipe.overlap=false", upipe.overlap),
                ("memory.prefetch=false", memory.prefetch and memory.offload != "none"),
                (
                    "memory.offload_within_layer=true", ours and memory.fused_layers and not memory.offload_within_layer
                    and memory.offload in ("pinned", "pageable") and memory.keep_layers_on_gpu in (0, "auto")
                    and not memory.pinned_fallback and self.run.train.micro_batch_size == 1,
                ),
                ("a larger upipe.sp_size", upipe.sp_size < self.machine.world),
                ("memory.optimizer=cpu", memory.optimizer == "device" and self.room["host"] > 16 * 8),
            ]
            rest = "more GPUs with a larger upipe.sp_size"
        return next((text for text, helps in steps if helps), rest)

    @property
    def input_gib(self) -> float:
        """Of a layer's input on a node."""
        return max(1e-9, self.host["layer inputs"] / max(1, self.sent_layers))

    def to_json(self, max_tokens: int | None = None) -> dict[str, Any]:
        """What `upipe plan --json` prints; numbers in GiB, seconds, tokens/s/GPU."""
        gpu = self.machine.gpu
        return {
            "tokens": self.tokens, "fits": self.fits, "limit": self.limit, "change": self.advice(), "max_tokens": max_tokens,
            "device": {"gib": self.device_gib, "usable_gib": gpu.usable_gib, "headroom_gib": self.headroom["device"],
                       "phase": self.phase, "phases": self.phases, "components": self.device},
            "host": {"gib": self.host_gib, "usable_gib": self.machine.host_gib, "headroom_gib": self.headroom["host"],
                     "components": self.host},
            "time_s": self.time_s, "time": self.time, "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "kernel": self.kernel,
            "layer_inputs_on_host": self.sent_layers, "attention_outputs_on_host": self.attention_layers, "pairs": self.pairs,
            "gpu": gpu.name, "gpus": self.machine.world, "sp_size": self.run.upipe.sp_size,
            "ring_degree": degrees(self.run)[0], "method": self.run.method.name, "provenance": self.provenance(),
        }  # fmt: skip

    def provenance(self) -> dict[str, str]:
        """Where each kind of number is from."""
        gpu = self.machine.gpu
        scaled = "measured on two H200s" if gpu.provenance == "measured" else "those of the H200 scaled by data sheets"
        kernel = "measured on an H200" if self.kernel in simulate.MEASURED else "assumed"
        attention = f"attention (as {RATED_AS[self.kernel]}'s, assumed)" if self.kernel in RATED_AS else "attention"
        where = "now" if not self.kept else "kept in plan_layers.json"
        if self.kept and not simulate.is_current():
            where += ", of other code than this: python -m upipe.simulate makes it again"
        blocks = "by times measured on one H200 (kernel_blocks.json); where nothing was, as single calls"
        return {
            "layer and loss": f"simulated with the real code ({where})",
            "attention kernel's own memory": kernel, "states, buffers": "arithmetic", "margin, system": "assumed",
            "rates": f"{attention}, links, products of heads {scaled}; other products, gathers, 8-GPU host copies, what a ring hides "
            "assumed",
        } | ({"blocks of attention calls": blocks} if self.blocks else {})  # fmt: skip

    @property
    def blocks(self) -> str:
        """In what blocks attention runs, in words; empty for single calls."""
        return blocked.in_words(*blocks_of(self.run, self.kernel, table_name(self.machine))[:2])

    def text(self) -> str:
        run, gpu, left = self.run, self.machine.gpu, self.headroom
        sp, (ring, ulysses) = run.upipe.sp_size, degrees(run)
        ring = f" (ring {ring} x Ulysses {ulysses})" if ring > 1 else ""
        method = "" if run.method.name == "upipe" else f"method {run.method.name}, "
        lines = [
            f"{run.model.preset or run.model.pretrained or 'model'}, {self.layers} layers, {format_tokens(self.tokens)} tokens, on "
            f"{self.machine}; {method}sp {sp}{ring} x dp {self.machine.world // sp}, {self.kernel}{self.blocks}",
            f"device  {self.device_gib:8.2f} GiB of {gpu.usable_gib:g}, {left['device']:+.2f} left; highest in the {self.phase}",
            *(f"  {value:8.2f} {name}" for name, value in self.device.items() if value > 0.005),
            f"host    {self.host_gib:8.2f} GiB of {self.machine.host_gib:g} a node, {left['host']:+.2f} left",
            *(f"  {value:8.2f} {name}" for name, value in self.host.items() if value > 0.005),
            f"        of {self.layers} layers {self.sent_layers} inputs and {self.attention_layers} attention outputs"
            + (f"; {self.pairs} pairs of layers with one stored input" if self.pairs else ""),
            f"step    {self.time_s:8.2f} s, {self.tokens_per_s_per_gpu:.4g} tokens/s/GPU",
            *(f"  {value:8.2f} {name}" for name, value in self.time.items() if value > 0.005),
            f"{'fits' if self.fits else 'does not fit'}; {self.limit} memory "
            f"{'ends first' if self.fits else 'runs out'}; to go further: {self.advice()}",
            "from: " + "; ".join(f"{what}: {source}" for what, source in self.provenance().items()),
        ]
        return "\n".join(lines)


def predict(run: RunConfig, machine: Machine, kept: bool = True, only_here: bool = False) -> Prediction:
    """Memory and time of a run on a machine. Raises ConfigError for what cannot be run, with what would work.

    kept: use results in plan_layers.json; False simulates anew. only_here: simulate what is not there at this length alone, where
    that is quicker than lines through several.
    """
    sp, world, tokens = run.upipe.sp_size, machine.world, run.data.tokens
    if run.train.dtype == "fp32":
        raise ConfigError("train.dtype=fp32: attention kernels of GPUs take bf16, and no rate or memory of another is known; use bf16")
    if sp < 1 or world % sp:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(f"upipe.sp_size={sp} does not divide the {world} GPUs; use one of {', '.join(map(str, divisors))}")
    try:
        preflight.check_ring_degree(sp, run.upipe.ring_degree, machine.per_node)
        preflight.check_kernel_blocks(run.upipe)
    except ValueError as error:
        raise ConfigError(f"upipe.{error}") from error
    ring, ulysses = degrees(run)
    if tokens > LONGEST * ring:
        raise ConfigError(
            f"{format_tokens(tokens)} tokens are more than {format_tokens(LONGEST * ring)}, the longest that is planned (of a ring rank "
            f"{format_tokens(LONGEST)}): one head has 2**31 elements then, more than kernels index; use fewer, or a ring of more ranks"
        )
    hf, sizes, shape = described(run)
    text = hf.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kernel = kernel_of(run, machine, head_dim)
    width = run.upipe.heads_per_stage
    if width == "auto":
        width, _ = stage_width.choose(tokens // ring, ulysses, text.num_attention_heads, table_name(machine), kernel)
    try:
        schedule = preflight.check_schedule(text.num_attention_heads, text.num_key_value_heads, ulysses, width)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    plan = make_plan(
        run, tokens, sizes, world=world, local_ranks=machine.per_node, device_bytes=int(machine.gpu.memory_gib * GIB),
        host_bytes=int(machine.host_gib * GIB), refuse=False,
    )  # fmt: skip
    outputs = {"host": plan.attention_layers, "device": sizes.layers - plan.attention_layers}
    cases = list({case: None for output, case in cases_of(run, shape, kernel, width, table_name(machine)).items() if outputs[output]})
    local = -(-tokens // sp)

    def peaks_for(case: Case) -> simulate.Peaks:
        layout = Zigzag(ring, ulysses) if run.method.name == "upipe" else run.method.layout(sp)
        if simulate.in_parts(case, local):
            return _simulated(case, (layout.padded(tokens) // sp,))
        if not kept:
            return simulate.simulate(case)
        if simulate.cached(case) is None:
            if only_here and case.method != "fpdt" and local * case.rows <= simulate.LENGTHS[-1]:
                return _simulated(case, (layout.padded(tokens) // sp,))
            if case.rows > 1 and case.method == "upipe":
                # As many tokens in all as of one sequence.
                return _simulated(case, tuple(max(1024, n // case.rows // 1024 * 1024) for n in simulate.LENGTHS))
        return peaks_of(case)

    peaks = simulate.highest([peaks_for(case) for case in cases])
    phases = _device(run, machine, plan, sizes, cases[0], peaks, local)
    totals = {phase: sum(parts.values()) / GIB for phase, parts in phases.items()}
    phase = max(totals, key=totals.get)
    host = _host(run, machine, plan, sizes)
    spent = _time(run, machine, plan, sizes, text, schedule, kernel, head_dim)
    return Prediction(
        run, machine, kernel, phase, totals, {name: value / GIB for name, value in phases[phase].items()},
        {name: value / GIB for name, value in host.items()}, spent, sizes.layers, plan.sent_layers,
        plan.attention_layers, plan.pairs, kept and all(simulate.cached(case) is not None for case in cases),
    )  # fmt: skip


@functools.cache
def _simulated(case: Case, lengths: tuple[int, ...]) -> simulate.Peaks:
    return simulate.simulate(case, lengths)


def state_bytes(run: RunConfig, parameters: int, world: int) -> dict[str, int]:
    """Bytes a rank of model states by ZeRO stage (arXiv 1910.02054): parameters in the training dtype from stage 3 on a share,
    gradients in `train.gradient_dtype` from stage 2, fp32 master weights and Adam's two moments from stage 1. Under
    `memory.optimizer: cpu` the last and the gradients that it takes are on the host."""
    train = run.train
    share = [world if train.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    itemsize = 2 if train.dtype == "bf16" else 4
    gradient = 2 if train.dtype == "bf16" and train.gradient_dtype == "bf16" else 4
    on_host = run.memory.optimizer == "cpu"
    return {
        "parameters": itemsize * parameters // share[0],
        "gradients": gradient * parameters // share[1],
        "optimizer": 0 if on_host else 12 * parameters // share[2],
    }


def _device(run, machine: Machine, plan, sizes, case: Case, peaks, local: int) -> dict[str, dict[str, int]]:
    """Bytes of each component in each phase."""
    zero = deepspeed_config(run.train, run.memory, cuda=True, layer_parameters=sizes.layer_parameters)["zero_optimization"]
    itemsize, u, layers = 2 if case.dtype == "bf16" else 4, plan.input_bytes, sizes.layers
    states = state_bytes(run, sizes.parameters, machine.world)
    # One rank has every parameter whole: DeepSpeed uses its partition as it lies, gathers nothing, and has no second bucket to reduce into.
    buckets = (2 if machine.world > 1 else 1) * zero["reduce_bucket_size"] * itemsize if run.train.zero_stage else 0
    gathered = head = late = 0
    if run.train.zero_stage == 3 and machine.world > 1:
        gathered = itemsize * (max(zero["stage3_max_live_parameters"], sizes.layer_parameters) + zero["stage3_prefetch_bucket_size"])
        head = itemsize * sizes.vocab_size * sizes.hidden_size
        if zero["stage3_prefetch_bucket_size"] and layers > 1 and not case.fused:
            # When the second layer's attention goes back, its MLP's weights are gone and the first layer's are all there. The gather of
            # the last of them brings the next of the trace in the same buffer: the embedding, whole, whatever the limits are.
            kv_width = sizes.attention_width // sizes.heads * (sizes.kv_heads or sizes.heads)
            late = itemsize * (sizes.layer_parameters + sizes.hidden_size * (sizes.attention_width + 2 * kv_width)) + head
    kept = plan.kept_layers
    # Of the input in what was counted: with offload within the layer it is there in the forward alone.
    counted = 0 if case.offload_within_layer else u
    # Without checkpointing a layer keeps more than its input.
    each = u + peaks.at("saved", local)
    others = max(0, kept - 1) * each
    fetched = u if plan.checkpointing is not None and plan.checkpointing.prefetch and plan.sent_layers + plan.pairs > (kept == 0) else 0
    # For the second layer of a pair the first is run again, beside the incoming gradient. In a last pair, where its input is kept,
    # the second's is beside it.
    backward = max(peaks.at("backward", local), (peaks.at("forward", local) + u) * (plan.pairs > 0))
    inner = u if kept and 2 * plan.pairs == layers else 0
    phases = {
        "first forward": {"work of a layer": peaks.at("forward", local) - u, "gathered": gathered, "saved inputs": others + u},
        # The simulated layer's input is in what was counted, also where it is on the host by now.
        "loss": {
            "work of the loss": peaks.at("loss", local) - counted, "gathered": max(gathered, head), "saved inputs": others + u * (kept > 0),
        },
        "backward": {
            "work of a layer": backward - counted, "gathered": gathered, "saved inputs": others + counted + inner,
            "prefetched input": fetched,
        },
        "backward of attention": {
            # By then, of the inputs that stay on the device, the last layers', the first layer's alone may be left.
            "work of a layer": peaks.at("attention", local) - counted, "gathered": late,
            "saved inputs": each * (kept >= layers) + counted + inner, "prefetched input": fetched * (kept < layers),
        },
        "optimizer step": {"fp32 gradients": 4 * min(SUB_GROUP, sizes.parameters // machine.world)},
    }  # fmt: skip
    if run.memory.optimizer == "cpu" or run.train.dtype == "fp32" or run.train.gradient_dtype == "fp32":
        phases["optimizer step"]["fp32 gradients"] = 0      # they are there already
    if not (late and peaks.attention):
        del phases["backward of attention"]
    for parts in phases.values():
        parts |= states | {"buckets": buckets, "cuBLAS": int(rates()["workspace_gib"] * GIB)}
        parts["margin"] = int(MARGIN_SHARE * sum(parts.values()) + MARGIN_GIB * GIB)
    return phases


def _host(run, machine: Machine, plan, sizes) -> dict[str, float]:
    """Bytes of a node by what for."""
    ranks = machine.per_node
    staging = 2 * 3 * 64 * 2**20 if plan.checkpointing is not None and plan.checkpointing.offload == "pageable" else 0
    counted = plan.sent_layers * plan.input_bytes + plan.attention_bytes + plan.working_bytes
    chunks = plan.host_bytes - counted - (12 * sizes.parameters // machine.world if run.memory.optimizer == "cpu" else 0)
    # Master weights, moments, and fp32 gradients.
    optimizer = 16 * sizes.parameters // machine.world if run.memory.optimizer == "cpu" else 0
    return {
        "layer inputs": ranks * plan.sent_layers * plan.input_bytes, "attention outputs": ranks * plan.attention_bytes,
        "working tensors": ranks * plan.working_bytes, "attention chunks": ranks * chunks, "optimizer": ranks * optimizer,
        "staging": ranks * staging,
        "system, processes": system_bytes(int(machine.host_gib * GIB), ranks),
    }  # fmt: skip


def _blocks_speed(run: RunConfig, machine: Machine, schedule: HeadSchedule, kernel: str, head_dim: int) -> dict[str, float]:
    """How many times as fast as single calls attention is in the run's blocks, forward and backward, by the first stage's calls."""
    upipe, gpu = run.upipe, table_name(machine)
    case = {"overlap": upipe.overlap, "dx": upipe.dx}
    wide = BlockSpec(schedule, rank=0, group=None, kernel=None, head_dim=head_dim, scale=1.0, **case).forward_schedule
    found = {}
    for way, size, mine in zip(("forward", "backward"), blocks_of(run, kernel, gpu), (wide, schedule)):
        call = mine.table[0][0].calls[0]
        heads = call.q_count, call.kv_count
        if run.method.name != "upipe":
            heads = tuple(max(1, n // schedule.ranks) for n in (schedule.heads, schedule.kv_heads))
        found[way] = kernel_blocks.speed(size, way, run.data.tokens, *heads, head_dim, gpu, kernel)
    return found


def _time(run, machine: Machine, plan, sizes, text, schedule, kernel: str, head_dim: int) -> dict[str, float]:
    """Seconds of an optimizer step by what takes them."""
    train, memory, upipe, table, gpu = run.train, run.memory, run.upipe, rates(), machine.gpu
    sp, S, layers, itemsize = upipe.sp_size, run.data.tokens, sizes.layers, 2 if train.dtype == "bf16" else 4
    rows = train.micro_batch_size * -(-S // sp)
    checkpointed = run.model.checkpointing != "none" or memory.offload != "none"
    # How often a layer's attention runs forward: again where its output is not kept, and once more for the second of a pair.
    on_host = host_layers(dataclasses.replace(upipe, attention_output_layers=plan.attention_layers), layers)
    firsts = range(0, 2 * plan.pairs, 2)
    runs = [1 if i in on_host else 1 + checkpointed + (i in firsts) for i in range(layers)]
    # Attention of all layers; ranks wait for the one with most heads.
    ring, ulysses = degrees(run)
    heads = -(-schedule.heads // ulysses)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    window = getattr(text, "sliding_window", None)
    if models.of_model_type(text.model_type).window_in_config:
        kinds = ["sliding_attention"] * layers
    scores = [S * min(S / 2, window) if window and kind == "sliding_attention" else S * S / 2 for kind in kinds[:layers]]
    each = 4 * head_dim * heads * train.micro_batch_size / ring
    # A ring's calls are of a ring rank's tokens, FPDT's of a chunk's.
    method, length = run.method.name, S // ring
    chunks = -(-S // (run.method.chunk_tokens or methods.CHUNK_TOKENS)) if method == "fpdt" else 1
    length = -(-S // chunks) if method == "fpdt" else length
    forward_s = each / _tflops(kernel, "forward", length, machine) / 1e12
    speeds = _blocks_speed(run, machine, schedule, kernel, head_dim) if ring == 1 and chunks == 1 else {"forward": 1.0, "backward": 1.0}
    # Windows are not cut into blocks.
    work = {way: [score / speed if score == S * S / 2 else score for score in scores] for way, speed in speeds.items()}
    forward = forward_s * sum(n * score for n, score in zip(runs, work["forward"]))
    backward = 2.5 * each * sum(work["backward"]) / _tflops(kernel, "backward", length, machine) / 1e12
    # Products, in forward-equivalents: of UPipe and FPDT q, k and v again in backward, gate and up again where the MLP is tiled.
    D, H, K, d = sizes.hidden_size, schedule.heads, schedule.kv_heads, head_dim
    qkv, projections = D * d * (H + 2 * K), D * d * (2 * H + 2 * K)
    mlp = sizes.layer_parameters - projections
    # Of a mixture of experts those that a token goes to; the router's own work is not counted.
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if experts:
        mlp *= text.num_experts_per_tok / experts
    tiled = memory.mlp_tokens is not None or memory.fused_layers
    mlp_again = checkpointed and not memory.fused_layers
    products = layers * mlp * (3 + mlp_again + 2 / 3 * tiled) + 3 * sizes.vocab_size * D + mlp * len(firsts)
    of_heads = layers * qkv * (method in ("upipe", "fpdt")) + projections * sum(2 + n for n in runs)
    of_heads += D * d * H * len({*firsts} & {*on_host})
    ratio = gpu.tflops / gpus()["H200-141GB"].tflops
    gemm = products / table["gemm"] + of_heads / table["gemm_heads" if method == "upipe" else "gemm"]
    gemm *= 2 * rows / ratio / 1e12
    # Passes of elementwise work over a hidden state, and over the MLP's and the logits' width; a rough count.
    wide = getattr(text, "intermediate_size", 4 * D)
    passes = (layers + plan.pairs / 4) * (40 * D + 14 * wide) * itemsize + 10 * 4 * sizes.vocab_size
    elementwise = rows * passes / (gpu.hbm_gb_s * 0.8e9)
    visits = (chunks - 1) / 2 if method == "fpdt" else 0.75 * (ring - 1)
    if method in MERGED_BYTES:
        once, back = MERGED_BYTES[method]
        elementwise += visits * rows * H * d * (once * sum(runs) + back * layers) / (gpu.hbm_gb_s * 0.8e9)
    # Exchanges: q, k, v and o forward; q, k, v, o, dO, then dq, dk, dv backward.
    width = d * itemsize * rows * (ulysses - 1) / ulysses
    sent = width * ((2 * H + 2 * K) * sum(runs) + layers * (4 * H + 4 * K))
    if method != "upipe":
        # All heads at once: nothing is exchanged again in backward, and nothing hides it. kv heads go to every rank.
        sent = width * (2 * H + 2 * max(K, ulysses)) * (sum(runs) + layers)
    within = min(ulysses, machine.per_node)
    outside = 0.0 if ulysses <= machine.per_node else (ulysses - within) / (ulysses - 1)
    exchange = sent * ((1 - outside) / gpu.link_gb_s + outside / gpu.network_gb_s) / 1e9
    exchange *= table["exposed_exchange"] if upipe.overlap and method == "upipe" else 1.0
    if ulysses == 1:
        exchange = 0.0
    ring_forward, ring_backward, ring_first = _ring(run, machine, schedule, rows * d * itemsize, layers)
    across = max(0.0, ring_forward * sum(runs) / layers - forward) + max(ring_first, ring_backward - backward)
    if method == "native" and ring > 1:
        # k and v of all ranks in one gather before any call, in both directions; their fp32 gradients go on under the next call.
        across = (sum(runs) + layers) / layers * ring_forward / 0.75
    # ZeRO: parameters gathered for forward and backward, gradients reduced.
    moved = (3 if train.zero_stage == 3 else 2 if train.zero_stage else 1) * itemsize * sizes.parameters
    moved += itemsize * plan.pairs * sizes.layer_parameters * (train.zero_stage == 3)
    bandwidth = gpu.link_gb_s if machine.nodes == 1 else gpu.network_gb_s
    zero = 0.0 if machine.world == 1 else table["exposed_gather"] * moved / bandwidth / 1e9
    compute = forward + backward + gemm + elementwise
    launches = layers * (table["launch_layer_s"] + table["launch_stage_s"] * len(schedule.table))
    first = forward_s * sum(scores) + gemm / 4
    host = _copies(run, machine, plan, len([i for i in firsts if i in on_host]), first, compute - first)
    if memory.offload_within_layer:
        norm = models.of_model_type(text.model_type).norm_width is not None
        moved = [
            layer.moved_bytes(schedule, rows, D, d, itemsize, norm=norm, on_host=i in on_host, first_of_pair=i in firsts)
            for i in range(layers)
        ]
        out, back = _offload_rates(machine, plan)
        # Each is waited for: a product has its rows in a fraction of the time that they take to come.
        host += sum(each.to_host for each in moved) / out + sum(each.to_device for each in moved) / back
    if method == "fpdt":
        rate, q, kv = _copy_rate(machine, gpu.pinned_gb_s), rows * H * d, rows * max(K, ulysses) * d
        host += _chunk_copies(rate, visits, q, kv, runs, forward, backward)
    micro = {
        "attention, forward": forward, "attention, backward": backward, "products": gemm, "elementwise": elementwise,
        "exchanges not hidden": exchange, "ring not hidden": across, "ZeRO not hidden": zero, "host copies not hidden": host,
        "launches not hidden": max(0.0, launches - compute),
    }  # fmt: skip
    spent = {name: seconds * train.accumulation for name, seconds in micro.items()}
    if memory.optimizer == "cpu":
        share = sizes.parameters / machine.nodes
        spent["optimizer"] = 28 * share / table["host_cpu_gb_s"] / 1e9 + 6 * share / machine.per_node / _copy_rate(machine, gpu.pinned_gb_s)
    else:
        spent["optimizer"] = 30 * sizes.parameters / machine.world / (gpu.hbm_gb_s * 0.8e9)
    return spent


def _ring(run, machine: Machine, schedule, head: float, layers: int) -> tuple[float, float, float]:
    """Seconds of a ring's messages in a forward and in a backward of all layers, and what of the latter no kernel hides: a call's
    first k and v. head: bytes of one head of a rank's rows. Every call sends its k and v, three quarters of them on average."""
    (ring, ulysses), gpu = degrees(run), machine.gpu
    rate = (gpu.link_gb_s if run.upipe.sp_size <= machine.per_node else gpu.network_gb_s) * 1e9
    calls = max(sum(call.kv_count for row in schedule.table for call in row[rank].calls) for rank in range(ulysses))
    if run.method.name != "upipe":
        calls = -(-schedule.kv_heads // ulysses)
    step = layers * calls * 2 * 0.75 * head * ulysses / rate if ring > 1 else 0.0
    return step * (ring - 1), 2 * step * (ring - 1), step


def _chunk_copies(rate: float, visits: float, q: int, kv: int, runs: list[int], forward: float, backward: float) -> float:
    """Seconds of FPDT's copies in bf16 and fp32 that attention does not hide, of all layers. q, kv: elements of a rank's q, and of
    its k; visits: of other chunks by each. Both ways run at once; a call's first chunk is waited for."""
    layers = len(runs)
    out, back = 4 * kv + 4 * q, 4 * kv * visits
    once = max(out, back) * sum(runs) / rate
    again = layers * max((4 * visits + 2) * q, (visits + 1) * 6 * q + 4 * visits * q + 4 * kv) / rate
    first = layers * 6 * q / max(1.0, 2 * visits + 1) / rate
    return max(0.0, once - forward) + max(0.0, again - backward) + first


def _copy_rate(machine: Machine, gb_s: float) -> float:
    """Bytes a second of a GPU's host copies while all of the node's copy."""
    return gb_s * 1e9 * (rates()["many_gpus_host_copy"] if machine.per_node > 2 and machine.gpu.pinned_gb_s > 25 else 1.0)


def _offload_rates(machine: Machine, plan) -> tuple[float, float]:
    """Bytes a second to the host and back of what `memory.offload` sends."""
    gpu, pageable = machine.gpu, plan.checkpointing is not None and plan.checkpointing.offload == "pageable"
    out = _copy_rate(machine, gpu.pageable_to_host_gb_s if pageable else gpu.pinned_gb_s)
    return out, _copy_rate(machine, gpu.pageable_to_device_gb_s if pageable else gpu.pinned_gb_s)


def _copies(run, machine: Machine, plan, again: int, forward: float, backward: float) -> float:
    """Seconds of a step's host copies that computation does not hide. again: attention outputs that come back twice, of pairs.
    forward, backward: seconds of computation of all layers."""
    layers, (out, back) = plan.layers, _offload_rates(machine, plan)
    pinned = _copy_rate(machine, machine.gpu.pinned_gb_s)
    sent, attention = plan.sent_layers * plan.input_bytes, plan.attention_bytes
    if run.memory.offload_within_layer:
        # Nothing comes back but rows (`layer.moved_bytes`, as the attention output's way there is). The input of a pair's first layer
        # does, for its second, whose own goes.
        return max(0.0, sent / out - forward) + plan.pairs * plan.input_bytes * (1 / out + 1 / back)
    # The attention output that comes back is waited for: it is read first thing in a layer's backward.
    returned = attention * (1 + again / max(1, plan.attention_layers))
    exposed = max(0.0, sent / out + attention / pinned - forward) + 0.5 * returned / pinned
    if sent:
        each, fetches = plan.input_bytes / back, plan.sent_layers + min(plan.pairs, plan.sent_layers)
        exposed += fetches * (max(0.0, each - backward / layers) if plan.checkpointing.prefetch else each)
    return exposed


def with_pairs(found: Prediction, only_here: bool = False) -> list[Prediction]:
    """The prediction, and those with one stored input for two layers that may help: of the fewest pairs with which the host holds
    the inputs, and of all layers, which leaves it room for more attention outputs."""
    run, most = found.run, found.layers // 2
    lacking = math.ceil(-found.headroom["host"] / found.input_gib)
    if run.memory.store_every != 1 or run.memory.offload not in ("pinned", "pageable") or not most:
        return [found]
    some_made_again = run.upipe.attention_output_layers == "auto" and found.attention_layers < found.layers
    counts = {lacking} if 0 < lacking < most else set()
    if some_made_again or 0 < lacking <= most:
        counts.add(most)
    memories = [dataclasses.replace(run.memory, store_every=2, pairs=n) for n in sorted(counts)]
    return [found, *(predict(dataclasses.replace(run, memory=memory), found.machine, only_here=only_here) for memory in memories)]


def _left_open(own: tuple[str, ...], words, fused: bool = True) -> list[str]:
    """Of a candidate's own settings those that the words given leave open; fused: layers may be fused."""
    given = {word.partition("=")[0] for word in words}
    if "upipe.attention_output=device" in words:
        given.add("upipe.attention_output_layers")
    if not fused:
        given |= {"memory.fused_layers", "memory.offload_within_layer"}
    return [word for word in own if word.partition("=")[0] not in given]


def _may_fuse(run: RunConfig, words) -> bool:
    """Whether this model's layers can be fused, under what is given in words."""
    return described(run)[0].get_text_config().model_type in layer.SERVED and not {"upipe.dx=bf16", "memory.offload=none"} & set(words)


def _is_upipe(words) -> bool:
    """Whether words leave the method as it is."""
    names = [word.partition("=")[2] for word in words if word.startswith(("method=", "method.name="))]
    return not names or names[-1] == "upipe"


def least(model: str, tokens: int, machine: Machine, words: list[str] | tuple[str, ...] = ()) -> Prediction:
    """With LEAST, as far as the words leave it open, and as many pairs of layers as leave the most."""
    fused = _may_fuse(request(model, tokens, machine.world, words), words)
    runs = []
    for own in LEAST if _is_upipe(words) else (BASELINE_CANDIDATES["no prefetch"],):
        with contextlib.suppress(ConfigError):
            runs.append(request(model, tokens, machine.world, [*_left_open(own, words, fused), *words]))
    if not runs:
        runs = [request(model, tokens, machine.world, words)]
    found = [each for run in runs for each in with_pairs(predict(run, machine, only_here=True), only_here=True)]
    return max(found, key=lambda each: min(each.headroom.values()))


def fit(
    model: str, tokens: int, machine: Machine, words: list[str] | tuple[str, ...] = (), only_here: bool = False
) -> Prediction | None:
    """The fastest of CANDIDATES that fits, over every sp_size that divides the GPUs, and where that is more than a node's over
    Ulysses across nodes and Ulysses inside of them x a ring; of equals (1 %) the smallest sp_size, so that sequence parallelism
    goes only as far as needed. What is given in words is not changed. None where nothing fits. only_here: as of `predict`."""
    best: Prediction | None = None
    for prediction in _candidates(model, tokens, machine, words, only_here):
        if prediction.fits and (best is None or _better(prediction, best)):
            best = prediction
    return best


def _better(a: Prediction, b: Prediction) -> bool:
    gain = a.tokens_per_s_per_gpu / b.tokens_per_s_per_gpu
    return gain > 1.01 or (gain > 0.99 and a.run.upipe.sp_size < b.run.upipe.sp_size)


def ring_degrees(sp_size: int, per_node: int) -> list[int]:
    """What `fit` tries: 1, and over nodes the fewest ring ranks with which Ulysses stays inside a node."""
    if sp_size <= per_node:
        return [1]
    return [1, next(n for n in range(2, sp_size + 1) if sp_size % n == 0 and per_node % (sp_size // n) == 0)]


def _candidates(model: str, tokens: int, machine: Machine, words, only_here: bool = False):
    given = {word.partition("=")[0] for word in words}
    plain = request(model, tokens, machine.world, words)
    asked, fused = plain.upipe, _may_fuse(plain, words)
    widths = [n for n in range(machine.world, 0, -1) if machine.world % n == 0 and n % max(1, asked.ring_degree) == 0]
    if "upipe.sp_size" in given or not widths:
        widths = [asked.sp_size]
    rings_open = _is_upipe(words) and "upipe.ring_degree" not in given
    candidates = CANDIDATES if _is_upipe(words) else BASELINE_CANDIDATES
    names, some, refused = list(candidates), False, None
    for sp in widths:
        fitted, tried = [], False
        rings = ring_degrees(sp, machine.per_node) if rings_open and sp > 0 else [asked.ring_degree]
        for ring, name in itertools.product(rings, names):
            own = [*_left_open(candidates[name], words, fused), f"upipe.sp_size={sp}"] + [f"upipe.ring_degree={ring}"] * rings_open
            try:
                prediction = predict(request(model, tokens, machine.world, [*own, *words]), machine, only_here=only_here)
            except ConfigError as error:
                # A candidate that goes against what is given, or more ranks than this model's heads take.
                refused = refused or error
                continue
            some = tried = True
            found = with_pairs(prediction, only_here) if not given & {"memory.store_every", "memory.pairs"} else [prediction]
            if any(each.fits for each in found) and name not in fitted:
                fitted.append(name)
            yield from found
        # What does not fit on some ranks does not fit on fewer.
        if tried and not fitted:
            return
        names = fitted or names
    if not some:
        raise refused


def max_tokens(model: str, machine: Machine, words=(), *, fitting: bool = False) -> Prediction | None:
    """The prediction at the longest length that fits: a multiple of GRAIN, with the settings given, or with
    `fitting` with any of CANDIDATES; up to LONGEST. None where not even the shortest does."""

    def at(n: int) -> Prediction | None:
        if fitting:
            # The first that fits; which is the fastest is asked at the end.
            return next((found for found in _candidates(model, n * GRAIN, machine, words, False) if found.fits), None)
        found = predict(request(model, n * GRAIN, machine.world, words), machine)
        return found if found.fits else None

    low, high, best = 0, LONGEST // GRAIN + 1, None
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return fit(model, best.tokens, machine, words) if fitting and best is not None else best


def save_config(prediction: Prediction, path: str | Path) -> None:
    """Write the run as a YAML file that `upipe train` takes, and read it back to see that it does.

    Raises ConfigError where it cannot be written, or is read as something else.
    """
    run = prediction.run
    written = to_mapping(run)
    # In these sections a preset fills in what is left out.
    values = _plain(written) | {name: written[name] for name in ("upipe", "memory")}
    head = (
        f"# Planned for {prediction.machine}: {prediction.device_gib:.1f} of {prediction.machine.gpu.usable_gib:g} GiB a GPU, "
        f"{prediction.host_gib:.0f} GiB a node, {prediction.time_s:.4g} s a step (predicted).\n# Put your own data under data.\n"
    )
    try:
        Path(path).write_text(head + yaml.safe_dump(values, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--save-config {path}: {error.strerror}") from error
    if load(RunConfig, path) != run:
        raise ConfigError(f"--save-config {path}: what was written is read as another configuration")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def plot(predictions: list[Prediction], path: str | Path) -> None:
    """Stacked bars of device memory by component, one a prediction, the usable memory as a line. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(1.5 + 1.3 * len(predictions), 5))
    names = list(dict.fromkeys(name for p in predictions for name in p.device))
    bottom = [0.0] * len(predictions)
    for i, name in enumerate(names):
        heights = [p.device.get(name, 0.0) for p in predictions]
        axis.bar(range(len(predictions)), heights, bottom=bottom, label=name, color=pyplot.cm.tab20(i % 20))
        bottom = [b + h for b, h in zip(bottom, heights)]
    axis.axhline(predictions[0].machine.gpu.usable_gib, color="black", linestyle="--", linewidth=1)
    axis.set_xticks(range(len(predictions)), [format_tokens(p.tokens) for p in predictions])
    axis.set_xlabel("tokens")
    axis.set_ylabel("GiB a GPU, predicted")
    axis.legend(fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        pyplot.close(figure)


def command(arguments: SimpleNamespace) -> int:
    """`upipe plan`: 0 where it fits, 1 where it does not."""
    machine = Machine.parse(arguments.gpus, arguments.nodes, arguments.host_gib)
    words, model = arguments.overrides, arguments.model
    longest = None
    if arguments.max_tokens:
        found = max_tokens(model, machine, words, fitting=arguments.fit)
        longest = 0 if found is None else found.tokens
    elif arguments.fit:
        found = fit(model, arguments.tokens, machine, words, only_here=True)
    else:
        found = predict(request(model, arguments.tokens, machine.world, words), machine, only_here=True)
    if found is None:
        # Nothing fits: say what is in the way.
        tokens = arguments.tokens or GRAIN
        found = least(model, tokens, machine, words) if arguments.fit else predict(request(model, tokens, machine.world, words), machine)
    if arguments.save_config:
        save_config(found, arguments.save_config)
    if arguments.plot:
        sizes = [found.tokens >> shift & ~1023 or found.tokens for shift in (3, 2, 1)] if found.tokens >= 2**17 else []
        shorter = [predict(dataclasses.replace(found.run, data=dataclasses.replace(found.run.data, tokens=n)), machine) for n in sizes]
        plot([*shorter, found], arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json(longest), indent=1))
    else:
        if longest is not None:
            end = ", the longest that is searched" if longest == LONGEST else ""
            print(f"longest that fits: {longest} tokens, {longest / 2**20:.2f}M{end}")
        print(found.text())
    return 0 if found.fits else 1
