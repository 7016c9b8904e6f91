"""Parts of a training step, named while it is profiled: `named` puts spans around what runs, `profiling.by_part` reads them.

    projection   q, k and v of hidden states: products, q/k norms, rotation; their gradients, with dx
    all-to-all   attention's exchanges (a ring's as well), and what packs tensors for them
    attention    the kernels, and what merges or sums their results
    output       the output projection, with dO and its weight's gradient
    MLP, norm    of decoder layers and the last norm
    loss         the head and the loss
    offload      copies between device and host
    optimizer    `engine.step()`, or a torch optimizer's
    ZeRO         gathers of parameters, reductions of gradients, and what packs them
    other        what none of these asked for: residual additions, embedding, sums of gradients by autograd

Work belongs to the innermost span of the host thread that asked for it. A span is a profiler's range, named PREFIX + part; around a
function or method it comes from `table`, around a module from hooks. A node of the backward has the part in which its forward was
called, by the profiler's links from forward to backward: so no `backward` of this library's autograd functions is wrapped, where one
more reference to the gradient would turn writing over it into a copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.profiler import record_function

from upipe import block, comm, host, kernels, layer, live, loss, ring, tiled
from upipe.methods import core, fpdt, native, projection, shelf
from upipe.offload import decoder_layers
from upipe.preflight import PreflightError

PROJECTION, ALL_TO_ALL, ATTENTION, OUTPUT, MLP, NORM = "projection", "all-to-all", "attention", "output", "MLP", "norm"
LOSS, OFFLOAD, OPTIMIZER, ZERO, OTHER = "loss", "offload", "optimizer", "ZeRO", "other"
PARTS = (PROJECTION, ALL_TO_ALL, ATTENTION, OUTPUT, MLP, NORM, LOSS, OFFLOAD, OPTIMIZER, ZERO, OTHER)
PREFIX = "upipe part: "
"""What names of spans begin with in a trace."""


class Named(NamedTuple):
    """What is called inside a part. part: or what tells it from the call's arguments."""

    owner: Any
    attribute: str
    part: str | Callable[..., str]


def _of_product(run, role, source, *args, **kwargs) -> str:
    return PROJECTION if source is run.x else OUTPUT


def _of_to_heads(run, rows, heads, slot, norm=None, rotate=False) -> str:
    return ALL_TO_ALL if norm is None and not rotate else PROJECTION


def _of_load_output(run, stage, buffer, out, copy) -> str:
    """From the host it also adds to the gradient of wo."""
    return ALL_TO_ALL if copy is None else OUTPUT


def table() -> list[Named]:
    """Every function and method with a part of its own, each at the class or module that defines it."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.activation_checkpointing import offload_activations
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.sequence.layer import _SeqAllToAll

    rows: list[tuple[Any, str, str | Callable[..., str]]] = [
        # The block. `walk` is attention but for what is named inside it.
        (block._Run, "__init__ project unfinish", PROJECTION),
        (block._Run, "product", _of_product),
        (block._Run, "to_heads", _of_to_heads),
        (block._Run, "_load_output", _of_load_output),
        (block._Run, "ship to_rows_of _leave", ALL_TO_ALL),
        (block._Run, "walk", ATTENTION),
        (block._Run, "project_out _out_tile rebuild backward", OUTPUT),
        (block._SlabSums, "add_q add_kv finish", PROJECTION),
        (block._RunningSums, "__init__ add_q add_kv finish", PROJECTION),
        (block._KvGradients, "add", ATTENTION),
        (block._HostCopy, "_copy", OFFLOAD),
        (block, "exchange", ALL_TO_ALL),
        # Fused layers.
        (layer._LayerRun, "products unfinish", PROJECTION),
        (layer._LayerRun, "residual output_projection_backward", OUTPUT),
        (layer._LayerRun, "finish_forward _mlp_backward", MLP),
        (layer._LayerRun, "_add_norm_backward", NORM),
        (layer._LayerRun, "attention_output", OFFLOAD),
        (layer._LayerSums, "finish", PROJECTION),
        (layer._OffloadedRun, "product mlp_tile_done", OUTPUT),
        (layer._OffloadedRun, "own put start arrived attention_output _load_output", OFFLOAD),
        (layer._OffloadedSums, "add_q", PROJECTION),
        (layer, "_normed", NORM),
        # Tiles and loss.
        (tiled, "tiled_mlp", MLP),
        (tiled, "tiled_norm norm_backward", NORM),
        (loss, "token_loss_sum tiled_loss_sum global_loss", LOSS),
        (nn.functional, "cross_entropy", LOSS),
        # Kernels and exchanges.
        *((cls, "forward backward", ATTENTION) for cls in (kernels.Kernel, ring.RingAttention, live.SimulatedAttention)),
        (ring.Ring, "exchange", ALL_TO_ALL),
        (comm, "exchange", ALL_TO_ALL),
        # Other methods.
        (core, "attention", ATTENTION),
        (core.Heads, "gather scatter", ALL_TO_ALL),
        (fpdt, "attention", ATTENTION),
        (fpdt, "_project", PROJECTION),
        (native.Native, "attend", ATTENTION),
        (projection, "by_modules rotate", PROJECTION),
        (shelf.Shelf, "keep fetch", OFFLOAD),
        (ulysses_sp.UlyssesSPAttentionHF, "forward", ATTENTION),
        (ulysses_sp.UlyssesSPAttentionHF, "_combine_local_sequences _partition_global_sequence", ALL_TO_ALL),
        (_SeqAllToAll, "forward", ALL_TO_ALL),
        (ulysses_sp.TiledMLP, "forward backward", MLP),
        (ulysses_sp.TiledFusedLogitsLoss, "forward backward", LOSS),
        # Saved inputs.
        (host.HostStore, "send settle finish receive read prefetch", OFFLOAD),
        (offload_activations._ActivationOffloadEngine, "offload_input _start_offload _restore_tensor", OFFLOAD),
        # DeepSpeed.
        (DeepSpeedEngine, "step", OPTIMIZER),
        (PartitionedParameterCoordinator, "fetch_sub_module release_sub_module", ZERO),
        (
            DeepSpeedZeroOptimizer_Stage3,
            "reduce_ready_partitions_and_remove_grads reduce_independent_p_g_buckets_and_remove_grads "
            "independent_gradient_partition_epilogue",
            ZERO,
        ),
        (
            DeepSpeedZeroOptimizer,
            "reduce_ready_partitions_and_remove_grads reduce_independent_p_g_buckets_and_remove_grads reduce_ipg_grads "
            "independent_gradient_partition_epilogue",
            ZERO,
        ),
        (DeepSpeedEngine, "allreduce_gradients", ZERO),
    ]  # fmt: skip
    return [Named(owner, name, part) for owner, names, part in rows for name in names.split()]


@contextmanager
def named(model: nn.Module, rows: Iterable[Named] | None = None):
    """Name the parts of what runs inside, on any thread, with the spans of `table` and hooks on the model's modules.

    Args:
        model: a DeepSpeed engine, or a Hugging Face model; its methods and tilings must be on it by now.
        rows: in place of `table()`.

    Raises:
        AttributeError: an attribute that the table names is not defined where it says; before anything is changed.
    """
    rows = table() if rows is None else list(rows)
    for row in rows:
        if row.attribute not in vars(row.owner):
            owner = getattr(row.owner, "__qualname__", row.owner)
            raise AttributeError(f"{owner} does not define {row.attribute}, which parts.table names")
    model = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    found = rows + _rotations(model)
    before = [vars(row.owner)[row.attribute] for row in found]
    handles: list = []
    try:
        for row, plain in zip(found, before):
            setattr(row.owner, row.attribute, _around(plain, row.part))
        for module, part in _modules(model):
            handles += _hooked(module, part)
        yield
    finally:
        for row, plain in zip(found, before):
            setattr(row.owner, row.attribute, plain)
        for handle in handles:
            handle.remove()


def _around(plain: Any, part: str | Callable[..., str]) -> Any:
    function = plain.__func__ if isinstance(plain, staticmethod) else plain

    @functools.wraps(function)
    def call(*args, **kwargs):
        with record_function(PREFIX + (part if isinstance(part, str) else part(*args, **kwargs))):
            return function(*args, **kwargs)

    return staticmethod(call) if isinstance(plain, staticmethod) else call


def _hooked(module: nn.Module, part: str) -> list:
    """Around the module's other hooks, such as ZeRO-3's."""
    inside: list[record_function] = []

    def enter(*_) -> None:
        inside.append(record_function(PREFIX + part))
        inside[-1].__enter__()

    def leave(*_) -> None:
        inside.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave, always_call=True)]


_INSIDE_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "q_norm", "k_norm"), PROJECTION) | {"o_proj": OUTPUT}


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return list(decoder_layers(model))
    except PreflightError:
        return []


def _modules(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules of a Hugging Face model with a part of their own."""
    found, layers = [], _layers(model)
    for decoder_layer in layers:
        for name, child in decoder_layer.named_children():
            if type(child).__name__.endswith("Norm"):
                found.append((child, NORM))
            elif "mlp" in name:
                found.append((child, MLP))
            elif "attn" in name:
                found.append((child, ATTENTION))
                found += [(inner, _INSIDE_ATTENTION[key]) for key, inner in child.named_children() if key in _INSIDE_ATTENTION]
    inside = {id(child) for decoder_layer in layers for child in decoder_layer.modules()}
    for name, module in model.named_modules():
        if layers and id(module) not in inside and type(module).__name__.endswith("Norm"):
            found.append((module, NORM))
        elif layers and name.rpartition(".")[2] == "rotary_emb":
            found.append((module, PROJECTION))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found + ([(head, LOSS)] if head is not None else [])


def _rotations(model: nn.Module) -> list[Named]:
    """The functions by which transformers' own attention modules rotate q and k."""
    files = {cls.__module__ for decoder_layer in _layers(model) for child in decoder_layer.children() for cls in type(child).__mro__}
    owners = (sys.modules[name] for name in sorted(files) if name.startswith("transformers.models."))
    return [Named(owner, "apply_rotary_pos_emb", PROJECTION) for owner in owners if "apply_rotary_pos_emb" in vars(owner)]
