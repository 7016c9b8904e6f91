"""The harness of ranks itself: it runs on all ranks, shows failures, ends hangs, and starts afresh after either."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.world import MOST_THREADS, RankFailure, RankTimeout, World


def identity():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def total(value):
    tensor = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise RuntimeError(f"rank {rank} says no")
    dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(17)
    dist.barrier()


@pytest.fixture(scope="module")
def world():
    made = World(2)
    yield made
    made.close()


def test_every_rank_runs_and_the_processes_are_reused(world):
    first = world.run(identity)
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert world.run(identity) == first
    assert world.run(total, value=3) == [7.0, 7.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_names_the_rank_and_the_next_case_runs(world, rank):
    with pytest.raises(RankFailure, match=f"rank {rank}:[\\s\\S]*rank {rank} says no"):
        world.run(fail_on, rank=rank)
    assert world.run(total, value=1) == [3.0, 3.0]


def test_a_hang_ends_with_every_rank_s_stack(world):
    with pytest.raises(RankTimeout, match="sleep_on[\\s\\S]*gave no answer in 1 s[\\s\\S]*in sleep_on"):
        world.run(sleep_on, timeout=1, rank=1)
    assert world.run(total, value=1) == [3.0, 3.0]


def test_a_death_is_reported(world):
    with pytest.raises(RankFailure, match="exit code 17"):
        world.run(die_on, rank=1)
    assert world.run(total, value=1) == [3.0, 3.0]


HELD = []


def leave_groups(count, destroy):
    for _ in range(count):
        HELD.append(dist.new_group([0, 1]))
        if destroy:
            dist.destroy_process_group(HELD[-1])


@pytest.mark.parametrize("destroy", [False, True])
def test_a_world_of_many_threads_is_started_anew(world, destroy):
    """Gloo's, of groups that were left behind and of those that were destroyed but are still held."""
    before = world.run(identity)
    few = world.threads
    world.run(leave_groups, count=2, destroy=destroy)
    world.retire()
    assert world.run(identity) == before and few < world.threads < MOST_THREADS
    world.run(leave_groups, count=MOST_THREADS // 2, destroy=destroy)
    world.retire()
    after = world.run(identity)
    assert world.threads == few and [pid for *_, pid in after] != [pid for *_, pid in before]
