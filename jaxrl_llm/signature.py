"""The signature is the requirement: what a stage function asks for, read from its parameters.

Positional parameters are arrays, named from the vocabulary; keyword-only parameters are
hyperparameters. The scope says which leading axes the function sees; the engine vmaps the rest.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SCOPES = ("sequence", "group", "batch")


def scope(name: str, **facts: Any) -> Callable[[F], F]:
    """Declares the smallest unit that a stage function is written for.

    Args:
      name: "sequence" (arrays `[T]`), "group" (`[G]` or `[G, T]`) or "batch" (`[B, G]` or `[B, G, T]`).
      **facts: declared properties that the contract suite checks and the engine may use, for example
        `zero_at_zero_advantage=True` on a loss.
    """
    if name not in SCOPES:
        raise ValueError(f"unknown scope {name!r}{did_you_mean(name, SCOPES)}")

    def mark(fn: F) -> F:
        fn.scope = name
        fn.facts = facts
        return fn

    return mark


def unwrap(fn: Callable) -> Callable:
    """Returns the function under any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def scope_of(fn: Callable, default: str) -> str:
    """Returns the declared scope of `fn`, or `default`."""
    return getattr(unwrap(fn), "scope", default)


def fact(fn: Callable, name: str) -> Any:
    """Returns the declared property `name` of `fn`, or None."""
    return getattr(unwrap(fn), "facts", {}).get(name)


def name_of(fn: Callable) -> str:
    return unwrap(fn).__name__


def arrays_of(fn: Callable) -> tuple[str, ...]:
    """Returns the names of the arrays that `fn` asks for, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        n for n, p in inspect.signature(fn).parameters.items() if p.kind in kinds and p.default is p.empty
    )


def hyperparameters_of(fn: Callable) -> dict[str, Any]:
    """Returns the hyperparameters of `fn` with their values (those bound by `partial` included)."""
    return {
        n: p.default
        for n, p in inspect.signature(fn).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?`, or the list of known names when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
