"""Training runs inside a world of ranks, for the tests of the trainer: functions that a rank calls, and what they need."""

import contextlib
import io
import os
import signal
from pathlib import Path

import torch

from upipe import checkpoint
from upipe.config import from_mapping
from upipe.metrics import FILE as METRICS
from upipe.metrics import read_metrics
from upipe.trainer import Interrupted, RunConfig, Trainer, signals

SHAPE = dict(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, vocab_size=256)
ROWS, TOKENS = 10, 13


def mapping(folder, **changes) -> dict:
    """A run of 10 rows of 13 tokens: an epoch is 5 steps of 2 micro-batches at sp 2. changes: `section__key=value`."""
    text = Path(folder) / "text.txt"
    if not text.exists():
        # Whole or not at all: ranks call this too, and one may look while another writes.
        part = text.with_name(f"text-{os.getpid()}.part")
        part.write_bytes(bytes(32 + (i * i * 7 + i) % 90 for i in range(ROWS * TOKENS)))
        part.replace(text)
    made = {
        "model": dict(SHAPE),
        "data": {"path": str(text), "tokens": TOKENS},
        "train": dict(steps=9, accumulation=2, warmup_steps=2, learning_rate=1e-2, run_dir=str(Path(folder) / "run")),
        "upipe": {"sp_size": 2},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        made[section][key] = value
    return made


def train(config: dict, resume: str = "none", kill_at: int | None = None, tell_at: int | None = None) -> dict:
    """One run on this rank. kill_at: SIGKILL to this process once so many steps are done and recorded, and what is due
    is saved. tell_at: SIGTERM to the last rank at that point."""

    class Struck(Trainer):
        def _agree(self, caught):
            # Asked first before a step is done, when there is no record yet.
            recorded = self.is_main and (Path(self.config.train.run_dir) / METRICS).exists()
            done = len(read_metrics(self.config.train.run_dir)) if recorded else 0
            step = torch.tensor(done)
            torch.distributed.broadcast(step, 0)
            if tell_at == int(step) and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super()._agree(caught)

        def _save_if_due(self, step, told):
            super()._save_if_due(step, told)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = Struck(from_mapping(RunConfig, config), resume=resume)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            losses, ended = [], None
            try:
                losses = trainer.fit()
            except Interrupted as error:
                ended = str(error)
        return {
            "losses": losses, "ended": ended, "start": trainer.start, "text": trainer.describe(), "step_tokens": trainer.step_tokens,
        }  # fmt: skip
    finally:
        trainer.close()


def told_while_building(config: dict) -> str:
    """SIGUSR1 to the last rank while it builds its model; returns how the run ended."""
    with signals() as caught:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        trainer = Trainer(from_mapping(RunConfig, config))
        try:
            trainer.fit(caught)
        except Interrupted as error:
            return str(error)
        finally:
            trainer.close()
    return "it trained"


def killed_while_saving(config: dict, step: int) -> None:
    """A run that dies by SIGKILL in the middle of writing the checkpoint of `step`, all its files there but DONE."""
    write = checkpoint.save

    def save(path, engine, state, **rest):
        if state["step"] == step:
            checkpoint.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write(path, engine, state, **rest)
        if state["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = save
    train(config)


def evaluated(config: dict) -> dict:
    """Evaluation loss and tokens before training, and the records of a short run with evaluation."""
    trainer = Trainer(from_mapping(RunConfig, config))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            before = trainer.evaluate()
            trainer.fit()
        torch.distributed.barrier()
        return {"before": before, "records": read_metrics(config["train"]["run_dir"]), "step_tokens": trainer.step_tokens}
    finally:
        trainer.close()


def checked(config: dict):
    """The self-check before training: (passed, text)."""
    trainer = Trainer(from_mapping(RunConfig, config))
    try:
        result = trainer.check()
        return result.passed, str(result)
    finally:
        trainer.close()


def refused(config: dict, resume: str) -> str:
    """The message with which a run is refused."""
    try:
        Trainer(from_mapping(RunConfig, config), resume=resume).close()
    except ValueError as error:
        return str(error)
    return ""


def partitioned(config: dict, state: int) -> dict[str, torch.Tensor]:
    """Full weights of a model made under deepspeed.zero.Init, the rank's random state beforehand being `state`."""
    import deepspeed

    torch.manual_seed(state)
    trainer = Trainer(from_mapping(RunConfig, config))
    try:
        weights = {}
        for name, parameter in trainer.model.named_parameters():
            assert hasattr(parameter, "ds_id"), name
            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().clone()
        return weights
    finally:
        trainer.close()


def frequencies(config: dict) -> tuple[set[torch.dtype], torch.Tensor]:
    """The dtypes of the parameters, and the rotary frequencies, once the model has run under DeepSpeed."""
    trainer = Trainer(from_mapping(RunConfig, config))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.fit()
        return {p.dtype for p in trainer.model.parameters()}, trainer.model.model.rotary_emb.inv_freq.clone()
    finally:
        trainer.close()
