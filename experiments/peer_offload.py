"""Offload of layers' saved inputs by transformers and by DeepSpeed, for `experiments.stack` beside `upipe.offload`.

  transformers  its checkpointing with `offload=True`: torch's save_on_cpu around each layer. Copies run on the compute stream, into
                pinned memory that torch's host allocator rounds up to powers of two; every layer's input goes.
  deepspeed     CheckpointHiddenStatesOffload of deepspeed 0.19.8 around transformers' checkpointing, with its defaults: streams of its
                own, and the last input stays on the GPU. Without a GPU it moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils

PEERS = ("transformers", "deepspeed")


class CountingOffload(CheckpointHiddenStatesOffload):
    """DeepSpeed's offload, its counts of the last step kept beyond the end of its context."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, int] = {}

    def __exit__(self, *args):
        self.last = {
            "bytes_to_host": self.stats.offloaded_bytes, "bytes_to_device": self.stats.restored_bytes,
            "calls": self.stats.marked_tensors, "skipped": self.stats.skipped_marked_tensors,
        }
        return super().__exit__(*args)


class CountingSaveOnCpu(save_on_cpu):
    """torch's, with the bytes of what it packs and unpacks added to `counts`. Without a GPU nothing is pinned, and nothing copied."""

    def __init__(self, counts: dict[str, int], pin_memory: bool = False, device_type: str = "cuda") -> None:
        super().__init__(pin_memory and torch.cuda.is_available(), device_type)
        pack, unpack = self.pack_hook, self.unpack_hook

        def counted_pack(tensor: torch.Tensor):
            counts["bytes_to_host"] += tensor.nbytes * tensor.is_cuda
            counts["calls"] += 1
            return pack(tensor)

        def counted_unpack(packed):
            tensor = unpack(packed)
            counts["bytes_to_device"] += tensor.nbytes * tensor.is_cuda
            return tensor

        self.pack_hook, self.unpack_hook = counted_pack, counted_unpack


def enable_checkpointing(model: nn.Module, contexts: Callable | None = None, **options: Any) -> None:
    """transformers' own checkpointing, by its name before and since 5.24.

    Args:
        contexts: the contexts of a layer's first forward and of its recompute, if it needs any.
        options: of transformers, such as offload=True.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False} | ({} if contexts is None else {"context_fn": contexts}), **options)


def disable_checkpointing(model: nn.Module) -> None:
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


class PeerOffload:
    """One of `PEERS` on a model with transformers' layers. Put on before `deepspeed.initialize`.

    Args:
        contexts: as in `enable_checkpointing`.

    Attributes:
        last: bytes_to_host, bytes_to_device and calls of the last step.
    """

    def __init__(self, model: nn.Module, peer: str, contexts: Callable | None = None) -> None:
        if peer not in PEERS:
            raise ValueError(f"peer={peer!r}: use {' or '.join(PEERS)}")
        self.model, self._deepspeed = model, CountingOffload() if peer == "deepspeed" else None
        self._counts: dict[str, int] = {}
        enable_checkpointing(model, contexts, **({} if peer == "deepspeed" else {"offload": True}))

    @property
    def last(self) -> dict[str, int]:
        return self._counts if self._deepspeed is None else self._deepspeed.last

    def context(self) -> AbstractContextManager:
        """To be entered around a forward and its backward."""
        if self._deepspeed is not None:
            return self._deepspeed
        self._counts = dict.fromkeys(("bytes_to_host", "bytes_to_device", "calls"), 0)
        return mock.patch.object(modeling_utils, "save_on_cpu", partial(CountingSaveOnCpu, self._counts))

    def remove(self) -> None:
        """Make the model plain again."""
        disable_checkpointing(self.model)
