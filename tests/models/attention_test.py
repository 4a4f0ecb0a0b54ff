import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.policy import Part


def plain_attend(queries, keys, values, mask, past):
    """The slow twin: for each query alone, one softmax over all the keys that it sees."""
    b, g, t, heads, size = queries.shape
    ratio = heads // keys.shape[3]
    out = np.zeros(queries.shape)
    for i, j, n, h in np.ndindex(b, g, t, heads):
        seen_keys, seen_values = [], []
        for part in past:
            own = j if part.keys.shape[1] > 1 else 0
            seen = np.asarray(part.mask[i, own])
            seen_keys.append(np.asarray(part.keys)[i, own, seen, h // ratio])
            seen_values.append(np.asarray(part.values)[i, own, seen, h // ratio])
        seen = np.asarray(mask[i, j]) & (np.arange(t) <= n)
        seen_keys = np.concatenate([*seen_keys, np.asarray(keys)[i, j, seen, h // ratio]])
        seen_values = np.concatenate([*seen_values, np.asarray(values)[i, j, seen, h // ratio]])
        if not len(seen_keys):
            continue
        scores = seen_keys @ np.asarray(queries)[i, j, n, h] / np.sqrt(size)
        weights = np.exp(scores - scores.max())
        out[i, j, n, h] = weights @ seen_values / weights.sum()
    return out


def inputs(dtype, *, b=2, g=3, t=4, heads=6, kv_heads=2, size=8, s=5, own=3, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(2 * rng.normal(size=shape), dtype)
    lengths = lambda *shape, n: jnp.asarray(np.arange(n) < rng.integers(0, n + 1, (*shape, 1)))
    past = (
        Part(draw(b, 1, s, kv_heads, size), draw(b, 1, s, kv_heads, size), lengths(b, 1, n=s)),
        Part(draw(b, g, own, kv_heads, size), draw(b, g, own, kv_heads, size), lengths(b, g, n=own)),
    )
    block = (draw(b, g, t, heads, size), draw(b, g, t, kv_heads, size), draw(b, g, t, kv_heads, size))
    return *block, lengths(b, g, n=t), past


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("t", [1, 4])
def test_attend_equals_softmax_over_all_keys(dtype, tolerance, t):
    with jax.enable_x64(dtype == "float64"):
        args = inputs(dtype, t=t)
        got = jax.jit(attend)(*args)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, plain_attend(*args), atol=tolerance)


def test_attend_with_a_shared_part_equals_one_repeated_for_every_sample():
    with jax.enable_x64(True):
        queries, keys, values, mask, (shared, own) = inputs("float64")

        def value(queries, keys, values, shared, own, repeat):
            if repeat:
                shared = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=1), shared)
            return jnp.sum(jnp.sin(attend(queries, keys, values, mask, (shared, own))))

        grad = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3, 4), allow_int=True), static_argnums=5)
        for got, want in zip(
            jax.tree.leaves(grad(queries, keys, values, shared, own, False)),
            jax.tree.leaves(grad(queries, keys, values, shared, own, True)),
        ):
            if got.dtype == jnp.float64:  # not the masks' gradients
                np.testing.assert_allclose(got, want, atol=1e-12)


def test_attend_splits_the_past_without_changing_the_result():
    with jax.enable_x64(True):
        queries, keys, values, mask, (shared, own) = inputs("float64")
        cut = lambda part, where: jax.tree.map(lambda x: x[:, :, where], part)
        pieces = (
            cut(shared, slice(3)),
            cut(own, slice(2, None)),
            cut(own, slice(2)),
            cut(shared, slice(3, None)),
        )
        run = jax.jit(lambda past: attend(queries, keys, values, mask, past))
        np.testing.assert_allclose(run(pieces), run((shared, own)), atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_attend_of_a_query_that_sees_nothing_is_zero_with_finite_gradients(scale):
    queries, keys, values, mask, past = inputs("float32")
    queries *= scale
    mask = mask.at[0].set(False)
    past = tuple(part.replace(mask=part.mask.at[0].set(False)) for part in past)

    def loss(queries, keys, values):
        out = attend(queries, keys, values, mask, past)
        return jnp.sum(out**2), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(queries, keys, values)
    assert not np.any(out[0])
    chex.assert_tree_all_finite(grads)
    assert not np.any(grads[0][0])
    assert np.any(grads[2][1])


def test_attend_gradient_is_the_numerical_one():
    with jax.enable_x64(True):
        queries, keys, values, mask, past = inputs("float64", b=1, g=2, t=2, size=2, s=2, own=2)

        @jax.jit
        def f(q, k, v, past_keys, past_values):
            return attend(q, k, v, mask, (past[0].replace(keys=past_keys, values=past_values), past[1]))

        args = (queries, keys, values, past[0].keys, past[0].values)
        jax.test_util.check_grads(f, args, order=1, modes=["rev"], eps=1e-6)


def test_attend_refuses_a_part_of_another_group_size():
    queries, keys, values, mask, (_, own) = inputs("float32")
    with pytest.raises(AssertionError):
        attend(queries, keys, values, mask, (jax.tree.map(lambda x: x[:, :2], own),))
