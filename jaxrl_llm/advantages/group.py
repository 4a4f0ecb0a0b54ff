"""Advantages of the responses to one prompt, from their rewards."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import masked_center, masked_std
from jaxrl_llm.signature import scope


@scope("group", min_group=2)
def group_zscore(rewards: jax.Array, *, eps: float = 1e-6, ddof: int = 0) -> jax.Array:
    """Rewards standardised within the group.

    A_i = (r_i - mean(r)) / (std(r) + eps)

    Args:
      rewards: `[G]`.
      eps: added to the standard deviation.
      ddof: the variance divides by G - ddof; some trainers use 1.

    Returns:
      `[G]`; exact zeros for equal rewards, and so for G = 1.

    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.
    """
    chex.assert_rank(rewards, 1)
    deviation, std = masked_center(rewards), masked_std(rewards, ddof=ddof)
    # Equal rewards give 0 / (0 + eps): the select makes eps = 0 a legal choice.
    return deviation / jnp.where(std > 0, std + eps, 1)


@scope("group", min_group=2)
def group_mean_centered(rewards: jax.Array) -> jax.Array:
    """Rewards minus the mean of their group, with no division by the spread.

    A_i = r_i - mean(r). Without the division, prompts on which nearly all responses agree don't gain weight.

    Args:
      rewards: `[G]`.

    Returns:
      `[G]`; exact zeros for equal rewards, and so for G = 1.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2.
    """
    chex.assert_rank(rewards, 1)
    return masked_center(rewards)


@scope("group", min_group=2)
def leave_one_out(rewards: jax.Array) -> jax.Array:
    """Rewards minus the mean reward of the other responses.

    A_i = r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) * (r_i - mean(r)). The baseline of a response does
    not depend on it, so the policy gradient is unbiased.

    Args:
      rewards: `[G]`.

    Returns:
      `[G]`; exact zeros for equal rewards; 0 for G = 1, which has no baseline.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    chex.assert_rank(rewards, 1)
    size = rewards.shape[0]
    return masked_center(rewards) * (size / max(size - 1, 1))
