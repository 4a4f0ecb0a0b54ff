"""Random inputs of stage functions, drawn by name from the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Every axis has a size of its own, so that a result's axes can be read from its shape.
SIZES = {"B": 3, "G": 5, "T": 7, "S": 4, "V": 11, "M": 8, "N": 9, "P": 6}

_LEAD = {"sequence": "", "group": "G", "batch": "BG"}

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Array:
    """An array of the vocabulary.

    Attributes:
      axes: as a function of scope "batch" sees it; "group" has no B, "sequence" no B and no G.
      draw: None for what follows from the lengths that were drawn.
    """

    axes: str
    draw: Draw | None


def _normal(rng, shape):
    return rng.normal(size=shape)


def _logp(rng, shape):
    return -rng.exponential(size=shape) - 0.01


def _positive(rng, shape):
    return rng.exponential(size=shape)


def _uniform(rng, shape):
    return rng.uniform(0.05, 0.95, size=shape)


def _flag(rng, shape):
    return rng.random(size=shape) < 0.5


def _int(low: int, high: int) -> Draw:
    return lambda rng, shape: rng.integers(low, high, size=shape)


def _parent(rng, shape):
    nodes = np.maximum(np.arange(shape[-1]), 1)
    return np.where(np.arange(shape[-1]) == 0, -1, rng.integers(0, nodes, size=shape))


def _value(value: int) -> Draw:
    return lambda rng, shape: np.full(shape, value)


VOCABULARY: dict[str, Array] = {
    "rewards": Array("BG", _normal),
    "correct": Array("BG", _flag),
    "mask": Array("BGT", None),
    "lengths": Array("BG", None),
    "truncated": Array("BG", _flag),
    "logp": Array("BGT", _logp),
    "old_logp": Array("BGT", _logp),
    "behavior_logp": Array("BGT", _logp),
    "ref_logp": Array("BGT", _logp),
    "teacher_logp": Array("BGT", _logp),
    "entropy": Array("BGT", _positive),
    "values": Array("BGT", _normal),
    "token_rewards": Array("BGT", _normal),
    "step_rewards": Array("BGS", _normal),
    "step_mask": Array("BGS", None),
    "step_ids": Array("BGT", None),
    "state_ids": Array("BGS", _int(0, 4)),
    "tokens": Array("BGT", _int(0, SIZES["V"])),
    "advantages": Array("BGT", _normal),
    "step_advantages": Array("BGS", _normal),
    "state_values": Array("BGS", _normal),
    "value_targets": Array("BGT", _normal),
    "logits": Array("BGTV", _normal),
    "teacher_logits": Array("BGTV", _normal),
    "answer_ids": Array("BG", _int(-1, 3)),
    "format_ok": Array("BG", _flag),
    "injected": Array("BG", _flag),
    "ref_rewards": Array("BM", _normal),
    "objective_rewards": Array("BGM", _normal),
    "success_rate": Array("B", _uniform),
    "group_size": Array("", _value(SIZES["G"])),
    "step": Array("", _value(3)),
    "total_steps": Array("", _value(10)),
    "policy_params": Array("P", _normal),
    "ref_params": Array("P", _normal),
    "parent": Array("BN", _parent),
    "leaf_rewards": Array("BN", _normal),
    "token_loss": Array("BGT", _normal),
}


def lead_of(scope: str) -> str:
    """Returns the leading axes that a function of `scope` sees."""
    return _LEAD[scope]


def axes_of_shape(shape: tuple[int, ...]) -> str:
    """Returns the letters of a shape that is made of `SIZES`; "?" for any other size."""
    letters = {size: letter for letter, size in SIZES.items()}
    return "".join(letters.get(size, "?") for size in shape)


@dataclass(frozen=True)
class Inputs:
    """Drawn arguments of one function, in float64, with what is needed to change them in meaningful ways."""

    arrays: dict[str, np.ndarray]
    axes: dict[str, str]  # of each array, as the function sees it
    masks: dict[str, np.ndarray]  # by its last axis, "T" or "S": which places exist

    def replace(self, **arrays: np.ndarray) -> Inputs:
        return replace(self, arrays=self.arrays | arrays)

    def _map(self, change: Callable[[str, np.ndarray], np.ndarray]) -> Inputs:
        return self.replace(**{n: change(n, a) for n, a in self.arrays.items()})

    def cast(self, dtype: Any) -> dict[str, np.ndarray]:
        """Returns the arrays, floating ones in `dtype`."""
        return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in self.arrays.items()}

    def rounded(self) -> Inputs:
        """Rounds to what float32 holds."""
        return self._map(lambda n, a: a.astype(np.float32).astype(a.dtype) if a.dtype.kind == "f" else a)

    def with_masks(self, dtype: Any) -> Inputs:
        return self._map(lambda n, a: a.astype(dtype) if n.endswith("mask") else a)

    def padded(self, count: int = 3) -> Inputs:
        """Appends masked tokens that hold garbage."""

        def pad(name, a):
            axis = self.axes[name].find("T")
            if axis < 0:
                return a
            garbage = np.nan if a.dtype.kind == "f" else -1 if name == "step_ids" else 0
            width = [(0, count if i == axis else 0) for i in range(a.ndim)]
            return np.pad(a, width, constant_values=garbage)

        return self._map(pad)

    def poisoned(self) -> Inputs:
        """Puts NaN wherever a mask says that nothing is there."""

        def poison(name, a):
            for last, mask in self.masks.items():
                prefix = self.axes[name][: mask.ndim]
                if a.dtype.kind == "f" and prefix.endswith(last) and a.shape[: mask.ndim] == mask.shape:
                    shape = mask.shape + (1,) * (a.ndim - mask.ndim)
                    return np.where(mask.reshape(shape), a, np.nan)
            return a

        return self._map(poison)

    def permuted(self, axis: str, order: np.ndarray) -> Inputs:
        def move(name, a):
            where = self.axes[name].find(axis)
            return a if where < 0 else np.take(a, order, axis=where)

        return self._map(move)

    def _rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> Inputs:
        return self._map(lambda n, a: change(a) if "reward" in n and a.dtype.kind == "f" else a)

    def equal(self) -> Inputs:
        """Makes all rewards 0.1."""
        return self._rewards(lambda a: np.full_like(a, 0.1))

    def binary(self) -> Inputs:
        """Makes all rewards 0 or 1."""
        return self._rewards(lambda a: (a > 0).astype(a.dtype))

    def extremes(self) -> Iterator[tuple[Inputs, str]]:
        """Yields the inputs as they are, then with policies that disagree, with a description.

        A reference or a teacher may put 1e-52 on a token; the sampling policy is never that far away.
        """
        yield self, "random inputs"
        gaps = {"ref_logp": 120.0, "teacher_logp": 120.0, "old_logp": 30.0, "behavior_logp": 30.0}
        names = [n for n in ("logp", *gaps) if n in self.arrays]
        for other in names[1:]:
            low = -0.1 - gaps[other]
            for here, there in ((-0.1, low), (low, -0.1)):
                changed = {n: np.full_like(self.arrays[n], there if n == other else here) for n in names}
                yield self.replace(**changed), f"{names[0]} {here} and {other} {there}"


def draw_inputs(
    names: Iterable[str],
    scope: str,
    *,
    seed: int,
    masks: str = "ragged",
    sizes: Mapping[str, int] = SIZES,
    extra_arrays: Mapping[str, Any] | None = None,
) -> Inputs:
    """Draws arrays that fit together.

    Args:
      names: of the vocabulary, or of `extra_arrays`.
      scope: "sequence", "group" or "batch".
      seed: of the draw.
      masks: "ragged", "full", "holes" (ragged, and the second token is not the policy's), "one empty" (the
        first response) or "empty".
      sizes: of the axes.
      extra_arrays: axes as the function sees them, or a maker `(rng, sizes) -> array`, for other names.
    """
    rng, extra = np.random.default_rng(seed), extra_arrays or {}
    shape = lambda axes: tuple(sizes[letter] for letter in axes)
    seen = lambda axes: "".join(a for a in axes if a not in "BG" or a in _LEAD[scope])
    names = tuple(names)
    derived = _draw_lengths(rng, shape(_LEAD[scope]), sizes, masks, holes="lengths" not in names)
    arrays, axes = {}, {}
    for name in names:
        if callable(extra.get(name)):
            arrays[name] = np.asarray(extra[name](rng, sizes))
            axes[name] = axes_of_shape(arrays[name].shape)
            continue
        entry = VOCABULARY[name] if name not in extra else Array(extra[name], _normal)
        axes[name] = entry.axes if name in extra else seen(entry.axes)
        arrays[name] = np.asarray(entry.draw(rng, shape(axes[name])) if entry.draw else derived[name])
    return Inputs(arrays, axes, {"T": derived["mask"], "S": derived["step_mask"]})


def _draw_lengths(rng, lead: tuple[int, ...], sizes, masks: str, *, holes: bool) -> dict[str, np.ndarray]:
    """Draws lengths, and the masks and steps that follow from them."""
    tokens, steps = np.arange(sizes["T"]), np.arange(sizes["S"])
    lengths = np.full(lead, sizes["T"]) if masks == "full" else rng.integers(2, sizes["T"], size=lead)
    counts = np.full(lead, sizes["S"]) if masks == "full" else rng.integers(1, sizes["S"] + 1, size=lead)
    empty = np.zeros(lead, bool)
    if masks == "empty":
        empty[...] = True
    elif masks == "one empty":
        empty.flat[0] = True
    lengths, counts = np.where(empty, 0, lengths), np.where(empty, 0, counts)
    mask = tokens < lengths[..., None]
    if masks == "holes" and holes:
        mask = mask & (tokens != 1)
    step_ids = tokens * counts[..., None] // np.maximum(lengths[..., None], 1)
    return {
        "lengths": lengths,
        "mask": mask,
        "step_mask": steps < counts[..., None],
        "step_ids": np.where(mask, step_ids, -1),
    }
