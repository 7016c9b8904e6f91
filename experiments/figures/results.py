"""The README's "Results": reported numbers against ours, with the gap, from records. `python -m experiments.figures readme`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import points
from experiments.figures import FAMILIES, throughput
from experiments.figures.style import KERNELS, MODELS
from experiments.figures.values import (
    Row,
    Sources,
    from_record,
    from_reported,
    grouped,
    markdown,
    model_of,
    number,
    over_ulysses,
    pick,
    stack_of,
)
from upipe.records import format_tokens

README = points.ROOT / "README.md"
BEGIN, END = "<!-- results: made by python -m experiments.figures readme -->", "<!-- results: end -->"


def percent(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %"


def table3(sources: Sources) -> dict[tuple[str, int], Row]:
    """Llama3-8B's throughputs in Table 3: (method, tokens) -> row."""
    published = from_reported(r for r in sources.published if (r["figure"], r["model"]) == ("table3", "llama3-8b"))
    return {(row.method, row.tokens): row for row in published}


def blocks(sources: Sources) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The last measured blocks of UPipe with Ulysses in the same run: (UPipe's record, Ulysses')."""
    found: dict[tuple, tuple] = {}
    measured = [r for r in sources.every if r.get("scope") == "block" and r["provenance"] == "measured" and r["outcome"] == "ok"]
    for record in measured:
        if record["method"] == "upipe" and record.get("over_ulysses") is not None:
            shared = ("run_id", "model", "kernel", "tokens", "sp")
            base = [r for r in measured if r["method"] == "ulysses" and all(r[name] == record[name] for name in shared)]
            if base:
                names = ("model", "tokens", "kernel", "sp", "attention_output", "overlap", "dx", "heads_per_stage")
                key = tuple(record[name] for name in names)
                found[key] = (record, base[0])
    return [found[key] for key in sorted(found, key=lambda key: (*key[:5], not key[5], key[6:]))]


def whole_models(sources: Sources) -> list[tuple[Row, Row | None, Row | None]]:
    """UPipe on whole models beside Ulysses of the same sweep: throughput, its ratio, the ratio of peaks above states. Of models at full
    depth also those of a run without Ulysses."""
    rows = throughput.rows_2gpu(sources) + [row for row in throughput.rows(sources) if row.mark == "measured"]
    found = []
    for same in grouped(pick(rows, method="upipe"), lambda r: (r.model, r.layers, r.gpus, r.tokens, r.series)).values():
        speed, ratio = pick(same, metric="throughput"), pick(same, metric="throughput over Ulysses")
        full = speed and speed[0].layers == throughput.PUBLISHED[speed[0].model][1]
        if speed and (ratio or full):
            memory = pick(same, metric="peak_above_states over Ulysses")
            found.append((speed[0], ratio[0] if ratio else None, memory[0] if memory else None))
    return found


def figure1(sources: Sources, method: str, metric: str) -> float:
    """A bar of Figure 1, GiB."""
    return next(r["value"] for r in sources.published if (r["figure"], r["method"], r["metric"]) == ("figure1", method, metric))


def predictions(sources: Sources, stack: str) -> dict[int, dict[str, Any]]:
    """Predictions of Llama3-8B's Table 3 for a stack, `paper` or `ours`: tokens -> record."""
    return {
        record["tokens"]: record for record in throughput.whole_models(sources)
        if stack_of(record) == stack and record["method"] == "upipe"
        and (model_of(record["model"]), record["gpus"], record["ring"] or 1) == ("llama3-8b", 8, 1)
    }  # fmt: skip


def render(sources: Sources) -> str:
    """The section's text."""
    parts = [
        "Every number is *reported* (by the paper or a guide; [reported.csv](paper_figures/reported.csv) has the sources), *measured* "
        "(by this library, on two H200s: it has run on nothing larger) or *predicted* (by `upipe plan`). "
        "[docs/claims.md](docs/claims.md) goes through the published claims one by one.",
        "**Whole models, two H200s, measured**, beside Table 3 (8 × H100, other depth and kernel: compare the ratios). Where a sweep has "
        "no plain Ulysses, DeepSpeed's ALST stack around it stands in. Output on the host, which saves a forward of attention, is "
        "not the paper's.",
        _whole(sources) + _moments(sources),
        "**One attention block under checkpointing, Llama3-8B, two H200s, measured**: time and peak above the block's inputs over Ulysses' "
        f"in the same run. Reported for whole models at 3M on 8 GPUs: attention's peak {_reported_peaks(sources)}.",
        _blocks(sources),
        "**Table 3, Llama3-8B on 8 × H100, predicted against reported** (tokens/s/GPU). Not measured: no such machine was at hand.",
        _predicted(sources),
        _links(),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _whole(sources: Sources) -> str:
    published = {(row.method, row.tokens): row.value for row in over_ulysses(table3(sources).values())}
    heads = ["model, tokens", "setting", "tokens/s/GPU", "over Ulysses', measured", "reported", "gap", "peak above states over Ulysses'"]
    lines = [heads]
    for speed, ratio, memory in whole_models(sources):
        theirs = published.get(("upipe", speed.tokens)) if speed.model == "llama3-8b" else None
        gap = "–" if ratio is None or theirs is None else percent(ratio.value, theirs)
        lines.append([
            f"{MODELS.get(speed.model, speed.model)}, {speed.layers} layers, {format_tokens(speed.tokens)}",
            f"{speed.setting}, {KERNELS.get(speed.kernel, speed.kernel)}", number(speed.value),
            "–" if ratio is None else f"{ratio.value:.3f}", "–" if theirs is None else f"{theirs:.3f}", gap,
            "–" if memory is None else f"{memory.value:.3f}",
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
    lines = [["tokens", "kernel", "setting", "time over Ulysses'", "peak (u)", "Ulysses' peak (u)", "peak over Ulysses'"]]
    for record, base in blocks(sources):
        if model_of(record["model"]) == "llama3-8b":
            mine, its = record["peak_units"], base["peak_units"]
            kernel, setting = KERNELS.get(record["kernel"], record["kernel"]), from_record(record, "step_time").setting
            numbers = (f"{record['over_ulysses']:.3f}", f"{mine:.2f}", f"{its:.2f}", f"{mine / its:.2f}")
            lines.append([format_tokens(record["tokens"]), kernel, setting, *numbers])
    return markdown(lines) if len(lines) > 1 else "Nothing measured yet."


def _predicted(sources: Sources) -> str:
    published, paper, ours = table3(sources), predictions(sources, "paper"), predictions(sources, "ours")
    lines = [["tokens", "Ulysses, reported", "UPipe, reported", "paper's set-up, predicted", "gap", "this stack, predicted", "gap"]]
    for tokens in sorted({tokens for _, tokens in published} | set(paper) | set(ours)):
        row, theirs = [format_tokens(tokens)], published.get(("upipe", tokens))
        for method in ("ulysses", "upipe"):
            cell = published.get((method, tokens))
            row.append("–" if cell is None else "OOM" if cell.outcome == "oom" else number(cell.value))
        for found in (paper.get(tokens), ours.get(tokens)):
            speed = None if found is None or found["outcome"] != "ok" else found["tokens_per_s_per_gpu"]
            row.append("–" if found is None else "OOM" if speed is None else number(speed))
            known = speed is not None and theirs is not None and theirs.value is not None
            row.append(percent(speed, theirs.value) if known else "–")
        lines.append(row)
    return markdown(lines)


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
