"""`a.b=value` from the command line into a config."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, Literal

from jaxrl_llm.config import fields
from jaxrl_llm.config.functions import menu, resolve
from jaxrl_llm.config.schema import Config, ConfigError
from jaxrl_llm.signature import did_you_mean, unwrap

# Loaders and sources take plain parameters; elsewhere a parameter without a default is an array of the step.
_PLAIN = ("model", "data")


def override(config: Config, items: Iterable[str]) -> Config:
    """Returns a copy of `config` with values set by dotted paths, one after the other.

    A path goes through sections, indices of tuples and hyperparameters of functions:

        steps=200  rollout.temperature=0.9  scoring.rewards.0.weight=2  data.prompt_lengths=64,128
        objective.loss=my_fork.soft_gate:soft_gate  objective.advantage=leave_one_out
        objective.loss.clip_high=0.28  model.load.path=model.gguf

    A bare name is looked up among the stock functions of that stage. A function set anew starts from its own
    defaults.

    Args:
      items: `path=value`; values are Python literals, strings need no quotes.

    Raises:
      ConfigError: an unknown name on the path, or a value of another type than the field's.
    """
    for item in items:
        path, equals, raw = item.partition("=")
        if not equals or not path:
            raise ConfigError(f"cannot read {item!r}: write path=value, for example rollout.temperature=0.9")
        config = _set(config, None, path.strip().split("."), 0, raw.strip())
    return config


def _set(here: Any, hint: Any, path: list[str], depth: int, raw: str) -> Any:
    """Returns a copy of `here` with the value at `path[depth:]` replaced."""
    if depth == len(path):
        return _parse(raw, hint, here, path)
    name, place = path[depth], ".".join(path[:depth])
    if dataclasses.is_dataclass(here) and not isinstance(here, type):
        hints = fields.hints_of(type(here))
        if name not in hints:
            raise ConfigError(f"{place or 'the config'} has no field {name!r}{did_you_mean(name, hints)}")
        return here.replace(**{name: _set(getattr(here, name), hints[name], path, depth + 1, raw)})
    if isinstance(here, tuple):
        i = _index(name, here, place)
        return (*here[:i], _set(here[i], _element(hint, i), path, depth + 1, raw), *here[i + 1 :])
    if callable(here):
        value, wanted = _hyperparameter(here, name, path, depth)
        return functools.partial(here, **{name: _set(value, wanted, path, depth + 1, raw)})
    what = "not set; set it first" if here is None else f"{fields.shown(here)} and has no parts"
    raise ConfigError(f"cannot set {'.'.join(path)}: {place} is {what}")


def _index(name: str, here: tuple, place: str) -> int:
    if name.isdecimal() and int(name) < len(here):
        return int(name)
    limit = f"an index from 0 to {len(here) - 1}" if here else "nothing to index: it is empty"
    raise ConfigError(f"{place}.{name}: {place} is a tuple of {len(here)} and takes {limit}")


def _element(hint: Any, i: int) -> Any:
    for option in fields.options(hint):
        args = typing.get_args(option)
        if typing.get_origin(option) is tuple:
            return args[0] if args[-1] is Ellipsis else args[i]
    return Any


def _hyperparameter(fn: Callable, name: str, path: list[str], depth: int) -> tuple[Any, Any]:
    """Returns the value bound to a hyperparameter of `fn` (or its default), and its type."""
    required_too = path[0] in _PLAIN
    settable, open_ended = {}, False
    for key, p in inspect.signature(fn).parameters.items():
        open_ended |= p.kind is p.VAR_KEYWORD
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and (
            p.kind is p.KEYWORD_ONLY or p.default is not p.empty or required_too
        ):
            settable[key] = None if p.default is p.empty else p.default
    if name not in settable and not open_ended:
        place, inner = ".".join(path[:depth]), unwrap(fn).__name__
        known = did_you_mean(name, settable) if settable else "; it has none"
        raise ConfigError(f"{place} is {inner}, which has no hyperparameter {name!r}{known}")
    value = settable.get(name)
    return value, _parameter_hint(unwrap(fn), name, value)


def _parameter_hint(fn: Callable, name: str, value: Any) -> Any:
    try:
        declared = typing.get_type_hints(fn).get(name)
    except NameError:  # an annotation that exists for type checkers alone
        declared = None
    if declared is not None:
        return declared
    if isinstance(value, (bool, str)):
        return type(value)
    return int | float if isinstance(value, (int, float)) else Any


def _parse(raw: str, hint: Any, current: Any, path: list[str]) -> Any:
    kinds = fields.options(hint)
    if any(dataclasses.is_dataclass(kind) for kind in kinds) and dataclasses.is_dataclass(current):
        known = ", ".join(fields.hints_of(type(current)))
        raise ConfigError(f"{'.'.join(path)} is a section; set one of its fields: {known}")
    value = _literal(raw, kinds)
    if isinstance(value, str) and not fields.fits(value, hint):
        value = _functions(value, kinds, path)
    elif isinstance(value, str) and hint is Any and (callable(current) or _is_reference(value)):
        value = _function(value, path)
    if not fields.fits(value, hint):
        raise ConfigError(f"{'.'.join(path)} wants {fields.describe(hint)}, not {fields.shown(value)}")
    return value


def _literal(raw: str, kinds: tuple[Any, ...]) -> Any:
    """Reads a Python literal; whatever is none stays a string."""
    if type(None) in kinds and raw.lower() == "none":
        return None
    if bool in kinds and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    if str not in kinds and any(isinstance(kind, type) and issubclass(kind, PurePath) for kind in kinds):
        return Path(raw)
    try:
        value = ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        return raw
    if str in kinds and not isinstance(value, str):
        return raw  # name=007 is a name
    if isinstance(value, list):
        value = tuple(value)
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    return value


def _is_reference(value: str) -> bool:
    module, colon, name = value.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def _functions(value: str, kinds: tuple[Any, ...], path: list[str]) -> Any:
    """Reads a function where the field holds one, or a list of functions where it holds a tuple of them."""
    if any(fields.is_callable(kind) for kind in kinds) and "," not in value:
        return _function(value, path)
    for kind in kinds:
        elements = fields.options(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else ()
        if any(fields.is_callable(element) for element in elements):
            return tuple(_function(name.strip(), path) for name in value.split(","))
    choices = [c for kind in kinds if typing.get_origin(kind) is Literal for c in typing.get_args(kind)]
    if choices:
        raise ConfigError(f"{'.'.join(path)} is {value!r}{did_you_mean(value, choices)}")
    return value


def _function(name: str, path: list[str]) -> Any:
    if ":" in name:
        return resolve(name)
    known = menu(path)
    if name not in known:
        near = did_you_mean(name, known) if known else ""
        raise ConfigError(
            f"{'.'.join(path)}: no stock function {name!r}{near} (your own: package.module:function)"
        )
    return known[name]
