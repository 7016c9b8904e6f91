"""Byte chunks, and batches that depend on the data-parallel rank alone."""

import numpy as np
import pytest
import torch

from upipe.config import ConfigError
from upipe.data import ByteTokenizer, ChunkDataset, DataConfig, EpochBatches, build_dataset


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("Anne é\n")
    assert ids.tolist() == list("Anne é\n".encode())
    assert tokenizer.decode(ids) == "Anne é\n"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_chunks_are_contiguous_and_the_tail_is_unused(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefg")
    (tmp_path / "b.txt").write_text("hijk")
    dataset = build_dataset(DataConfig([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tokens=4))
    assert len(dataset) == 2
    assert ["".join(map(chr, dataset[i]["input_ids"])) for i in range(2)] == ["abcd", "efgh"]
    item = dataset[0]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])
    item["labels"][0] = -100
    assert dataset[0]["input_ids"][0] == item["input_ids"][0] == ord("a")
    with pytest.raises(IndexError):
        dataset[2]


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="none.txt"):
        build_dataset(DataConfig(str(tmp_path / "none.txt")))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 9)
    with pytest.raises(ConfigError, match="not UTF-8"):
        build_dataset(DataConfig(str(tmp_path / "latin.txt")))
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(ConfigError, match="tokens=1024 is more than the 3 tokens"):
        build_dataset(DataConfig(str(tmp_path / "short.txt")))
    with pytest.raises(ConfigError, match="2 data-parallel ranks are less than one batch of 3"):
        EpochBatches(_numbered(5), batch_size=3, batches=1, dp_size=2)
    with pytest.raises(ValueError, match="tokens=1"):
        DataConfig("x", tokens=1)


def _numbered(chunks: int, tokens: int = 2) -> ChunkDataset:
    return ChunkDataset(np.repeat(np.arange(chunks, dtype=np.uint8), tokens), tokens)


def _rows(batches: EpochBatches) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def test_an_epoch_is_split_over_the_ranks():
    ranks = [_rows(EpochBatches(_numbered(12), batch_size=2, batches=3, dp_size=2, dp_rank=r)) for r in range(2)]
    assert sorted(sum(ranks[0] + ranks[1], [])) == list(range(12))


def test_epochs_are_shuffled_differently_and_repeatably():
    batches = EpochBatches(_numbered(12), batch_size=4, batches=6, seed=3)
    rows = _rows(batches)
    assert len(batches) == len(rows) == 6
    assert sorted(sum(rows[:3], [])) == sorted(sum(rows[3:], [])) == list(range(12))
    assert rows[:3] != rows[3:]
    assert rows == _rows(batches)
    assert rows != _rows(EpochBatches(_numbered(12), batch_size=4, batches=6, seed=4))


@pytest.mark.parametrize("start", [1, 3, 4, 7])
def test_a_later_start_continues_the_same_order(start):
    kwargs = dict(batch_size=4, dp_size=1, seed=1)
    whole = _rows(EpochBatches(_numbered(13), batches=9, **kwargs))
    assert _rows(EpochBatches(_numbered(13), batches=9 - start, start=start, **kwargs)) == whole[start:]
