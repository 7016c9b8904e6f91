"""A training point: what is said before it runs, what is refused, and the memory fields that only a GPU fills."""

import dataclasses

import pytest
import torch

from experiments import points, train_point
from upipe import records
from upipe.config import ConfigError, from_mapping
from upipe.plan import Machine

SETTINGS = {
    "model_name": "llama-toy",
    "device": "cpu",
    "processes": 2,
    "tokens": 1024,
    "model": {"hidden_size": 64, "layers": 2, "heads": 8, "kv_heads": 2, "intermediate_size": 128, "vocab_size": 256},
    "train": {"steps": 3, "dtype": "fp32"},
    "upipe": {"sp_size": 2},
}


def point(**changes):
    return from_mapping(train_point.Point, SETTINGS | changes)


def test_record_says_what_is_known_before():
    record = train_point.record(point(upipe={"sp_size": 2, "heads_per_stage": 4}, processes=4))
    assert (record.sp, record.dp, record.heads_per_stage, record.layers, record.zero) == (2, 2, 4, 2, 3)
    assert record.dtype == "float32" and record.extra["hidden_size"] == 64 and record.time_s is None
    assert train_point.record(point()).heads_per_stage == 2


def test_published_shape_of_the_gpu_experiment():
    path, variant = points.find("llama3_8b_4layers-2gpu")
    (spec,) = points.expand(points.read(path, variant), path.parent)
    record = train_point.record(spec.point)
    assert (record.layers, record.tokens, record.sp, record.extra["hidden_size"]) == (4, 131072, 2, 4096)
    # u of Llama3-8B is 8 KiB a local token.
    assert records.unit_gib(record) == 65536 * 8 * 2**10 / 2**30
    assert spec.point.train.steps == 5 and train_point.verdict(spec.point) == "ok"


def test_verdict_names_what_works():
    assert train_point.verdict(point()) == "ok"
    assert "use one of 2, 4, 6, 8" in train_point.verdict(point(upipe={"sp_size": 2, "heads_per_stage": 3}))
    assert "use one of [1, 2]" in train_point.verdict(point(upipe={"sp_size": 3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "tensor"}, "method='tensor'"),
        ({"method": "none", "upipe": {"sp_size": 2}}, "shares no sequence"),
        ({"untimed_steps": 3}, "leave one to be timed"),
        ({"untimed_steps": 0}, "warm up, or ask for a single step"),
        ({"processes": 0}, "at least 1"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"train": SETTINGS["train"] | {"profile": "trace"}}, "use profile: true"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        point(**changes)


def test_tokens_depend_on_seed_and_data_rank_alone():
    first = [next(train_point._batches(point(**changes), 256, 0))["input_ids"] for changes in ({}, {"upipe": {"sp_size": 1}})]
    assert torch.equal(*first) and first[0].shape == (1, 1024)
    assert not torch.equal(first[0], next(train_point._batches(point(), 256, 1))["input_ids"])


class _Engine:
    def empty_partition_cache(self):
        self.emptied = True


def test_memory_fields_are_those_of_the_fullest_rank(monkeypatch):
    engine = _Engine()
    numbers = {
        "max_memory_allocated": lambda: 30 * 2**30,
        "max_memory_reserved": lambda: 40 * 2**30,
        "memory_allocated": lambda: 20 * 2**30 if engine.emptied else 25 * 2**30,
        "host_memory_stats": lambda: {"allocated_bytes.peak": 2**30},
    }
    for name, function in numbers.items():
        monkeypatch.setattr(torch.cuda, name, function)
    other = (32 * 2**30, 33 * 2**30, 21 * 2**30, 2 * 2**30)
    monkeypatch.setattr(train_point.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train_point.dist, "all_gather_object", lambda every, mine: every.__setitem__(slice(None), [mine, other]))
    memory = train_point._Steps(engine, None, True)._memory()
    assert memory == {"peak_gib": 32.0, "reserved_gib": 33.0, "states_gib": 21.0, "peak_above_states_gib": 11.0, "host_pinned_gib": 3.0}
    made = dataclasses.replace(train_point.record(point()), time_s=2.0, times_s=[2.0, 2.0]).updated(memory)
    made = made.updated(
        {
            "run_id": "r",
            "experiment": "e",
            "gpu": "NVIDIA H200",
            "gpus": 2,
            "commit": "c",
            "command": "c",
            "date": "2026-01-01T00:00:00Z",
            "versions": {"torch": "2"},
            "tokens_per_s_per_gpu": records.tokens_per_step(made) / 2.0 / 2,
            "peak_units": 11.0 / records.unit_gib(made),
        }
    )
    assert records.validate(made) == []
    assert made.tokens_per_s_per_gpu == 256.0


@pytest.mark.slow
def test_what_the_planner_says_of_points_on_published_hardware():
    path, variant = points.find("table3_llama3_8b")
    specs = points.expand(points.read(path, variant), path.parent)
    machine = Machine.parse("8xH100-80GB", host_gib=1945)
    found = {s.label: train_point.predict(s.point, machine) for s in specs if s.point.tokens == 5 * 2**20}
    # Published: 98.25 tokens/s/GPU, and pageable host memory, beyond 4M.
    assert found["upipe 5M"]["fits"] and found["upipe 5M"]["tokens_per_s_per_gpu"] == pytest.approx(98.25, rel=0.1)
    lacking = found["upipe 5M attention_output=host"]
    assert not lacking["fits"] and lacking["limit"] == "host" and lacking["host_gib"] > lacking["host_usable_gib"] == 1945
    assert not found["ring 5M"]["fits"] and found["ring 5M"]["limit"] == "device"
