"""Take records from another results folder, e.g. one brought back from a GPU machine.

    python -m experiments.merge DIR [--into experiments/results]

Every record is validated. Invalid ones are refused, and so are those that are there already: the same run_id and point
(or, of records without a point, the same record). The rest are appended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.points import ROOT
from upipe import records
from upipe.records import RecordError


def merge(source: Path, target: Path) -> tuple[int, int, list[str]]:
    """Append the records of `source` to `target`.

    Returns:
        how many were appended, how many were there already, and the problems of the others. A record with the run_id
        and point of another but other contents is a problem.
    """
    appended, known, problems = 0, 0, []
    for path in records.files([source]):
        there = {_identity(values): values for values in records.read(target / path.name)}
        for number, values in enumerate(records.read(path), 1):
            found = records.validate(values)
            if values.get("experiment") != path.stem:
                found.append(f"experiment={values.get('experiment')!r} in the file of {path.stem!r}")
            if found:
                problems.append(f"{path}: record {number}: {'; '.join(found)}")
                continue
            identity = _identity(values)
            if identity not in there:
                records.append(values, target)
                there[identity] = values
                appended += 1
            elif there[identity] == values:
                known += 1
            else:
                problems.append(f"{path}: record {number}: run {values['run_id']} has another record of point {values['point']}")
    return appended, known, problems


def _identity(values: dict[str, Any]) -> tuple:
    return values["run_id"], values["point"] if "point" in values else json.dumps(values, sort_keys=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 where a record was refused as invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="DIR", help="folder of *.jsonl files, or one file")
    parser.add_argument("--into", default=str(ROOT / "experiments" / "results"), metavar="DIR", help="default: experiments/results")
    options = parser.parse_args(arguments)
    try:
        appended, known, problems = merge(Path(options.source), Path(options.into))
    except RecordError as error:
        print(f"experiments.merge: error: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    print(f"{appended} records appended, {known} were there already, {len(problems)} refused")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
