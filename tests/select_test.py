import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import token_mean
from jaxrl_llm.select import masked_is_weights, overlong_filter, truncated_is_weights

OLD = jnp.log(jnp.array([1.5, 3.0, 0.25, 1.0]))
SAMPLED, MASK = jnp.zeros(4), jnp.array([1, 1, 1, 0])


def test_truncated_is_weights_caps_tokens_or_the_whole_response():
    np.testing.assert_allclose(truncated_is_weights(OLD, SAMPLED, MASK), [1.5, 2, 0.25, 0], rtol=1e-6)
    whole = truncated_is_weights(OLD, SAMPLED, MASK, level="sequence")
    np.testing.assert_allclose(whole, [1.125, 1.125, 1.125, 0], rtol=1e-6)


def test_masked_is_weights_drops_what_lies_outside_the_band():
    np.testing.assert_allclose(masked_is_weights(OLD, SAMPLED, MASK), [1.5, 0, 0, 0], rtol=1e-6)
    rejected = masked_is_weights(OLD, SAMPLED, MASK, weighted=False)
    np.testing.assert_array_equal(rejected, [1, 0, 0, 0])
    mean = masked_is_weights(OLD, SAMPLED, MASK, level="geometric")
    np.testing.assert_allclose(mean, np.array([1, 1, 1, 0]) * 1.125 ** (1 / 3), rtol=1e-6)


def test_weights_refuse_an_unknown_level():
    with pytest.raises(ValueError, match="level is 'tokens'; did you mean 'token'"):
        truncated_is_weights(OLD, SAMPLED, MASK, level="tokens")
    with pytest.raises(ValueError, match="level is 'geometric'; known: sequence, token"):
        truncated_is_weights(OLD, SAMPLED, MASK, level="geometric")
    with pytest.raises(ValueError, match="did you mean 'sequence'"):
        masked_is_weights(OLD, SAMPLED, MASK, level="sequnce")


def test_overlong_filter_of_truncated_responses_leaves_loss_zero():
    mask = jnp.ones((2, 3), bool)
    filtered = overlong_filter(mask, jnp.array([True, True]))
    assert filtered.dtype == bool and not filtered.any()
    assert token_mean(jnp.ones((1, 2, 3)), filtered[None]) == 0
