"""DeepSpeed's ALST stack on a Hugging Face model, put together as its own documentation does, around one of our kernels.

From deepspeed 0.19.8 (Arctic Long Sequence Training, arXiv 2506.13996):
  attention   UlyssesSPAttentionHF; with one rank it does nothing, and the kernel stands in the plain module
  MLP         TiledMLP, patched over the model's MLP as its docstring shows: ceil(local tokens / hidden size) shards, the
              most of any rank
  loss        TiledFusedLogitsLoss, in shards of 1 GiB of fp32 logits
  saved inputs  non-reentrant checkpointing of transformers under CheckpointHiddenStatesOffload, which came into DeepSpeed in
              place of the recipe's patched reentrant checkpoint function; its defaults, the last input stays on the GPU

Norms, rotation and projections are transformers' own. Two of DeepSpeed's defects are stepped around, since they would change
what is compared: the factor of the loss stands inside the tiles (scaled after them, the head's gradient would not follow), and
shards are as many as torch.chunk makes (more, and the weights' gradients would be lost).

Symbols: B batch, L local tokens, D hidden size, V vocabulary, P ranks, H query heads, K kv heads, d head dim.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments.peer_offload import CountingOffload, disable_checkpointing, enable_checkpointing
from upipe.comm import SequenceParallelGroups
from upipe.kernels import Kernel
from upipe.methods.core import local_attention
from upipe.methods.ulysses import ulysses

LOGITS_SHARD_GIB = 1


class UlyssesAttention:
    """A kernel as the model's attention: under DeepSpeed's UlyssesSPAttentionHF, or with one rank by itself.

    Args:
        model: a Hugging Face causal LM; its attention modules stay as they are and find this by its name in their config.
        groups: of the ranks that share a sequence.
        kernel: called at every attention for the kernel to use.
    """

    def __init__(self, model: nn.Module, groups: SequenceParallelGroups, kernel: Callable[[], Kernel]) -> None:
        config = model.config

        def core(module, q, k, v, attention_mask, scaling, **kwargs):
            return local_attention(*(t.transpose(1, 2) for t in (q, k, v)), kernel(), scaling), None

        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        core = ulysses(core, groups.sp_group, 1, *heads, config.num_hidden_layers)
        self.config, self.before = config, config._attn_implementation
        self.name = f"stack_{os.urandom(4).hex()}"
        ALL_ATTENTION_FUNCTIONS[self.name] = core
        config._attn_implementation = self.name

    def remove(self) -> None:
        self.config._attn_implementation = self.before
        del ALL_ATTENTION_FUNCTIONS[self.name]


class Alst:
    """The stack on a model. Made by `apply_alst`.

    Attributes:
        offload: DeepSpeed's, or None.
    """

    def __init__(self, model: nn.Module, attention: UlyssesAttention, patched: list[nn.Module], offload: CountingOffload | None):
        self.model, self.attention, self.offload, self._patched = model, attention, offload, patched

    def context(self) -> AbstractContextManager:
        """To be entered around a forward and its backward."""
        return nullcontext() if self.offload is None else self.offload

    def remove(self) -> None:
        """Make the model plain again."""
        for module in self._patched:
            module.__class__ = type(module).__mro__[1]
        self._patched = []
        self.attention.remove()
        disable_checkpointing(self.model)


def apply_alst(
    model: nn.Module, groups: SequenceParallelGroups, kernel: Callable[[], Kernel], *, offload: bool = True, tiles: bool = True
) -> Alst:
    """Put the ALST stack on a Llama or Qwen model, before `deepspeed.initialize`.

    The model's forward then takes `shift_labels` [B, L] and `loss_factor`, a number that token losses are multiplied by, and
    returns as `loss` the sum over this rank's valid tokens, 0-d fp32. Its gradients arise in the forward pass.

    Args:
        groups, kernel: as in `UlyssesAttention`.
        offload: send the layers' saved inputs to pinned host memory.
        tiles: tile MLP and loss; without, the loss is that of all logits at once in fp32, as transformers computes it.
    """
    attention = UlyssesAttention(model, groups, kernel)
    patched = []
    for layer in model.model.layers if tiles else ():
        base = type(layer.mlp)
        layer.mlp.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, "forward": _mlp_forward(base.forward)})
        patched.append(layer.mlp)
    base = type(model)
    model.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, "forward": _lm_forward(tiles)})
    patched.append(model)
    enable_checkpointing(model)
    return Alst(model, attention, patched, CountingOffload() if offload else None)


def chunks(rows: int, wanted: int) -> int:
    """How many pieces torch.chunk makes of so many rows where `wanted` are asked for."""
    return math.ceil(rows / math.ceil(rows / wanted))


def _mlp_forward(plain: Callable) -> Callable:
    def forward(self, x):
        rows = x.shape[-2]
        shards = torch.tensor(math.ceil(rows / x.shape[-1]), device=x.device)
        # As in the docstring of TiledMLP: all ranks take the most that any of them needs.
        dist.all_reduce(shards, op=dist.ReduceOp.MAX)
        params = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(plain, self, x, chunks(rows, int(shards.item())), params)

    return forward


def _lm_forward(tiles: bool) -> Callable:
    def forward(self, input_ids, position_ids, shift_labels, loss_factor, use_cache=False):
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).last_hidden_state

        def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """x [T, D], y [T] -> 0-d fp32."""
            logits = model.lm_head(x).float()
            return cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1), reduction="sum") * loss_factor

        if not tiles:
            return CausalLMOutputWithPast(loss=loss_of(self, hidden, shift_labels))
        rows = hidden.shape[0] * hidden.shape[1]
        wanted = math.ceil(rows * self.config.vocab_size * 4 / (LOGITS_SHARD_GIB << 30))
        loss = TiledFusedLogitsLoss.apply(
            loss_of, self, hidden, shift_labels, None, chunks(rows, wanted), [self.lm_head.weight], "sum"
        )
        return CausalLMOutputWithPast(loss=loss)

    return forward
