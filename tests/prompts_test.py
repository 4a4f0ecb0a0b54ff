import jax.numpy as jnp
import numpy as np

from jaxrl_llm.prompts import dynamic_sampling_keep, take_kept


def test_dynamic_sampling_keep_passes_over_unscored_responses():
    rewards = jnp.array([[1, jnp.nan, 1, 1], [1, jnp.nan, 0, 0], [jnp.nan] * 4])
    np.testing.assert_array_equal(dynamic_sampling_keep(rewards), [False, True, False])


def test_take_kept_takes_the_first_kept_in_order():
    """A batch of 4; two rounds of 8 groups keep 3 each."""
    first = [False, True, False, False, True, False, True, False]
    second = [True, False, False, True, False, False, False, True]
    assert take_kept([first, second], 4) == [(0, 1), (0, 4), (0, 6), (1, 0)]


def test_take_kept_gives_fewer_when_rounds_run_out():
    """Pitfall 20: a constant reward keeps nothing, and the batch ends short instead of waiting."""
    assert take_kept([[False] * 8] * 10, 4) == []
    assert take_kept([[True, False]], 4) == [(0, 0)]
