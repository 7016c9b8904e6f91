"""Training data: documents as tokens, joined or packed into rows of equal length, and batches of rows in epoch order.

Joined: the documents stand end to end and are cut into contiguous chunks of `tokens` tokens, across which attention
sees everything. Packed: the same cuts, but attention and targets stop at document boundaries: positions restart there.
Where the tokenizer has an end-of-document token each document ends with it.

A rank's batches are picked by its data-parallel rank alone, so that every rank of a sequence-parallel group reads the
same global batches in the same order.

Shapes: B batch, S tokens of a row.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from upipe.config import ConfigError, File, FileOrName, Length
from upipe.documents import read_files, read_hub
from upipe.loss import IGNORE


@dataclass
class DataConfig:
    """The documents, their tokens, and how they become rows.

    path: one local file or several, in the order given; format and field as in `documents.read_files`. dataset instead:
    a Hugging Face data set by name or folder, with its subset (where it has several) and split.
    tokens: tokens of a row. tokenizer: "bytes" (one token a byte, vocabulary 256), or the path or name of a Hugging
    Face tokenizer; gguf_file: the GGUF file in that folder which holds it.
    packing: "join" or "documents" (see the module). repeat: tile joined data that is shorter than one batch of rows.
    Evaluation data, at most one of: eval_path (like path), eval_split (of `dataset`), eval_fraction (held out from the
    end of the training data, which then lacks it). Evaluation documents that are also trained on are refused.
    markov_orders: print the losses of Markov models up to this order on the evaluation data beside the model's (`upipe.baselines`).
    """

    path: File | list[File] | None = None
    tokens: Length = 1024
    tokenizer: FileOrName = "bytes"
    gguf_file: str | None = None
    format: Literal["auto", "text", "jsonl", "parquet", "fasta"] = "auto"
    field: str = "text"
    dataset: FileOrName | None = None
    subset: str | None = None
    split: str = "train"
    packing: Literal["join", "documents"] = "join"
    repeat: bool = False
    eval_path: File | list[File] | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.0
    markov_orders: int | None = None

    def __post_init__(self):
        if self.tokens < 2:
            raise ValueError(f"tokens={self.tokens}: a row needs at least 2 tokens to have a target")
        if (self.path is None) == (self.dataset is None):
            raise ValueError("missing: path (local files) or dataset (a name)" if self.path is None else
                             f"path and dataset={self.dataset!r} are both given; leave one out")  # fmt: skip
        given = [name for name in ("eval_path", "eval_split", "eval_fraction") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are all given; evaluation data comes from one of them")
        if self.eval_split and self.dataset is None:
            raise ValueError(f"eval_split={self.eval_split!r} needs dataset; for local files use eval_path or eval_fraction")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: must be at least 0 and less than 1")
        if self.markov_orders is not None and (self.markov_orders < 0 or self.packing != "join" or not self.has_eval):
            raise ValueError(f"markov_orders={self.markov_orders}: 0 or more, with packing=join and evaluation data (eval_fraction, say)")
        if self.repeat and self.packing != "join":
            raise ValueError("repeat=true works with packing=join; packed rows are padded instead")
        if self.gguf_file is not None and self.tokenizer == "bytes":
            raise ValueError(f"gguf_file={self.gguf_file!r} needs tokenizer, the folder that the file is in")

    @property
    def paths(self) -> list[str]:
        return _listed(self.path)

    @property
    def eval_paths(self) -> list[str]:
        return _listed(self.eval_path)

    @property
    def has_eval(self) -> bool:
        return bool(self.eval_path or self.eval_split or self.eval_fraction)


def _listed(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


class ByteTokenizer:
    """One token a byte of the UTF-8 text: token ids are 0 to 255."""

    vocab_size = 256
    end_of_document: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, 1-D uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        """The text of a sequence of token ids; bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face tokenizer, without the special tokens that it would add around a text.

    hf: the tokenizer. vocab_size: the least vocabulary a model needs. end_of_document: its eos token's id, or None.
    """

    def __init__(self, hf: Any):
        self.hf = hf
        self.vocab_size = max([len(hf) - 1, *hf.get_vocab().values()]) + 1
        self.end_of_document: int | None = hf.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, 1-D int32."""
        return np.array(self.hf(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    def decode(self, ids) -> str:
        return self.hf.decode([int(i) for i in ids])


def build_tokenizer(config: DataConfig) -> ByteTokenizer | HFTokenizer:
    """The tokenizer that `config` names. Raises ConfigError where it cannot be loaded."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer

    extra = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(config.tokenizer, **extra))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"data.tokenizer={config.tokenizer!r} cannot be loaded: {error}") from error


@dataclass
class Corpus:
    """Documents end to end. tokens: 1-D, integer. ends: 1-D int64, where each document ends; the last is len(tokens)."""

    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: ByteTokenizer | HFTokenizer) -> Corpus:
        parts, ends, total = [], [], 0
        for text in texts:
            ids = tokenizer.encode(text)
            if tokenizer.end_of_document is not None:
                ids = np.append(ids, ids.dtype.type(tokenizer.end_of_document))
            if len(ids):
                parts.append(ids)
                total += len(ids)
                ends.append(total)
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.uint8), np.array(ends, dtype=np.int64))

    def split(self, at: int) -> tuple[Corpus, Corpus]:
        """The corpus before and from token number `at` on, a document across it in two."""
        before = np.append(self.ends[self.ends < at], at)
        return Corpus(self.tokens[:at], before), Corpus(self.tokens[at:], self.ends[self.ends > at] - at)

    def fingerprint(self) -> str:
        """Changes with any token and any document boundary."""
        return f"{len(self.tokens)}-{zlib.crc32(self.ends.tobytes(), zlib.crc32(self.tokens.tobytes())):08x}"

    def documents(self) -> set[bytes]:
        """A digest of each document."""
        begins = np.append(0, self.ends[:-1])
        return {hashlib.blake2b(self.tokens[b:e].tobytes(), digest_size=16).digest() for b, e in zip(begins, self.ends)}


class ChunkDataset(Dataset):
    """A stream of tokens cut into contiguous chunks of `tokens`; what is left at the end, less than a chunk, is unused.

    An item is {"input_ids": [S] int64, "labels": [S] int64}, the two equal: labels are not shifted here.
    chunks: how many chunks to cut, the stream beginning again where it ends; as many as it holds unless told.
    Raises ConfigError where the stream is shorter than one chunk.
    """

    def __init__(self, stream: np.ndarray, tokens: int, *, chunks: int | None = None, key: str = "data"):
        self.stream = stream
        self.tokens = tokens
        self.chunks = len(stream) // tokens if chunks is None else chunks
        self.longest = tokens
        if not len(stream) or not self.chunks:
            raise ConfigError(
                f"data.tokens={tokens} is more than the {len(stream)} tokens there are in {key}; use fewer, or data.repeat=true"
            )

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        first = index * self.tokens
        if first + self.tokens <= len(self.stream):
            chunk = self.stream[first : first + self.tokens]
        else:
            chunk = self.stream.take(range(first, first + self.tokens), mode="wrap")
        ids = torch.from_numpy(chunk.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


class PackedDataset(Dataset):
    """Documents end to end in rows of exactly `tokens`, each to be read as if it stood alone.

    An item is {"input_ids", "labels", "position_ids"}, all [S] int64. Positions restart at 0 where a document begins; its
    first token has the label -100, so that nothing predicts it. A document that reaches over the end of a row goes on
    in the next as a piece of its own. The last row is filled up with token 0, label -100. longest: tokens of the longest piece.
    """

    def __init__(self, corpus: Corpus, tokens: int, *, key: str = "data"):
        self.corpus = corpus
        self.tokens = tokens
        if not len(corpus.tokens):
            raise ConfigError(f"there are no tokens in {key}")
        cuts = np.arange(0, len(corpus.tokens) + tokens, tokens)
        self.longest = int(np.diff(np.union1d(corpus.ends, cuts).clip(max=len(corpus.tokens))).max())

    def __len__(self) -> int:
        return -(-len(self.corpus.tokens) // self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.tokens
        chunk = self.corpus.tokens[first : first + self.tokens]
        ids = np.zeros(self.tokens, dtype=np.int64)
        ids[: len(chunk)] = chunk
        inside = np.searchsorted(self.corpus.ends, [first, first + len(chunk)], side="right")
        begins = np.append(0, self.corpus.ends[inside[0] : inside[1]] - first)
        begins = begins[begins < len(chunk)]
        labels = ids.copy()
        labels[begins] = IGNORE
        labels[len(chunk) :] = IGNORE
        positions = np.arange(self.tokens)
        positions -= np.repeat(begins, np.diff(np.append(begins, self.tokens)))
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass
class Data:
    """What a run reads. train, evaluation: data sets of rows. fingerprint: of the training tokens. note: a line on what
    was made of them."""

    train: ChunkDataset | PackedDataset
    evaluation: ChunkDataset | PackedDataset | None
    fingerprint: str
    note: str


def build_data(config: DataConfig, tokenizer: ByteTokenizer | HFTokenizer, *, rows: int = 1) -> Data:
    """The rows that `config` asks for. rows: how many a batch of all ranks needs, which `repeat` provides.

    Raises ConfigError for what cannot be read, for too little data, and for evaluation documents that are trained on.
    """
    if config.dataset is None:
        _check_paths(config)
        corpus = Corpus.of(read_files(config.paths, format=config.format, field=config.field), tokenizer)
        source = ", ".join(config.paths)
    else:
        hub = {"subset": config.subset, "field": config.field}
        corpus = Corpus.of(read_hub(config.dataset, split=config.split, **hub), tokenizer)
        source = f"{config.dataset}, split {config.split}"
    held = None
    if config.eval_path:
        held = Corpus.of(read_files(config.eval_paths, format=config.format, field=config.field, key="data.eval_path"), tokenizer)
    elif config.eval_split:
        held = Corpus.of(read_hub(config.dataset, split=config.eval_split, **hub, key="data.eval_split"), tokenizer)
    elif config.eval_fraction:
        corpus, held = hold_out(corpus, config.eval_fraction)
    if held is not None and (shared := len(held.documents() & corpus.documents())):
        raise ConfigError(
            f"{shared} of the {len(held.ends)} evaluation documents are in the training data too; take them out of one of the two"
        )
    train = _rows_of(corpus, config, source, rows)
    evaluation = None if held is None else _rows_of(held, config, "the evaluation data", 1)
    note = f"{len(train)} rows of {config.tokens} tokens, {len(corpus.ends)} documents of {len(corpus.tokens)} tokens from {source}"
    if len(train) * config.tokens > len(corpus.tokens) and config.packing == "join":
        note += f"; repeated {len(train) * config.tokens / len(corpus.tokens):.2f} times (data.repeat)"
    if evaluation is not None:
        note += f"; {len(evaluation)} rows of {len(held.tokens)} tokens for evaluation"
    return Data(train, evaluation, corpus.fingerprint(), note)


def hold_out(corpus: Corpus, fraction: float) -> tuple[Corpus, Corpus]:
    """(training, evaluation): evaluation is the last `fraction` of the tokens, begun at the nearest document boundary,
    or inside the document where there is but one. Raises ConfigError where either would be empty."""
    at = round(len(corpus.tokens) * (1 - fraction))
    if len(corpus.ends) > 1:
        at = int(min(corpus.ends[:-1], key=lambda end: abs(int(end) - at)))
    if not 0 < at < len(corpus.tokens):
        raise ConfigError(f"data.eval_fraction={fraction} of {len(corpus.tokens)} tokens leaves nothing to train or evaluate on")
    return corpus.split(at)


def _rows_of(corpus: Corpus, config: DataConfig, key: str, rows: int) -> ChunkDataset | PackedDataset:
    if config.packing == "documents":
        return PackedDataset(corpus, config.tokens, key=key)
    chunks = max(rows, -(-len(corpus.tokens) // config.tokens)) if config.repeat else None
    return ChunkDataset(corpus.tokens, config.tokens, chunks=chunks, key=key)


def _check_paths(config: DataConfig) -> None:
    shared = {Path(p).resolve() for p in config.paths} & {Path(p).resolve() for p in config.eval_paths}
    if shared:
        raise ConfigError(f"data.eval_path={str(shared.pop())!r} is trained on too (data.path); give other files, or eval_fraction")


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
        self.dataset = dataset
        self.sampler = DistributedSampler(
            dataset, num_replicas=dp_size, rank=dp_rank, shuffle=True, seed=seed, drop_last=True
        )
        self.batch_size = batch_size
        self.batches = batches
        self.start = start
        self.per_epoch = len(self.sampler) // batch_size
        if self.per_epoch == 0:
            raise ConfigError(
                f"{len(dataset)} rows over {dp_size} data-parallel ranks are less than one batch of {batch_size}; "
                "use a smaller batch, shorter rows, more text or data.repeat=true"
            )

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order, epoch_of_order = [], None
        for number in range(self.start, self.start + self.batches):
            epoch, position = divmod(number, self.per_epoch)
            if epoch != epoch_of_order:
                self.sampler.set_epoch(epoch)
                order, epoch_of_order = list(self.sampler), epoch
            yield stack([self.dataset[i] for i in order[position * self.batch_size : (position + 1) * self.batch_size]])


class EvaluationBatches:
    """The first `rows` rows of a data set in order, dealt out to the data-parallel ranks, B at a time.

    Every rank has the same number of batches: where its rows run out it gets rows without a label, so that the mean
    over all tokens is the same for any number of ranks.
    """

    def __init__(self, dataset: Dataset, *, rows: int, batch_size: int, dp_size: int, dp_rank: int):
        self.dataset, self.rows, self.batch_size = dataset, min(rows, len(dataset)) if rows else len(dataset), batch_size
        self.dp_size, self.dp_rank = dp_size, dp_rank

    def __len__(self) -> int:
        return -(-self.rows // (self.dp_size * self.batch_size))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(len(self)):
            first = (number * self.dp_size + self.dp_rank) * self.batch_size
            yield stack([self._row(i) for i in range(first, first + self.batch_size)])

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        if index < self.rows:
            return self.dataset[index]
        row = self.dataset[0]
        return row | {"labels": torch.full_like(row["labels"], IGNORE)}


def stack(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of [S] tensors as one batch of [B, S]."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}
