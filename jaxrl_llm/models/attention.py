"""One attention over parts: the block at hand and any number of past parts, merged exactly."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models.policy import Part


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None = None,
    past: tuple[Part, ...] = (),
) -> jax.Array:
    """Grouped-query softmax attention over the block at hand and the past parts.

    The parts are never concatenated. With scores s_ij of part i, the common maximum m and masks applied,

        output = sum_i sum_j exp(s_ij - m) v_ij  /  sum_i sum_j exp(s_ij - m),

    which equals the softmax over all keys. A part that all samples share is multiplied once: the samples and
    the query heads of one key head become rows of one product for each prompt and key head.

    Args:
      queries: `[B, G, T, H, Dh]`.
      keys: `[B, G, T, K, Dh]` of the block; H is a multiple of K. Seen causally.
      values: `[B, G, T, K, Dh]` of the block.
      mask: `[B, G, T]` bool, which block tokens may be seen; None means all.
      past: parts of one layer, that is with keys and values `[B, G or 1, S, K, Dh]`; every query sees all
        keys under a part's mask.

    Returns:
      `[B, G, T, H, Dh]` in the values' dtype. A query that sees nothing gets zeros. The softmax is in float32
      (float64 for float64 inputs).
    """
    b, g, t, heads, size = queries.shape
    kv_heads = keys.shape[3]
    chex.assert_shape([keys, values], (b, g, t, kv_heads, size))
    chex.assert_is_divisible(heads, kv_heads)
    queries = (queries * size**-0.5).reshape(b, g, t, kv_heads, heads // kv_heads, size)

    causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
    if mask is not None:
        chex.assert_shape(mask, (b, g, t))
        causal = causal & mask[:, :, None, :]
    scores = [_scores(queries, keys, causal)]
    all_values = [values]
    for part in past:
        chex.assert_shape(part.keys, (b, {1, g}, None, kv_heads, size))
        chex.assert_shape(part.mask, part.keys.shape[:3])
        scores.append(_scores(queries, part.keys, part.mask[:, :, None, :]))
        all_values.append(part.values)

    top = jnp.stack([_per_query(s.max(-1)) for s in scores]).max(0)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))  # cancels exactly in the ratio
    total, mixed = 0.0, 0.0
    for s, v in zip(scores, all_values, strict=True):
        weights = jnp.exp(s - _per_row(top, s.shape)[..., None])
        total += _per_query(weights.sum(-1))
        mixed += _mix(weights, v)
    seen = total > 0
    mixed = mixed / jnp.where(seen, total, 1)[..., None]
    return mixed.astype(values.dtype).reshape(b, g, t, heads, size)


# Two layouts of what belongs to a query. Per query: [B, G, T, K, R, ...], with R = H / K query heads for one
# key head. Per row of one product with a part: [B, g, K, N, T, R, ...], with g the part's G axis and g N = G.


def _scores(queries: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns `[B, g, K, N, T, R, S]`: -inf where `seen [B, g, T or 1, S]` is False."""
    b, g, t, k, r, size = queries.shape
    part_g = keys.shape[1]
    queries = queries.reshape(b, part_g, g // part_g, t, k, r, size)
    dtype = jnp.promote_types(queries.dtype, jnp.float32)
    scores = jnp.einsum("bgntkrd,bgskd->bgkntrs", queries, keys, preferred_element_type=dtype)
    return jnp.where(seen[:, :, None, None, :, None, :], scores, -jnp.inf)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the weighted sums of values, per query: `[B, G, T, K, R, Dh]`."""
    mixed = jnp.einsum(
        "bgkntrs,bgskd->bgntkrd", weights.astype(values.dtype), values, preferred_element_type=weights.dtype
    )
    b, g, n, *rest = mixed.shape
    return mixed.reshape(b, g * n, *rest)


def _per_query(rows: jax.Array) -> jax.Array:
    """`[B, g, K, N, T, R]` to `[B, G, T, K, R]`."""
    b, g, k, n, t, r = rows.shape
    return rows.transpose(0, 1, 3, 4, 2, 5).reshape(b, g * n, t, k, r)


def _per_row(queries: jax.Array, scores_shape: tuple[int, ...]) -> jax.Array:
    """`[B, G, T, K, R]` to `[B, g, K, N, T, R]`."""
    b, g, k, n, t, r, _ = scores_shape
    return queries.reshape(b, g, n, t, k, r).transpose(0, 1, 4, 2, 3, 5)
