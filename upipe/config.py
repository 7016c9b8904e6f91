"""Configuration: one YAML file composed from the dataclasses of the modules it configures.

Each module owns the dataclass that configures it. This module fills a dataclass (whose fields may be dataclasses, the
sections) from a YAML mapping and `section.key=value` overrides, checks every type, and refuses unknown keys with the
nearest name. Three field types carry a meaning beyond their Python type:

    Length      int; also written "128K" = 131072 or "1M" = 1048576 (binary, everywhere)
    File        str, made absolute; in a YAML file relative to that file's folder, in an override to the working directory
    FileOrName  str; where such a file or folder is there its path, as for File, else a name as it is (on a model hub, say)
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

Length = Annotated[int, "length"]
File = Annotated[str, "file"]
FileOrName = Annotated[str, "file or name"]

T = TypeVar("T")

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and what would work."""


def load(cls: type[T], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """The dataclass `cls` filled from the YAML file `path`, then from `key=value` overrides with dotted keys.

    An override's value is parsed as YAML ("upipe.sp_size=4", "model.kv_heads=null", "data.tokens=128K").
    Raises ConfigError for a missing file, an unknown key, or a value of the wrong type.
    """
    mapping = read(path)
    for override in overrides:
        _override(cls, mapping, override)
    return from_mapping(cls, mapping, folder=Path(path).parent)


def read(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises ConfigError for a missing file, and for one that holds something else."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        mapping = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path} must be a mapping of sections, got {type(mapping).__name__}")
    return mapping


def from_mapping(cls: type[T], mapping: dict[str, Any], *, key: str = "", folder: str | Path = ".") -> T:
    """The dataclass `cls` filled from a plain mapping. `key` is the dotted prefix that error messages show, `folder`
    what relative `File` values are relative to. A class method `filled(mapping, folder)` of the class returns the mapping with
    what it adds where nothing was given (presets do); `section(value)` the mapping that a plain value in its place stands for. Raises
    ConfigError."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if hasattr(cls, "filled"):
        mapping = cls.filled(mapping, folder)
    values = {}
    for name, value in mapping.items():
        if name not in hints:
            raise ConfigError(_unknown(f"{key}{name}", name, hints))
        values[name] = convert(hints[name], value, key=f"{key}{name}", folder=folder)
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if required:
        raise ConfigError(f"missing: {', '.join(key + name for name in required)}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key.rstrip('.') or cls.__name__}: {error}") from error


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`: plain dicts, lists and scalars that YAML can write."""
    return dataclasses.asdict(config)


def parse_length(value: int | str) -> int:
    """A number of tokens from an int or a binary length string: "128K" = 131072, "1M" = 1048576, "1.5M" = 1572864."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _LENGTH.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    if match:
        tokens = float(match[1]) * _UNITS[match[2]]
        if tokens == int(tokens):
            return int(tokens)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    raise ValueError(f"{value!r} is not a length; write a whole number, or a binary length such as 128K (131072) or 1M")


def convert(hint: Any, value: Any, *, key: str, folder: str | Path = ".") -> Any:
    """`value` (from YAML) as the type `hint`, or ConfigError that names `key` and `value`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if args[1] == "length":
            try:
                return parse_length(value)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
        text = convert(str, value, key=key)
        path = Path(folder, Path(text).expanduser()).absolute()
        return str(path) if args[1] == "file" or path.exists() else text
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, key, folder)
    if origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        hint_text = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}={value!r}: allowed are {', '.join(map(repr, args))}{hint_text}")
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{key}={value!r}: expected a list")
        if origin is tuple and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise ConfigError(f"{key}={value!r}: expected {len(args)} values")
            pairs = enumerate(zip(args, value, strict=True))
            return tuple(convert(a, v, key=f"{key}[{i}]", folder=folder) for i, (a, v) in pairs)
        return origin(convert(args[0], v, key=f"{key}[{i}]", folder=folder) for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        value = _section(hint, value)
        if not isinstance(value, dict):
            raise ConfigError(f"{key}={value!r}: expected a section with keys {', '.join(_names(hint))}")
        return from_mapping(hint, value, key=f"{key}.", folder=folder)
    return _convert_scalar(hint, value, key)


def _convert_union(args: tuple, value: Any, key: str, folder: str | Path) -> Any:
    if value is None and type(None) in args:
        return None
    members = [a for a in args if a is not type(None)]
    if len(members) == 1:
        return convert(members[0], value, key=key, folder=folder)
    is_list = isinstance(value, (list, tuple))
    ordered = sorted(members, key=lambda a: (typing.get_origin(a) in (list, tuple)) != is_list)
    for member in ordered:
        try:
            return convert(member, value, key=key, folder=folder)
        except ConfigError:
            continue
    raise ConfigError(f"{key}={value!r}: expected {' or '.join(_describe(a) for a in members)}")


def _convert_scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is Any:
        return value
    if hint is float and not isinstance(value, bool):
        # YAML 1.1 reads "1e-3" (no dot) as a string.
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif hint in (str, bool) and isinstance(value, hint):
        return value
    elif hint is dict or typing.get_origin(hint) is dict:
        if isinstance(value, dict):
            return value
    raise ConfigError(f"{key}={value!r}: expected {_describe(hint)}, got {type(value).__name__}")


def _section_class(hint: Any) -> type | None:
    """The dataclass of a section, also of one that may be left out (`Section | None`)."""
    return next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _override(cls: Any, mapping: dict[str, Any], override: str) -> None:
    """Put one `key=value` into `mapping`, before the dataclasses are built, so that their own validation sees all of
    the overrides at once. A relative `File` is made absolute: it is relative to the working directory."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"override {override!r}: write key=value, with a dotted key such as train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    names, hint, walked = dotted.split("."), cls, []
    for i, name in enumerate(names):
        hints = typing.get_type_hints(hint, include_extras=True)
        if name not in hints:
            raise ConfigError(_unknown(".".join([*walked, name]), name, hints))
        hint = hints[name]
        walked.append(name)
        if i < len(names) - 1:
            hint = _section_class(hint)
            if hint is None:
                raise ConfigError(f"{dotted}: {'.'.join(walked)} is not a section")
            given = mapping.get(name)
            mapping[name] = _section(hint, {} if given is None else given)
            mapping = mapping[name]
            if not isinstance(mapping, dict):
                raise ConfigError(f"{'.'.join(walked)}={mapping!r}: expected a section")
    converted = convert(hint, value, key=dotted, folder=Path.cwd())
    mapping[names[-1]] = converted if _section_class(hint) is None else value


def _section(cls: Any, value: Any) -> Any:
    """The mapping that a section written as a plain value stands for, where its class says so."""
    return cls.section(value) if hasattr(cls, "section") and not isinstance(value, dict) else value


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _unknown(dotted: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {dotted!r}{suggestion} (known: {', '.join(known)})"


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return {"length": "a length", "file": "a path", "file or name": "a path or a name"}[args[1]]
    if origin in (list, tuple):
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "a section"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))
