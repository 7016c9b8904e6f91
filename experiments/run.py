"""Run an experiment: every point in processes of its own, one record a point.

    python -m experiments.run                                 list the experiments
    python -m experiments.run NAME                            run every point
    python -m experiments.run NAME --tokens 128K --dry-run    what would run
    python -m experiments.run NAME --resume                   run the points that have no record yet
    python -m experiments.run NAME-2gpu                       a variant

A point ends in one of seven ways, and its record says which and why: ok; oom_device, oom_pinned, oom_host, refused or
failed, by the exception that its rank caught (see upipe/outcomes.py) or, where a rank was killed, by what the kernel
reports; timeout, where this runner stopped it. A runner that is killed takes its point with it; that point has no record
and is run again by --resume. So it is where SIGTERM or SIGUSR1 ends the runner.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import points, table
from experiments.points import ROOT, Experiment, PointSpec
from experiments.processes import kill_tree
from experiments.runs import new_run_id
from upipe import records
from upipe.config import ConfigError
from upipe.environment import code, environment
from upipe.plan import Machine
from upipe.records import Record, RecordError

RESULTS = ROOT / "experiments" / "results"
_POLL_S = 0.1


@dataclass(frozen=True)
class Ending:
    """How a point ended. record: rank 0's, where it is ok. gpu: the GPU's name, where a rank got as far as using it."""

    outcome: str
    reason: str | None = None
    record: dict[str, Any] | None = None
    gpu: str | None = None


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0, 1 where a point failed or timed out, 2 for what cannot be run, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.name is None:
            return _list()
        path, variant = points.find(options.name)
        experiment = points.read(path, variant)
        if options.copy_to is not None:
            return _copy(path, Path(options.copy_to))
        specs = points.select(points.expand(experiment, path.parent), options.method, options.tokens)
        command = "python -m experiments.run " + shlex.join(sys.argv[1:] if arguments is None else arguments)
        sweep = Sweep(path, points.name_of(path, variant), experiment, command, options)
        if options.skip_unfit:
            specs = [spec for spec in specs if sweep.may_fit(spec)]
        if options.dry_run:
            return sweep.describe(specs)
        return sweep.run(specs)
    except (ConfigError, RecordError) as error:
        print(f"experiments.run: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the running point has no record. Go on with --resume", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment, or a YAML file; without it: list them")
    parser.add_argument("--method", nargs="+", metavar="M", help="only the points of these methods")
    parser.add_argument("--tokens", nargs="+", metavar="N", help="only the points of these lengths (131072, 128K, 1M)")
    parser.add_argument("--dry-run", action="store_true", help="list the points and the planner's verdicts, and run nothing")
    parser.add_argument("--copy-to", metavar="DIR", help="copy the experiment's file and those it is like there, and run nothing")
    parser.add_argument("--skip-unfit", action="store_true", help="leave out points that the planner says do not fit")
    parser.add_argument(
        "--launcher", choices=["torchrun", "srun"], default="torchrun",
        help="srun: ranks on all nodes of this Slurm job; the checkout, --logs and --results are on a file system of all of them",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="leave out points that have a record for the same settings")
    parser.add_argument(
        "--retry", nargs="+", default=[], choices=[o for o in records.OUTCOMES if o != "ok"], metavar="OUTCOME",
        help="with --resume, run points again whose last record ended so (e.g. timeout failed)",
    )
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR", help="where NAME.jsonl is (default: experiments/results)")
    parser.add_argument("--logs", default="runs/experiments", metavar="DIR", help="output of the points (default: %(default)s)")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds a point may take (default: the experiment's)")
    parser.add_argument("--host-gib", type=float, metavar="GIB", help="this host's memory, where it does not say it rightly")
    return parser


def _list() -> int:
    for name in points.names():
        print(f"{name:32} {points.read(*points.find(name)).about}")
    return 0


def _copy(path: Path, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for file in points.files(path):
        shutil.copy(file, folder)
    return 0


class Sweep:
    """One run of the runner: a run_id, an experiment, and where its records and logs go."""

    def __init__(self, path: Path, name: str, experiment: Experiment, command: str, options: argparse.Namespace):
        self.path, self.experiment, self.name = path, experiment, name
        self.command, self.options = command, options
        self.kind = points.kind_of(experiment.kind)
        self.timeout_s = experiment.timeout_s if options.timeout is None else options.timeout
        self.run_id = new_run_id()
        self.folder = Path(options.logs).resolve() / self.name / self.run_id
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout {self.timeout_s}: must be positive")

    def describe(self, specs: list[PointSpec]) -> int:
        """Print the points, whether each would be refused and, with --resume, which are done."""
        done = self._done()
        print(f"{self.name}: {self.experiment.about}")
        if not specs:
            print("no points")
            return 0
        width = max(len(spec.label) for spec in specs)
        for spec in specs:
            state = "has a record" if spec.key in done else self._state(spec)
            print(f"  {spec.key}  {spec.label:{width}}  {spec.point.processes} x {spec.point.device}  {state}", flush=True)
        if self.experiment.hardware is not None and hasattr(self.kind, "predict"):
            print(f"predicted for {self._machine(max(specs, key=lambda s: s.point.processes))}")
        print(f"{len(specs)} points, at most {self.timeout_s:g} s each")
        return 0

    def may_fit(self, spec: PointSpec) -> bool:
        """False where the planner says that it does not."""
        return (self._predicted(spec) or {}).get("fits") is not False

    def _state(self, spec: PointSpec) -> str:
        verdict, found = self.kind.verdict(spec.point), self._predicted(spec)
        if verdict != "ok" or found is None:
            return verdict
        if "declined" in found:
            return f"not predicted: {found['declined'].partition('; ')[0]}"
        text = "device {device_gib:.1f} of {device_usable_gib:g} GiB, host {host_gib:.0f} of {host_usable_gib:g}".format(**found)
        rate = f"{found['time_s']:.4g} s a step, {found['tokens_per_s_per_gpu']:.4g} tokens/s/GPU"
        return f"fits: {text}, {rate}" if found["fits"] else f"does not fit, {found['limit']} memory runs out: {text}"

    def _machine(self, spec: PointSpec) -> Machine:
        """The experiment's hardware, as many of its GPUs as the point uses."""
        hardware, processes = self.experiment.hardware, spec.point.processes
        host = hardware.host_gib if self.options.host_gib is None else self.options.host_gib
        whole = Machine.parse(hardware.gpus, hardware.nodes, host)
        if processes <= whole.per_node:
            return replace(whole, per_node=processes, nodes=1)
        if processes % whole.per_node:
            raise ConfigError(f"hardware.gpus={hardware.gpus!r}: {processes} processes are no whole number of such nodes")
        return replace(whole, nodes=processes // whole.per_node)

    def _predicted(self, spec: PointSpec) -> dict[str, Any] | None:
        """What the planner says of a point on the experiment's hardware; None where there is none or the kind is not planned."""
        if self.experiment.hardware is None or not hasattr(self.kind, "predict"):
            return None
        return self.kind.predict(spec.point, self._machine(spec))

    def run(self, specs: list[PointSpec]) -> int:
        """Run the points, append their records, print the table."""
        code(self.options.commit)
        done = self._done()
        left = [spec for spec in specs if spec.key not in done]
        self._check_gpus(left)
        if len(left) < len(specs):
            print(f"{len(specs) - len(left)} of {len(specs)} points have a record; {len(left)} to run", flush=True)
        numbers = (signal.SIGTERM, signal.SIGUSR1)
        before = [signal.signal(number, _interrupt) for number in numbers]
        try:
            made = self._points(left)
        finally:
            for number, handler in zip(numbers, before):
                signal.signal(number, handler)
        keys = {spec.key for spec in specs}
        print(table.render([r for r in records.load(self._file()) if r.get("point") in keys]))
        print(f"{len(made)} records appended to {self._file()}")
        return int(any(record.outcome in ("failed", "timeout") for record in made))

    def _points(self, left: list[PointSpec]) -> list[Record]:
        made = []
        tty = sys.stderr.isatty()
        with tqdm(total=len(left), desc=self.name, unit="point", disable=not tty) as bar:
            for index, spec in enumerate(left):
                record, folder = self._point(index, spec, bar)
                made.append(record)
                bar.update()
                line = f"{spec.label}: {record.outcome}" + (f" ({record.reason})" if record.reason else "")
                if record.outcome == "failed":
                    line += f"; its output is in {folder / 'log.txt'}"
                bar.write(line) if tty else print(line, flush=True)
        return made

    def _point(self, index: int, spec: PointSpec, bar: tqdm) -> tuple[Record, Path]:
        folder = self.folder / f"{index:03}-{spec.key}"
        folder.mkdir(parents=True)
        gpus = spec.point.processes if spec.point.device == "cuda" else 0
        task = {
            "kind": self.experiment.kind, "settings": spec.settings, "folder": str(self.path.parent),
            "processes": spec.point.processes, "gpus": gpus,
        }
        (folder / "point.json").write_text(json.dumps(task, indent=1))
        made_with = environment(self.command, self.options.commit, gpus=gpus)
        if self.options.host_gib is not None:
            made_with["host_gib"] = self.options.host_gib
        predicted = self._predicted(spec)
        ending = self._execute(folder, spec, bar)
        if gpus:
            made_with["gpu"] = ending.gpu or made_with["gpu"] or "unknown"
        record = self.kind.record(spec.point) if ending.record is None else Record.from_dict(ending.record)
        record = record.updated(
            made_with
            | {"run_id": self.run_id, "experiment": self.name, "outcome": ending.outcome, "reason": ending.reason}
            | {"provenance": "measured", "point": spec.key, "settings": spec.settings, "predicted": predicted}
        )
        records.append(record, self.options.results)
        return record, folder

    def _execute(self, folder: Path, spec: PointSpec, bar: tqdm) -> Ending:
        """Start the point's processes, wait for them or stop them, and read how they ended."""
        environ = dict(os.environ)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.point.processes)))
        if spec.point.device == "cpu":
            environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        words = ["-m", "experiments.worker", self.options.launcher, str(folder), str(os.getpid())]
        with open(folder / "log.txt", "w") as log:
            launcher = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environ,
                start_new_session=True,
            )
            started = time.monotonic()
            try:
                while launcher.poll() is None:
                    elapsed = time.monotonic() - started
                    if elapsed >= self.timeout_s:
                        return Ending("timeout", f"stopped by the runner after {self.timeout_s:g} s")
                    bar.set_postfix_str(f"{spec.label} {elapsed:.0f} s", refresh=int(elapsed * 10) % 10 == 0)
                    time.sleep(_POLL_S)
            finally:
                if launcher.poll() is None:
                    self._stop(launcher)
        if self.options.launcher == "srun":
            _await_results(folder, spec.point.processes)
        return read_ending(folder, spec.point.processes)

    def _stop(self, launcher: subprocess.Popen) -> None:
        if self.options.launcher == "srun":
            # Its tasks are no children of it: asked, it ends them on every node.
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=60)
        if launcher.poll() is None:
            kill_tree(launcher.pid)
            launcher.wait()

    def _file(self) -> Path:
        return Path(self.options.results) / f"{self.name}.jsonl"

    def _done(self) -> set[str]:
        """Keys of the points that --resume leaves out: those whose last record did not end in one of --retry."""
        if not self.options.resume:
            return set()
        measured = [r for r in records.load(self._file()) if "point" in r and r["provenance"] == "measured"]
        last = {r["point"]: r["outcome"] for r in measured}
        return {key for key, outcome in last.items() if outcome not in self.options.retry}

    def _check_gpus(self, specs: list[PointSpec]) -> None:
        if self.options.launcher == "srun":
            tasks, needed = int(os.environ.get("SLURM_NTASKS", 0)), max((spec.point.processes for spec in specs), default=0)
            if tasks < needed:
                raise ConfigError(f"{self.name} needs {needed} tasks; this Slurm job has {tasks} (sbatch --nodes --ntasks-per-node)")
            return
        import torch

        needed = max((spec.point.processes for spec in specs if spec.point.device == "cuda"), default=0)
        there = torch.cuda.device_count() if needed else 0
        if there < needed:
            raise ConfigError(f"{self.name} needs {needed} GPUs; this machine has {there} (--dry-run lists its points)")


def _await_results(folder: Path, processes: int, patience_s: float = 30.0) -> None:
    """Files that other nodes wrote may be seen here some seconds later."""
    deadline = time.monotonic() + patience_s
    while len(list(folder.glob("rank-*.json"))) < processes and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def read_ending(folder: Path, processes: int) -> Ending:
    """How the ranks of a point ended, from what each of them left in `folder`.

    Of several failures the one with a cause of its own counts (memory, refusal), then a rank that was killed, then the
    earliest: ranks that lose a peer fail too, a moment later.
    """
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    failures = [result for result in results if result["outcome"] != "ok"]
    if failures:
        killed = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
        first = min(failures, key=lambda r: (r["outcome"] == "failed", r.get("signal") not in killed, r["time"]))
        return Ending(first["outcome"], f"rank {first['rank']}: {first['reason']}", gpu=first.get("gpu"))
    missing = sorted(set(range(processes)) - {result["rank"] for result in results})
    if missing:
        lines = (folder / "log.txt").read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return Ending("failed", f"the processes ended and rank {missing[0]} left no result; last line: {last[:200]}")
    first = next(result for result in results if result["rank"] == 0)
    return Ending("ok", None, first["record"], first["gpu"])


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
