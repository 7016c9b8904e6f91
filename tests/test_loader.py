"""Shards of global batches: nothing lost, labels shifted before sharding, valid tokens counted over the whole window."""

import logging

import pytest
import torch
import torch.distributed as dist

import upipe
from tests.plain import batch_of, data_of, positions_of, shifted, tiny_model
from tests.sharded import gathered
from upipe.apply import UPipeConfig


def handle_of(sp):
    return upipe.apply(tiny_model("llama", 4, 2), UPipeConfig(sp_size=sp))


def shards_are_the_batch(sp, sequence):
    handle = handle_of(sp)
    data = data_of(sequence, handle.dp_size, 4)
    counts = [sum(int((shifted(b) != -100).sum()) for row in data for b in row[i: i + 2]) for i in (0, 2)]
    seen = 0
    for i, local in enumerate(handle.shard(data[handle.dp_rank], accumulation=2)):
        batch = data[handle.dp_rank][i]
        B, S = batch["input_ids"].shape
        extra = -S % sp
        whole = {key: gathered(local[key], handle.sp_group) for key in ("input_ids", "position_ids", "shift_labels")}
        assert all(t.shape == (B, S + extra) and t.dtype == torch.long for t in whole.values())
        assert torch.equal(whole["input_ids"][:, :S], batch["input_ids"])
        assert torch.equal(whole["position_ids"][:, :S], positions_of(batch))
        assert torch.equal(whole["shift_labels"][:, :S], shifted(batch))
        assert (whole["shift_labels"][:, S:] == -100).all()
        assert torch.equal(whole["position_ids"][:, S:], positions_of(batch)[:, -1:] + torch.arange(1, extra + 1))
        assert local["num_valid"].item() == counts[i // 2] and local["num_valid"].dtype == torch.long
        assert local["accumulation"] == 2
        seen += 1
    assert seen == 4
    handle.remove()


@pytest.mark.parametrize("sequence", ["even", "odd", "packed", "padded", "batch2"])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_shards_put_together_are_the_batch(worlds, sp, sequence):
    worlds(4).run(shards_are_the_batch, sp=sp, sequence=sequence)


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def ends_together():
    """Data-parallel ranks with 5 and 7 batches, windows of 2: every rank gets 4, and says that some are left."""
    handle = handle_of(2)
    records = Records()
    logging.getLogger("upipe.loader").addHandler(records)
    mine = [batch_of("odd", 10 * handle.dp_rank + i) for i in range(5 if handle.dp_rank == 0 else 7)]
    loader = handle.shard(iter(mine), accumulation=2)
    got = list(loader)
    logging.getLogger("upipe.loader").removeHandler(records)
    handle.remove()
    return len(got), records.messages


def test_every_rank_ends_at_the_shortest_loader(worlds):
    for count, messages in worlds(4).run(ends_together, timeout=60):
        assert count == 4
        assert any("dropped" in m for m in messages)


def lengths():
    handle = handle_of(2)
    batches = [batch_of("odd", 10 * handle.dp_rank + i) for i in range(5)]
    assert len(handle.shard(batches)) == 5
    assert len(handle.shard(batches, accumulation=2)) == 4
    assert len(handle.adapt(batches)) == 10
    twice = handle.shard(batches)
    assert len(list(twice)) == len(list(twice)) == 5
    handle.remove()


def test_a_list_can_be_iterated_again_and_has_a_length(worlds):
    worlds(4).run(lengths)


def same_everywhere():
    """All data-parallel groups with the same data: trained, but said."""
    handle = handle_of(2)
    records = Records()
    logging.getLogger("upipe.loader").addHandler(records)
    assert len(list(handle.shard([batch_of("odd", 1)]))) == 1
    logging.getLogger("upipe.loader").removeHandler(records)
    handle.remove()
    return records.messages


def test_the_same_data_in_every_data_parallel_group_is_warned_about(worlds):
    assert all(any("handle.dp_rank" in m for m in messages) for messages in worlds(4).run(same_everywhere))


def unequal_adapted():
    """Ranks of one group with unequally many samples of their own: what is left over is dropped, nobody waits."""
    handle = handle_of(2)
    mine = [batch_of("odd", 100 * dist.get_rank() + i) for i in range(2 + handle.sp_rank)]
    count = len(list(handle.shard(handle.adapt(mine))))
    handle.remove()
    return count


def test_adapted_loaders_of_unequal_length(worlds):
    assert worlds(4).run(unequal_adapted, timeout=60) == [4, 4, 4, 4]
