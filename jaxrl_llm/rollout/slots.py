"""Continuous batching: a fixed number of decode slots, each refilled when its response ends."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models.policy import Block, Params, Part, Policy
from jaxrl_llm.rollout.distribution import Sampling, draw
from jaxrl_llm.signature import scope
from jaxrl_llm.types import Prompts, Rollout


class Schedule(NamedTuple):
    """When and where each request is decoded, in decode steps from 0."""

    start: jax.Array  # like lengths, int
    end: jax.Array  # like lengths, int
    slot: jax.Array  # like lengths, int in 0 .. slots - 1
    steps: jax.Array  # [] int, with slots that are refilled
    static_steps: jax.Array  # [] int, when each batch of `slots` requests waits for its longest response


@scope("batch", ordered=True)
def slot_schedule(lengths: jax.Array, *, slots: int = 4) -> Schedule:
    """Gives each request in turn to the slot that is free earliest, the lowest of several.

    A request starts when its slot is free and ends `length` steps later, so

        steps = max_i end_i,    static_steps = sum over chunks of `slots` requests of the longest length.

    Args:
      lengths: `[B, G]` int, or of any other shape: response tokens of the requests, which queue in row-major
        order. A request of length 0 frees its slot at once.
      slots: number of slots, at least 1.

    Returns:
      start, end and slot of each request in the shape of `lengths`, and the number of decode steps with and
      without refilling. With no more requests than slots both are the longest length.

    Source: iteration-level scheduling, Yu et al. 2022, "Orca: A Distributed Serving System for
      Transformer-Based Generative Models", section 3.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1, since every request needs a slot")
    queue = lengths.reshape(-1)

    def assign(free_at, length):
        slot = jnp.argmin(free_at)
        start, end = free_at[slot], free_at[slot] + length
        return free_at.at[slot].set(end), (start, end, slot)

    _, assigned = jax.lax.scan(assign, jnp.zeros(slots, queue.dtype), queue)
    start, end, slot = (x.reshape(lengths.shape) for x in assigned)
    chunks = jnp.pad(queue, (0, -queue.size % slots)).reshape(-1, slots)
    return Schedule(start, end, slot, jnp.max(end, initial=0), jnp.sum(jnp.max(chunks, axis=1)))


class State(NamedTuple):
    """What the decode loops carry: N slots serve R requests."""

    steps: jax.Array  # [] int32, decode steps taken
    queued: jax.Array  # [] int32, the first request that no slot has taken
    request: jax.Array  # [N] int32, what each slot decodes, or decoded last
    busy: jax.Array  # [N] bool
    drawn: jax.Array  # [N] int32, tokens drawn of the request
    token: jax.Array  # [N] int32, the last of them
    rollout: Rollout  # a row for each request: [R] and [R, T]
    ended: jax.Array  # [R] bool
    cache_keys: jax.Array  # [L, N, 1, S, K, Dh], a ring: step i writes column i mod S, S = max(T - 1, 1)
    cache_values: jax.Array


def start(
    shared: Part, uniforms: jax.Array, slots: int, batch_sharding: NamedSharding | None = None
) -> State:
    """Returns empty slots before the requests, which are the samples, those of the first prompt first.

    Args:
      shared: the prompts' keys and values, as `sampler.prefill` returns them.
      uniforms: `[B, G, T]`; gives the sizes.
      slots: N, at least 1; samples that are fewer have a slot each.
      batch_sharding: of arrays whose first axis is N; None leaves it to the compiler.
    """
    placed, limit = _placer(batch_sharding), uniforms.shape[-1]
    count = uniforms.size // limit
    layers, _, _, _, heads, size = shared.keys.shape
    slots = min(slots, count)
    cache = jnp.zeros((layers, slots, 1, max(limit - 1, 1), heads, size), shared.keys.dtype)
    cache, none = placed(cache, axis=1), placed(jnp.zeros(slots, jnp.int32))
    empty = Rollout(
        tokens=jnp.zeros((count, limit), jnp.int32),
        lengths=jnp.zeros(count, jnp.int32),
        truncated=jnp.zeros(count, bool),
        behavior_logp=jnp.zeros((count, limit), uniforms.dtype),
    )
    zero = jnp.int32(0)
    return State(zero, zero, none, none > 0, none, none, empty, empty.truncated, cache, cache)


def decode(
    policy: Policy,
    params: Params,
    prompts: Prompts,
    shared: Part,
    last: jax.Array,
    uniforms: jax.Array,
    state: State,
    how: Sampling,
    steps: jax.Array,
    *,
    batch_sharding: NamedSharding | None = None,
) -> State:
    """Decodes until all requests have ended, but at most `steps` steps.

    In one step every busy slot draws one token; one whose response has ended draws the first token of the
    next request in the step after. So the steps are those of `slot_schedule`. Each slot reads a copy of its
    prompt's keys and values, which is made when a slot is refilled.

    Args:
      policy: the model's functions.
      params: its parameters.
      prompts: B prompts.
      shared: their keys and values.
      last: `[B, 1, D]`, the hidden states from which first tokens are drawn.
      uniforms: `[B, G, T]` in [0, 1), one for each token.
      state: from `start`, or from an earlier call.
      how: temperature, top_k, top_p and stop ids.
      steps: `[]` int32.
      batch_sharding: as in `start`.
    """
    size, placed = uniforms.shape[1], _placer(batch_sharding)
    uniforms = uniforms.reshape(-1, uniforms.shape[-1])
    count, most = uniforms.shape[0], jnp.iinfo(jnp.int32).max
    until = state.steps + jnp.minimum(steps, most - state.steps)

    def serve(state: State) -> State:
        """Refills the slots, then decodes until one can be refilled again or all responses have ended."""
        state = _refill(state, count)
        prompt = placed(state.request // size)
        keys, values = (placed(x[:, prompt], axis=1) for x in (shared.keys, shared.values))
        of_prompt = Part(keys, values, shared.mask[prompt])
        first, lengths = last[prompt, 0], prompts.lengths[prompt]

        def step(state: State) -> State:
            """Feeds every slot's last token and draws its next one."""
            span = state.cache_keys.shape[3]
            age = (state.steps - 1 - jnp.arange(span)) % span  # of each column, in steps
            seen = age < state.drawn[:, None] - 1
            own = Part(state.cache_keys, state.cache_values, seen[:, None])
            rows = lambda x: x[:, None, None]
            positions = rows(lengths + state.drawn - 1)
            [out] = policy.apply(params, [Block(rows(state.token), positions)], past=(of_prompt, own))
            column = state.steps % span
            write = lambda cache, new: jax.lax.dynamic_update_slice_in_dim(cache, new, column, axis=3)
            state = state._replace(
                cache_keys=write(state.cache_keys, out.keys),
                cache_values=write(state.cache_values, out.values),
            )
            hidden = jnp.where((state.drawn == 0)[:, None], first, out.hidden[:, 0, 0])
            token, logp = draw(policy.head(params, hidden), uniforms[state.request, state.drawn], how)
            return _append(state, token, logp, how.stop_ids)

        served = lambda s: jnp.where(s.queued < count, jnp.all(s.busy), jnp.any(s.busy))
        return jax.lax.while_loop(lambda s: served(s) & (s.steps < until), step, state)

    return jax.lax.while_loop(lambda s: ~jnp.all(s.ended) & (s.steps < until), serve, state)


def responses(state: State, shape: tuple[int, int]) -> tuple[Rollout, jax.Array]:
    """Returns the rollout so far and which responses have ended, with the leading axes `shape`."""
    rollout = state.rollout.replace(truncated=state.rollout.truncated & state.ended)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (rollout, state.ended))


def _refill(state: State, count: int) -> State:
    """Gives the next requests of the queue to the free slots, in order."""
    request = state.queued + jnp.cumsum(~state.busy, dtype=jnp.int32) - 1
    takes = ~state.busy & (request < count)
    return state._replace(
        queued=state.queued + jnp.sum(takes, dtype=jnp.int32),
        request=jnp.where(takes, request, state.request),
        busy=state.busy | takes,
        drawn=jnp.where(takes, 0, state.drawn),
    )


def _append(state: State, token: jax.Array, logp: jax.Array, stop_ids: jax.Array) -> State:
    """Writes down what the busy slots drew."""
    old, limit = state.rollout, state.rollout.tokens.shape[1]
    row = jnp.where(state.busy, state.request, old.lengths.size)  # there is no such row: not written
    stops = jnp.any(token[:, None] == stop_ids, axis=-1)
    drawn = state.drawn + state.busy
    rollout = Rollout(
        tokens=old.tokens.at[row, state.drawn].set(token, mode="drop"),
        lengths=old.lengths.at[row].set(drawn, mode="drop"),
        truncated=old.truncated.at[row].set(~stops, mode="drop"),  # the last token's word holds
        behavior_logp=old.behavior_logp.at[row, state.drawn].set(logp, mode="drop"),
    )
    ends = state.busy & (stops | (drawn == limit))
    return state._replace(
        steps=state.steps + 1,
        busy=state.busy & ~ends,
        drawn=drawn,
        token=token,
        rollout=rollout,
        ended=state.ended.at[row].set(ends, mode="drop"),
    )


def _placer(sharding: NamedSharding | None):
    """Returns `(x, axis=0) -> x` with that axis sharded as the first one is by `sharding`."""

    def placed(x: jax.Array, axis: int = 0) -> jax.Array:
        if sharding is None:
            return x
        place = PartitionSpec(*[None] * axis, *sharding.spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, place))

    return placed
