import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.distribution import draw, entropy, filtered_logits, sampling, token_logp


def logits_of(*probabilities):
    return jnp.log(jnp.array(probabilities, jnp.float32))


def test_token_logp_divides_by_the_temperature():
    """Pitfall 7: logits [2, 0] at temperature 0.5."""
    logp = token_logp(jnp.array([2.0, 0.0]), jnp.array(0), sampling([], temperature=0.5))
    np.testing.assert_allclose(logp, -0.01815, atol=1e-5)


def test_token_logp_is_renormalised_over_the_nucleus():
    """Pitfall 7: p = [.5, .3, .2] with top_p 0.8 keeps two tokens."""
    logits, how = logits_of(0.5, 0.3, 0.2), sampling([], top_p=0.8)
    np.testing.assert_allclose(token_logp(logits, jnp.array(0), how), np.log(0.625), atol=1e-6)
    _, logp = draw(logits, jnp.array(0.1), how)
    np.testing.assert_allclose(logp, np.log(0.625), atol=1e-6)
    tokens, _ = draw(jnp.tile(logits, (1000, 1)), jnp.linspace(0, 0.9999, 1000), how)
    assert set(np.asarray(tokens)) == {0, 1}


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.6), (5, 0.7), (1, 1.0), (0, 1e-6)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_filtered_logits_agrees_with_a_loop_over_the_sorted_vocabulary(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(4, 11)).astype(np.float32) * 2
    got = jax.nn.softmax(
        filtered_logits(jnp.array(logits), sampling([], temperature=temperature, top_k=top_k, top_p=top_p))
    )
    for row, p in zip(logits / temperature, np.asarray(got)):
        order = np.argsort(-row)[: top_k or len(row)]
        weights = np.exp(row[order] - row.max())
        weights /= weights.sum()
        kept, total = [], 0.0
        for token, weight in zip(order, weights):
            if not kept or total < top_p - 1e-6:
                kept.append(token)
            total += weight
        want = np.zeros(len(row))
        want[kept] = np.exp(row[kept] - row.max())
        np.testing.assert_allclose(p, want / want.sum(), atol=1e-6)


def test_filtered_logits_keeps_a_taken_token_that_left_the_set():
    logits, how = logits_of(0.5, 0.3, 0.2), sampling([], top_k=1)
    value, gradient = jax.value_and_grad(lambda z: token_logp(z, jnp.array(2), how))(logits)
    np.testing.assert_allclose(value, np.log(0.2 / 0.7), atol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("size", [3, 256, 257, 1000])
def test_draw_follows_the_distribution(size):
    logits = jax.random.normal(jax.random.key(0), (size,)) * 2
    uniform = (jnp.arange(200_000) + 0.5) / 200_000
    counts = np.zeros(size)
    one = jax.jit(lambda u: draw(jnp.broadcast_to(logits, (4000, size)), u, sampling([])))
    for part in uniform.reshape(-1, 4000):
        tokens, logp = one(part)
        np.testing.assert_allclose(logp, jax.nn.log_softmax(logits)[tokens], atol=2e-5)
        counts += np.bincount(np.asarray(tokens), minlength=size)
    # Evenly spaced uniforms hit each token within one count of its share, up to float32 sums.
    np.testing.assert_allclose(counts / 200_000, jax.nn.softmax(logits), atol=2e-5)


def test_draw_never_takes_an_excluded_token_at_the_ends():
    logits = jnp.array([-1e30] * 300 + [0.0, 1.0] + [-1e30] * 300)
    for uniform in (0.0, np.nextafter(np.float32(1), np.float32(0))):
        token, _ = draw(logits, jnp.float32(uniform), sampling([]))
        assert int(token) in (300, 301)


def test_draw_at_temperature_zero_takes_the_most_likely():
    logits = jax.random.normal(jax.random.key(1), (5, 700))
    tokens, logp = draw(logits, jnp.linspace(0, 0.99, 5), sampling([], temperature=0))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))
    np.testing.assert_allclose(logp, jnp.max(jax.nn.log_softmax(logits), -1), atol=1e-5)


def test_entropy_of_equal_logits_is_the_log_of_the_kept_count():
    np.testing.assert_allclose(entropy(jnp.zeros(8), sampling([])), np.log(8), atol=1e-6)
    np.testing.assert_allclose(entropy(logits_of(0.4, 0.4, 0.2), sampling([], top_k=2)), np.log(2), atol=1e-6)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.2}])
def test_sampling_refuses_values_out_of_range(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        sampling([], **bad)
