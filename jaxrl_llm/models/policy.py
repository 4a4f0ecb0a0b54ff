"""All that the trainer knows about a model: pure functions over a plain dict of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.struct
import jax

Params = dict[str, Any]  # nested dict of arrays


@flax.struct.dataclass
class Part:
    """Keys and values that queries attend to, with who may see them.

    `keys` and `values` have a G axis that is either the queries' G, or 1 when all samples of the prompt
    share the part. Only keys under `mask` are seen; every query of the block sees all of them.
    """

    keys: jax.Array  # [L, B, G or 1, S, K, Dh]
    values: jax.Array  # [L, B, G or 1, S, K, Dh]
    mask: jax.Array  # [B, G or 1, S] bool


class Block(NamedTuple):
    """Tokens that run through the model together, each seeing those before it in the block."""

    tokens: jax.Array  # [B, G, T] int
    positions: jax.Array  # [B, G, T] int
    mask: jax.Array | None = None  # [B, G, T] bool, which tokens may be seen; None: all


class Output(NamedTuple):
    """What `Policy.apply` returns for one block of tokens."""

    hidden: jax.Array  # [B, G, T, D] after the last norm, ready for `Policy.head`
    keys: jax.Array  # [L, B, G, T, K, Dh] of this block
    values: jax.Array  # [L, B, G, T, K, Dh]


@dataclass(frozen=True)
class Policy:
    """A language model as pure functions.

    Attributes:
      init: `key -> params`, random parameters.
      apply: `(params, blocks: Sequence[Block], past: Sequence[Part] = ()) -> tuple[Output, ...]`, an output
        for each block. Tokens attend causally within their block, to all of the blocks before it, and to
        every part of `past`. An earlier block or a part has the G of the later ones, or 1. Blocks that run
        together share the layers' matrix products.
      head: `(params, hidden [..., D]) -> logits [..., V] float32`. Ids of the padding of the
        vocabulary have logits of -1e30, so they are never sampled and add nothing to a sum of exponentials.
      axes: a tree like params; each leaf is a tuple of logical axis names, one per dimension (or None).
      vocab_size: V, the padding of the vocabulary included.
      max_positions: the longest prompt plus response that the position encoding allows.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Output]
    head: Callable[[Params, jax.Array], jax.Array]
    axes: Any
    vocab_size: int
    max_positions: int
