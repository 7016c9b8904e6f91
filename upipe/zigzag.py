"""Ring x Ulysses x data: which ranks form which group, which tokens of a sequence each rank holds, and which keys of a
visiting ring rank its queries see. Pure Python, no torch.

Symbols: S tokens, R ring ranks, P Ulysses ranks, L local tokens, C tokens of a run.

A sequence is padded at its end to R*P*L tokens, L the least that fits and, with R > 1, makes P*L even. Cut into 2R equal
runs of C = P*L/2, ring rank r has runs r and 2R-1-r, in that order: P*L tokens, of which Ulysses rank p has the p-th L. So
after a Ulysses gather each ring rank holds its two runs and nothing else, and causal attention is the same work for all.
With R = 1 shards are contiguous. Padding has label -100 and the positions that follow, so that no real token sees it.

Zigzag order: zhuzilin/ring-flash-attention and Llama 3 (arXiv 2407.21783, section 3.3.2), there without Ulysses inside.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Starts = Sequence[int]
"""Document starts of one sequence and its end, (0, s1, ..., S), in the order of the whole sequence."""


@dataclass(frozen=True)
class Mesh:
    """World ranks as data x ring x Ulysses: Ulysses ranks are neighbours, then ring ranks, then data-parallel groups, so rank
    (d*R + r)*P + p is Ulysses rank p of ring rank r of data-parallel group d.

    Args:
        world: all ranks.
        ring, ulysses: R and P; R*P ranks share a sequence and must divide the world.
        node: ranks of one node, where known: with R > 1 a Ulysses group must lie inside one, so P must divide it.

    Raises:
        ValueError: naming the degrees and which would work.
    """

    world: int
    ring: int = 1
    ulysses: int = 1
    node: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (name == "node" and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.world % self.size:
            rings, widths = _divisors(self.world, self.ulysses), _divisors(self.world, self.ring)
            raise ValueError(
                f"ring={self.ring} x ulysses={self.ulysses} is {self.size} ranks, which do not divide the {self.world} there "
                f"are: {_use('ring', rings)} with ulysses={self.ulysses}, {_use('ulysses', widths)} with ring={self.ring}"
            )
        if self.ring > 1 and self.node is not None and self.node % self.ulysses:
            inside = [P for P in _divisors(self.world, self.ring) if self.node % P == 0]
            raise ValueError(
                f"ulysses={self.ulysses} with ring={self.ring} would cross nodes of {self.node} ranks: {_use('ulysses', inside)}"
            )

    @property
    def size(self) -> int:
        """R*P: ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """Data-parallel groups."""
        return self.world // self.size

    def place(self, rank: int) -> tuple[int, int, int]:
        """(data, ring, Ulysses) index of a world rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world} ranks")
        return rank // self.size, rank // self.ulysses % self.ring, rank % self.ulysses

    @cached_property
    def sequence_groups(self) -> tuple[tuple[int, ...], ...]:
        """World ranks that share a sequence, in the order of `shards` and `restored`."""
        return tuple(tuple(range(d * self.size, (d + 1) * self.size)) for d in range(self.data))

    @cached_property
    def ulysses_groups(self) -> tuple[tuple[int, ...], ...]:
        """World ranks of each all-to-all."""
        return tuple(tuple(range(first, first + self.ulysses)) for first in range(0, self.world, self.ulysses))

    @cached_property
    def ring_groups(self) -> tuple[tuple[int, ...], ...]:
        """World ranks of each ring, in ring order."""
        return tuple(group[p :: self.ulysses] for group in self.sequence_groups for p in range(self.ulysses))


def _divisors(number: int, factor: int) -> list[int]:
    """Every n such that n * factor divides the number."""
    return [n for n in range(1, number // factor + 1) if number % (n * factor) == 0]


def _use(name: str, values: list[int]) -> str:
    return f"use {name} {', '.join(map(str, values))}" if values else f"no {name} works"


def local_length(tokens: int, ring: int, ulysses: int) -> int:
    """L: tokens a rank holds of a sequence of `tokens` tokens, padding included."""
    if tokens < 1 or ring < 1 or ulysses < 1:
        raise ValueError(f"a sequence of {tokens} tokens on ring={ring} x ulysses={ulysses} ranks: all must be at least 1")
    length = -(-tokens // (ring * ulysses))
    return length + (1 if ring > 1 and ulysses * length % 2 else 0)


def padded_length(tokens: int, ring: int, ulysses: int) -> int:
    """R*P*L."""
    return local_length(tokens, ring, ulysses) * ring * ulysses


def padding(tokens: int, ring: int, ulysses: int) -> int:
    """Tokens to add at the end: fewer than R*P with an even P or R = 1, fewer than 2*R*P otherwise."""
    return padded_length(tokens, ring, ulysses) - tokens


def shards(tokens: int, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> tuple[range, ...]:
    """Positions in the padded sequence of a rank's tokens, in its order: one range, or two that do not touch."""
    for name, rank, ranks in (("ring", ring_rank, ring), ("Ulysses", ulysses_rank, ulysses)):
        if not 0 <= rank < ranks:
            raise ValueError(f"{name} rank {rank} is not one of {ranks} ranks")
    length = local_length(tokens, ring, ulysses)
    begin, whole = ulysses_rank * length, ulysses * length
    if ring == 1:
        return (range(begin, begin + length),)
    run = whole // 2
    first, second = _runs(run, ring, ring_rank)
    parts = [range(first + min(begin, run), first + min(begin + length, run)),
             range(second + max(begin - run, 0), second + max(begin + length - run, 0))]
    if parts[0].stop == parts[1].start and parts[0] and parts[1]:
        return (range(parts[0].start, parts[1].stop),)
    return tuple(part for part in parts if part)


def restored(tokens: int, ring: int, ulysses: int) -> tuple[range, ...]:
    """The inverse of `shards`: where the padded sequence lies in the shards of all ranks end to end, ring rank by ring rank
    and in each Ulysses rank by Ulysses rank. Joining the pieces at these ranges gives the sequence in order."""
    whole = local_length(tokens, ring, ulysses) * ulysses
    if ring == 1:
        return (range(whole),)
    run = whole // 2
    first = [range(r * whole, r * whole + run) for r in range(ring)]
    return (*first, *(range(piece.stop, piece.stop + run) for piece in reversed(first)))


def _runs(run: int, ring: int, rank: int) -> tuple[int, int]:
    """Where a ring rank's two runs begin."""
    return rank * run, (2 * ring - 1 - rank) * run


def _before(position: int, run: int, ring: int, rank: int) -> int:
    """How many of a ring rank's tokens are before a position of the sequence: where that position falls in its two runs."""
    return sum(min(max(position - begin, 0), run) for begin in _runs(run, ring, rank))


def home(starts: Starts, run: int, ring: int, rank: int) -> tuple[int, ...]:
    """Document boundaries inside a ring rank's two runs laid end to end, (0, ..., 2*run). Causal attention inside them is
    what its queries see of its own keys."""
    return tuple(sorted({_before(start, run, ring, rank) for start in starts}))


def visible(starts: Starts, run: int, ring: int, rank: int, visitor: int) -> tuple[slice, slice] | None:
    """Which queries of a ring rank see which keys of another, all of them each: slices of the two runs of either laid end to
    end. None where no query sees a key.

    One rectangle is all there is. A later visitor's runs both lie before the rank's second run and after its first. Of an
    earlier visitor only the first run lies before any, and before both. What reaches across is one document.
    """
    if visitor == rank:
        raise ValueError(f"ring rank {rank} does not visit itself: see `home`")
    begins, keys_end = _runs(run, ring, rank), (2 * run if visitor > rank else run)
    queries_begin = run if visitor > rank else 0
    document = bisect_right(starts, begins[1] if visitor > rank else begins[0]) - 1
    queries = slice(queries_begin, _before(starts[document + 1], run, ring, rank))
    keys = slice(_before(starts[document], run, ring, visitor), keys_end)
    return (queries, keys) if keys.start < keys.stop else None


def sent_rows(run: int, source: int, target: int) -> int:
    """How many of its tokens, from the first on, a ring rank's keys must be sent to another: see `visible`."""
    return run if source < target else 2 * run
