import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import discounted_return_to_go, gae, masked_whiten
from jaxrl_llm.losses import reinforce_loss


def test_discounted_return_to_go_passes_over_masked_tokens():
    """Pitfall 24: rewards [0, 0, 1], mask [1, 0, 1], gamma .5 give [.5, _, 1]."""
    out = discounted_return_to_go(jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[1, 0, 1]]), gamma=0.5)
    np.testing.assert_array_equal(out, [[0.5, 0, 1]])


def test_environment_tokens_carry_return_but_no_loss():
    """Pitfall 24: the token before the environment's is credited; the environment's has no gradient."""
    mask = jnp.array([[1, 0, 1]])
    returns = discounted_return_to_go(jnp.array([[0.0, 0.0, 1.0]]), mask, gamma=0.5)
    grad = jax.grad(lambda logp: reinforce_loss(logp, returns, mask).sum())(jnp.full((1, 3), -1.0))
    np.testing.assert_array_equal(grad, [[-0.5, 0, -1]])


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rng = np.random.default_rng(0)
    rewards, values = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32)
    mask = jnp.array([1, 1, 0, 1, 1, 1, 0])
    out = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    returns = discounted_return_to_go(rewards[None], mask[None], gamma=0.9)[0]
    np.testing.assert_allclose(out.returns, returns, atol=1e-6)
    np.testing.assert_allclose(out.advantages, np.where(mask, returns - values, 0), atol=1e-6)


def test_gae_stops_the_gradient_of_the_values():
    grad = jax.grad(lambda v: gae(jnp.ones(3), v, jnp.ones(3)).advantages.sum())(jnp.zeros(3))
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_masked_whiten_of_one_valid_token_is_zero(eps):
    """Pitfall 1: one valid token through whitening is finite."""
    mask = jnp.zeros((1, 2, 4)).at[0, 0, 1].set(1)
    out = masked_whiten(jnp.full((1, 2, 4), 0.7), mask, eps=eps)
    assert not np.asarray(out).any()


def test_masked_whiten_of_equal_advantages_is_exactly_zero():
    """Pitfall 16: eps is 1e-8, so a remainder of 1e-8 would become 1e-4."""
    assert not np.asarray(masked_whiten(jnp.full((2, 3, 7), 0.1), jnp.ones((2, 3, 7)))).any()


def test_masked_whiten_spreads_advantages_of_responses_over_their_tokens():
    mask = jnp.array([[[1, 1, 0], [1, 0, 0]]])
    out = masked_whiten(jnp.array([[1.0, -2.0]]), mask)
    np.testing.assert_allclose(out, [[[1, 1, 0], [-2, 0, 0]]] / np.sqrt(3), rtol=1e-5)
