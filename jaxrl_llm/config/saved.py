"""A config as JSON, and what differs between two of them.

Functions are saved by name with their bound parameters, `{"fn": "package.module:name", "kwargs": {...}}`;
dataclasses by field, with their class; a JSON array is a tuple, and what JSON cannot tell apart is tagged.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from jaxrl_llm.config import schema
from jaxrl_llm.config.functions import reference, resolve
from jaxrl_llm.config.schema import Config, ConfigError
from jaxrl_llm.signature import did_you_mean

_TAGS = ("class", "fn", "list", "dict", "path")

# A resumed run may change these: they say where and how long the run computes, not what it computes.
FREE_ON_RESUME = ("steps", "checkpoint", "mesh", "scoring.workers", "optimizer.microbatch")


def to_json(config: Config) -> str:
    """Returns the config as JSON text; `from_json` of it gives an equal config.

    Raises:
      ConfigError: a function that cannot be imported by name, or a value that JSON cannot hold.
    """
    return json.dumps(_encode(config, "config"), indent=2)


def from_json(text: str) -> Config:
    """Returns the config that `to_json` saved.

    Raises:
      ConfigError: not such a text, an unknown field, or a function that is not where it was.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"saved config is not JSON: {error}") from error
    config = _decode(tree)
    if not isinstance(config, Config):
        raise ConfigError(f"saved config holds a {type(config).__name__}, not a Config")
    return config


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns `{dotted path: value}` of a saved config (decoded JSON); functions read as calls."""
    if isinstance(tree, Mapping) and "fn" in tree and "class" not in tree:
        bound = flatten({k: v for k, v in tree.items() if k != "fn"})
        given = ", ".join(f"{k.partition('.')[2]}={v!r}" for k, v in bound.items())
        return {prefix: f"{tree['fn']}({given})" if bound else tree["fn"]}
    if isinstance(tree, Mapping) and "class" not in tree and set(tree) <= {"list", "dict", "path"} and tree:
        return flatten(next(iter(tree.values())), prefix)
    if isinstance(tree, Mapping):
        children = {k: v for k, v in tree.items() if k != "class"}
    elif isinstance(tree, list) and any(isinstance(v, (Mapping, list)) for v in tree):
        children = {str(i): v for i, v in enumerate(tree)}
    else:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in children.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return out


def differences(saved: Config | str, current: Config | str) -> list[str]:
    """Returns `field: saved -> current` for each field that keeps a run from being resumed.

    `FREE_ON_RESUME` may differ; `steps` only while the schedule is constant: the others end with it.

    Args:
      saved: the config of the checkpoint, or its JSON text.
      current: the config at hand, or its JSON text.
    """
    before, now = (flatten(json.loads(c if isinstance(c, str) else to_json(c))) for c in (saved, current))
    free = FREE_ON_RESUME
    if {before.get("optimizer.schedule"), now.get("optimizer.schedule")} != {"constant"}:
        free = tuple(name for name in free if name != "steps")
    out = []
    for name in [*before, *(n for n in now if n not in before)]:
        is_free = any(f"{name}.".startswith(f"{f}.") for f in free)
        if not is_free and before.get(name, "absent") != now.get(name, "absent"):
            out.append(f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}")
    return out


def _encode(value: Any, path: str) -> Any:
    inside = lambda key, v: _encode(v, f"{path}.{key}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, functools.partial):
        out = {"fn": reference(value.func)}
        if value.args:
            out["args"] = [inside(i, v) for i, v in enumerate(value.args)]
        return out | {"kwargs": {k: inside(k, v) for k, v in value.keywords.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        name = cls.__name__ if getattr(schema, cls.__name__, None) is cls else reference(cls)
        return {"class": name} | {
            f.name: inside(f.name, getattr(value, f.name)) for f in dataclasses.fields(cls)
        }
    if isinstance(value, (tuple, list)):
        items = [inside(i, v) for i, v in enumerate(value)]
        return items if isinstance(value, tuple) else {"list": items}
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        items = {k: inside(k, v) for k, v in value.items()}
        return {"dict": items} if any(tag in items for tag in _TAGS) else items
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if callable(value):
        try:
            return {"fn": reference(value), "kwargs": {}}
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    raise ConfigError(
        f"{path}: a {type(value).__name__} cannot be saved; use numbers, strings, tuples or functions"
    )


def _decode(tree: Any) -> Any:
    if isinstance(tree, list):
        return tuple(map(_decode, tree))
    if not isinstance(tree, dict):
        return tree
    if "class" in tree:
        return _dataclass(tree)
    if "fn" in tree:
        fn = resolve(tree["fn"])
        args, kwargs = map(_decode, tree.get("args", [])), {k: _decode(v) for k, v in tree["kwargs"].items()}
        return functools.partial(fn, *args, **kwargs) if tree.get("args") or kwargs else fn
    if "list" in tree:
        return [_decode(v) for v in tree["list"]]
    if "path" in tree:
        return Path(tree["path"])
    return {k: _decode(v) for k, v in tree.get("dict", tree).items()}


def _dataclass(tree: dict[str, Any]) -> Any:
    name = tree["class"]
    cls = resolve(name) if ":" in name else getattr(schema, name, None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"saved config has a section of unknown class {name!r}")
    known = [f.name for f in dataclasses.fields(cls)]
    values = {k: v for k, v in tree.items() if k != "class"}
    for key in values:
        if key not in known:
            raise ConfigError(f"saved config: {name} has no field {key!r}{did_you_mean(key, known)}")
    return cls(**{k: _decode(v) for k, v in values.items()})
