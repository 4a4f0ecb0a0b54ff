"""A function under test, and what the checks require of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.contract.inputs import SIZES, Inputs, draw_inputs
from jaxrl_llm.signature import arrays_of, fact, name_of, scope_of

LOSSES = ("loss", "regularize", "value")

# Arrays through which the engine differentiates a loss; the others are constants to it.
LIVE = ("logp", "entropy", "logits", "values", "token_loss")

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Arrays = dict[str, np.ndarray]


class ContractError(AssertionError):
    """A stage function breaks its contract."""


class Subject:
    """A stage function, called on drawn inputs."""

    def __init__(self, fn: Callable, stage: str, extra_arrays: dict[str, Any]):
        self.fn, self.stage, self.extra_arrays = fn, stage, extra_arrays
        self.name, self.names = name_of(fn), arrays_of(fn)
        self.is_loss = stage in LOSSES
        self.scope = scope_of(fn, "sequence" if self.is_loss else "group")
        self.is_masked = not {"mask", "lengths"}.isdisjoint(self.names)
        named = lambda *args: fields(fn(*args))
        self._value = _jit(named)
        self._batched = _jit(jax.vmap(named))
        self._gradient = _jit(jax.grad(self.total))
        self._totals = _jit(self._each_total, static_argnums=0)

    def fact(self, name: str) -> Any:
        return fact(self.fn, name)

    def draw(self, seed: int, masks: str = "ragged", **sizes: int) -> Inputs:
        sizes, extra = SIZES | sizes, self.extra_arrays
        return draw_inputs(self.names, self.scope, seed=seed, masks=masks, sizes=sizes, extra_arrays=extra)

    def value(self, inputs: Inputs, dtype: Any = np.float64) -> Arrays:
        """Returns the results by name, computed under jit."""
        with jax.enable_x64(dtype == np.float64):
            return to_numpy(self._value(*inputs.cast(dtype).values()))

    def batched_value(self, each: list[Inputs]) -> Arrays:
        """Returns the results for several inputs at once, by vmap."""
        with jax.enable_x64(True):
            columns = zip(*(inputs.cast(np.float64).values() for inputs in each))
            return to_numpy(self._batched(*map(np.stack, columns)))

    def gradient(self, inputs: Inputs, dtype: Any = np.float64) -> Arrays:
        """Returns gradients of `total`: in the live arrays of a loss, in every floating array elsewhere."""
        with jax.enable_x64(dtype == np.float64):
            return to_numpy(self._gradient(*self.split(inputs.cast(dtype))))

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the arrays to differentiate in, and the others."""
        wanted = lambda n: arrays[n].dtype.kind == "f" and (not self.is_loss or n in LIVE)
        floats = {n: a for n, a in arrays.items() if wanted(n)}
        return floats, {n: a for n, a in arrays.items() if n not in floats}

    def total(self, floats: dict[str, jax.Array], others: dict[str, jax.Array]) -> jax.Array:
        """Sums the results with another weight at each place, so that gradients don't cancel."""
        arrays = {**floats, **others}
        out = fields(self.fn(*(arrays[n] for n in self.names)))
        floating = [x for x in out.values() if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(x * _place_weights(x)) for x in floating), jnp.zeros(()))

    def totals(self, name: str, xs: np.ndarray, floats: Arrays, others: Arrays) -> np.ndarray:
        """Returns `total` with each of `xs` in place of the array `name`."""
        with jax.enable_x64(True):
            return np.asarray(self._totals(name, xs, floats, others))

    def _each_total(self, name, xs, floats, others):
        return jax.vmap(lambda x: self.total({**floats, name: x}, others))(xs)

    def fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        raise ContractError(f"{self.name}: {message}") from cause

    def require_same(
        self, claim: str, got: Arrays, want: Arrays, rtol: float = 1e-7, atol: float = 1e-9
    ) -> None:
        for name, expected in want.items():
            found, expected = got[name].astype(float), expected.astype(float)
            if found.shape != expected.shape:
                self.fail(f"{claim}, but {name} has shape {found.shape} instead of {expected.shape}")
            wrong = ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
            for at in _first(wrong):
                self.fail(f"{claim}, but {name}{list(at)} is {found[at]:.9g} instead of {expected[at]:.9g}")

    def require_zero(self, claim: str, got: Arrays) -> None:
        for name, found in got.items():
            for at in _first(found != 0):
                self.fail(f"{claim}, but {name}{list(at)} is {found[at]:.9g}")

    def require_finite(self, claim: str, got: Arrays) -> None:
        for name, found in got.items():
            for at in _first(~np.isfinite(found.astype(float))):
                self.fail(f"{claim}, but {name}{list(at)} is {found[at]}")


def _jit(fn: Callable, **options: Any) -> Callable:
    """Compiles fast rather than well: a check runs each program a few times, on a few numbers."""
    return jax.jit(fn, compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else None, **options)


def fields(out: Any) -> dict[str, jax.Array]:
    """Returns the fields of a NamedTuple or dataclass; a bare array is called "result"."""
    if hasattr(out, "_asdict"):
        return {n: jnp.asarray(x) for n, x in out._asdict().items()}
    if hasattr(out, "__dataclass_fields__"):
        return {n: jnp.asarray(getattr(out, n)) for n in out.__dataclass_fields__}
    return {"result": jnp.asarray(out)}


def to_numpy(tree: dict[str, jax.Array]) -> Arrays:
    return {n: np.asarray(x) for n, x in tree.items()}


def _first(wrong: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(i) for i in at) for at in np.argwhere(wrong)[:1]]


def _place_weights(x: jax.Array) -> np.ndarray:
    """Returns a weight for each place of `x` that doesn't depend on how many places there are."""
    out = np.ones((), x.dtype)
    for size in x.shape:
        out = np.multiply.outer(out, 1 + 0.5 * np.sin(1 + np.arange(size)))
    return out.astype(x.dtype)
