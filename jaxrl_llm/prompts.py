"""Which prompts are trained on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import as_float
from jaxrl_llm.signature import scope

__all__ = ["dynamic_sampling_keep"]


@scope("batch")
def dynamic_sampling_keep(rewards: jax.Array) -> jax.Array:
    """Keeps the groups whose rewards are not all equal: the others have no advantage, and so no gradient.

    Args:
      rewards: `[B, G]`; verdicts as 0 and 1 for the filter on accuracy. NaN, an unscored response, is passed
        over.

    Returns:
      `[B]` bool; False for G = 1.

    Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 11.
    """
    chex.assert_rank(rewards, 2)
    rewards = as_float(rewards)
    scored = ~jnp.isnan(rewards)
    largest = jnp.max(rewards, axis=-1, where=scored, initial=-jnp.inf)
    smallest = jnp.min(rewards, axis=-1, where=scored, initial=jnp.inf)
    return largest > smallest


def take_kept(kept: Iterable[Iterable[bool]], batch: int) -> list[tuple[int, int]]:
    """Returns the first `batch` kept groups over several rounds of sampling, in order.

    Args:
      kept: for each round, whether each of its groups is kept.
      batch: groups that the step wants; surplus ones are cut off.

    Returns:
      (round, index in the round) of each group taken; fewer than `batch` if not that many were kept.
    """
    found = ((turn, index) for turn, flags in enumerate(kept) for index, keep in enumerate(flags) if keep)
    return list(islice(found, batch))
