"""Entries for code written for DeepSpeed's sequence-parallel classes, switched by one name.

`UPipeAttentionHF` for `UlyssesSPAttentionHF` (Hugging Face models); `UPipeDistributedAttention` for
`DistributedAttention` (models that hand over q, k and v, as Megatron's do).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from upipe import models, preflight
from upipe.apply import Sharding, UPipeConfig, apply, subclass
from upipe.comm import SequenceParallelGroups, init_distributed, node_ranks
from upipe.heads import to_heads, to_tokens
from upipe.preflight import PreflightError


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
        ring_degree: int = 1,
    ) -> SequenceParallelGroups | None:
        """Put UPipe on a model, or on an architecture before any model of it exists.

        With a model object (a torch.nn.Module) that model alone is patched, as by `upipe.apply`. With a name, a path, or
        an object that only carries a `.config`, the attention and decoder classes of that architecture are patched for
        the whole process, every model of them included, until `mpu.remove()`.

        Args:
            model_name_or_path: model, configuration, name or path.
            core_attn_implementation: checked as DeepSpeed checks it, against the model's own; which attention kernel
                runs is `kernel`'s to say.
            sequence_parallel_size: with 1 nothing is done and None comes back, as in DeepSpeed (`upipe.apply` serves 1).
            micro_batch_size, seq_length, seq_length_is_variable, max_length: accepted; any batch and length is served.
            disable_in_eval: in eval mode leave the model plain (whole sequences on every rank).
            heads_per_stage, kernel, ring_degree: see `upipe.UPipeConfig`. A ring's shards are not contiguous: take them from
                `upipe.loader.ShardedLoader(loader, mpu, device)`; those of DeepSpeed's adapter are refused.

        Returns:
            The mpu for `deepspeed.initialize`, with `remove()` to undo everything.

        Raises:
            PreflightError (a ValueError): before groups are made or anything is changed.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length")
        config = UPipeConfig(sequence_parallel_size, heads_per_stage, kernel, ring_degree, shard_eval=not disable_in_eval)
        is_config = isinstance(model_name_or_path, PretrainedConfig)
        loaded = model_name_or_path if is_config else getattr(model_name_or_path, "config", None)
        if loaded is None and not isinstance(model_name_or_path, (str, os.PathLike)):
            raise PreflightError(f"model_name_or_path is {model_name_or_path!r}: give a model, a configuration, a name or a path")
        _check_core(core_attn_implementation, None if is_config else loaded)
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
    preflight.check_groups(config.sp_size, config.ring_degree, node_ranks())
    preflight.check_kernel_name(config.kernel)
    preflight.check_kernel_blocks(config)
    preflight.check_config(hf_config)
    preflight.check_schedule(
        hf_config.num_attention_heads, hf_config.num_key_value_heads, config.ulysses_degree, config.heads_per_stage
    )
    architecture = models.of_model_type(hf_config.model_type)
    classes = architecture.classes()
    if any("_upipe" in vars(c) for c in classes):
        raise PreflightError(f"UPipe is on {architecture.attention_name} already: call remove() on the mpu it returned")
    sharding = Sharding(config, SequenceParallelGroups(config.sp_size, config.ring_degree))
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


class UPipeDistributedAttention(DistributedAttention):
    """DeepSpeed's `DistributedAttention`, walking the heads in groups. For models that hand over q, k and v.

    The projections of all heads exist before this module is called and stay, so only what attention itself adds is
    saved: the gathered q, k, v and output of one group at a time, in forward and (recomputed) in backward. Models whose
    whole attention module can be replaced save more with `upipe.apply`. Any numbers of heads are served.

    Args:
        local_attention: called as local_attention(q, k, v, *args, **kwargs) with the whole sequence of a group's heads, q
            [B, S, h, d] (or [S, B, h, d], as given), k and v with h / (H/K) heads; must treat heads independently.
        sequence_process_group: the sequence-parallel group.
        heads_per_stage: query heads at a time over all ranks, see `upipe.UPipeConfig`.
        scatter_idx, gather_idx: DeepSpeed's defaults, 2 and 0 or 1; anything else is refused.

    Raises:
        PreflightError: sp_stream or another layout was asked for, or the heads do not fit `heads_per_stage`.
    """

    def __init__(
        self, local_attention, sequence_process_group, scatter_idx: int = 2, gather_idx: int = 0, sp_stream=None,
        num_kv_heads: int | None = None, heads_per_stage: int | None = None,
    ) -> None:
        if sp_stream is not None:
            raise PreflightError("sp_stream is not served: leave it None")
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise PreflightError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are scattered (2) and tokens gathered (0 or 1)"
            )
        super().__init__(local_attention, sequence_process_group, scatter_idx, gather_idx, None, num_kv_heads)
        self.heads_per_stage = heads_per_stage

    def forward(self, query, key, value, batch_dim_idx: int, rotary_pos_emb=None, *args, **kwargs) -> torch.Tensor:
        """query: [B, L, H, d] with batch_dim_idx 0, [L, B, H, d] with 1; key, value: the same with K heads.

        Returns:
            This rank's tokens of the output, in query's shape.
        """
        if rotary_pos_emb is not None:
            raise PreflightError("rotary_pos_emb is not served: rotate q and k before")
        if batch_dim_idx not in (0, 1):
            raise PreflightError(f"batch_dim_idx={batch_dim_idx} must be 0 or 1")
        shapes = [tuple(t.shape) for t in (query, key, value)]
        if {len(s) for s in shapes} != {4} or shapes[1] != shapes[2] or shapes[0][:2] != shapes[1][:2]:
            raise PreflightError(
                f"query, key, value have shapes {shapes}: they must be 4-D, the same tokens and batch, and key and value alike"
            )
        schedule = preflight.check_schedule(query.shape[2], key.shape[2], dist.get_world_size(self.spg), self.heads_per_stage)
        rank = dist.get_rank(self.spg)
        q, k, v = (t.transpose(0, 1) if batch_dim_idx == 0 else t for t in (query, key, value))
        resident: dict[int, tuple] = {}
        pieces: dict[int, torch.Tensor] = {}

        def group(stage: int, firsts: dict[int, int], q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
            """Attention of one stage: [L, B, H, d] -> this rank's tokens of the stage's heads, side by side.

            firsts: first kv head of each arrival that is here; kv: k and v of each, in that order.
            """
            row = schedule.table[stage]
            gathered = to_heads(q, [e.q_heads for e in row], rank, self.spg)
            parts, held = [], dict(zip(firsts, zip(kv[::2], kv[1::2])))
            for call in row[rank].calls:
                first, kv_first = call.q_first - row[rank].q_heads.start, call.kv_first - firsts[call.arrival]
                inputs = [gathered[:, :, first : first + call.q_count]]
                inputs += [t[:, :, kv_first : kv_first + call.kv_count] for t in held[call.arrival]]
                inputs = [t.transpose(0, 1) if batch_dim_idx == 0 else t for t in inputs]
                out = self.local_attn(*inputs, *args, **kwargs)
                if not isinstance(out, torch.Tensor) or out.shape[:3] != inputs[0].shape[:3]:
                    what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
                    raise PreflightError(
                        f"local_attention returned {what} for a query of shape {tuple(inputs[0].shape)}: give a tensor like it"
                    )
                parts.append(out.transpose(0, 1) if batch_dim_idx == 0 else out)
            own = torch.cat(parts, dim=2) if parts else gathered
            # Every rank must walk back through every exchange, also those that brought it nothing.
            own = own + sum(t.sum() for t in kv if t.shape[2] == 0)
            return to_tokens(own, [len(e.q_heads) for e in row], self.spg)

        for stage, row in enumerate(schedule.table):
            arriving = [e.kv_arriving for e in row]
            if any(arriving):
                resident[stage] = (arriving[rank].start, *(to_heads(t, arriving, rank, self.spg) for t in (k, v)))
            firsts = {arrived: entry[0] for arrived, entry in resident.items()}
            flat = [t for entry in resident.values() for t in entry[1:]]
            # Reentrant: recomputes whole, so that every rank repeats every exchange in the same order.
            got = checkpoint(group, stage, firsts, q, *flat, use_reentrant=True)
            done = 0
            for entry in row:
                for head in entry.q_heads:
                    pieces[head] = got[:, :, done]
                    done += 1
            for arrived in [a for a in resident if schedule.is_over(rank, a, stage)]:
                del resident[arrived]
        out = torch.stack([pieces[h] for h in range(schedule.heads)], dim=2)
        return out.transpose(0, 1) if batch_dim_idx == 0 else out
