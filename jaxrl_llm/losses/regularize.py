"""Terms added to the loss of each token: divergence from the reference, entropy."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.masked import LOG_RATIO_LIMIT, keep, log_ratio, valid
from jaxrl_llm.signature import scope


@scope("sequence")
def kl_k1(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """The plain estimator of KL(policy || reference) on the policy's own tokens: unbiased, of either sign.

    k1_t = logp_t - ref_logp_t. Its gradient, 1, is zero in expectation: use it in rewards, not as a loss.

    Args:
      logp: `[T]` under the policy being trained.
      ref_logp: `[T]` under the reference.
      mask: `[T]`.

    Returns:
      `[T]` nats, 0 outside the mask.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    _check(logp, ref_logp, mask)
    return log_ratio(logp, ref_logp, mask)


@scope("sequence")
def kl_k2(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Half the squared log-ratio: biased as a value, but its gradient is that of the KL in expectation.

    k2_t = (logp_t - ref_logp_t)^2 / 2, with gradient logp_t - ref_logp_t.

    Args:
      logp: `[T]` under the policy being trained.
      ref_logp: `[T]` under the reference.
      mask: `[T]`.

    Returns:
      `[T]`, at least 0; 0 outside the mask.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    _check(logp, ref_logp, mask)
    return 0.5 * jnp.square(log_ratio(logp, ref_logp, mask))


@scope("sequence")
def kl_k3(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """The estimator of KL(policy || reference) that is unbiased and never negative.

    d = ref_logp_t - logp_t,  k3_t = e^d - d - 1, with gradient 1 - e^d.

    Args:
      logp: `[T]` under the policy being trained.
      ref_logp: `[T]` under the reference.
      mask: `[T]`.

    Returns:
      `[T]`, at least 0; 0 outside the mask. A `d` above 20 counts as 20 and has no gradient.

    Source: Schulman 2020, "Approximating KL divergence"; GRPO (arXiv:2402.03300), eq. 4.
    """
    _check(logp, ref_logp, mask)
    d = jnp.minimum(log_ratio(ref_logp, logp, mask), LOG_RATIO_LIMIT)
    return jnp.expm1(d) - d  # e^d - 1 would cancel to nothing for the small d of early training


@scope("sequence", stop_gradient=True)
def kl_k3_k2grad(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """The value of k3 with the gradient of k2: each the better one of its kind.

    k2 - sg(k2) + sg(k3)

    Args:
      logp: `[T]` under the policy being trained.
      ref_logp: `[T]` under the reference.
      mask: `[T]`.

    Returns:
      `[T]`, 0 outside the mask.

    Source: Schulman 2020, "Approximating KL divergence", combined as in the public trainers.
    """
    k2, k3 = kl_k2(logp, ref_logp, mask), kl_k3(logp, ref_logp, mask)
    return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2))


@scope("sequence")
def token_entropy(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Entropy of the next-token distribution.

    H_t = -sum_v p_tv log p_tv, with p = softmax(logits)

    Args:
      logits: `[T, V]`; -inf excludes a token.
      mask: `[T]`.

    Returns:
      `[T]` nats, 0 outside the mask; log V for equal logits.

    Source: Shannon 1948; as a bonus: A3C, Mnih et al. 2016 (arXiv:1602.01783).
    """
    chex.assert_rank([logits, mask], [2, 1])
    chex.assert_equal_shape_prefix([logits, mask], 1)
    logp = jax.nn.log_softmax(keep(logits, valid(mask)[:, None]))
    p = jnp.exp(logp)
    return keep(-jnp.sum(p * jnp.where(p > 0, logp, 0), axis=-1), mask)


@scope("sequence")
def entropy_bonus(entropy: jax.Array, mask: jax.Array, *, coef: float = 0.001) -> jax.Array:
    """Minus a coefficient times the entropy: the loss falls as the policy spreads.

    -coef * H_t

    Args:
      entropy: `[T]` nats; the gradient flows through it.
      mask: `[T]`.
      coef: weight of the bonus.

    Returns:
      `[T]`, 0 outside the mask.

    Source: A3C, Mnih et al. 2016 (arXiv:1602.01783), section 4.
    """
    chex.assert_rank(entropy, 1)
    chex.assert_equal_shape([entropy, mask])
    return -coef * keep(entropy, mask)


def _check(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> None:
    chex.assert_rank(logp, 1)
    chex.assert_equal_shape([logp, ref_logp, mask])
