"""The `upipe` command: `upipe train CONFIG.yaml [key=value ...]` and `upipe demo`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import torch

from upipe.config import ConfigError, load
from upipe.preflight import PreflightError
from upipe.trainer import RunConfig, Trainer

_EXAMPLES = """examples:
  upipe demo
  upipe train configs/demo.yaml --nproc 2 --check
  upipe train configs/demo.yaml train.steps=20 data.tokens=2K upipe.sp_size=2 --nproc 2
  torchrun --nproc-per-node 8 -m upipe.cli train my.yaml upipe.sp_size=8
  srun upipe train my.yaml upipe.sp_size=16
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 where the self-check failed, 2 for what cannot be run."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one run only; overrides may also stand after the options.
    for word in rest:
        if word.startswith("-") or "=" not in word:
            parser.error(f"unrecognized argument {word!r} (overrides are written key=value)")
    arguments.overrides += rest
    try:
        return arguments.run(arguments)
    except (ConfigError, PreflightError) as error:
        # A refusal may concern one rank alone, so each that has one says it.
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"upipe: error{rank}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="upipe",
        description="Train Hugging Face models on long sequences: UPipe sequence parallelism under DeepSpeed, exact.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="{train,demo}")

    train = commands.add_parser(
        "train",
        help="train the model that a YAML file describes",
        description="Train the model that a YAML file describes.",
        epilog="Runs under torchrun, deepspeed and srun as it is; --nproc starts the processes itself. Lengths are\n"
        "binary: data.tokens=128K is 131072.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration; see configs/")
    train.set_defaults(run=_train)

    demo = commands.add_parser(
        "demo",
        help="train a small Llama on a book, then check it against the unsharded model",
        description="Train a small Llama on the book in configs/books, byte by byte, with two processes that share "
        "each sequence (on GPUs where there are, else on the CPU), then check loss and gradients against the "
        "unsharded model.",
    )
    demo.set_defaults(run=_demo)

    for command in (train, demo):
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", default=[], help="overrides, e.g. train.steps=100"
        )
        command.add_argument("--nproc", type=int, metavar="N", help="start N processes on this machine")
        command.add_argument("--dry-run", action="store_true", help="build and check everything, train nothing")
        command.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    train.add_argument(
        "--check", action="store_true", help="end by comparing loss and every gradient with the unsharded model"
    )
    return parser


def _train(arguments: argparse.Namespace) -> int:
    return run(
        arguments.config,
        arguments.overrides,
        nproc=arguments.nproc,
        check=arguments.check,
        dry_run=arguments.dry_run,
    )


def _demo(arguments: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count()
    nproc = arguments.nproc or (min(2, gpus) if gpus else 2)
    config = Path(__file__).resolve().parent.parent / "configs" / ("demo_gpu.yaml" if gpus else "demo.yaml")
    if not config.exists():
        raise ConfigError(f"the demo's configuration and book are part of the repository; {config} is not there")
    overrides = [f"upipe.sp_size={nproc}", *arguments.overrides]
    return run(str(config), overrides, nproc=nproc, check=True, dry_run=arguments.dry_run)


def run(config: str, overrides: list[str], *, nproc: int | None, check: bool, dry_run: bool) -> int:
    """Train in this process as one rank of a launched world, or, with `nproc` and no launcher, start that world in
    this process's place. Returns the exit status."""
    parsed = load(RunConfig, config, overrides)
    os.environ.update(slurm_environment(os.environ))
    if nproc is not None and "RANK" not in os.environ:
        launch(["train", config, *overrides, *["--check"] * check, *["--dry-run"] * dry_run], nproc)

    # torch 2.13 deprecates collectives under the names that DeepSpeed calls, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    trainer = None
    try:
        trainer = Trainer(parsed)
        if trainer.is_main:
            print(trainer.describe(), flush=True)
        if dry_run:
            return 0
        started = time.perf_counter()
        losses = trainer.fit()
        if trainer.is_main:
            last = losses[-10:]
            print(
                f"trained {len(losses)} steps in {time.perf_counter() - started:.0f} s: loss {losses[0]:.4f} -> "
                f"{sum(last) / len(last):.4f} (mean of the last {len(last)}); metrics in {parsed.train.run_dir}",
                flush=True,
            )
        if not check:
            return 0
        result = trainer.check()
        if trainer.is_main:
            print(result, flush=True)
        return 0 if result.passed else 1
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def launch(arguments: list[str], nproc: int) -> None:
    """Replace this process by `torch.distributed.run` with `nproc` processes of `upipe` with `arguments`."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: must be at least 1")
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*command, "-m", "upipe.cli", *arguments], environment)


def slurm_environment(environment) -> dict[str, str]:
    """The launcher variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) of a process that srun started;
    empty where another launcher has set RANK, or where this is no step of several tasks."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if "RANK" in environment or tasks is None or int(tasks) < 2:
        return {}
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ConfigError("under srun set MASTER_ADDR to the first node's address (SLURM_LAUNCH_NODE_IPADDR is unset)")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(environment["SLURM_JOB_ID"]) % 20000),
    }


if __name__ == "__main__":
    sys.exit(main())
