"""The `upipe` command: `upipe train CONFIG.yaml [key=value ...]`, and `upipe plan`, `demo`, `export`, `records`, `models`."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from upipe import checkpoint, models, outcomes, plan, plan_check, records
from upipe.build import ModelConfig, build_model, count_parameters
from upipe.config import ConfigError, load, parse_length, to_mapping
from upipe.glm.config import preset_shapes as glm_shapes
from upipe.launch import OUT_OF_MEMORY, launch, refuse, slurm_environment
from upipe.preflight import PreflightError
from upipe.presets import preset_shapes
from upipe.trainer import Interrupted, RunConfig, Trainer, save_config, signals

INTERRUPTED = 75
_EXAMPLES = """examples:
  upipe demo
  upipe train configs/demo.yaml --nproc 2 --check
  upipe train configs/demo.yaml train.steps=20 data.tokens=2K upipe.sp_size=2 --nproc 2
  upipe train my.yaml train.save_every=100 --resume auto --nproc 8
  torchrun --nproc-per-node 8 -m upipe.cli train my.yaml upipe.sp_size=8
  srun upipe train my.yaml upipe.sp_size=16 upipe.ring_degree=2
  upipe plan --model llama3-8b --gpus 8xH100-80GB --host-gib 1945 --tokens 5M memory.fused_layers=true
  upipe plan --model llama3-8b --gpus 8xH100-80GB --max-tokens --fit --save-config longest.yaml
  upipe export runs/run my-model

exit status: 0 done, 1 the self-check failed, 2 refused before the first step, 3 out of memory, 75 ended by SIGTERM or
SIGUSR1 after writing a checkpoint (go on with --resume auto). Of plan: 0 fits, 1 does not
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 where the self-check failed, 2 for what cannot be run, 3 where memory
    ran out, 75 where a signal ended the run after a checkpoint."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one run only; overrides may also stand after the options.
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(arguments, "overrides"):
            parser.error(f"unrecognized argument {word!r} (overrides are written key=value)")
        arguments.overrides.append(word)
    try:
        return arguments.run(arguments)
    except (ConfigError, PreflightError) as error:
        refuse(str(error))
        return 2
    except Interrupted as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"upipe: {error}", file=sys.stderr)
        return INTERRUPTED


def command() -> None:
    """`main` as a process: exits with its status.

    It leaves after the exit functions but without taking the interpreter down: threads of process groups that DeepSpeed
    keeps past `destroy_process_group` may reach for it meanwhile, which now and then aborts a run that is done (status 134).
    """
    status = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="upipe",
        description="Train Hugging Face models on long sequences: UPipe sequence parallelism under DeepSpeed, exact.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # The deepspeed launcher puts it before the command.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", required=True, metavar="{train,plan,demo,export,records,models}")

    train = commands.add_parser(
        "train",
        help="train the model that a YAML file describes",
        description="Train the model that a YAML file describes.",
        epilog="Runs under torchrun, deepspeed and srun as it is; --nproc starts the processes itself. Lengths are\n"
        "binary: data.tokens=128K is 131072.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration; see configs/")
    train.add_argument(
        "--resume",
        default="none",
        metavar="auto|PATH|none",
        help="go on from the newest complete checkpoint of train.run_dir (where there is none, start), or from the one at PATH",
    )
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
        command.add_argument("--nproc", type=int, metavar="N", help="start N processes on this machine (default: upipe.sp_size)")
        command.add_argument(
            "--dry-run", action="store_true", help="check everything and print the plan, with shapes in place of weights"
        )
    train.add_argument(
        "--check", action="store_true", help="end by comparing loss and every gradient with the unsharded model"
    )

    train.add_argument(
        "--save-config", metavar="FILE", help="write the configuration, with the overrides and with paths made absolute, and stop"
    )
    train.add_argument("--strict", action="store_true", help="refuse a run that is predicted not to fit; else it warns and goes on")
    train.add_argument("--no-plan", action="store_true", help="skip the prediction before the run (a few seconds, on GPUs alone)")

    planned = commands.add_parser(
        "plan",
        help="say whether a run fits, what binds, and how long a step takes, before it runs and without a GPU",
        description="Predict memory and time of a run: layers and loss simulated with the real code, the rest by arithmetic; "
        "see docs/plan.md for what is measured, simulated and assumed. Settings are those of upipe train.",
    )
    planned.add_argument("--model", required=True, metavar="MODEL", help="a shape preset, a model's folder or its Hugging Face name")
    planned.add_argument("--gpus", required=True, metavar="NxKIND", help="GPUs of one node, e.g. 8xH100-80GB")
    planned.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    planned.add_argument("--host-gib", type=float, default=1945.0, metavar="GIB", help="host memory of a node (default: %(default)g)")
    planned.add_argument("--tokens", type=_tokens, metavar="S", help="length of the sequence, e.g. 5M")
    planned.add_argument("--max-tokens", action="store_true", help="search the longest that fits instead")
    planned.add_argument("--fit", action="store_true", help="search the fastest settings that fit")
    planned.add_argument("--json", action="store_true", help="print JSON")
    planned.add_argument("--save-config", metavar="FILE", help="write a YAML file that upipe train takes")
    planned.add_argument("--plot", metavar="FILE", help="draw device memory as stacked bars")
    planned.add_argument("overrides", nargs="*", metavar="key=value", default=[], help="settings, e.g. memory.preset=paper")
    planned.set_defaults(run=_plan)

    export = commands.add_parser(
        "export",
        help="turn a checkpoint into a plain Hugging Face folder",
        description="Turn a checkpoint of any ZeRO stage into a plain Hugging Face folder (safetensors, configuration, "
        "tokenizer), which AutoModelForCausalLM.from_pretrained reads.",
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run's folder for its newest")
    export.add_argument("out", metavar="OUT", help="the folder to write; must be new or empty")
    export.set_defaults(run=_export)

    checked = commands.add_parser("records", help="check files of records (JSON lines), or folders of them")
    checked.add_argument("paths", metavar="PATH", nargs="+", help="a .jsonl file, or a folder of such")
    checked.set_defaults(run=lambda arguments: records.command(arguments.paths))

    listed = commands.add_parser("models", help="list the architectures that are served, and the shape presets")
    listed.set_defaults(run=_models)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    if arguments.save_config is not None:
        save_config(load(RunConfig, arguments.config, arguments.overrides), arguments.save_config)
        return 0
    return run(
        arguments.config,
        arguments.overrides,
        nproc=arguments.nproc,
        check=arguments.check,
        dry_run=arguments.dry_run,
        resume=arguments.resume,
        planned=not arguments.no_plan,
        strict=arguments.strict,
    )


def _demo(arguments: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count()
    nproc = arguments.nproc or (min(2, gpus) if gpus else 2)
    config = Path(__file__).resolve().parent.parent / "configs" / ("demo_gpu.yaml" if gpus else "demo.yaml")
    if not config.exists():
        raise ConfigError(f"the demo's configuration and book are part of the repository; {config} is not there")
    overrides = [f"upipe.sp_size={nproc}", *arguments.overrides]
    return run(str(config), overrides, nproc=nproc, check=True, dry_run=arguments.dry_run)


def _tokens(text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plan(arguments: argparse.Namespace) -> int:
    if (arguments.tokens is None) != arguments.max_tokens:
        raise ConfigError("give --tokens S, or --max-tokens to search the longest that fits")
    return plan.command(arguments)


def _export(arguments: argparse.Namespace) -> int:
    path = checkpoint.export(arguments.checkpoint, arguments.out)
    print(f"exported {path} to {arguments.out}")
    return 0


def _models(arguments: argparse.Namespace) -> int:
    print("served architectures (model type, attention class, what of it):")
    for architecture in models.ARCHITECTURES:
        print(f"  {architecture.name:<12} {architecture.attention_name:<18} {architecture.served_as}")
    print(f"  {'glm5_next':<12} {'KDA, sparse MLA':<18} GLM-5.3-Flash's text model, by upipe.glm")
    print("shape presets (model.preset, with model.layers to shorten):")
    for name, shape in (preset_shapes() | glm_shapes()).items():
        parameters = count_parameters(build_model(ModelConfig(preset=name), meta=True))
        heads = f"{shape['num_attention_heads']}/{shape['num_key_value_heads']} heads"
        kind = shape.get("model_type", "glm5_next")
        size = f"{parameters / 1e9:6.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:6.2f} M"
        print(
            f"  {name:<16} {kind:<9} {size} parameters, {shape['num_hidden_layers']} layers, "
            f"hidden {shape['hidden_size']}, {heads}"
        )
    return 0


def run(
    config: str, overrides: list[str], *, nproc: int | None, check: bool, dry_run: bool, resume: str = "none", planned: bool = True,
    strict: bool = False,
) -> int:
    """Train in this process as one rank of a launched world, or, without a launcher, start `nproc` processes and wait for
    them; None: as many as share a sequence, where this machine has a GPU or else a core for each. planned, strict: see
    `plan_check`. Returns the exit status."""
    parsed = load(RunConfig, config, overrides)
    os.environ.update(slurm_environment(os.environ))
    if nproc is None and 1 < parsed.upipe.sp_size <= (torch.cuda.device_count() or os.cpu_count() or 1):
        nproc = parsed.upipe.sp_size
    if nproc is not None and "RANK" not in os.environ:
        options = ["--check"] * check + ["--dry-run"] * dry_run + ["--strict"] * strict + ["--no-plan"] * (not planned)
        options += (["--resume", resume] if resume != "none" else [])
        return launch(["train", config, *overrides, *options], nproc, to_mapping(parsed))

    # torch 2.13 deprecates collectives under the names that DeepSpeed calls, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    lead = os.environ.get("RANK", "0") == "0"
    # Every rank refuses, one tells.
    for line in plan_check.before_training(parsed, strict=strict) if strict or (planned and lead) else ():
        if lead:
            print(line, flush=True)
    trainer = None
    try:
        # From here on, so that a signal while a large model is built and loaded does not look like a failure.
        with signals() as caught:
            trainer = Trainer(parsed, resume=resume, dry_run=dry_run)
            if trainer.is_main:
                print(trainer.describe(), flush=True)
            if dry_run:
                return 0
            started = time.perf_counter()
            losses = trainer.fit(caught)
        if trainer.is_main:
            print(_summary(trainer, losses, time.perf_counter() - started), flush=True)
        if not check:
            return 0
        result = trainer.check()
        if trainer.is_main:
            print(result, flush=True)
        return 0 if result.passed else 1
    except Exception as error:
        ended = outcomes.explain(error, to_mapping(parsed))
        if ended.outcome not in ("oom_device", "oom_host", "oom_pinned"):
            raise
        traceback.print_exc()
        print(f"upipe: {ended}", file=sys.stderr)
        return OUT_OF_MEMORY
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _summary(trainer: Trainer, losses: list[float], seconds: float) -> str:
    where = f"metrics in {trainer.config.train.run_dir}"
    if not losses:
        return f"nothing to train: {trainer.checkpoint} has all {trainer.config.train.steps} steps; {where}"
    last = losses[-10:]
    text = (
        f"trained {len(losses)} steps in {seconds:.0f} s: loss {losses[0]:.4f} -> "
        f"{sum(last) / len(last):.4f} (mean of the last {len(last)}); {where}"
    )
    if trainer.evaluated is not None:
        text += f"\nevaluation loss {trainer.evaluated:.4f} nats a token"
        if others := trainer.baselines():
            text += "; Markov models on the same tokens: " + ", ".join(f"{name} {loss:.4f}" for name, loss in others.items())
    return text if trainer.closing_report is None else f"{text}\n{trainer.closing_report}"


if __name__ == "__main__":
    command()
