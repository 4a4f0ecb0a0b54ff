import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import entropy_bonus, kl_k1, kl_k2, kl_k3, kl_k3_k2grad, token_entropy

ESTIMATORS = [kl_k1, kl_k2, kl_k3, kl_k3_k2grad]
ONES = jnp.ones(1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("logp, ref_logp", [(-120.0, -0.1), (-0.1, -120.0)])
def test_kl_is_finite_for_distant_policies(estimator, logp, ref_logp):
    """Pitfall 25: log-prob -120 against -0.1 in float32."""
    f = lambda logp: estimator(logp, jnp.full(1, ref_logp), ONES)[0]
    value, grad = jax.value_and_grad(f)(jnp.full(1, logp))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_kl_k3_is_exact_where_the_policy_is_the_surer_one():
    value, grad = jax.value_and_grad(lambda x: kl_k3(x, jnp.full(1, -120.0), ONES)[0])(jnp.full(1, -0.1))
    assert (value, grad[0]) == (pytest.approx(118.9), pytest.approx(1.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_of_equal_policies_is_exactly_zero(estimator):
    logp = -jnp.arange(1.0, 6.0) / 3
    assert not np.asarray(estimator(logp, logp, jnp.ones(5))).any()


def test_kl_k3_keeps_its_digits_near_zero():
    """e^d - d - 1 is d^2 / 2 = 5e-7 here; computed as it stands it would be off by a tenth in float32."""
    assert kl_k3(jnp.zeros(1), jnp.full(1, 1e-3), ONES)[0] == pytest.approx(5.0017e-7, rel=1e-3)


def test_kl_estimators_agree_in_expectation():
    """Sums over a small vocabulary weighted by the policy: k1 and k3 give the KL; k2 gives its gradient."""
    logits, ref = jnp.array([0.5, -1.0, 0.2, 1.0]), jax.nn.log_softmax(jnp.array([0.1, 0.3, -0.5, 0.0]))
    logp = jax.nn.log_softmax(logits)
    p, ones = jnp.exp(logp), jnp.ones(4)
    kl = jnp.sum(p * (logp - ref))
    assert jnp.sum(p * kl_k1(logp, ref, ones)) == pytest.approx(float(kl), rel=1e-5)
    assert jnp.sum(p * kl_k3(logp, ref, ones)) == pytest.approx(float(kl), rel=1e-5)

    def exact(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def sampled(logits, estimator):
        return jnp.sum(p * estimator(jax.nn.log_softmax(logits), ref, ones))

    for estimator in (kl_k2, kl_k3_k2grad):
        gradient = jax.grad(sampled)(logits, estimator)
        np.testing.assert_allclose(gradient, jax.grad(exact)(logits), atol=1e-6)


def test_token_entropy_ignores_excluded_tokens():
    logits = jnp.array([[1.0, 1.0, -jnp.inf], [0.0, 0.0, 0.0], [jnp.nan, 0.0, 0.0]])
    mask = jnp.array([1, 1, 0])
    value, grad = jax.value_and_grad(lambda z: token_entropy(z, mask).sum())(logits)
    assert value == pytest.approx(np.log(2) + np.log(3))
    assert np.isfinite(grad).all()


def test_entropy_bonus_lets_gradient_through_the_entropy():
    grad = jax.grad(lambda h: entropy_bonus(h, jnp.array([1, 0]), coef=0.01).sum())(jnp.ones(2))
    np.testing.assert_allclose(grad, [-0.01, 0])
