"""The contract of stage functions, as checks to run on a function of your own.

    check_loss(my_loss)
    check_advantage(my_advantage)

Inputs are drawn at random by the names of the positional parameters. The first check that fails raises a
`ContractError`, which says what was expected and what to do. Some properties are declared, by
`@scope(name, **facts)`, and then checked: `FACTS` lists them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.contract.checks import CHECKS, FACTS, check_signature
from jaxrl_llm.contract.inputs import SIZES, VOCABULARY
from jaxrl_llm.contract.subject import ContractError, Subject
from jaxrl_llm.signature import arrays_of, did_you_mean

__all__ = [
    "FACTS",
    "MENUS",
    "SIZES",
    "VOCABULARY",
    "ContractError",
    "check_advantage",
    "check_function",
    "check_loss",
    "menu",
]

# Where the functions of each stage are exported.
MENUS = {
    "prompts": "jaxrl_llm.prompts",
    "rollout": "jaxrl_llm.rollout",
    "reward": "jaxrl_llm.rewards",
    "advantage": "jaxrl_llm.advantages",
    "select": "jaxrl_llm.select",
    "loss": "jaxrl_llm.losses",
    "regularize": "jaxrl_llm.losses",
    "preference": "jaxrl_llm.losses",
    "value": "jaxrl_llm.losses",
    "update": "jaxrl_llm.optimizers",
    "reference": "jaxrl_llm.reference",
    "replay": "jaxrl_llm.data.replay",
    "decode": "jaxrl_llm.rollout.search",
    "metric": "jaxrl_llm.evaluate",
}

SEEDS = (0, 1)


def check_loss(fn: Callable, *, extra_arrays: Mapping[str, Any] | None = None) -> None:
    """Checks a loss: `check_function` with stage "loss"."""
    check_function(fn, stage="loss", extra_arrays=extra_arrays)


def check_advantage(fn: Callable, *, extra_arrays: Mapping[str, Any] | None = None) -> None:
    """Checks an advantage estimator: `check_function` with stage "advantage"."""
    check_function(fn, stage="advantage", extra_arrays=extra_arrays)


def check_function(fn: Callable, *, stage: str, extra_arrays: Mapping[str, Any] | None = None) -> None:
    """Checks a stage function on random inputs.

    Args:
      fn: its positional parameters are arrays, named from `VOCABULARY`; its keyword-only parameters are
        hyperparameters with defaults (bind others with `functools.partial`).
      stage: what the function is for, a key of `MENUS`.
      extra_arrays: for names outside the vocabulary. Either the axes as the function sees them, letters of
        `SIZES` such as "T" or "GT" ("" is a scalar), to be drawn from a normal distribution; or a maker
        `(rng, sizes) -> array`.

    Raises:
      ContractError: the first check that fails.
      ValueError: an unknown stage.
    """
    if stage not in MENUS:
        raise ValueError(f"unknown stage {stage!r}{did_you_mean(stage, MENUS)}")
    subject = Subject(fn, stage, dict(extra_arrays or {}))
    check_signature(subject)
    for check in CHECKS:
        for seed in SEEDS:
            check(subject, seed)


def menu(stage: str) -> dict[str, Callable]:
    """Returns the functions of arrays that the stage's module exports, by name.

    What takes no array of the vocabulary, such as a reward that takes text, is left out.
    """
    if importlib.util.find_spec(MENUS[stage]) is None:
        return {}
    module = importlib.import_module(MENUS[stage])
    exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {name: fn for name, fn in exported.items() if inspect.isroutine(fn) and _takes_arrays(fn)}


def _takes_arrays(fn: Callable) -> bool:
    return hasattr(fn, "scope") or not VOCABULARY.keys().isdisjoint(arrays_of(fn))
