"""Masked statistics, and the aggregation of token losses into one scalar.

A mask is bool, int or float; an entry is valid where it is not 0. What lies outside may be NaN: it is
selected away before any arithmetic, so it reaches neither a value nor a gradient. Statistics work on the
deviations from the mean, never on differences of large sums, and equal entries deviate by exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.signature import scope

Axis = int | tuple[int, ...] | None

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far beyond any clip, and its square still fits float32


def as_float(x: jax.Array) -> jax.Array:
    """Returns `x` itself if it is floating, else in the default float type."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def valid(mask: jax.Array) -> jax.Array:
    """Returns the mask as bool."""
    return jnp.asarray(mask) != 0


def keep(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns `x` where the mask is valid, else 0."""
    return jnp.where(valid(mask), as_float(x), 0)


def per_token(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Spreads one number a response over its tokens; what is already `[..., T]` stays.

    Args:
      x: `[...]` or `[..., T]`.
      mask: `[..., T]`.

    Returns:
      `[..., T]`, 0 outside the mask.
    """
    x, shape = as_float(x), jnp.shape(mask)
    return keep(jnp.broadcast_to(x[..., None] if x.ndim < len(shape) else x, shape), mask)


def masked_count(mask: jax.Array, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the number of valid entries, int."""
    return jnp.sum(valid(mask), axis=axis, keepdims=keepdims)


def masked_sum(x: jax.Array, mask: jax.Array, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the sum over valid entries; 0 if there is none."""
    return jnp.sum(keep(x, mask), axis=axis, keepdims=keepdims)


def masked_mean(x: jax.Array, mask: jax.Array, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the mean over valid entries; 0 if there is none."""
    total = masked_sum(x, mask, axis, keepdims=keepdims)
    return total / jnp.maximum(masked_count(mask, axis, keepdims=keepdims), 1).astype(total.dtype)


def masked_center(x: jax.Array, mask: jax.Array | None = None, axis: Axis = None) -> jax.Array:
    """Returns the deviations from the mean of the valid entries.

    One of the entries is subtracted first. Without that, the rounded mean of n equal numbers need not be
    that number, and a division by their spread would blow the remainder up.

    Args:
      x: any shape.
      mask: the same shape; None takes all entries.
      axis: axes of the mean; None takes all.

    Returns:
      x - mean(x), 0 outside the mask; exactly 0 where the valid entries are equal.
    """
    mask = jnp.ones(jnp.shape(x), bool) if mask is None else valid(mask)
    x = keep(x, mask)
    largest = jnp.max(x, axis=axis, keepdims=True, where=mask, initial=-jnp.inf)
    some = jnp.any(mask, axis=axis, keepdims=True)
    shifted = keep(x - jax.lax.stop_gradient(jnp.where(some, largest, 0)), mask)
    return keep(shifted - masked_mean(shifted, mask, axis, keepdims=True), mask)


def masked_var(
    x: jax.Array, mask: jax.Array | None = None, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False
) -> jax.Array:
    """Returns the variance of the valid entries, sum((x - mean)^2) / max(n - ddof, 1); 0 if there is none."""
    mask = jnp.ones(jnp.shape(x), bool) if mask is None else mask
    total = jnp.sum(jnp.square(masked_center(x, mask, axis)), axis=axis, keepdims=keepdims)
    return total / jnp.maximum(masked_count(mask, axis, keepdims=keepdims) - ddof, 1).astype(total.dtype)


def masked_std(
    x: jax.Array, mask: jax.Array | None = None, axis: Axis = None, *, ddof: int = 0, keepdims: bool = False
) -> jax.Array:
    """Returns the square root of `masked_var`, with gradient 0 where that is 0."""
    var = masked_var(x, mask, axis, ddof=ddof, keepdims=keepdims)
    spread = var > 0
    return jnp.where(spread, jnp.sqrt(jnp.where(spread, var, 1)), 0)


def last_valid(mask: jax.Array) -> jax.Array:
    """Marks the last valid entry along the last axis: `[..., T]` bool, all False for an empty mask."""
    mask = valid(mask)
    return mask & (jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1] == 1)


def log_ratio(logp: jax.Array, other_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns logp - other_logp, 0 outside the mask."""
    return keep(logp, mask) - keep(other_logp, mask)


def bounded_exp(x: jax.Array) -> jax.Array:
    """Returns exp(clip(x, -20, 20)): neither the value nor the gradient overflows."""
    return jnp.exp(jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@scope("batch", linear=True, output="")
def token_mean(token_loss: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over all tokens of the batch: sum(loss * mask) / sum(mask).

    Long responses weigh more than short ones. Linear in the loss, as every aggregation here: the engine takes
    d aggregate / d loss as the weight of each token, so that a split into microbatches changes nothing.

    Args:
      token_loss: `[B, G, T]`.
      mask: `[B, G, T]`; a float mask weighs.

    Returns:
      A scalar; 0 if there is no token.

    Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 12.
    """
    chex.assert_equal_shape([token_loss, mask])
    weight = _weight(token_loss, mask)
    return _ratio(jnp.sum(keep(token_loss, mask) * weight), jnp.sum(weight))


@scope("batch", linear=True, output="")
def sequence_mean(token_loss: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over responses of the mean over their tokens: every response weighs the same.

    Args:
      token_loss: `[B, G, T]`.
      mask: `[B, G, T]`; responses without tokens don't count.

    Returns:
      A scalar; 0 if no response has a token.

    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3.
    """
    chex.assert_equal_shape([token_loss, mask])
    weight = _weight(token_loss, mask)
    length = jnp.sum(weight, axis=-1)
    means = _ratio(jnp.sum(keep(token_loss, mask) * weight, axis=-1), length)
    return _ratio(jnp.sum(means), jnp.sum(length > 0).astype(means.dtype))


@scope("batch", linear=True, output="")
def sequence_sum(token_loss: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over responses of the sum over their tokens: the log-probability of a response, not of a token.

    Args:
      token_loss: `[B, G, T]`.
      mask: `[B, G, T]`; responses without tokens don't count.

    Returns:
      A scalar; 0 if no response has a token.

    Source: REINFORCE on whole responses, for example RLOO, Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    chex.assert_equal_shape([token_loss, mask])
    weight = _weight(token_loss, mask)
    sums = jnp.sum(keep(token_loss, mask) * weight, axis=-1)
    return _ratio(jnp.sum(sums), jnp.sum(jnp.sum(weight, axis=-1) > 0).astype(sums.dtype))


@scope("batch", linear=True, output="", counts_empty=True)
def constant_length(token_loss: jax.Array, mask: jax.Array, *, length: int | None = None) -> jax.Array:
    """Sum over tokens, divided by a constant: a token weighs the same however long its response is.

    sum(loss * mask) / (number of responses * length)

    Args:
      token_loss: `[B, G, T]`.
      mask: `[B, G, T]`; responses without tokens count in the denominator.
      length: tokens, usually the limit on new tokens; None takes T, and so depends on the padding.

    Returns:
      A scalar; 0 if there is no token.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2.
    """
    chex.assert_equal_shape([token_loss, mask])
    length = token_loss.shape[-1] if length is None else length
    responses = token_loss.size // max(token_loss.shape[-1], 1)
    return jnp.sum(keep(token_loss, mask) * _weight(token_loss, mask)) / (max(responses, 1) * length)


def aggregation_weights(aggregate: Callable, mask: jax.Array) -> jax.Array:
    """Returns d aggregate / d token_loss, of the mask's shape: the weight of each token's loss."""
    zeros = jnp.zeros(jnp.shape(mask), jnp.result_type(float))
    return jax.grad(lambda token_loss: aggregate(token_loss, mask))(zeros)


def _weight(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.asarray(mask).astype(as_float(x).dtype)


def _ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns total / weight, 0 where the weight is 0."""
    some = weight > 0
    return jnp.where(some, total / jnp.where(some, weight, 1), 0)
