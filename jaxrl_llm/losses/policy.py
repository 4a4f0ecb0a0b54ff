"""Policy surrogates: the loss of each token, before aggregation."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import bounded_exp, keep, log_ratio, per_token
from jaxrl_llm.signature import scope


@scope("group", zero_at_zero_advantage=True)
def reinforce_loss(logp: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """The score-function surrogate, with no ratio and no clip.

    loss_t = -A logp_t

    Args:
      logp: `[G, T]` log-probabilities under the policy being trained.
      advantages: `[G]` or `[G, T]`, constants.
      mask: `[G, T]`.

    Returns:
      `[G, T]`, 0 outside the mask.

    Source: REINFORCE, Williams 1992.
    """
    chex.assert_rank(logp, 2)
    chex.assert_equal_shape([logp, mask])
    advantages = jax.lax.stop_gradient(per_token(advantages, mask))
    return -advantages * keep(logp, mask)


@scope("sequence", zero_at_zero_advantage=True)
def ppo_clip(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> jax.Array:
    """The clipped surrogate: no gain from moving the ratio further than the clip.

    r_t = exp(logp_t - old_logp_t),  loss_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high)).
    The gradient in logp_t is -A_t r_t, and 0 where A_t > 0 and r_t > 1 + clip_high, or A_t < 0 and
    r_t < 1 - clip_low. At the bound itself it is still -A_t r_t.

    Args:
      logp: `[T]` under the policy being trained.
      old_logp: `[T]` under the policy that is the ratio's denominator.
      advantages: scalar or `[T]`.
      mask: `[T]`.
      clip_low: how far the ratio may fall below 1, in [0, 1].
      clip_high: how far it may rise above 1; larger than `clip_low` leaves room for rare tokens.

    Returns:
      `[T]`, 0 outside the mask. On-policy (r = 1) value and gradient are -A. A log-ratio beyond 20 counts as
      20 and has no gradient, so that nothing overflows.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two bounds: DAPO (arXiv:2503.14476), eq. 10.
    """
    chex.assert_rank(logp, 1)
    chex.assert_equal_shape([logp, old_logp, mask])
    advantages = per_token(advantages, mask)
    ratio = bounded_exp(log_ratio(logp, old_logp, mask))
    upper, lower = 1 + clip_high, 1 - clip_low
    clipped = ((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower))
    bound = jnp.where(advantages > 0, upper, lower)
    # A select, not a maximum: the maximum halves the gradient where its arguments are equal.
    return keep(-advantages * jnp.where(clipped, bound, ratio), mask)
