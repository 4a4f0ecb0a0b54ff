"""Calls a reward function and says what came of it: the same in a worker process and inline."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards.declare import Judged
from jaxrl_llm.rewards.verify import Verdict
from jaxrl_llm.signature import name_of
from jaxrl_llm.types import Example


class RewardError(RuntimeError):
    """A reward function is broken, or failed where `on_error="raise"`: training ends with the cause."""


class Outcome(NamedTuple):
    """What came of one sample. `value` is None where there is no score."""

    kind: str  # "scored", or one of KINDS
    value: float | None = None
    cause: str = ""


KINDS = ("wrong", "unparsed", "none", "not_finite", "raised", "timed_out", "crashed")


def call(fn: Callable[..., Any], completion: str, example: Example) -> Outcome:
    """Scores one sample. An exception is an outcome; a value that isn't a number is an error."""
    try:
        value = fn(completion, example)
    except (Exception, SystemExit) as error:
        return Outcome("raised", None, f"{type(error).__name__}: {error}")
    return _outcome(fn, value)


def call_batched(
    fn: Callable[..., Any], completions: Sequence[str], examples: Sequence[Example]
) -> list[Outcome]:
    """Scores a list with a batched function, which must return one value for each completion."""
    try:
        values = fn(list(completions), list(examples))
    except (Exception, SystemExit) as error:
        return [Outcome("raised", None, f"{type(error).__name__}: {error}")] * len(completions)
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise RewardError(
            f"batched reward {name_of(fn)} returned {type(values).__name__}; return a list with one value for"
            " each completion"
        )
    if len(values) != len(completions):
        raise RewardError(
            f"batched reward {name_of(fn)} returned {len(values)} values for {len(completions)} completions;"
            " return one for each, None for no score"
        )
    return [_outcome(fn, value) for value in values]


def call_each(
    fn: Callable[..., Any], completions: Sequence[str], examples: Sequence[Example], budget: float
) -> list[Outcome]:
    """Scores samples in order until `budget` seconds are spent: at least one, perhaps not all."""
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for completion, example in zip(completions, examples):
        outcomes.append(call(fn, completion, example))
        if time.monotonic() - start > budget:
            break
    return outcomes


def _outcome(fn: Callable[..., Any], value: Any) -> Outcome:
    if value is None:
        return Outcome("none", None, "returned None")
    if isinstance(value, Judged):
        kind = "scored" if value.verdict is Verdict.CORRECT else value.verdict.value
        return Outcome(kind, float(value))
    if not _is_number(value):
        raise RewardError(
            f"reward {name_of(fn)} returned {str(value)[:80]!r} of type {type(value).__name__}; return a"
            " float, or None for no score"
        )
    value = float(value)
    return (
        Outcome("scored", value) if math.isfinite(value) else Outcome("not_finite", None, f"returned {value}")
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    dtype = getattr(value, "dtype", None)  # NumPy and JAX scalars
    return dtype is not None and np.ndim(value) == 0 and np.dtype(dtype).kind in "biuf"
