"""The axis alphabet and the pytrees that cross modules.

Axes, always in this order:

    B  prompts in the step                 V  vocabulary
    G  samples (responses) of one prompt   D  model width
    T  response tokens                     H  query heads
    P  prompt tokens                       K  key/value heads
    S  keys of one attention part          L  layers

Padding is on the right everywhere; masks are made from lengths, never from token values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Example:
    """One prompt on the host, as a data source gives it.

    Attributes:
      prompt: plain text, or a list of chat messages `{"role": ..., "content": ...}`.
      answer: the gold answer that rewards compare with.
      id: index of the example in its source.
      meta: anything else a reward may want (the raw row, the scorer's own entry).
    """

    prompt: str | list[dict[str, str]]
    answer: str
    id: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


@flax.struct.dataclass
class Prompts:
    """The prompts of one step as arrays."""

    tokens: jax.Array  # [B, P] int32, padded on the right
    lengths: jax.Array  # [B] int32, at least 1
    uid: jax.Array  # [B] int32, position of the draw in the prompt stream: unique in a run

    @property
    def mask(self) -> jax.Array:
        """[B, P] bool: True on prompt tokens."""
        return jnp.arange(self.tokens.shape[-1]) < self.lengths[..., None]


@flax.struct.dataclass
class Rollout:
    """G sampled responses to each prompt."""

    tokens: jax.Array  # [B, G, T] int32, padded on the right
    lengths: jax.Array  # [B, G] int32, response tokens, the stop token included
    truncated: jax.Array  # [B, G] bool: ended by the token budget, with no stop token
    behavior_logp: jax.Array  # [B, G, T] float32, log-probability as sampled; 0 outside the mask

    @property
    def mask(self) -> jax.Array:
        """[B, G, T] bool: True on response tokens."""
        return jnp.arange(self.tokens.shape[-1]) < self.lengths[..., None]


@flax.struct.dataclass
class Batch:
    """What one step trains on: rollouts with their rewards."""

    prompts: Prompts
    rollout: Rollout
    rewards: jax.Array  # [B, G] float, 0 where not scored
    correct: jax.Array  # [B, G] bool, the verifier's verdict
    scored: (
        jax.Array | None
    )  # [B, G] bool; False: no reward, or a row that fills up the batch: no loss. None: all
