"""Head schedule: which query head runs on which rank in which stage, and when its key/value head travels.

Pure Python, no torch. Symbols: H query heads, K key/value heads, g = H/K, P ranks, U query heads a stage over all
ranks, w = U/P query heads a stage on one rank.

Each rank owns a contiguous range of query heads, at most ceil(H/P) of them, and walks it w heads at a time. A key/value
head is sent to a rank in the stage of its first query head there, stays until its last one, and is sent once; it goes
to more than one rank only where a range boundary cuts its group. The boundaries are chosen so that as few groups as
possible are cut, so a rank may own fewer heads than its neighbour, or none: the number of stages is ceil(ceil(H/P)/w)
either way. Source of the method: Untied Ulysses, arXiv 2602.21196; there only H and K divisible by P are served.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class KernelCall:
    """One attention call of a rank in a stage: `q_count` consecutive query heads on `kv_count` consecutive kv heads.

    Query head `q_first + i` attends with kv head `kv_first + i // (q_count // kv_count)`. All kv heads of a call
    arrived in the same stage, `arrival`, so they lie side by side in memory.
    """

    q_first: int
    q_count: int
    kv_first: int
    kv_count: int
    arrival: int


@dataclass(frozen=True)
class RankStage:
    """What one rank does in one stage. Ranges are of global head indices; empty ranges are allowed."""

    q_heads: range
    kv_arriving: range
    kv_leaving: range
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True)
class HeadSchedule:
    """Head schedule for H query heads on K kv heads over P ranks, U query heads a stage.

    Args:
        heads: H.
        kv_heads: K, a divisor of H.
        ranks: P.
        heads_per_stage: U, a multiple of P from P to ceil(H/P)*P. None: P, the least memory. U >= H is plain Ulysses.

    Raises:
        ValueError: naming the values and what would work.
    """

    heads: int
    kv_heads: int
    ranks: int
    heads_per_stage: int | None = None

    def __post_init__(self) -> None:
        H, K, P, U = self.heads, self.kv_heads, self.ranks, self.heads_per_stage
        for name, value in (("heads", H), ("kv_heads", K), ("ranks", P)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if H % K:
            raise ValueError(f"heads={H} is not a multiple of kv_heads={K}: each kv head must serve the same number of query heads")
        if U is None:
            object.__setattr__(self, "heads_per_stage", P)
        elif not isinstance(U, int) or isinstance(U, bool) or U % P or not P <= U <= self.max_load * P:
            allowed = ", ".join(str(n * P) for n in range(1, self.max_load + 1))
            raise ValueError(f"heads_per_stage={U!r} with {H} query heads on {P} ranks: use one of {allowed}")

    @property
    def group(self) -> int:
        """g: query heads a kv head serves."""
        return self.heads // self.kv_heads

    @property
    def max_load(self) -> int:
        """Query heads of the busiest rank, ceil(H/P)."""
        return -(-self.heads // self.ranks)

    @property
    def width(self) -> int:
        """w: query heads a stage on one rank."""
        return self.heads_per_stage // self.ranks

    @property
    def stages(self) -> int:
        return -(-self.max_load // self.width)

    @cached_property
    def owned(self) -> tuple[range, ...]:
        """The query heads of each rank, in rank order; contiguous, disjoint, together range(H)."""
        starts = _cut(self.heads, self.group, self.ranks, self.max_load)
        return tuple(range(a, b) for a, b in zip(starts, starts[1:]))

    @cached_property
    def table(self) -> tuple[tuple[RankStage, ...], ...]:
        """`table[stage][rank]`."""
        columns = [self._walk(heads) for heads in self.owned]
        return tuple(tuple(column[s] for column in columns) for s in range(self.stages))

    @property
    def kv_sends(self) -> int:
        """How many times a kv head is sent to a rank (K where no group is cut)."""
        return sum(len(entry.kv_arriving) for row in self.table for entry in row)

    @property
    def replicated(self) -> bool:
        """Whether some kv head is on more than one rank, so that its gradients must be summed."""
        return self.kv_sends > self.kv_heads

    def copies(self, kv: int) -> int:
        """On how many ranks a kv head is."""
        g = self.group
        return sum(bool(heads) and heads[0] // g <= kv <= heads[-1] // g for heads in self.owned)

    def is_over(self, rank: int, arrived: int, stage: int) -> bool:
        """Whether the kv heads that came to `rank` in stage `arrived`, if any, are not needed after `stage`."""
        heads = self.table[arrived][rank].kv_arriving
        return not heads or any(heads[-1] in self.table[s][rank].kv_leaving for s in range(arrived, stage + 1))

    def _walk(self, owned: range) -> list[RankStage]:
        g, w = self.group, self.width
        arrival: dict[int, int] = {}
        entries = []
        for stage in range(self.stages):
            q = owned[stage * w : (stage + 1) * w]
            needed = range(q[0] // g, q[-1] // g + 1) if q else range(0)
            arriving = [kv for kv in needed if kv not in arrival]
            arrival.update((kv, stage) for kv in arriving)
            leaving = [kv for kv in needed if q[-1] == owned[-1] or (kv + 1) * g - 1 <= q[-1]]
            entries.append(
                RankStage(q, _as_range(arriving), _as_range(leaving), tuple(_calls(q, g, arrival)))
            )
        return entries

    def describe(self) -> str:
        """One line for reports."""
        loads = sorted({len(r) for r in self.owned}, reverse=True)
        return (
            f"{self.heads} query / {self.kv_heads} kv heads on {self.ranks} ranks: {self.stages} stages of up to "
            f"{self.heads_per_stage} heads, {' or '.join(map(str, loads))} heads a rank, {self.kv_sends} kv-head sends"
            + (" (kv heads replicated, gradients summed)" if self.replicated else "")
        )


def _as_range(values: list[int]) -> range:
    return range(values[0], values[-1] + 1) if values else range(0)


def _calls(q: range, g: int, arrival: dict[int, int]) -> list[KernelCall]:
    """Merge neighbouring kv heads into one call where they arrived together and serve equally many heads here."""
    calls: list[KernelCall] = []
    for kv in range(q[0] // g, q[-1] // g + 1) if q else ():
        first, last = max(q[0], kv * g), min(q[-1], kv * g + g - 1)
        count = last - first + 1
        if calls and calls[-1].arrival == arrival[kv] and calls[-1].q_count == count * calls[-1].kv_count:
            done = calls.pop()
            calls.append(KernelCall(done.q_first, done.q_count + count, done.kv_first, done.kv_count + 1, done.arrival))
        else:
            calls.append(KernelCall(first, count, kv, 1, arrival[kv]))
    return calls


def _cut(heads: int, group: int, ranks: int, max_load: int) -> list[int]:
    """Range starts (ranks + 1 of them): fewest cut groups, then most even loads, then larger loads first."""
    best: dict[int, tuple[tuple, list[int]]] = {0: ((0, 0, ()), [0])}
    for rank in range(ranks):
        nxt: dict[int, tuple[tuple, list[int]]] = {}
        for start, ((sends, squares, order), starts) in best.items():
            for load in range(max(0, heads - start - (ranks - rank - 1) * max_load), min(max_load, heads - start) + 1):
                end = start + load
                touched = (end - 1) // group - start // group + 1 if load else 0
                key = (sends + touched, squares + load * load, (*order, -load))
                if end not in nxt or key < nxt[end][0]:
                    nxt[end] = (key, [*starts, end])
        best = nxt
    return best[heads][1]
