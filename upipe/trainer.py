"""Train a Hugging Face model under DeepSpeed with UPipe attention, from one configuration.

A run folder holds what the run was (`config.yaml`, `deepspeed.json`), what it did (`metrics.jsonl`, one line an
optimizer step) and its checkpoints (`checkpoints/step_N`). Units: memory in GiB = 2**30 bytes; tokens and tokens/s count
each token of a batch once, however many ranks share it.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml
from tqdm import tqdm

from upipe import checkpoint, memory, memory_report
from upipe.apply import UPipeConfig
from upipe.baselines import markov_losses
from upipe.build import ModelConfig, build_model, build_partitioned_model, longest_served, model_sizes, wants_zero_init
from upipe.check import CheckResult, self_check
from upipe.comm import init_distributed, node_ranks
from upipe.config import ConfigError, load, to_mapping
from upipe.data import DataConfig, EpochBatches, EvaluationBatches, build_data, build_tokenizer, stack
from upipe.environment import host_gib
from upipe.loss import LossTerms
from upipe.memory import MemoryConfig, apply_stack, make_plan
from upipe.methods import MethodConfig
from upipe.metrics import FILE as METRICS
from upipe.metrics import Metrics, check_installed
from upipe.optimize import TrainConfig, build_optimizer, deepspeed_config, learning_rate
from upipe.profiling import StepProfile

logger = logging.getLogger(__name__)
__all__ = [
    "Interrupted", "MemoryConfig", "RunConfig", "TrainConfig", "Trainer", "build_optimizer", "deepspeed_config", "learning_rate",
]


@dataclass
class RunConfig:
    """Everything `upipe train` reads from its YAML file, a section a module."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    upipe: UPipeConfig = field(default_factory=UPipeConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self):
        memory.check(self)

    @classmethod
    def filled(cls, mapping: dict[str, Any], folder: str | Path = ".") -> dict[str, Any]:
        """The mapping with what its preset sets; `config.from_mapping` asks."""
        data = mapping.get("data")
        return memory.fill(mapping, data.get("tokens", DataConfig.tokens) if isinstance(data, dict) else DataConfig.tokens, folder)


class Interrupted(Exception):
    """The run was told to end by a signal, and did so after writing a checkpoint. The message names both."""


def memory_gib(device: torch.device) -> float:
    """This rank's memory: on a GPU the peak that was allocated, on the CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Trainer:
    """One training run. `Trainer(config)` builds everything and is collective over the launched ranks; then `fit()`,
    `check()`, and `close()`, which must be called once.

    resume: "none", "auto" or a path, as `checkpoint.find` reads it. dry_run: everything is checked, but the model has
    shapes alone and cannot be trained.
    Raises ConfigError for what the configuration asks and cannot be had, before the first step.
    """

    def __init__(self, config: RunConfig, *, resume: str = "none", dry_run: bool = False):
        self.config = config
        train = config.train
        check_installed(tensorboard=train.tensorboard, wandb=train.wandb)
        self._check_evaluation()
        self.tokenizer = build_tokenizer(config.data)
        groups = max(1, int(os.environ.get("WORLD_SIZE", 1)) // max(1, config.upipe.sp_size))
        self.data = build_data(config.data, self.tokenizer, rows=groups * train.micro_batch_size)
        # Every rank looks before rank 0 writes, behind the barrier of fit().
        self.checkpoint = checkpoint.find(resume, train.run_dir)
        self._check_run_dir(resume)
        self.cuda = torch.cuda.is_available()
        sizes = model_sizes(config.model)
        self.parameters = sizes.parameters
        self.ds_config = deepspeed_config(train, config.memory, cuda=self.cuda, layer_parameters=sizes.layer_parameters)
        partitioned = wants_zero_init(config.model, zero_stage=train.zero_stage, cuda=self.cuda)
        init_distributed()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.start = 0
        if self.checkpoint is not None:
            saved = checkpoint.read_state(self.checkpoint)
            checkpoint.check_resumable(self.checkpoint, saved, self._state(0))
            self.start = saved["step"]
        world = dist.get_world_size()
        plan = make_plan(
            config,
            config.data.tokens,
            sizes,
            world=world,
            local_ranks=node_ranks() or world,
            device_bytes=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if self.cuda else None,
            host_bytes=int(host_gib() * 2**30),
        )
        described = plan.model(config.model)
        if partitioned and not dry_run:
            self.model = build_partitioned_model(described, self.ds_config, seed=train.seed)
        else:
            self.model = build_model(described, seed=train.seed, meta=dry_run)
        vocabulary, tokens = self.model.config.vocab_size, self.tokenizer.vocab_size
        if vocabulary < tokens:
            raise ConfigError(f"the model's vocabulary of {vocabulary} is smaller than the tokenizer's {tokens}")
        self._warn_of_length()
        self.stack = apply_stack(self.model, plan, config.upipe, self.ds_config, config.method)
        self.handle = self.stack.handle
        self.batches = EpochBatches(
            self.data.train,
            batch_size=train.micro_batch_size,
            batches=max(0, train.steps - self.start) * train.accumulation,
            dp_size=self.handle.dp_size,
            dp_rank=self.handle.dp_rank,
            seed=train.seed,
            start=self.start * train.accumulation,
        )
        self.engine: Any = None
        self.evaluated: float | None = None
        self.closing_report: str | None = None

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all ranks, each counted once."""
        train = self.config.train
        return self.handle.dp_size * train.accumulation * train.micro_batch_size * self.config.data.tokens

    def describe(self) -> str:
        """What the run is: model, data, parallelism, evaluation and checkpoints, as text of several lines."""
        model, train = self.model.config, self.config.train
        heads = f"{model.num_attention_heads} query / {model.num_key_value_heads} kv heads"
        lines = [
            f"model   {type(self.model).__name__}, {self.parameters / 1e6:.2f} M parameters, "
            f"{model.num_hidden_layers} layers, {heads}",
            f"data    {self.data.note}",
            f"ranks   {dist.get_world_size()} = sp {self.handle.mesh} x dp {self.handle.dp_size}, "
            f"on {self.handle.device.type}, {train.dtype}, ZeRO-{train.zero_stage}",
            f"memory  {self.stack.plan.describe()}",
            f"steps   {train.steps} of {self.step_tokens} tokens; an epoch is {self.batches.per_epoch / train.accumulation:g}",
        ]
        if train.eval_every:
            lines.append(f"eval    every {train.eval_every} steps on {self._evaluation_batches().rows} rows")
        every = f"every {train.save_every} steps and at the end" if train.save_every else "only if told to end early"
        lines.append(f"saves   {every}, to {Path(train.run_dir) / checkpoint.FOLDER}")
        if self.checkpoint is not None:
            lines.append(f"resume  from {self.checkpoint}, after {self.start} steps")
        return "\n".join([*lines, str(self.handle.report())])

    def build_engine(self) -> None:
        """Hand the model to DeepSpeed, and put the checkpoint to resume from into it."""
        import deepspeed

        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            config=self.ds_config,
            mpu=self.handle.mpu,
            optimizer=build_optimizer(self.model, self.config.train, cuda=self.cuda),
            dist_init_required=False,
        )
        if self.checkpoint is not None:
            checkpoint.load(self.checkpoint, self.engine)

    def fit(self, caught: list[int] | None = None) -> list[float]:
        """Train; returns the loss of every step done here (the mean over its tokens, over all ranks).

        Args:
            caught: the list of `signals()`, where they were caught since before the model was built.

        Raises FloatingPointError, with the step, where the loss is not finite, and Interrupted where SIGTERM or SIGUSR1
        came: the step in hand is finished and a checkpoint written first, or, before the first step, nothing is.
        """
        train = self.config.train
        caught = [] if caught is None else caught
        if self.engine is None:
            self.build_engine()
        told = self._agree(caught)
        if told and self.start < train.steps:
            raise Interrupted(f"ended by {signal.Signals(told).name} before a step was done here; no checkpoint was written")
        metrics = self._open_run_dir()
        interval = 0.5 if sys.stderr.isatty() else 10.0
        bar = tqdm(
            total=train.steps, initial=self.start, desc="train", unit="step", disable=not self.is_main, mininterval=interval
        )
        losses: list[float] = []
        total, micro, started = 0.0, 0, time.perf_counter()
        # The second step: the first makes optimizer states and kernels.
        profiled = min(self.start + 1, train.steps - 1)
        folder, rank = Path(train.run_dir) / "profile", dist.get_rank()
        profile = StepProfile(train.profile, self.engine, folder, step=profiled, rank=rank)
        report = StepProfile("report" if self._reports_first_step(profiled) else "none", self.engine, folder, step=self.start, rank=rank)
        with (
            signals(caught), closing(bar), nullcontext() if metrics is None else closing(metrics),
            self._told_if_it_fails(profile), self._told_if_it_fails(report),
        ):
            for batch in self.handle.shard(self.batches, accumulation=train.accumulation):
                step = self.start + len(losses)
                if micro == 0:
                    profile.start(step)
                    report.start(step)
                self._set_learning_rate(learning_rate(step, train))
                loss = self.handle.loss(self.engine, batch)
                self.engine.backward(loss)
                self.engine.step()
                total, micro = total + float(loss.detach()) / train.accumulation, micro + 1
                if micro < train.accumulation:
                    continue
                spent = time.perf_counter() - started  # without what is told of the step
                self._tell(profile.stop(step))
                if step == self.start:
                    self._tell(report.stop(step) or memory_report.summary(self.engine))
                on_host = self.stack.end_step()
                record = {
                    "step": step,
                    "loss": total,
                    "learning_rate": learning_rate(step, train),
                    "grad_norm": _as_float(self.engine.get_global_grad_norm()),
                    "tokens": (step + 1) * self.step_tokens,
                    "tokens_per_s": self.step_tokens / spent,
                    "memory_gib": memory_gib(self.handle.device),
                    "time_s": spent,
                } | on_host
                losses.append(total)
                finite = math.isfinite(total)
                if finite and train.eval_every and (step + 1) % train.eval_every == 0:
                    record["eval_loss"], record["eval_tokens"] = self.evaluate()
                if metrics is not None:
                    metrics.write(record)
                bar.set_postfix_str(
                    f"loss {total:.4f}, {record['tokens_per_s']:,.0f} tokens/s, {record['memory_gib']:.2f} GiB",
                    refresh=False,
                )
                bar.update()
                if not finite:
                    raise FloatingPointError(f"the loss of step {step} is {total}; try a lower learning rate")
                self._save_if_due(step + 1, self._agree(caught))
                total, micro, started = 0.0, 0, time.perf_counter()
        self.closing_report = self.handle.closing_report()
        return losses

    def _reports_first_step(self, profiled: int) -> bool:
        """Whether this process records the memory of its first step; not where that is the step to profile, nor where torch's
        allocator is one that records nothing (`backend:cudaMallocAsync`)."""
        wanted = self.config.train.memory_report == "first_step" and self.is_main and self.handle.device.type == "cuda"
        wanted = wanted and torch.cuda.get_allocator_backend() == "native"
        return wanted and (self.config.train.profile == "none" or profiled != self.start)

    def _tell(self, text: str | None) -> None:
        if self.is_main and text is not None:
            tqdm.write(text, file=sys.stderr)

    @contextmanager
    def _told_if_it_fails(self, profile: StepProfile):
        """What a memory profile has of a step that fails, out of memory say, is printed too."""
        try:
            yield
        except Exception as error:
            self._tell(profile.failed(error))
            raise

    def evaluate(self) -> tuple[float, int]:
        """The mean loss over the tokens of the evaluation data, and how many they are: the same at any number of ranks."""
        if self.engine is None:
            self.build_engine()
        self.engine.eval()
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in self.handle.shard(self._evaluation_batches()):
                valid = int(batch["num_valid"])
                total += float(self.handle.loss(self.engine, batch)) * valid
                tokens += valid
        self.engine.train()
        self.evaluated = total / max(1, tokens)
        return self.evaluated, tokens

    def baselines(self) -> dict[str, float]:
        """Losses of Markov models on the evaluation data (`upipe.baselines`); none where `data.markov_orders` is null."""
        if self.config.data.markov_orders is None:
            return {}
        held = self._evaluation_batches()
        return markov_losses(self.data.train.stream, held.dataset, self.config.data.markov_orders, held.rows)

    def save(self, step: int) -> Path:
        """Write the checkpoint of the state after `step` optimizer steps; collective."""
        train = self.config.train
        path = Path(train.run_dir) / checkpoint.FOLDER / f"step_{step}"
        tokenizer = getattr(self.tokenizer, "hf", None)
        checkpoint.save(path, self.engine, self._state(step), hf_config=self.model.config, tokenizer=tokenizer)
        if self.is_main:
            checkpoint.prune(train.run_dir, train.keep_last)
        return path

    def check(self) -> CheckResult:
        """Compare the sharded model's loss and gradients, at its weights of now, with the plain model's.

        The batches are the first rows of the data: an accumulation window of every data-parallel rank each; one in fp32,
        eight in bf16, where one would be half luck. Uses up the optimizer: do not train on afterwards.
        """
        train = self.config.train
        if self.engine is None:
            self.build_engine()
        rows = self.handle.dp_size * train.accumulation * train.micro_batch_size
        count = 1 if train.dtype == "fp32" else 8
        data = self.data.train
        batches = [stack([data[(n * rows + i) % len(data)] for i in range(rows)]) for n in range(count)]
        result = self_check(
            self.engine,
            self.handle,
            lambda: build_model(self.config.model, seed=train.seed),
            batches,
            accumulation=train.accumulation,
            terms=LossTerms(z_loss=train.z_loss, label_smoothing=train.label_smoothing),
        )
        self.stack.end_step()
        return result

    def close(self) -> None:
        """Take the memory stack and UPipe off the model and its groups down; the process group of the launch stays."""
        self.stack.remove()

    def _check_run_dir(self, resume: str) -> None:
        """Refuse to replace the records of a run that this one does not go on from."""
        folder = Path(self.config.train.run_dir)
        if self.config.train.overwrite or resume == "auto":
            return
        if self.checkpoint is not None and self.checkpoint.resolve().parent == (folder / checkpoint.FOLDER).resolve():
            return
        if (folder / METRICS).exists() or checkpoint.complete(folder):
            what = METRICS if (folder / METRICS).exists() else "checkpoints"
            raise ConfigError(
                f"train.run_dir={str(folder)!r} already holds a run's {what}; go on with --resume auto, choose another folder, "
                "or set train.overwrite=true to replace it"
            )

    def _check_evaluation(self) -> None:
        if not self.config.train.eval_every:
            return
        if not self.config.data.has_eval:
            raise ConfigError(
                f"train.eval_every={self.config.train.eval_every} needs evaluation data: set data.eval_path, data.eval_split or "
                "data.eval_fraction"
            )
        if not self.config.upipe.shard_eval:
            raise ConfigError("upipe.shard_eval=false evaluates whole sequences on every rank; set it to true, or train.eval_every=0")

    def _evaluation_batches(self) -> EvaluationBatches:
        size = self.config.train.micro_batch_size
        return EvaluationBatches(
            self.data.evaluation,
            rows=self.config.train.eval_batches * size,
            batch_size=size,
            dp_size=self.handle.dp_size,
            dp_rank=self.handle.dp_rank,
        )

    def _warn_of_length(self) -> None:
        longest, served = self.data.train.longest, longest_served(self.model.config)
        if longest > served and self.is_main:
            logger.warning(
                "sequences of up to %d tokens are longer than the %d positions that the model is made for, without RoPE scaling "
                "to that length: its loss will be high. Use data.tokens=%d or less, or stretch it, e.g. model.rope_scaling={rope_type: "
                "yarn, factor: %.1f, original_max_position_embeddings: %d}",
                longest, served, served, math.ceil(longest / served), served,
            )  # fmt: skip

    def _state(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of the run after `step` steps, and what one to resume from is compared with."""
        batch = step * self.config.train.accumulation
        state = {"step": step, "batch": batch, "config": _plain(to_mapping(self.config)), "fingerprint": self.data.fingerprint}
        if hasattr(self, "batches"):
            state["epoch"], state["batch_in_epoch"] = divmod(batch, self.batches.per_epoch)
        return state | {"world": dist.get_world_size()}

    def _save_if_due(self, step: int, told: int) -> None:
        """Checkpoint after `step` steps where it is time to, and end the run where signal number `told` (0: none) came."""
        train = self.config.train
        ending = told and step < train.steps
        if ending or (train.save_every and (step % train.save_every == 0 or step == train.steps)):
            path = self.save(step)
            if ending:
                raise Interrupted(f"ended by {signal.Signals(told).name} after step {step} of {train.steps}; go on from {path}")

    def _agree(self, caught: list[int]) -> int:
        """The number of the signal that any rank caught, on every rank; 0 for none."""
        number = torch.tensor([caught[-1] if caught else 0], device=self.handle.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def _set_learning_rate(self, value: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

    def _open_run_dir(self) -> Metrics | None:
        """Write what the run is, and open its metrics for writing; None on all ranks but the first."""
        dist.barrier()
        if not self.is_main:
            return None
        train, folder = self.config.train, Path(self.config.train.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_after(folder, self.start)
        mapping = _plain(to_mapping(self.config))
        (folder / "config.yaml").write_text(yaml.safe_dump(mapping, sort_keys=False))
        (folder / "deepspeed.json").write_text(json.dumps(self.ds_config, indent=2) + "\n")
        return Metrics(folder, start=self.start, tensorboard=train.tensorboard, wandb=train.wandb, config=mapping)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write a configuration as a YAML file that is read as the same one. Raises ConfigError where it cannot be."""
    try:
        Path(path).write_text(yaml.safe_dump(_plain(to_mapping(config)), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--save-config {path}: {error.strerror}") from error
    if load(RunConfig, path) != config:
        raise ConfigError(f"--save-config {path}: what was written is read as another configuration")


@contextmanager
def signals(caught: list[int] | None = None):
    """A list (`caught`, or a new one) to which the numbers of SIGTERM and SIGUSR1 are added as they come, in place of their
    usual effect."""
    caught = [] if caught is None else caught
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda got, _: caught.append(got)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML's safe form can write and read them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
