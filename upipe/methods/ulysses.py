"""DeepSpeed's own Ulysses for Hugging Face models (deepspeed 0.19.8, `UlyssesSPAttentionHF`) around an attention of ours.

Shapes: B batch, L local tokens, S = P*L, H query heads, K kv heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError where DeepSpeed's class cannot share these heads, naming the ranks that it can."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(ranks):
        works = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise ValueError(
            f"method=ulysses with {heads} query and {kv_heads} kv heads on {ranks} ranks: DeepSpeed's class wants both shared "
            f"evenly, or kv heads repeated evenly; use {works} ranks, or method=usp, which takes any"
        )


def ulysses(core: Callable, group, batch: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> Callable:
    """DeepSpeed's class as transformers calls an attention function, `core` inside of it; with one rank it does nothing, and
    `core` itself comes back. core(module, q [B, h, S, d], k, v, attention_mask, scaling=, **kwargs) -> [B, S, h, d], None."""
    if dist.get_world_size(group) == 1:
        return core
    return UlyssesSPAttentionHF(
        attn=core,
        batch_size=batch,
        attn_head_count=heads,
        attn_head_size=head_dim,
        kv_head_count=kv_heads,
        num_hidden_layers=layers,
        process_group=group,
        seq_length_is_variable=True,
    )


class Ulysses:
    """DeepSpeed's attention for the modules of one model, one object of its class a batch size and shape of heads.

    Args:
        core: as in `ulysses`; kwargs have the gathered position_ids.
    """

    def __init__(self, core: Callable, group, layers: int) -> None:
        self.core, self.group, self.layers = core, group, layers
        self._made: dict[tuple, Callable] = {}

    def attend(self, module, q, k, v, position_ids) -> torch.Tensor:
        """q [B, L, H, d], k and v [B, L, K, d] -> [B, L, H, d]."""
        B, _, H, d = q.shape
        key = B, H, k.shape[2], d
        if key not in self._made:
            self._made[key] = ulysses(self.core, self.group, B, H, k.shape[2], d, self.layers)
        groups = getattr(module, "num_key_value_groups", None)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, _ = self._made[key](module, q, k, v, None, scaling=module.scaling, position_ids=position_ids)
        if groups is not None:
            # Where it repeats kv heads DeepSpeed's class changes the module's.
            module.num_key_value_groups = groups
        return out.reshape(B, -1, H, d)
