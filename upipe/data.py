"""Training data: text files as byte tokens, cut into chunks of equal length.

The documents are joined end to end and cut into contiguous chunks of `tokens` tokens; an item is one chunk. A rank's
batches are picked by its data-parallel rank alone, so that every rank of a sequence-parallel group reads the same
global batches in the same order.

Shapes: B batch, S tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from upipe.config import ConfigError, File, Length


@dataclass
class DataConfig:
    """path: one UTF-8 text file or several, joined in the order given. tokens: tokens of a chunk. tokenizer: "bytes",
    one token a byte, vocabulary 256."""

    path: File | list[File]
    tokens: Length = 1024
    tokenizer: Literal["bytes"] = "bytes"

    def __post_init__(self):
        if self.tokens < 2:
            raise ValueError(f"tokens={self.tokens}: a chunk needs at least 2 tokens to have a target")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)


class ByteTokenizer:
    """One token a byte of the UTF-8 text: token ids are 0 to 255."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, 1-D uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        """The text of a sequence of token ids; bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class ChunkDataset(Dataset):
    """A stream of tokens cut into contiguous chunks of `tokens`; what is left at the end, less than a chunk, is unused.

    An item is {"input_ids": [S] int64, "labels": [S] int64}, the two equal: labels are not shifted here.
    Raises ConfigError where the stream is shorter than one chunk.
    """

    def __init__(self, stream: np.ndarray, tokens: int):
        self.stream = stream
        self.tokens = tokens
        if len(stream) < tokens:
            raise ConfigError(f"data.tokens={tokens} is more than the {len(stream)} tokens there are; use fewer")

    def __len__(self) -> int:
        return len(self.stream) // self.tokens

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        chunk = self.stream[index * self.tokens : (index + 1) * self.tokens]
        ids = torch.from_numpy(chunk.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


class EpochBatches:
    """`batches` global batches for one data-parallel rank, epoch after epoch, from batch number `start` on.

    An iterable with a length; the batches are dicts of [B, S] int64 tensors. Epoch e is shuffled by (seed, e) and
    split over `dp_size` ranks by torch's DistributedSampler, without the incomplete last batch: batch number n is the
    same whatever `start` was, and depends on nothing but the data, the seed and (dp_size, dp_rank).
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        batches: int,
        dp_size: int = 1,
        dp_rank: int = 0,
        seed: int = 0,
        start: int = 0,
    ):
        self.sampler = DistributedSampler(
            dataset, num_replicas=dp_size, rank=dp_rank, shuffle=True, seed=seed, drop_last=True
        )
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler, drop_last=True)
        self.batches = batches
        self.start = start
        if len(self.loader) == 0:
            raise ConfigError(
                f"{len(dataset)} chunks over {dp_size} data-parallel ranks are less than one batch of {batch_size}; "
                "use a smaller batch, shorter chunks or more text"
            )

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch, skip = divmod(self.start, len(self.loader))
        left = self.batches
        while left > 0:
            self.sampler.set_epoch(epoch)
            for position, batch in enumerate(self.loader):
                if position < skip:
                    continue
                yield batch
                left -= 1
                if left == 0:
                    return
            epoch, skip = epoch + 1, 0


def build_tokenizer(config: DataConfig) -> ByteTokenizer:
    """The tokenizer that `config` names: an object with `vocab_size`, `encode(text)` to a 1-D integer array, and
    `decode`."""
    return ByteTokenizer()


def build_dataset(config: DataConfig) -> ChunkDataset:
    """The chunks of the files that `config` names. Raises ConfigError that names a file which cannot be read."""
    tokenizer = build_tokenizer(config)
    streams = []
    for path in config.paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"data.path: cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.path: {path} is not UTF-8 text (byte {error.start})") from error
        streams.append(tokenizer.encode(text))
    stream = np.concatenate(streams) if streams else np.zeros(0, dtype=np.uint8)
    return ChunkDataset(stream, config.tokens)
