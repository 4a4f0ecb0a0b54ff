"""Randomness as a function of (seed, stream, step, prompt, sample).

Every random number of a run comes from a key that `fold_in` derives from names and counters, so a
resume, another batch split or another number of devices draws the same noise, and no key is ever
stored in a checkpoint.
"""

from __future__ import annotations

import enum

import jax


class Stream(enum.IntEnum):
    """What the noise is for. Values are part of a run's identity: append, never renumber."""

    INIT = 0
    ROLLOUT = 1
    SHUFFLE = 2
    EVALUATE = 3


def key(seed: int, stream: Stream, *counters: int | jax.Array) -> jax.Array:
    """Returns the key of `stream`, folded with each counter in turn.

    Args:
      seed: the run's seed.
      stream: what the noise is for.
      *counters: integers or scalar integer arrays, usually the step.
    """
    out = jax.random.fold_in(jax.random.key(seed), int(stream))
    for counter in counters:
        out = jax.random.fold_in(out, counter)
    return out


def sample_keys(step_key: jax.Array, uid: jax.Array, group_size: int) -> jax.Array:
    """Returns one key for each sample: `[B, G]` keys from the prompts' `uid [B]`.

    A sample's key depends on its prompt and its index in the group alone, not on where in the batch
    it stands.
    """

    def of_prompt(u):
        prompt_key = jax.random.fold_in(step_key, u)
        return jax.vmap(lambda g: jax.random.fold_in(prompt_key, g))(jax.numpy.arange(group_size))

    return jax.vmap(of_prompt)(uid)
