"""Where training text comes from: local files and Hugging Face data sets, as one string a document.

| format | suffixes (".gz" or ".xz" may follow for fasta) | a document is |
| --- | --- | --- |
| text | .txt .text .md | one UTF-8 file, byte for byte |
| jsonl | .jsonl .ndjson .json | one record's text field |
| parquet | .parquet | one row's text field |
| fasta | .fa .fasta .fna .ffn .faa | one record's sequence, without its header and line breaks |
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

from upipe.config import ConfigError

SUFFIXES = {
    "text": (".txt", ".text", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "fasta": (".fa", ".fasta", ".fna", ".ffn", ".faa"),
}


def read_files(paths: list[str], *, format: str = "auto", field: str = "text", key: str = "data.path") -> Iterator[str]:
    """The documents of local files, in the order given.

    format: a key of SUFFIXES, or "auto" to tell it from each file's suffix. field: the text's name in a JSON record or
    Parquet row. key: the setting that error messages name.
    Raises ConfigError that names the file, for what cannot be read.
    """
    for path in paths:
        kind = format if format != "auto" else _format_of(path, key)
        if not Path(path).is_file():
            raise ConfigError(f"{key}: cannot read {path}: {'it is no file' if Path(path).exists() else 'no such file'}")
        if kind == "text":
            yield _read_text(path, key)
        elif kind == "fasta":
            yield from _read_fasta(path, key)
        else:
            yield from _read_table({"jsonl": "json", "parquet": "parquet"}[kind], path, field, key)


def read_hub(name: str, *, subset: str | None, split: str, field: str, key: str = "data.dataset") -> Iterator[str]:
    """The documents of a Hugging Face data set, by its name on the hub or the folder it is in.

    subset: the data set's configuration, where it has several. Raises ConfigError that names the data set.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(name, subset, split=split, streaming=False)
    except Exception as error:  # the library raises a dozen unrelated classes
        raise ConfigError(f"{key}: cannot load {name!r}, subset {subset!r}, split {split!r}: {error}") from error
    yield from _field_of(rows, field, name, key)


def _format_of(path: str, key: str) -> str:
    name = path.lower()
    for kind, suffixes in SUFFIXES.items():
        if name.endswith(suffixes) or (kind == "fasta" and name.endswith(tuple(s + packed for s in suffixes for packed in (".gz", ".xz")))):
            return kind
    known = ", ".join(s for suffixes in SUFFIXES.values() for s in suffixes)
    raise ConfigError(f"{key}: the suffix of {path} tells no format ({known}); set data.format")


def _read_text(path: str, key: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text (byte {error.start})") from error


def _read_fasta(path: str, key: str) -> Iterator[str]:
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix.lower(), open)
    lines: list[str] | None = None
    try:
        with opened(path, "rt", encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                line = line.strip()
                if line.startswith(">"):
                    if lines:
                        yield "".join(lines)
                    lines = []
                elif line and not line.startswith(";"):
                    if lines is None:
                        raise ConfigError(f"{key}: {path} line {number} comes before any header: a FASTA record begins with '>'")
                    lines.append(line)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ConfigError(f"{key}: cannot read {path} as FASTA: {error}") from error
    if lines:
        yield "".join(lines)


def _read_table(builder: str, path: str, field: str, key: str) -> Iterator[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(builder, data_files=path, split="train")
    except Exception as error:  # the library raises a dozen unrelated classes
        raise ConfigError(f"{key}: cannot read {path} as {builder}: {error.__cause__ or error}") from error
    yield from _field_of(rows, field, path, key)


def _field_of(rows, field: str, name: str, key: str) -> Iterator[str]:
    if field not in rows.column_names:
        raise ConfigError(f"data.field={field!r} is not in {name}: there are {', '.join(rows.column_names)}")
    for number, text in enumerate(rows.select_columns(field)):
        text = text[field]
        if not isinstance(text, str):
            raise ConfigError(f"{key}: {field!r} of record {number} of {name} is {type(text).__name__}, not text")
        if text:
            yield text
