"""A run that dies or is told to end, and goes on: its losses are the uninterrupted run's, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

from tests import training
from tests.world import RankFailure, World
from upipe import checkpoint
from upipe.config import ConfigError
from upipe.metrics import Metrics, read_metrics


def _losses(run_dir) -> dict[int, float]:
    records = read_metrics(run_dir)
    assert [r["step"] for r in records] == list(range(len(records))), "each step once, in order"
    return {r["step"]: r["loss"] for r in records}


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_T39_resume_at_an_epoch_boundary_and_inside_epoch_2(worlds, tmp_path, stage):
    """An epoch is 5 steps of 2 micro-batches: resumed after 5 (the boundary) and 7 steps (inside the second epoch)."""
    world = worlds(2)
    config = training.mapping(tmp_path, train__zero_stage=stage, train__save_every=1, train__keep_last=0)
    whole = world.run(training.train, config=config)
    assert whole[0]["losses"] == whole[1]["losses"] and len(set(whole[0]["losses"])) == 9
    state = checkpoint.read_state(tmp_path / "run" / "checkpoints" / "step_7")
    assert (state["batch"], state["epoch"], state["batch_in_epoch"]) == (14, 1, 4)
    for step in (5, 7):
        other = training.mapping(tmp_path, train__zero_stage=stage, train__run_dir=str(tmp_path / f"from{step}"))
        resumed = world.run(training.train, config=other, resume=str(tmp_path / "run" / "checkpoints" / f"step_{step}"))
        assert resumed[0]["start"] == step
        assert resumed[0]["losses"] == whole[0]["losses"][step:]


@pytest.mark.parametrize(
    "changes",
    [
        dict(model__zero_init="always", model__checkpointing="non-reentrant"),
        dict(train__dtype="bf16", model__tie_embeddings=True),
        pytest.param(dict(train__dtype="bf16", train__zero_stage=1), marks=pytest.mark.slow),
        pytest.param(dict(train__dtype="bf16", train__zero_stage=2), marks=pytest.mark.slow),
        dict(train__eval_every=2, data__eval_fraction=0.2, train__steps=6),
    ],
    ids=lambda changes: "-".join(f"{key.partition('__')[2]}={value}" for key, value in changes.items()),
)
@pytest.mark.slow
def test_T39_in_other_settings(worlds, tmp_path, changes):
    whole = worlds(2).run(training.train, config=training.mapping(tmp_path, train__save_every=5, **changes))
    other = training.mapping(tmp_path, train__run_dir=str(tmp_path / "again"), **changes)
    resumed = worlds(2).run(training.train, config=other, resume=str(tmp_path / "run" / "checkpoints" / "step_5"))
    assert resumed[0]["losses"] == whole[0]["losses"][5:]
    records = read_metrics(tmp_path / "run")[5:]
    assert [r.get("eval_loss") for r in read_metrics(tmp_path / "again")] == [r.get("eval_loss") for r in records]


@pytest.mark.slow
def test_T39_with_data_parallel_ranks_and_packed_documents(worlds, tmp_path):
    texts = [tmp_path / f"{i}.txt" for i in range(30)]
    for i, text in enumerate(texts):
        text.write_text(chr(65 + i) * (3 + i % 7))
    changes = dict(data__path=[str(t) for t in texts], data__packing="documents", upipe__sp_size=1, train__save_every=4, train__keep_last=0)
    whole = worlds(2).run(training.train, config=training.mapping(tmp_path, **changes))
    saved = tmp_path / "run" / "checkpoints" / "step_4"
    changes["train__run_dir"] = str(tmp_path / "again")
    resumed = worlds(2).run(training.train, config=training.mapping(tmp_path, **changes), resume=str(saved))
    assert resumed[0]["start"] == 4 and resumed[0]["losses"] == whole[0]["losses"][4:]


def test_sigkill_inside_an_epoch_then_resume_auto(worlds, tmp_path):
    """Killed after step 8 of 9, in the second epoch, with the last checkpoint at step 6: steps 7 and 8 are done again."""
    whole = worlds(2).run(training.train, config=training.mapping(tmp_path, train__run_dir=str(tmp_path / "whole")))
    config = training.mapping(tmp_path, train__save_every=3)
    killed = World(2)
    with pytest.raises(RankFailure, match="the process died, exit code -9"):
        killed.run(training.train, config=config, kill_at=8)
    assert len(_losses(tmp_path / "run")) == 8
    resumed = worlds(2).run(training.train, config=config, resume="auto")
    assert resumed[0]["start"] == 6 and f"resume  from {tmp_path / 'run' / 'checkpoints' / 'step_6'}" in resumed[0]["text"]
    assert list(_losses(tmp_path / "run").values()) == whole[0]["losses"]
    done = worlds(2).run(training.train, config=config, resume="auto")
    assert done[0]["losses"] == [] and len(_losses(tmp_path / "run")) == 9


@pytest.mark.slow
def test_sigkill_while_saving_leaves_a_checkpoint_that_is_not_used(worlds, tmp_path):
    whole = worlds(2).run(training.train, config=training.mapping(tmp_path, train__run_dir=str(tmp_path / "whole")))
    config = training.mapping(tmp_path, train__save_every=2, train__keep_last=1)
    with pytest.raises(RankFailure, match="the process died, exit code -9"):
        World(2).run(training.killed_while_saving, config=config, step=4)
    broken = tmp_path / "run" / "checkpoints" / "step_4"
    assert (broken / "state.json").exists() and not (broken / "DONE").exists()
    with pytest.raises(ConfigError, match="step_4 is incomplete"):
        checkpoint.find(str(broken), tmp_path / "run")
    resumed = worlds(2).run(training.train, config=config, resume="auto")
    assert resumed[0]["start"] == 2 and list(_losses(tmp_path / "run").values()) == whole[0]["losses"]
    assert [p.name for p in checkpoint.complete(tmp_path / "run")] == ["step_9"]
    assert not broken.exists()


def test_a_signal_to_one_rank_saves_and_ends_all(worlds, tmp_path):
    whole = worlds(2).run(training.train, config=training.mapping(tmp_path, train__run_dir=str(tmp_path / "whole")))
    config = training.mapping(tmp_path)
    told = worlds(2).run(training.train, config=config, tell_at=4)
    saved = tmp_path / "run" / "checkpoints" / "step_4"
    assert [t["ended"] for t in told] == [f"ended by SIGTERM after step 4 of 9; go on from {saved}"] * 2
    resumed = worlds(2).run(training.train, config=config, resume="auto")
    assert resumed[0]["ended"] is None and resumed[0]["start"] == 4
    assert list(_losses(tmp_path / "run").values()) == whole[0]["losses"]


def test_a_signal_before_the_first_step_ends_all_without_a_checkpoint(worlds, tmp_path):
    told = worlds(2).run(training.told_while_building, config=training.mapping(tmp_path))
    assert told == ["ended by SIGUSR1 before a step was done here; no checkpoint was written"] * 2
    assert checkpoint.complete(tmp_path / "run") == []


def test_what_may_change_and_what_may_not(worlds, tmp_path):
    config = training.mapping(tmp_path, train__steps=2, train__save_every=2)
    worlds(2).run(training.train, config=config)
    copied = tmp_path / "copy.txt"
    shutil.copy(config["data"]["path"], copied)
    free = training.mapping(tmp_path, train__steps=3, train__save_every=1, data__path=str(copied), train__tensorboard=True)
    assert worlds(2).run(training.train, config=free, resume="auto")[0]["start"] == 2
    changes = dict(model__layers=3, data__tokens=12, train__seed=1, train__micro_batch_size=2, train__zero_stage=1, upipe__sp_size=1)
    told = worlds(2).run(training.refused, config=training.mapping(tmp_path, **changes), resume="auto")[0]
    assert "cannot resume from" in told
    for key in changes:
        assert key.replace("__", ".") + " (was" in told, told
    copied.write_text("x" * 130)
    other = training.mapping(tmp_path, data__path=str(copied))
    told = worlds(2).run(training.refused, config=other, resume="auto")[0]
    assert "data.path or data.dataset (other training tokens)" in told
    told = worlds(1).run(training.refused, config=training.mapping(tmp_path, upipe__sp_size=1), resume="auto")[0]
    assert "number of processes (was 2, is 1)" in told
    assert "go on with --resume auto" in worlds(2).run(training.refused, config=config, resume="none")[0]


def test_finding_checkpoints(tmp_path):
    for step, done in [(2, True), (10, True), (12, False)]:
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        if done:
            (folder / "DONE").write_text(f"{step}\n")
    newest = tmp_path / "checkpoints" / "step_10"
    assert checkpoint.find("auto", tmp_path) == checkpoint.find(str(tmp_path), "elsewhere") == newest
    assert checkpoint.find("auto", tmp_path / "none") is checkpoint.find("none", tmp_path) is None
    assert checkpoint.find(str(newest), "elsewhere") == newest
    with pytest.raises(ConfigError, match="no complete checkpoint at"):
        checkpoint.find(str(tmp_path / "none"), tmp_path)
    checkpoint.prune(tmp_path, 1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_12"]


def test_wandb_is_one_run_also_after_a_resume(tmp_path, monkeypatch):
    import sys
    import types

    class Run(list):
        def log(self, numbers, step):
            self.append((step, numbers))

        def finish(self):
            self.append("finished")

    made = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: made.append((Run(), given)) or made[-1][0]))
    for start in (0, 1, 0):
        metrics = Metrics(tmp_path, start=start, tensorboard=False, wandb="project", config={"a": 1})
        metrics.write({"step": start, "loss": 2.0, "grad_norm": None})
        metrics.close()
    (first, given), (second, again), (_, anew) = made
    assert given["project"] == "project" and given["config"] == {"a": 1}
    assert given["id"] == again["id"] != anew["id"]
    assert first == [(0, {"loss": 2.0}), "finished"] and second[0][0] == 1


def test_records_after_the_checkpoint_are_dropped(tmp_path):
    lines = [json.dumps({"step": i, "loss": float(i)}) for i in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    metrics = Metrics(Path(tmp_path), start=3, tensorboard=False, wandb=None, config={})
    metrics.write({"step": 3, "loss": 0.5})
    metrics.close()
    assert [r["loss"] for r in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 0.5]
