import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import DecoderConfig, Llama3Scaling, decoder, param_shapes
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.policy import Block, Part

EXACT = pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])


@functools.cache
def tiny_policy(dtype="float32", **changes):
    policy = decoder(tiny(50, dtype=dtype, param_dtype=dtype, **changes))
    return policy, jax.jit(policy.init)(jax.random.key(0))


def draw_tokens(*shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, 50, shape))


def forward(policy, params, tokens, mask=None):
    """The plain way: every sequence from its first token, nothing cached or shared."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    return policy.apply(params, [Block(tokens, positions, mask)])[0]


def with_prompt(policy, params, prompts, lengths, responses):
    """Hidden states of responses `[B, G, T]` to prompts `[B, P]` that ran before them."""
    mask = (jnp.arange(prompts.shape[-1]) < lengths[:, None])[:, None]
    prompt = forward(policy, params, prompts[:, None], mask)
    positions = jnp.broadcast_to(jnp.arange(responses.shape[-1]), responses.shape) + lengths[:, None, None]
    past = (Part(prompt.keys, prompt.values, mask),)
    return policy.apply(params, [Block(responses, positions)], past)[0].hidden


@EXACT
def test_apply_token_by_token_with_a_cache_equals_the_full_forward(dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        policy, params = tiny_policy(dtype)
        tokens = draw_tokens(2, 1, 12)

        @jax.jit
        def step(cache, t):
            token = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=2)
            [out] = policy.apply(params, [Block(token, jnp.full((2, 1, 1), t))], (cache,))
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, t, axis=3)
            seen = cache.mask.at[..., t].set(True)
            return Part(write(cache.keys, out.keys), write(cache.values, out.values), seen), out.hidden

        empty = jnp.full((2, 2, 1, 12, 2, 16), 1e3, dtype)  # what is not written yet must not be seen
        cache, hidden = Part(empty, empty, jnp.zeros((2, 1, 12), bool)), []
        for t in range(12):
            cache, h = step(cache, t)
            hidden.append(h)
        want = jax.jit(lambda: forward(policy, params, tokens))()
        np.testing.assert_allclose(np.concatenate(hidden, axis=2), want.hidden, atol=tolerance)
        np.testing.assert_allclose(cache.keys, want.keys, atol=tolerance)


@EXACT
def test_apply_with_a_shared_prompt_equals_whole_sequences(dtype, tolerance):
    """Values, and gradients of every parameter."""
    with jax.enable_x64(dtype == "float64"):
        policy, params = tiny_policy(dtype)
        prompts, responses = draw_tokens(2, 6), draw_tokens(2, 3, 4)

        def shared(params):
            return with_prompt(policy, params, prompts, jnp.array([6, 6]), responses)

        def plain(params):
            repeated = jnp.broadcast_to(prompts[:, None], (2, 3, 6))
            return forward(policy, params, jnp.concatenate([repeated, responses], axis=-1)).hidden[:, :, 6:]

        @functools.partial(jax.jit, static_argnums=0)
        def values_and_gradients(hidden_of, params):
            def loss(params):
                logits = policy.head(params, hidden_of(params))
                return jnp.mean(logits[..., 7] ** 2), logits

            return jax.grad(loss, has_aux=True)(params)

        got, want = values_and_gradients(shared, params), values_and_gradients(plain, params)
        chex.assert_trees_all_close(got, want, atol=tolerance)


@EXACT
def test_apply_to_blocks_together_equals_one_after_the_other(dtype, tolerance):
    """Hidden states, keys and values, after a past part and under masks."""
    with jax.enable_x64(dtype == "float64"):
        policy, params = tiny_policy(dtype)
        shapes, starts = [(2, 1, 5), (2, 3, 4), (2, 3, 2)], [3, 8, 12]
        positions = [start + jnp.broadcast_to(jnp.arange(s[-1]), s) for s, start in zip(shapes, starts)]
        masks = [jnp.ones(shapes[0], bool).at[1, :, 3:].set(False), None, jnp.ones(shapes[2], bool)]
        blocks = [Block(draw_tokens(*s), p, m) for s, p, m in zip(shapes, positions, masks)]

        @jax.jit
        def run():
            first = Block(draw_tokens(2, 1, 3), jnp.broadcast_to(jnp.arange(3), (2, 1, 3)))
            [out] = policy.apply(params, [first])
            past = [Part(out.keys, out.values, jnp.ones((2, 1, 3), bool))]
            together = policy.apply(params, blocks, past)
            in_turn = []
            for block in blocks:
                in_turn += policy.apply(params, [block], past)
                mask = jnp.ones(block.tokens.shape, bool) if block.mask is None else block.mask
                past.append(Part(in_turn[-1].keys, in_turn[-1].values, mask))
            return together, tuple(in_turn)

        chex.assert_trees_all_close(*run(), atol=tolerance)


def test_apply_padding_leaves_completion_log_probs_unchanged():
    """Pitfall 6: a prompt of 3 tokens alone, and beside one of 9; rotary positions."""
    policy, params = tiny_policy()
    prompts, responses = draw_tokens(2, 9), draw_tokens(2, 1, 5)

    @jax.jit
    def log_probs(prompts, lengths, responses):
        hidden = with_prompt(policy, params, prompts, lengths, responses)
        logits = policy.head(params, hidden[:, :, :-1])
        return jnp.take_along_axis(jax.nn.log_softmax(logits), responses[..., 1:, None], axis=-1)[..., 0]

    alone = log_probs(prompts[:1, :3], jnp.array([3]), responses[:1])
    beside = log_probs(prompts, jnp.array([3, 9]), responses)
    np.testing.assert_allclose(beside[0], alone[0], atol=1e-5)
    other_filling = log_probs(prompts.at[0, 3:].set(0), jnp.array([3, 9]), responses)
    np.testing.assert_array_equal(other_filling, beside)


def test_head_gives_padded_ids_no_probability():
    """Pitfall 23: vocabulary 26 padded to 128, +50 on id 100; log-probs unchanged by the padding."""
    config = tiny(26, tied=False)
    hidden = jax.random.normal(jax.random.key(1), (3, config.hidden))
    policy = decoder(config)
    params = jax.jit(policy.init)(jax.random.key(0))
    padded = decoder(tiny(26, tied=False, padded_vocab_size=128))
    pad = lambda table: jnp.zeros((128, config.hidden)).at[:26].set(table)
    to_50 = 50 * hidden[0] / jnp.sum(hidden[0] ** 2)
    wide = params | {
        "embed": {"weight": pad(params["embed"]["weight"])},
        "head": {"weight": pad(params["head"]["weight"]).at[100].set(to_50)},
    }
    np.testing.assert_allclose(hidden[0] @ wide["head"]["weight"][100], 50, rtol=1e-5)
    log_probs = jax.nn.log_softmax(padded.head(wide, hidden))
    assert padded.vocab_size == log_probs.shape[-1] == 128
    np.testing.assert_allclose(log_probs[:, :26], jax.nn.log_softmax(policy.head(params, hidden)), atol=1e-6)
    assert np.all(np.exp(log_probs[:, 26:]) == 0)
    grads = jax.grad(lambda p: jax.nn.log_softmax(padded.head(p, hidden))[:, 3].sum())(wide)
    assert not np.any(grads["head"]["weight"][26:])


def test_head_sums_in_float32_for_bfloat16_weights():
    policy = decoder(tiny(50, dtype="bfloat16", param_dtype="bfloat16"))

    def run():
        params = policy.init(jax.random.key(0))
        out = forward(policy, params, draw_tokens(1, 1, 4))
        return out, policy.head(params, out.hidden)

    out, logits = jax.jit(run)()
    assert out.hidden.dtype == out.keys.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32 and np.all(np.isfinite(logits))


def test_apply_with_remat_equals_without_at_less_memory():
    policy, params = tiny_policy()
    again, _ = tiny_policy(remat=True)
    tokens = draw_tokens(2, 2, 8)
    loss = lambda policy, params: jnp.mean(policy.head(params, forward(policy, params, tokens).hidden) ** 2)
    run = lambda policy: jax.jit(jax.value_and_grad(functools.partial(loss, policy))).lower(params).compile()
    plain, small = run(policy), run(again)
    chex.assert_trees_all_close(small(params), plain(params), atol=1e-6)
    memory = [program.memory_analysis().temp_size_in_bytes for program in (small, plain)]
    assert memory[0] < 0.8 * memory[1]


def test_axes_name_every_dimension_of_every_parameter():
    for tied in (True, False):
        config = tiny(50, tied=tied)
        axes = jax.tree.map(
            lambda names: len(names), decoder(config).axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        assert axes == jax.tree.map(lambda p: len(p.shape), param_shapes(config))


def test_init_gives_logits_of_unit_scale():
    policy, params = tiny_policy()
    logits = jax.jit(lambda: policy.head(params, forward(policy, params, draw_tokens(4, 1, 16)).hidden))()
    assert 0.5 < np.std(logits) < 2
    assert type(params) is dict and type(params["layers"]["mlp"]) is dict


def test_decoder_of_equal_configs_compiles_once():
    run = jax.jit(lambda make, key: make(key), static_argnums=0)
    for _ in range(2):
        run(decoder(tiny(20, layers=1)).init, jax.random.key(0))
    assert run._cache_size() == 1


def test_rotary_positions_are_relative():
    policy, params = tiny_policy(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 256))
    tokens = draw_tokens(1, 1, 8)
    positions = jnp.arange(8)[None, None]
    hidden = jax.jit(lambda positions: policy.apply(params, [Block(tokens, positions)])[0].hidden)
    here = hidden(positions)
    np.testing.assert_allclose(hidden(positions + 100), here, atol=1e-4)
    assert np.abs(hidden(2 * positions) - here).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "4 query heads don't divide among 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"padded_vocab_size": 40}, "padded_vocab_size 40 is less than vocab_size 50"),
        ({"dtype": "flaot32"}, "unknown dtype 'flaot32'; did you mean 'float32'"),
    ],
)
def test_decoder_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(50, **changes)
    assert isinstance(tiny(50), DecoderConfig)
