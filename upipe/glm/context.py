"""Tokens of a sequence over ranks: who holds which, tensors brought into global order and back, documents and their pools.

Symbols: B rows, S tokens of a row over all ranks, L local tokens, P ranks, C channels, k tokens of a pool (`index_kpool`).

A rank holds the tokens that `zigzag.shards` gives it: with a ring of P ranks, runs r and 2P-1-r of 2P equal ones, so that
causal work is the same for all. Everything that has to see the whole sequence is gathered into its true order first, and
all positions are those of the whole row, so documents and pools may lie across any seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from upipe import preflight, zigzag
from upipe.apply import document_offsets
from upipe.kernels import Offsets
from upipe.preflight import PreflightError

INT32_TOKENS = 2**31 - 1


def check_int32(tokens: int) -> None:
    """That token positions fit in int32, as pools are kept and sent.

    Raises:
        PreflightError: they do not.
    """
    if tokens > INT32_TOKENS:
        raise PreflightError(f"a row of {tokens} tokens: selected tokens are int32, so at most {INT32_TOKENS} tokens a row work")


@dataclass(frozen=True)
class TokenSplit:
    """Ranks that share each row, and which of them this is.

    Args:
        group: their process group, in the order of `zigzag.Mesh.sequence_groups`; None for one rank.
        ring, ulysses: their arrangement, ring * ulysses ranks; a group alone makes a ring (zigzag).
        rank: this rank's place in the group.
    """

    group: object = None
    ring: int = 1
    ulysses: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group, ulysses: int = 1) -> TokenSplit:
        """The split over a process group: zigzag over its size / ulysses ring ranks.

        Raises:
            PreflightError: ulysses does not divide the group.
        """
        size = dist.get_world_size(group)
        if size % ulysses:
            works = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise PreflightError(f"ulysses={ulysses} does not divide the {size} ranks of the group: use one of {works}")
        return cls(group, size // ulysses, ulysses, dist.get_rank(group))

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    def held(self, tokens: int, rank: int | None = None) -> tuple[range, ...]:
        """Positions of a rank's tokens (this one's) in a padded row of `tokens` tokens, in its order."""
        ring_rank, ulysses_rank = divmod(self.rank if rank is None else rank, self.ulysses)
        return zigzag.shards(tokens, self.ring, self.ulysses, ring_rank, ulysses_rank)

    def check(self, local: int) -> int:
        """S of a rank's L tokens. Raises PreflightError where no row splits so."""
        tokens = local * self.size
        if zigzag.local_length(tokens, self.ring, self.ulysses) != local:
            raise PreflightError(
                f"{local} tokens a rank on ring={self.ring} x ulysses={self.ulysses} ranks cannot be cut into two equal runs a ring "
                f"rank: pad rows to a multiple of {2 * self.size} tokens"
            )
        return tokens

    def take(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a padded whole, tokens along `dim`."""
        return torch.cat([whole.narrow(dim, part.start, len(part)) for part in self.held(whole.shape[dim])], dim)

    def natural(self, shards: torch.Tensor) -> torch.Tensor:
        """[P, B, L, ...] shards of all ranks -> [B, S, ...] in global order."""
        P, B, L = shards.shape[:3]
        joined = shards.transpose(0, 1).reshape(B, P * L, *shards.shape[3:])
        pieces = zigzag.restored(P * L, self.ring, self.ulysses)
        return joined if len(pieces) == 1 else torch.cat([joined[:, p.start : p.stop] for p in pieces], 1)

    def ranked(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of `natural`."""
        B, S = whole.shape[:2]
        pieces = [piece for rank in range(self.size) for piece in self.held(S, rank)]
        joined = whole if self.ring == 1 else torch.cat([whole[:, p.start : p.stop] for p in pieces], 1)
        return joined.reshape(B, self.size, S // self.size, *whole.shape[2:]).transpose(0, 1)

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """[B, L, ...] -> [P, B, L, ...]. Not differentiated."""
        if self.size == 1:
            return local[None]
        out = local.new_empty(self.size, *local.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), local.contiguous(), group=self.group)
        return out

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """[B, L, ...] of every rank -> [B, S, ...] in global order, on every rank. Not differentiated: see `reduced`."""
        return self.natural(self.all_gather(local))

    def reduced(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] of every rank -> this rank's tokens of their sum, [B, L, ...]: the backward of `gathered`."""
        if self.size == 1:
            return whole
        parts = self.ranked(whole)
        local = whole.new_empty(parts.shape[1:])
        dist.reduce_scatter_tensor(local, parts.flatten(0, 1), group=self.group)
        return local


@dataclass(frozen=True)
class Pools:
    """The pools of a row, in its order, and which of them this rank's queries may select. On the CPU.

    A pool is k tokens that follow each other in one document, counted from the document's first; what is left at its end is
    in no pool. Of a document a query sees the pools that end at or before it: those from `low` up to `high`.

    Args:
        first: [N] int64, each pool's first token.
        low, high: [L] int64, for each local query.
        most: pools of the document that has most.
    """

    first: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    most: int


class TokenLayout:
    """One batch's tokens on this rank: global places, and documents. Collective where the split has several ranks.

    Args:
        split: who holds what.
        position_ids: [B or 1, L], local; a document begins wherever a position does not follow the one before it in the
            row. None: every row is one document (`local` must then be given).
        local: L.

    Raises:
        PreflightError: a row that does not split; more tokens than int32 counts; ranks with different shapes; shards in another
            order than the split's.
    """

    def __init__(self, split: TokenSplit, position_ids: torch.Tensor | None = None, local: int | None = None) -> None:
        self.split = split
        self.local = local if position_ids is None else position_ids.shape[1]
        self.tokens = split.check(self.local)
        check_int32(self.tokens)
        self.documents = None if position_ids is None else self._documents(position_ids)
        self._pools: dict[tuple[int, int], Pools] = {}

    def _documents(self, position_ids: torch.Tensor) -> Offsets | None:
        if self.split.size > 1:
            mine = torch.tensor(position_ids.shape, device=position_ids.device)
            shapes = [torch.empty_like(mine) for _ in range(self.split.size)]
            dist.all_gather(shapes, mine, group=self.split.group)
            preflight.check_local_shapes(torch.stack(shapes).tolist())
        whole = self.split.gathered(position_ids)
        documents = document_offsets(whole)
        if self.split.ring > 1 and documents is not None:
            preflight.check_zigzag(whole, documents, self.split.ring)
        return documents

    @cached_property
    def places(self) -> torch.Tensor:
        """[L] int64 on the CPU: each local token's place in the row."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.split.held(self.tokens)])

    def starts(self, row: int) -> Sequence[int]:
        """(0, s1, ..., S): where the documents of a row begin, and its end."""
        if self.documents is None:
            return (0, self.tokens)
        return self.documents[row if len(self.documents) > 1 else 0]

    def begins(self, row: int) -> torch.Tensor:
        """[L] int64 on the CPU: where the document of each local token begins."""
        starts = torch.tensor(self.starts(row))
        return starts[torch.searchsorted(starts, self.places, right=True) - 1]

    def pools(self, row: int, k: int) -> Pools:
        """The pools of a row; kept, since every layer asks."""
        key = (row if self.documents is not None and len(self.documents) > 1 else 0, k)
        if key not in self._pools:
            starts = torch.tensor(self.starts(row))
            counts = starts.diff() // k
            before = counts.cumsum(0) - counts
            document = torch.repeat_interleave(torch.arange(len(counts)), counts)
            first = starts[document] + k * (torch.arange(len(document)) - before[document])
            mine = torch.searchsorted(starts, self.places, right=True) - 1
            low = before[mine]
            high = low + (self.places + 1 - starts[mine]) // k
            self._pools[key] = Pools(first, low, high, int(counts.max()))
        return self._pools[key]
