"""Train a Hugging Face model under DeepSpeed with UPipe attention, from one configuration.

A run folder holds what the run was (`config.yaml`, `deepspeed.json`) and what it did (`metrics.jsonl`, one line an
optimizer step). Units: memory in GiB = 2**30 bytes; tokens/s are counted over all ranks.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
import yaml
from torch import nn
from tqdm import tqdm

from upipe.apply import UPipeConfig, apply
from upipe.build import ModelConfig, build_model, count_parameters
from upipe.check import CheckResult, self_check
from upipe.comm import init_distributed
from upipe.config import ConfigError, to_mapping
from upipe.data import DataConfig, EpochBatches, build_dataset, build_tokenizer


@dataclass
class TrainConfig:
    """The optimization, and where the run is written.

    steps: optimizer steps. micro_batch_size: sequences of one data-parallel rank in one forward pass. accumulation:
    micro-batches an optimizer step. learning_rate: the peak, reached after `warmup_steps`, then a cosine down to
    final_lr_ratio times it. gradient_clipping: greatest gradient norm, 0 for none. max_live_parameters: the cap on
    gathered parameters under ZeRO-3 (`stage3_max_live_parameters`). gradient_dtype: what gradients are accumulated and kept
    in when dtype is bf16; "bf16" saves two bytes a parameter, sharded, and rounds once more. overwrite: replace the records of an earlier run
    in `run_dir` (relative to the working directory) rather than refuse.
    """

    steps: int = 100
    micro_batch_size: int = 1
    accumulation: int = 1
    learning_rate: float = 3e-4
    final_lr_ratio: float = 0.1
    warmup_steps: int = 10
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    gradient_clipping: float = 1.0
    zero_stage: Literal[0, 1, 2, 3] = 3
    max_live_parameters: int = 250_000_000
    dtype: Literal["fp32", "bf16"] = "fp32"
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    run_dir: str = "runs/run"
    overwrite: bool = False

    def __post_init__(self):
        for name in ("steps", "micro_batch_size", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("learning_rate", "final_lr_ratio", "warmup_steps", "weight_decay", "gradient_clipping"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")


@dataclass
class RunConfig:
    """Everything `upipe train` reads from its YAML file, a section a module."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    upipe: UPipeConfig = field(default_factory=UPipeConfig)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (0 first): linear warm-up, then cosine to final_lr_ratio at the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


def deepspeed_config(config: TrainConfig, *, cuda: bool) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: what DeepSpeed would fill in by itself and that changes numbers or memory
    (clipping at 1.0, live parameters) is always written out."""
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "overlap_comm": cuda,
    }
    if config.zero_stage == 3:
        zero |= {
            "stage3_max_live_parameters": config.max_live_parameters,
            "stage3_max_reuse_distance": config.max_live_parameters,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
        }
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.gradient_clipping,
        "bf16": {"enabled": config.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": config.gradient_dtype if config.dtype == "bf16" else "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": sys.maxsize,
    }


def build_optimizer(model: nn.Module, config: TrainConfig, *, cuda: bool) -> torch.optim.AdamW:
    """AdamW (fused on a GPU); weight decay on matrices alone, not on norms and biases."""
    # `ds_shape` where ZeRO-3 has already partitioned the parameter at construction.
    matrices = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=tuple(config.betas),
        eps=config.epsilon,
        fused=cuda,
    )


def memory_gib(device: torch.device) -> float:
    """This rank's memory: on a GPU the peak that was allocated, on the CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Trainer:
    """One training run. `Trainer(config)` builds everything and is collective over the launched ranks; then `fit()`,
    `check()`, and `close()`, which must be called once.

    Raises ConfigError for what the configuration asks and cannot be had, before the first step.
    """

    def __init__(self, config: RunConfig):
        self.config = config
        self.dataset = build_dataset(config.data)
        # Every rank looks before rank 0 writes, behind the barrier below.
        if (Path(config.train.run_dir) / "metrics.jsonl").exists() and not config.train.overwrite:
            raise ConfigError(
                f"train.run_dir={config.train.run_dir!r} already holds a run's metrics.jsonl; "
                "choose another folder, or set train.overwrite=true to replace it"
            )
        init_distributed()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.cuda = torch.cuda.is_available()
        self.ds_config = deepspeed_config(config.train, cuda=self.cuda)
        self.model = build_model(config.model, seed=config.train.seed)
        vocabulary, tokens = self.model.config.vocab_size, build_tokenizer(config.data).vocab_size
        if vocabulary < tokens:
            raise ConfigError(f"the model's vocabulary of {vocabulary} is smaller than the tokenizer's {tokens}")
        self.parameters = count_parameters(self.model)
        self.handle = apply(self.model, config.upipe, ds_config=self.ds_config)
        self.batches = EpochBatches(
            self.dataset,
            batch_size=config.train.micro_batch_size,
            batches=config.train.steps * config.train.accumulation,
            dp_size=self.handle.dp_size,
            dp_rank=self.handle.dp_rank,
            seed=config.train.seed,
        )
        self.engine: Any = None

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    def describe(self) -> str:
        """What the run is: model, data, parallelism and the DeepSpeed configuration, as text of several lines."""
        model, data, train = self.model.config, self.config.data, self.config.train
        heads = f"{model.num_attention_heads} query / {model.num_key_value_heads} kv heads"
        window = self.handle.dp_size * train.accumulation * train.micro_batch_size
        return "\n".join(
            [
                f"model   {type(self.model).__name__}, {self.parameters / 1e6:.2f} M parameters, "
                f"{model.num_hidden_layers} layers, {heads}",
                f"data    {len(self.dataset)} chunks of {data.tokens} tokens from {', '.join(data.paths)}",
                f"ranks   {dist.get_world_size()} = sp {self.handle.sp_size} x dp {self.handle.dp_size}, "
                f"on {self.handle.device.type}, {train.dtype}, ZeRO-{train.zero_stage}",
                f"steps   {train.steps} of {window} x {data.tokens} tokens",
                str(self.handle.report()),
            ]
        )

    def build_engine(self) -> None:
        """Hand the model to DeepSpeed."""
        import deepspeed

        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            config=self.ds_config,
            mpu=self.handle.mpu,
            optimizer=build_optimizer(self.model, self.config.train, cuda=self.cuda),
            dist_init_required=False,
        )

    def fit(self) -> list[float]:
        """Train; returns the loss of every step (the mean over its tokens, over all ranks).

        Raises FloatingPointError, with the step, where the loss is not finite.
        """
        train = self.config.train
        if self.engine is None:
            self.build_engine()
        metrics = self._open_run_dir()
        tokens = self.handle.dp_size * train.accumulation * train.micro_batch_size * self.config.data.tokens
        interval = 0.5 if sys.stderr.isatty() else 10.0
        bar = tqdm(total=train.steps, desc="train", unit="step", disable=not self.is_main, mininterval=interval)
        losses: list[float] = []
        total, micro, started = 0.0, 0, time.perf_counter()
        for batch in self.handle.shard(self.batches, accumulation=train.accumulation):
            self._set_learning_rate(learning_rate(len(losses), train))
            loss = self.handle.loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            total, micro = total + float(loss.detach()) / train.accumulation, micro + 1
            if micro < train.accumulation:
                continue
            now = time.perf_counter()
            record = {
                "step": len(losses),
                "loss": total,
                "learning_rate": learning_rate(len(losses), train),
                "grad_norm": _as_float(self.engine.get_global_grad_norm()),
                "tokens_per_s": tokens / (now - started),
                "memory_gib": memory_gib(self.handle.device),
                "time_s": now - started,
            }
            losses.append(total)
            if metrics is not None:
                metrics.write(json.dumps(record) + "\n")
                metrics.flush()
            bar.set_postfix_str(
                f"loss {total:.4f}, {record['tokens_per_s']:,.0f} tokens/s, {record['memory_gib']:.2f} GiB",
                refresh=False,
            )
            bar.update()
            if not math.isfinite(total):
                raise FloatingPointError(f"the loss of step {record['step']} is {total}; try a lower learning rate")
            total, micro, started = 0.0, 0, time.perf_counter()
        bar.close()
        if metrics is not None:
            metrics.close()
        return losses

    def check(self) -> CheckResult:
        """Compare the sharded model's loss and gradients, at its weights of now, with the plain model's.

        The batch is the first chunks of the data: one accumulation window of every data-parallel rank. Uses up the
        engine's gradients: do not train on afterwards.
        """
        train = self.config.train
        rows = self.handle.dp_size * train.accumulation * train.micro_batch_size
        items = [self.dataset[i % len(self.dataset)] for i in range(rows)]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        return self_check(
            self.engine,
            self.handle,
            lambda: build_model(self.config.model, seed=train.seed),
            batch,
            accumulation=train.accumulation,
        )

    def close(self) -> None:
        """Take UPipe off the model and its groups down; the process group of the launch stays."""
        self.handle.remove()

    def _set_learning_rate(self, value: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

    def _open_run_dir(self) -> Any:
        """Write what the run is, and open its metrics for writing; None on all ranks but the first."""
        dist.barrier()
        if not self.is_main:
            return None
        folder = Path(self.config.train.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(_plain(to_mapping(self.config)), sort_keys=False))
        (folder / "deepspeed.json").write_text(json.dumps(self.ds_config, indent=2) + "\n")
        return open(folder / "metrics.jsonl", "w", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML's safe form can write and read them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
