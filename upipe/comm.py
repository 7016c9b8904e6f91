"""Process groups of a sequence-parallel model, the mpu that DeepSpeed asks for them, and the uneven all-to-all.

Ranks of a sequence-parallel group are neighbours: with N ranks a group, world rank r is sequence-parallel rank r % N
of data-parallel rank r // N. Inside it Ulysses ranks are neighbours too (`zigzag.Mesh`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from upipe import zigzag

logger = logging.getLogger(__name__)


def init_distributed() -> None:
    """Start torch.distributed and deepspeed.comm from the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    NCCL where there is a GPU, gloo elsewhere. Without a launcher it makes a world of one process. Does nothing where
    both are started already. On CPU it keeps DeepSpeed from compiling its shared-memory extension, which nothing here
    uses and whose build, if killed, leaves a lock on which every later run waits forever.
    """
    import deepspeed

    gpu = torch.cuda.is_available()
    if not gpu:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        backend = "nccl" if gpu else "gloo"
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def node_ranks() -> int | None:
    """Ranks of a node as its launcher says: LOCAL_WORLD_SIZE (torchrun, `upipe --nproc`, `launch.slurm_environment`) or LOCAL_SIZE
    (deepspeed). None where none says."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(given) if given else None


class SequenceParallelGroups:
    """The groups of one sharded model, and the mpu to hand to `deepspeed.initialize(mpu=...)`.

    It answers under the names of DeepSpeed's `parallel_state_sp`, but belongs to one model, so several models and
    sequence-parallel sizes can live in one process. Unlike DeepSpeed's it does not call sequence parallelism model
    parallelism: the model-parallel group holds this rank alone, which keeps universal checkpoints, gradient norms and
    clipping right in every ZeRO stage.

    Args:
        sp_size: ranks that share a sequence, a divisor of the world size (checked by preflight).
        ring_degree: R, a divisor of sp_size; P = sp_size / R is the Ulysses degree.

    Attributes:
        sp_group: all ranks of the sequence; what DeepSpeed knows as sequence parallel.
        ulysses_group, ring_group: of the all-to-all, and of `ring.RingAttention`: None with R = 1, where Ulysses has sp_group.
    """

    def __init__(self, sp_size: int, ring_degree: int = 1) -> None:
        self.sp_size, self.ring_size, self.ulysses_size = sp_size, ring_degree, sp_size // ring_degree
        self.world_size = dist.get_world_size()
        self.dp_size = self.world_size // sp_size
        rank = dist.get_rank()
        mesh = zigzag.Mesh(self.world_size, self.ring_size, self.ulysses_size)
        self.sp_rank = rank % sp_size
        self.dp_rank, self.ring_rank, self.ulysses_rank = mesh.place(rank)
        self._owned: list[dist.ProcessGroup] = []
        self.sp_group = self.ulysses_group = self._own(mesh.sequence_groups, rank)
        self.ring_group = None
        if ring_degree > 1:
            self.ulysses_group = self._own(mesh.ulysses_groups, rank)
            self.ring_group = self._own(mesh.ring_groups, rank)
        # Why a step on this rank did not end, where one did not; and whether a backward is under way.
        self._failed: str | None = None
        self._in_backward = False
        self.model_group = self._own([range(r, r + 1) for r in range(self.world_size)], rank)
        self.world_group = dist.group.WORLD

    def positions(self, local_tokens: int) -> tuple[range, ...]:
        """Where the sequence has the tokens of this rank, in their order, if every rank has so many."""
        return zigzag.shards(local_tokens * self.sp_size, self.ring_size, self.ulysses_size, self.ring_rank, self.ulysses_rank)

    def gather(self, local: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The sequence of which every rank has a shard, of one shape, in its own order along `dim`. Without a graph."""
        if self.sp_size == 1:
            return local
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.sp_size)]
        dist.all_gather(shards, local.contiguous(), group=self.sp_group)
        whole = torch.cat(shards, dim)
        if self.ring_size == 1:
            return whole
        parts = zigzag.restored(whole.shape[dim], self.ring_size, self.ulysses_size)
        return torch.cat([whole.narrow(dim, part.start, len(part)) for part in parts], dim)

    def _own(self, ranks_of_groups: Iterable[Sequence[int]], rank: int) -> dist.ProcessGroup:
        mine = None
        for ranks in ranks_of_groups:
            group = dist.new_group(list(ranks), pg_options=_options())
            if rank in ranks:
                mine = group
        self._owned.append(mine)
        return mine

    def note_failure(self, error: Exception) -> None:
        """A step failed on this rank, at a place that other ranks may have passed or not reached."""
        if self.sp_size > 1 and self._failed is None:
            self._failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning(
                "rank %d: a step failed (%s); ranks of its sequence that did not fail too wait for it until their group's timeout",
                dist.get_rank(), self._failed,
            )

    def watch_backward(self, loss: torch.Tensor) -> None:
        """Note from where the backward of a loss begins until the whole of it has ended."""
        if self.sp_size == 1 or loss.grad_fn is None:
            return

        def ended() -> None:
            self._in_backward = False

        def begins(grads: tuple) -> None:
            self._in_backward = True
            # Called where the backward that runs now ends without an error.
            torch.autograd.Variable._execution_engine.queue_callback(ended)

        loss.grad_fn.register_prehook(begins)

    @property
    def failure(self) -> str | None:
        """Why there can be no further step, in words: this rank left one half way, and its next exchange with the others would be
        taken for one of that step. None where all ended."""
        # Within a backward a forward is that of a checkpointed module that runs again.
        half_way = self._in_backward and torch._C._current_graph_task_id() == -1
        what = self._failed or ("its backward did not end" if half_way else None)
        if what is None:
            return None
        return (
            f"the last step failed on this rank ({what}), and its exchanges with the other {self.sp_size - 1} ranks of its sequence are "
            "left half done: end all ranks and go on from a checkpoint, or on every rank remove this handle and apply again"
        )

    @property
    def closed(self) -> bool:
        """Whether the groups were given back."""
        return not self._owned

    def destroy(self) -> None:
        """Give the groups back. The object answers no more questions about them afterwards.

        DeepSpeed keeps the last mpu it was given for the whole process, and an engine made later without one would take
        it over, sequence-parallel size and all; so it is told to forget this one.
        """
        from deepspeed.utils import groups

        if groups.mpu is self:
            groups.mpu = None
        while self._owned:
            dist.destroy_process_group(self._owned.pop())

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Present because DeepSpeed knows a sequence-parallel mpu by this name. The groups exist already."""
        if sequence_parallel_size != self.sp_size:
            raise ValueError(f"these groups were made for sp_size={self.sp_size}, not {sequence_parallel_size}")

    def get_sequence_parallel_group(self):
        return self.sp_group

    def get_sequence_parallel_world_size(self) -> int:
        return self.sp_size

    def get_sequence_parallel_rank(self) -> int:
        return self.sp_rank

    def get_sequence_data_parallel_group(self):
        return self.world_group

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.world_size

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self):
        """All ranks: ZeRO-3 partitions parameters and reduces gradients over the group it gets under this name."""
        return self.world_group

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_model_parallel_group(self):
        return self.model_group

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_group(self):
        return self.model_group

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_rank()


def _options():
    """On NCCL a stream of high priority: an exchange that starts beside an attention kernel then gets the first processors
    that come free, and not those that the kernel leaves at its end."""
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def all_to_all(send: torch.Tensor, send_sizes: list[int], recv_sizes: list[int], group) -> torch.Tensor:
    """Exchange uneven pieces of a flat buffer.

    Args:
        send: 1-D, pieces for ranks 0..P-1 end to end.
        send_sizes, recv_sizes: elements of each piece; zeros are allowed.
        group: a process group of P ranks; with P = 1 `send` itself comes back.

    Returns:
        1-D, pieces from ranks 0..P-1 end to end.
    """
    if len(send_sizes) == 1:
        return send
    recv = send.new_empty(sum(recv_sizes))
    exchange(send, recv, send_sizes, recv_sizes, group)
    return recv


def exchange(send: torch.Tensor, recv: torch.Tensor, send_sizes: list[int], recv_sizes: list[int], group, asynchronous: bool = False):
    """Exchange uneven pieces of flat buffers of the caller's.

    Args:
        send, recv: 1-D and apart in memory: pieces for, and from, ranks 0..P-1 end to end; P > 1.
        send_sizes, recv_sizes: elements of each piece; zeros are allowed.
        group: a process group of P ranks.
        asynchronous: only begin. Both buffers must be left alone until the result's `wait()`.

    Returns:
        The work to wait for, None where it is done (on a GPU: where the current stream waits for it already).
    """
    return dist.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group, async_op=asynchronous)
