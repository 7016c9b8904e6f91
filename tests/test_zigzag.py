"""The ring x Ulysses layout against its definition: every token once, two zigzag runs a ring rank, equal causal work, the
inverse, and what a visitor's keys are seen by, all exhaustively on small meshes."""

import itertools
import random

import pytest

from upipe import zigzag
from upipe.zigzag import Mesh

MESHES = [(R, P) for R in range(1, 6) for P in range(1, 6)]
LENGTHS = (*range(1, 42), 97, 128, 2049)


def held(tokens, ring, ulysses):
    """Positions in the order of the ranks: [ring rank][Ulysses rank] -> list."""
    def positions(r, p):
        return [i for part in zigzag.shards(tokens, ring, ulysses, r, p) for i in part]

    return [[positions(r, p) for p in range(ulysses)] for r in range(ring)]


@pytest.mark.parametrize("ring, ulysses", MESHES)
def test_every_token_once_and_the_gather_is_two_runs(ring, ulysses):
    for tokens in LENGTHS:
        length, total = zigzag.local_length(tokens, ring, ulysses), zigzag.padded_length(tokens, ring, ulysses)
        ranks = held(tokens, ring, ulysses)
        assert all(len(positions) == length for row in ranks for positions in row)
        assert sorted(i for row in ranks for positions in row for i in positions) == list(range(total))
        assert total == tokens + zigzag.padding(tokens, ring, ulysses)
        assert zigzag.padding(tokens, ring, ulysses) < ring * ulysses * (1 if ring == 1 or ulysses % 2 == 0 else 2)
        for r, row in enumerate(ranks):
            gathered = [i for positions in row for i in positions]
            if ring == 1:
                assert gathered == list(range(total))
            else:
                run = total // (2 * ring)
                assert total == 2 * ring * run
                runs = [list(range(j * run, (j + 1) * run)) for j in range(2 * ring)]
                assert gathered == runs[r] + runs[2 * ring - 1 - r]


@pytest.mark.parametrize("ring, ulysses", MESHES)
def test_shards_are_one_range_or_two_apart(ring, ulysses):
    for tokens, r, p in itertools.product(LENGTHS, range(ring), range(ulysses)):
        parts = zigzag.shards(tokens, ring, ulysses, r, p)
        assert 1 <= len(parts) <= 2 and all(parts)
        assert len(parts) == 1 or parts[0].stop < parts[1].start


@pytest.mark.parametrize("ring, ulysses", MESHES)
def test_restored_is_the_inverse(ring, ulysses):
    for tokens in LENGTHS:
        gathered = [i for row in held(tokens, ring, ulysses) for positions in row for i in positions]
        assert [gathered[i] for part in zigzag.restored(tokens, ring, ulysses) for i in part] == list(range(len(gathered)))


@pytest.mark.parametrize("ulysses", range(1, 9))
def test_a_ring_of_one_is_the_contiguous_layout(ulysses):
    for tokens in LENGTHS:
        L = zigzag.local_length(tokens, 1, ulysses)
        assert L == -(-tokens // ulysses) and zigzag.padding(tokens, 1, ulysses) == ulysses * L - tokens
        for p in range(ulysses):
            assert zigzag.shards(tokens, 1, ulysses, 0, p) == (range(p * L, p * L + L),)


@pytest.mark.parametrize("ring", range(2, 6))
def test_causal_work_is_equal(ring):
    """Pairs of a query and a key that it sees, over the ring ranks."""
    for tokens in (2 * ring, 41, 97):
        work = {sum(i + 1 for positions in row for i in positions) for row in held(tokens, ring, 1)}
        assert len(work) == 1


def document_sets(total):
    yield (0, total)
    yield tuple(range(total + 1))
    rng = random.Random(total)
    for _ in range(40):
        cuts = sorted(rng.sample(range(1, total), min(total - 1, rng.choice((1, 1, 2, 3, 6)))))
        yield (0, *cuts, total)


@pytest.mark.parametrize("ring", range(2, 5))
@pytest.mark.parametrize("run", (1, 2, 3, 5))
def test_home_and_visible_are_what_causal_attention_sees(ring, run):
    total = 2 * ring * run
    for starts in document_sets(total):
        document = [sum(start <= i for start in starts) for i in range(total)]
        tokens = [[*range(r * run, (r + 1) * run), *range((2 * ring - 1 - r) * run, (2 * ring - r) * run)] for r in range(ring)]
        for rank, visitor in itertools.product(range(ring), repeat=2):
            want = {(i, j) for i, q in enumerate(tokens[rank]) for j, k in enumerate(tokens[visitor])
                    if k <= q and document[k] == document[q]}
            if visitor == rank:
                bounds = zigzag.home(starts, run, ring, rank)
                assert bounds[0] == 0 and bounds[-1] == 2 * run and list(bounds) == sorted(set(bounds))
                got = {(i, j) for a, b in zip(bounds, bounds[1:]) for i in range(a, b) for j in range(a, i + 1)}
            else:
                seen = zigzag.visible(starts, run, ring, rank, visitor)
                got = set() if seen is None else set(itertools.product(*(range(part.start, part.stop) for part in seen)))
                assert seen is None or got
                assert all(j < zigzag.sent_rows(run, visitor, rank) for _, j in got)
            assert got == want, (starts, rank, visitor)


def test_whole_sequences_need_every_row_that_is_sent():
    for ring in range(2, 6):
        for rank, visitor in itertools.permutations(range(ring), 2):
            _, keys = zigzag.visible((0, 2 * ring * 3), 3, ring, rank, visitor)
            assert keys == slice(0, zigzag.sent_rows(3, visitor, rank))


@pytest.mark.parametrize("data, ring, ulysses", list(itertools.product(range(1, 4), repeat=3)))
def test_mesh_groups(data, ring, ulysses):
    mesh = Mesh(data * ring * ulysses, ring, ulysses)
    assert mesh.data == data and mesh.size == ring * ulysses
    for groups, size in ((mesh.sequence_groups, mesh.size), (mesh.ulysses_groups, ulysses), (mesh.ring_groups, ring)):
        assert all(len(group) == size for group in groups)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
    for rank in range(mesh.world):
        d, r, p = mesh.place(rank)
        assert mesh.sequence_groups[d].index(rank) == r * ulysses + p
        assert next(group for group in mesh.ulysses_groups if rank in group).index(rank) == p
        assert next(group for group in mesh.ring_groups if rank in group).index(rank) == r
        assert next(group for group in mesh.ulysses_groups if rank in group) == tuple(range(rank - p, rank - p + ulysses))


@pytest.mark.parametrize("arguments, message", [
    ((8, 3, 2), "ring=3 x ulysses=2 is 6 ranks.*8 there are: use ring 1, 2, 4 with ulysses=2, no ulysses works with ring=3"),
    ((16, 2, 3), "no ring works with ulysses=3, use ulysses 1, 2, 4, 8 with ring=2"),
    ((4, 4, 4), "use ring 1 with ulysses=4, use ulysses 1 with ring=4"),
    ((16, 1, 32), "no ring works with ulysses=32, use ulysses 1, 2, 4, 8, 16 with ring=1"),
    ((24, 2, 12, 8), "ulysses=12 with ring=2 would cross nodes of 8 ranks: use ulysses 1, 2, 4"),
    ((24, 2, 6, 8), "ulysses=6 with ring=2 would cross nodes of 8 ranks: use ulysses 1, 2, 4"),
    ((8, 0, 2), "ring=0 must be a positive integer"),
    ((8, 2, "2"), "ulysses='2' must be a positive integer"),
    ((8, 2, 2, 0), "node=0 must be a positive integer"),
])
def test_bad_meshes_are_refused_with_what_works(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mesh(*arguments)


def test_good_meshes_across_nodes():
    assert Mesh(16, 2, 8, 8).ring_groups == tuple((p, p + 8) for p in range(8))
    assert Mesh(16, 1, 16, 8).ulysses_groups == (tuple(range(16)),)
    assert Mesh(16, 4, 4, 8).data == 1


def test_bad_ranks_and_lengths_are_refused():
    with pytest.raises(ValueError, match="ring rank 2 is not one of 2"):
        zigzag.shards(8, 2, 2, 2, 0)
    with pytest.raises(ValueError, match="Ulysses rank -1 is not one of 2"):
        zigzag.shards(8, 2, 2, 0, -1)
    with pytest.raises(ValueError, match="0 tokens on ring=2 x ulysses=2"):
        zigzag.local_length(0, 2, 2)
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        Mesh(4, 2, 2).place(4)
    with pytest.raises(ValueError, match="does not visit itself"):
        zigzag.visible((0, 8), 2, 2, 0, 0)
