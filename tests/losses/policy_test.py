import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import ppo_clip, reinforce_loss

ONES = jnp.ones(1)


def _ppo(ratio, advantage, **bounds):
    """Returns value and gradient of one token."""
    f = lambda logp: ppo_clip(logp, jnp.zeros(1), jnp.full(1, advantage), ONES, **bounds)[0]
    value, grad = jax.value_and_grad(f)(jnp.log(jnp.full(1, ratio)))
    return float(value), float(grad[0])


@pytest.mark.parametrize(
    "ratio, advantage, value, gradient",
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_clips_on_one_side_of_each_sign(ratio, advantage, value, gradient):
    assert _ppo(ratio, advantage) == pytest.approx((value, gradient), abs=1e-6)


def test_ppo_clip_has_its_whole_gradient_at_the_bound():
    """With clip_high = 0 the on-policy ratio stands on the bound, where a maximum would halve it."""
    assert _ppo(1.0, 2.0, clip_high=0.0) == (-2.0, -2.0)
    assert _ppo(1.0, -2.0, clip_low=0.0) == (2.0, 2.0)


def test_ppo_clip_takes_one_bound_on_each_side():
    assert _ppo(1.25, 1.0, clip_high=0.28) == pytest.approx((-1.25, -1.25))
    assert _ppo(1.5, 1.0, clip_high=0.28) == pytest.approx((-1.28, 0.0))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [120.0, -120.0])
def test_ppo_clip_is_finite_for_any_ratio(advantage, difference):
    f = lambda logp: ppo_clip(logp, jnp.zeros(1), jnp.full(1, advantage), ONES)[0]
    value, grad = jax.value_and_grad(f)(jnp.full(1, difference))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_reinforce_loss_has_gradient_minus_the_advantage():
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    f = lambda logp, advantages: reinforce_loss(logp, advantages, mask).sum()
    of_logp, of_advantages = jax.grad(f, (0, 1))(jnp.full((2, 3), -0.5), jnp.array([2.0, -1.0]))
    np.testing.assert_array_equal(of_logp, [[-2, -2, 0], [1, 0, 0]])
    np.testing.assert_array_equal(of_advantages, [0, 0])
