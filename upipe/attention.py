"""`UPipeAttentionHF`: for code written for DeepSpeed's `UlyssesSPAttentionHF`, switched by one name."""

from __future__ import annotations

import logging
from typing import Any

from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from upipe import models, preflight
from upipe.apply import Sharding, UPipeConfig, apply, subclass
from upipe.comm import SequenceParallelGroups, init_distributed
from upipe.preflight import PreflightError

logger = logging.getLogger(__name__)


class UPipeAttentionHF(UlyssesSPAttentionHF):
    """DeepSpeed's entry point to sequence-parallel attention, with UPipe behind it. Not to be constructed.

    DeepSpeed's class is handed q, k and v already projected for all heads, which is where the memory goes; UPipe
    replaces the whole attention module instead, so only the name and the signature are shared.
    """

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
        heads_per_stage: int | None = None,
        kernel: str = "auto",
    ) -> SequenceParallelGroups | None:
        """Put UPipe on a model, or on an architecture before any model of it exists.

        With a model object (a torch.nn.Module) that model alone is patched, as by `upipe.apply`. With a name, a path, or
        an object that only carries a `.config`, the attention and decoder classes of that architecture are patched for
        the whole process, every model of them included, until `mpu.remove()`.

        Args:
            model_name_or_path: model, name or path.
            core_attn_implementation: checked as DeepSpeed checks it, against the model's own; which attention kernel
                runs is `kernel`'s to say.
            sequence_parallel_size: with 1 nothing is done and None comes back, as in DeepSpeed (`upipe.apply` serves 1).
            micro_batch_size, seq_length, seq_length_is_variable, max_length: accepted; any batch and length is served.
            disable_in_eval: in eval mode leave the model plain (whole sequences on every rank).
            heads_per_stage, kernel: see `upipe.UPipeConfig`.

        Returns:
            The mpu for `deepspeed.initialize`, with `remove()` to undo everything.

        Raises:
            PreflightError (a ValueError): before groups are made or anything is changed.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length")
        config = UPipeConfig(sequence_parallel_size, heads_per_stage, kernel, shard_eval=not disable_in_eval)
        loaded = getattr(model_name_or_path, "config", None)
        _check_core(core_attn_implementation, loaded)
        if isinstance(model_name_or_path, nn.Module):
            handle = apply(model_name_or_path, config)
            handle.mpu.remove = handle.remove
            return handle.mpu
        hf_config = loaded if loaded is not None else AutoConfig.from_pretrained(model_name_or_path)
        return _patch_classes(hf_config.get_text_config(), config)


def _check_core(name: str, hf_config) -> None:
    own = getattr(hf_config, "_attn_implementation", None)
    if own is not None and own != name:
        raise PreflightError(
            f"core_attn_implementation={name!r} does not match model config attn_implementation={own!r}: give both the same"
        )
    if "eager" in name:
        raise PreflightError(f"core_attn_implementation={name!r} builds a tokens x tokens mask: use sdpa or a flash attention")
    if name not in ALL_ATTENTION_FUNCTIONS and "/" not in name:
        raise PreflightError(f"core_attn_implementation={name!r} is unknown: one of {sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())}")


def _patch_classes(hf_config, config: UPipeConfig) -> SequenceParallelGroups:
    init_distributed()
    preflight.check_groups(config.sp_size)
    preflight.check_kernel_name(config.kernel)
    preflight.check_config(hf_config)
    preflight.check_schedule(
        hf_config.num_attention_heads, hf_config.num_key_value_heads, config.sp_size, config.heads_per_stage
    )
    architecture = models.of_model_type(hf_config.model_type)
    classes = architecture.classes()
    if any("_upipe" in vars(c) for c in classes):
        raise PreflightError(f"UPipe is on {architecture.attention_name} already: call remove() on the mpu it returned")
    sharding = Sharding(config, SequenceParallelGroups(config.sp_size))
    saved = []
    for base in classes:
        patch = vars(subclass(base, sharding, architecture))
        for name in ("_upipe", "__call__", "forward"):
            if name in patch:
                saved.append((base, name, vars(base).get(name)))
                setattr(base, name, patch[name])

    def remove() -> None:
        for base, name, before in saved:
            if before is None:
                delattr(base, name)
            else:
                setattr(base, name, before)
        saved.clear()
        sharding.groups.destroy()

    sharding.groups.remove = remove
    return sharding.groups
