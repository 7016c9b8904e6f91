"""Records: every measurement of the project is one JSON line in `experiments/results/<experiment>.jsonl`.

`Record` names the fields, `validate` says what makes a record trustworthy, `append` writes one line. The command
`upipe records PATH...` validates files or folders of records.

Units: lengths are binary (1M = 1048576 tokens), GiB = 2**30 bytes, times are seconds, throughput is tokens/s/GPU.
u, the unit of `peak_units`, is one bf16 hidden-state shard: micro-batch x local tokens x hidden size x 2 bytes, where
local tokens = ceil(tokens / (sp * ring)).
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import os
import re
import statistics
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from upipe.config import ConfigError, convert, parse_length
from upipe.environment import DATE, environment

Method = Literal["upipe", "ulysses", "official-upipe", "ring", "usp", "fpdt", "native", "alst", "none", "kernel"]
Kernel = Literal["fa4", "fa3", "fa2", "cudnn", "flash", "reference"]
Outcome = Literal["ok", "oom_device", "oom_host", "oom_pinned", "refused", "timeout", "failed"]
OUTCOMES: tuple[str, ...] = typing.get_args(Outcome)

__all__ = [
    "Record", "RecordError", "append", "environment", "format_tokens", "load", "method_of", "parse_tokens", "read", "tokens_per_step",
    "unit_gib", "validate",
]

TOLERANCE = 0.01
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class RecordError(ValueError):
    """A record that must not be kept, or a file of records that cannot be read; the message names each problem."""


@dataclass
class Record:
    """One measurement or prediction; None where a field does not apply. `extra` holds further keys, which stand beside
    the fields in the file. Some have a meaning here:

        hidden_size, micro_batch_size (1), accumulation (1)   enter u and the tokens of a step
        scope ("model" | "block")                             which peak `peak_units` is made of, where both are given
        point                                                 key of the point's settings, for resuming and merging

    time_s: median of times_s, the steps after `warmup_steps` untimed ones (0 only where a single step was asked for).
    states_gib: allocated between steps: parameters, master weights, optimizer states, persistent gradients, no gathers.
    peak_above_states_gib, peak_above_inputs_gib: the peak less what a model (a block) holds before a step.
    Memory is that of the rank with the highest peak; pinned and pageable host memory is of one host, all its ranks.
    gpus: GPUs of the run over all hosts, 0 on the CPU. host_gib: memory of one host. dirty: whether the code differs
    from `commit`; None where the commit was named by hand.
    """

    run_id: str = ""
    experiment: str = ""
    provenance: Literal["measured", "predicted"] = "measured"
    method: Method = "upipe"
    model: str | None = None
    layers: int | None = None
    tokens: int | None = None
    sp: int | None = None
    ring: int | None = None
    dp: int | None = None
    zero: Literal[0, 1, 2, 3] | None = None
    heads_per_stage: int | None = None
    kernel: Kernel | None = None
    attention_output: Literal["device", "host"] | None = None
    attention_output_host_layers: int | None = None
    keep_layers_on_gpu: int | None = None
    store_every: int | None = None
    overlap: bool | None = None
    offload: Literal["none", "pinned", "pageable"] | None = None
    dx: Literal["slabs", "bfloat16", "float32"] | None = None
    tile_tokens: int | None = None
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    outcome: Outcome = "ok"
    reason: str | None = None
    time_s: float | None = None
    times_s: list[float] | None = None
    warmup_steps: int | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_gib: float | None = None
    states_gib: float | None = None
    peak_above_states_gib: float | None = None
    peak_above_inputs_gib: float | None = None
    peak_units: float | None = None
    reserved_gib: float | None = None
    host_pinned_gib: float | None = None
    host_pageable_gib: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    gpu: str | None = None
    gpus: int | None = None
    host_gib: float | None = None
    commit: str | None = None
    dirty: bool | None = None
    versions: dict[str, Any] | None = None
    command: str | None = None
    date: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the extra keys beside them. Raises RecordError where an extra key bears a field's name."""
        values = {name: getattr(self, name) for name in FIELDS}
        clash = sorted(set(self.extra) & set(FIELDS))
        if clash:
            raise RecordError(f"extra keys {clash} are fields of the record: set the fields")
        return values | self.extra

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """The inverse of `to_dict`. A missing field is left at its default; nothing is validated."""
        extra = {key: value for key, value in values.items() if key not in FIELDS}
        return cls(**{key: value for key, value in values.items() if key in FIELDS}, extra=extra)

    def updated(self, values: dict[str, Any]) -> Record:
        """A copy with these fields and extra keys."""
        return Record.from_dict(self.to_dict() | values)


FIELDS = tuple(f.name for f in dataclasses.fields(Record) if f.name != "extra")
NAMES = ("run_id", "experiment", "commit", "command", "date")
COUNTS = ("layers", "tokens", "sp", "ring", "dp", "heads_per_stage", "store_every", "tile_tokens")
AMOUNTS = (
    "attention_output_host_layers", "keep_layers_on_gpu", "warmup_steps", "gpus", "peak_gib", "states_gib", "reserved_gib",
    "peak_above_states_gib", "peak_above_inputs_gib", "peak_units", "host_pinned_gib", "host_pageable_gib", "grad_norm",
)
DEVICE = (
    "gpu", "tokens_per_s_per_gpu", "peak_gib", "states_gib", "reserved_gib", "peak_above_states_gib",
    "peak_above_inputs_gib", "peak_units",
)

REPORTED_METHODS: dict[str, str | None] = {
    "upipe": "upipe",
    "upipe-8u2r": "upipe",
    "upipe-over-usp": "upipe",
    "ulysses": "ulysses",
    "fsdp+ulysses": "ulysses",
    "fsdp+ulysses+checkpoint": "ulysses",
    "fsdp+ulysses+offload": "ulysses",
    "alst": "alst",
    "ring": "ring",
    "fsdp2-ring": "ring",
    "usp-8u2r": "usp",
    "fpdt": "fpdt",
    "pytorch-native": "native",
    **dict.fromkeys(("default", "fsdp", "naive", "plain-loss", "chunked-loss", "chunked-loss+offload"), "none"),
    **dict.fromkeys(("no-rescaling", "yarn-4", "one-tensor", "four-tensors", "model-and-optimizer"), "none"),
    **dict.fromkeys(("resident-layer-inputs-before", "resident-layer-inputs-after"), "none"),
    "unigram-entropy": None,
    **dict.fromkeys(
        (
            "skyrl", "skyrl-no-offload", "dense-fallback", "sparse-kernel", "indexer-unchunked", "indexer-chunked",
            "indexer-replicated", "indexer-sharded", "no-offload", "offload", "offload-pinned", "offload-pageable",
            "router-leak", "mhc-fp32-saved", "mhc-cast-recomputed", "kda-a2a", "kda-gather-hidden",
            "kda-gather-hidden-over-a2a", "books-moe-chunked", "books-moe-chunked-cp4", "selective-recompute",
            "full-recompute", "moe-combine-fp32", "moe-combine-bf16", "cudnn-flashmla-over-tilelang",
            "busiest-expert-gpu-over-mean", "offloaded-inputs", "hg38-chr1-2-to-chr22-80-steps",
            "overfit-four-books-start", "overfit-four-books-20-steps", "trainer-vs-vllm-logprob-low",
            "trainer-vs-vllm-logprob-high",
        )
    ),
}
"""Method names of the published numbers (`paper_figures/reported.csv`) -> ours. "none" is one sequence on one process or
without sequence parallelism; None marks rows that no method of ours stands for (another system's ablation)."""


def method_of(reported: str) -> str | None:
    """Our name of a method as `reported.csv` writes it. Raises ValueError, with the nearest name, for an unknown one."""
    if reported not in REPORTED_METHODS:
        near = difflib.get_close_matches(reported, REPORTED_METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"method {reported!r} is not one of the published ones{hint} (add it to records.REPORTED_METHODS)")
    return REPORTED_METHODS[reported]


def parse_tokens(value: int | str) -> int:
    """A length in tokens: 131072, "131072", "128K", "1M" (binary). Raises ValueError."""
    return parse_length(value)


def format_tokens(tokens: int) -> str:
    """The inverse of `parse_tokens`, in the largest unit that divides the length: 1048576 -> "1M", 2999 -> "2999"."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def append(record: Record | dict[str, Any], results: str | Path) -> Path:
    """Append a record to `<results>/<experiment>.jsonl` as one line in one write; returns the file.

    Raises RecordError, and writes nothing, where `validate` finds a problem.
    """
    values = record.to_dict() if isinstance(record, Record) else record
    problems = validate(values)
    if problems:
        raise RecordError(f"record of {values.get('experiment')!r} not written: " + "; ".join(problems))
    path = Path(results) / f"{values['experiment']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(values, allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes could be written; remove the broken last line")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of one file, oldest first; none where there is no file. Raises RecordError with file and line."""
    records = []
    if not Path(path).exists():
        return records
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}:{number}: not JSON ({error.msg}); remove the line") from error
        if not isinstance(values, dict):
            raise RecordError(f"{path}:{number}: a record is a JSON object, not {type(values).__name__}")
        records.append(values)
    return records


def load(path: str | Path) -> list[dict[str, Any]]:
    """As `read`; also raises RecordError where a record is not valid."""
    problems = problems_in(Path(path))
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise RecordError(f"{problems[0]}{more}; python -m upipe.records {path} lists them")
    return read(path)


def validate(record: Record | dict[str, Any]) -> list[str]:
    """What is wrong with a record, a sentence a problem; an empty list where nothing is."""
    values = record.to_dict() if isinstance(record, Record) else record
    problems = [f"{name} is missing (null where it does not apply)" for name in FIELDS if name not in values]
    problems += _type_problems(values)
    if problems:
        return problems
    r = Record.from_dict(values)
    return [*_identity_problems(r), *_time_problems(r), *_memory_problems(r)]


def _type_problems(values: dict[str, Any]) -> list[str]:
    problems = []
    hints = typing.get_type_hints(Record)
    for name in FIELDS:
        if name not in values:
            continue
        value = values[name]
        try:
            converted = convert(hints[name], value, key=name)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if converted != value:
            problems.append(f"{name}={value!r}: expected a finite number")
    for name in (*COUNTS, *AMOUNTS, "time_s", "host_gib", "tokens_per_s_per_gpu"):
        value, least = values.get(name), 1 if name in COUNTS else 0
        if isinstance(value, (int, float)) and (value < least or math.isinf(value)):
            problems.append(f"{name}={value}: must be at least {least}")
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        problems.append(f"cannot be written as JSON: {error}")
    return problems


def _identity_problems(r: Record) -> Iterable[str]:
    for name in NAMES:
        if not getattr(r, name):
            yield f"{name}={getattr(r, name)!r}: every record needs it"
    if r.experiment and not _NAME.fullmatch(r.experiment):
        yield f"experiment={r.experiment!r}: it names a file; use letters, digits, '_', '-', '.', '+'"
    if r.date and not _is_date(r.date):
        yield f"date={r.date!r}: write UTC as 2026-01-31T12:00:00Z"
    if not r.versions or "torch" not in r.versions:
        yield f"versions={r.versions!r}: needs at least torch"
    if r.outcome != "ok" and not r.reason:
        yield f"outcome={r.outcome!r} without a reason"
    if r.provenance == "measured":
        if r.gpus is None:
            yield "gpus is null in a measured record (0 on the CPU)"
        elif (r.gpus > 0) != (r.gpu is not None):
            yield f"gpu={r.gpu!r} with gpus={r.gpus}"
    else:
        ran = [n for n in ("times_s", "warmup_steps", "loss", "grad_norm") if getattr(r, n) is not None]
        if ran:
            yield f"provenance='predicted' with {', '.join(ran)}: only a run has them"
    if r.method == "none" and (r.sp or 1) * (r.ring or 1) != 1:
        yield f"method='none' with sp={r.sp}, ring={r.ring}: without sequence parallelism both are 1"
    if r.gpus and None not in (r.sp, r.dp) and r.sp * r.dp * (r.ring or 1) != r.gpus:
        yield f"gpus={r.gpus} is not sp x ring x dp = {r.sp} x {r.ring or 1} x {r.dp}"


def _time_problems(r: Record) -> Iterable[str]:
    if r.provenance == "measured" and (r.time_s is None) != (r.times_s is None):
        yield "time_s and times_s go together in a measured record"
    if r.times_s is not None:
        if not r.times_s or min(r.times_s) <= 0:
            yield f"times_s={r.times_s}: at least one positive time"
        elif r.time_s is not None and not _close(r.time_s, statistics.median(r.times_s), 1e-6):
            yield f"time_s={r.time_s} is not the median of times_s, {statistics.median(r.times_s)}"
        if r.warmup_steps is None:
            yield "times_s without warmup_steps"
        elif r.warmup_steps == 0 and len(r.times_s) > 1:
            yield f"warmup_steps=0 with {len(r.times_s)} timed steps: only a single step may go without warm-up"
    if r.tokens_per_s_per_gpu is not None:
        if r.tokens is None or not r.time_s or not r.gpus:
            yield f"tokens_per_s_per_gpu={r.tokens_per_s_per_gpu} needs tokens, time_s and gpus"
        else:
            expected = tokens_per_step(r) / r.time_s / r.gpus
            if not _close(r.tokens_per_s_per_gpu, expected):
                yield f"tokens_per_s_per_gpu={r.tokens_per_s_per_gpu}: tokens, time_s and gpus give {expected:.6g}"


def _memory_problems(r: Record) -> Iterable[str]:
    if r.provenance == "measured" and r.gpus == 0:
        given = [name for name in DEVICE if getattr(r, name) is not None]
        if given:
            yield f"{', '.join(given)} in a record without a GPU: null there"
    if r.peak_above_states_gib is not None:
        if r.peak_gib is None or r.states_gib is None:
            yield "peak_above_states_gib without peak_gib and states_gib"
        elif not _close(r.peak_above_states_gib, r.peak_gib - r.states_gib):
            yield f"peak_above_states_gib={r.peak_above_states_gib} is not peak_gib - states_gib = {r.peak_gib - r.states_gib:.6g}"
    if r.peak_gib is not None and r.reserved_gib is not None and r.reserved_gib < r.peak_gib * (1 - TOLERANCE):
        yield f"reserved_gib={r.reserved_gib} is less than peak_gib={r.peak_gib}"
    if r.attention_output == "device" and r.attention_output_host_layers:
        yield f"attention_output='device' with attention_output_host_layers={r.attention_output_host_layers}"
    if r.peak_units is not None:
        peaks = {"model": r.peak_above_states_gib, "block": r.peak_above_inputs_gib}
        given = [scope for scope, peak in peaks.items() if peak is not None]
        scope = r.extra.get("scope", given[0] if len(given) == 1 else None)
        unit = unit_gib(r)
        if peaks.get(scope) is None:
            yield (
                f"peak_units={r.peak_units} needs peak_above_states_gib (scope model) or peak_above_inputs_gib (scope block), "
                f"and scope={scope!r}, 'model' or 'block', where both are given"
            )
        elif unit is None:
            yield f"peak_units={r.peak_units} needs tokens and the extra key hidden_size"
        elif not _close(r.peak_units, peaks[scope] / unit):
            yield f"peak_units={r.peak_units}: {peaks[scope]} GiB over u = {unit:.6g} GiB is {peaks[scope] / unit:.6g} ({scope})"


def unit_gib(record: Record) -> float | None:
    """u of the record in GiB, or None where tokens or the extra key hidden_size is not there."""
    hidden = record.extra.get("hidden_size")
    if not isinstance(hidden, int) or record.tokens is None:
        return None
    local = -(-record.tokens // ((record.sp or 1) * (record.ring or 1)))
    return record.extra.get("micro_batch_size", 1) * local * hidden * 2 / 2**30


def tokens_per_step(record: Record) -> int:
    """Tokens of one optimizer step over all ranks, each counted once."""
    return record.tokens * (record.dp or 1) * record.extra.get("micro_batch_size", 1) * record.extra.get("accumulation", 1)


def _close(value: float, expected: float, tolerance: float = TOLERANCE) -> bool:
    return abs(value - expected) <= tolerance * abs(expected) + 1e-9


def _is_date(text: str) -> bool:
    try:
        datetime.datetime.strptime(text, DATE)
    except ValueError:
        return False
    return True


def files(paths: Iterable[str | Path]) -> list[Path]:
    """Record files: a folder stands for all `*.jsonl` in it. Raises RecordError for a path that is not there."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise RecordError(f"{path} does not exist")
        found += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return found


def problems_in(path: Path) -> list[str]:
    """Every problem of a file's records, each with its place; also a record in another experiment's file."""
    problems = []
    for number, values in enumerate(read(path), 1):
        found = validate(values)
        if values.get("experiment") != path.stem:
            found.append(f"experiment={values.get('experiment')!r} in the file of {path.stem!r}")
        problems += [f"{path}: record {number}: {problem}" for problem in found]
    return problems


def command(paths: Iterable[str | Path]) -> int:
    """`upipe records`: validate the files or folders named; returns 0, or 1 where there is a problem."""
    try:
        found = files(paths)
        problems = [problem for path in found for problem in problems_in(path)]
        count = sum(len(read(path)) for path in found)
    except RecordError as error:
        print(f"records: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{count} records in {len(found)} files, {len(problems)} problems")
    return 1 if problems else 0
