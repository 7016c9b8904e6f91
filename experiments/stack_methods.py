"""What `experiments.stack` and `experiments.ladder` train: one model under DeepSpeed ZeRO-3 by a setting, or by several that
share an engine and its states.

A setting is written NAME or NAME:item,...

  alst      DeepSpeed's stack, see `experiments.alst`. offload=pinned|none, tiles=on|off
  ulysses, ring, usp, fpdt, native   baselines of `upipe.methods`, with our rotation, checkpointing and tiles. usp: ring=R, its
            ring ranks; fpdt: chunk=TOKENS, of the whole sequence; ulysses: rope=model, transformers' own rotation
  plain     the kernel in the plain model, rotation included, each rank with sequences of its own
  upipe     ours. Items, beside those of all: host, host=N or device (where the attention output is kept: on the host, for N layers
            there (`upipe.apply.host_layers`), or made again), U=HEADS or U=H (all heads at once), overlap=on|off, dx=gemm|bf16,
            ring=R (its ring ranks), layer=parts|fused (fused: each decoder layer as one function, `upipe.layer`; tiles=on then tiles
            last norm and loss), within=on|off (on: a fused layer's working tensors on the host as well, as `offload` says; with
            prefetch=off)

  of all but alst: checkpoint=on|off, offload=none|pinned|pageable, or transformers|deepspeed (theirs: `experiments.peer_offload`),
  keep=N (the last N stored inputs stay on the device), pairs=N (one stored input for both layers of N pairs), prefetch=on|off,
  tiles=on|off|loss|mlp (mlp: MLPs and norms), loss=hf|sum (without a tiled loss: of all logits in fp32 at once, as transformers
  computes it, or with no fp32 copy of them)
  of upipe, ulysses, ring, usp, fpdt: blocks=TOKENS and blocks_backward=TOKENS, or auto (the kernel's causal calls in blocks,
  `upipe.blocked`)

The optimizer's learning rate is 0: weights stay as they are, so that every step of every setting has the same loss and gradient.

Symbols: S tokens, P ranks a sequence, L = S/P local tokens, H query heads, D hidden size, d head dim.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import gc
import inspect
import os
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

import upipe
from experiments.alst import Alst, UlyssesAttention, apply_alst
from experiments.peer_offload import PEERS, PeerOffload
from upipe import host, kernels, loss, workspace
from upipe.block import checkpoint_contexts
from upipe.blocked import check_tokens, in_blocks
from upipe.build import ModelConfig, build_model, build_partitioned_model, count_parameters
from upipe.comm import SequenceParallelGroups
from upipe.config import ConfigError
from upipe.layer import FusedLayersConfig, apply_fused_layers, layer_contexts
from upipe.live import SimulatedAttention
from upipe.loader import ShardedLoader
from upipe.methods import MethodConfig, MethodHandle, apply_method
from upipe.methods.config import FORMS
from upipe.offload import CheckpointConfig, Checkpointing, apply_checkpointing
from upipe.optimize import TrainConfig, build_optimizer, deepspeed_config
from upipe.records import format_tokens, parse_tokens
from upipe.ring import on_ring
from upipe.tiled import TilingConfig, apply_tiling

MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": {"preset": "llama3-8b"},
    "qwen3_32b": {"preset": "qwen3-32b"},
    "qwen3_4b": {"preset": "qwen3-4b"},
    "toy": {
        "architecture": "qwen3", "hidden_size": 64, "heads": 8, "kv_heads": 4, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": 128,
    },
}
"""--model -> fields of `ModelConfig`, all but layers."""
BASELINES = ("ulysses", "ring", "usp", "fpdt", "native")
METHODS = {"alst": "alst", "plain": "none", "upipe": "upipe"} | {name: name for name in BASELINES}
"""A setting's name -> what records call it; with one rank ulysses is none."""
FACTOR = 1.2
"""Parameters that ZeRO-3 may keep gathered, and prefetch ahead within, in decoder layers."""


@dataclass(frozen=True)
class Setting:
    """How a model is trained; see the module for what is written. Defaults are upipe's with everything on, but for blocks of attention
    calls, which are off.

    host_layers: attention outputs on the host: of no layer (0), of so many, or of all (None).
    heads_per_stage: U; None: P; -1: all heads.
    block_tokens, block_tokens_backward: in what blocks the kernel's causal calls run, as `upipe.blocked.Tokens` says.
    """

    name: str = "upipe"
    host_layers: int | None = 0
    heads_per_stage: int | None = None
    overlap: bool = True
    dx: str = "gemm"
    checkpoint: bool = True
    offload: str = "pinned"
    keep: int | None = None
    prefetch: bool = True
    tiles: str = "on"
    fused: bool = False
    within: bool = False
    loss: str = "sum"
    pairs: int = 0
    ring_degree: int | None = None
    chunk_tokens: int | None = None
    rope: str = "ours"
    block_tokens: int | str = "none"
    block_tokens_backward: int | str = "none"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Raises ConfigError, naming what is not understood and what is."""
        name, _, rest = text.partition(":")
        if name not in METHODS:
            raise ConfigError(f"setting {text!r} starts with {name!r}: use one of {', '.join(METHODS)}")
        values: dict[str, Any] = {"name": name} | ({"loss": "hf"} if name == "alst" else {})
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            known = _ITEMS.get(key)
            if known is None or name not in known[0]:
                allowed = ", ".join(f"{k}{shown}" for k, (names, shown, _) in _ITEMS.items() if name in names)
                raise ConfigError(f"setting {text!r}: {item!r} is none of {allowed}")
            try:
                values |= known[2](value)
            except (KeyError, ValueError):
                raise ConfigError(f"setting {text!r}: {item!r} should be {key}{known[1]}") from None
        made = cls(**values)
        if not made.checkpoint and made.host_layers != 0:
            raise ConfigError(f"setting {text!r}: host needs checkpoint=on, whose recompute takes the output from there")
        if not made.checkpoint and "offload" not in rest:
            made = dataclasses.replace(made, offload="none")
        if not made.checkpoint and made.offload != "none":
            raise ConfigError(f"setting {text!r}: offload={made.offload} needs checkpoint=on, whose saved inputs it sends")
        if made.fused and (made.dx != "gemm" or not made.checkpoint):
            raise ConfigError(f"setting {text!r}: layer=fused needs dx=gemm and checkpoint=on")
        if made.within and (not made.fused or made.offload == "none" or made.prefetch or made.keep):
            raise ConfigError(f"setting {text!r}: within=on needs layer=fused, offload=pinned|pageable, prefetch=off and no keep")
        if made.peer and (made.fused or made.keep is not None or made.pairs or not made.prefetch):
            raise ConfigError(f"setting {text!r}: offload={made.offload} is for layer=parts, without keep, pairs and prefetch")
        if name == "alst" and (made.offload not in ("none", "pinned") or made.tiles in ("loss", "mlp")):
            raise ConfigError(f"setting {text!r}: of ALST offload=pinned|none and tiles=on|off are compared")
        return made

    def __str__(self) -> str:
        items = []
        if self.name == "upipe":
            items.append({0: "device", None: "host"}.get(self.host_layers, f"host={self.host_layers}"))
            items += [f"U={'H' if self.heads_per_stage == -1 else self.heads_per_stage}"] * (self.heads_per_stage is not None)
            items += ["overlap=off"] * (not self.overlap) + [f"dx={self.dx}"] * (self.dx != "gemm")
            items += ["layer=fused"] * self.fused + ["within=on"] * self.within
        items += [f"ring={self.ring_degree}"] * (self.ring_degree is not None) + ["rope=model"] * (self.rope == "model")
        items += [f"chunk={self.chunk_tokens}"] * (self.chunk_tokens is not None)
        for key, size in (("blocks", self.block_tokens), ("blocks_backward", self.block_tokens_backward)):
            items += [] if size == "none" else [f"{key}={size if size == 'auto' else format_tokens(size)}"]
        items += ["checkpoint=off"] * (not self.checkpoint)
        items += [f"offload={self.offload}"] * self.checkpoint
        items += [f"keep={self.keep}"] * (self.keep is not None) + [f"pairs={self.pairs}"] * (self.pairs > 0)
        items += ["prefetch=off"] * (not self.prefetch)
        items += [f"tiles={self.tiles}"] * (self.tiles != "on")
        items += [f"loss={self.loss}"] * (self.loss != ("hf" if self.name == "alst" else "sum"))
        return f"{self.name}:{','.join(items)}"

    @property
    def peer(self) -> bool:
        """Whether another library's offload sends the saved inputs."""
        return self.offload in PEERS

    @property
    def offload_by(self) -> str | None:
        """Whose offload sends the saved inputs; None where none is sent."""
        if self.offload == "none":
            return None
        if self.peer:
            return self.offload
        return "deepspeed" if self.name == "alst" else "upipe"

    def kept(self, layers: int) -> int | None:
        """Saved inputs that stay on the device; None where none is sent."""
        if self.offload == "none":
            return None
        return {"transformers": 0, "deepspeed": 1}[self.offload] if self.peer else self.checkpointing.kept(layers)

    @property
    def tiled_loss(self) -> bool:
        return self.tiles in ("on", "loss")

    @property
    def tiling(self) -> TilingConfig | None:
        """What `apply_tiling` does; None: nothing. ALST's tiles are its own."""
        if self.name == "alst" or self.tiles == "off":
            return None
        whole = TilingConfig()
        if self.tiles == "loss":
            return dataclasses.replace(whole, mlp_tokens=None, norm_tokens=None)
        return whole if self.tiles == "on" else dataclasses.replace(whole, loss_tokens=None)

    @property
    def checkpointing(self) -> CheckpointConfig:
        keep = "auto" if self.keep is None else self.keep
        return CheckpointConfig(self.offload, keep, prefetch=self.prefetch, pairs=self.pairs, leave_on_host=self.within)

    @property
    def engine(self) -> tuple:
        """Settings with the same one may share an engine: they call the same modules in the same order."""
        if self.name == "upipe":
            return self.name, self.tiles, self.checkpoint, self.fused, self.ring_degree, self.peer and self.offload
        return (str(self),)

    @property
    def method(self) -> MethodConfig | None:
        """What `apply_method` puts on; None: nothing, the module stays transformers' own."""
        if self.name == "upipe":
            return MethodConfig(self.name)
        if self.name in BASELINES and self.rope == "ours":
            return MethodConfig(self.name, self.ring_degree, self.chunk_tokens)
        return None

    def degrees(self, sp_size: int) -> tuple[int, int]:
        """(ring, Ulysses) ranks of so many that share a sequence. Raises ConfigError."""
        if self.name == "upipe":
            ring = self.ring_degree or 1
            if sp_size % ring:
                works = ", ".join(str(n) for n in range(1, sp_size + 1) if sp_size % n == 0)
                raise ConfigError(f"ring={ring} does not divide the {sp_size} ranks of a sequence: use one of {works}")
            return ring, sp_size // ring
        return (1, sp_size) if self.method is None else self.method.degrees(sp_size)

    @property
    def form(self) -> str:
        """What runs, in words."""
        return FORMS[METHODS[self.name]] if self.name != "alst" else "DeepSpeed's stack (experiments.alst)"

    def config(self, sp_size: int, heads: int, kernel: str) -> upipe.UPipeConfig:
        ring, ulysses = self.degrees(sp_size) if self.name == "upipe" else (1, sp_size)
        U = -(-heads // ulysses) * ulysses if self.heads_per_stage == -1 else self.heads_per_stage
        return upipe.UPipeConfig(
            sp_size=sp_size, heads_per_stage=U, kernel=kernel, ring_degree=ring, overlap=self.overlap, dx=self.dx,
            attention_output="device" if self.host_layers == 0 else "host", attention_output_layers=self.host_layers or None,
            kernel_block_tokens=self.block_tokens, kernel_block_tokens_backward=self.block_tokens_backward,
        )


def _host(value: str) -> dict[str, Any]:
    return {"host_layers": int(value) if value else None}


def _positive(value: str) -> int:
    if int(value) < 1:
        raise ValueError(value)
    return int(value)


def _choice(name: str, **values: Any) -> Callable[[str], dict[str, Any]]:
    return lambda value: {name: values[value]}


def _blocks(name: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        size = value if value in ("none", "auto") else parse_tokens(value)
        check_tokens(size)
        return {name: size}

    return read


OURS = (*BASELINES, "plain", "upipe")
CUT = ("ulysses", "ring", "usp", "fpdt", "upipe")
_ITEMS: dict[str, tuple[tuple[str, ...], str, Callable[[str], dict[str, Any]]]] = {
    "device": (("upipe",), "", lambda value: {"host_layers": {"": 0}[value]}),
    "host": (("upipe",), "[=LAYERS]", _host),
    "U": (("upipe",), "=HEADS|H", lambda value: {"heads_per_stage": -1 if value == "H" else int(value)}),
    "overlap": (("upipe",), "=on|off", _choice("overlap", on=True, off=False)),
    "dx": (("upipe",), "=gemm|bf16", _choice("dx", gemm="gemm", bf16="bf16")),
    "checkpoint": (OURS, "=on|off", _choice("checkpoint", on=True, off=False)),
    "offload": (
        ("alst", *OURS), "=none|pinned|pageable|transformers|deepspeed",
        _choice("offload", **{name: name for name in ("none", "pinned", "pageable", *PEERS)}),
    ),
    "layer": (("upipe",), "=parts|fused", _choice("fused", parts=False, fused=True)),
    "within": (("upipe",), "=on|off", _choice("within", on=True, off=False)),
    "prefetch": (OURS, "=on|off", _choice("prefetch", on=True, off=False)),
    "keep": (OURS, "=LAYERS", lambda value: {"keep": int(value)}),
    "pairs": (OURS, "=PAIRS", lambda value: {"pairs": int(value)}),
    "tiles": (("alst", *OURS), "=on|off|loss|mlp", _choice("tiles", on="on", off="off", loss="loss", mlp="mlp")),
    "loss": (OURS, "=hf|sum", _choice("loss", hf="hf", sum="sum")),
    "ring": (("usp", "upipe"), "=RANKS", lambda value: {"ring_degree": _positive(value)}),
    "chunk": (("fpdt",), "=TOKENS", lambda value: {"chunk_tokens": parse_tokens(value)}),
    "blocks": (CUT, "=TOKENS|none|auto", _blocks("block_tokens")),
    "blocks_backward": (CUT, "=TOKENS|none|auto", _blocks("block_tokens_backward")),
    "rope": (("ulysses",), "=ours|model", _choice("rope", ours="ours", model="model")),
}
"""Item of a setting -> the methods that take it, how it is written on, and its value's fields."""


class ZeroAttention(SimulatedAttention):
    """Allocates what a kernel allocates and answers zeros, in no time: losses and gradients around it stay finite.

    Args:
        of: the kernel.
        exact: raise ValueError where what its backward holds has not been measured; False: then count nothing for it.
    """

    def __init__(self, of: kernels.Kernel, exact: bool = True) -> None:
        super().__init__(of)
        self.exact = exact

    def forward(self, q, k, v, scale, offsets=None, window=None, softcap=None, out=None):
        out, lse = super().forward(q, k, v, scale, offsets, window, softcap, out)
        return out.zero_(), lse.zero_()

    def backward(self, grad, q, k, v, out, lse, scale, offsets=None, window=None, softcap=None, dq=None, dk=None, dv=None):
        if self.of.backward_bytes(q.shape[1], q.shape[2], k.shape[2], q.shape[3]) is None and not self.exact:
            made = tuple(torch.empty_like(t) if given is None else given for given, t in zip((dq, dk, dv), (q, k, v)))
        else:
            if self.writes_gradients:
                dq, dk, dv = (torch.empty_like(t) if given is None else given for given, t in zip((dq, dk, dv), (q, k, v)))
            made = super().backward(grad, q, k, v, out, lse, scale, dq=dq, dk=dk, dv=dv)
        for tensor in made:
            tensor.zero_()
        return made


def named_kernel(name: str) -> kernels.Kernel:
    """A kernel by its name, whether or not this machine can run it. Raises ConfigError."""
    for kernel in kernels.KERNELS:
        if kernel.name == name:
            return kernel
    raise ConfigError(f"kernel {name!r} is unknown: use one of {', '.join(kernels.names())}")


@dataclass(frozen=True)
class Shape:
    """What is trained: `model` of `MODELS`, so many layers of it, over `sp_size` ranks a sequence.

    optimizer: "adamw"; or "none", which is SGD without states: gradients are computed, and change nothing either.
    """

    model: str
    layers: int
    sp_size: int
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**MODELS[self.model], layers=self.layers)

    def ds_config(self, cuda: bool) -> dict[str, Any]:
        """ZeRO-3, the same for every method: gathers and buckets of about a decoder layer, so that they stay out of the peak."""
        one, none = (_numel(dataclasses.replace(self.config, layers=n)) for n in (2, 1))
        layer = one - none
        train = TrainConfig(
            learning_rate=0.0, weight_decay=0.0, gradient_clipping=1.0, zero_stage=3, max_live_parameters=int(FACTOR * layer),
            dtype="bf16" if self.dtype == "bfloat16" else "fp32", gradient_dtype="bf16" if self.dtype == "bfloat16" else "fp32",
        )
        made = deepspeed_config(train, cuda=cuda)
        made["zero_optimization"]["reduce_bucket_size"] = layer
        return made

    def make_optimizer(self, model: nn.Module, cuda: bool) -> torch.optim.Optimizer:
        if self.optimizer == "none":
            return torch.optim.SGD(model.parameters(), lr=0.0)
        return build_optimizer(model, TrainConfig(learning_rate=0.0, weight_decay=0.0), cuda=cuda)


def random_tokens(shape: Shape, vocabulary: int, tokens: int, dp_rank: int = 0) -> torch.Tensor:
    """[1, tokens] int64 on the CPU: what a data-parallel rank trains on."""
    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + dp_rank)
    return torch.randint(vocabulary, (1, tokens), generator=generator)


def _numel(config: ModelConfig) -> int:
    """Parameters of a model, from its shape."""
    return count_parameters(build_model(config, meta=True))


class Variant:
    """One setting of an engine: which class each module of the model has under it, and what it left to be asked."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.classes: dict[nn.Module, type] = {}
        self.checkpointing: Checkpointing | None = None
        self.attention: dict[nn.Module, Any] = {}
        self.closers: list[Callable[[], None]] = []


class Engine:
    """A model under DeepSpeed ZeRO-3, which trains by any of `settings`; all have the same `Setting.engine`.

    Collective. Weights are random, from the seed, the same in every engine of a shape.

    Args:
        kernel: that every attention runs; may be replaced by another between steps (`kernel` is an attribute).

    Raises:
        PreflightError: a setting does not fit the shape.
    """

    def __init__(self, shape: Shape, settings: list[Setting], kernel: kernels.Kernel) -> None:
        if len({setting.engine for setting in settings}) != 1:
            raise ValueError(f"settings {[str(s) for s in settings]} cannot share an engine")
        # torch 2.13 deprecates collectives under the names that DeepSpeed calls, at every call.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        self.shape, self.kernel = shape, kernel
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        ds_config = shape.ds_config(cuda)
        # deepspeed.zero.Init reads it; without a launcher there is one process.
        os.environ.setdefault("LOCAL_RANK", "0")
        self.model = build_partitioned_model(shape.config, ds_config, seed=shape.seed)
        self.handle: upipe.Handle | None = None
        self.alst: Alst | None = None
        self.peer: PeerOffload | None = None
        self._closers: list[Callable[[], None]] = []
        self._blocked: dict[tuple, kernels.Kernel] = {}
        self._on_ring: dict[kernels.Kernel, kernels.Kernel] = {}
        first = settings[0]
        if first.method is not None:
            self.handle = apply_method(self.model, first.method, first.config(shape.sp_size, self.heads, "auto"))
            self.handle._sharding.kernel = lambda case: self.kernel_of(first)
            self.groups = self.handle.mpu
            self._closers.append(self.handle.remove)
        else:
            self.groups = SequenceParallelGroups(shape.sp_size)
            self._closers.append(self.groups.destroy)
        self._plain = {module: type(module) for module in self.model.modules()}
        self.variants = {setting: self._variant(setting) for setting in settings}
        self.engine, *_ = deepspeed.initialize(
            model=self.model, config=ds_config, mpu=self.groups, optimizer=shape.make_optimizer(self.model, cuda),
            dist_init_required=False,
        )
        self.engine.train()
        keep_frequencies(self.model)
        self.active: Variant | None = None
        self.tokens = 0
        self._pinned_before = torch_pinned_bytes(self.device)
        self.scale = loss.gradient_scale(self.engine)

    @property
    def heads(self) -> int:
        return self.model.config.num_attention_heads

    def kernel_of(self, setting: Setting) -> kernels.Kernel:
        """The kernel of now, in a setting's blocks; over upipe's ring where it has one. Baselines put it on theirs themselves."""
        blocks = setting.block_tokens, setting.block_tokens_backward
        if (self.kernel, blocks) not in self._blocked:
            gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else None
            # A kernel that stands for one has its times.
            self._blocked[self.kernel, blocks] = in_blocks(self.kernel, *blocks, gpu, getattr(self.kernel, "of", self.kernel).name)
        kernel = self._blocked[self.kernel, blocks]
        if setting.name != "upipe" or self.groups.ring_size == 1:
            return kernel
        if kernel not in self._on_ring:
            self._on_ring[kernel] = on_ring(kernel, self.groups.ring_group)
        return self._on_ring[kernel]

    def _variant(self, setting: Setting) -> Variant:
        """Put a setting on, remember how the modules look then, and take their looks off again."""
        made, model = Variant(setting), self.model
        if setting.name == "alst":
            self.alst = apply_alst(
                model, self.groups, lambda: self.kernel, offload=setting.offload != "none", tiles=setting.tiles != "off"
            )
            made.closers.append(self.alst.remove)
        elif setting.method is None:
            attention = UlyssesAttention(model, self.groups, lambda: self.kernel_of(setting))
            made.closers.append(attention.remove)
        if setting.tiling is not None:
            made.closers.append(apply_tiling(model, setting.tiling).remove)
        if setting.fused:
            within = FusedLayersConfig(offload=setting.offload if setting.within else "none")
            made.closers.append(apply_fused_layers(model, self.handle, within).remove)
        if setting.checkpoint and setting.name != "alst":
            contexts = layer_contexts if setting.fused else checkpoint_contexts
            if setting.name != "upipe":
                contexts = _no_contexts
            if not setting.peer:
                made.checkpointing = apply_checkpointing(model, setting.checkpointing, contexts=contexts)
                made.closers.append(made.checkpointing.remove)
            elif self.peer is None:     # all settings of an engine have it or none has
                self.peer = PeerOffload(model, setting.offload, contexts)
                self._closers.append(self.peer.remove)
        if setting.name == "upipe":
            sharding = self.handle._sharding
            # A copy has the groups of the first, and settings of its own.
            mine = copy.copy(sharding)
            mine.config, mine.schedules = setting.config(self.shape.sp_size, self.heads, "auto"), {}
            mine.schedule(self.heads, model.config.num_key_value_heads)
            mine.kernel = lambda case: self.kernel_of(setting)
            made.attention = {layer.self_attn: mine for layer in model.model.layers}
        made.classes = {module: type(module) for module in model.modules() if type(module) is not self._plain[module]}
        self._dress({})
        return made

    def _dress(self, classes: dict[nn.Module, type]) -> None:
        for module, cls in self._plain.items():
            module.__class__ = classes.get(module, cls)

    def activate(self, setting: Setting) -> None:
        """Train by this setting from now on. Only between steps."""
        variant = self.variants[setting]
        if self.active is not variant:
            self._dress(variant.classes)
            for module, sharding in variant.attention.items():
                module._upipe = sharding
            self.active = variant

    def heads_per_stage(self, setting: Setting) -> int | None:
        for sharding in self.variants[setting].attention.values():
            return next(iter(sharding.schedules.values())).heads_per_stage
        return None

    def batch(self, tokens: int) -> dict[str, Any]:
        """This rank's shard of a sequence of random tokens, which depend on the seed, the length and the data-parallel rank."""
        ids = random_tokens(self.shape, self.model.config.vocab_size, tokens, self.groups.dp_rank)
        self.tokens = tokens
        batches = [{"input_ids": ids, "labels": ids}]
        return next(iter(ShardedLoader(batches, self.groups, self.device) if self.handle is None else self.handle.shard(batches)))

    def step(self, batch: dict[str, Any], mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """One optimizer step by the active setting. -> the global mean token loss, 0-d. mark: called after forward, backward
        and the optimizer."""
        setting, engine = self.active.setting, self.engine
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        labels = batch["shift_labels"]
        if self.handle is not None:
            self.handle.check(engine, batch)
        offload = self.alst or self.peer
        with nullcontext() if offload is None else offload.context():
            if self.alst is not None:
                factor = self.scale / batch["num_valid"].clamp(min=1).float()
                value = engine(**inputs, shift_labels=labels, loss_factor=factor).loss
                told = value.detach() / self.scale
                dist.all_reduce(told)
            else:
                if setting.tiled_loss:
                    local = engine(**inputs, shift_labels=labels).loss
                elif setting.loss == "hf":
                    logits = engine(**inputs).logits.float()
                    local = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                    del logits
                else:
                    local = loss.token_loss_sum(engine(**inputs).logits, labels)
                value = loss.global_loss(local, batch["num_valid"], batch["accumulation"], self.scale)
                del local
                told = value.detach()
            mark()
            engine.backward(value)
        del value
        mark()
        engine.step()
        mark()
        return told

    def after_step(self) -> dict[str, Any]:
        """What the step moved between device and host and what is held there, in bytes of this rank; its gradient's norm.

        Of layers' inputs as their offload counted them (others' also as torch's pinned blocks, rounded up to powers of two),
        and of fpdt's chunks likewise, the most at once; of attention outputs by arithmetic.
        """
        norm = self.engine.get_global_grad_norm()
        variant, outputs = self.active, self.attention_output_bytes()
        told: dict[str, Any] = {"bytes_to_host": 0, "bytes_to_device": 0, "host_pinned": 0, "host_pageable": 0}
        others = self.peer if self.alst is None else self.alst.offload
        if others is not None:
            told |= {key: others.last[key] for key in ("bytes_to_host", "bytes_to_device")}
            told["host_pinned"] = max(0, torch_pinned_bytes(self.device) - self._pinned_before)
        elif variant.checkpointing is not None:
            report = variant.checkpointing.end_step()
            told |= {key: getattr(report, key) for key in ("bytes_to_host", "bytes_to_device", "gradients_shared")}
            told |= {"host_pinned": report.pinned_bytes, "host_pageable": report.host_bytes - report.pinned_bytes}
            if report.offload != variant.setting.offload:
                raise RuntimeError(f"{variant.setting}: offload went on as {report.offload}")
        for key in ("bytes_to_host", "bytes_to_device", "host_pinned"):
            told[key] += outputs
        if isinstance(self.handle, MethodHandle):
            moved = self.handle.moved()
            for key in ("bytes_to_host", "bytes_to_device"):
                told[key] += moved[key]
            told["host_pinned" if self.device.type == "cuda" else "host_pageable"] += moved["held"]
        return told | {"attention_output_bytes": outputs, "grad_norm": None if norm is None else float(norm)}

    def attention_output_bytes(self) -> int:
        """Bytes of attention outputs and log-sum-exps that a step sends to the host, and gets back, on this rank: of each layer
        whose output is kept there L*H*d elements and fp32 numbers for the rank's heads. By arithmetic."""
        config, tokens = self.model.config, self.tokens
        layers = sum(sharding.attention_output(module) == "host" for module, sharding in self.active.attention.items())
        local = -(-tokens // self.shape.sp_size)
        own = -(-self.heads // self.shape.sp_size)
        size = getattr(torch, self.shape.dtype).itemsize
        return layers * (local * self.heads * config.head_dim * size + own * tokens * 4)

    def close(self) -> None:
        """Give everything back: the engine's states, groups, host memory. The object is of no use afterwards."""
        self.engine.destroy()
        self._undo()
        self.engine = self.model = self.handle = self.alst = self.peer = self.active = None
        self.variants, self._plain = {}, {}
        forget_caches(self.device)

    def _undo(self) -> None:
        # A function of its own: a module in a local variable would keep all states.
        for setting, variant in self.variants.items():
            self.activate(setting)
            for index, layer in enumerate(self.model.model.layers if variant.checkpointing is not None else ()):
                layer._checkpoint_index = index     # of which each variant's handle deletes its own
            while variant.closers:
                variant.closers.pop()()
            self._dress({})
        mine = set(self.model.modules())
        for module in mine:
            vars(module).pop("_upipe", None)
        while self._closers:
            self._closers.pop()()
        # DeepSpeed's stack of modules in a forward begins with every model there was; through its parameters each holds all states.
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module not in mine]
        # What a module may release is cached for all coordinators of the process; engines that go on look it up anew.
        releasing = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(releasing).nonlocals["func"].cache_clear()


def _no_contexts():
    return nullcontext(), nullcontext()


def keep_frequencies(model: nn.Module) -> None:
    """Undo a cast of the rotary frequencies to bf16, such as DeepSpeed's: it turns angles at long positions into others."""
    rotary = model.model.rotary_emb
    with torch.device("cpu"):
        right = dict(type(rotary)(rotary.config).named_buffers())
    for name, value in right.items():
        setattr(rotary, name, value.to(rotary.get_buffer(name).device))


def forget_caches(device: torch.device, host_too: bool = True) -> None:
    """Free what is kept from step to step for speed alone: stage buffers, cuBLAS workspaces, cached blocks; host_too: and idle
    host memory, whose page-locking takes seconds."""
    gc.collect()
    workspace.clear()
    if host_too:
        host.pool().clear()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def torch_pinned_bytes(device: torch.device) -> int:
    """Page-locked memory that torch's host allocator holds, as it rounded it up."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if device.type == "cuda" else 0


def cap_allocator(gib: float, device: torch.device) -> None:
    """Let torch's allocator have at most `gib` GiB of the device. Raises ConfigError where there is no GPU, or not as much."""
    if device.type != "cuda":
        raise ConfigError(f"a cap of {gib} GiB on the allocator needs a GPU")
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if not 0 < gib <= total:
        raise ConfigError(f"a cap of {gib} GiB on the allocator: the device has {total:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(gib / total, device)


class Together:
    """Ranks agreeing through the store that torch.distributed was started with: it answers also where NCCL waits for a rank
    that has gone another way.

    Args:
        name: the same on every rank, and used once.
        seconds: until ranks that do not answer are given up for lost.
        started: what `elapsed` counts from, of time.perf_counter(); by default now.
    """

    def __init__(self, name: str, seconds: float = 240.0, started: float | None = None) -> None:
        self.name, self.patience = name, datetime.timedelta(seconds=seconds)
        self.store = dist.distributed_c10d._get_default_store()
        self.started, self.count = time.perf_counter() if started is None else started, 0

    def every(self, value: Any) -> list[Any]:
        """Each rank's value, on every rank. Raises RuntimeError, naming the ranks that do not answer."""
        keys = [f"{self.name}/{self.count}/{rank}" for rank in range(dist.get_world_size())]
        self.count += 1
        self.store.set(keys[dist.get_rank()], pickle.dumps(value))
        try:
            self.store.wait(keys, self.patience)
        except RuntimeError as error:
            lost = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            seconds = self.patience.total_seconds()
            raise RuntimeError(f"ranks {lost} did not answer for {seconds:g} s: they wait for others, or have ended") from error
        return [pickle.loads(self.store.get(key)) for key in keys]

    def seconds(self) -> float:
        """Since the start, rank 0's on every rank."""
        return self.every(self.elapsed())[0]

    def elapsed(self) -> float:
        """Seconds since the start, by this rank's clock."""
        return time.perf_counter() - self.started

    def no_time_for(self, needed: float, limit: float) -> bool:
        """Whether what takes `needed` seconds would end later than `limit` after the start: what rank 0 says, on every rank."""
        return self.every(self.elapsed() + needed > limit)[0]
