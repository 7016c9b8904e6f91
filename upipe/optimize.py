"""How a run optimizes: its settings, the learning rate of each step, the optimizer, and DeepSpeed's configuration."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from upipe.memory import MemoryConfig

LAYER_PARAMETERS = 218_112_000  # of a layer of Llama3-8B, the measure where no model is at hand


@dataclass
class TrainConfig:
    """The optimization, what is recorded of it, and where the run is written.

    steps: optimizer steps. micro_batch_size: sequences of one data-parallel rank in one forward pass. accumulation:
    micro-batches an optimizer step. learning_rate: the peak, reached after `warmup_steps`, then a cosine down to
    final_lr_ratio times it. gradient_clipping: greatest gradient norm, 0 for none. max_live_parameters: the cap on
    gathered parameters under ZeRO-3 (`stage3_max_live_parameters`), null for 1.2 decoder layers. gradient_dtype: what
    gradients are accumulated and kept in when dtype is bf16; "bf16" saves two bytes a parameter, sharded, and rounds once
    more. z_loss: factor on the square of each token's log-sum-exp of the logits, added to its loss. label_smoothing: as
    torch's cross_entropy has it. Both need the tiled loss (`memory.loss_tokens`), and are in the evaluation's loss too.

    eval_every: evaluate after every so many steps, 0 for never, on the evaluation data of the `data` section.
    eval_batches: batches of micro_batch_size sequences in one evaluation, over all ranks together; 0 for all there are.
    tensorboard: write event files to `run_dir`/tensorboard. wandb: the project to log to, or null.
    memory_report: "first_step": on a GPU the first process records its first step and prints what its peak was for, also where the
        step fails; elsewhere, and with "none", the states and the peak are printed. See `upipe.memory_report`.
    profile: look at the second step, into `run_dir`/profile: "memory" what is live when, as a table, a picture and a snapshot
        for torch's memory viewer; "trace" what runs when, as tables by phase and by part of the step
        (`upipe.parts`) and a Chrome trace.

    run_dir: the run's folder, relative to the working directory. save_every: write a checkpoint after every so many
    steps and after the last, 0 for never (a checkpoint is still written when the run is told to end). keep_last: complete
    checkpoints kept, 0 for all. overwrite: replace the records of an earlier run in `run_dir` rather than refuse.
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
    max_live_parameters: int | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 0
    tensorboard: bool = False
    wandb: str | None = None
    memory_report: Literal["first_step", "none"] = "first_step"
    profile: Literal["none", "memory", "trace"] = "none"
    run_dir: str = "runs/run"
    save_every: int = 0
    keep_last: int = 2
    overwrite: bool = False

    def __post_init__(self):
        for name in ("steps", "micro_batch_size", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        not_negative = ("learning_rate", "final_lr_ratio", "warmup_steps", "weight_decay", "gradient_clipping", "z_loss")
        for name in (*not_negative, "eval_every", "eval_batches", "save_every", "keep_last"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number, not negative")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing}: must be from 0 to 1")
        if self.max_live_parameters is not None and self.max_live_parameters < 0:
            raise ValueError(f"max_live_parameters={self.max_live_parameters}: must be 0 or more, or null")
        if self.zero_stage == 0 and self.dtype == "bf16" and self.gradient_dtype == "fp32":
            raise ValueError("zero_stage=0, dtype=bf16: DeepSpeed has no fp32 gradients then; use zero_stage=1, or gradient_dtype=bf16")


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (0 first): linear warm-up, then cosine to final_lr_ratio at the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


def deepspeed_config(
    config: TrainConfig, memory: MemoryConfig | None = None, *, cuda: bool, layer_parameters: int = LAYER_PARAMETERS
) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: what DeepSpeed would fill in by itself and that changes numbers or memory
    (clipping at 1.0, live parameters, buckets) is always written out.

    layer_parameters: of the largest decoder layer, from which come the sizes that the configuration leaves open. By default
    DeepSpeed's buckets of 5e8 (two of them, beside a parameter of a decoder layer) would stand in the peak.
    """
    bucket, prefetch = layer_parameters, layer_parameters // 4
    if memory is not None and memory.reduce_bucket_parameters is not None:
        bucket = memory.reduce_bucket_parameters
    if memory is not None and memory.prefetch_parameters is not None:
        prefetch = memory.prefetch_parameters
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "overlap_comm": cuda,
        "reduce_bucket_size": bucket,
    }
    if config.zero_stage in (1, 2):
        zero["allgather_bucket_size"] = bucket
    if config.zero_stage == 3:
        live = config.max_live_parameters
        live = 6 * layer_parameters // 5 if live is None else live
        zero |= {
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_param_persistence_threshold": 100_000,
        }
    on_cpu = {}
    if memory is not None and memory.optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
        # torch's fused AdamW runs on the CPU: DeepSpeed's own would be compiled first.
        on_cpu = {"zero_force_ds_cpu_optimizer": False}
    return on_cpu | {
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
    """AdamW (fused on a GPU, also where its states are on the host then); weight decay on matrices alone, not on norms and
    biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # `ds_shape` where ZeRO-3 has already partitioned the parameter at construction.
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=tuple(config.betas),
        eps=config.epsilon,
        fused=cuda,
    )
