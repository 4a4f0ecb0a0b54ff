"""Chunked log-probabilities against whole logits and automatic differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.rollout import distribution
from jaxrl_llm.rollout.distribution import sampling

ROWS, LENGTH, WIDTH, VOCABULARY, PADDED = 2, 11, 6, 29, 32
PLAIN = sampling((), temperature=0.7)
FILTERED = sampling((), temperature=0.7, top_k=9, top_p=0.8)


def head(params, hidden):
    """A head with a scale, a bias, and ids that only fill the vocabulary up; one parameter is unused."""
    logits = (hidden * params["scale"]) @ params["weight"].T + params["bias"]
    return jnp.where(jnp.arange(PADDED) < VOCABULARY, logits, -1e30)


def inputs(dtype, fill=0.7):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    params = {"weight": draw(PADDED, WIDTH), "scale": draw(WIDTH), "bias": draw(PADDED), "unused": draw(3)}
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    return params, draw(ROWS, LENGTH, WIDTH), tokens, rng.random((ROWS, LENGTH)) < fill


def whole(params, hidden, tokens, mask, how):
    logits = head(params, hidden)
    logp = distribution.token_logp(logits, tokens, how)
    return {
        "logp": jnp.where(mask, logp, 0),
        "entropy": jnp.where(mask, distribution.entropy(logits, how, tokens), 0),
    }


def chunked(params, hidden, tokens, mask, how, *, entropy=True, chunk=6):
    of_hidden = functools.partial(head, params)
    return token_logprobs(of_hidden, hidden, tokens, mask, how, entropy=entropy, chunk=chunk)


def value_and_grad(arrays, params, hidden, tokens, mask, how):
    """Gradients of a sum with another weight for each number."""
    weights = np.random.default_rng(1).normal(size=(2, ROWS, LENGTH))

    def total(params, hidden):
        made = arrays(params, hidden, tokens, mask, how)
        return sum(jnp.sum(made[name] * w) for name, w in zip(made, weights)), made

    (_, made), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(params, hidden)
    return made, gradients


def close(got, want, rtol):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("how", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("float64", 1e-12)])
def test_token_logprobs_equals_whole_logits_and_their_gradients(how, dtype, rtol):
    with jax.enable_x64(dtype == "float64"):
        args = (*inputs(dtype), how)
        want = jax.jit(functools.partial(value_and_grad, whole))(*args)
        for chunk in (1, 6, 8, 512):  # 11 tokens a row in chunks of 1, 3, 4 and 11
            got = jax.jit(functools.partial(value_and_grad, functools.partial(chunked, chunk=chunk)))(*args)
            close(got, want, rtol)


def test_token_logprobs_without_entropy_has_the_gradient_of_logp():
    args = (*inputs("float32"), FILTERED)
    only = lambda arrays: lambda *a: {"logp": arrays(*a)["logp"]}
    got = jax.jit(functools.partial(value_and_grad, functools.partial(chunked, entropy=False)))(*args)
    close(got, jax.jit(functools.partial(value_and_grad, only(whole)))(*args), 1e-5)


def test_token_logprobs_excluded_tokens_have_no_gradient():
    """Under top-k 1 the only kept logit has log-probability 0 whatever it is; a taken token is kept too."""
    params, hidden, tokens, _ = inputs("float32")
    how, mask = sampling((), top_k=1), np.ones((ROWS, LENGTH), bool)
    best = np.asarray(jnp.argmax(head(params, hidden), axis=-1), np.int32)
    made, gradients = value_and_grad(chunked, params, hidden, best, mask, how)
    np.testing.assert_array_equal(made["logp"], 0)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))
    _, (d_params, _) = value_and_grad(chunked, params, hidden, tokens, mask, how)
    reached = np.isin(np.arange(PADDED), np.concatenate([best.ravel(), tokens.ravel()]))
    assert not np.asarray(d_params["bias"])[~reached].any()


def test_token_logprobs_outside_the_mask_are_zero_without_gradient():
    params, hidden, tokens, mask = inputs("float32", fill=0.5)
    poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
    made, (_, d_hidden) = value_and_grad(chunked, params, poisoned, tokens, mask, PLAIN)
    for x in (*made.values(), d_hidden):
        assert not np.asarray(x)[~mask].any()
    # A token outside the mask may fill a chunk up, but it adds nothing to the gradient of a parameter.
    got = value_and_grad(chunked, params, poisoned, tokens, mask, PLAIN)
    close(got, value_and_grad(chunked, params, hidden, tokens, mask, PLAIN), 0)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_token_logprobs_of_an_empty_and_of_a_full_mask(fill):
    args = (*inputs("float32", fill), PLAIN)
    close(value_and_grad(chunked, *args), value_and_grad(whole, *args), 1e-5)


def test_token_logprobs_computes_only_chunks_that_have_tokens():
    """Packed: 3 of 11 tokens under the mask in a row are one chunk of 3, wherever they are."""
    params, hidden, tokens, _ = inputs("float32")
    mask = np.zeros((ROWS, LENGTH), bool)
    mask[:, [1, 6, 10]] = True
    chunks = []

    def counting(params, hidden):
        jax.debug.callback(lambda: chunks.append(hidden.shape))
        return head(params, hidden)

    def total(params):
        made = token_logprobs(
            functools.partial(counting, params), hidden, tokens, mask, PLAIN, entropy=True, chunk=6
        )
        return jnp.sum(made["logp"]) + jnp.sum(made["entropy"])

    jax.block_until_ready(jax.jit(total)(params))
    jax.effects_barrier()
    assert chunks == [(ROWS, 3, WIDTH)]
    jax.block_until_ready(jax.jit(jax.grad(total))(params))
    jax.effects_barrier()
    assert chunks == [(ROWS, 3, WIDTH)] * 3  # once forward, once backward


def test_token_logprobs_holds_logits_of_a_chunk_only():
    """Pitfall 25: no [tokens, V] array, forward or backward, and two matrix products backward."""
    args = (*inputs("float32"), PLAIN)
    for arrays in (chunked, functools.partial(value_and_grad, chunked)):
        text = str(jax.make_jaxpr(arrays)(*args))
        assert f"f32[{ROWS},3,{PADDED}]" in text
        for tokens in (f"{ROWS},{LENGTH}", f"{ROWS},12", f"{ROWS * LENGTH}", f"{ROWS * 12}"):
            assert f"[{tokens},{PADDED}]" not in text
