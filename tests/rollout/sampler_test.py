"""The sampler against its plain twin: full forward passes, one token at a time."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.contract.subject import FAST_COMPILE
from jaxrl_llm.models.decoder import DecoderConfig, decoder
from jaxrl_llm.models.policy import Block, Output
from jaxrl_llm.rollout.distribution import draw, sampling
from jaxrl_llm.rollout.sampler import generate
from jaxrl_llm.types import Prompts, Rollout

CONFIG = DecoderConfig(
    vocab_size=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, max_positions=128, tied=False
)
POLICY = decoder(CONFIG)
STOPS = (1, 7)


@pytest.fixture(scope="module")
def params():
    made = POLICY.init(jax.random.key(0))
    made["head"]["weight"] *= 2  # sharper than a fresh model
    return made


def prompts_of(*lengths, width=12, uid=None):
    rng = np.random.default_rng(sum(lengths))
    tokens = np.zeros((len(lengths), width), np.int32)
    for row, length in zip(tokens, lengths):
        row[:length] = rng.integers(2, 61, length)
    uid = np.arange(len(lengths)) if uid is None else np.asarray(uid)
    return Prompts(tokens, np.array(lengths, np.int32), uid.astype(np.int32))


sample = jax.jit(functools.partial(generate, POLICY), static_argnames=("group_size", "max_new_tokens"))


@jax.jit
def next_token(params, ids, length, uniform, how):
    """Draws the token after the first `length` of `ids`, by a full forward pass."""
    block = Block(ids[None, None], jnp.arange(ids.size)[None, None])
    hidden = POLICY.apply(params, [block])[0].hidden
    return draw(POLICY.head(params, hidden[0, 0, length - 1]), uniform, how)


def plain(params, prompts, key, how, *, group_size, max_new_tokens):
    """Runs the whole sequence through the model for every token of every sample."""
    out = []
    for tokens, length, uid in zip(prompts.tokens, prompts.lengths, prompts.uid):
        for g in range(group_size):
            own = jax.random.fold_in(jax.random.fold_in(key, uid), g)
            sequence, logps = list(tokens[:length]), []
            while len(sequence) < length + max_new_tokens:
                ids = np.pad(np.array(sequence), (0, 20 - len(sequence)))
                uniform = jax.random.uniform(jax.random.fold_in(own, len(logps)))
                token, logp = next_token(params, ids, len(sequence), uniform, how)
                sequence.append(int(token))
                logps.append(float(logp))
                if int(token) in np.asarray(how.stop_ids):
                    break
            out.append((sequence[length:], logps))
    return out


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}])
def test_generate_equals_full_forward_passes(params, options):
    prompts, key, how = prompts_of(3, 9, 12), jax.random.key(5), sampling(STOPS, **options)
    got = sample(params, prompts, key, how, group_size=2, max_new_tokens=7)
    want = plain(params, prompts, key, how, group_size=2, max_new_tokens=7)
    rows = [jax.tree.map(lambda a, i=i: np.asarray(a)[i // 2, i % 2], got) for i in range(len(want))]
    for row, (tokens, logps) in zip(rows, want):
        assert row.tokens[: row.lengths].tolist() == tokens
        assert not row.tokens[row.lengths :].any()
        np.testing.assert_allclose(row.behavior_logp[: row.lengths], logps, atol=2e-5)
        assert row.truncated == (tokens[-1] not in STOPS)


def test_generate_depends_on_neither_padding_nor_the_batch(params):
    how, key = sampling(STOPS), jax.random.key(5)
    both = sample(params, prompts_of(3, 9), key, how, group_size=3, max_new_tokens=6)
    first = prompts_of(3, 9)
    alone = Prompts(first.tokens[:1, :3], first.lengths[:1], first.uid[:1])
    got = sample(params, alone, key, how, group_size=3, max_new_tokens=6)
    np.testing.assert_array_equal(got.tokens[0], both.tokens[0])
    np.testing.assert_allclose(got.behavior_logp[0], both.behavior_logp[0], atol=1e-5)


def test_generate_draws_fresh_noise_for_every_step_and_sample(params):
    """Pitfall 12: one prompt x 4 at temperature 1; samples and steps differ, reruns and splits are equal."""
    how, prompts = sampling(()), prompts_of(5)
    make = lambda key, size: np.asarray(
        sample(params, prompts, key, how, group_size=size, max_new_tokens=8).tokens
    )
    step0, step1 = jax.random.key(0), jax.random.key(1)
    four = make(step0, 4)
    assert len({tuple(row) for row in four[0]}) == 4
    assert not (make(step1, 4) == four).all(-1).any()
    np.testing.assert_array_equal(make(step0, 4), four)
    np.testing.assert_array_equal(make(step0, 2)[0], four[0, :2])


def test_generate_is_the_same_on_one_and_four_devices(params):
    """Pitfall 12: the same prompts on 1 and 4 devices give the same tokens."""
    prompts, how = prompts_of(3, 9, 12, 5), sampling(STOPS)
    one = sample(params, prompts, jax.random.key(2), how, group_size=2, max_new_tokens=6)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    four = sample(
        jax.device_put(params, everywhere),
        jax.device_put(prompts, place),
        jax.random.key(2),
        how,
        group_size=2,
        max_new_tokens=6,
    )
    np.testing.assert_array_equal(one.tokens, four.tokens)
    np.testing.assert_allclose(one.behavior_logp, four.behavior_logp, atol=1e-5)


def test_generate_honours_every_stop_id_and_a_new_set_without_compiling():
    """Pitfall 5: stops {1, 106} and tokens [5, 106, 9, 9]; then another set of stops."""
    script = jnp.array([5, 106, 9, 9])
    size = 128

    class Scripted:
        vocab_size = size

        @staticmethod
        def apply(params, blocks, past=()):
            [block] = blocks
            cache = jnp.zeros((1, *block.tokens.shape, 1, 2))
            return (Output(block.positions[..., None].astype(jnp.float32), cache, cache),)

        @staticmethod
        def head(params, hidden):
            # The hidden state is the position of the last token; the prompt has 3 tokens.
            return 50.0 * jax.nn.one_hot(script[hidden[..., 0].astype(int) - 2], size)

    run = jax.jit(functools.partial(generate, Scripted), static_argnames=("group_size", "max_new_tokens"))
    prompts = prompts_of(3, width=3)
    first = run({}, prompts, jax.random.key(0), sampling((1, 106)), group_size=1, max_new_tokens=4)
    assert first.tokens[0, 0].tolist() == [5, 106, 0, 0]
    assert int(first.lengths[0, 0]) == 2 and not bool(first.truncated[0, 0])
    second = run({}, prompts, jax.random.key(0), sampling((9,)), group_size=1, max_new_tokens=4)
    assert second.tokens[0, 0].tolist() == [5, 106, 9, 0]
    third = run({}, prompts, jax.random.key(0), sampling((1,)), group_size=1, max_new_tokens=4)
    assert third.tokens[0, 0].tolist() == [5, 106, 9, 9] and bool(third.truncated[0, 0])
    assert run._cache_size() == 1


def test_generate_has_the_end_token_under_its_mask_when_padding_is_the_same_id():
    """Pitfall 4: pad = eos = 2, completion [7, 2] padded to [7, 2, 2, 2] has mask 1, 1, 0, 0."""
    rollout = Rollout(
        tokens=jnp.array([[[7, 2, 2, 2]]]),
        lengths=jnp.array([[2]]),
        truncated=jnp.array([[False]]),
        behavior_logp=jnp.zeros((1, 1, 4)),
    )
    assert rollout.mask[0, 0].tolist() == [True, True, False, False]


def test_generate_uses_new_weights_at_once(params):
    """Pitfall 9: greedy, then with the head negated: equal to a fresh sampler's."""
    how, prompts = sampling((), temperature=0), prompts_of(4)
    negated = jax.tree.map(jnp.copy, params)
    negated["norm"]["scale"] = -negated["norm"]["scale"]
    before = sample(params, prompts, jax.random.key(0), how, group_size=1, max_new_tokens=5)
    after = sample(negated, prompts, jax.random.key(0), how, group_size=1, max_new_tokens=5)
    fresh = generate(POLICY, negated, prompts, jax.random.key(0), how, group_size=1, max_new_tokens=5)
    assert not np.array_equal(before.tokens, after.tokens)
    np.testing.assert_array_equal(after.tokens, fresh.tokens)


def test_generate_compiles_once_for_all_temperatures_and_prompts_of_a_bucket(params):
    """Pitfall 27: temperatures 0.7 then 0.9; prompts of 40 then 45 tokens in a bucket of 64."""
    run = jax.jit(functools.partial(generate, POLICY), static_argnames=("group_size", "max_new_tokens"))
    for length, temperature, top_p in ((40, 0.7, 1.0), (45, 0.9, 1.0), (41, 0.9, 0.5)):
        how = sampling(STOPS, temperature=temperature, top_p=top_p)
        run(params, prompts_of(length, width=64), jax.random.key(0), how, group_size=2, max_new_tokens=4)
    assert run._cache_size() == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_generate_stops_at_the_limit(params, limit):
    out = sample(params, prompts_of(4), jax.random.key(0), sampling(()), group_size=2, max_new_tokens=limit)
    assert out.tokens.shape[-1] == limit
    assert (np.asarray(out.lengths) == limit).all() and np.asarray(out.truncated).all()


def in_loops(program: str) -> list[str]:
    """Returns the lines of a compiled program that run inside a loop."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL))
    waiting, seen = re.findall(r"body=%([^\s,}]+)", program), {}
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name] = blocks[name]
            waiting += re.findall(r"(?:body|calls|to_apply|computation)=%([^\s,}]+)", blocks[name])
    return [line for block in seen.values() for line in block.splitlines()]


@pytest.mark.parametrize("slots", [0, 5])
def test_generate_copies_no_cache_while_it_decodes(params, slots):
    """The compiled loops write one column of each cache, in place."""
    make = functools.partial(generate, POLICY, group_size=4, max_new_tokens=14, slots=slots)
    run = jax.jit(make, compiler_options=FAST_COMPILE)
    program = run.lower(params, prompts_of(3, 9), jax.random.key(0), sampling(STOPS)).compile().as_text()
    shape = r"f32\[2,5,1,13,2,8\]\S*" if slots else r"f32\[2,2,4,13,2,8\]\S*"
    made = [
        op for line in in_loops(program) for op in re.findall(shape + r" (copy|dynamic-update-slice)", line)
    ]
    assert made == ["dynamic-update-slice"] * 2
