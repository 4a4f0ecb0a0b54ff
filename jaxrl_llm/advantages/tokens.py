"""Advantages of single tokens. Tokens outside the mask are skipped: credit passes over them undiscounted."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import keep, masked_center, masked_count, per_token, valid
from jaxrl_llm.signature import scope


class TokenAdvantages(NamedTuple):
    """What `gae` returns."""

    advantages: jax.Array  # [T]
    returns: jax.Array  # [T], targets of the critic


@scope("group")
def discounted_return_to_go(token_rewards: jax.Array, mask: jax.Array, *, gamma: float = 1.0) -> jax.Array:
    """Discounted sum of the rewards from each token on.

    R_t = x_t + gamma * R_next(t), where next(t) is the next valid token and R after the last one is 0.

    Args:
      token_rewards: `[G, T]`; rewards outside the mask are ignored.
      mask: `[G, T]`; a gap in it, such as the output of a tool, costs no discount.
      gamma: discount for each valid token, in [0, 1].

    Returns:
      `[G, T]`, 0 outside the mask.

    Source: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); Sutton and Barto 2018, eq. 3.8.
    """
    chex.assert_rank(token_rewards, 2)
    chex.assert_equal_shape([token_rewards, mask])
    return _discounted_sum(token_rewards, mask, gamma)


@scope("sequence")
def gae(
    token_rewards: jax.Array, values: jax.Array, mask: jax.Array, *, gamma: float = 1.0, lam: float = 0.95
) -> TokenAdvantages:
    """Generalized advantage estimation: an exponentially weighted sum of temporal-difference errors.

    delta_t = r_t + gamma * V_next(t) - V_t,  A_t = delta_t + gamma * lam * A_next(t),  return_t = A_t + V_t,
    where next(t) is the next valid token, and V and A after the last one are 0.

    Args:
      token_rewards: `[T]`.
      values: `[T]` the critic's value before each token; constants, no gradient flows into them.
      mask: `[T]`.
      gamma: discount, in [0, 1].
      lam: 0 is the one-step error, 1 the return minus the value.

    Returns:
      `advantages` and `returns`, each `[T]`, 0 outside the mask.

    Source: GAE, Schulman et al. 2015 (arXiv:1506.02438), eq. 16.
    """
    chex.assert_rank(token_rewards, 1)
    chex.assert_equal_shape([token_rewards, values, mask])
    values = keep(jax.lax.stop_gradient(values), mask)
    delta = keep(token_rewards, mask) + gamma * _next_valid(values, mask) - values
    advantages = _discounted_sum(delta, mask, gamma * lam)
    return TokenAdvantages(advantages, keep(advantages + values, mask))


@scope("batch")
def masked_whiten(advantages: jax.Array, mask: jax.Array, *, eps: float = 1e-8) -> jax.Array:
    """Advantages standardised over all valid tokens of the batch.

    (A - mean) / sqrt(var + eps), with the unbiased variance (n - 1).

    Args:
      advantages: `[B, G, T]`, or `[B, G]`, which is spread over the tokens first.
      mask: `[B, G, T]`.
      eps: added to the variance.

    Returns:
      `[B, G, T]`, 0 outside the mask; zeros for equal advantages or fewer than two valid tokens.

    Source: PPO on language models, Ziegler et al. 2019 (arXiv:1909.08593), in its released code; REINFORCE++,
    Hu et al. 2025 (arXiv:2501.03262).
    """
    chex.assert_rank(mask, 3)
    deviation = masked_center(per_token(advantages, mask), mask)
    var = jnp.sum(jnp.square(deviation)) / jnp.maximum(masked_count(mask) - 1, 1).astype(deviation.dtype)
    # With no spread every deviation is 0: any divisor does, and this one makes eps = 0 a legal choice.
    return deviation / jnp.sqrt(jnp.where(var > 0, var + eps, 1))


def _discounted_sum(x: jax.Array, mask: jax.Array, decay: float) -> jax.Array:
    """Returns y_t = x_t + decay * y_next(t) along the last axis, 0 outside the mask."""

    def step(later, now):
        x, ok = now
        y = jnp.where(ok, x + decay * later, later)
        return y, jnp.where(ok, y, 0)

    return _scan_back(step, keep(x, mask), valid(mask))


def _next_valid(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns x at the next valid index along the last axis, 0 after the last one."""

    def step(later, now):
        x, ok = now
        return jnp.where(ok, x, later), later

    return _scan_back(step, keep(x, mask), valid(mask))


def _scan_back(step, x: jax.Array, mask: jax.Array) -> jax.Array:
    time_first = jnp.moveaxis(x, -1, 0), jnp.moveaxis(mask, -1, 0)
    _, out = jax.lax.scan(step, jnp.zeros_like(time_first[0][0]), time_first, reverse=True)
    return jnp.moveaxis(out, 0, -1)
