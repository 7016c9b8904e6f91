"""Properties of the head schedule, without torch: every head once, with its own kv head, k/v sent as rarely as possible."""

import functools
import itertools
import subprocess
import sys

import pytest

from upipe.schedule import HeadSchedule

NAMED = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (6, 3), (28, 7), (28, 4), (5, 5), (3, 3), (3, 1), (9, 3), (12, 4), (40, 8),
         (30, 30), (20, 5), (24, 8), (7, 7), (32, 8), (64, 8), (64, 2), (64, 16), (16, 16), (24, 24), (2, 1), (1, 1)]
RANKS = [1, 2, 3, 4, 5, 8, 16]
GEOMETRIES = sorted({(h, k, p) for (h, k), p in itertools.product(NAMED, RANKS)}
                    | {(h, k, p) for h in range(1, 13) for k in range(1, h + 1) if h % k == 0 for p in range(1, 7)})


def widths(heads, ranks):
    largest = -(-heads // ranks) * ranks
    return range(ranks, largest + 1, ranks)


def schedules():
    for heads, kv_heads, ranks in GEOMETRIES:
        for stage in widths(heads, ranks):
            yield HeadSchedule(heads, kv_heads, ranks, stage)


def test_every_query_head_runs_exactly_once():
    for s in schedules():
        ran = [q for row in s.table for entry in row for q in entry.q_heads]
        assert sorted(ran) == list(range(s.heads)), s
        for row in s.table:
            for entry in row:
                assert [q for c in entry.calls for q in range(c.q_first, c.q_first + c.q_count)] == list(entry.q_heads), s


def test_every_query_head_meets_its_own_kv_head():
    for s in schedules():
        group = s.heads // s.kv_heads
        for row in s.table:
            for entry in row:
                for call in entry.calls:
                    assert call.q_count % call.kv_count == 0, (s, call)
                    per_kv = call.q_count // call.kv_count
                    for i in range(call.q_count):
                        assert call.kv_first + i // per_kv == (call.q_first + i) // group, (s, call)


def test_no_rank_does_more_than_its_width_in_a_stage_or_its_share_in_all():
    for s in schedules():
        share = -(-s.heads // s.ranks)
        for rank in range(s.ranks):
            loads = [len(row[rank].q_heads) for row in s.table]
            assert max(loads) <= s.heads_per_stage // s.ranks, s
            assert sum(loads) <= share, s


def test_number_of_stages_is_the_least_the_width_allows():
    for s in schedules():
        share = -(-s.heads // s.ranks)
        width = s.heads_per_stage // s.ranks
        assert len(s.table) == s.stages == -(-share // width), s
        assert all(len(row) == s.ranks for row in s.table), s
        assert all(any(entry.q_heads for entry in row) for row in s.table), s


def test_kv_heads_arrive_once_before_use_and_leave_once_after():
    for s in schedules():
        for rank in range(s.ranks):
            arrived, left, held = {}, set(), set()
            for stage, row in enumerate(s.table):
                entry = row[rank]
                for kv in entry.kv_arriving:
                    assert kv not in arrived, (s, rank, kv)
                    arrived[kv] = stage
                    held.add(kv)
                for call in entry.calls:
                    for kv in range(call.kv_first, call.kv_first + call.kv_count):
                        assert kv in held, (s, rank, kv)
                        assert arrived[kv] == call.arrival, (s, rank, call)
                for kv in entry.kv_leaving:
                    assert kv in held, (s, rank, kv)
                    held.remove(kv)
                    left.add(kv)
            assert not held and left == set(arrived), (s, rank)


def test_only_needed_kv_heads_travel():
    for s in schedules():
        group = s.heads // s.kv_heads
        sends = 0
        for rank in range(s.ranks):
            needed = {q // group for row in s.table for q in row[rank].q_heads}
            sent = [kv for row in s.table for kv in row[rank].kv_arriving]
            assert sorted(sent) == sorted(needed), (s, rank)
            sends += len(sent)
        assert s.kv_sends == sends
        assert s.replicated == (sends > s.kv_heads)


def fewest_sends(heads, kv_heads, ranks):
    """Least number of (kv head, rank) pairs over all ways to deal the query heads, at most ceil(H/P) to a rank."""
    group, share = heads // kv_heads, -(-heads // ranks)

    def deals(left, capacities):
        """Ways to take `left` heads from the capacities: (ranks touched, capacities after)."""
        if not capacities:
            if left == 0:
                yield 0, ()
            return
        for take in range(min(left, capacities[0]) + 1):
            for touched, rest in deals(left - take, capacities[1:]):
                yield touched + (take > 0), (capacities[0] - take, *rest)

    @functools.cache
    def least(groups, capacities):
        if groups == 0:
            return 0
        best = float("inf")
        for touched, rest in set(deals(group, capacities)):
            best = min(best, touched + least(groups - 1, tuple(sorted(rest))))
        return best

    return least(kv_heads, (share,) * ranks)


def test_kv_heads_are_sent_as_rarely_as_any_dealing_of_the_heads_allows():
    small = [(h, k, p) for h, k, p in GEOMETRIES if h <= 12 and p <= 5]
    assert len(small) > 100
    for heads, kv_heads, ranks in small:
        assert HeadSchedule(heads, kv_heads, ranks).kv_sends == fewest_sends(heads, kv_heads, ranks), (heads, kv_heads, ranks)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(28, 7, 2), (28, 7, 4), (20, 5, 2), (30, 30, 4), (40, 8, 8)])
def test_named_geometries_send_no_more_than_any_dealing_needs(heads, kv_heads, ranks):
    assert HeadSchedule(heads, kv_heads, ranks).kv_sends == fewest_sends(heads, kv_heads, ranks)


def test_width_does_not_change_the_number_of_sends():
    for heads, kv_heads, ranks in GEOMETRIES:
        sends = {HeadSchedule(heads, kv_heads, ranks, stage).kv_sends for stage in widths(heads, ranks)}
        assert len(sends) == 1, (heads, kv_heads, ranks)


def test_default_width_is_one_head_a_rank():
    s = HeadSchedule(28, 7, 4)
    assert s.heads_per_stage == 4 and s.stages == 7


def test_as_wide_as_the_heads_is_plain_ulysses_in_one_stage():
    for heads, kv_heads, ranks in GEOMETRIES:
        s = HeadSchedule(heads, kv_heads, ranks, widths(heads, ranks)[-1])
        assert s.stages == 1, s


def test_same_arguments_same_schedule():
    a, b = HeadSchedule(28, 7, 4, 8), HeadSchedule(28, 7, 4, 8)
    assert a == b and a.table == b.table


@pytest.mark.parametrize("arguments, named", [
    ((8, 3, 2), ("8", "3")),
    ((0, 1, 1), ("0",)),
    ((8, 0, 1), ("0",)),
    ((8, 8, 0), ("0",)),
    ((8, -1, 1), ("-1",)),
    ((8, 8, 2, 3), ("3", "2, 4, 6, 8")),
    ((8, 8, 2, 10), ("10", "2, 4, 6, 8")),
    ((8, 8, 2, 0), ("0", "2, 4, 6, 8")),
    ((7, 7, 4, 12), ("12", "4, 8")),
    ((8.0, 8, 2), ("8.0",)),
    ((8, 8, 2, "4"), ("'4'",)),
])
def test_bad_values_are_refused_with_the_values_that_work(arguments, named):
    with pytest.raises(ValueError) as refusal:
        HeadSchedule(*arguments)
    for text in named:
        assert text in str(refusal.value)


def test_the_module_needs_no_torch():
    code = ("import importlib.util, sys; spec = importlib.util.spec_from_file_location('schedule', sys.argv[1]); "
            "m = importlib.util.module_from_spec(spec); sys.modules['schedule'] = m; spec.loader.exec_module(m); "
            "m.HeadSchedule(28, 7, 4).table; assert 'torch' not in sys.modules")
    import upipe.schedule
    subprocess.run([sys.executable, "-c", code, upipe.schedule.__file__], check=True)
