"""The memory stack under one section of a configuration: tiles, offload, ZeRO's buffers, and presets of them.

The parts are elsewhere: `upipe.tiled` (MLP, norms, loss in tiles), `upipe.layer` (a decoder layer as one function),
`upipe.offload` (saved inputs on the host) and the attention block's own settings (`upipe.apply.UPipeConfig`). Here they are
named together, checked against each other before anything is built (`check`), turned into what each part takes once the
model's sizes are known (`make_plan`), and put on a model in the right order (`apply_stack`).

A preset fills in what the user did not set, in the mapping that a configuration is read from (`fill`): after that, nothing
depends on the preset's name. u = B x L x D x bytes of the dtype: one hidden state of a rank's tokens, one saved input.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from upipe import host, preflight
from upipe.apply import Handle, UPipeConfig, host_layers
from upipe.build import ModelConfig, ModelSizes, contexts_of, hf_config
from upipe.config import ConfigError, Length, from_mapping, parse_length
from upipe.layer import SERVED, FusedLayers, FusedLayersConfig, apply_fused_layers, layer_contexts
from upipe.loss import LOSS_TILE_TOKENS
from upipe.methods import MethodConfig, apply_method
from upipe.methods import config as methods
from upipe.offload import CheckpointConfig, Checkpointing, apply_checkpointing
from upipe.preflight import PreflightError
from upipe.tiled import MLP_TILE_TOKENS, NORM_TILE_TOKENS, Tiling, TilingConfig, apply_tiling

GIB = 2**30
SYSTEM_GIB, PROCESS_GIB = 20.0, 5.0
"""Host memory that the system and each process take, assumed; see `system_bytes`."""
PINNED_UP_TO = 4 * 2**20  # tokens; the UPipe paper's 8B runs are pinned up to 4M and not beyond
_TILES = {"mlp_tokens": MLP_TILE_TOKENS, "norm_tokens": NORM_TILE_TOKENS, "loss_tokens": LOSS_TILE_TOKENS}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "paper": {
        "model": {"checkpointing": "non-reentrant"},
        "upipe": {"heads_per_stage": None, "attention_output": "device"},
        "memory": {**_TILES, "offload": "pinned"},
    },
    "lowest_memory": {
        "model": {"checkpointing": "non-reentrant"},
        "upipe": {"heads_per_stage": None, "attention_output": "host", "overlap": False, "dx": "gemm"},
        "memory": {
            "mlp_tokens": 2048, "norm_tokens": 2048, "loss_tokens": 1024, "offload": "pinned", "prefetch": False, "fused_layers": True,
        },
    },
    "fastest": {
        "model": {"checkpointing": "non-reentrant"},
        "upipe": {
            "heads_per_stage": "auto", "attention_output": "host", "attention_output_layers": "auto", "overlap": True, "dx": "gemm",
        },
        "memory": {**_TILES, "offload": "auto", "prefetch": True, "fused_layers": True},
    },
}
"""Preset -> section -> what it sets. "paper" is the set-up that the UPipe paper published (arXiv 2602.21196): U = P,
every layer checkpointed and its input on the host, MLP, norms and loss in tiles; beyond PINNED_UP_TO tokens its offload is
"pageable". The exchange and the gradient of the input stay as they are here (the official code's do not overlap, and sum in bf16).
Where layers cannot be fused, `fused_layers` stays off, and "lowest_memory" has `dx: bf16`."""


@dataclass
class MemoryConfig:
    """The `memory` section of a configuration.

    preset: what fills in all that is not set, here and in `model.checkpointing` and `upipe`; see PRESETS.

    mlp_tokens, norm_tokens, loss_tokens: tokens a tile; null leaves that part untiled. fp32_grads: sum weight gradients of
    bf16 models over tiles in fp32. reuse_grad: write an input's gradient over the incoming one where nothing else holds it.
    loss_implementation: "tiled" or "liger" (liger-kernel's fused linear cross-entropy, on a GPU).

    fused_layers: run each decoder layer as one function, with less memory than its parts (Llama, Mistral, Qwen2, Qwen3). It saves
    its input alone, so it needs an offload, and `upipe.dx: gemm`, which costs it no memory.

    offload: where the inputs of checkpointed layers are kept. "none": on the device, with transformers' own checkpointing;
    "pinned" and "pageable" host memory, with that of `upipe.offload`; "auto": pinned, but only as many layers as do not fit on
    the device by an estimate (`estimate_kept`). keep_layers_on_gpu: inputs of the last n layers stay; "auto": 1, or as
    estimated; 0 where all layers are in pairs. pinned_fallback: go on pageable where page-locked memory runs out for
    them, rather than fail; for attention outputs and the rest it still fails. prefetch: fetch the next input while a layer's
    backward runs, for one more u.

    offload_within_layer: while a fused layer runs, its working tensors as wide as the hidden states (in the backward its input, the
    incoming gradient and dq; the attention output) are on the host too, as `offload` says, and come by tiles of rows: about 3 u less
    on the device, for copies that are waited for, some 30 u a layer and step at 8 ranks. All inputs go to the host then. Needs
    fused_layers, offload: pinned or pageable, prefetch: false and one row a batch.

    store_every: 2: one stored input serves a pair of layers, for lengths at which the host cannot hold every layer's. It saves u of
    host memory a pair, and costs one more forward of the pair's first layer: without attention where that layer's attention output
    is on the host (`upipe.attention_output_layers`: there first). Bits of gradients stay. pairs: of so many pairs, from the first
    layer on; null: of all layers.

    optimizer: "cpu" keeps the optimizer's states and its step on the host (ZeRO 1 to 3; 12 bytes a parameter over all ranks).
    reduce_bucket_parameters: gradients reduced at a time; null: one decoder layer's. prefetch_parameters: parameters that
    ZeRO-3 gathers ahead; null: a quarter of a layer. `train.max_live_parameters` null: 1.2 layers.
    """

    preset: Literal["none", "paper", "lowest_memory", "fastest"] = "none"
    mlp_tokens: Length | None = None
    norm_tokens: Length | None = None
    loss_tokens: Length | None = None
    fp32_grads: bool = True
    reuse_grad: bool = True
    loss_implementation: Literal["tiled", "liger"] = "tiled"
    fused_layers: bool = False
    offload: Literal["none", "pinned", "pageable", "auto"] | None = None
    keep_layers_on_gpu: int | Literal["auto"] = "auto"
    store_every: Literal[1, 2] = 1
    pairs: int | None = None
    pinned_fallback: bool = False
    prefetch: bool = True
    offload_within_layer: bool = False
    optimizer: Literal["device", "cpu"] = "device"
    reduce_bucket_parameters: int | None = None
    prefetch_parameters: int | None = None

    def __post_init__(self):
        for name in ("mlp_tokens", "norm_tokens", "loss_tokens", "pairs", "reduce_bucket_parameters", "prefetch_parameters"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "prefetch_parameters" else 1):
                raise ValueError(f"{name}={value}: must be positive, or null")
        if self.keep_layers_on_gpu != "auto" and self.keep_layers_on_gpu < 0:
            raise ValueError(f"keep_layers_on_gpu={self.keep_layers_on_gpu}: must be 0 or more, or auto")
        if self.store_every == 1 and self.pairs is not None:
            raise ValueError(f"pairs={self.pairs} with store_every=1: they are of store_every: 2")
        if self.offload is None:
            if self.preset != "none":
                raise ValueError(
                    f"preset={self.preset!r} is filled in where a configuration is read: use upipe.config.load or from_mapping, or "
                    "write its settings (upipe.memory.PRESETS) out and leave the preset out"
                )
            self.offload = "none"

    @property
    def tiles(self) -> bool:
        return not self.mlp_tokens is self.norm_tokens is self.loss_tokens is None


def fill(mapping: dict[str, Any], tokens: Any, folder: str | Path = ".") -> dict[str, Any]:
    """A configuration's mapping with what its preset sets and it does not, as a copy. Offload brings checkpointing along.

    What has the wrong type is left as it is, for the reader to refuse.

    Args:
        mapping: sections model, upipe and memory among others.
        tokens: of a sequence, as the mapping gives them.
        folder: what a relative `model.pretrained` is relative to.
    """
    filled = {name: dict(value) if isinstance(value, dict) else value for name, value in mapping.items()}
    memory = filled.setdefault("memory", {})
    if not isinstance(memory, dict) or memory.get("preset", "none") not in [*PRESETS]:
        return filled
    name = memory.get("preset", "none")
    fused = memory.get("fused_layers")
    if fused is None and PRESETS[name].get("memory", {}).get("fused_layers"):
        fused = memory["fused_layers"] = _may_fuse(filled, folder)
    for section, values in PRESETS[name].items():
        if section == "upipe" and methods.name_in(mapping) != "upipe":
            continue
        given = filled.setdefault(section, {}) if section != "model" else filled.get(section)
        if isinstance(given, dict):
            if section == "upipe" and name == "lowest_memory" and fused is not True:
                values = values | {"dx": "bf16"}
            if section == "upipe" and given.get("attention_output") == "device":
                values = {key: value for key, value in values.items() if key != "attention_output_layers"}
            if name == "paper" and section == "memory" and _length(tokens) > PINNED_UP_TO:
                values = values | {"offload": "pageable"}
            filled[section] = given | {key: value for key, value in values.items() if key not in given}
    memory = filled["memory"]
    if memory.get("offload") is None:
        memory["offload"] = "none"
    if memory["offload"] != "none" and isinstance(filled.get("model"), dict):
        filled["model"].setdefault("checkpointing", "non-reentrant")
    return filled


def _may_fuse(mapping: dict[str, Any], folder: str | Path) -> bool:
    """Whether layers of the mapping's model can be fused under the settings that it gives."""
    memory, upipe = mapping["memory"], mapping.get("upipe") or {}
    if methods.name_in(mapping) != "upipe" or memory.get("offload", "pinned") == "none":
        return False
    if not isinstance(upipe, dict) or upipe.get("dx", "gemm") != "gemm":
        return False
    try:
        described = hf_config(from_mapping(ModelConfig, mapping["model"], folder=folder))
    except (ConfigError, KeyError, AttributeError):
        return False    # no model, or none that can be read: the reader refuses it
    return described.get_text_config().model_type in SERVED


def _length(tokens: Any) -> int:
    try:
        return parse_length(tokens)
    except ValueError:
        return 0


def check(run: Any) -> None:
    """Refuse settings that do not go together, before anything is built.

    Args:
        run: has the sections model, train, method (or its name), upipe and memory.

    Raises:
        ValueError: naming the values and what would work.
    """
    model, train, upipe, memory = run.model, run.train, run.upipe, run.memory
    methods.check(methods.of(run.method), upipe, memory)
    if memory.offload != "none" and model.checkpointing != "non-reentrant":
        why = {
            "none": "it sends the saved inputs of checkpointed layers",
            "reentrant": "it is a checkpointing of its own, in place of transformers'",
        }[model.checkpointing]
        raise ValueError(
            f"memory.offload={memory.offload} with model.checkpointing={model.checkpointing}: {why}; set model.checkpointing: "
            "non-reentrant, or memory.offload: none"
        )
    if upipe.attention_output == "host" and model.checkpointing != "non-reentrant":
        raise ValueError(
            f"upipe.attention_output=host with model.checkpointing={model.checkpointing}: it is kept for the recomputed "
            "forward of a checkpointed layer; set model.checkpointing: non-reentrant (with any memory.offload), or "
            "upipe.attention_output: device"
        )
    if upipe.attention_output == "device" and upipe.attention_output_layers is not None:
        raise ValueError(
            f"upipe.attention_output_layers={upipe.attention_output_layers} with upipe.attention_output=device: no layer's is on the "
            "host then; set upipe.attention_output: host, or leave it out"
        )
    if memory.store_every == 2 and memory.offload not in ("pinned", "pageable"):
        raise ValueError(
            f"memory.store_every=2 with memory.offload={memory.offload}: it is for inputs that are more than the host holds; set "
            "memory.offload: pinned or pageable, or leave it out"
        )
    if memory.fused_layers and (memory.offload == "none" or upipe.dx != "gemm"):
        raise ValueError(
            f"memory.fused_layers=true with memory.offload={memory.offload}, upipe.dx={upipe.dx}: a fused layer needs the checkpointing "
            "of memory.offload: auto, pinned or pageable, and writes dx over the incoming gradient, which is upipe.dx: gemm"
        )
    if memory.offload_within_layer:
        wrong = [
            f"{name}={value}"
            for name, value, works in (
                ("memory.fused_layers", memory.fused_layers, (True,)),
                ("memory.offload", memory.offload, ("pinned", "pageable")),
                ("memory.keep_layers_on_gpu", memory.keep_layers_on_gpu, (0, "auto")),
                ("memory.prefetch", memory.prefetch, (False,)),
                ("memory.pinned_fallback", memory.pinned_fallback, (False,)),
                ("train.micro_batch_size", train.micro_batch_size, (1,)),
            )
            if value not in works
        ]
        if wrong:
            raise ValueError(
                f"memory.offload_within_layer=true with {', '.join(wrong)}: a fused layer reads its input from the host, by rows of one "
                "sequence; use memory.fused_layers: true, offload: pinned or pageable, keep_layers_on_gpu: 0, prefetch: false, "
                "pinned_fallback: false and train.micro_batch_size: 1"
            )
    if memory.keep_layers_on_gpu != "auto" and memory.offload in ("none", "auto"):
        raise ValueError(
            f"memory.keep_layers_on_gpu={memory.keep_layers_on_gpu} with memory.offload={memory.offload}: "
            + ("all inputs stay on the device then" if memory.offload == "none" else "auto chooses how many stay")
            + "; leave it out, or set memory.offload: pinned or pageable"
        )
    if memory.pinned_fallback and memory.offload not in ("pinned", "auto"):
        raise ValueError(f"memory.pinned_fallback=true with memory.offload={memory.offload}: it is for offload: pinned; leave it out")
    if memory.loss_tokens is None:
        for name, value, plain in (
            ("train.z_loss", train.z_loss, 0.0),
            ("train.label_smoothing", train.label_smoothing, 0.0),
            ("memory.loss_implementation", memory.loss_implementation, "tiled"),
        ):
            if value != plain:
                raise ValueError(
                    f"{name}={value} with memory.loss_tokens=null: the loss from whole logits is cross-entropy alone; set "
                    f"memory.loss_tokens, e.g. {LOSS_TILE_TOKENS}, or leave {name} out"
                )
    if memory.optimizer == "cpu" and train.zero_stage == 0:
        raise ValueError("memory.optimizer=cpu with train.zero_stage=0: DeepSpeed offloads the optimizer in ZeRO 1, 2 and 3; use one")


@dataclass(frozen=True)
class Plan:
    """What the memory stack of a run is, its sizes known. Bytes of one process.

    tiling, fused, checkpointing: settings of the parts; None: left out (checkpointing: that of the model's own, or none).
    input_bytes: u. layers, sent_layers: decoder layers, and those whose input goes to the host. pairs: of layers, of which only the
    first one's input is stored. attention_layers, attention_bytes: layers whose attention output and log-sum-exp stay on the host,
    and what these take. host_bytes: all that a step keeps on the host, optimizer included.
    """

    tiling: TilingConfig | None
    checkpointing: CheckpointConfig | None
    layers: int
    sent_layers: int
    input_bytes: int
    attention_bytes: int
    host_bytes: int
    preset: str = "none"
    fused: FusedLayersConfig | None = None
    attention_layers: int = 0
    pairs: int = 0
    working_bytes: int = 0

    @property
    def kept_layers(self) -> int:
        """Stored inputs that stay on the device."""
        return self.layers - self.pairs - self.sent_layers

    def model(self, config: ModelConfig) -> ModelConfig:
        """The model's section with its own checkpointing off where the plan has another in its place."""
        return config if self.checkpointing is None else dataclasses.replace(config, checkpointing="none")

    def describe(self) -> str:
        """One line: where saved inputs and attention outputs are, and the host memory that takes."""
        saved = "layer inputs on the device" if self.checkpointing else "saved as the model has it"
        if self.sent_layers:
            kept, mode = self.kept_layers, self.checkpointing.offload
            saved = f"{self.sent_layers} layer inputs of {self.input_bytes / GIB:.3g} GiB to {mode} host memory, {kept} on the device"
        if self.pairs:
            saved += f", one for both layers of {self.pairs} pairs"
        if self.attention_layers:
            each = self.attention_bytes / self.attention_layers / GIB
            saved += f"; attention outputs of {self.attention_layers} of {self.layers} layers there too, {each:.3g} GiB each"
        if self.working_bytes:
            saved += f"; a layer's working tensors too, {self.working_bytes / GIB:.3g} GiB"
        preset = "" if self.preset == "none" else f"preset {self.preset}; "
        return f"{preset}{saved}; {self.host_bytes / GIB:.3g} GiB of host memory a rank"


def system_bytes(host_bytes: int, local_ranks: int) -> int:
    """What of a host's memory is left to the system and its processes, at most a quarter."""
    return int(min(host_bytes / 4, (SYSTEM_GIB + PROCESS_GIB * local_ranks) * GIB))


def make_plan(
    run: Any, tokens: int, sizes: ModelSizes, *, world: int, local_ranks: int, device_bytes: int | None, host_bytes: int,
    refuse: bool = True,
) -> Plan:
    """Settle what depends on sizes, and refuse what the host cannot hold.

    Args:
        run: has the sections model, train, method (or its name), upipe and memory, which `check` passed.
        tokens: S, of a sequence.
        world, local_ranks: processes of the run, and of one host.
        device_bytes: memory of the GPU; None on the CPU.
        host_bytes: memory of the host.
        refuse: False: also where the host cannot hold it.

    Raises:
        ConfigError: saved inputs, attention outputs and optimizer states of a host's ranks are more than its memory; more pairs of
            layers, or layers with attention output on the host, than there are.
    """
    train, upipe, memory = run.train, run.upipe, run.memory
    itemsize = 2 if train.dtype == "bf16" else 4
    rows = train.micro_batch_size * -(-tokens // upipe.sp_size)
    input_bytes = rows * sizes.hidden_size * sizes.streams * itemsize
    tiling = checkpointing = None
    if memory.tiles:
        tiling = TilingConfig(
            memory.mlp_tokens, memory.norm_tokens, memory.loss_tokens, memory.fp32_grads, memory.reuse_grad, train.z_loss,
            train.label_smoothing, memory.loss_implementation,
        )  # fmt: skip
    sent, pairs = 0, _pairs(memory, sizes.layers)
    if memory.offload != "none":
        keep, mode = memory.keep_layers_on_gpu, memory.offload
        if mode == "auto":
            keep = estimate_kept(run, input_bytes, sizes, world, device_bytes)
            mode = "pinned" if keep < sizes.layers else "none"
        checkpointing = CheckpointConfig(
            mode, "auto" if mode == "none" else keep, pinned_fallback=memory.pinned_fallback, prefetch=memory.prefetch, pairs=pairs,
            leave_on_host=memory.offload_within_layer,
        )  # fmt: skip
        sent = checkpointing.sent(sizes.layers)
    # A layer that is checkpointed keeps its chunks during its own backward alone.
    alive = sizes.layers if run.model.checkpointing == "none" else 1
    chunks = alive * methods.host_bytes(
        methods.of(run.method), tokens, train.micro_batch_size, upipe.sp_size, sizes.heads, sizes.kv_heads or sizes.heads,
        sizes.attention_width // sizes.heads, itemsize,
    )  # fmt: skip
    states = 12 * sizes.parameters // world if memory.optimizer == "cpu" else 0
    within, fused, working = memory.offload if memory.offload_within_layer else "none", None, 0
    if memory.fused_layers:
        fused = FusedLayersConfig(memory.mlp_tokens or FusedLayersConfig.mlp_tokens, memory.reuse_grad, within)
    each = rows * (sizes.attention_width * itemsize + sizes.heads * 4)
    if memory.offload_within_layer:
        # The gradient; the attention output, then dq; the input of a pair's second layer.
        working = input_bytes * (1 + (pairs > 0)) + rows * sizes.attention_width * itemsize
    # DeepSpeed's optimizer on the host has fp32 gradients beside its states.
    left = (host_bytes - system_bytes(host_bytes, local_ranks)) // local_ranks - sent * input_bytes - chunks - working
    left -= states * 16 // 12
    outputs = _attention_layers(upipe, sizes.layers, left // each)
    attention = outputs * each
    on_host = sent * input_bytes + attention + chunks + working + states
    plan = Plan(
        tiling, checkpointing, sizes.layers, sent, input_bytes, attention, on_host, memory.preset, fused, outputs, pairs, working
    )  # fmt: skip
    if refuse and plan.host_bytes * local_ranks > host_bytes:
        parts = (
            (sent * input_bytes, f"{sent} layer inputs of {input_bytes / GIB:.2f} GiB", _fewer_inputs(pairs, sizes.layers)),
            (attention, f"attention outputs of {attention / GIB:.2f} GiB", "attention_output_layers: auto"),
            (working, f"working tensors of a layer of {working / GIB:.2f} GiB", "offload_within_layer: false"),
            (chunks, f"attention's chunks of up to {chunks / GIB:.2f} GiB", "another method"),
            (states, f"optimizer states of {states / GIB:.2f} GiB", "optimizer: device"),
        )
        what, works = ([part[i] for part in parts if part[0]] for i in (1, 2))
        raise ConfigError(
            f"the {local_ranks} ranks of this host would keep {plan.host_bytes * local_ranks / GIB:.1f} GiB in its "
            f"{host_bytes / GIB:.1f} GiB of memory, each of them {' and '.join(what)}. Use {', '.join(works)}, fewer tokens, or more hosts "
            "with a larger sp_size"
        )
    return plan


def _pairs(memory: MemoryConfig, layers: int) -> int:
    """Pairs of layers that share a stored input."""
    if memory.store_every == 1:
        return 0
    if memory.pairs is None and layers % 2:
        raise ConfigError(f"memory.store_every=2 of {layers} layers, an odd number: set memory.pairs to {layers // 2} or fewer")
    if memory.pairs is not None and 2 * memory.pairs > layers:
        raise ConfigError(f"memory.pairs={memory.pairs} of {layers} layers: use {layers // 2} or fewer")
    return layers // 2 if memory.pairs is None else memory.pairs


def _fewer_inputs(pairs: int, layers: int) -> str:
    return "a larger keep_layers_on_gpu" if 2 * pairs >= layers - 1 else "store_every: 2 with more pairs, a larger keep_layers_on_gpu"


def _attention_layers(config: UPipeConfig, layers: int, room: int) -> int:
    """Layers whose attention output goes to the host, which has room for so many."""
    try:
        preflight.check_attention_output_layers(config, layers)
    except PreflightError as error:
        raise ConfigError(f"upipe.{error}") from None
    if config.attention_output == "host" and config.attention_output_layers == "auto":
        return min(layers, max(0, room))
    return len(host_layers(config, layers))


def estimate_kept(run: Any, input_bytes: int, sizes: ModelSizes, world: int, device_bytes: int | None) -> int:
    """How many layers' inputs fit on the device beside the rest: states, gathers and buckets, the loss, 10 u of work in a layer
    (8.3 u are simulated for tiled modules at P = 8) and 3 GiB of context and fragments, in 92 % of its memory. At least one: the
    last layer's is needed back at once. An estimate on the side of sending. Without a GPU all are kept."""
    if device_bytes is None:
        return sizes.layers
    train, itemsize = run.train, 2 if run.train.dtype == "bf16" else 4
    shards = [world if train.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    gradient = 2 if train.dtype == "bf16" and train.gradient_dtype == "bf16" else 4
    each = [itemsize, gradient, 0 if run.memory.optimizer == "cpu" else 12]
    states = sum(sizes.parameters * nbytes // share for nbytes, share in zip(each, shards))
    rows = input_bytes // (sizes.hidden_size * sizes.streams * itemsize)
    logits = min(rows, run.memory.loss_tokens or rows) * sizes.vocab_size * (4 + itemsize)
    head = sizes.vocab_size * sizes.hidden_size * (4 + 3 * itemsize)
    buffers = 4 * sizes.layer_parameters * itemsize
    left = 0.92 * device_bytes - states - logits - head - buffers - 10 * input_bytes - 3 * GIB
    return min(sizes.layers, max(1, int(left // input_bytes)))


class Stack:
    """The memory stack and UPipe on a model. Made by `apply_stack`.

    Attributes:
        plan, handle: see `Plan` and `upipe.apply.Handle`.
        tiling, fused, checkpointing: handles of those parts, or None.
    """

    def __init__(
        self, plan: Plan, handle: Handle, tiling: Tiling | None, fused: FusedLayers | None, checkpointing: Checkpointing | None
    ):
        self.plan, self.handle, self.tiling, self.fused, self.checkpointing = plan, handle, tiling, fused, checkpointing

    def end_step(self) -> dict[str, float]:
        """To be called after every optimizer step. Of this rank in GiB: what the step copied of layers' inputs (to_host_gib,
        to_device_gib), of attention outputs or fpdt's chunks (attention_to_host_gib, attention_to_device_gib), and of layers while
        they ran, attention outputs among it (within_layers_to_host_gib, within_layers_to_device_gib; with `offload_within_layer`);
        and what it holds on the host, all of it and page-locked (host_gib, host_pinned_gib). Nothing where nothing is on the host.

        Raises:
            OffloadError: layers were to be sent, and nothing was.
        """
        numbers, attention = {}, self.handle.end_step()
        if self.checkpointing is not None:
            inputs = self.checkpointing.end_step()
            numbers |= {"to_host_gib": inputs.bytes_to_host / GIB, "to_device_gib": inputs.bytes_to_device / GIB}
        if self.plan.fused is not None and self.plan.fused.offload != "none":
            moved = self.fused.end_step()
            numbers |= {"within_layers_to_host_gib": moved.to_host / GIB, "within_layers_to_device_gib": moved.to_device / GIB}
        elif host_layers(self.handle.config, self.plan.layers) or attention.to_host:
            numbers |= {"attention_to_host_gib": attention.to_host / GIB, "attention_to_device_gib": attention.to_device / GIB}
        if not self.plan.sent_layers and "attention_to_host_gib" not in numbers:
            return {}
        return numbers | {"host_gib": host.pool().held_bytes / GIB, "host_pinned_gib": host.pool().pinned_bytes / GIB}

    def remove(self) -> None:
        """Make the model plain again: the parts come off in the reverse of the order in which they were put on."""
        for part in (self.checkpointing, self.fused, self.handle, self.tiling):
            if part is not None:
                part.remove()


def apply_stack(
    model: nn.Module, plan: Plan, config: UPipeConfig, ds_config: dict | None = None, method: MethodConfig | str = "upipe"
) -> Stack:
    """Put tiling, UPipe or another method, fused layers and checkpointing on a model, before `deepspeed.initialize`; collective. The
    model's own checkpointing must be off where the plan has one (`Plan.model`).

    Raises:
        PreflightError: from the parts. ConfigError: liger-kernel is asked for and not installed, or there is no GPU.
    """
    if plan.tiling is not None and plan.tiling.loss_implementation == "liger" and not torch.cuda.is_available():
        raise ConfigError("memory.loss_implementation=liger needs a GPU; use tiled")
    if config.attention_output == "host" and config.attention_output_layers == "auto":
        config = dataclasses.replace(config, attention_output_layers=plan.attention_layers)
    own = hasattr(model, "share_over_ranks")
    if own and (plan.tiling or plan.fused or plan.pairs):
        raise ConfigError(
            f"memory.mlp_tokens, norm_tokens, loss_tokens, fused_layers or store_every=2 with {type(model).__name__}, which has tiles of "
            "its own (model.glm): leave them out; memory.offload works"
        )
    done: list[Any] = []
    try:
        tiling = None if plan.tiling is None else apply_tiling(model, plan.tiling)
        done += [tiling]
        handle = apply_method(model, method, config, ds_config)
        done += [handle]
        fused = None if plan.fused is None else apply_fused_layers(model, handle, plan.fused)
        done += [fused]
        checkpointing, contexts = None, contexts_of(model) if fused is None else layer_contexts
        if plan.checkpointing is not None:
            checkpointing = apply_checkpointing(model, plan.checkpointing, contexts=contexts)
    except BaseException as error:
        for part in reversed(done):
            if part is not None:
                part.remove()
        if isinstance(error, ImportError):
            raise ConfigError(f"memory.loss_implementation={plan.tiling.loss_implementation}: {error}") from error
        raise
    return Stack(plan, handle, tiling, fused, checkpointing)
