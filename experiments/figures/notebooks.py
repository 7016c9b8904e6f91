"""Run the notebooks; write beside each its picture and an HTML page that shows it. Needs requirements-dev.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import figures, points
from upipe.config import ConfigError

FOLDER = points.ROOT / "notebooks"


def execute(path: Path, folder: Path) -> list[Path]:
    """Run a notebook from the repository's root and write NAME.ipynb, NAME.png and NAME.html into a folder, with the figure's title and
    caption of now; one that is not there yet is made.

    Raises nbclient's CellExecutionError where a cell fails, ConfigError where the packages are not there.
    """
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbconvert import HTMLExporter
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: python -m pip install -r requirements-dev.txt") from error
    from traitlets.config import Config

    notebook = nbformat.from_dict(new(path.stem)) if not path.exists() else nbformat.read(path, as_version=4)
    notebook.cells[0].source = captioned(path.stem, notebook.cells[0].source)
    where = {"metadata": {"path": str(points.ROOT)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, resources=where).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    # The page refers to the picture beside it; without a template's style sheet it has a few kilobytes.
    extract = "nbconvert.preprocessors.ExtractOutputPreprocessor"
    settings = Config({"HTMLExporter": {"template_name": "basic", "preprocessors": [extract]}})
    settings.ExtractOutputPreprocessor.output_filename_template = f"{path.stem}{{extension}}"
    page, resources = HTMLExporter(config=settings).from_notebook_node(notebook)
    head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{path.stem}</title>{STYLE}</head><body>\n'
    (folder / f"{path.stem}.html").write_text(f"{head}{page}</body></html>\n", encoding="utf-8")
    for name, picture in resources["outputs"].items():
        (folder / name).write_bytes(picture)
    return [folder / f"{path.stem}.html", *(folder / name for name in resources["outputs"])]


def captioned(name: str, text: str) -> str:
    """A notebook's first cell with the figure's title and caption in place of its first two paragraphs."""
    family = figures.FAMILIES[name]
    return "\n\n".join([f"# {family.title}", family.about, *text.split("\n\n")[2:]])


def new(name: str) -> dict[str, Any]:
    """A figure's notebook before it is run, in nbformat's JSON."""
    marks = "[paper_figures/reported.csv](../paper_figures/reported.csv) has the sources of the first."
    draw = "rows = family.rows(figures.load())\nImage(figures.style.picture(family.draw(rows)))"
    sources = (
        ("markdown", captioned(name, f"\n\n\n\nEvery value is *reported*, *measured* or *predicted*; {marks}")),
        ("code", "from IPython.display import Image, Markdown\n\nfrom experiments import figures\n\n"
                 f'family = figures.FAMILIES["{name}"]\n{draw}'),
        ("markdown", "The values behind it:"),
        ("code", "Markdown(figures.to_markdown(rows))"),
    )  # fmt: skip
    cells = [{"cell_type": kind, "id": f"{name}-{place}", "metadata": {}, "source": text} for place, (kind, text) in enumerate(sources)]
    cells = [cell | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}) for cell in cells]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


STYLE = (
    "<style>body{font-family:sans-serif;max-width:75em;margin:2em auto}table{border-collapse:collapse;font-size:80%}"
    "td,th{border:1px solid #ccc;padding:.15em .5em}img{max-width:100%}.jp-InputPrompt,.jp-OutputPrompt,.anchor-link{display:none}"
    "pre{background:#f6f6f6;padding:.5em}</style>"
)


def execute_all(folder: Path = FOLDER) -> list[Path]:
    """Run the notebook of every figure into a folder; returns the pages and pictures."""
    return [written for name in sorted(figures.FAMILIES) for written in execute(FOLDER / f"{name}.ipynb", folder)]
