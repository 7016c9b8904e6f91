"""Published numbers and records as rows of one shape. A row's mark is made here and nowhere else.

reported    printed in a source, or read off its plot (note "digitised"): paper_figures/reported.csv
measured    a record of a run
predicted   a record of the planner
"""

from __future__ import annotations

import csv
import dataclasses
import io
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import points
from experiments.table import REPORTED, latest, read_reported
from upipe import records
from upipe.config import ConfigError
from upipe.records import Method, format_tokens, method_of

RESULTS = points.ROOT / "experiments" / "results"
MARKS = ("reported", "measured", "predicted")
METRICS = {
    "throughput": ("tokens_per_s_per_gpu", "tokens/s/GPU"),
    "step_time": ("time_s", "s"),
    "peak": ("peak_gib", "GiB"),
    "peak_above_states": ("peak_above_states_gib", "GiB"),
    "peak_above_inputs": ("peak_above_inputs_gib", "GiB"),
    "peak_units": ("peak_units", "u"),
    "longest": ("longest_tokens", "tokens"),
}
"""Metric -> key of a record, unit. The names are those of reported.csv where it has the metric."""


@dataclass(frozen=True)
class Row:
    """One value. outcome: "ok", "oom" or another outcome of a record; value: None where there is none.

    source: where it is printed, or the record's file, run and point. setting, kernel, width (U): what tells rows of one
    method apart.
    """

    mark: str
    model: str
    layers: int | None
    gpus: int | None
    gpu: str | None
    method: str
    setting: str
    kernel: str | None
    width: int | None
    tokens: int | None
    metric: str
    value: float | None
    unit: str
    outcome: str
    source: str
    note: str = ""

    @property
    def series(self) -> str:
        return ", ".join(filter(None, (self.method, self.setting, self.kernel)))


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


@dataclass(frozen=True)
class Sources:
    """What figures are made from. records: the last of each point, all experiments; every: all of them, oldest first."""

    records: list[dict[str, Any]]
    every: list[dict[str, Any]]
    published: list[dict[str, Any]]


def load(results: Path = RESULTS, reported: Path = REPORTED) -> Sources:
    """Read every record of a folder and the published numbers. Raises RecordError, ConfigError, also where there is no such folder."""
    if not Path(results).is_dir():
        raise ConfigError(f"{results}: no folder of records; the repository's is {RESULTS}")
    every = [record for path in sorted(Path(results).glob("*.jsonl")) for record in records.load(path)]
    return Sources(latest(every), every, read_reported(Path(reported)))


def model_of(name: str | None) -> str:
    """A model's name as reported.csv writes it: llama3_8b -> llama3-8b; the paper's shape of Qwen3-32B is its qwen3-32b."""
    return (name or "").lower().replace("_", "-").removesuffix("-paper")


def our_method(name: str) -> str | None:
    """A row's method as records call it, whether it is a record's or reported.csv's."""
    return name if name in typing.get_args(Method) else method_of(name)


def from_reported(rows: Iterable[dict[str, Any]], **changes: Any) -> list[Row]:
    """Rows of reported.csv (`read_reported`), marked reported; `changes` rename metric, method or setting."""
    found = []
    for row in rows:
        made = Row(
            mark="reported", model=row["model"], layers=None, gpus=int(row["gpus"]), gpu=row["gpu"], method=row["method"], setting="",
            kernel=None, width=None, tokens=row["tokens"], metric=row["metric"], value=row["value"], unit=row["unit"],
            outcome="oom" if row["status"] == "oom" else "ok", source=f"{row['source']}, {row['figure']}",
            note="digitised" if row["status"] == "digitised" else "",
        )  # fmt: skip
        found.append(dataclasses.replace(made, **changes))
    return found


def from_record(record: dict[str, Any], metric: str, **changes: Any) -> Row:
    """One number of a record, marked as the record's provenance says.

    Of a run or plan that ended in anything but "ok" only the planner's memory is kept: that much would have been needed.
    """
    key, unit = METRICS[metric]
    outcome = "oom" if record["outcome"].startswith("oom") else record["outcome"]
    needed = record["provenance"] == "predicted" and metric.startswith("peak")
    value = record.get(key) if outcome == "ok" or needed else None
    gpu = (record["gpu"] or "").removeprefix("NVIDIA ") or None
    source = f"{record['experiment']}.jsonl, {record['run_id']}, {record.get('point', '')}"
    # Where the memory that ended it is not the GPUs', it is said: a figure's OOM means the device's.
    note = record["outcome"] if record["outcome"] not in ("ok", "oom_device") else ""
    row = Row(
        record["provenance"], model_of(record["model"]), record["layers"], record["gpus"], gpu, record["method"],
        setting_of(record), record["kernel"] if record["provenance"] == "measured" else None, record["heads_per_stage"],
        record["tokens"], metric, value, unit, outcome, source, note,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def stack_of(record: dict[str, Any]) -> str | None:
    """Whose set-up a prediction is of: "paper", also of one made for a figure of its, "ours" or a guide's figure; None for a run."""
    if record["provenance"] != "predicted":
        return None
    figure = record.get("figure")
    paper = figure is not None and not str(figure).startswith("trl")
    return record.get("stack") or ("paper" if paper else figure)


def setting_of(record: dict[str, Any]) -> str:
    """What a reader needs to tell records of one method apart: stack, ranks of a ring, where attention output and layers' inputs are,
    overlap, stage width, ZeRO stage, what is not in tiles, blocks of attention calls."""
    stack = stack_of(record)
    words, whole = [{"paper": "paper's set-up", "ours": "this stack"}.get(stack, stack)], stack is not None
    if record["method"] == "upipe":
        words += [ranks(record)] if (record["ring"] or 1) > 1 and not whole else []
        some, layers = record.get("attention_output_host_layers"), record["layers"]
        part = record["attention_output"] == "host" and some is not None and some < layers
        words += [] if whole else [f"output of {some} layers on host" if part else f"output on {record['attention_output']}"]
        words += ["no overlap"] if record["overlap"] is False and not whole else []
        words += ["bf16 dx"] if record["dx"] == "bfloat16" and not whole else []
        widest = record["heads_per_stage"] not in (None, record["sp"])
        words += [f"U={record['heads_per_stage']}"] if widest else []
    words += ["fused layers"] if record.get("fused") else []
    words += ["pageable"] if record["offload"] == "pageable" and not whole else []
    if record.get("scope") == "model" and not whole:
        kept = record.get("checkpointing") == "none"
        words += [f"ZeRO-{record['zero']}"] if record["zero"] not in (None, 3) else []
        words += ["inputs on device"] if record["offload"] == "none" and not kept else []
        peer = record.get("offload_by") not in (None, "upipe") and record["method"] != "alst"
        words += [f"inputs by {record['offload_by']}"] if peer else []
        words += ["no checkpointing"] if kept else []
        words += [_untiled(record)] if record["method"] != "alst" else []
        words += [f"{record['allocator_cap_gib']:g} GiB a GPU"] if record.get("allocator_cap_gib") else []
        words += ["attention in blocks"] if "blocks" in record.get("setting", "") else []
    words += ["memory only"] if record.get("memory_only") else []
    return ", ".join(str(word) for word in words if word)


def ranks(record: dict[str, Any]) -> str:
    """Ulysses and ring ranks of a record, as the paper writes them: 8u2r."""
    return f"{record['sp']}u{record['ring']}r"


def _untiled(record: dict[str, Any]) -> str:
    """What is known not to be in tiles; a fused layer has tiles of its own. Records without `memory` do not tell of norms, and older ones
    not of the loss."""
    memory = record.get("memory")
    whole = {
        "MLP": record["tile_tokens"] is None and not record.get("fused"),
        "norms": isinstance(memory, dict) and memory["norm_tokens"] is None and not record.get("fused"),
        "loss": record.get("loss_tokens", 0) is None,
    }
    names = [name for name, untiled in whole.items() if untiled]
    return "untiled" if len(names) == len(whole) else f"whole {' and '.join(names)}" if names else ""


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows whose fields have these values; a function as value is a condition."""
    return [row for row in rows if all(w(getattr(row, k)) if callable(w) else getattr(row, k) == w for k, w in wanted.items())]


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Rows by key, in the order in which keys first appear."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def number(value: float | None) -> str:
    """Four digits, more where a whole number has them."""
    return "" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cell(row: Row) -> str:
    """A value for a table; OOM, or how else the run ended, stands with it or in its place."""
    if row.outcome == "ok":
        return number(row.value) or "–"
    return f"{row.outcome.upper()}{f' ({number(row.value)})' if row.value is not None else ''}"


def to_csv(rows: Iterable[Row]) -> str:
    """One line a row, all fields; values with six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for row in rows:
        values = dataclasses.asdict(row) | {"value": None if row.value is None else f"{row.value:.6g}"}
        writer.writerow(values.values())
    return text.getvalue()


def to_markdown(rows: Iterable[Row]) -> str:
    """Series by lengths. What rows need not be told apart by is left out."""
    rows = list(rows)
    if not rows:
        return "No value yet.\n"
    names = ("mark", "model", "layers", "gpus", "gpu", "method", "setting", "kernel", "metric", "unit")
    columns = [name for name in names if any(getattr(row, name) for row in rows)]
    lengths = sorted({row.tokens for row in rows if row.tokens is not None})
    lines = [[*columns, *map(format_tokens, lengths)]]
    for key, mine in grouped(rows, lambda row: tuple(getattr(row, name) for name in columns)).items():
        cells = {tokens: "; ".join(dict.fromkeys(map(cell, same))) for tokens, same in grouped(mine, lambda row: row.tokens).items()}
        lines.append(["" if value is None else str(value) for value in key] + [cells.get(tokens, "") for tokens in lengths])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table of a head and its rows."""
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body]) + "\n"


BASELINES = ("ulysses", "usp", "alst")
"""What a throughput is compared with, the first that there is: Ulysses, its form on a ring, DeepSpeed's ALST stack around it."""


def over_ulysses(rows: Iterable[Row], metric: str = "throughput") -> list[Row]:
    """Each row's value over that of the first of `BASELINES` of the same mark, source of numbers or experiment, model, GPUs, kernel
    and length, as rows of metric `<metric> over Ulysses`. None is made across marks or kernels.

    Of measured rows the baseline is one of the same run, where that has one. A run of experiments.stack that has none has no ratios;
    other experiments may be measured in several runs, and are compared with the last.
    """
    rows = pick(rows, metric=metric)
    found = []
    for same in grouped(rows, lambda r: (r.mark, r.model, r.layers, r.gpus, r.gpu, r.kernel, r.tokens, r.source.split(",")[0])).values():
        bases = [row for name in BASELINES for row in same if our_method(row.method) == name and row.value is not None]
        for row in same if bases else ():
            beside = [base for base in bases if run_of(base) == run_of(row)]
            if row.mark != "measured" or not run_of(row).startswith("stack.jsonl"):
                # The last: rows are in the order of their records.
                beside = beside or [base for base in bases if base.method == bases[0].method][-1:]
            if beside and row.value is not None and row.outcome == "ok":
                changes = {"metric": f"{metric} over Ulysses", "value": row.value / beside[0].value, "unit": "ratio"}
                found.append(dataclasses.replace(row, **changes))
    return found


def run_of(row: Row) -> str:
    """File and run of a record's row; source and figure of a published one."""
    return ",".join(row.source.split(",")[:2])
