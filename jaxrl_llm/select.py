"""Which responses and tokens enter the update, and with which weight. Weights are constants."""

from __future__ import annotations

from collections.abc import Iterable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import bounded_exp, keep, log_ratio, masked_mean, masked_sum, valid
from jaxrl_llm.signature import did_you_mean, scope

__all__ = ["masked_is_weights", "overlong_filter", "truncated_is_weights"]


@scope("sequence")
def truncated_is_weights(
    old_logp: jax.Array, behavior_logp: jax.Array, mask: jax.Array, *, level: str = "token", cap: float = 2.0
) -> jax.Array:
    """Importance weights, cut off at a cap, for a sampler whose probabilities differ from the trainer's.

    w_t = min(exp(old_logp_t - behavior_logp_t), cap); at level "sequence" the differences are summed over the
    response first. Log-ratios are clipped to [-20, 20].

    Args:
      old_logp: `[T]` as the trainer computes it with the sampler's parameters.
      behavior_logp: `[T]` as the sampler reported it.
      mask: `[T]`.
      level: "token" or "sequence".
      cap: the largest weight.

    Returns:
      `[T]`, 0 outside the mask. Multiply the loss by it, and aggregate with the original mask.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).
    """
    log_weight = _log_ratio_at(level, ("token", "sequence"), old_logp, behavior_logp, mask)
    weights = jnp.broadcast_to(jnp.minimum(bounded_exp(log_weight), cap), mask.shape)
    return jax.lax.stop_gradient(keep(weights, mask))


@scope("sequence")
def masked_is_weights(
    old_logp: jax.Array,
    behavior_logp: jax.Array,
    mask: jax.Array,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
    weighted: bool = True,
) -> jax.Array:
    """Importance weights that drop what lies outside a band, rather than cutting it off.

    w_t = ratio if low <= ratio <= high else 0

    Args:
      old_logp: `[T]` as the trainer computes it with the sampler's parameters.
      behavior_logp: `[T]` as the sampler reported it.
      mask: `[T]`.
      level: the ratio is that of the "token", of the whole "sequence" (product over its tokens), or their
        "geometric" mean.
      low: smallest ratio kept.
      high: largest ratio kept.
      weighted: False gives 1 instead of the ratio: rejection alone.

    Returns:
      `[T]`, 0 outside the mask.

    Source: masked importance sampling (MIS) and IcePop, as in the public trainers.
    """
    log_weight = _log_ratio_at(level, ("token", "sequence", "geometric"), old_logp, behavior_logp, mask)
    ratio = jnp.broadcast_to(jnp.exp(log_weight), mask.shape)
    inside = (ratio >= low) & (ratio <= high)
    return jax.lax.stop_gradient(keep(ratio if weighted else jnp.ones_like(ratio), valid(mask) & inside))


@scope("group")
def overlong_filter(mask: jax.Array, truncated: jax.Array) -> jax.Array:
    """The mask without truncated responses: what was cut off says nothing about its answer.

    Args:
      mask: `[G, T]`.
      truncated: `[G]` bool.

    Returns:
      `[G, T]` of the mask's type; all 0 if every response was truncated.

    Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), section 3.4.
    """
    chex.assert_rank([mask, truncated], [2, 1])
    chex.assert_equal_shape_prefix([mask, truncated], 1)
    mask = jnp.asarray(mask)
    return jnp.where(valid(truncated)[:, None], jnp.zeros_like(mask), mask)


def _log_ratio_at(
    level: str, levels: Iterable[str], old_logp: jax.Array, behavior_logp: jax.Array, mask: jax.Array
) -> jax.Array:
    """Returns the log-ratio `[T]` of tokens, or the scalar of the response."""
    if level not in levels:
        raise ValueError(f"level is {level!r}{did_you_mean(level, levels)}")
    chex.assert_rank(old_logp, 1)
    chex.assert_equal_shape([old_logp, behavior_logp, mask])
    difference = log_ratio(old_logp, behavior_logp, mask)
    reduce = {"token": keep, "sequence": masked_sum, "geometric": masked_mean}[level]
    return reduce(difference, mask)
