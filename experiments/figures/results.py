"""The README's "Results": reported numbers against ours, with the gap, from records. `python -m experiments.figures readme`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import points
from experiments.figures import FAMILIES, multinode, throughput
from experiments.figures.memory import TOKENS as FIGURE1
from experiments.figures.style import KERNELS, METHODS, MODELS
from experiments.figures.values import (
    Row,
    Sources,
    from_record,
    from_reported,
    grouped,
    markdown,
    model_of,
    number,
    our_method,
    over_ulysses,
    pick,
    setting_of,
    stack_of,
)
from upipe.records import format_tokens

README = points.ROOT / "README.md"
BEGIN, END = "<!-- results: made by python -m experiments.figures readme -->", "<!-- results: end -->"


def percent(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %"


def machine(gpus: int | None, gpu: str | None) -> str:
    """GPUs of a record or row, as 2 × H200."""
    return f"{gpus} × {(gpu or '').removeprefix('NVIDIA ')}"


def machines(measured: list[dict[str, Any]]) -> str:
    """The most GPUs of each kind that these records ran on."""
    most: dict[str, int] = {}
    for record in measured:
        if record["provenance"] == "measured" and record["gpus"]:
            most[record["gpu"]] = max(record["gpus"], most.get(record["gpu"], 0))
    return " and ".join(machine(gpus, gpu) for gpu, gpus in most.items()) or "none yet"


def at_published_size(sources: Sources, model: str) -> list[dict[str, Any]]:
    """Measured records of a model of Table 3 with all its layers, on as many GPUs."""
    found = [r for r in throughput.whole_models(sources) if r["provenance"] == "measured" and model_of(r["model"]) == model]
    return [r for r in found if throughput.is_published_size(r)]


def named(record: dict[str, Any]) -> str:
    """Method and setting of a record."""
    setting = setting_of(record)
    return METHODS[record["method"]][0] + (f" ({setting})" if setting else "")


def table3(sources: Sources, model: str = "llama3-8b") -> dict[tuple[str, int], Row]:
    """A model's throughputs in Table 3: (method, tokens) -> row."""
    published = from_reported(r for r in sources.published if (r["figure"], r["model"]) == ("table3", model))
    return {(row.method, row.tokens): row for row in published}


def blocks(sources: Sources) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The last measured blocks of UPipe with Ulysses in the same run: (UPipe's record, Ulysses')."""
    found: dict[tuple, tuple] = {}
    measured = [r for r in sources.every if r.get("scope") == "block" and r["provenance"] == "measured" and r["outcome"] == "ok"]
    for record in measured:
        if record["method"] == "upipe" and record.get("over_ulysses") is not None:
            shared = ("run_id", "model", "kernel", "tokens", "sp", "gpus", "gpu")
            base = [r for r in measured if r["method"] == "ulysses" and all(r[name] == record[name] for name in shared)]
            if base:
                names = ("model", "tokens", "kernel", "sp", "attention_output", "overlap", "dx", "heads_per_stage", "gpus", "gpu")
                key = tuple(record[name] for name in names)
                found[key] = (record, base[0])
    return [found[key] for key in sorted(found, key=lambda key: (*key[:5], not key[5], key[6:]))]


def whole_models(sources: Sources) -> list[tuple[Row, Row | None, Row | None]]:
    """UPipe on whole models beside Ulysses of the same sweep: throughput, its ratio, the ratio of peaks above states. Of models at full
    depth also those of a run without Ulysses."""
    rows = throughput.rows_2gpu(sources) + [row for row in throughput.rows(sources) if row.mark == "measured"]
    found = []
    for same in grouped(pick(rows, method="upipe"), lambda r: (r.model, r.layers, r.gpus, r.gpu, r.tokens, r.series)).values():
        speed, ratio = pick(same, metric="throughput"), pick(same, metric="throughput over Ulysses")
        full = speed and speed[0].layers == throughput.PUBLISHED[speed[0].model][1]
        if speed and (ratio or full):
            memory = pick(same, metric="peak_above_states over Ulysses")
            found.append((speed[0], ratio[0] if ratio else None, memory[0] if memory else None))
    return found


def figure1(sources: Sources, method: str, metric: str) -> float:
    """A bar of Figure 1, GiB."""
    return next(r["value"] for r in sources.published if (r["figure"], r["method"], r["metric"]) == ("figure1", method, metric))


def predictions(sources: Sources, stack: str, model: str = "llama3-8b", method: str = "upipe") -> dict[int, dict[str, Any]]:
    """Predictions of a method in Table 3 for a stack, `paper` or `ours`: tokens -> record. A ring crosses nodes, if there are several."""
    gpus = throughput.PUBLISHED[model][0]
    return {
        record["tokens"]: record for record in throughput.whole_models(sources)
        if stack_of(record) == stack and record["method"] == method
        and (model_of(record["model"]), record["gpus"], record["ring"] or 1) == (model, gpus, gpus // throughput.NODE)
    }  # fmt: skip


def render(sources: Sources) -> str:
    """The section's text."""
    parts = [
        "Every number is *reported* (by the paper or a guide; [reported.csv](paper_figures/reported.csv) has the sources), *measured* "
        f"(by this library; most GPUs of a kind: {machines(sources.every)}) or *predicted* (by `upipe plan`). "
        "[docs/claims.md](docs/claims.md) goes through the published claims one by one.",
        "**Whole models, measured**, beside Table 3 (Llama3-8B: all 32 layers on 8 × H100; where depth, machine or kernel are others, "
        "compare the ratios). Where a sweep has no plain Ulysses, DeepSpeed's ALST stack around it stands in. Output on the host, which "
        "saves a forward of attention, is not the paper's.",
        _whole(sources) + _moments(sources),
        "**One attention block under checkpointing, Llama3-8B, measured**: time and peak above the block's inputs over Ulysses' "
        f"in the same run. Reported for whole models at 3M on 8 GPUs: attention's peak {_reported_peaks(sources)}.",
        _blocks(sources),
    ]
    for model in throughput.PUBLISHED:
        parts += [_table3_words(sources, model), _table3(sources, model)]
    parts += [
        "**Peak memory for the same** (GiB/GPU), of UPipe.",
        _peaks(sources),
        "**Figure 1, Llama3-8B at 3M on 8 × H100** (peak, GiB/GPU); alst is Ulysses with the same memory levers.",
        _figure1(sources),
        "**Two nodes, Llama3-8B on 16 × H100, 8u2r** (peak, GiB/GPU, and throughput over USP's; reported numbers are read off plots).",
        _two_nodes(sources),
        _links(),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _whole(sources: Sources) -> str:
    published = {(row.method, row.tokens): row.value for row in over_ulysses(table3(sources).values())}
    heads = ["model, tokens", "machine", "setting", "tokens/s/GPU", "over Ulysses', measured", "reported", "gap"]
    lines = [[*heads, "peak above states over Ulysses'"]]
    for speed, ratio, peaks in whole_models(sources):
        theirs = published.get(("upipe", speed.tokens)) if speed.model == "llama3-8b" else None
        gap = "–" if ratio is None or theirs is None else percent(ratio.value, theirs)
        lines.append([
            f"{MODELS.get(speed.model, speed.model)}, {speed.layers} layers, {format_tokens(speed.tokens)}",
            machine(speed.gpus, speed.gpu), f"{speed.setting}, {KERNELS.get(speed.kernel, speed.kernel)}", said(speed),
            "–" if ratio is None else f"{ratio.value:.3f}", "–" if theirs is None else f"{theirs:.3f}", gap,
            "–" if peaks is None else f"{peaks.value:.3f}",
        ])  # fmt: skip
    return markdown(lines) if len(lines) > 1 else "Nothing measured yet."


def _moments(sources: Sources) -> str:
    """What is to be known of one run's peaks, as long as it is shown."""
    of_it = [row for speed, _, memory in whole_models(sources) for row in (speed, memory) if row is not None]
    if not any("20261130T030107Z-89fa02" in row.source and row.tokens == 2**17 for row in of_it):
        return ""
    return "\nUlysses' peak at 128K holds 7.2 GiB of Adam's moments ([docs/methods.md](docs/methods.md)): that ratio is not attention's.\n"


def _reported_peaks(sources: Sources) -> str:
    ours, theirs = (figure1(sources, method, "peak_attention") for method in ("upipe", "alst"))
    return f"{ours:g} GiB over {theirs:g} GiB = {ours / theirs:.2f}"


def _blocks(sources: Sources) -> str:
    lines = [["tokens", "machine", "kernel", "setting", "time over Ulysses'", "peak (u)", "Ulysses' peak (u)", "peak over Ulysses'"]]
    for record, base in blocks(sources):
        if model_of(record["model"]) == "llama3-8b":
            mine, its = record["peak_units"], base["peak_units"]
            kernel, setting = KERNELS.get(record["kernel"], record["kernel"]), from_record(record, "step_time").setting
            numbers = (f"{record['over_ulysses']:.3f}", f"{mine:.2f}", f"{its:.2f}", f"{mine / its:.2f}")
            lines.append([format_tokens(record["tokens"]), machine(record["gpus"], record["gpu"]), kernel, setting, *numbers])
    return markdown(lines) if len(lines) > 1 else "Nothing measured yet."


def _table3_words(sources: Sources, model: str) -> str:
    gpus, layers, name = throughput.PUBLISHED[model]
    ours = at_published_size(sources, model)
    said = f"Measured on {machines(ours)}." if ours else f"Not measured: no record is of all {layers} layers on {gpus} GPUs."
    ring = f" Ulysses is that of {throughput.NODE} ranks in a node, with a ring across." if gpus > throughput.NODE else ""
    return f"**Table 3, {name} on {gpus} × H100, predicted against reported** (tokens/s/GPU). {said}{ring}"


def _table3(sources: Sources, model: str) -> str:
    """Lengths as rows; columns of predictions and measurements where there are any."""
    published, measured = table3(sources, model), at_published_size(sources, model)
    stacks = {"paper's set-up": predictions(sources, "paper", model), "this stack": predictions(sources, "ours", model)}
    stacks = {name: found for name, found in stacks.items() if found}
    kinds = grouped(measured, lambda r: machine(r["gpus"], r["gpu"]))
    head = ["tokens", "Ulysses, reported", "UPipe, reported"]
    head += [text for name in stacks for text in (f"{name}, predicted", "gap")] + [f"measured, {kind}" for kind in kinds]
    lines = [head]
    for tokens in sorted({*(tokens for _, tokens in published), *(t for found in stacks.values() for t in found), *_lengths(measured)}):
        row, theirs = [format_tokens(tokens)], published.get(("upipe", tokens))
        for method in ("ulysses", "upipe"):
            cell = published.get((method, tokens))
            row.append("–" if cell is None else "OOM" if cell.outcome == "oom" else number(cell.value))
        for found in (found.get(tokens) for found in stacks.values()):
            speed = None if found is None or found["outcome"] != "ok" else found["tokens_per_s_per_gpu"]
            row.append("–" if found is None else "OOM" if speed is None else number(speed))
            known = speed is not None and theirs is not None and theirs.value is not None
            row.append(percent(speed, theirs.value) if known else "–")
        row += [told(same, tokens, "throughput") for same in kinds.values()]
        lines.append(row)
    return markdown(lines)


def _lengths(found: list[dict[str, Any]]) -> set[int]:
    return {record["tokens"] for record in found}


def told(found: list[dict[str, Any]], tokens: int, metric: str) -> str:
    """One number of every record of a length, or how it ended, each with its method and setting."""
    rows = [(record, from_record(record, metric)) for record in found if record["tokens"] == tokens]
    return "; ".join(f"{named(record)} {said(row)}" for record, row in rows) or "–"


def told_step(record: dict[str, Any]) -> str:
    """A record's step time and peak, or how it ended."""
    cells = [from_record(record, metric) for metric in ("step_time", "peak")]
    return said(cells[0]) if cells[0].outcome != "ok" else ", ".join(f"{said(row)} {row.unit}" for row in cells if row.value is not None)


def said(row: Row) -> str:
    """A row's value or its outcome."""
    return row.outcome.upper() if row.outcome != "ok" else number(row.value) or "–"


def _compared(theirs: Row | None, ours: Row | None) -> list[str]:
    """Reported, predicted, and by how much the prediction is above."""
    known = None not in (theirs, ours) and None not in (theirs.value, ours.value) and theirs.outcome == ours.outcome == "ok"
    cells = ["–" if row is None else said(row) for row in (theirs, ours)]
    return [*cells, percent(ours.value, theirs.value) if known else "–"]


def _peaks(sources: Sources) -> str:
    lines = [["model, tokens", "machine", "reported", "paper's set-up, predicted", "gap", "measured"]]
    for theirs in from_reported(r for r in sources.published if r["figure"] == "peak-table"):
        found = predictions(sources, "paper", theirs.model).get(theirs.tokens)
        ours = from_record(found, "peak") if found is not None else None
        mine = [r for r in at_published_size(sources, theirs.model) if r["method"] == our_method(theirs.method)]
        what = f"{MODELS.get(theirs.model, theirs.model)}, {format_tokens(theirs.tokens)}"
        lines.append([what, machine(theirs.gpus, theirs.gpu), *_compared(theirs, ours), _measured(mine, theirs.tokens)])
    return markdown(lines)


def _measured(found: list[dict[str, Any]], tokens: int) -> str:
    """Peaks of measured records of a length, each kind of machine named."""
    kinds = grouped([r for r in found if r["tokens"] == tokens], lambda r: machine(r["gpus"], r["gpu"]))
    return "; ".join(f"{kind}: {told(same, tokens, 'peak')}" for kind, same in kinds.items()) or "–"


def _figure1(sources: Sources) -> str:
    lines = [["method", "reported: states + attention + other", "whole", "paper's set-up, predicted", "gap", "measured"]]
    measured = at_published_size(sources, "llama3-8b")
    for method in ("alst", "upipe"):
        bars = [figure1(sources, method, f"peak_{part}") for part in ("model", "attention", "other")]
        name = "ulysses" if method == "alst" else method
        found = predictions(sources, "paper", method=name).get(FIGURE1)
        cells = ["–", "–"] if found is None else [said(from_record(found, "peak")), percent(found["peak_gib"], sum(bars))]
        mine = [r for r in measured if r["method"] in (name, method)]
        split = " + ".join(f"{bar:g}" for bar in bars)
        lines.append([METHODS[method][0], split, number(sum(bars)), *cells, _measured(mine, FIGURE1)])
    return markdown(lines)


def _two_nodes(sources: Sources) -> str:
    found = multinode.rows(sources)
    measured = [r for r in multinode.two_nodes(sources) if r["provenance"] == "measured"]
    head = ["tokens"]
    for name in ("UPipe", "USP"):
        head += [f"{name}, reported", "predicted", "gap"]
    lines = [[*head, "UPipe over USP, reported", "predicted", "peak, measured"]]
    for tokens in sorted({row.tokens for row in pick(found, metric="peak")}):
        row = [format_tokens(tokens)]
        for method in ("upipe", "usp"):
            row += _compared(*(_one(found, mark, method, tokens, "peak") for mark in ("reported", "predicted")))
        ratios = (_one(found, mark, "upipe", tokens, "throughput over Ulysses") for mark in ("reported", "predicted"))
        row += ["–" if ratio is None else f"{ratio.value:.3f}" for ratio in ratios]
        lines.append([*row, _measured(measured, tokens)])
    return markdown(lines)


def _one(found: list[Row], mark: str, method: str, tokens: int, metric: str) -> Row | None:
    """The row of the published curve, or of the paper's set-up as predicted."""
    setting = "" if mark == "reported" else "8u2r, paper's set-up"
    rows = pick(found, mark=mark, method=lambda name: our_method(name) == method, tokens=tokens, metric=metric, setting=setting)
    return rows[0] if rows else None


def _links() -> str:
    lines = [["figure", "picture", "table", "notebook", "page"]]
    for name, family in FAMILIES.items():
        link = {ending: f"[{ending}](paper_figures/{name}.{ending})" for ending in ("png", "pdf", "csv", "md")}
        notebook, page = (f"[{ending}](notebooks/{name}.{ending})" for ending in ("ipynb", "html"))
        lines.append([family.title, f"{link['png']}, {link['pdf']}", f"{link['csv']}, {link['md']}", notebook, page])
    return markdown(lines)


def replaced(text: str, section: str) -> str:
    """A README with its section between the markers made anew. Raises ValueError where they are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md needs the lines {BEGIN!r} and {END!r} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{rest.split(END)[1]}"


def write(sources: Sources, path: Path = README) -> None:
    path.write_text(replaced(path.read_text(encoding="utf-8"), render(sources)), encoding="utf-8")
