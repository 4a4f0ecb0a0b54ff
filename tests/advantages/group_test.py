import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group_mean_centered, group_zscore, leave_one_out

ESTIMATORS = [group_mean_centered, group_zscore, leave_one_out]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_estimator_gives_exact_zeros_for_equal_rewards(estimator, size):
    """Pitfall 16: [.1, .1, .1] in float32, and other sizes and values."""
    compiled = jax.jit(estimator)
    for value in (0.1, 0.3, 0.7):
        assert not np.asarray(compiled(np.full(size, value, np.float32))).any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_does_not_explode_on_a_tiny_spread(estimator):
    """Pitfall 16: float32 [.35 x 7, -.25]; a one-pass variance of the seven gives advantages near -4013."""
    rewards = jnp.array([0.35] * 7 + [-0.25], jnp.float32)
    assert np.abs(estimator(rewards)).max() < 3


def test_leave_one_out_subtracts_the_mean_of_the_others():
    rewards = jnp.array([0.35] * 7 + [-0.25], jnp.float32)
    np.testing.assert_allclose(leave_one_out(rewards), [0.6 / 7] * 7 + [-0.6], rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_keeps_groups_apart(estimator):
    """Pitfall 13: two groups of identical text with rewards [0, 0] and [1, 1] have no advantage."""
    assert not np.asarray(jax.vmap(estimator)(jnp.array([[0.0, 0.0], [1.0, 1.0]]))).any()


def test_group_zscore_of_three_scored_samples():
    """Pitfall 15: of [1, None, 0, 0] the estimator sees [1, 0, 0]."""
    root = np.sqrt(2)
    out = group_zscore(jnp.array([1.0, 0.0, 0.0]))
    np.testing.assert_allclose(out, [root, -1 / root, -1 / root], rtol=1e-5)


def test_group_zscore_takes_ddof_and_no_eps():
    rewards = jnp.array([0.0, 1.0, 0.0, 1.0])
    signs = np.array([-1, 1, -1, 1])
    np.testing.assert_allclose(group_zscore(rewards, eps=0.0), signs)
    np.testing.assert_allclose(group_zscore(rewards, ddof=1, eps=0.0), np.sqrt(0.75) * signs, rtol=1e-6)
    assert not np.asarray(group_zscore(jnp.full(3, 0.1), eps=0.0)).any()


def test_estimators_take_integer_rewards():
    np.testing.assert_allclose(group_mean_centered(jnp.array([0, 1])), [-0.5, 0.5])
