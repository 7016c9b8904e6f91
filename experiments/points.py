"""Experiments and their points: one YAML file an experiment, read into the settings of every point.

    about: what it measures, in a sentence
    kind: train                      # the module experiments/<kind>_point.py; a dotted name is a module itself
    timeout_s: 600                   # a point still running after that is stopped
    common: {...}                    # settings of every point
    points:                          # one by one; each is crossed with the grid
      - {method: upipe, upipe.heads_per_stage: 2}
    grid:                            # every combination
      tokens: [128K, 256K]
    hardware: {gpus: 8xH100-80GB, nodes: 1, host_gib: 1945}   # what the planner predicts the points for
    like: NAME                       # start from another experiment's file: mappings are merged, all else replaced, null removes
    variants:                        # by name, merged in the same way; NAME-VARIANT is an experiment with its own records
      cpu: {common: {device: cpu, processes: 2}}

Settings are those of the kind's `Point` dataclass; sections are nested or dotted (`upipe.heads_per_stage: 2`).
A kind is a module with

    Point                 dataclass of a point's settings; has method, tokens, processes and device ("cuda" | "cpu")
    record(point)         -> Record with what is known before it runs
    verdict(point)        -> "ok", or why it would be refused; without a GPU or processes
    run(point)            -> Record, on every rank of a launched world; that of rank 0 is kept, outcome "ok"
    predict(point, machine)    optional: -> dict, what the planner says of it on a `plan.Machine`, for the record's `predicted`
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upipe import config
from upipe.config import ConfigError, from_mapping
from upipe.records import format_tokens, parse_tokens

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Hardware:
    """GPUs of one node, as `upipe plan --gpus` takes them, how many nodes, and the host memory of each in GiB."""

    gpus: str
    nodes: int = 1
    host_gib: float = 1945.0


@dataclass
class Experiment:
    """An experiment's file; see the module."""

    about: str
    kind: str = "train"
    timeout_s: float = 600.0
    common: dict = field(default_factory=dict)
    points: list[dict] = field(default_factory=lambda: [{}])
    grid: dict = field(default_factory=dict)
    hardware: Hardware | None = None
    like: str | None = None
    variants: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid.{name}={values!r}: expected a list of values")
        if not self.points:
            raise ValueError("points=[]: leave it out where the grid alone gives the points")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s}: must be positive")


@dataclass(frozen=True)
class PointSpec:
    """One point. settings: as the file gives them, merged. key: names the settings, whatever their order. point: the
    kind's dataclass. label: method, length, and whatever else differs between the experiment's points."""

    key: str
    settings: dict[str, Any]
    point: Any
    label: str


def find(name: str) -> tuple[Path, str | None]:
    """The file and the variant of the experiment called `name`: NAME, NAME-VARIANT, FILE.yaml or FILE.yaml:VARIANT."""
    folder = ROOT / "experiments"
    file, _, variant = name.partition(":")
    if file.endswith((".yaml", ".yml")):
        tried = [(Path(file), variant or None)]
    else:
        base, _, variant = name.rpartition("-")
        tried = [(folder / f"{name}.yaml", None), (folder / f"{base}.yaml", variant)]
    for path, variant in tried:
        if path.is_file() and (variant is None or variant in read(path).variants):
            return path.resolve(), variant
    raise ConfigError(f"no experiment {name!r} ({tried[0][0]} is not there); there are: {', '.join(names())}")


def name_of(path: Path, variant: str | None) -> str:
    """What an experiment and its file of records are called."""
    return path.stem if variant is None else f"{path.stem}-{variant}"


def names() -> list[str]:
    """The experiments of the repository, variants among them."""
    files = sorted((ROOT / "experiments").glob("*.yaml"))
    return [name_of(path, variant) for path in files for variant in (None, *read(path).variants)]


def read(path: Path, variant: str | None = None) -> Experiment:
    """The experiment in a file, or a variant of it. Raises ConfigError."""
    mapping = _mapping(path, ())
    if variant is not None:
        from_mapping(Experiment, mapping, folder=path.parent)
        mapping = merged(mapping, mapping["variants"][variant])
    return from_mapping(Experiment, mapping, folder=path.parent)


def files(path: Path) -> list[Path]:
    """An experiment's file, then those that it is like. Raises ConfigError."""
    _mapping(path, ())
    found = [path]
    while (like := config.read(found[-1]).get("like")) is not None:
        found.append(found[-1].with_name(f"{like}.yaml"))
    return found


def _mapping(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """An experiment's file over the one that it is like."""
    own = config.read(path)
    if "like" not in own:
        return own
    base = path.with_name(f"{own['like']}.yaml")
    if base in (*seen, path) or not base.is_file():
        raise ConfigError(f"{path}: like: {own['like']}: {'it is like itself' if base.is_file() else f'{base} is not there'}")
    return merged(_mapping(base, (*seen, path)), own)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings over each other, as a copy: a mapping is merged, null removes, anything else replaces."""
    result = copy.deepcopy(base)
    for name, value in changes.items():
        if isinstance(value, dict):
            old = result.get(name)
            result[name] = merged(old if isinstance(old, dict) else {}, value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = copy.deepcopy(value)
    return result


def kind_of(name: str) -> Any:
    """The module of a kind. Raises ConfigError where there is none."""
    module = name if "." in name else f"experiments.{name}_point"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        known = sorted(path.stem.removesuffix("_point") for path in (ROOT / "experiments").glob("*_point.py"))
        raise ConfigError(f"kind={name!r}: there is no module {module}; there are: {', '.join(known)}") from None


def expand(experiment: Experiment, folder: Path) -> list[PointSpec]:
    """The experiment's points, in the order of its lists, the grid's last setting varying fastest.

    Args:
        folder: what relative paths in the settings are relative to.

    Raises ConfigError for a setting that the kind does not have, and for two points with the same settings.
    """
    kind = kind_of(experiment.kind)
    merged = []
    for entry, values in itertools.product(experiment.points, itertools.product(*experiment.grid.values())):
        settings = copy.deepcopy(experiment.common)
        for changes in (entry, dict(zip(experiment.grid, values))):
            for name, value in changes.items():
                _put(settings, name, value)
        if "tokens" in settings:
            try:
                settings["tokens"] = parse_tokens(settings["tokens"])
            except ValueError as error:
                raise ConfigError(f"tokens: {error}") from None
        merged.append(settings)
    varying = _varying(merged)
    specs = []
    for settings in merged:
        point = from_mapping(kind.Point, settings, folder=folder)
        specs.append(PointSpec(key_of(experiment.kind, settings), settings, point, _label(point, settings, varying)))
    keys = [spec.key for spec in specs]
    twice = [spec.label for spec in specs if keys.count(spec.key) > 1]
    if twice:
        raise ConfigError(f"two points have the same settings: {', '.join(sorted(set(twice)))}")
    return specs


def key_of(kind: str, settings: dict[str, Any]) -> str:
    """12 hex digits that name a point's settings: the same for the same settings in any order, on any machine."""
    text = json.dumps({"kind": kind, "settings": settings}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def select(specs: Iterable[PointSpec], methods: list[str] | None, tokens: list[str] | None) -> list[PointSpec]:
    """The points of these methods and lengths (None: all). Raises ConfigError for one that no point has."""
    specs = list(specs)
    try:
        lengths = None if tokens is None else [parse_tokens(text) for text in tokens]
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from None
    for option, wanted, have in (
        ("--method", methods, [spec.point.method for spec in specs]),
        ("--tokens", lengths, [spec.point.tokens for spec in specs]),
    ):
        unknown = [value for value in wanted or () if value not in have]
        if unknown:
            shown = [format_tokens(v) if isinstance(v, int) else v for v in dict.fromkeys(have)]
            raise ConfigError(f"{option} {' '.join(map(str, unknown))}: no such point; there are {', '.join(shown)}")
    return [
        spec for spec in specs if (methods is None or spec.point.method in methods) and (lengths is None or spec.point.tokens in lengths)
    ]


def _put(settings: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a nested key; a mapping is merged into what is there."""
    first, _, rest = dotted.partition(".")
    if rest or isinstance(value, dict):
        section = settings.setdefault(first, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{dotted}: {first} is {section!r}, not a section")
        for name, inner in {rest: value}.items() if rest else value.items():
            _put(section, name, inner)
    else:
        settings[first] = value


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _varying(merged: list[dict[str, Any]]) -> list[str]:
    """The settings, method and length apart, that differ between points."""
    flats = [_flat(settings) for settings in merged]
    every = list(dict.fromkeys(name for flat in flats for name in flat))
    differ = [name for name in every if len({json.dumps(flat.get(name), sort_keys=True) for flat in flats}) > 1]
    return [name for name in differ if name not in ("method", "tokens")]


def _label(point: Any, settings: dict[str, Any], varying: list[str]) -> str:
    flat = _flat(settings)
    extra = [f"{name.rpartition('.')[2]}={flat[name]}" for name in varying if name in flat]
    return " ".join([point.method, format_tokens(point.tokens), *extra])
