"""Published figures redrawn from `experiments/results/*.jsonl` and `paper_figures/reported.csv`.

    from experiments import figures
    sources = figures.load()
    rows = figures.FAMILIES["table3"].rows(sources)     # values, each marked reported, measured or predicted
    figures.FAMILIES["table3"].draw(rows)               # a matplotlib figure

A new record needs no change here: rows are chosen by the fields of records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments import points
from experiments.figures import breakdown, glm, memory, multinode, planner, style, throughput, trl, values, widths
from experiments.figures.values import Row, Sources, load, to_csv, to_markdown

FOLDER = points.ROOT / "paper_figures"


@dataclass(frozen=True)
class Family:
    """A figure: its title, what it shows, its rows from the sources, and the drawing of rows."""

    title: str
    about: str
    rows: Callable[[Sources], list[Row]]
    _draw: Callable[[list[Row]], Figure]

    def draw(self, rows: list[Row]) -> Figure:
        """The figure of these rows and nothing else."""
        with style.look():
            return self._draw(rows)


FAMILIES = {
    "table3": Family(
        "Throughput by method and length (Table 3)",
        "Table 3 of Untied Ulysses as reported, the planner's predictions for the same machine, and full-depth runs where there are any. "
        "Below: throughput over Ulysses', only within one mark, and peak memory for the same, of which two values were published.",
        throughput.rows, throughput.draw,
    ),
    "table3-2gpu": Family(
        "Throughput and memory with fewer layers or GPUs than published",
        "Whole models of Table 3, each group with its layers and its machine. Ratios are to DeepSpeed's Ulysses (or ALST, its whole "
        "stack) of the same sweep and kernel. Layers and length decide tokens/s here: compare within a group only. PyTorch native's time "
        "stands, its gradients with cuDNN are wrong (docs/methods.md).",
        throughput.rows_2gpu, throughput.draw_2gpu,
    ),
    "memory-ladder": Family(
        "Memory, lever by lever (Figure 1)",
        "Peak at 3M tokens as reported, with the prediction of the same run; below, the longest length each lever trains.",
        memory.rows, memory.draw,
    ),
    "multinode": Family(
        "Two nodes: 8 Ulysses ranks inside, a ring of 2 across",
        "Peak memory and throughput over USP's, read off the published plots; USP is out of memory at 8M.",
        multinode.rows, multinode.draw,
    ),
    "trl": Family(
        "TRL's guide to training at 1M tokens",
        "Step time and peak memory at 1M tokens, and step time over GPUs: the guide's numbers, predictions of its set-ups, and records of "
        "`trl_qwen3_8b_1m`, `trl_scaling` and their variants where there are any. The guide does not name the model that it scaled.",
        trl.rows, trl.draw,
    ),
    "u-ablation": Family(
        "Stage width U against time and memory",
        "One step at every U of a sweep: U = P is the least memory, U = H is one stage of all heads.",
        widths.rows, widths.draw,
    ),
    "breakdown": Family(
        "Where a step's time goes",
        "From the profiler's events of one step on the GPU that the other waits for; only what computation does not hide counts as "
        "exchange or host copy. The profiler slows the host, which leaves the GPU idle: a line marks the time of a step without it. "
        "Attention blocks are under checkpointing; of whole models a panel is a run. Forward and backward of steps without a profile "
        "are in the table alone. The paper's own breakdown was not published in numbers.",
        breakdown.rows, breakdown.draw,
    ),
    "planner": Family(
        "The planner against measurements and published numbers",
        "Each point is a prediction over the true value, throughputs as time: of whole models the last that was recorded before they were "
        "measured, or else the first, and their peaks above the states. Attention rates of the planner come from the same machine as the "
        "measured blocks.",
        planner.rows, planner.draw,
    ),
    "glm": Family(
        "GLM-5.3-Flash: the published ablation, and each fix turned off",
        "What SkyRL's guide reports, this library's GLM runs where there are any, and the memory of its layers at 1M tokens with each fix "
        "turned off (`python -m experiments.glm_ablation --help` says what is simulated, stood in for and calculated; nothing of it was "
        "measured on a GPU). Gathering the hidden state is a fix of time: it sends less and holds more.",
        glm.rows, glm.draw,
    ),
}  # fmt: skip


def make(name: str, sources: Sources, folder: Path = FOLDER) -> list[Row]:
    """Write `<name>.png`, `.pdf`, `.csv` and `.md` of a family into a folder; returns its rows."""
    family = FAMILIES[name]
    rows = family.rows(sources)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(name, rows, folder)
    drawn = family.draw(rows)
    for ending in ("png", "pdf"):
        (folder / f"{name}.{ending}").write_bytes(style.picture(drawn, ending))
    style.close(drawn)
    return rows


def write_table(name: str, rows: list[Row], folder: Path) -> None:
    """The table behind a figure, a value a line as CSV, and to be read as Markdown."""
    family = FAMILIES[name]
    (folder / f"{name}.csv").write_text(to_csv(rows), encoding="utf-8")
    text = f"# {family.title}\n\n{family.about}\n\n![{family.title}]({name}.png)\n\n{to_markdown(rows)}"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


__all__ = ["FAMILIES", "FOLDER", "Family", "Row", "Sources", "load", "make", "style", "to_csv", "to_markdown", "values", "write_table"]
