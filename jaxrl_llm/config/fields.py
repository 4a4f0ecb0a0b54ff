"""The declared type of a field, against a value."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from typing import Any, Literal, Union

_ARTICLES = {int: "an int", float: "a number", bool: "true or false", str: "a string", types.NoneType: "none"}


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Returns the resolved annotations of a dataclass."""
    return typing.get_type_hints(cls)


def options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_callable(hint: Any) -> bool:
    return typing.get_origin(hint) is collections.abc.Callable or hint is collections.abc.Callable


def fits(value: Any, hint: Any) -> bool:
    """Returns whether `value` has the type `hint`; an int is a number, a bool is not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if len(options(hint)) > 1:
        return any(fits(value, option) for option in options(hint))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin is tuple:
        each = args[:1] * len(value) if isinstance(value, tuple) and args[-1] is Ellipsis else args
        return isinstance(value, tuple) and len(value) == len(each) and all(map(fits, value, each))
    if is_callable(hint):
        return callable(value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False):
        return isinstance(value, hint)
    return True  # Any, and hints of a fork that say nothing at run time


def describe(hint: Any) -> str:
    """Returns the type in words: `an int`, `a function or none`, `one of 'a', 'b'`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if len(options(hint)) > 1:
        return " or ".join(describe(option) for option in options(hint))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        each = describe(args[0]) if args[-1] is Ellipsis else f"({', '.join(map(describe, args))})"
        return f"a tuple, each {each}" if args[-1] is Ellipsis else f"a tuple {each}"
    if is_callable(hint):
        return "a function"
    return _ARTICLES.get(hint, f"a {getattr(hint, '__name__', hint)}")


def shown(value: Any) -> str:
    """Returns a value with its type, for messages."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {value!r}"
    return f"{value!r} ({type(value).__name__})"
