"""The memory of one decoder layer and of the loss, simulated: the real code on the meta device, at any number of ranks.

    python -m upipe.simulate                          # makes plan_layers.json again
    python -m upipe.simulate --model llama3-8b        # adds or replaces one model's

A Hugging Face model of shapes alone gets the run's own parts (`apply_tiling`, `upipe.apply`, `apply_fused_layers`,
`apply_checkpointing`). One layer then runs forward, the loss runs forward and backward, and the layer is recomputed and
differentiated; `upipe.live` follows every storage. Exchanges and host copies do nothing, and the attention kernel holds
what was measured of it (`Kernel.backward_bytes`). With a ring its first and its last rank run, which differ in what comes to
them, and the higher counts.

`Peaks` are of three phases, in bytes at several numbers of local tokens. Between those, and beyond, they are read off
straight lines: every tensor is linear in the tokens, or one tile, or one weight's gradient. Counted are the layer's input,
the incoming gradient, cos and sin, the weights' gradients. Not counted: weights, which `plan` adds, and what no operator
allocates (see there).

plan_layers.json keeps results by `Case.key`, with a digest of the sources that they depend on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from upipe import block, blocked, kernel_blocks, kernels, layer, loss, offload, preflight, ring, tiled, workspace
from upipe.apply import Sharding, UPipeConfig
from upipe.block import checkpoint_contexts
from upipe.build import ModelConfig, enable_checkpointing, hf_config
from upipe.config import ConfigError
from upipe.layer import FusedLayersConfig, apply_fused_layers, layer_contexts
from upipe.live import LiveStorages, SimulatedAttention, SimulatedRing, finish_heads, unfinish_heads
from upipe.methods import MethodConfig, apply_method, projection, simulated
from upipe.methods.apply import MethodSharding
from upipe.methods.config import CHUNK_TOKENS
from upipe.offload import CheckpointConfig, apply_checkpointing
from upipe.tiled import TilingConfig, apply_tiling

# `upipe.apply` is the function of that name in the package.
apply_module = sys.modules[Sharding.__module__]

CACHE = Path(__file__).with_name("plan_layers.json")
LENGTHS = (4096, 16384, 65536, 262144, 393216)
"""Local tokens. The last two are long enough for no tile or weight's gradient to be in the way of the slope."""
BASELINE_LENGTHS = (16384, 65536, 131072, 262144, 393216)
"""The same under other methods, simulated when asked for."""
FPDT_CHUNKS = (0.25, 1, 2, 3, 4, 6)
"""The same of FPDT, in its chunks: only from several on does a longer sequence add nothing but what is as long as itself."""
PHASES = ("forward", "loss", "backward", "attention", "saved")
SOURCES = (
    "block", "blocked", "kernels", "layer", "live", "loss", "offload", "ring", "rotary", "schedule", "simulate", "tiled", "workspace",
    "zigzag",
)  # fmt: skip
_NOT_SHAPE = (
    "num_hidden_layers", "max_position_embeddings", "_name_or_path", "transformers_version", "dtype", "architectures", "rope_parameters",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "layer_types", "max_window_layers",
    "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "pretraining_tp", "problem_type",
)  # fmt: skip
_RARE = {
    "ring": 1, "method": "upipe", "chunk_tokens": None, "block_tokens": "none", "block_tokens_backward": "none", "gpu": None,
    "offload_within_layer": False,
}
"""What `Case.key` names where it is another than this."""


@dataclass(frozen=True)
class Case:
    """What the memory of a layer and of the loss depends on.

    Args:
        shape: the Hugging Face configuration without what changes no layer, as JSON with sorted keys; see `shape_of`.
        ranks: P. heads_per_stage: U, None for P. ring: R, ring ranks of P each.
        checkpointing: "none"; "model", transformers' non-reentrant one; "own", `upipe.offload`'s.
        rows: sequences of a micro-batch. method: one of `methods.NAMES`; chunk_tokens: of fpdt.
        block_tokens, block_tokens_backward: see `blocked.Tokens`; gpu: its name, from which "auto" chooses.
        offload_within_layer: the input, too, is on the host, and counts in the forward alone.
            The others are those of `UPipeConfig`, `TilingConfig` and `MemoryConfig`.
    """

    shape: str
    ranks: int
    kernel: str
    heads_per_stage: int | None = None
    attention_output: str = "device"
    overlap: bool = True
    dx: str = "gemm"
    mlp_tokens: int | None = None
    norm_tokens: int | None = None
    loss_tokens: int | None = None
    fp32_grads: bool = True
    reuse_grad: bool = True
    fused: bool = False
    checkpointing: str = "own"
    rows: int = 1
    dtype: str = "bf16"
    ring: int = 1
    method: str = "upipe"
    chunk_tokens: int | None = None
    block_tokens: int | str = "none"
    block_tokens_backward: int | str = "none"
    gpu: str | None = None
    offload_within_layer: bool = False

    @property
    def key(self) -> str:
        """A name for the cache: settings in words, the shape by its digest; a ring, another method and blocks where there are any."""
        values = dataclasses.asdict(self) | {"shape": digest(self.shape)}
        for name, plain in _RARE.items():
            if values[name] == plain:
                del values[name]
        return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Peaks:
    """Bytes of device memory by phase at `lengths` local tokens, the layer's input counted in each (with `offload_within_layer` in
    the forward).

    saved: what a layer leaves on the device for its backward besides its input: nothing, where it is checkpointed.
    attention: of the backward from the attention kernel's first call on, when the MLP's is over; () where it was not looked at.
    host: bytes a token that a layer's attention output takes on the host.
    """

    lengths: tuple[int, ...]
    forward: tuple[int, ...]
    loss: tuple[int, ...]
    backward: tuple[int, ...]
    saved: tuple[int, ...]
    host: float = 0.0
    attention: tuple[int, ...] = ()

    def at(self, phase: str, tokens: int) -> int:
        """Bytes at so many local tokens. Below the shortest length simulated, that one's."""
        lengths, values = self.lengths, getattr(self, phase)
        if not values:
            return 0
        if tokens <= lengths[0]:
            return values[0]
        i = next((i for i in range(1, len(lengths)) if tokens <= lengths[i]), len(lengths) - 1)
        slope = (values[i] - values[i - 1]) / (lengths[i] - lengths[i - 1])
        return int(values[i] + slope * (tokens - lengths[i]))

    def slope(self, phase: str) -> float:
        """Bytes a token beyond the longest length simulated."""
        values = getattr(self, phase)
        return (values[-1] - values[-2]) / (self.lengths[-1] - self.lengths[-2])


def highest(peaks: list[Peaks]) -> Peaks:
    """The higher of each, at the same lengths: of layers that run in different ways."""
    phases = {phase: tuple(map(max, zip(*(getattr(p, phase) for p in peaks)))) for phase in PHASES}
    return Peaks(peaks[0].lengths, **phases, host=max(p.host for p in peaks))


def shape_of(described: Any) -> str:
    """The part of a Hugging Face configuration that a layer and the loss depend on, as JSON."""
    values = {name: value for name, value in described.to_dict().items() if name not in _NOT_SHAPE and value is not None}
    kinds = dict.fromkeys(getattr(described, "layer_types", None) or ())
    if len(kinds) > 1:
        values["layer_types"] = list(kinds)
    return json.dumps(values, sort_keys=True, default=str)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_digest() -> str:
    """Of the modules whose code is simulated."""
    folder = Path(__file__).parent
    return digest("".join((folder / f"{name}.py").read_text() for name in SOURCES))


class _Ranks:
    """Stands for the groups of P ranks, of which this is the first."""

    def __init__(self, sp_size: int, ring_degree: int = 1, group=None) -> None:
        self.sp_size, self.world_size, self.dp_size = sp_size, sp_size, 1
        self.ring_size, self.ulysses_size = ring_degree, sp_size // ring_degree
        self.sp_rank = self.dp_rank = self.ring_rank = self.ulysses_rank = 0
        self.sp_group = self.ulysses_group = group
        self.ring_group = self.model_group = self.world_group = None

    def destroy(self) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass


def _exchange(send, recv, send_sizes, recv_sizes, group, asynchronous=False):
    if sum(send_sizes) != send.numel() or sum(recv_sizes) != recv.numel():
        raise ValueError(f"pieces of {send_sizes} of {send.numel()} elements for {recv_sizes} of {recv.numel()}")
    return _Done() if asynchronous else None


class _Host:
    """Counts what attention outputs take on the host, and keeps them out of the device's count."""

    def __init__(self) -> None:
        self.bytes = 0
        self.live: LiveStorages | None = None
        self.pool = simulated.Pool()
        self.kernel: SimulatedAttention | None = None
        self.targets: list[torch.Tensor] = []  # alive, or another storage may be known by the name of one that is gone

    def memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            target = torch.empty(shape, dtype=dtype, device="meta")
        self.targets.append(target)
        if self.live is not None:
            self.live.know(target)
        return target

    def send(self, source: torch.Tensor):
        target = self.memory(*source.shape, dtype=source.dtype)
        self.bytes += target.numel() * target.itemsize
        return target, None


class _SimulatedStore:
    """Stands for `host.HostStore`: what is sent is nowhere on the device."""

    def __init__(self, host: _Host) -> None:
        self.host = host

    def send(self, x: torch.Tensor) -> SimpleNamespace:
        there = self.host.memory(*x.shape, dtype=x.dtype)
        return SimpleNamespace(serial=0, shape=x.shape, dtype=x.dtype, device=x.device, there=there)

    def settle(self, saved) -> None:
        pass

    def holds(self, saved) -> bool:
        return True

    def read(self, saved) -> torch.Tensor:
        return saved.there

    def release(self, saved, event) -> None:
        pass


class Assumed(SimulatedAttention):
    """A kernel whose own memory has not been measured: fp32 dq, dk, dv beside its outputs, as FlashAttention-2's source has it."""

    def __init__(self, of: kernels.Kernel) -> None:
        super().__init__(_Unmeasured(of))


class _Unmeasured:
    def __init__(self, of: kernels.Kernel) -> None:
        self.name, self.writes_gradients, self.dq_over_out = of.name, of.writes_gradients, of.dq_over_out
        self.heads_at_once = of.heads_at_once

    def backward_bytes(self, tokens: int, heads: int, kv_heads: int, head_dim: int, keys: int | None = None) -> int:
        of_keys = 4 * kv_heads + (4 * heads if heads > kv_heads else 0)
        return head_dim * (6 * heads * tokens + of_keys * (keys or tokens)) + 4 * tokens * heads


def simulated_kernel(name: str) -> SimulatedAttention:
    """Stands for the kernel of that name. Raises ValueError for an unknown one."""
    kernel = next((k for k in kernels.KERNELS if k.name == name), None)
    if kernel is None:
        raise ValueError(f"kernel={name!r} is unknown: use one of {', '.join(kernels.names())}")
    return SimulatedAttention(kernel) if kernel.name in MEASURED else Assumed(kernel)


MEASURED = ("fa4", "cudnn")
"""Kernels whose backward's own memory was measured on an H200."""


def _add_nothing(total, a, b) -> None:
    pass


@contextlib.contextmanager
def without_a_device(case: Case, host: _Host, ring_rank: int = 0):
    """Other ranks, host memory and the GPU's own operators are not there: what stands for them allocates what they do."""
    kernel = host.kernel = simulated_kernel(case.kernel)
    blocks = case.block_tokens, case.block_tokens_backward
    if case.ring > 1 or blocks != ("none", "none"):
        ring.full_of(next(k for k in kernels.KERNELS if k.name == case.kernel))
    kernel = blocked.in_blocks(kernel, *blocks, case.gpu, case.kernel)
    if case.ring > 1 and case.method != "native":
        kernel = ring.RingAttention(kernel, SimulatedRing(ring_rank, case.ring))

    def wide(a, b):
        return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=loss.wide_dtype(a.dtype))

    def merge(out, lse, part, part_lse, plain=ring.merge_):
        rows = slice(0, max(1, ring.MERGE_TILE // out[:, 0].numel()))
        plain(out[:, rows], lse[:, :, rows], part[:, rows], part_lse[:, :, rows])

    called = simulated.GpuKernel(kernel, case.kernel) if case.method == "native" and case.ring > 1 else kernel
    patches = [
        mock.patch.object(apply_module, "init_distributed", lambda: None),
        mock.patch.object(apply_module, "SequenceParallelGroups", _Ranks),
        # The meta device knows no autocast.
        mock.patch.multiple(preflight, check_groups=lambda sp_size, ring_degree=1, node=None: None, check_autocast=lambda device: None),
        mock.patch.multiple(Sharding, kernel=lambda self, c: called, offsets=lambda self, positions, batch: None),
        mock.patch.object(block, "exchange", _exchange),
        mock.patch.object(workspace, "_workspaces", {}),
        mock.patch.multiple(
            block._HostCopy,
            send=lambda self, source: host.send(source),
            memory=lambda self, *shape, dtype: host.memory(*shape, dtype=dtype),
            write=lambda self, target, source: None,
            fetch=lambda self, target, source: None,
            free=lambda self: setattr(self, "freed", True),
        ),
        mock.patch.object(offload, "HostStore", lambda *args, **options: _SimulatedStore(host)),
        # In place and without temporaries, as the Triton kernels and the GPU's products are.
        mock.patch.multiple(block, finish_heads=finish_heads, unfinish_heads=unfinish_heads),
        mock.patch.multiple(loss, product=wide, add_product=_add_nothing),
        mock.patch.multiple(tiled, add_product=_add_nothing, unfinish_heads=unfinish_heads),
        # One of the equal turns of a loop over rows.
        mock.patch.object(ring, "merge_", merge),
        mock.patch.multiple(layer, add_product=_add_nothing, finish_heads=finish_heads),
    ]
    if case.method != "upipe":
        groups = functools.partial(_Ranks, group=simulated.Group(case.ranks * case.ring))
        patches += [
            mock.patch.multiple(projection, finish_heads=finish_heads, unfinish_heads=unfinish_heads),
            mock.patch.object(MethodSharding, "kernel", lambda self, c: called),
            simulated.without_other_ranks(kernel, host.pool, groups, merge, ring_rank),
        ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class Before(torch.autograd.Function):
    """What comes before the layer: makes its input, keeps nothing of it, and takes its gradient."""

    @staticmethod
    def forward(ctx, switch, *shape):
        return switch.new_empty(shape)

    @staticmethod
    def backward(ctx, grad):
        return None, *[None] * grad.dim()


class After(torch.autograd.Function):
    """What follows the layer: keeps nothing of its result, and makes the gradient that the layer is given."""

    @staticmethod
    def forward(ctx, y):
        ctx.shape, ctx.options = y.shape, {"dtype": y.dtype, "device": y.device}
        return y.new_empty(())

    @staticmethod
    def backward(ctx, _):
        return torch.empty(ctx.shape, **ctx.options)


def _model(case: Case) -> torch.nn.Module:
    """A model of shapes with one layer of each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(case.shape)
    kinds = values.pop("layer_types", None)
    count = len(kinds) if kinds else 1
    described = AutoConfig.for_model(
        values.pop("model_type"), **values, num_hidden_layers=count, use_cache=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, **({"layer_types": kinds} if kinds else {}),
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    return model.train()


def lengths_of(case: Case) -> tuple[int, ...]:
    """Local tokens at which a case is simulated, of those where the kernel takes all its heads at once (`in_parts`)."""
    if case.method != "fpdt":
        every = LENGTHS if case.method == "upipe" else BASELINE_LENGTHS
        return tuple(n for n in every if not in_parts(case, n)) or every[:1]
    chunk = (CHUNK_TOKENS if case.chunk_tokens is None else case.chunk_tokens) // case.ranks
    return tuple(sorted({max(1, int(chunk * n)) for n in FPDT_CHUNKS}))


def in_parts(case: Case, tokens: int) -> bool:
    """Whether the kernel's backward runs a few heads at a time at so many local tokens: no straight line leads there."""
    kernel = next((k for k in kernels.KERNELS if k.name == case.kernel), None)
    if kernel is None or case.method in ("native", "fpdt"):
        return False
    values = json.loads(case.shape)
    heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads") or values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    each = -(-heads // case.ranks)
    if case.method == "upipe":
        each = max(1, (case.heads_per_stage or case.ranks) // case.ranks)
    kv_each, queries = max(1, each * kv_heads // heads), tokens * case.ranks
    size = case.block_tokens_backward
    if size == "auto":
        size, _ = kernel_blocks.choose("backward", queries, each, kv_each, head_dim, case.gpu, case.kernel)
    if isinstance(size, int) and size < queries:
        # A call is one of a block and of the heads of one kv head.
        each, kv_each, queries = each // kv_each, 1, size
    return kernel.heads_at_once(case.rows, queries, each, kv_each, head_dim) is not None


def simulate(case: Case, lengths: tuple[int, ...] | None = None) -> Peaks:
    """Run a layer of each kind and the loss at every length: a few seconds.

    lengths: local tokens; None: those of the method (`lengths_of`).

    Raises:
        ConfigError: a kernel, stage width, shape or setting that cannot be run, or has not been measured.
    """
    lengths = lengths_of(case) if lengths is None else lengths
    try:
        rows = [_peaks(case, length) for length in lengths]
    except (preflight.PreflightError, ValueError) as error:
        raise ConfigError(str(error)) from error
    phases = {phase: tuple(row[phase] for row in rows) for phase in PHASES}
    return Peaks(tuple(lengths), **phases, host=rows[-1]["host"] / lengths[-1])


def _peaks(case: Case, tokens: int) -> dict[str, int]:
    found = [_ring_rank_peaks(case, tokens, rank) for rank in sorted({0, case.ring - 1})]
    return {phase: max(peaks[phase] for peaks in found) for phase in found[0]}


def _ring_rank_peaks(case: Case, tokens: int, ring_rank: int) -> dict[str, int]:
    host = _Host()
    with without_a_device(case, host, ring_rank):
        model = _model(case)
        if case.mlp_tokens or case.norm_tokens or case.loss_tokens:
            apply_tiling(model, TilingConfig(case.mlp_tokens, case.norm_tokens, case.loss_tokens, case.fp32_grads, case.reuse_grad))
        if case.method == "upipe":
            config = UPipeConfig(
                case.ranks * case.ring, case.heads_per_stage, ring_degree=case.ring, attention_output=case.attention_output,
                overlap=case.overlap, dx=case.dx,
            )  # fmt: skip
            handle = apply_module.apply(model, config)
        else:
            method = MethodConfig(case.method, case.ring if case.method == "usp" else None, case.chunk_tokens)
            handle = apply_method(model, method, UPipeConfig(case.ranks * case.ring))
        if case.fused:
            within = "pinned" if case.offload_within_layer else "none"
            tokens_a_tile = case.mlp_tokens or FusedLayersConfig.mlp_tokens
            apply_fused_layers(model, handle, FusedLayersConfig(tokens_a_tile, case.reuse_grad, within))
        if case.checkpointing == "own":
            contexts = layer_contexts if case.fused else checkpoint_contexts
            saved = CheckpointConfig("none")
            if case.offload_within_layer:
                saved = CheckpointConfig("pinned", prefetch=False, leave_on_host=True)
            apply_checkpointing(model, saved, contexts=contexts)
        elif case.checkpointing == "model":
            enable_checkpointing(model, reentrant=False)
        found = dict.fromkeys((*PHASES, "host"), 0)
        for index in range(len(model.get_decoder().layers)):
            host.bytes = 0
            workspace._workspaces.clear()
            peaks = _layer_peaks(model, index, case, tokens, host)
            # Slabs of the call alone are not what stays there.
            peaks["host"] = 0 if case.offload_within_layer else host.bytes
            for phase, value in peaks.items():
                found[phase] = max(found[phase], value)
    return found


def _layer_peaks(model, index: int, case: Case, tokens: int, host: _Host) -> dict[str, int]:
    """Peaks of one layer and the loss after it."""
    config, decoder = model.config.get_text_config(), model.get_decoder()
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    live = host.live = host.pool.live = LiveStorages(tables=False)
    live.know(*model.parameters(), *model.buffers())
    for parameter in model.parameters():
        if not parameter._post_accumulate_grad_hooks:
            # ZeRO takes each gradient into its bucket.
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    peaks = {}
    with live:
        if case.offload_within_layer:
            x = Before.apply(torch.empty(0, dtype=dtype, device="meta", requires_grad=True), case.rows, tokens, config.hidden_size)
        else:
            x = torch.empty(case.rows, tokens, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        positions = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        head_dim = int(head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
        angles = tuple(torch.empty(1, tokens, head_dim, dtype=dtype, device="meta") for _ in range(2))
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
        live.start()
        before = live.now
        y = decoder.layers[index](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        peaks["forward"] = live.peak
        y_bytes = y.untyped_storage().nbytes()
        peaks["saved"] = max(0, live.now - before - y_bytes - workspace.of(torch.device("meta")).bytes)
        h = y.detach().requires_grad_()
        end = After.apply(y)
        del y
        if case.offload_within_layer:
            del x
        live.start()
        labels = torch.empty(case.rows, tokens, dtype=torch.int64, device="meta")
        n = decoder.norm(h)
        if case.loss_tokens is not None:
            total = model.lm_head(n, labels)
            del n
        else:
            logits = model.lm_head(n)
            del n
            total = loss.token_loss_sum(logits, labels)
            del logits
        total.backward()
        peaks["loss"] = live.peak
        del total, labels, h
        live.start()
        before: list[int] = []

        def attention_begins() -> None:
            if not before:
                before.append(live.peak)
                live.start()

        host.kernel.before_backward = attention_begins
        end.backward()
        host.kernel.before_backward = None
        peaks["backward"], peaks["attention"] = max([*before, live.peak]), live.peak
        if not case.offload_within_layer:
            x.grad = None
    return peaks


def cached(case: Case, path: Path = CACHE) -> Peaks | None:
    """The result kept for a case, None where there is none."""
    values = _read(path).get("cases", {}).get(case.key)
    if values is None:
        return None
    return Peaks(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@functools.cache
def _read_at(path: Path, modified: int) -> dict[str, Any]:
    return json.loads(path.read_text())


def _read(path: Path) -> dict[str, Any]:
    return _read_at(path, path.stat().st_mtime_ns) if path.exists() else {}


def is_current(path: Path = CACHE) -> bool:
    """Whether the kept results were made by the code as it is now."""
    return _read(path).get("code") == code_digest()


@functools.cache
def peaks_of(case: Case) -> Peaks:
    """Kept, or simulated now. Raises ConfigError as `simulate`."""
    return cached(case) or simulate(case)


def keep(cases: dict[Case, Peaks], path: Path = CACHE) -> None:
    """Write results; those kept before of the same code stay."""
    kept = _read(path)
    before = kept.get("cases", {}) if kept.get("code") == code_digest() else {}
    merged = before | {case.key: dataclasses.asdict(peaks) for case, peaks in cases.items()}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(merged.items()))
    path.write_text(f'{{"code": {json.dumps(code_digest())}, "torch": {json.dumps(torch.__version__)}, "cases": {{\n{lines}\n}}}}\n')


KEPT = {"llama3-8b": (1, 2, 4, 8, 16), "qwen3-32b": (8, 16), "qwen3-32b-paper": (8, 16), "qwen3-8b": (8,), "qwen3-4b": (8,)}
"""Model presets, and the numbers of ranks of which results are kept."""
KEPT_RINGS = {16: 2}
"""Of these the number of ring ranks, too, with which Ulysses stays inside a node of eight."""


def kept_cases(model: str) -> list[Case]:
    """What plan_layers.json has of a model: what `upipe plan` asks for with each preset, and what `--fit` tries."""
    from upipe.plan import CANDIDATES, cases_of, request

    shape = shape_of(hf_config(ModelConfig(preset=model)))
    settings = [*CANDIDATES.values(), *((f"memory.preset={name}",) for name in ("paper", "lowest_memory", "fastest"))]
    runs = [request(model, 2**20, ranks, words) for ranks in KEPT[model] for words in settings]
    rings = [(ranks, f"upipe.ring_degree={KEPT_RINGS[ranks]}") for ranks in KEPT[model] if ranks in KEPT_RINGS]
    runs += [request(model, 2**20, ranks, [*words, ring]) for ranks, ring in rings for words in CANDIDATES.values()]
    return list(dict.fromkeys(case for run in runs for case in cases_of(run, shape, "fa4", None).values()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=KEPT, nargs="+", default=list(KEPT))
    parser.add_argument("--out", type=Path, default=CACHE, help="(default: plan_layers.json beside this module)")
    options = parser.parse_args(arguments)
    code_digest()  # of the code that runs, should a file change meanwhile
    for model in options.model:
        cases = kept_cases(model)
        found = {}
        for i, case in enumerate(cases):
            found[case] = simulate(case)
            print(f"{model} {i + 1}/{len(cases)}: {case.key}", flush=True)
        keep(found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
