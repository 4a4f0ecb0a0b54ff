"""Array name -> how the engine computes it.

The engine reads the signatures of a method's functions and computes what they ask for, nothing else: no
reference forward pass unless some function has a parameter `ref_logp`, no entropy unless asked.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm import config as cfg
from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.losses import token_mean
from jaxrl_llm.models.policy import Block, Params, Policy
from jaxrl_llm.rollout.distribution import Sampling
from jaxrl_llm.rollout.sampler import last_hidden, prompt_block
from jaxrl_llm.signature import arrays_of, did_you_mean, name_of, scope_of, unwrap
from jaxrl_llm.types import Prompts

SAMPLED = ("tokens", "mask", "lengths", "truncated", "behavior_logp")  # the sampler returns them
SCORED = ("rewards", "correct")  # the rewards give them
FORWARD = ("logp", "old_logp", "entropy")  # a pass of the policy over the responses
REFERENCE = ("ref_logp",)  # a pass of the reference policy
SCALARS = ("group_size", "step", "total_steps")
PROVIDED = (*SAMPLED, *SCORED, *FORWARD, *REFERENCE, *SCALARS)

CHUNK = 512  # tokens whose logits are held at one time


@dataclass(frozen=True)
class Needs:
    """What a method asks for.

    Attributes:
      plan: arrays that are computed once, before the first update on a batch.
      live: arrays under the policy being trained, computed again in every update, with gradients.
      old_is_live: the only update on a batch starts from the sampling policy itself, so `old_logp` in the
        loss is `logp` without its gradient, and no pass is spent on it.
      old_is_behavior: the sampling policy is older than the one that is updated, so `old_logp` is what the
        sampler reported, and the ratio corrects for the difference.
    """

    plan: frozenset[str]
    live: frozenset[str]
    old_is_live: bool
    old_is_behavior: bool = False

    @property
    def reference(self) -> bool:
        return not self.plan.isdisjoint(REFERENCE)

    @property
    def forward(self) -> bool:
        """Whether the policy itself must run over the responses before the first update."""
        return not self.plan.isdisjoint(FORWARD)


def stages(objective: cfg.Objective) -> list[cfg.Stage]:
    """Returns the stages before the loss, in order, each with the name of its result."""
    advantage = objective.advantage if isinstance(objective.advantage, tuple) else (objective.advantage,)
    named = lambda part, to: part if isinstance(part, cfg.Stage) else cfg.Stage(part, to)
    return [
        *objective.shape,
        *(named(part, "advantages") for part in advantage),
        *(named(part, "weights") for part in objective.select),
    ]


def results_of(stage: cfg.Stage) -> tuple[str, ...]:
    """Returns the names that a stage adds: the fields of a NamedTuple, else `stage.to`."""
    returned = typing.get_type_hints(unwrap(stage.fn)).get("return")
    return getattr(returned, "_fields", (stage.to,))


def loss_functions(objective: cfg.Objective) -> tuple[Callable, ...]:
    return (objective.loss, *(fn for _, fn in objective.regularize))


def needs(objective: cfg.Objective, *, stale: bool = False) -> Needs:
    """Reads the signatures of every function of `objective`.

    Args:
      stale: responses come from parameters older than those of the step's start.

    Raises:
      ValueError: a function asks for an array that nobody provides.
    """
    plan: set[str] = set()
    made: set[str] = set()
    for stage in stages(objective):
        plan |= _asked(stage.fn, made)
        made |= set(results_of(stage))
    single = objective.minibatches * objective.passes == 1 and not stale
    live = set()
    for fn in loss_functions(objective):
        asked = _asked(fn, made)
        live |= asked & {"logp", "entropy"}
        plan |= asked - {"logp", "entropy"} - ({"old_logp"} if single else set())
    if stale:
        plan.discard("old_logp")
    return Needs(frozenset(plan), frozenset(live), old_is_live=single, old_is_behavior=stale)


def _asked(fn: Callable, made: set[str]) -> set[str]:
    out = set()
    for name in arrays_of(fn):
        if name in made:
            continue
        if name not in PROVIDED:
            raise ValueError(
                f"{name_of(fn)} asks for the array {name!r}, which nobody provides"
                f"{did_you_mean(name, {*PROVIDED, *made})}"
            )
        out.add(name)
    return out


def response_arrays(
    policy: Policy,
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    how: Sampling,
    *,
    mask: jax.Array | None = None,
    entropy: bool = False,
    chunk: int = CHUNK,
) -> dict[str, jax.Array]:
    """Runs the policy over prompts and responses.

    The prompt runs once for its G responses, which attend to its keys, through each layer together with them,
    so that the matrix products have the rows of both. Logits exist for `chunk` tokens at a
    time, in the backward pass too: there is no `[B, G, T, V]` array.

    Args:
      tokens: `[B, G, T]` responses, padded on the right.
      how: the sampling distribution under which log-probabilities are taken.
      mask: `[B, G, T]` bool, which tokens are asked for; None means all.
      entropy: compute `entropy` too.
      chunk: tokens whose logits are held at one time, but at least one of each prompt.

    Returns:
      `logp` and, if asked, `entropy`, each `[B, G, T]`; 0 outside the mask.
    """
    blocks = [prompt_block(prompts)]
    fed = tokens[..., :-1]
    if fed.size:
        positions = prompts.lengths[:, None, None] + jnp.arange(fed.shape[-1])
        blocks.append(Block(fed, jnp.broadcast_to(positions, fed.shape)))
    of_prompt, *of_responses = policy.apply(params, blocks)
    last = last_hidden(of_prompt, prompts)[:, :, None]
    first = jnp.broadcast_to(last, (*tokens.shape[:2], 1, last.shape[-1]))
    hidden = jnp.concatenate([first, *(out.hidden for out in of_responses)], axis=2)

    flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    out = token_logprobs(
        functools.partial(policy.head, params),
        *map(flat, (hidden, tokens, mask)),
        how,
        entropy=entropy,
        chunk=chunk,
    )
    return {name: x.reshape(tokens.shape) for name, x in out.items()}


def call(
    fn: Callable, arrays: Mapping[str, jax.Array], present: jax.Array | None, *, default_scope: str
) -> jax.Array:
    """Calls a stage function on the whole step, vmapped from its own scope.

    Args:
      fn: the function; its parameters are looked up in `arrays`.
      arrays: `[B, G, ...]` arrays and scalars by name.
      present: `[B, G]` bool; a function of scope "group" sees only the present rows of each group. None: all
        are present. That is a program of its own, without the branches for groups of each size.
      default_scope: for a function that declares none.
    """
    args = [jnp.asarray(arrays[name]) for name in arrays_of(fn)]
    axes = [0 if a.ndim else None for a in args]
    scope = scope_of(fn, default_scope)
    if scope == "batch":
        return fn(*args)
    if scope == "group":
        of_groups = jax.vmap(fn, axes)
        return of_groups(*args) if present is None else _by_group(fn, args, axes, jnp.asarray(present))
    return jax.vmap(jax.vmap(fn, axes), axes)(*args)


def _by_group(fn: Callable, args: list[jax.Array], axes: list[int | None], present: jax.Array):
    """Computes each group at its own size, without its absent rows."""
    size = present.shape[1]

    def at_size(count):
        def compute(order, *group):
            rows = order[:count]
            out = fn(*(a[rows] if axis == 0 else a for a, axis in zip(group, axes)))
            # Absent rows get zeros; a scalar of the group has no rows.
            return jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[rows].set(x), out)

        def nothing(order, *group):
            return jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(at_size(1), order, *group)
            )

        return compute if count else nothing

    branches = [at_size(count) for count in range(size + 1)]
    order = jnp.argsort(~present, axis=1, stable=True)

    def one(row):
        group = [a[row] if axis == 0 else a for a, axis in zip(args, axes)]
        return jax.lax.switch(jnp.sum(present[row]), branches, order[row], *group)

    return jax.lax.map(one, jnp.arange(present.shape[0]))


def aggregate_of(objective: cfg.Objective) -> Callable:
    return objective.aggregate or token_mean
