"""Every refusal, in one place, before the first step. Each names the values and what would work."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from upipe import blocked, kernels, models, ring
from upipe.schedule import HeadSchedule

logger = logging.getLogger(__name__)


class PreflightError(ValueError):
    """A set-up that would not give the unsharded model's numbers, or would not run."""


ROUTER_LOSS = "output_router_logits=True: the load-balancing loss of a shard is not that of the sequence; set it to False"

RECURRENT = (
    "whose state and convolution run from shard to shard of a sequence: shards by themselves would be wrong without a sign of it. "
    "Only GLM-5.3-Flash's are sharded (upipe.glm); train other hybrids unsharded, with upipe.offload and tiling for memory"
)


def check_arguments(model, config, config_class: type) -> None:
    """The types of what `apply` was given."""
    if not isinstance(model, nn.Module):
        raise PreflightError(f"model is a {type(model).__name__}: give a Hugging Face model object (load it first)")
    if not isinstance(config, config_class):
        raise PreflightError(f"config is {config!r}: give upipe.{config_class.__name__}(sp_size=..., ...)")


def check_groups(sp_size: int, ring_degree: int = 1, node: int | None = None) -> None:
    """The sequence-parallel size and its factors against the world and its nodes of so many ranks, where that is known."""
    for name, value in (("sp_size", sp_size), ("ring_degree", ring_degree)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PreflightError(f"{name}={value!r} must be a positive integer")
    world = dist.get_world_size()
    if world % sp_size:
        works = [n for n in range(1, world + 1) if world % n == 0]
        raise PreflightError(f"sp_size={sp_size} does not divide the world of {world} processes: use one of {works}")
    check_ring_degree(sp_size, ring_degree, node)


def check_ring_degree(sp_size: int, ring_degree: int, node: int | None) -> None:
    """Whether it divides sp_size, and leaves Ulysses groups that lie inside a node of so many ranks."""
    factors = [n for n in range(1, sp_size + 1) if sp_size % n == 0]
    works = [n for n in factors if n == 1 or node is None or node % (sp_size // n) == 0]
    if ring_degree not in factors:
        raise PreflightError(f"ring_degree={ring_degree} does not divide sp_size={sp_size}: use one of {works}")
    if ring_degree not in works:
        raise PreflightError(
            f"ring_degree={ring_degree} with sp_size={sp_size} makes Ulysses groups of {sp_size // ring_degree} ranks, which would cross "
            f"nodes of {node}: use ring_degree one of {works}"
        )


def check_schedule(heads: int, kv_heads: int, sp_size: int, heads_per_stage: int | str | None) -> HeadSchedule:
    try:
        return HeadSchedule(heads, kv_heads, sp_size, None if heads_per_stage == "auto" else heads_per_stage)
    except ValueError as error:
        raise PreflightError(str(error)) from None


def check_kernel_name(name: str) -> None:
    if name != "auto" and name not in kernels.names():
        raise PreflightError(f"kernel={name!r} is unknown: use auto, {kernels.described()}")


def check_kernel_blocks(config) -> None:
    """`apply.UPipeConfig.kernel_block_tokens` and its backward's, with a kernel asked for by name."""
    for name in ("kernel_block_tokens", "kernel_block_tokens_backward"):
        try:
            blocked.check_tokens(getattr(config, name))
        except ValueError as error:
            raise PreflightError(f"{name}: {error}") from None
    asked = [kernel for kernel in kernels.KERNELS if kernel.name == config.kernel]
    if asked and any(isinstance(tokens, int) for tokens in (config.kernel_block_tokens, config.kernel_block_tokens_backward)):
        try:
            ring.full_of(asked[0])
        except ValueError as error:
            raise PreflightError(str(error)) from None


def check_kernel(name: str, case: kernels.Case, ring_degree: int = 1) -> kernels.Kernel:
    """The kernel to run a case with, on a ring of so many if more than one; see `kernels.select` and `ring.full_of`."""
    if ring_degree > 1 and case.window:
        raise PreflightError(f"ring_degree={ring_degree} with a sliding window: a ring serves none; use ring_degree=1")
    try:
        kernel = kernels.select(name, case)
        if ring_degree > 1:
            ring.full_of(kernel)
    except ValueError as error:
        raise PreflightError(str(error)) from None
    return kernel


def check_modes(config, layers: int) -> None:
    """The settings of `apply.UPipeConfig` that say how the block walks its stages, for a model of so many layers."""
    for name, works in (
        ("attention_output", ("device", "host")), ("dx", ("gemm", "bf16")), ("overlap", (True, False)), ("shard_eval", (True, False)),
    ):
        value = getattr(config, name)
        if value not in works:
            raise PreflightError(f"{name}={value!r}: use one of {works}")
    check_attention_output_layers(config, layers)
    if config.attention_output == "host" and config.attention_output_layers == "auto":
        raise PreflightError(
            'attention_output_layers="auto" is settled from the length and the host\'s memory by upipe train and '
            f"upipe.memory.apply_stack: here give a number up to {layers}, or None for all"
        )


def check_attention_output_layers(config, layers: int) -> None:
    """`apply.UPipeConfig.attention_output_layers` against the layers there are."""
    count = config.attention_output_layers
    if count is None or (count == "auto" and config.attention_output == "host"):
        return
    if config.attention_output == "device":
        raise PreflightError(
            f"attention_output_layers={count!r} with attention_output='device', which keeps none on the host: set attention_output "
            "to host, or leave it out"
        )
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= layers:
        raise PreflightError(f"attention_output_layers={count!r} of {layers} layers: use a number up to {layers}, or auto")


def check_dx(dx: str, name: str, architecture: models.Architecture) -> None:
    if dx == "bf16" and architecture.norm_width == "full":
        raise PreflightError(
            f'dx="bf16" with {name}, whose q/k norm runs over all heads: a head\'s gradient is not known before the last one\'s. '
            'Use dx="gemm"'
        )


def check_config(config) -> None:
    """A Hugging Face config, before or after the model exists.

    Args:
        config: the text model's config.
    """
    kinds = models.recurrent_layers(config)
    if kinds:
        raise PreflightError(f"model type {config.model_type!r} has {', '.join(kinds)} layers, {RECURRENT}")
    architecture = models.of_model_type(config.model_type)
    if architecture is None:
        raise PreflightError(
            f"model type {config.model_type!r} is not served: {', '.join(a.name for a in models.ARCHITECTURES)} are"
        )
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout:
        raise PreflightError(f"attention_dropout={dropout}: dropout inside sharded attention is not reproducible; set it to 0.0")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise PreflightError(
            f"rope_type={kind!r} chooses its frequencies by the length each rank sees, which differs between shards: "
            "use default, linear, llama3 or yarn"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise PreflightError("use_bidirectional_attention=True: only causal attention is served")
    if getattr(config, "output_router_logits", False):
        raise PreflightError(ROUTER_LOSS)


def check_attention(name: str, module: nn.Module, architecture: models.Architecture) -> None:
    """One attention module: projections that can be read row by row."""
    for part in architecture.linear_names:
        projection = getattr(module, part)
        if isinstance(projection, FSDPModule) or isinstance(getattr(projection, "weight", None), DTensor):
            raise PreflightError(
                f"{name}.{part}.weight is a shard: call upipe.apply first, then fully_shard on each decoder layer (and the model), "
                "not on single projections, whose own forward never runs"
            )
        if type(projection) is not nn.Linear:
            raise PreflightError(
                f"{name}.{part} is a {type(projection).__module__}.{type(projection).__qualname__}, not a plain torch.nn.Linear: its "
                "weight alone does not say what it computes (adapter, quantised or tensor-parallel layer). Merge or remove it first"
            )


def check_hooks(name: str, module: nn.Module, parts: Iterable[str]) -> None:
    """Before DeepSpeed puts its own on: nothing on a projection that its weight does not say, since it is never called."""
    for part in parts:
        projection = module.get_submodule(part)
        hooks = [h for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks") if getattr(projection, h)]
        if "forward" in vars(projection):
            hooks.append("a forward of its own")
        if hooks:
            raise PreflightError(
                f"{name}.{part} has {', '.join(h.strip('_').replace('_', ' ') for h in hooks)}: its weight is used without calling it, so "
                f"they would not run. Remove them, or put them on the whole {type(module).__name__}"
            )


def check_kernel_for(name: str, module: nn.Module, architecture: models.Architecture, ring_degree: int = 1) -> None:
    """A kernel asked for by name, and a ring, against this machine and layer, as far as they are known before the first step."""
    if name == "auto" and (ring_degree == 1 or architecture.window(module) is None):
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    masks = architecture.window(module) is not None, architecture.softcap_of(module) is not None
    check_kernel(name, kernels.Case(device, capability, torch.bfloat16, module.head_dim, *masks), ring_degree)


def check_local_tokens(tokens: int, ulysses_degree: int, ring_degree: int) -> None:
    """A rank's tokens: those of a ring rank are two runs."""
    if ring_degree > 1 and tokens * ulysses_degree % 2:
        raise PreflightError(
            f"shards of {tokens} tokens on ring_degree={ring_degree} x {ulysses_degree} Ulysses ranks: the "
            f"{tokens * ulysses_degree} tokens of a ring rank must be two equal runs; handle.shard pads and cuts them"
        )


def check_zigzag(positions: torch.Tensor, offsets: kernels.Offsets, ring_degree: int) -> None:
    """Positions [B, S] of a sequence, put in order as its ring has it: shards in another order look like documents that begin in
    their middle, each where a run begins."""
    run = positions.shape[1] // (2 * ring_degree)
    for row, starts in enumerate(offsets):
        for start in starts[1:-1]:
            if start % run == 0 and int(positions[row, start]) != 0:
                raise PreflightError(
                    f"position_ids of row {row} jump to {int(positions[row, start])} at token {start}, where a run of the ring begins: "
                    f"with ring_degree={ring_degree} shards are in zigzag order (upipe.zigzag.shards); handle.shard cuts them so"
                )


def check_local_shapes(shapes: list[list[int]]) -> None:
    """[rows, tokens] of every rank's shard of a sequence."""
    if any(shape != shapes[0] for shape in shapes):
        raise PreflightError(
            f"the ranks of a sequence were given shards of {shapes} rows and tokens: all must be alike; handle.shard pads and cuts them"
        )


def check_plain(module: nn.Module, parts: Mapping[str, type], biases: Collection[str] = ()) -> None:
    """Submodules whose weights are used without calling them: of these very classes, and without a bias but where it is added."""
    for part, kind in parts.items():
        found = module.get_submodule(part)
        if type(found) is not kind:
            raise PreflightError(
                f"{part} of a {type(module).__name__} is a {type(found).__name__}, not a plain {kind.__name__}: its weight alone does not "
                "say what it computes (adapter, quantised or parametrised layer). Merge or remove it first"
            )
        if part not in biases and getattr(found, "bias", None) is not None:
            raise PreflightError(f"{part} of a {type(module).__name__} has a bias, which glm5_next has not: remove it first")


def check_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device):
        raise PreflightError("torch.autocast is on: it is not supported; cast the model to bf16 instead")


def vocabulary(model: nn.Module) -> int | None:
    """Rows of the model's embedding, which token ids and labels must be below; None where it does not say."""
    config = getattr(model, "config", None)
    return getattr(config.get_text_config(), "vocab_size", None) if config is not None else None


def check_logits(logits, labels: torch.Tensor, model: str) -> torch.Tensor:
    """A causal LM's output: one row of logits a token."""
    if logits is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        shape = None if logits is None else tuple(logits.shape)
        raise PreflightError(
            f"{model} gives logits of shape {shape} for labels of shape {tuple(labels.shape)}: handle.loss needs a causal LM, whose "
            "logits are [batch, tokens, vocabulary]"
        )
    return logits


def check_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        raise PreflightError("fp16 is not tested under sequence parallelism: use bf16 or fp32")


def check_one_dtype(dtype: torch.dtype, weights: dict[str, torch.Tensor | None]) -> None:
    """Weights of an attention module, by name, against its hidden states. Raises TypeError."""
    for name, weight in weights.items():
        if weight is not None and weight.dtype != dtype:
            raise TypeError(
                f"hidden states are {dtype} but {name} is {weight.dtype}: cast the model to one dtype (autocast is not supported)"
            )


def find_attention(model: nn.Module) -> list[tuple[str, nn.Module, models.Architecture]]:
    """The attention modules of a model; refuses a model that has none or has others, or recurrent layers, beside them."""
    recurrent = sorted({type(module).__name__ for module in model.modules() if models.is_recurrent(module)})
    if recurrent:
        raise PreflightError(f"{type(model).__name__} has {', '.join(recurrent)}, {RECURRENT}")
    found, strangers = [], []
    for name, module in model.named_modules():
        architecture = models.of_attention(type(module))
        if architecture is not None:
            found.append((name, module, architecture))
        elif type(module).__name__.endswith("Attention"):
            strangers.append(type(module).__name__)
    if strangers or not found:
        what = f"has {', '.join(sorted(set(strangers)))}" if strangers else "has no attention module known here"
        raise PreflightError(f"{type(model).__name__} {what}: served attention classes are {models.served()}")
    return found


def check_engine(engine, sp_size: int, largest_parameter: int) -> None:
    """A DeepSpeed engine: precision, and settings under which gradients of a sharded sequence would be scaled wrong."""
    if engine.fp16_enabled():
        check_dtype(torch.float16)
    check_experts(engine.module)
    if engine.torch_autocast_enabled():
        raise PreflightError("torch_autocast is not supported: use bf16 or fp32 weights")
    if engine.sequence_parallel_size != sp_size:
        raise PreflightError(
            f"the engine was made with sequence-parallel size {engine.sequence_parallel_size}, this handle has {sp_size}: "
            "pass mpu=handle.mpu to deepspeed.initialize"
        )
    if engine.zero_optimization_stage() >= 2:
        check_shared_parameters(engine.module, f"ZeRO-{engine.zero_optimization_stage()}", "zero_stage 0 or 1")
    zero = engine._config.zero_config
    if sp_size > 1:
        factor = engine._config.gradient_predivide_factor
        if factor != 1.0:
            raise PreflightError(f"gradient_predivide_factor={factor} under sp_size={sp_size}: set it to 1.0")
        if getattr(zero, "zero_quantized_gradients", False):
            raise PreflightError("zero_quantized_gradients is not tested under sequence parallelism: set it to false")
        if engine.zero_optimization_stage() == 3 and not zero.reduce_scatter:
            if not zero.contiguous_gradients or largest_parameter > zero.reduce_bucket_size:
                raise PreflightError(
                    f"ZeRO-3 with reduce_scatter=false, contiguous_gradients={zero.contiguous_gradients}, "
                    f"reduce_bucket_size={int(zero.reduce_bucket_size)} and a parameter of {largest_parameter} elements: DeepSpeed "
                    "scales some gradients by sp_size and others not. Set reduce_scatter=true"
                )


def check_experts(model: nn.Module) -> None:
    """Experts dealt out over ranks, whose gradients no engine or wrapper may average: they are of different experts."""
    dealt = [name for name, p in model.named_parameters() if getattr(p, "expert_ranks", 1) > 1]
    if dealt:
        raise PreflightError(
            f"{dealt[0]} and {len(dealt) - 1} more are experts dealt out over ranks: DeepSpeed and DDP would average gradients of "
            "different experts. Keep every expert in the model and partition parameters by ZeRO-3"
        )


def check_shared_parameters(model: nn.Module, wrapper: str, works: str) -> None:
    """No parameter is of two layers of `upipe.offload`: each has a backward of its own, and adds to the gradient by itself, of which
    the wrapper expects one a backward."""
    owners: dict[int, str] = {}
    for name, layer in model.named_modules():
        for part, p in layer.named_parameters() if hasattr(layer, "_checkpointing") else ():
            first = owners.setdefault(id(p), name)
            if first != name:
                raise PreflightError(
                    f"{part} of {name} is that of {first} too, and both are checkpointed by upipe.offload: {wrapper} takes one gradient a "
                    f"backward of a parameter and would get two. Use offload: none with checkpointing: none or non-reentrant, or {works}"
                )


def check_wrapper(model: nn.Module) -> None:
    """DistributedDataParallel or fully_shard around the model: gradients must be reduced over all ranks."""
    check_experts(model)
    if isinstance(model, DistributedDataParallel):
        check_shared_parameters(model, "DistributedDataParallel", "DeepSpeed's ZeRO 0 or 1")
    world = dist.get_world_size()
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_world_size(model.process_group)
    else:
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        ranks = min((mesh.size() for mesh in meshes), default=1)
    if ranks != world:
        raise PreflightError(
            f"{type(model).__name__} reduces gradients over {ranks} ranks, but the shards of a sequence and its replicas are on "
            f"{world}: give it a mesh or group of all of them"
        )


def live_layers(ds_config: dict, layer_parameters: int) -> float | None:
    """How many decoder layers ZeRO-3 may keep gathered at once (`stage3_max_live_parameters`), or None without ZeRO-3."""
    zero = ds_config.get("zero_optimization", {}) if isinstance(ds_config, dict) else {}
    if zero.get("stage") != 3:
        return None
    live = zero.get("stage3_max_live_parameters", 1e9)
    return float(live) / layer_parameters if live != "auto" else None


def numel(parameter: torch.Tensor) -> int:
    """Elements of a parameter, also of one that ZeRO-3 has partitioned."""
    return getattr(parameter, "ds_numel", parameter.numel())


def warn_of_allocator(environment=os.environ) -> bool:
    """Say so where torch's allocator has fixed segments: lengths that change, or buffers of several GiB, leave holes between them.
    Returns whether it did."""
    settings = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        return False
    logger.warning(
        "PYTORCH_CUDA_ALLOC_CONF=%r is without expandable_segments:True: at long lengths fragments may take several GiB of the device; "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the run starts",
        environment.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    )  # fmt: skip
    return True
