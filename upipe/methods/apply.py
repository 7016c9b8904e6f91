"""Put a method of sharing attention on a Hugging Face model, by one name, and take it off again.

What `upipe.apply` makes of a model a baseline makes of it too: subclasses of attention and decoder, instance by instance, a
handle with the groups, the loader and the loss. The attention module's own projections are called, and what is between them and
the output projection is the method's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from upipe import kernels, models, preflight
from upipe.apply import Handle, Sharding, UPipeConfig, apply, check_unpatched, patch, refuse_inputs
from upipe.block import Moved
from upipe.comm import SequenceParallelGroups, init_distributed, node_ranks
from upipe.kernels import Case, Kernel
from upipe.live import SimulatedAttention
from upipe.loader import ShardedLoader, cut, padded
from upipe.methods import config as methods
from upipe.methods import core, fpdt, native, projection, ulysses
from upipe.methods.config import FORMS, MethodConfig
from upipe.methods.layouts import Chunked, Layout
from upipe.methods.shelf import Streams
from upipe.preflight import PreflightError
from upipe.ring import full_of, on_ring


class MethodSharding(Sharding):
    """What the modules of one handle share; see `upipe.apply.Sharding`.

    Attributes:
        method, layout: the method and its order of tokens.
    """

    def __init__(self, config: UPipeConfig, groups: SequenceParallelGroups, method: MethodConfig, layers: int) -> None:
        super().__init__(config, groups)
        self.method, self.layout, self.layers = method, method.layout(config.sp_size), layers
        self.chunk = self.layout.chunk if isinstance(self.layout, Chunked) else None
        self._wrapped: dict[tuple[int, str], tuple[Kernel, Kernel]] = {}
        self._heads: dict[tuple[int, int], core.Heads] = {}
        self._streams: Streams | None = None
        self._masks: tuple = (None, None, None)
        self._ulysses = ulysses.Ulysses(self._core, groups.sp_group, layers)
        self._native: native.Native | None = None
        if method.name == "native" and config.sp_size > 1:
            ranks = dist.get_process_group_ranks(groups.sp_group)
            self._native = native.Native(ranks, "cuda")

    def local_positions(self, length: int, device) -> torch.Tensor:
        """[1, L] positions of this rank's tokens."""
        pieces = self.layout.pieces(length * self.config.sp_size, self.groups.sp_rank)
        return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces])[None]

    def shard_batch(self, batch: dict[str, torch.Tensor], sp_size: int, sp_rank: int, ring_degree: int) -> dict[str, torch.Tensor]:
        """`loader.shard_batch` in this method's order."""
        tokens = batch["input_ids"].shape[1]
        return cut(padded(batch, self.layout.padded(tokens) - tokens), self.layout.pieces(tokens, sp_rank))

    def join(self, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.layout, Chunked):
            return super().join(local)
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.config.sp_size)]
        dist.all_gather(shards, local.contiguous(), group=self.groups.sp_group)
        whole = torch.cat(shards, dim=1)
        result, taken = torch.empty_like(whole), 0
        for rank in range(self.config.sp_size):
            for piece in self.layout.pieces(whole.shape[1], rank):
                result[:, piece.start : piece.stop] = whole[:, taken : taken + len(piece)]
                taken += len(piece)
        return result

    def kernel(self, case: Case) -> Kernel:
        if self._native is None:
            return super().kernel(case)
        if self.config.kernel == "auto" and case not in self.kernels:
            willing = [k for k in kernels.KERNELS if k.name in native.BACKENDS and k.declines(case) is None]
            if not willing:
                preflight.check_kernel(next(iter(native.BACKENDS)), case)
            right = [k for k in willing if not self._native.wrong(k.name, case.head_dim, case.dtype)]
            self.kernels[case] = (right or willing)[0]
        kernel = super().kernel(case)
        if kernel.name in native.BACKENDS:
            self._native.refuse_if_wrong(kernel.name, case.head_dim, case.dtype)
        return kernel

    def attend(self, module: nn.Module, architecture: models.Architecture, hidden, cos, sin, position_ids) -> torch.Tensor:
        """What comes before a module's output projection, [B, L, H*d], of hidden states [B, L, D]."""
        window, softcap = architecture.window(module), architecture.softcap_of(module)
        base = self.kernel(Case.of(hidden, module.head_dim, window is not None, softcap is not None))
        offsets = self.offsets(position_ids, hidden.shape[0])
        if self.method.name == "fpdt":
            return self._fpdt(module, architecture, hidden, cos, sin, base, offsets, softcap).flatten(2)
        q, k, v = projection.by_modules(module, architecture, hidden, cos, sin)
        if self._native is not None and not isinstance(base, SimulatedAttention):
            check_native_data(offsets)
            native.check_kernel(base.name)
            return self._native.attend(q, k, v, base.name, module.scaling).flatten(2)
        if self.method.name == "ulysses":
            self._masks = offsets, window, softcap
            return self._ulysses.attend(module, q, k, v, position_ids).flatten(2)
        kernel, _ = self._on_ring(base)
        heads = self._heads_of(q.shape[2], k.shape[2])
        return core.attention(q, k, v, heads, kernel, module.scaling, offsets, window, softcap).flatten(2)

    def _core(self, module, q, k, v, attention_mask, scaling, **kwargs):
        """The attention that DeepSpeed's class calls."""
        offsets, window, softcap = self._masks
        base = self.kernel(Case.of(q, None, window is not None, softcap is not None))
        return core.local_attention(*(t.transpose(1, 2) for t in (q, k, v)), base, scaling, offsets, window, softcap), None

    def _on_ring(self, kernel: Kernel) -> tuple[Kernel, Kernel]:
        """The kernel over the ring; and the object it was made of, kept so that its id stays its own."""
        key = id(kernel), "ring"
        if key not in self._wrapped:
            self._wrapped[key] = on_ring(kernel, self.groups.ring_group), kernel
        return self._wrapped[key]

    def _full(self, kernel: Kernel) -> Kernel:
        key = id(kernel), "full"
        if key not in self._wrapped:
            self._wrapped[key] = full_of(kernel), kernel
        return self._wrapped[key][0]

    def _heads_of(self, heads: int, kv_heads: int) -> core.Heads:
        key = heads, kv_heads
        if key not in self._heads:
            groups = self.groups
            self._heads[key] = core.Heads.of(heads, kv_heads, groups.ulysses_size, groups.ulysses_rank, groups.ulysses_group)
        return self._heads[key]

    def _fpdt(self, module, architecture, hidden, cos, sin, kernel: Kernel, offsets, softcap) -> torch.Tensor:
        chunks = self.layout.chunks(hidden.shape[1] * self.config.sp_size)
        if hidden.shape[1] % chunks:
            raise PreflightError(
                f"shards of {hidden.shape[1]} tokens do not divide into {chunks} chunks of up to {self.layout.chunk} tokens of the "
                "sequence: handle.shard pads and cuts them"
            )
        self._streams = self._streams or Streams(hidden.device)
        weights = projection.weights_of(module, architecture)
        call = fpdt.Call(
            chunks,
            projection.ByWeights.of(module, architecture),
            self._heads_of(*architecture.heads(module)),
            kernel,
            self._full(kernel),
            module.scaling,
            offsets,
            softcap,
            self._streams,
            tuple(weights),
        )
        return fpdt.attention(hidden, weights, cos, sin, call)


def check_native_data(offsets) -> None:
    if offsets is not None:
        raise PreflightError(
            "packed documents with method=native: torch's context_parallel has one causal mask over the whole sequence; use one "
            "document a row, or method upipe, ulysses, ring, usp or fpdt"
        )


def attention_forward(plain, architecture: models.Architecture):
    """`forward` of an attention module under a baseline; see `upipe.apply.attention_forward`."""

    @torch.compiler.disable
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, **kwargs):
        sharding: MethodSharding = self._upipe
        if not sharding.active(self):
            return plain(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        refuse_inputs(attention_mask, args, kwargs)
        preflight.check_dtype(hidden_states.dtype)
        preflight.check_one_dtype(hidden_states.dtype, dict(self.named_parameters()))
        preflight.check_autocast(hidden_states.device.type)
        cos, sin = architecture.angles(position_embeddings)
        out = sharding.attend(self, architecture, hidden_states, cos, sin, kwargs.get("position_ids"))
        return self.o_proj(out), None

    return forward


class MethodHandle(Handle):
    """A model on which a baseline was put. Made by `apply_method`; used as `upipe.apply.Handle`.

    Attributes:
        method: its settings.
    """

    @property
    def method(self) -> MethodConfig:
        return self._sharding.method

    @property
    def layout(self) -> Layout:
        """Which tokens each rank holds."""
        return self._sharding.layout

    @property
    def widths(self) -> list[int]:
        return []

    def shard(self, loader: Iterable[dict], accumulation: int = 1) -> ShardedLoader:
        self._check_open()
        sharding = self._sharding
        vocabulary = preflight.vocabulary(self.model)
        return ShardedLoader(loader, self.mpu, self.device, accumulation, vocabulary, sharding.shard_batch, sharding.chunk)

    def moved(self) -> dict[str, int]:
        """Bytes that attention copied to the host and back since the last call of this, and held there at most (fpdt)."""
        streams = self._sharding._streams
        if streams is None:
            return {"bytes_to_host": 0, "bytes_to_device": 0, "held": 0}
        told = {"bytes_to_host": streams.bytes_to_host, "bytes_to_device": streams.bytes_to_device, "held": streams.most}
        streams.start()
        return told

    def end_step(self) -> Moved:
        moved = self.moved()
        return Moved(moved["bytes_to_host"], moved["bytes_to_device"])

    def report(self) -> str:
        """What was patched, what runs, the kernels, and what else of the memory stack is on the model."""
        ring, ulysses_degree = self.method.degrees(self.sp_size)
        lines = [
            f"method {self.method.name} on {type(self.model).__name__}: {self._layers} attention layers, "
            f"ring {ring} x Ulysses {ulysses_degree} x data parallel {self.dp_size}",
            FORMS[self.method.name],
            *self._kernel_reports(),
            *self._other_reports(),
            *self._notes,
        ]
        return "\n".join(lines)


def apply_method(
    model: nn.Module, method: MethodConfig | str = "upipe", config: UPipeConfig | None = None, ds_config: dict | str | None = None
) -> Handle:
    """Share the attention of a Hugging Face causal LM by one of the methods, in place. Call it as `upipe.apply`, which "upipe" is.

    Args:
        model: a causal LM of an architecture that `models.ARCHITECTURES` lists.
        method: a name, or settings.
        config: sp_size (ring x Ulysses ranks), kernel and shard_eval; what else there is is of "upipe" alone.
        ds_config: see `upipe.apply`.

    Raises:
        PreflightError: before anything is changed, naming the values and what would work.
    """
    try:
        method = methods.of(method)
    except ValueError as error:
        raise PreflightError(f"method: {error}") from None
    if method.name == "upipe":
        return apply(model, config, ds_config)
    config = UPipeConfig() if config is None else config
    preflight.check_arguments(model, config, UPipeConfig)
    if hasattr(model, "share_over_ranks"):
        raise PreflightError(f"method={method.name} with {type(model).__name__}, which shares its sequences in its own way: use upipe")
    init_distributed()
    preflight.check_groups(config.sp_size)
    preflight.check_kernel_name(config.kernel)
    preflight.check_kernel_blocks(config)
    check_unpatched(model)
    found = preflight.find_attention(model)
    try:
        ring, _ = method.degrees(config.sp_size)
        method.layout(config.sp_size)
        methods.check_stages(method, config)
        preflight.check_groups(config.sp_size, ring, node_ranks())
        _check_method(method, config, ring)
        for name, module, architecture in found:
            preflight.check_config(module.config)
            _check_module(name, module, architecture, method, config, ring)
    except PreflightError:
        raise
    except ValueError as error:
        raise PreflightError(str(error)) from None
    sharding = MethodSharding(config, SequenceParallelGroups(config.sp_size, ring), method, len(found))
    return patch(model, sharding, found, MethodHandle, attention_forward, ds_config)


def _check_method(method: MethodConfig, config: UPipeConfig, ring: int) -> None:
    if method.name == "native" and config.sp_size > 1:
        native.check_device("cuda" if torch.cuda.is_available() else "cpu")
        native.check_kernel(config.kernel)
    if (ring > 1 or method.name == "fpdt") and method.name != "native" and config.kernel != "auto":
        full_of(next(kernel for kernel in kernels.KERNELS if kernel.name == config.kernel))


def _check_module(name: str, module: nn.Module, architecture: models.Architecture, method: MethodConfig, config, ring: int) -> None:
    if architecture.sinks:
        raise PreflightError(f"{name} ({type(module).__name__}) has attention sinks: only method=upipe serves them, not {method.name}")
    window, softcap = architecture.window(module), architecture.softcap_of(module)
    if window is not None and (ring > 1 or method.name == "fpdt"):
        raise PreflightError(
            f"{name} has a sliding window of {window} tokens: method={method.name} with {ring} ring ranks serves none; use method upipe "
            "or ulysses, or usp with ring_degree=1"
        )
    if softcap is not None and method.name == "native" and config.sp_size > 1:
        raise PreflightError(f"{name} has a softcap of {softcap}: torch's context_parallel has none; use another method")
    if method.name == "fpdt":
        preflight.check_attention(name, module, architecture)
        preflight.check_hooks(name, module, architecture.linear_names)
    if method.name == "ulysses":
        ulysses.check_heads(*architecture.heads(module), config.sp_size)
    preflight.check_kernel_for(config.kernel, module, architecture)
