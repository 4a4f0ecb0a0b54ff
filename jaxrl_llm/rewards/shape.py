"""Shaping of rewards: numbers added to, or spread from, what the verifiers gave."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import as_float, last_valid, log_ratio
from jaxrl_llm.signature import scope


@scope("group")
def soft_overlong_penalty(
    lengths: jax.Array, *, max_length: int = 20480, cache: int = 4096, factor: float = 1.0
) -> jax.Array:
    """A penalty that grows over the last `cache` tokens before the limit; add it to the rewards.

    0 up to max_length - cache tokens, -factor * (n - (max_length - cache)) / cache inside the cache, and
    -factor from max_length on.

    Args:
      lengths: `[G]` response tokens.
      max_length: tokens from which the whole penalty holds.
      cache: tokens over which it grows; 0 makes it a step after `max_length`.
      factor: the whole penalty.

    Returns:
      `[G]`, in [-factor, 0].

    Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 13.
    """
    chex.assert_rank(lengths, 1)
    over = as_float(lengths) - (max_length - cache)
    return -factor * jnp.clip(over / jnp.maximum(cache, 1), 0, 1)


@scope("sequence")
def kl_shaped_token_rewards(
    rewards: jax.Array,
    old_logp: jax.Array,
    ref_logp: jax.Array,
    mask: jax.Array,
    *,
    beta: float = 0.05,
    clip: float | None = None,
) -> jax.Array:
    """The outcome reward at the last token, minus a penalty for every token that leaves the reference.

    x_t = -beta * (old_logp_t - ref_logp_t) + [t is the last valid token] * reward

    Args:
      rewards: scalar.
      old_logp: `[T]` under the policy that sampled.
      ref_logp: `[T]` under the reference.
      mask: `[T]`.
      beta: weight of the penalty.
      clip: the reward is clipped to [-clip, clip] first; None leaves it.

    Returns:
      `[T]` constants, 0 outside the mask. An empty mask loses the reward.

    Source: InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155), eq. 2; on tokens: Ziegler et al. 2019
    (arXiv:1909.08593).
    """
    chex.assert_rank([rewards, old_logp], [0, 1])
    chex.assert_equal_shape([old_logp, ref_logp, mask])
    reward = as_float(rewards) if clip is None else jnp.clip(as_float(rewards), -clip, clip)
    outcome = jnp.where(last_valid(mask), reward, 0)
    return jax.lax.stop_gradient(outcome - beta * log_ratio(old_logp, ref_logp, mask))
