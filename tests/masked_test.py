import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import masked
from jaxrl_llm.masked import constant_length, sequence_mean, sequence_sum, token_mean

AGGREGATIONS = [token_mean, sequence_mean, sequence_sum, constant_length]


def test_token_mean_ignores_a_fully_masked_row():
    """Pitfall 1: two rows of 4 tokens, masks 1100 and 0000, token loss 1 everywhere."""
    mask = jnp.array([[[1, 1, 0, 0], [0, 0, 0, 0]]])
    value, grad = jax.value_and_grad(token_mean)(jnp.ones((1, 2, 4)), mask)
    assert value == 1.0
    np.testing.assert_array_equal(grad, [[[0.5, 0.5, 0, 0], [0, 0, 0, 0]]])


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_aggregation_of_no_token_is_zero(aggregate):
    """Pitfall 1: an all-zero mask gives 0 and zero gradients, whatever the losses are."""
    value, grad = jax.value_and_grad(aggregate)(jnp.full((1, 2, 4), jnp.nan), jnp.zeros((1, 2, 4)))
    assert value == 0
    np.testing.assert_array_equal(grad, np.zeros((1, 2, 4)))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_token_mean_is_the_same_for_any_split(microbatches):
    """Pitfall 2: 10 tokens of loss 1 and 6 tokens of loss 3 have the token mean 1.75, never 2.0."""
    lengths = jnp.array([[5], [5], [3], [3]])
    mask = jnp.arange(5) < lengths[..., None]
    loss = jnp.where(jnp.arange(4)[:, None, None] < 2, 1.0, 3.0) * jnp.ones((4, 1, 5))
    assert token_mean(loss, mask) == 1.75
    weights = masked.aggregation_weights(token_mean, mask)
    parts = zip(jnp.split(loss, microbatches), jnp.split(weights, microbatches))
    assert sum(jnp.sum(part * weight) for part, weight in parts) == pytest.approx(1.75)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_aggregation_weights_give_the_aggregate(aggregate):
    rng = np.random.default_rng(0)
    mask = jnp.arange(6) < rng.integers(0, 7, (3, 4, 1))
    loss = jnp.asarray(rng.normal(size=mask.shape), jnp.float32)
    weights = masked.aggregation_weights(aggregate, mask)
    np.testing.assert_allclose(jnp.sum(loss * weights), aggregate(loss, mask), rtol=1e-5)


def test_aggregations_weigh_responses_as_their_papers_say():
    """Lengths 1 and 3: each response's share of the loss."""
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 0]]])
    share = lambda f: masked.aggregation_weights(f, mask).sum(-1)[0]
    np.testing.assert_allclose(share(token_mean), [1 / 4, 3 / 4])
    np.testing.assert_allclose(share(sequence_mean), [1 / 2, 1 / 2])
    np.testing.assert_allclose(share(sequence_sum), [1 / 2, 3 / 2])
    np.testing.assert_allclose(share(constant_length), [1 / 8, 3 / 8])


def test_token_mean_weighs_by_a_float_mask():
    assert token_mean(jnp.array([1.0, 5.0]), jnp.array([0.3, 0.1])) == pytest.approx(2.0)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1e6 + 0.1])
def test_masked_center_of_equal_numbers_is_exactly_zero(value):
    """Pitfall 16: the rounded mean of 3 to 64 equal float32 numbers need not be that number."""
    mask = jnp.arange(64) < jnp.arange(3, 65)[:, None]
    x = jnp.where(mask, jnp.float32(value), jnp.nan)
    assert not np.asarray(masked.masked_center(x, mask, axis=1)).any()
    assert not np.asarray(masked.masked_std(x, mask, axis=1)).any()


def test_masked_center_takes_axes_and_skips_what_is_masked():
    x = jnp.array([[1.0, 3.0, jnp.nan], [5.0, jnp.nan, jnp.nan]])
    mask = ~jnp.isnan(x)
    np.testing.assert_array_equal(masked.masked_center(x, mask, axis=1), [[-1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(masked.masked_center(x, mask), [[-2, 0, 0], [2, 0, 0]])


def test_masked_var_is_accurate_far_from_zero():
    """A difference of large sums would lose all digits here."""
    x = jnp.array([1e4, 1e4 + 1, 1e4 + 2], jnp.float32)
    assert masked.masked_var(x) == pytest.approx(2 / 3)
    assert masked.masked_var(x, ddof=1) == pytest.approx(1)


def test_masked_std_has_gradient_zero_without_spread():
    np.testing.assert_array_equal(jax.grad(masked.masked_std)(jnp.full(3, 0.1)), np.zeros(3))


def test_masked_mean_of_nothing_is_zero():
    assert masked.masked_mean(jnp.array([jnp.nan]), jnp.array([False])) == 0


@pytest.mark.parametrize(
    "mask, last", [([1, 1, 0, 0], [0, 1, 0, 0]), ([1, 0, 1, 0], [0, 0, 1, 0]), ([0, 0, 0, 0], [0, 0, 0, 0])]
)
def test_last_valid_marks_the_last_token(mask, last):
    np.testing.assert_array_equal(masked.last_valid(jnp.array(mask)), last)


def test_per_token_spreads_a_number_over_its_tokens():
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(masked.per_token(jnp.array([2.0, 3.0]), mask), [[2, 2, 0], [3, 0, 0]])
    np.testing.assert_array_equal(masked.per_token(jnp.full((2, 3), 4), mask), [[4, 4, 0], [4, 0, 0]])
