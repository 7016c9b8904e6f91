"""Run the notebooks; write beside each its picture and an HTML page that shows it. Needs requirements-dev.txt."""

from __future__ import annotations

from pathlib import Path

from experiments import points
from upipe.config import ConfigError

FOLDER = points.ROOT / "notebooks"


def execute(path: Path, folder: Path) -> list[Path]:
    """Run a notebook from the repository's root and write NAME.ipynb, NAME.png and NAME.html into a folder.

    Raises nbclient's CellExecutionError where a cell fails, ConfigError where the packages are not there.
    """
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbconvert import HTMLExporter
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: python -m pip install -r requirements-dev.txt") from error
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
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


STYLE = (
    "<style>body{font-family:sans-serif;max-width:75em;margin:2em auto}table{border-collapse:collapse;font-size:80%}"
    "td,th{border:1px solid #ccc;padding:.15em .5em}img{max-width:100%}.jp-InputPrompt,.jp-OutputPrompt,.anchor-link{display:none}"
    "pre{background:#f6f6f6;padding:.5em}</style>"
)


def execute_all(folder: Path = FOLDER) -> list[Path]:
    """Run every notebook of the repository into a folder; returns the pages and pictures."""
    return [written for path in sorted(FOLDER.glob("*.ipynb")) for written in execute(path, folder)]
