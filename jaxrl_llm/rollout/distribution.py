"""The sampling distribution: one definition for the sampler and the trainer.

The sampler draws from `filtered_logits`; the trainer takes log-probabilities under the same function, so
the ratio of an on-policy sample is 1 at every temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Iterable

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

EXCLUDED = -1e30  # finite, so that differences of excluded logits are not NaN
STOP_CAPACITY = 8
BLOCK = 256  # entries of the vocabulary that one partial sum of `draw` covers


@flax.struct.dataclass
class Sampling:
    """How tokens are drawn. Every field is traced: changing a value compiles nothing."""

    temperature: jax.Array  # [] float32; 0 is greedy, for evaluation only
    top_k: jax.Array  # [] int32; 0 keeps all
    top_p: jax.Array  # [] float32 in (0, 1]
    stop_ids: jax.Array  # [STOP_CAPACITY or a multiple] int32, unused places -1


def sampling(
    stop_ids: Iterable[int], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Sampling:
    """Returns a `Sampling` of numpy values.

    Args:
      stop_ids: ids that end a response; any of them does.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k largest logits (and those equal to the k-th); 0 keeps all.
      top_p: then keeps the smallest set of largest logits that has at least this probability.

    Raises:
      ValueError: a value out of its range.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}; it must be 0 (keep all) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie in (0, 1], 1 keeps all")
    ids = sorted({int(i) for i in stop_ids})
    padded = np.full(max(1, -(-len(ids) // STOP_CAPACITY)) * STOP_CAPACITY, -1, np.int32)
    padded[: len(ids)] = ids
    return Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p), padded)


def filtered_logits(logits: jax.Array, how: Sampling, taken: jax.Array | None = None) -> jax.Array:
    """Returns the logits of the sampling distribution, `EXCLUDED` outside the kept set.

    z = logits / temperature (temperature 0 counts as 1 here: greedy is a matter of `draw`); then top-k; then
    top-p on what top-k left. The set is found by a threshold, so equal logits are kept or dropped together.

    Args:
      logits: `[..., V]`.
      how: temperature, top_k, top_p.
      taken: `[...]` int, tokens that are kept in any case. The trainer gives the sampled tokens: after an
        update one of them may have left the set, and its log-probability must stay finite.
    """
    temperature = jnp.where(how.temperature > 0, how.temperature, 1).astype(logits.dtype)

    def filtered(logits):
        keep = _kept(jax.lax.stop_gradient(logits), temperature, how)
        if taken is not None:
            keep |= jnp.arange(logits.shape[-1]) == taken[..., None]
        return jnp.where(keep, logits / temperature, EXCLUDED)

    filters = (how.top_k > 0) | (how.top_p < 1)
    return jax.lax.cond(filters, filtered, lambda logits: logits / temperature, logits)


def _kept(logits: jax.Array, temperature: jax.Array, how: Sampling) -> jax.Array:
    """Returns the set `[..., V]` bool that top-k and top-p keep.

    No sort: the smallest kept logit is found exactly, by bisection over the bits of a float, in as many
    passes as it has bits.
    """
    order = _ordered_bits(logits)
    top = jnp.max(order, axis=-1, keepdims=True)

    def largest(holds):
        """Returns the largest threshold, up to the top, for which `holds(order >= threshold)`."""

        def halve(_, ends):
            low, high = ends
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            right = holds(order >= middle)
            return jnp.where(right, middle, low), jnp.where(right, high, middle - 1)

        low = jnp.full_like(top, jnp.iinfo(order.dtype).min)
        return jax.lax.fori_loop(0, jnp.iinfo(order.dtype).bits, halve, (low, top))[0]

    k = jnp.where(how.top_k > 0, how.top_k, logits.shape[-1])
    of_k = order >= largest(lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= k)
    weights = jnp.where(of_k, jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature), 0)
    # The slack absorbs rounding of the sums: probabilities .5, .3, .2 at top_p .8 keep two.
    mass = (how.top_p - 1e-6) * jnp.sum(weights, axis=-1, keepdims=True)
    of_p = order >= largest(lambda kept: jnp.sum(jnp.where(kept, weights, 0), axis=-1, keepdims=True) >= mass)
    return of_k & (of_p | (how.top_p >= 1))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Returns signed integers in the same order as the floats `x`."""
    kind = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(kind).max, bits)


def token_logp(logits: jax.Array, tokens: jax.Array, how: Sampling) -> jax.Array:
    """Returns the log-probabilities `[...]` of `tokens [...]` under the sampling distribution."""
    z = filtered_logits(logits, how, taken=tokens)
    taken = jnp.take_along_axis(z, tokens[..., None], axis=-1)[..., 0]
    return taken - jax.nn.logsumexp(z, axis=-1)


def entropy(logits: jax.Array, how: Sampling, taken: jax.Array | None = None) -> jax.Array:
    """Returns the entropy `[...]` in nats of the sampling distribution."""
    z = filtered_logits(logits, how, taken)
    logp = z - jax.nn.logsumexp(z, axis=-1, keepdims=True)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def draw(logits: jax.Array, uniform: jax.Array, how: Sampling) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row by inverting the cumulative distribution.

    One uniform number a row and sums over blocks of the vocabulary replace V Gumbel draws: the same
    distribution at a twentieth of the cost on a CPU.

    Args:
      logits: `[..., V]` raw logits.
      uniform: `[...]` in [0, 1).
      how: temperature (0: the most likely token), top_k, top_p.

    Returns:
      tokens `[...]` int32 and their log-probabilities `[...]` (temperature 0: those at temperature 1).
    """
    chex.assert_equal_shape_prefix([logits, uniform], logits.ndim - 1)
    z = filtered_logits(logits, how)
    top = jnp.max(z, axis=-1, keepdims=True)
    weights = jnp.exp(z - top)
    pad = -weights.shape[-1] % BLOCK
    blocks = jnp.pad(weights, [(0, 0)] * (z.ndim - 1) + [(0, pad)]).reshape(*z.shape[:-1], -1, BLOCK)
    running = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    block, left = _invert(running, uniform * running[..., -1])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    offset, _ = _invert(jnp.cumsum(inside, axis=-1), left)
    drawn = jnp.where(how.temperature > 0, block * BLOCK + offset, jnp.argmax(z, axis=-1))
    taken = jnp.take_along_axis(z, drawn[..., None], axis=-1)[..., 0]
    return drawn.astype(jnp.int32), taken - top[..., 0] - jnp.log(running[..., -1])


def _invert(running: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first index whose running sum exceeds `target`, and what of `target` is left there.

    The target is held under the last sum, so rounding never picks an entry of weight zero.
    """
    end = running[..., -1]
    target = jnp.minimum(target, end * (1 - 2 * jnp.finfo(end.dtype).eps))
    index = jnp.sum(running <= target[..., None], axis=-1)
    before = jnp.take_along_axis(running, jnp.maximum(index - 1, 0)[..., None], axis=-1)[..., 0]
    return index, target - jnp.where(index > 0, before, 0)
