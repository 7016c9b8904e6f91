"""The configuration loader: composition, overrides, and refusals that name key, value and what would work."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from upipe.config import ConfigError, File, FileOrName, Length, from_mapping, load, parse_length, to_mapping
from upipe.trainer import RunConfig


@dataclass
class Inner:
    tokens: Length = 8
    path: File | list[File] | None = None
    mode: Literal["causal", "full"] = "causal"
    pair: tuple[float, float] = (0.0, 1.0)
    source: FileOrName = "here"


@dataclass
class Outer:
    name: str
    rate: float = 1.0
    on: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.rate < 0 and not self.on:
            raise ValueError(f"rate={self.rate}: must not be negative unless on")


def test_names_that_are_files_become_paths(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path.parent / "here").mkdir()
    (tmp_path / "there").mkdir()
    path.write_text("name: a\ninner: {source: here}\n")
    assert load(Outer, path).inner.source == str(path.parent / "here")
    assert load(Outer, path, ["inner.source=there"]).inner.source == str(tmp_path / "there")
    assert load(Outer, path, ["inner.source=owner/name"]).inner.source == "owner/name"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "folder" / "c.yaml"
    file.parent.mkdir()
    file.write_text("name: a\nrate: 1e-3\ninner: {tokens: 128K, path: x.txt, pair: [1, 2]}\n")
    return file


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("128K", 131072), ("1M", 1048576), ("1m", 1048576), ("1.5K", 1536), ("2G", 2**31), ("77", 77), (5, 5)],
)
def test_lengths_are_binary(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["128kB", "K", "-1K", "0.3K", "", True, 1.5, None])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="128K"):
        parse_length(text)


def test_sections_are_composed(path):
    config = load(Outer, path)
    assert (config.name, config.rate, config.on) == ("a", 1e-3, False)
    assert config.inner == Inner(tokens=131072, path=str(path.parent / "x.txt"), pair=(1.0, 2.0))


def test_overrides(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    overrides = ["inner.tokens=1M", "on=true", "inner.path=[y.txt, /z.txt]", "name=b=c", "inner.mode=full", "rate=-2"]
    config = load(Outer, path, overrides)
    assert config == Outer("b=c", -2.0, True, Inner(2**20, [str(tmp_path / "y.txt"), "/z.txt"], "full", (1.0, 2.0)))
    assert load(Outer, path, ["inner.path=null"]).inner.path is None


def test_round_trip(path):
    config = load(Outer, path)
    assert from_mapping(Outer, yaml.safe_load(yaml.safe_dump(to_mapping(config) | {"inner": {"tokens": 9}}))).name == "a"
    assert from_mapping(Outer, to_mapping(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nmae=a", r"unknown key 'nmae'; did you mean 'name'\?"),
        ("inner.tokns=1", r"unknown key 'inner.tokns'; did you mean 'tokens'\?"),
        ("iner.tokens=1", r"unknown key 'iner'; did you mean 'inner'\?"),
        ("name.x=1", "name is not a section"),
        ("rate=fast", "rate='fast': expected a number"),
        ("rate=true", "rate=True: expected a number"),
        ("name=3", "name=3: expected a string"),
        ("on=1", "on=1: expected true or false"),
        ("inner.tokens=1.5", "inner.tokens: 1.5 is not a length"),
        ("inner.mode=casual", r"inner.mode='casual': allowed are 'causal', 'full'; did you mean 'causal'\?"),
        ("inner.pair=[1]", r"inner.pair=\[1\]: expected 2 values"),
        ("inner=3", "inner=3: expected a section"),
        ("inner.path=7", "inner.path=7: expected a path or a list"),
        ("rate=-1", "rate=-1.0: must not be negative"),
        ("rate", "write key=value"),
        ("rate=[", "not valid YAML"),
    ],
)
def test_refusals(path, override, message):
    with pytest.raises(ConfigError, match=message):
        load(Outer, path, [override])


def test_refused_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(Outer, tmp_path / "none.yaml")
    file = tmp_path / "c.yaml"
    for text, message in [("a: [", "not valid YAML"), ("- 1", "mapping of sections"), ("rate: 1", "missing: name")]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(Outer, file)


@dataclass
class Filling(Inner):
    rate: float = 1.0

    @classmethod
    def filled(cls, mapping, folder):
        return {"rate": 2.0} | mapping


def test_a_class_may_fill_in_what_is_not_given():
    assert from_mapping(Filling, {}).rate == 2.0 and from_mapping(Filling, {"rate": 3}).rate == 3.0 and Filling().rate == 1.0
    given = {"tokens": 4}
    assert from_mapping(Filling, given).tokens == 4 and given == {"tokens": 4}
    with pytest.raises(ConfigError, match="did you mean 'rate'"):
        from_mapping(Filling, {"rat": 1})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "missing: hidden_size"),
        ({"pretrained": "p", "layers": 3}, "brings its own shape; leave out layers"),
        ({"pretrained": "p", "preset": "qwen3-8b"}, "brings its own shape; leave out preset"),
        ({"pretrained": "p", "zero_init": "always"}, "use auto or never"),
        ({"preset": "qwen3-8b", "heads": 3}, "brings its own shape but for layers; leave out heads"),
        ({"preset": "qwen3-8b", "layers": 37}, "preset='qwen3-8b' has 36"),
        ({"preset": "qwen3-9b"}, "did you mean 'qwen3-8b'"),
        ({"gguf_file": "g"}, "needs pretrained"),
        (dict(hidden_size=8, layers=1, heads=4, kv_heads=3, intermediate_size=8, vocab_size=9), "kv_heads=3"),
        (dict(hidden_size=9, layers=1, heads=4, kv_heads=2, intermediate_size=8, vocab_size=9), "give head_dim"),
    ],
)
def test_model_shapes_are_checked(model, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(RunConfig, {"model": model, "data": {"path": "x"}})


def test_the_shipped_configurations_load(repository_configs):
    assert repository_configs
    for file in repository_configs:
        config = load(RunConfig, file)
        assert all(path.endswith((".txt", ".fa.xz")) and Path(path).is_file() for path in config.data.paths)


@pytest.fixture
def repository_configs(request):
    return sorted((request.config.rootpath / "configs").glob("*.yaml"))
