"""Redraw figures and rewrite what is made from records.

    python -m experiments.figures                     every figure: paper_figures/NAME.png, .pdf, .csv, .md
    python -m experiments.figures table3 planner      these
    python -m experiments.figures readme              the README's "Results" and docs/claims.md
    python -m experiments.figures notebooks           runs notebooks/*.ipynb; writes pictures and HTML beside them
    python -m experiments.figures all                 all of it

Reads every file of experiments/results and paper_figures/reported.csv.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments import figures
from experiments.figures import claims, notebooks, results
from upipe.config import ConfigError
from upipe.records import RecordError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = ("readme", "notebooks", "all")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(figures.FAMILIES)}; {', '.join(others)}")
    parser.add_argument("--results", type=Path, default=figures.values.RESULTS, metavar="DIR", help="where the records are")
    placed = "where figures go (default: paper_figures); README, claims and notebooks are written where they are"
    parser.add_argument("--out", type=Path, default=figures.FOLDER, metavar="DIR", help=placed)
    options = parser.parse_args(arguments)
    names = options.names or list(figures.FAMILIES)
    if "all" in names:
        names = [*figures.FAMILIES, "readme", "notebooks"]
    unknown = [name for name in names if name not in (*figures.FAMILIES, *others)]
    try:
        if unknown:
            raise ConfigError(f"no figure {unknown[0]!r}; there are: {', '.join((*figures.FAMILIES, *others))}")
        sources = figures.load(options.results)
        for name in names:
            if name == "readme":
                results.write(sources)
                claims.write(sources)
                print("README.md, docs/claims.md")
            elif name == "notebooks":
                for path in notebooks.execute_all():
                    print(path)
            else:
                rows = figures.make(name, sources, options.out)
                counts = ", ".join(f"{sum(row.mark == mark for row in rows)} {mark}" for mark in figures.values.MARKS)
                print(f"{options.out / name}.png: {counts}")
    except (ConfigError, RecordError) as error:
        print(f"experiments.figures: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
