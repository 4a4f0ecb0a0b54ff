"""Static sizes to which a microbatch is cut, so that padding and rows without a gradient cost nothing.

Shapes are static in a compiled program, and lengths are not. A program has one loop for each of a few sizes,
and every microbatch of prompts is visited in the loop of the smallest size that covers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")

SMALLEST = 16  # tokens; below this, a response costs little more than its prompt


class Size(NamedTuple):
    """The static shape to which the `[B, G, T]` arrays of a microbatch are cut."""

    samples: int
    tokens: int

    def cut(self, x: jax.Array) -> jax.Array:
        """Returns the first samples, and of `[B, G, T]` arrays the first tokens."""
        return x[:, : self.samples, : self.tokens] if x.ndim > 2 else x[:, : self.samples]


class Visits(NamedTuple):
    """Microbatches in the order in which they are visited: one size after the other."""

    prompts: jax.Array  # [N, M] int32, indices of prompts
    ends: jax.Array  # [sizes] int32: where the microbatches of each size end; those after the last are idle


def static_sizes(samples: int, tokens: int, *, halve_samples: bool) -> tuple[Size, ...]:
    """Returns at most four sizes, from small to large; the last one is the whole.

    Every size is compiled, so there are few. Halves waste less than half of the work, and most microbatches
    are in the upper ones. Without `halve_samples` there are the whole, a half and a quarter of the tokens,
    with it the whole and a half of both; a part of the tokens is a multiple of `SMALLEST`.
    """
    parts = (2, 1) if halve_samples else (4, 2, 1)
    lengths = sorted({min(tokens, -(-tokens // (SMALLEST * n)) * SMALLEST) for n in parts})
    counts = sorted({-(-samples // 2), samples}) if halve_samples else [samples]
    return tuple(sorted((Size(g, t) for g in counts for t in lengths), key=lambda size: size[0] * size[1]))


def plan(needed: jax.Array, sizes: tuple[Size, ...], microbatch: int) -> Visits:
    """Puts prompts of similar length into the same microbatch, and finds the size of each.

    Args:
      needed: `[B, G]` int, tokens of each sample that must be visited; 0 leaves the sample out. Samples that
        must be visited come first in each row if a size has fewer than G.
      sizes: from small to large; the last one is the whole.
      microbatch: prompts, a divisor of B.
    """
    chex.assert_rank(needed, 2)
    tokens, samples = jnp.max(needed, axis=1), jnp.sum(needed > 0, axis=1)
    prompts = jnp.lexsort((-samples, -tokens)).reshape(-1, microbatch)
    tokens, samples = (jnp.max(x[prompts], axis=1, keepdims=True) for x in (tokens, samples))
    most_samples, most_tokens = jnp.array(sizes).T
    fits = (samples <= most_samples) & (tokens <= most_tokens)
    index = jnp.where(tokens[:, 0] > 0, jnp.argmax(fits, axis=1), len(sizes))
    ends = jnp.sum(index[:, None] <= jnp.arange(len(sizes)), axis=0, dtype=jnp.int32)
    return Visits(prompts[jnp.argsort(index, stable=True)], ends)


def visit_all(
    visits: Visits, sizes: tuple[Size, ...], visit: Callable[[Size, jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Calls `visit(size, prompts [M], carry)` for each microbatch; idle ones are left out."""
    start = jnp.int32(0)
    for size, end in zip(sizes, visits.ends, strict=True):
        of_size = lambda i, carry, size=size: visit(size, visits.prompts[i], carry)
        carry = jax.lax.fori_loop(start, end, of_size, carry)
        start = end
    return carry
