import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rewards.shape import kl_shaped_token_rewards, soft_overlong_penalty


def test_soft_overlong_penalty_counts_tokens():
    """Pitfall 29: a response of 90 characters and 20 tokens, limit 32 tokens, has no penalty."""
    assert soft_overlong_penalty(jnp.array([20]), max_length=32, cache=8)[0] == 0
    np.testing.assert_allclose(
        soft_overlong_penalty(jnp.array([28, 32, 40]), max_length=32, cache=8), [-0.5, -1, -1]
    )


def test_soft_overlong_penalty_without_cache_is_a_step():
    np.testing.assert_array_equal(
        soft_overlong_penalty(jnp.array([9, 10, 11]), max_length=10, cache=0), [0, 0, -1]
    )


def test_kl_shaped_token_rewards_puts_the_outcome_on_the_end_token():
    """Pitfall 24: response [a, b, eos, pad]: the outcome reward sits at index 2."""
    logp = jnp.full(4, -1.0)
    out = kl_shaped_token_rewards(jnp.float32(1), logp, logp, jnp.array([1, 1, 1, 0]))
    np.testing.assert_array_equal(out, [0, 0, 1, 0])


def test_kl_shaped_token_rewards_clips_the_outcome_alone():
    out = kl_shaped_token_rewards(
        jnp.float32(7), jnp.zeros(2), jnp.full(2, -40.0), jnp.ones(2), beta=0.1, clip=2.0
    )
    assert out == pytest.approx(jnp.array([-4.0, -2.0]))
