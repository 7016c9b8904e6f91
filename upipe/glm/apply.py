"""Share a GLM model's sequences over ranks under DeepSpeed: what `upipe.apply` does for models whose attention it replaces.

The model brings its own division of tokens, heads and experts, so nothing is patched: it is given a runtime whose split is the
ranks of a sequence. Groups, loader, loss and checks are `upipe.apply.Handle`'s.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch.distributed as dist

from upipe import preflight
from upipe.apply import Handle, Sharding, UPipeConfig
from upipe.comm import SequenceParallelGroups, init_distributed, node_ranks
from upipe.glm.context import TokenSplit
from upipe.glm.kda import check_heads
from upipe.glm.moe import ExpertLoad
from upipe.glm.sparse import GlmRuntime
from upipe.preflight import PreflightError

if TYPE_CHECKING:
    from upipe.glm.model import Glm5NextForCausalLM

_OTHERS = {
    "heads_per_stage": "model.glm.kda.heads_per_group says how many KDA heads run together",
    "kernel": "model.glm.kernel and model.glm.kda.kernel name its kernels",
    "kernel_block_tokens": "leave it out",
    "kernel_block_tokens_backward": "leave it out",
    "attention_output": "leave it on the device",
    "attention_output_layers": "leave it out",
    "overlap": "leave it out",
    "dx": "leave it out",
    "shard_eval": "evaluation runs on shards too",
}
"""Settings of the attention block, which this model does not have, and what to do."""


class GlmHandle(Handle):
    """A GLM model whose sequences are shared over ranks. Made by `upipe.apply`; used as its `Handle`."""

    takes_shift_labels = True

    def report(self) -> str:
        """How tokens are shared, and what runs where."""
        lines = [
            f"GLM on {type(self.model).__name__}: {self._layers} layers, sequence parallel {self.mesh} x data parallel {self.dp_size}",
            *(f"{kind}: {what}" for kind, what in self.model.runtime.ran.items()),
            *self._other_reports(),
            *self._notes,
        ]
        return "\n".join(lines)

    def closing_report(self) -> str | None:
        """Which experts tokens chose in training, a line a layer; the shares are those of as many ranks as there are."""
        load, world = self.model.runtime.load, dist.get_world_size()
        ranks = world if self.model.config.n_routed_experts % world == 0 else 1
        return load.report(ranks, dist.group.WORLD) or None

    def remove(self) -> None:
        """Give the process groups back; the model takes whole rows again."""
        self.model.use(GlmRuntime(self.model.runtime.settings, load=self.model.runtime.load))
        super().remove()


def apply_glm(model: Glm5NextForCausalLM, config: UPipeConfig, ds_config: dict | str | None = None) -> GlmHandle:
    """Share the rows of a GLM model over sequence-parallel ranks, in place, for `upipe.apply`.

    Args:
        config: sp_size and ring_degree (ring_degree = sp_size: zigzag, the same causal work for every rank).

    Raises:
        PreflightError: before anything is changed; KDA heads that the ranks do not divide; settings of the attention block.
    """
    from deepspeed.utils import set_z3_leaf_modules

    from upipe.glm.model import LEAVES, check_projections

    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _OTHERS and value != field.default:
            raise PreflightError(f"{field.name}={value!r} with {type(model).__name__}, which has no such block: {_OTHERS[field.name]}")
    init_distributed()
    preflight.check_groups(config.sp_size, config.ring_degree, node_ranks())
    if model.runtime.split.size > 1:
        raise PreflightError("UPipe is on this model already: call remove() on its handle first")
    check_heads(model.config.linear_num_heads, config.sp_size)
    check_projections(model)
    groups = SequenceParallelGroups(config.sp_size, config.ring_degree)
    split = TokenSplit(groups.sp_group, groups.ring_size, groups.ulysses_size, groups.sp_rank)
    model.use(GlmRuntime(model.runtime.settings, split, load=ExpertLoad() if model.runtime.load is None else model.runtime.load))
    set_z3_leaf_modules(model, list(LEAVES))
    layers = model.model.layers
    numel = max(sum(preflight.numel(p) for p in layer.parameters()) for layer in layers)
    handle = GlmHandle(model, Sharding(config, groups), [], len(layers), numel)
    handle._decoder = model.model
    handle.note_config(ds_config)
    return handle
