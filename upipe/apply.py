"""Put UPipe on a Hugging Face model, take it off again, and say what was done.

Each attention module and the decoder around them get a subclass of their own class, instance by instance, so nothing
that another model uses changes. The attention subclass takes its hidden states by position (ZeRO-3's post-backward
hook sees positional tensors only) and computes `block.attention_block`; the decoder subclass makes global positions
where none are given, keeps local masks from being built, and refuses caches.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from upipe import blocked, kernels, loss, models, preflight, stage_width
from upipe.block import BlockSpec, Moved, attention_block
from upipe.comm import SequenceParallelGroups, init_distributed, node_ranks
from upipe.config import Length
from upipe.kernels import Offsets
from upipe.loader import AdaptedLoader, ShardedLoader, check_usable
from upipe.preflight import PreflightError
from upipe.ring import on_ring
from upipe.schedule import HeadSchedule
from upipe.tiled import tiled_loss_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UPipeConfig:
    """Settings of UPipe.

    Args:
        sp_size: processes that share a sequence; a divisor of the world size. 1 works: heads still go in groups.
        kernel_block_tokens: whether a kernel's causal forward over a long sequence is cut into blocks of so many tokens: "auto", in
            what was measured to be fastest on this GPU (`upipe.kernel_blocks`), one call where nothing was; "none", one call; a
            number. `upipe.blocked` says what it holds.
        kernel_block_tokens_backward: the same of the backward, where blocks hold more ("none" unless set).
        ring_degree: R, how many of sp_size's factors are a ring; a divisor of it. The other, P = sp_size / R, is the Ulysses degree,
            over which heads go in groups. Every rank has S / sp_size tokens either way. For more nodes than one: Ulysses
            inside a node (P must divide its processes), the ring across; `upipe.zigzag` says which tokens a rank has.
        heads_per_stage: U, query heads computed at a time over the P ranks: a multiple of P up to ceil(H/P)*P.
            None: P, the least memory. U >= H is plain Ulysses. "auto": the smallest within 2 % of the fastest one for the
            sequence's length on this GPU, where that was measured (`upipe.stage_width`). A forward takes up to 4U at a time
            where that needs no more memory than the backward.
        kernel: attention kernel, "auto" for the fastest that takes the case, or a name from `upipe.kernels`.
        attention_output: "device" or "host": where the attention output of a checkpointed layer is until its backward.
            "host" runs attention forward once a step and not twice, for one hidden state a layer of host memory. It needs
            checkpointing that tells the block so (`upipe.block.checkpoint_contexts`; `upipe train` sees to it).
        attention_output_layers: under "host", of how many layers (`host_layers` says which); the others make it again. None: of
            all. "auto": of as many as the host has memory for, which `upipe.memory.make_plan` settles.
        overlap: exchange the next stage's heads while one runs. False: less memory.
        dx: how the input's gradient is summed over stages: "gemm", accurately, or "bf16", in the model's dtype, with less memory.
        shard_eval: whether `model.eval()` works on shards too. False: in eval the model takes whole sequences on every
            rank and is the plain model.
    """

    sp_size: int = 1
    heads_per_stage: int | Literal["auto"] | None = None
    kernel: str = "auto"
    ring_degree: int = 1
    attention_output: Literal["device", "host"] = "device"
    attention_output_layers: int | Literal["auto"] | None = None
    overlap: bool = True
    dx: Literal["gemm", "bf16"] = "gemm"
    shard_eval: bool = True
    kernel_block_tokens: Length | Literal["none", "auto"] = "auto"
    kernel_block_tokens_backward: Length | Literal["none", "auto"] = "none"

    @property
    def ulysses_degree(self) -> int:
        """P = sp_size / ring_degree."""
        return self.sp_size // self.ring_degree


def host_layers(config: UPipeConfig, layers: int) -> frozenset[int]:
    """The layers whose attention output goes to the host: every other one from the first on, then those between.

    All that is there at the end of the forward is there at once, and the recompute holds no more with it than without, so which
    layers they are changes no peak; it changes what waits for copies. Alternating, a layer that sends two tensors is followed by
    one that sends its input alone, in which the copies catch up; the last layer, whose output would be fetched as soon as it has
    gone, comes last. Where one stored input serves two layers (`upipe.offload`) these are first those that are run again for the
    second's sake, and so read their attention output twice.
    """
    if config.attention_output == "device":
        return frozenset()
    count = layers if config.attention_output_layers is None else config.attention_output_layers
    return frozenset([*range(0, layers, 2), *range(1, layers, 2)][:count])


class Sharding:
    """What the patched modules of one handle share: groups, settings, kernels chosen, document boundaries.

    moved: bytes of attention outputs that went to the host and came back, since `Handle.end_step`.
    chunk: tokens of a chunk, where a sequence is shared in chunks (`methods.apply.MethodSharding`).
    """

    chunk: int | None = None

    def __init__(self, config: UPipeConfig, groups: SequenceParallelGroups) -> None:
        self.config, self.groups, self.closed = config, groups, False
        self.kernels: dict[kernels.Case, kernels.Kernel] = {}
        self.schedules: dict[tuple, HeadSchedule] = {}
        self.moved = Moved()
        self._widths: dict[tuple[int, int, str], int] = {}
        self._offsets = WeakTensorKeyDictionary()
        self._frequencies: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()

    def __deepcopy__(self, memo):
        return self

    def active(self, module: nn.Module) -> bool:
        """Whether a patched module works on shards now.

        Raises:
            PreflightError: its handle was removed, and this is a copy of the model made before.
        """
        if self.closed:
            raise PreflightError(
                f"this {type(module).__name__} is a copy of a model made while UPipe was on it, and the handle was removed since: "
                "copy the model after remove(), or call upipe.apply on the copy"
            )
        return module.training or self.config.shard_eval

    def check_modes(self, decoder: nn.Module) -> None:
        """With shard_eval=False every attention layer must be in the decoder's mode, or shards and sequences would mix."""
        if self.config.shard_eval:
            return
        other = sum("_upipe" in vars(type(m)) and m.training != decoder.training for m in decoder.modules())
        if other:
            raise PreflightError(
                f"{other} attention layers are in {'eval' if decoder.training else 'train'} mode, the decoder is not: with "
                "shard_eval=False all must be in one mode; use shard_eval=True or model.train()/model.eval()"
            )

    def schedule(self, heads: int, kv_heads: int, tokens: int | None = None, kernel: str = "") -> HeadSchedule:
        """tokens, kernel: of a Ulysses group now, from which heads_per_stage="auto" chooses; without them it is the narrowest."""
        width, ranks = self.config.heads_per_stage, self.config.ulysses_degree
        if width == "auto":
            width = None if tokens is None else self._width(tokens, heads, kernel)
        width = ranks if width is None else width
        if (heads, kv_heads, width) not in self.schedules:
            self.schedules[heads, kv_heads, width] = preflight.check_schedule(heads, kv_heads, ranks, width)
        return self.schedules[heads, kv_heads, width]

    def _width(self, tokens: int, heads: int, kernel: str) -> int:
        key = tokens, heads, kernel
        if key not in self._widths:
            self._widths[key], why = stage_width.choose(tokens, self.config.ulysses_degree, heads, _gpu(), kernel)
            if dist.get_rank() == 0:
                logger.info("heads_per_stage: auto is %d for %d tokens with %s (%s)", self._widths[key], tokens, kernel, why)
        return self._widths[key]

    def attention_output(self, attention: nn.Module) -> str:
        """ "device" or "host", of one attention module."""
        if self.config.attention_output == "device":
            # All that there is where classes are patched (`upipe.attention`), whose modules have no number.
            return "device"
        index, layers = attention._upipe_layer
        return "host" if index in host_layers(self.config, layers) else "device"

    def kernel(self, case: kernels.Case) -> kernels.Kernel:
        if case not in self.kernels:
            kernel = preflight.check_kernel(self.config.kernel, case, self.config.ring_degree)
            blocks = self.config.kernel_block_tokens, self.config.kernel_block_tokens_backward
            kernel = blocked.in_blocks(kernel, *blocks, _gpu())
            self.kernels[case] = on_ring(kernel, self.groups.ring_group) if self.config.ring_degree > 1 else kernel
            if dist.get_rank() == 0:
                logger.info("attention kernel: %s (%s)", self.kernels[case], case)
        return self.kernels[case]

    def offsets(self, position_ids: torch.Tensor | None, batch: int) -> Offsets | None:
        """Document boundaries of the whole sequence, from every rank's [B or 1, L] positions; once for each tensor and
        each change to it in place."""
        if position_ids is None:
            return None
        version = None if position_ids.is_inference() else position_ids._version
        known = self._offsets.get(position_ids)
        if known is None or known[0] != version:
            whole = self._gather(position_ids, batch)
            offsets = document_offsets(whole)
            if self.groups.ring_size > 1 and offsets is not None:
                preflight.check_zigzag(whole, offsets, self.groups.ring_size)
            known = self._offsets[position_ids] = (version, offsets)
        offsets = known[1]
        return offsets * batch if offsets is not None and len(offsets) == 1 and batch > 1 else offsets

    def keep_frequencies(self, rotary: nn.Module) -> None:
        """Undo a cast of the rotary frequencies to the model's dtype.

        `model.to(torch.bfloat16)` and DeepSpeed's `buffer_dtype` cast them along with the weights, `from_pretrained` does
        not; rounded to bf16, an angle at position 100,000 is off by up to 200 radians. They are made anew from the config.
        """
        if rotary not in self._frequencies:
            with torch.device("cpu"):
                self._frequencies[rotary] = dict(type(rotary)(rotary.config).named_buffers())
        for name, right in self._frequencies[rotary].items():
            have = rotary.get_buffer(name)
            if have.dtype != right.dtype or have.is_meta:
                setattr(rotary, name, right.to(torch.get_default_device() if have.is_meta else have.device))

    def _gather(self, position_ids: torch.Tensor, batch: int) -> torch.Tensor:
        if self.config.sp_size == 1:
            return position_ids
        mine = torch.tensor((batch, *position_ids.shape), device=position_ids.device)
        shapes = [torch.empty_like(mine) for _ in range(self.config.sp_size)]
        dist.all_gather(shapes, mine, group=self.groups.sp_group)
        every = torch.stack(shapes).tolist()
        preflight.check_local_shapes([[shape[0], shape[-1]] for shape in every])
        preflight.check_local_shapes([shape[1:] for shape in every])
        return self.join(position_ids)

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """The shards [B, L, ...] of a sequence's ranks as the whole padded one in its order, [B, S, ...]; collective."""
        return self.groups.gather(local)

    def local_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """[1, L] positions of this rank's tokens, where a batch brings none."""
        parts = self.groups.positions(length)
        return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])[None]


def _gpu() -> str | None:
    """The GPU's name, as tables of measured times have it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def document_offsets(position_ids: torch.Tensor) -> Offsets | None:
    """Where documents begin in rows of positions [B, S]: wherever a position does not follow the one before it.

    Returns:
        For each row (0, s1, ..., S), or None where every row is one document.
    """
    S = position_ids.shape[1]
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(begins.any()):
        return None
    rows: list[list[int]] = [[0] for _ in range(position_ids.shape[0])]
    for row, before in begins.nonzero().tolist():
        rows[row].append(before + 1)
    return tuple((*row, S) for row in rows)


def attention_call(base: type):
    """`__call__` that hands hidden_states over by position."""
    call = base.__call__

    def __call__(self, *args, hidden_states=None, **kwargs):
        if hidden_states is not None:
            args = (hidden_states, *args)
        return call(self, *args, **kwargs)

    return __call__


def block_spec(
    attention: nn.Module, architecture: models.Architecture, sharding: Sharding, hidden_states: torch.Tensor, position_ids
) -> BlockSpec:
    """What the block computes for an attention module and its hidden states [B, L, D] now. Raises PreflightError."""
    preflight.check_attention(type(attention).__name__, attention, architecture)
    preflight.check_dtype(hidden_states.dtype)
    preflight.check_autocast(hidden_states.device.type)
    window, softcap = architecture.window(attention), architecture.softcap_of(attention)
    kernel = sharding.kernel(kernels.Case.of(hidden_states, attention.head_dim, window is not None, softcap is not None))
    tokens = hidden_states.shape[1] * sharding.config.ulysses_degree
    return BlockSpec(
        schedule=sharding.schedule(*architecture.heads(attention), tokens, kernel.name),
        rank=sharding.groups.ulysses_rank,
        group=sharding.groups.ulysses_group,
        kernel=kernel,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        norm_eps=architecture.norm_eps(attention),
        norm_width=architecture.norm_width or "head",
        norm_offset=architecture.norm_offset,
        offsets=sharding.offsets(position_ids, hidden_states.shape[0]),
        window=window,
        softcap=softcap,
        attention_output=sharding.attention_output(attention),
        overlap=sharding.config.overlap,
        dx=sharding.config.dx,
        moved=sharding.moved,
    )


@contextmanager
def watched(groups: SequenceParallelGroups):
    """Around a forward: an error other than a refusal, which comes before anything is sent, leaves other ranks waiting."""
    try:
        yield
    except PreflightError:
        raise
    except Exception as error:
        groups.note_failure(error)
        raise


def attention_forward(plain, architecture: models.Architecture):
    """`forward` of a sharded attention module.

    Args:
        plain: the class's own forward, for eval without sharding.
    """

    @torch.compiler.disable
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, **kwargs):
        sharding: Sharding = self._upipe
        if not sharding.active(self):
            return plain(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        refuse_inputs(attention_mask, args, kwargs)
        cos, sin = architecture.angles(position_embeddings)
        spec = block_spec(self, architecture, sharding, hidden_states, kwargs.get("position_ids"))
        return attention_block(hidden_states, architecture.projections(self), cos, sin, spec), None

    return forward


def refuse_inputs(attention_mask, args: tuple, kwargs: dict) -> None:
    """Refuse what an attention module on shards cannot take: a cache (the first of args, or by name), a mask."""
    cache = kwargs.get("past_key_values", kwargs.get("cache")) if not args else args[0]
    if cache is not None:
        raise PreflightError(_NO_CACHE)
    if attention_mask is not None and attention_mask.numel() > 1:
        raise PreflightError(_no_mask(attention_mask))


def decoder_forward(plain):
    """`forward` of a sharded decoder: global positions, no local masks, no cache."""
    names = list(inspect.signature(plain).parameters)[1:]

    def forward(self, *args, **kwargs):
        sharding: Sharding = self._upipe
        kwargs.update(zip(names, args))
        active = sharding.active(self)
        sharding.check_modes(self)
        if not active:
            return plain(self, **kwargs)
        check_usable(sharding.groups)
        _prepare_decoder_inputs(sharding, self.rotary_emb, kwargs)
        with watched(sharding.groups):
            return plain(self, **kwargs)

    return forward


@torch.compiler.disable
def _prepare_decoder_inputs(sharding: Sharding, rotary: nn.Module, kwargs: dict) -> None:
    sharding.keep_frequencies(rotary)
    if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
        raise PreflightError(_NO_CACHE)
    if kwargs.get("output_attentions"):
        raise PreflightError("output_attentions=True: attention weights are never formed on a sharded model; leave it out")
    if kwargs.get("output_router_logits"):
        raise PreflightError(preflight.ROUTER_LOSS)
    kwargs["use_cache"] = False
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.bool().all())):
        raise PreflightError(_no_mask(mask))
    L = tokens.shape[1]
    preflight.check_local_tokens(L, sharding.groups.ulysses_size, sharding.groups.ring_size)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = sharding.local_positions(L, tokens.device)
    # A 4-D mask is passed on as it is: no local [L, L] mask is built from positions of one shard.
    kwargs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    sharding.offsets(kwargs["position_ids"], tokens.shape[0])


_NO_CACHE = (
    "a key/value cache (generate, use_cache) does not work on a sharded model: call handle.remove() first, or apply with "
    "shard_eval=False and decode in eval mode"
)


def _no_mask(mask) -> str:
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    return (
        f"attention_mask {shape} reached the sharded model: it masks causally and by document itself. Put padding on the right with "
        "labels of -100 (handle.shard checks it), mark packed documents by position_ids that restart, and leave the mask out"
    )


def subclass(base: type, sharding: Sharding, architecture: models.Architecture, attention=attention_forward) -> type:
    """A subclass of an attention or decoder class that works on shards; attention makes the former's forward.

    The decoder's keeps the name of its base, by which transformers finds what hidden states it may record.
    """
    members = {"_upipe": sharding, "__module__": base.__module__}
    if architecture.is_attention(base):
        members |= {"__call__": attention_call(base), "forward": attention(base.forward, architecture)}
        return type(f"UPipe{base.__name__}", (base,), members)
    members |= {"__qualname__": base.__qualname__, "forward": decoder_forward(base.forward)}
    return type(base.__name__, (base,), members)


class Handle:
    """A model on which UPipe was put. Made by `apply`."""

    def __init__(self, model: nn.Module, sharding: Sharding, patched: list[nn.Module], layers: int, layer_numel: int):
        self.model, self.config = model, sharding.config
        self._sharding, self._patched = sharding, patched
        self._layers, self._layer_numel = layers, layer_numel
        self._checked: set[int] = set()
        self._runs_ours: set[int] = set()
        self._decoder = next((m for m in patched if models.of_decoder(type(m)) is not None), None)
        self._notes: list[str] = []
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def mpu(self) -> SequenceParallelGroups:
        """For `deepspeed.initialize(mpu=...)`."""
        return self._sharding.groups

    @property
    def sp_size(self) -> int:
        return self.mpu.sp_size

    @property
    def mesh(self) -> str:
        """sp_size in words: "4", or "4 (ring 2 x Ulysses 2)"."""
        ring = self.config.ring_degree
        return str(self.sp_size) + (f" (ring {ring} x Ulysses {self.config.ulysses_degree})" if ring > 1 else "")

    @property
    def sp_rank(self) -> int:
        return self.mpu.sp_rank

    @property
    def sp_group(self):
        return self.mpu.sp_group

    @property
    def dp_size(self) -> int:
        return self.mpu.dp_size

    @property
    def dp_rank(self) -> int:
        return self.mpu.dp_rank

    @property
    def kernels(self) -> dict[str, str]:
        """Kernels that ran so far: case -> name."""
        return {str(case): kernel.name for case, kernel in self._sharding.kernels.items()}

    @property
    def takes_shift_labels(self) -> bool:
        """Whether the model gives the sum of its tokens' losses itself, and no logits."""
        return tiled_loss_of(self.model) is not None

    @property
    def widths(self) -> list[int]:
        """Stage widths U: those chosen so far where heads_per_stage is "auto", else the one there is."""
        if self.config.heads_per_stage == "auto":
            return sorted(set(self._sharding._widths.values()))
        return sorted({width for _, _, width in self._sharding.schedules})

    def shard(self, loader: Iterable[dict], accumulation: int = 1) -> ShardedLoader:
        """This rank's shards of a loader of global batches; see `loader.ShardedLoader`.

        Every rank of a sequence-parallel group must iterate the same batches, and data-parallel groups different ones:
        sample by `handle.dp_rank` of `handle.dp_size`. `accumulation` is the engine's gradient accumulation steps.
        """
        self._check_open()
        return ShardedLoader(loader, self.mpu, self.device, accumulation, preflight.vocabulary(self.model))

    def adapt(self, loader: Iterable[dict]) -> AdaptedLoader:
        """A loader that gives each rank its own batches, made fit for `shard`."""
        self._check_open()
        return AdaptedLoader(loader, self.mpu)

    def positions(self, length: int) -> torch.Tensor:
        """[1, L] positions in the padded sequence of this rank's `length` tokens. Raises PreflightError where no shard has so many."""
        self._check_open()
        made = self._sharding.local_positions(length, self.device)
        if made.shape[1] != length:
            raise PreflightError(f"no shard has {length} tokens with sp_size={self.mesh}: the next have {made.shape[1]}; handle.shard pads")
        return made

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The shards [B, L, ...] of a sequence's ranks as the whole padded one in its order, [B, S, ...]; collective, no autograd."""
        self._check_open()
        return self._sharding.join(local.detach())

    def _check_open(self) -> None:
        check_usable(self.mpu)

    def loss(self, engine, batch: dict) -> torch.Tensor:
        """Forward pass and loss of one sharded micro-batch. With a tiled loss on the model (`upipe.tiled`) it comes from there.

        Args:
            engine: the DeepSpeed engine (then `engine.backward(loss)` gives the window's mean-token-loss gradient in
                every ZeRO stage); or the model under DistributedDataParallel or fully_shard (then, with accumulation,
                `(loss / accumulation).backward()`); or the bare model (the same, and gradients are to be summed over all
                ranks).
            batch: from `handle.shard`.

        Returns:
            0-d fp32, the same on every rank at any sp: the global mean token loss (with accumulation: its mean over the
            window's micro-batches is).
        """
        self.check(engine, batch)
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        with watched(self.mpu):
            if self.takes_shift_labels:
                local = engine(**inputs, shift_labels=batch["shift_labels"]).loss
            else:
                logits = getattr(engine(**inputs), "logits", None)
                logits = preflight.check_logits(logits, batch["shift_labels"], type(self.model).__name__)
                local = loss.token_loss_sum(logits, batch["shift_labels"])
            value = loss.global_loss(local, batch["num_valid"], batch["accumulation"], loss.gradient_scale(engine))
        self.mpu.watch_backward(value)
        return value

    def check(self, engine, batch: dict | None = None) -> None:
        """Refuse an engine or batch whose gradients would not be right; done before the first step by `loss`."""
        self._check_open()
        missing = {"input_ids", "position_ids", "shift_labels", "num_valid", "accumulation", "sp_size"} - set(batch or ())
        if batch is not None and missing:
            raise PreflightError(f"batch lacks {sorted(missing)}: iterate handle.shard(loader), which attaches them")
        if batch is not None and batch["sp_size"] != self.sp_size:
            raise PreflightError(
                f"the batch was sharded for sp_size={batch['sp_size']}, this handle has {self.sp_size}: shard it with this handle"
            )
        for name, have, default in (("ring_degree", self.mpu.ring_size, 1), ("chunk", self._sharding.chunk, None)):
            given = have if batch is None else batch.get(name, default)
            if given != have:
                raise PreflightError(f"the batch was sharded for {name}={given}, this handle has {have}: shard it with this handle")
        self._check_model(engine)
        if not hasattr(engine, "zero_optimization_stage"):
            if isinstance(engine, (DistributedDataParallel, FSDPModule)) and id(engine) not in self._checked:
                preflight.check_wrapper(engine)
                self._checked.add(id(engine))
            return
        if id(engine) not in self._checked:
            largest = max(preflight.numel(p) for p in engine.module.parameters())
            preflight.check_engine(engine, self.sp_size, largest)
            self._note_live_layers(engine._config._param_dict)
            self._checked.add(id(engine))
        steps = engine.gradient_accumulation_steps()
        if batch is not None and engine.training and torch.is_grad_enabled() and steps != batch["accumulation"]:
            raise PreflightError(
                f"the batch comes from handle.shard(..., accumulation={batch['accumulation']}), the engine accumulates {steps} steps: "
                "give both the same number"
            )

    def _check_model(self, engine) -> None:
        """That the engine runs the model this handle sharded, and that it works on shards in its mode of now."""
        if self._decoder is None:
            return
        if id(engine) not in self._runs_ours:
            if not any(module is self._decoder for module in engine.modules()):
                raise PreflightError(
                    f"this handle sharded another model than the {type(engine).__name__} given: call upipe.apply on that one"
                )
            self._runs_ours.add(id(engine))
        if not self._sharding.active(self._decoder):
            raise PreflightError(
                "the model is in eval mode and shard_eval=False, so it takes whole sequences: compute the plain loss on the whole "
                "batch, or apply with shard_eval=True"
            )

    def note_config(self, ds_config: dict | str | None) -> None:
        """Take a DeepSpeed configuration, or the path of one, into the report."""
        if ds_config is not None:
            self._note_live_layers(json.loads(Path(ds_config).read_text()) if isinstance(ds_config, str) else ds_config)

    def _note_live_layers(self, ds_config: dict) -> None:
        live = preflight.live_layers(ds_config, self._layer_numel)
        if live is None:
            return
        kept = f"{live:.1f}" if live < self._layers else "all"
        note = f"ZeRO-3 may keep {kept} of {self._layers} layers gathered (stage3_max_live_parameters over {self._layer_numel} a layer)"
        if note in self._notes:
            return
        self._notes.append(note)
        if live > 2 and self._layers > 2 and dist.get_rank() == 0:
            logger.warning("%s: set stage3_max_live_parameters to about %.1e for the least memory", note, 1.2 * self._layer_numel)

    def report(self) -> str:
        """What was patched, the head schedule, the kernels that ran, and what else of the memory stack is on the model."""
        c = self.config
        lines = [
            f"UPipe on {type(self.model).__name__}: {self._layers} attention layers, "
            f"sequence parallel {self.mesh} x data parallel {self.dp_size}",
            *(schedule.describe() for schedule in self._sharding.schedules.values()),
            *self._kernel_reports(),
            f"attention output {self._outputs()}, exchange {'' if c.overlap else 'not '}overlapped, dx by {c.dx}",
            *self._other_reports(),
            *self._notes,
        ]
        return "\n".join(lines)

    def _kernel_reports(self) -> list[str]:
        return [f"attention kernel: {kernel} ({case})" for case, kernel in self._sharding.kernels.items()]

    def _other_reports(self) -> list[str]:
        """Of what else was put on the model."""
        others = {id(part): part for m in self.model.modules() for part in _stack_parts(m)}
        return [part.report() for part in others.values()]

    def end_step(self) -> Moved:
        """Bytes that attention copied to the host and back since the last call of this: outputs kept there, of layers without
        `offload_within_layer`, which counts its own."""
        counted = self._sharding.moved
        moved = Moved(counted.to_host, counted.to_device)
        counted.to_host = counted.to_device = 0
        return moved

    def closing_report(self) -> str | None:
        """What training showed, as text for the end of a run, or None; the same on every rank. Collective."""
        return None

    def _outputs(self) -> str:
        on_host = len(host_layers(self.config, self._layers))
        return f"of {on_host} layers on the host" if 0 < on_host < self._layers else f"on the {'host' if on_host else 'device'}"

    def remove(self) -> None:
        """Make the model plain again and give the process groups back. Engines made with `mpu` must not step afterwards.

        Raises:
            PreflightError: a patched module was given another class since (fully_shard on the decoder does that).
        """
        for module in self._patched:
            if "_upipe" not in vars(type(module)):
                raise PreflightError(
                    f"{type(module).__name__} was subclassed after UPipe was put on: undo that first (fully_shard cannot be)"
                )
        for module in self._patched:
            module.__class__ = type(module).__mro__[1]
            vars(module).pop("_upipe_layer", None)
        self._patched, self._decoder = [], None
        self._sharding.closed = True
        self.mpu.destroy()


def apply(model: nn.Module, config: UPipeConfig | None = None, ds_config: dict | str | None = None) -> Handle:
    """Shard the attention of a Hugging Face causal LM over sequence-parallel ranks, in place.

    Call it on every rank, before `deepspeed.initialize`, and pass that `mpu=handle.mpu`. Starts torch.distributed from
    the launcher's environment where it is not running.

    Args:
        model: a causal LM of an architecture that `models.ARCHITECTURES` lists, with random or pretrained weights; also
            made under `deepspeed.zero.Init` or on the meta device. Or one that shares its sequences itself, by a method
            `share_over_ranks(config, ds_config)` that gives the handle (`upipe.glm`).
        config: settings.
        ds_config: the DeepSpeed configuration or the path of its JSON file, to be reported on and warned about here and
            not at the first step.

    Raises:
        PreflightError: before anything is changed, naming the values and what would work.
    """
    config = UPipeConfig() if config is None else config
    preflight.check_arguments(model, config, UPipeConfig)
    if hasattr(model, "share_over_ranks"):
        _warn_of_allocator()
        return model.share_over_ranks(config, ds_config)
    init_distributed()
    preflight.check_groups(config.sp_size, config.ring_degree, node_ranks())
    preflight.check_kernel_name(config.kernel)
    preflight.check_kernel_blocks(config)
    check_unpatched(model)
    found = preflight.find_attention(model)
    preflight.check_modes(config, len(found))
    for name, module, architecture in found:
        preflight.check_config(module.config)
        preflight.check_attention(name, module, architecture)
        preflight.check_hooks(name, module, architecture.linear_names)
        preflight.check_kernel_for(config.kernel, module, architecture, config.ring_degree)
        preflight.check_dx(config.dx, type(module).__name__, architecture)
        preflight.check_schedule(*architecture.heads(module), config.ulysses_degree, config.heads_per_stage)

    sharding = Sharding(config, SequenceParallelGroups(config.sp_size, config.ring_degree))
    for index, (_, module, architecture) in enumerate(found):
        module._upipe_layer = index, len(found)
        sharding.schedule(*architecture.heads(module))
    return patch(model, sharding, found, Handle, attention_forward, ds_config)


@functools.cache
def _warn_of_allocator() -> None:
    """Once a process, on rank 0, where there is a GPU."""
    if torch.cuda.is_available() and int(os.environ.get("RANK", 0)) == 0:
        preflight.warn_of_allocator()


def check_unpatched(model: nn.Module) -> None:
    """Refuse a model that is sharded already; take off what a removed handle left on a copy."""
    for module in model.modules():
        if "_upipe" in vars(type(module)) and type(module)._upipe.closed:
            module.__class__ = type(module).__mro__[1]
    if any(hasattr(module, "_upipe") for module in model.modules()):
        raise PreflightError("UPipe is on this model already: call remove() on its handle first")


def patch(model: nn.Module, sharding: Sharding, found: list, handle_class: type[Handle], attention, ds_config) -> Handle:
    """Give attention and decoder of a checked model their subclasses. found: as `preflight.find_attention` returned it."""
    _warn_of_allocator()
    subclasses: dict[type, type] = {}
    patched = []
    for module in model.modules():
        cls = type(module)
        architecture = models.of_attention(cls) or models.of_decoder(cls)
        if architecture is not None:
            if cls not in subclasses:
                subclasses[cls] = subclass(cls, sharding, architecture, attention)
            module.__class__ = subclasses[cls]
            patched.append(module)
    layer = _layer_of(model, found[0][0])
    handle = handle_class(model, sharding, patched, len(found), sum(preflight.numel(p) for p in layer.parameters()))
    handle.note_config(ds_config)
    return handle


_PARTS = ("_tiling", "_fused", "_checkpointing")


def _stack_parts(module: nn.Module) -> list:
    """Handles of what else was put on a module."""
    return [vars(cls)[name] for cls in type(module).__mro__ for name in _PARTS if name in vars(cls)]


def _layer_of(model: nn.Module, attention_name: str) -> nn.Module:
    """The decoder layer around an attention module."""
    return model.get_submodule(attention_name.rpartition(".")[0])
