"""Continuous batching against its twin, a row for every sample."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config
from jaxrl_llm.contract.subject import FAST_COMPILE
from jaxrl_llm.models.decoder import DecoderConfig, decoder
from jaxrl_llm.models.policy import Output
from jaxrl_llm.rollout import slot_schedule
from jaxrl_llm.rollout.distribution import sampling
from jaxrl_llm.rollout.sampler import advance, generate, responses, start
from jaxrl_llm.types import Prompts

SHAPE = dict(
    vocab_size=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, max_positions=128, tied=False
)
STOPS = tuple(range(1, 12))  # a response has about five tokens
STATIC = ("group_size", "max_new_tokens", "slots")

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


@functools.cache
def policy_of(dtype):
    return decoder(DecoderConfig(**SHAPE, dtype=dtype, param_dtype=dtype))


@functools.cache
def sampler_of(dtype):
    return jit(functools.partial(generate, policy_of(dtype)), static_argnames=STATIC)


def prompts_of(*lengths, width=12):
    rng = np.random.default_rng(sum(lengths))
    tokens = rng.integers(12, 61, (len(lengths), width)).astype(np.int32)
    lengths = np.array(lengths, np.int32)
    tokens[np.arange(width) >= lengths[:, None]] = 0
    return Prompts(tokens, lengths, np.arange(len(lengths), dtype=np.int32))


def assert_same(got, want, atol):
    for name in ("tokens", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert got.behavior_logp.dtype == want.behavior_logp.dtype
    np.testing.assert_allclose(got.behavior_logp, want.behavior_logp, rtol=0, atol=atol)


class Scripted:
    """Ends the response to prompt i after `lengths[i]` tokens; a prompt is its index, once."""

    vocab_size = 8

    def __init__(self, lengths):
        self.lengths = jnp.array(lengths)

    def apply(self, params, blocks, past=()):
        # Responses tell the prompt by their tokens: index + 2 until the end, which is 1.
        [block] = blocks
        hidden = jnp.stack([block.tokens, block.positions], axis=-1).astype(jnp.float32)
        cache = jnp.zeros((1, *block.tokens.shape, 1, 2))
        return (Output(hidden, cache, cache),)

    def head(self, params, hidden):
        index, position = hidden[..., 0].astype(int) - 2, hidden[..., 1].astype(int)
        ends = position + 1 >= self.lengths[index]
        return 50.0 * jax.nn.one_hot(jnp.where(ends, 1, index + 2), self.vocab_size)


def decoded(policy, params, prompts, how, *, group_size, max_new_tokens, slots):
    """Returns the rollout and the steps."""
    sizes = {"group_size": group_size, "max_new_tokens": max_new_tokens, "slots": slots}
    decoding = start(policy, params, prompts, jax.random.key(0), how, **sizes)
    decoding = advance(policy, params, decoding, how, jnp.int32(1000))
    return responses(decoding)[0], decoding.state.steps


# The schedule


def test_slot_schedule_of_the_scenario_takes_five_steps_instead_of_six():
    out = slot_schedule(jnp.array([5, 1, 1, 1]), slots=2)
    assert (int(out.steps), int(out.static_steps)) == (5, 6)
    assert out.slot.tolist() == [0, 1, 1, 1] and out.start.tolist() == [0, 0, 1, 2]


def test_slot_schedule_takes_samples_prompt_by_prompt():
    lengths = np.random.default_rng(0).integers(0, 9, (3, 5))
    out = slot_schedule(jnp.array(lengths), slots=4)
    flat = slot_schedule(jnp.array(lengths.reshape(-1)), slots=4)
    np.testing.assert_array_equal(out.start.reshape(-1), flat.start)
    assert int(out.steps) == int(flat.steps) <= int(out.static_steps)


@pytest.mark.parametrize("slots", [1, 2, 15, 40])
def test_slot_schedule_never_serves_two_at_once(slots):
    lengths = np.random.default_rng(1).integers(0, 9, 15)
    out = slot_schedule(jnp.array(lengths), slots=slots)
    np.testing.assert_array_equal(out.end - out.start, lengths)
    for slot in range(slots):
        start, end = (np.asarray(x)[np.asarray(out.slot) == slot] for x in (out.start, out.end))
        np.testing.assert_array_equal(start, np.concatenate([[0], end])[:-1])
    if slots >= 15:
        assert int(out.steps) == int(out.static_steps) == lengths.max()


def test_slot_schedule_refuses_no_slots():
    with pytest.raises(ValueError, match="slots is 0; it must be at least 1"):
        slot_schedule(jnp.array([1]), slots=0)


# Decoding


@pytest.mark.parametrize("slots", [0, 4])
def test_advance_in_pieces_equals_generate(slots):
    """Three tokens at a time; what is said to have ended does not change any more."""
    policy, how = policy_of("float32"), sampling(STOPS)
    params, prompts = policy.init(jax.random.key(1)), prompts_of(12, 2, 7)
    sizes = {"group_size": 3, "max_new_tokens": 16, "slots": slots}
    args = (params, prompts, jax.random.key(3), how)
    want = sampler_of("float32")(*args, **sizes)
    decoding = jit(functools.partial(start, policy, **sizes))(*args)
    go_on = jit(functools.partial(advance, policy), donate_argnames="decoding")
    looks = 0
    while True:
        rollout, ended = jax.device_get(responses(decoding))
        rows = lambda r, ended=ended: jax.tree.map(lambda x: np.asarray(x)[ended], r)
        assert_same(rows(rollout), rows(want), 2e-5)
        if ended.all():
            break
        decoding, looks = go_on(params, decoding, how, jnp.int32(3)), looks + 1
    assert looks > 3


@pytest.mark.parametrize("slots", [1, 3, 20])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20}])
def test_generate_in_slots_equals_a_row_for_each_sample(slots, options):
    with jax.enable_x64(True):
        params = policy_of("float64").init(jax.random.key(0))
        prompts, how = prompts_of(3, 9, 12, 1), sampling(STOPS, **options)
        sample = functools.partial(sampler_of("float64"), params, prompts, jax.random.key(5), how)
        want = sample(group_size=2, max_new_tokens=9)
        assert len(set(np.asarray(want.lengths).flat)) > 3 and want.truncated.any()
        assert_same(sample(group_size=2, max_new_tokens=9, slots=slots), want, 1e-12)


@pytest.mark.parametrize("limit", [1, 16])
def test_generate_in_slots_is_the_same_in_float32(limit):
    params = policy_of("float32").init(jax.random.key(1))
    prompts, how = prompts_of(12, 2, 7), sampling(STOPS)
    sample = functools.partial(sampler_of("float32"), params, prompts, jax.random.key(3), how)
    want = sample(group_size=3, max_new_tokens=limit)
    assert_same(sample(group_size=3, max_new_tokens=limit, slots=4), want, 2e-5)


def test_generate_in_slots_ends_when_all_stop_at_once_or_none_stops():
    params = policy_of("float32").init(jax.random.key(1))
    for stops, length in ((range(61), 1), ((), 9)):
        # One shape of stop ids, so that the second run compiles nothing.
        how = sampling(stops)
        how = how.replace(stop_ids=np.pad(how.stop_ids, (0, 64 - how.stop_ids.size), constant_values=-1))
        out = sampler_of("float32")(
            params, prompts_of(3, 4), jax.random.key(0), how, group_size=4, max_new_tokens=9, slots=3
        )
        assert (np.asarray(out.lengths) == length).all()
        assert np.asarray(out.truncated).all() == (length == 9)
        assert (np.asarray(out.tokens) != 0).sum() <= 8 * length


@pytest.mark.parametrize("slots, steps", [(1, 8), (2, 5)])
def test_decode_takes_the_steps_of_the_schedule(slots, steps):
    """Scenario of the card: with lengths 5, 1, 1, 1, a second slot serves three requests."""
    policy = Scripted([5, 1, 1, 1])
    prompts = Prompts(np.arange(2, 6, dtype=np.int32)[:, None], np.ones(4, np.int32), np.arange(4))
    run = jit(functools.partial(decoded, policy, group_size=1, max_new_tokens=6, slots=slots))
    rollout, taken = run({}, prompts, sampling((1,)))
    assert rollout.lengths.ravel().tolist() == [5, 1, 1, 1]
    assert rollout.tokens[0, 0].tolist() == [2, 2, 2, 2, 1, 0]
    assert int(taken) == steps == int(slot_schedule(rollout.lengths, slots=slots).steps)


def test_decode_takes_the_steps_of_the_schedule_with_a_model():
    policy = policy_of("float32")
    params, prompts = policy.init(jax.random.key(1)), prompts_of(12, 2, 7)
    run = jit(functools.partial(decoded, policy, group_size=8, max_new_tokens=16, slots=4))
    rollout, steps = run(params, prompts, sampling(STOPS))
    schedule = slot_schedule(rollout.lengths, slots=4)
    assert int(steps) == int(schedule.steps) < int(schedule.static_steps)


def test_generate_in_slots_is_the_same_on_eight_devices_with_a_slot_on_each():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    policy, how = policy_of("float32"), sampling(STOPS)
    params, prompts = policy.init(jax.random.key(1)), prompts_of(12, 2, 7, 3, 4, 5, 6, 1)
    sizes = {"group_size": 2, "max_new_tokens": 7}
    want = sampler_of("float32")(params, prompts, jax.random.key(0), how, **sizes)
    run = jit(
        functools.partial(generate, policy, **sizes, slots=8, batch_sharding=place), out_shardings=place
    )
    args = jax.device_put(params, everywhere), jax.device_put(prompts, place), jax.random.key(0), how
    program = run.lower(*args).compile()
    assert "f32[2,1,1,6,2,8]" in program.as_text()  # a slot's cache
    assert_same(program(*args), want, 2e-5)


@pytest.mark.parametrize("slots", [0, 3])
def test_generate_keeps_the_log_probs_of_a_bfloat16_model_in_float32(slots):
    policy = policy_of("bfloat16")
    make = functools.partial(generate, policy, group_size=2, max_new_tokens=5, slots=slots)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    out = jax.eval_shape(make, params, prompts_of(3, 4), jax.random.key(0), sampling(STOPS))
    assert out.behavior_logp.dtype == jnp.float32
    assert (out.tokens.shape, out.lengths.shape) == ((2, 2, 5), (2, 2))


def test_check_wants_slots_that_divide_among_the_devices():
    small = config.Config(
        model=config.Model(load=min),
        data=config.Data(train=min),
        scoring=config.Scoring(),
        objective=config.Objective(advantage=min, loss=min),
    )
    slots = lambda count: small.replace(rollout=config.Rollout(slots=count))
    config.check(slots(16), devices=8)
    with pytest.raises(
        config.ConfigError, match=r"rollout.slots is 12, which .* = 8 does not divide: take 16"
    ):
        config.check(slots(12), devices=8)
    with pytest.raises(
        config.ConfigError, match=r"rollout.slots is -1, but must be .* at least 0: 0 decodes"
    ):
        config.check(slots(-1))
