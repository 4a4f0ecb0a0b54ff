"""The numbers of the method cards, for every function that is exported."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.contract import MENUS, menu
from jaxrl_llm.contract.inputs import VOCABULARY, draw_inputs
from jaxrl_llm.contract.subject import FAST_COMPILE

FOLDER = Path(__file__).parent / "vectors"

STOCK = (
    "aggregation_modes",
    "dapo",
    "entropy_bonus",
    "gae",
    "group_mean_centered",
    "group_zscore",
    "kl_estimators",
    "kl_shaped_rewards",
    "leave_one_out",
    "ppo_clip",
    "reinforce_global_norm",
    "tis_mis",
)


def _cases():
    menus = {stage: menu(stage) for stage in MENUS}
    for file in sorted(FOLDER.glob("*.json")):
        for i, case in enumerate(json.loads(file.read_text())):
            if fn := menus[case["stage"]].get(case["fn"]):
                yield pytest.param(fn, case, id=f"{file.stem}-{case['fn']}-{i}")


CASES = list(_cases())


def _arrays(inputs, dtype):
    """Numbers become floats of `dtype`; ids, counts and flags keep their type."""
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    for name, value in arrays.items():
        if name in VOCABULARY and not name.endswith("mask"):
            kind = draw_inputs([name], "group", seed=0).arrays[name].dtype.kind
            arrays[name] = value.astype({"f": dtype, "i": int, "b": bool}[kind])
        elif value.dtype.kind == "f":
            arrays[name] = value.astype(dtype)
    return arrays


def _results(fn, case, dtype):
    """Returns (name, result, expected) of each expectation, computed under jit."""
    arrays, expect = _arrays(case["inputs"], dtype), case["expect"]
    fn = partial(fn, **{k: tuple(v) if isinstance(v, list) else v for k, v in case["params"].items()})
    expect = expect if isinstance(expect, dict) else {"value": expect}
    wanted = [name.removeprefix("grad_") for name in expect if name.startswith("grad_")]
    total = lambda live, rest: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fn(**live, **rest)))

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(arrays):
        live = {name: arrays[name] for name in wanted}
        rest = {name: a for name, a in arrays.items() if name not in live}
        return fn(**arrays), jax.grad(total)(live, rest) if wanted else {}

    value, gradients = run(arrays)
    for name, expected in expect.items():
        if name.startswith("grad_"):
            yield name, gradients[name.removeprefix("grad_")], expected
        else:
            yield name, getattr(value, name) if hasattr(value, "_fields") else value, expected


def _assert_close(fn, case, dtype, atol, rtol):
    for name, got, expected in _results(fn, case, dtype):
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        assert got.shape == expected.shape, name
        excess = np.abs(got - expected) - (atol + rtol * np.abs(expected))
        assert (excess <= 0).all(), f"{name}: {got.tolist()} instead of {expected.tolist()}"


@pytest.mark.parametrize("fn, case", CASES)
def test_vector_agrees_in_float64(fn, case):
    with jax.enable_x64(True):
        _assert_close(fn, case, np.float64, 1e-9, case["rtol"])


@pytest.mark.parametrize("fn, case", CASES)
def test_vector_agrees_in_float32(fn, case):
    _assert_close(fn, case, np.float32, 1e-5, 1e-4)


@pytest.mark.parametrize("card", STOCK)
def test_stock_card_is_exported_whole(card):
    for case in json.loads((FOLDER / f"{card}.json").read_text()):
        assert case["fn"] in menu(case["stage"]), f"{MENUS[case['stage']]} does not export {case['fn']}"
