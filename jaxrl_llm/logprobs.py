"""Log-probabilities and entropies of tokens, with the logits of only a chunk of them at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.rollout.distribution import Sampling, filtered_logits

Head = Callable[..., jax.Array]


class _Plan(NamedTuple):
    """Which tokens share a chunk. Chunk i takes the columns [i width, (i + 1) width) of `order`."""

    order: jax.Array  # [B, S'] int32: indices of the tokens under the mask, then S, which is no token
    chunks: jax.Array  # [] int32: chunks that have a token


class _Stats(NamedTuple):
    """What is known of each token, `[B, S]`; 0 outside the mask."""

    logp: jax.Array
    entropy: jax.Array | None
    log_normalizer: jax.Array  # log of the sum of exponentials of the filtered logits


def token_logprobs(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
    how: Sampling,
    *,
    entropy: bool,
    chunk: int,
) -> dict[str, jax.Array]:
    """Log-probabilities of tokens under the sampling distribution, and its entropies.

    With z the filtered logits, p = softmax(z) and H its entropy:

        logp = z[token] - logsumexp(z),            d logp / d z_v = [v = token] - p_v
        H = -sum_v p_v log p_v,                    d H / d z_v = -p_v (log p_v + H)

    The backward pass computes the logits of a chunk once more and forms these products directly. Between the
    passes two numbers a token are kept. Tokens outside the mask cost nothing but the filling of a last chunk.

    Args:
      head: `hidden [..., D] -> logits [..., V]`. Arrays that it closes over get their gradients.
      hidden: `[B, S, D]`.
      tokens: `[B, S]` int.
      mask: `[B, S]` bool. A chunk has the same number of tokens of every row, so that rows on several devices
        stay there.
      how: the sampling distribution; a constant, without gradient.
      entropy: whether to compute `entropy`.
      chunk: tokens whose logits are held at one time, but at least one of each row.

    Returns:
      `logp` and, if asked, `entropy`, `[B, S]`; 0 outside the mask. Only first derivatives, in reverse mode.
    """
    chex.assert_rank([hidden, tokens, mask], [3, 2, 2])
    chex.assert_equal_shape_prefix([hidden, tokens, mask], 2)
    rows, length = tokens.shape
    count = -(-length // max(chunk // rows, 1))
    width = -(-length // count)  # the same for all chunks, rather than a last one that is mostly empty
    head, used = jax.closure_convert(head, hidden[:, :width])
    find = lambda row: jnp.nonzero(row, size=count * width, fill_value=length)[0]
    plan = _Plan(jax.vmap(find)(mask), -(-jnp.max(jnp.sum(mask, axis=1)) // width))
    stats = _stats(head, width, entropy, used, hidden, tokens, plan, how)
    return {"logp": stats.logp} | ({"entropy": stats.entropy} if entropy else {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _stats(
    head: Head,
    width: int,
    entropy: bool,
    used: Sequence[jax.Array],
    hidden: jax.Array,
    tokens: jax.Array,
    plan: _Plan,
    how: Sampling,
) -> _Stats:
    def of_chunk(i: jax.Array, stats: _Stats) -> _Stats:
        index = _columns(plan.order, i, width)
        taken = _take(tokens, index)
        z = filtered_logits(head(_take(hidden, index), *used), how, taken)
        total = jax.nn.logsumexp(z, axis=-1)
        logp = jnp.take_along_axis(z, taken[..., None], axis=-1)[..., 0] - total
        spread = None
        if entropy:
            of_all = z - total[..., None]
            spread = -jnp.sum(jnp.exp(of_all) * of_all, axis=-1)
        return jax.tree.map(lambda to, x: _put(to, index, x), stats, _Stats(logp, spread, total))

    dtype = jax.eval_shape(head, hidden[:, :width], *used).dtype
    zeros = jnp.zeros(tokens.shape, dtype)
    return jax.lax.fori_loop(0, plan.chunks, of_chunk, _Stats(zeros, zeros if entropy else None, zeros))


def _forward(head, width, entropy, used, hidden, tokens, plan, how):
    stats = _stats(head, width, entropy, used, hidden, tokens, plan, how)
    return stats, (used, hidden, tokens, plan, how, stats)


def _backward(head, width, entropy, residuals, cotangents):
    used, hidden, tokens, plan, how, stats = residuals

    def of_chunk(i: jax.Array, gradients: tuple) -> tuple:
        index = _columns(plan.order, i, width)
        taken = _take(tokens, index)
        of = lambda x: _take(x, index)[..., None]
        z, pull = jax.vjp(
            lambda rows, *used: filtered_logits(head(rows, *used), how, taken), _take(hidden, index), *used
        )
        logp = z - of(stats.log_normalizer)
        p = jnp.exp(logp)
        d_z = of(cotangents.logp) * ((jnp.arange(z.shape[-1]) == taken[..., None]) - p)
        if entropy:
            d_z -= of(cotangents.entropy) * p * (logp + of(stats.entropy))
        d_rows, *d_used = pull(d_z)
        return jax.tree.map(jnp.add, gradients[0], d_used), _put(gradients[1], index, d_rows)

    zeros = jax.tree.map(jnp.zeros_like, (list(used), hidden))
    d_used, d_hidden = jax.lax.fori_loop(0, plan.chunks, of_chunk, zeros)
    return d_used, d_hidden, None, None, None


_stats.defvjp(_forward, _backward)


def _columns(order: jax.Array, i: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(order, i * width, width, axis=1)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `x [B, S, ...]` at `index [B, N]`, 0 where that is beyond S."""
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def _put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `x [B, S, ...]` with `values` at `index [B, N]`; those beyond S are dropped."""
    return x.at[jnp.arange(x.shape[0])[:, None], index].set(values, mode="drop")
