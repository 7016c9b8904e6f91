"""Bytes that attention sends to other ranks, counted at torch's own collectives, so that any library's are.

Counted: all-to-alls, point-to-point sends, and all-gathers of functional collectives, which is what the methods of sharing attention
use (`upipe.methods`). Not counted: what ZeRO and the loss use, reductions, broadcasts and the other all-gathers (of positions too).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Counts while inside, forward and backward.

        with Traffic() as traffic:
            step()
        traffic.sent

    What autograd runs counts too. It adds Python's time to every operator: not for steps whose time in milliseconds matters.

    Attributes:
        sent: bytes that this rank sent to others; what it kept of an all-to-all is not among them.
        messages: collectives and sends, over groups of two ranks and more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.messages = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            # It has its turn first, and what it calls on local tensors is seen here.
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "deepspeed::dim_zero_all_to_all":
            # One operator, inside of which nothing is seen.
            given = self._named(func, args, kwargs)
            self._count("all_to_all_single", True, given | {"input_split_sizes": None})
        elif name.startswith(("c10d::", "_c10d_functional::")):
            self._count(name.rpartition("::")[2], name.startswith("_"), self._named(func, args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _named(func, args: tuple, kwargs: dict) -> dict[str, Any]:
        return dict(zip((a.name for a in func._schema.arguments), args)) | kwargs

    def _count(self, op: str, functional: bool, given: dict[str, Any]) -> None:
        if functional:
            group = _resolve_process_group(given["group_name"]) if "group_name" in given else None
        else:
            group = dist.ProcessGroup.unbox(given["process_group"]) if "process_group" in given else None
        if group is None or group.size() < 2:
            return
        ranks, own = group.size(), group.rank()
        if op in ("alltoall_base_", "all_to_all_single"):
            tensor: Tensor = given["input"]
            sizes = given["input_split_sizes"]
            kept = tensor.nbytes // ranks if not sizes else sizes[own] * tensor.nbytes // max(1, tensor.shape[0])
            sent = tensor.nbytes - kept
        elif op == "send":
            sent = sum(tensor.nbytes for tensor in given["tensors"])
        elif op == "all_gather_into_tensor" and functional:
            sent = (ranks - 1) * given["input"].nbytes
        else:
            return
        self.sent += sent
        self.messages += 1
