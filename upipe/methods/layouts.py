"""Which tokens of a sequence each rank holds under a method, and what of it a chunk sees. Pure Python, no torch.

Symbols: S tokens, N ranks that share a sequence, L local tokens, R ring and P Ulysses ranks (N = R*P), C tokens of a chunk.

| layout | rank n holds |
| --- | --- |
| zigzag | a share of its ring rank's two runs; with R = 1 the n-th L tokens (`upipe.zigzag`) |
| chunked | the n-th share of each chunk, so that after an all-to-all of the ranks' i-th shares each has the i-th chunk (the order of FPDT, arXiv 2408.16978) |

A sequence is padded at its end to N*L; padding carries label -100 and the positions that follow.
"""  # noqa: E501

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from upipe import zigzag


@dataclass(frozen=True)
class Zigzag:
    """Args: ring, R; ulysses, P. Rank r*P + p is Ulysses rank p of ring rank r."""

    ring: int
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def padded(self, tokens: int) -> int:
        return zigzag.padded_length(tokens, self.ring, self.ulysses)

    def pieces(self, tokens: int, rank: int) -> tuple[range, ...]:
        return zigzag.shards(tokens, self.ring, self.ulysses, *divmod(rank, self.ulysses))


@dataclass(frozen=True)
class Chunked:
    """Args: ranks, N; chunk, the most tokens of a chunk: chunks are equal, as few as that allows. A multiple of N."""

    ranks: int
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.chunk % self.ranks:
            raise ValueError(f"chunk={self.chunk} on {self.ranks} ranks: it must be a positive multiple of {self.ranks}")

    def chunks(self, tokens: int) -> int:
        """How many chunks a sequence has; a padded one as many as before it was padded."""
        return -(-tokens // self.chunk)

    def share(self, tokens: int) -> int:
        """Tokens of a chunk that a rank holds."""
        return -(-tokens // (self.chunks(tokens) * self.ranks))

    def padded(self, tokens: int) -> int:
        return self.chunks(tokens) * self.share(tokens) * self.ranks

    def pieces(self, tokens: int, rank: int) -> tuple[range, ...]:
        share = self.share(tokens)
        starts = (chunk * self.ranks * share + rank * share for chunk in range(self.chunks(tokens)))
        return tuple(range(start, start + share) for start in starts)


Layout = Zigzag | Chunked


def chunk_home(starts: Sequence[int], size: int, chunk: int) -> tuple[int, ...]:
    """Document boundaries inside a chunk, (0, ..., size), from those of the sequence, (0, s1, ..., S)."""
    first = chunk * size
    return tuple(sorted({min(max(start - first, 0), size) for start in starts}))


def chunk_visible(starts: Sequence[int], size: int, chunk: int, earlier: int) -> tuple[slice, slice] | None:
    """Which queries of a chunk see which keys of an earlier one, all of them each: those of the one document that reaches
    from there to here. None where none does."""
    first, begin = chunk * size, earlier * size
    document = bisect_right(starts, first) - 1
    keys = slice(max(starts[document] - begin, 0), size)
    return (slice(0, min(starts[document + 1] - first, size)), keys) if keys.start < size else None
