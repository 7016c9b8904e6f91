"""Checkpoints of a training run: written whole or not at all, resumed from, exported to plain Hugging Face folders.

    RUN/checkpoints/step_20/           the state after 20 optimizer steps
        deepspeed/  latest             DeepSpeed's files: parameters, optimizer states (of every ZeRO stage)
        random_00000.pt ...            each rank's random states
        model/                         the model's Hugging Face configuration, and the tokenizer where there is one
        state.json                     steps done, data position, the run's configuration and what it ran on
        DONE                           written last; without it the checkpoint counts as absent

All ranks must see the folder. Units: steps are optimizer steps, batches are micro-batches of one data-parallel rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from upipe.config import ConfigError

FOLDER, DONE, STATE, TAG = "checkpoints", "DONE", "state.json", "deepspeed"
# Sections and settings of a configuration that a resumed run may change.
FREE_TRAIN = {
    "steps", "eval_every", "eval_batches", "tensorboard", "wandb", "run_dir", "save_every", "keep_last", "overwrite",
    "max_live_parameters", "memory_report", "profile",
}  # fmt: skip
FREE_DATA = {"path", "eval_path", "eval_split"}
FREE_MODEL = {"checkpointing", "zero_init"}
FREE_UPIPE = {
    "heads_per_stage", "kernel", "ring_degree", "shard_eval", "attention_output", "attention_output_layers", "overlap", "dx",
}


def complete(run_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    found = (Path(run_dir) / FOLDER).glob("step_*")
    return sorted((p for p in found if (p / DONE).is_file()), key=step_of)


def step_of(path: Path) -> int:
    """Optimizer steps done at the checkpoint, from its name."""
    return int(path.name.removeprefix("step_"))


def find(resume: str, run_dir: str | Path) -> Path | None:
    """The checkpoint that `resume` means: "none", "auto" (the newest complete one of `run_dir`, or None where there is
    none), or the path of a checkpoint or of a run folder. Raises ConfigError for a path without a complete checkpoint."""
    if resume == "none":
        return None
    if resume == "auto":
        return (complete(run_dir) or [None])[-1]
    path = Path(resume)
    if (path / DONE).is_file():
        return path
    if complete(path):
        return complete(path)[-1]
    if path.is_dir() and path.name.startswith("step_"):
        raise ConfigError(f"checkpoint {resume} is incomplete (it has no {DONE} file); use another, or --resume auto")
    raise ConfigError(f"there is no complete checkpoint at {resume}: give one, its run's folder, or auto or none")


def read_state(path: Path) -> dict[str, Any]:
    """What `state.json` of a complete checkpoint holds."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def save(path: Path, engine: Any, state: dict[str, Any], *, hf_config: Any, tokenizer: Any = None) -> None:
    """Write the checkpoint `path`; collective. What an earlier try left there is replaced.

    state: "step" and the rest of `state.json`. hf_config: the model's configuration. tokenizer: a Hugging Face one, or None.
    """
    rank = dist.get_rank()
    if rank == 0:
        remove(path)
        path.mkdir(parents=True)
    dist.barrier()
    with contextlib.redirect_stdout(io.StringIO()):
        engine.save_checkpoint(str(path), tag=TAG)
    torch.save(random_state(), path / f"random_{rank:05d}.pt")
    if rank == 0:
        hf_config.save_pretrained(path / "model")
        if tokenizer is not None:
            tokenizer.save_pretrained(path / "model")
        (path / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    dist.barrier()
    if rank == 0:
        for file in path.rglob("*"):
            _flush(file)
        unfinished = path / f"{DONE}.new"
        unfinished.write_text(f"{state['step']}\n")
        os.replace(unfinished, path / DONE)
    dist.barrier()


def _flush(file: Path) -> None:
    """Have the file system put a file's contents on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(run_dir: str | Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep` (0: keep all), and incomplete ones older than these."""
    done = complete(run_dir)
    if not keep or not done:
        return
    kept = done[-keep:]
    for path in (Path(run_dir) / FOLDER).glob("step_*"):
        if path not in kept and step_of(path) < step_of(kept[-1]):
            remove(path)


def remove_after(run_dir: str | Path, step: int) -> None:
    """Remove the checkpoints of a run folder that have more than `step` steps: of a curve that is given up."""
    for path in (Path(run_dir) / FOLDER).glob("step_*"):
        if step_of(path) > step:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, its mark of completeness first."""
    (path / DONE).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def load(path: Path, engine: Any) -> None:
    """Put a complete checkpoint's parameters, optimizer states and this rank's random states back; collective."""
    with contextlib.redirect_stdout(io.StringIO()):
        loaded, _ = engine.load_checkpoint(str(path), tag=TAG)
    if loaded is None:
        raise ConfigError(f"DeepSpeed could not load the checkpoint {path}")
    set_random_state(torch.load(path / f"random_{dist.get_rank():05d}.pt", weights_only=False))


def random_state() -> dict[str, Any]:
    """The states of all random number generators of this process."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_resumable(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint with another model, data, batch, seed or number of ranks.

    saved, now: `state.json` of the checkpoint and of the run that would go on; "config", "fingerprint" and "world" are
    compared. Raises ConfigError that names every key that differs with both values.
    """
    changed = []
    free = {"train": FREE_TRAIN, "data": FREE_DATA, "model": FREE_MODEL, "upipe": FREE_UPIPE}
    for section, allowed in free.items():
        before, after = saved["config"][section], now["config"][section]
        for key in sorted((before.keys() | after.keys()) - allowed):
            if before.get(key) != after.get(key):
                changed.append(f"{section}.{key} (was {before.get(key)!r}, is {after.get(key)!r})")
    if saved["fingerprint"] != now["fingerprint"] and not any(c.startswith("data.") for c in changed):
        changed.append("data.path or data.dataset (other training tokens)")
    if saved["world"] != now["world"]:
        changed.append(f"number of processes (was {saved['world']}, is {now['world']})")
    if changed:
        raise ConfigError(
            f"cannot resume from {path}: changed are {'; '.join(changed)}. Restore them, or start afresh with --resume none "
            "in another train.run_dir"
        )


def full_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """All parameters of a complete checkpoint by name, whole, on the CPU: fp32 (master weights) under ZeRO, in the dtype
    of the run without."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if list((path / TAG).glob("*_optim_states.pt")):
        with contextlib.redirect_stdout(io.StringIO()):
            return get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG)
    (file,) = (path / TAG).glob("*_model_states.pt")
    return torch.load(file, map_location="cpu", weights_only=False)["module"]


def export(checkpoint: str, out: str | Path) -> Path:
    """Turn a checkpoint into a plain Hugging Face folder: safetensors in the dtype of the run, configuration, tokenizer.

    checkpoint: a checkpoint, or a run's folder for its newest. Returns the checkpoint used. Raises ConfigError for an
    incomplete checkpoint, and where `out` holds something already.
    """
    from upipe.build import causal_lm, read_config

    path, out = find(checkpoint, checkpoint), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; choose another folder")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[read_state(path)["config"]["train"]["dtype"]]
    with torch.device("meta"):
        model = causal_lm(read_config(path / "model"), dtype=dtype)
    weights = {name: value.to(dtype) for name, value in full_state_dict(path).items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.config.use_cache = True
    model.save_pretrained(out)
    for file in (path / "model").iterdir():
        if file.name != "config.json":
            shutil.copy2(file, out / file.name)
    return path
