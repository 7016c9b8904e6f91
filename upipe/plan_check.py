"""What `upipe train` says before it starts: the prediction of `upipe plan` for the run and machine at hand, in a few lines.

It warns where a run is predicted not to fit, and goes on: a prediction has assumptions and a margin, and an attempt costs a minute.
With `--strict` it refuses. What is not in plan_layers.json is simulated at the run's own length alone, within seconds.
"""

from __future__ import annotations

import os

import torch

from upipe import plan
from upipe.config import ConfigError
from upipe.environment import host_gib
from upipe.plan import Gpu, Machine, Prediction
from upipe.trainer import RunConfig


def gpu_of(name: str, memory_gib: float) -> Gpu | None:
    """The kind of a GPU by torch's name for it, "NVIDIA H100 80GB HBM3" say, and its memory; None where the planner has none."""
    words = name.upper().replace("-", " ").split()
    alike = [gpu for gpu in plan.gpus().values() if gpu.name.split("-")[0] in words]
    near = min(alike, key=lambda gpu: abs(gpu.memory_gib - memory_gib), default=None)
    return near if near is not None and abs(near.memory_gib / memory_gib - 1) < 0.1 else None


def machine_here(environment=os.environ) -> Machine | str:
    """The machine that this process is launched on; or why the planner does not know it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = gpu_of(properties.name, properties.total_memory / 2**30)
    if gpu is None:
        return f"{properties.name} is none of {', '.join(plan.gpus())}"
    world = int(environment.get("WORLD_SIZE", 1))
    local = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world)
    return Machine(gpu, local, max(1, world // local), host_gib())


def lines(found: Prediction) -> list[str]:
    """What is predicted, and what to change where it does not fit."""
    left, gpu = found.headroom, found.machine.gpu
    text = [
        f"plan    predicted: {found.device_gib:.1f} of {gpu.usable_gib:g} GiB a GPU (highest in the {found.phase}), "
        f"{found.host_gib:.0f} of {found.machine.host_gib:.0f} GiB of host memory a node, {found.time_s:.3g} s a step; "
        f"{'fits' if found.fits else 'does not fit'}"
    ]
    if not found.fits:
        text.append(f"plan    {found.limit} memory is predicted to run out, by {-left[found.limit]:.1f} GiB: set {found.advice()}")
    return text


def before_training(run: RunConfig, *, strict: bool = False, machine: Machine | None = None) -> list[str]:
    """Lines to print before a run; none on a CPU.

    Args:
        strict: refuse what is predicted not to fit, or cannot be predicted.
        machine: None: the one at hand.

    Raises:
        ConfigError: under strict, with the limit and the setting to change.
    """
    if machine is None and not torch.cuda.is_available():
        return []
    try:
        machine = machine_here() if machine is None else machine
        found = machine if isinstance(machine, str) else plan.predict(run, machine, only_here=True)
    except ConfigError as error:
        found = str(error)
    except Exception as error:  # a model that the simulation cannot run must not keep it from training
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if isinstance(found, str):
        if strict:
            raise ConfigError(f"--strict: this run cannot be predicted, {found}; leave --strict out")
        return [f"plan    not predicted: {found}"]
    text = lines(found)
    if found.fits:
        return text
    if strict:
        raise ConfigError(f"--strict: {'; '.join(line.removeprefix('plan').strip() for line in text)}")
    return [*text, "plan    going on all the same; --strict refuses, --no-plan skips this"]
