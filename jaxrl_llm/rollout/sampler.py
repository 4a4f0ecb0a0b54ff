"""Responses from prompts: prefill once, decode G samples of each prompt together."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_llm import keys
from jaxrl_llm.models.policy import Block, Output, Params, Part, Policy
from jaxrl_llm.rollout import slots as in_slots
from jaxrl_llm.rollout.distribution import Sampling, draw
from jaxrl_llm.types import Prompts, Rollout


class _State(NamedTuple):
    """What the decode loop carries when every sample has a slot of its own."""

    t: jax.Array  # [] int32, tokens drawn so far
    done: jax.Array  # [B, G] bool
    rollout: Rollout
    cache_keys: jax.Array  # [L, B, G, S, K, Dh], the responses' own keys; S = max(T - 1, 1)
    cache_values: jax.Array


class Decoding(NamedTuple):
    """Responses under way."""

    prompts: Prompts
    shared: Part  # the prompts' keys and values
    last: jax.Array  # [B, 1, D], hidden states from which first tokens are drawn
    uniforms: jax.Array  # [B, G, T] in [0, 1), one for each token
    state: _State | in_slots.State


def prefill(policy: Policy, params: Params, prompts: Prompts) -> tuple[Part, jax.Array]:
    """Runs the prompts once.

    Returns:
      the prompts' keys and values as a part that all samples of a prompt share, and the hidden state
      `[B, 1, D]` of the last prompt token, from which the first response token is drawn.
    """
    block = prompt_block(prompts)
    [out] = policy.apply(params, [block])
    return Part(out.keys, out.values, block.mask), last_hidden(out, prompts)


def prompt_block(prompts: Prompts) -> Block:
    """Returns the prompts as a block that all samples of a prompt share: its G axis is 1."""
    mask = prompts.mask[:, None]
    positions = jnp.broadcast_to(jnp.arange(mask.shape[-1]), mask.shape)
    return Block(prompts.tokens[:, None], positions, mask)


def last_hidden(out: Output, prompts: Prompts) -> jax.Array:
    """Returns `[B, 1, D]` of the last prompt token."""
    return jnp.take_along_axis(out.hidden[:, 0], (prompts.lengths - 1)[:, None, None], axis=1)


def generate(
    policy: Policy,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    how: Sampling,
    *,
    group_size: int,
    max_new_tokens: int,
    slots: int = 0,
    batch_sharding: NamedSharding | None = None,
) -> Rollout:
    """Samples `group_size` responses to each prompt.

    The prompt's keys and values are kept once for all its samples. Token t of a sample comes from one uniform
    number whose key is `fold_in(sample key, t)`: it does not depend on the batch around the sample. Decoding
    ends when every sample has drawn a stop id.

    Args:
      policy: the model's functions.
      params: its parameters.
      prompts: B prompts, padded on the right.
      key: the step's key; `keys.sample_keys` makes one of it for each sample.
      how: temperature, top_k, top_p and stop ids, all traced.
      group_size: G, static.
      max_new_tokens: T, static.
      slots: static. 0 decodes all samples at once, until the longest response ends. N > 0 decodes N at a
        time, and a slot takes the next sample when its response ends (`slots.decode`): the same tokens.
      batch_sharding: of slots, if there are any; None leaves it to the compiler.
    """
    sizes = {"group_size": group_size, "max_new_tokens": max_new_tokens, "slots": slots}
    decoding = start(policy, params, prompts, key, how, **sizes, batch_sharding=batch_sharding)
    forever = jnp.int32(jnp.iinfo(jnp.int32).max)
    return responses(advance(policy, params, decoding, how, forever, batch_sharding=batch_sharding))[0]


def start(
    policy: Policy,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    how: Sampling,
    *,
    group_size: int,
    max_new_tokens: int,
    slots: int = 0,
    batch_sharding: NamedSharding | None = None,
) -> Decoding:
    """Runs the prompts; the arguments are those of `generate`, which is `start` and one `advance`."""
    shared, last = prefill(policy, params, prompts)
    dtype = jax.eval_shape(policy.head, params, last).dtype
    uniforms = _uniforms(keys.sample_keys(key, prompts.uid, group_size), max_new_tokens, dtype)
    if slots:
        state = in_slots.start(shared, uniforms, slots, batch_sharding)
        return Decoding(prompts, shared, last, uniforms, state)
    shape = uniforms.shape[:2]
    layers, _, _, _, heads, size = shared.keys.shape
    span = max(max_new_tokens - 1, 1)  # the last token is never fed
    cache = jnp.zeros((layers, *shape, span, heads, size), shared.keys.dtype)
    empty = Rollout(
        tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        lengths=jnp.zeros(shape, jnp.int32),
        truncated=jnp.zeros(shape, bool),
        behavior_logp=jnp.zeros((*shape, max_new_tokens), dtype),
    )
    state = _State(jnp.int32(0), jnp.zeros(shape, bool), empty, cache, cache)
    decoding = Decoding(prompts, shared, last, uniforms, state)
    return decoding._replace(state=_append(policy, params, decoding, how, state, last))


def advance(
    policy: Policy,
    params: Params,
    decoding: Decoding,
    how: Sampling,
    steps: jax.Array,
    *,
    batch_sharding: NamedSharding | None = None,
) -> Decoding:
    """Decodes until all responses have ended, but at most `steps [] int32` tokens of each."""
    if isinstance(decoding.state, in_slots.State):
        state = in_slots.decode(policy, params, *decoding, how, steps, batch_sharding=batch_sharding)
        return decoding._replace(state=state)
    limit = decoding.uniforms.shape[-1]
    until = jnp.minimum(limit - decoding.state.t, steps) + decoding.state.t
    decode = lambda state: _decode(policy, params, decoding, how, state)
    going = lambda state: (state.t < until) & ~jnp.all(state.done)
    return decoding._replace(state=jax.lax.while_loop(going, decode, decoding.state))


def responses(decoding: Decoding) -> tuple[Rollout, jax.Array]:
    """Returns the rollout so far and which responses `[B, G]` have ended."""
    state, (*shape, limit) = decoding.state, decoding.uniforms.shape
    if isinstance(state, in_slots.State):
        return in_slots.responses(state, tuple(shape))
    ended = state.done | (state.t == limit)
    return state.rollout.replace(truncated=ended & ~state.done), ended


def _append(
    policy: Policy, params: Params, decoding: Decoding, how: Sampling, state: _State, hidden: jax.Array
) -> _State:
    """Draws token t of every sample that is not done."""
    logits = jnp.broadcast_to(policy.head(params, hidden), (*state.done.shape, policy.vocab_size))
    token, logp = draw(logits, decoding.uniforms[..., state.t], how)
    old, live = state.rollout, ~state.done
    rollout = Rollout(
        tokens=old.tokens.at[..., state.t].set(jnp.where(live, token, 0)),
        lengths=old.lengths + live,
        truncated=old.truncated,
        behavior_logp=old.behavior_logp.at[..., state.t].set(jnp.where(live, logp, 0)),
    )
    done = state.done | jnp.any(token[..., None] == how.stop_ids, axis=-1)
    return state._replace(t=state.t + 1, done=done, rollout=rollout)


def _decode(policy: Policy, params: Params, decoding: Decoding, how: Sampling, state: _State) -> _State:
    """Feeds token t - 1 and draws token t."""
    fed = state.t - 1
    token = jax.lax.dynamic_index_in_dim(state.rollout.tokens, fed, axis=-1)
    positions = jnp.broadcast_to((decoding.prompts.lengths + fed)[:, None, None], token.shape)
    span = state.cache_keys.shape[3]
    seen = jnp.broadcast_to(jnp.arange(span) < fed, (*state.done.shape, span))
    own = Part(state.cache_keys, state.cache_values, seen)
    [out] = policy.apply(params, [Block(token, positions)], past=(decoding.shared, own))
    write = lambda cache, new: jax.lax.dynamic_update_slice_in_dim(cache, new, fed, axis=3)
    state = state._replace(
        cache_keys=write(state.cache_keys, out.keys), cache_values=write(state.cache_values, out.values)
    )
    return _append(policy, params, decoding, how, state, out.hidden[:, :, 0])


def _uniforms(sample_keys: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
    """Returns `[B, G, T]`: token t of a sample draws with the key `fold_in(sample key, t)`."""
    of_token = lambda key, t: jax.random.uniform(jax.random.fold_in(key, t), dtype=dtype)
    of_sample = lambda key: jax.vmap(lambda t: of_token(key, t))(jnp.arange(count))
    return jax.vmap(jax.vmap(of_sample))(sample_keys)
