"""One training step as pure functions: arrays -> advantages -> select -> loss -> update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import config as cfg
from jaxrl_llm import providers
from jaxrl_llm.masked import aggregation_weights, per_token
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.providers import Needs
from jaxrl_llm.rollout.distribution import Sampling
from jaxrl_llm.signature import SCOPES, fact, name_of, scope_of
from jaxrl_llm.sizes import Size, plan, static_sizes, visit_all
from jaxrl_llm.types import Batch, Prompts

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, weight)


@flax.struct.dataclass
class TrainState:
    """All that an update changes."""

    params: Params
    opt_state: Any
    updates: jax.Array  # [] int32, optimizer updates applied
    skipped: jax.Array  # [] int32, updates left out because they were not finite
    sampler_params: Params | None = None  # with `rollout.stale`: what samples the next step


@flax.struct.dataclass
class Rows:
    """A batch made ready for the loss: everything in it is constant during its updates."""

    prompts: Prompts
    present: jax.Array | None  # [B, G] bool: rows that have a reward; None: all
    arrays: dict[str, jax.Array]  # [B, G] or [B, G, T]: tokens, mask, weights, and what the loss asks for
    scalars: dict[str, jax.Array]

    def take(self, index: jax.Array) -> Rows:
        """Returns the rows of some prompts."""
        return Rows(*_take((self.prompts, self.present, self.arrays), index), self.scalars)

    def cut(self, size: Size) -> Rows:
        """Returns the first samples, and the first tokens of each."""
        return Rows(self.prompts, *jax.tree.map(size.cut, (self.present, self.arrays)), self.scalars)

    def samples_first(self, chosen: jax.Array) -> Rows:
        """Returns the rows with the chosen samples `[B, G]` of each prompt before the others."""
        order = jnp.argsort(~chosen, axis=1, stable=True)
        sort = lambda a: jnp.take_along_axis(a, order.reshape(*order.shape, *[1] * (a.ndim - 2)), axis=1)
        return Rows(self.prompts, *jax.tree.map(sort, (self.present, self.arrays)), self.scalars)


@flax.struct.dataclass
class Update:
    """Which update of the run this is; all traced."""

    key: jax.Array  # the step's shuffling key
    number: jax.Array  # [] int32, counts the updates on this batch from 0


def init_state(params: Params, tx: optax.GradientTransformation, *, stale: bool = False) -> TrainState:
    """Returns the state of a run that has made no update; `params` are not copied."""
    return TrainState(params, tx.init(params), jnp.int32(0), jnp.int32(0), params if stale else None)


def prepare(
    policy: Policy,
    objective: cfg.Objective,
    need: Needs,
    params: Params,
    ref_params: Params | None,
    batch: Batch,
    how: Sampling,
    scalars: dict[str, jax.Array],
    *,
    microbatch: int,
    batch_sharding: jax.sharding.Sharding | None = None,
) -> tuple[Rows, Metrics]:
    """Computes what the signatures ask for, then runs the reward, advantage and select stages.

    Args:
      ref_params: the reference policy; needed only if `need.reference`.
      how: the sampling distribution of the rollout.
      scalars: step, total_steps.
      microbatch: prompts in one forward pass; 0: all.
      batch_sharding: of the prompts in one forward pass; None leaves it to the compiler.
    """
    rollout = batch.rollout
    present = jnp.ones(batch.rewards.shape, bool) if batch.scored is None else batch.scored
    mask = rollout.mask & present[..., None]
    arrays = {
        "tokens": rollout.tokens,
        "mask": mask,
        "lengths": rollout.lengths,
        "truncated": rollout.truncated,
        "behavior_logp": rollout.behavior_logp,
        "rewards": batch.rewards,
        "correct": batch.correct,
        "weights": mask.astype(batch.rewards.dtype),
    }
    scalars = {**scalars, "group_size": jnp.int32(present.shape[1])}

    def forward(params, entropy):
        of_part = functools.partial(providers.response_arrays, policy, params, how=how, entropy=entropy)
        whole = (batch.prompts, rollout.tokens, mask)
        return _in_parts(of_part, whole, microbatch or present.shape[0], batch_sharding)

    if need.old_is_behavior:
        arrays["old_logp"] = rollout.behavior_logp
    if need.forward:
        made = jax.lax.stop_gradient(forward(params, "entropy" in need.plan))
        arrays = made | {"old_logp": made["logp"]} | arrays
    if need.reference:
        arrays["ref_logp"] = forward(ref_params, False)["logp"]
    for stage in providers.stages(objective):
        _run_stage(stage, arrays, scalars, batch.scored)
    spread = present[..., None] if arrays["advantages"].ndim == 3 else present
    arrays["advantages"] = jnp.where(spread, arrays["advantages"], 0)
    asked = {n for fn in providers.loss_functions(objective) for n in providers.arrays_of(fn)}
    kept = {n: a for n, a in arrays.items() if n in asked | {"tokens", "mask", "weights", "behavior_logp"}}
    kept.pop("logp", None)
    return Rows(batch.prompts, batch.scored, kept, scalars), _batch_metrics(arrays, present)


def _run_stage(stage: cfg.Stage, arrays: dict, scalars: dict, present: jax.Array | None) -> None:
    """Runs one stage and puts its result into `arrays`."""
    made = providers.call(stage.fn, {**arrays, **scalars}, present, default_scope="group")
    fields = made._asdict() if hasattr(made, "_asdict") else {stage.to: made}
    for name, value in fields.items():
        if stage.add:
            value = arrays[name] + value
        elif name == "weights":
            value = arrays[name] * per_token(value, arrays["mask"])
        elif name == "mask":
            value = arrays[name] & (value != 0)
        arrays[name] = value


def _in_parts(
    fn: Callable[..., dict[str, jax.Array]],
    whole: tuple[Prompts, jax.Array, jax.Array],
    microbatch: int,
    batch_sharding: jax.sharding.Sharding | None,
) -> dict[str, jax.Array]:
    """Calls `fn(prompts, tokens, mask=mask)` on microbatches, each cut to its longest response.

    Returns:
      `[B, G, T]` arrays, 0 outside the mask.
    """
    mask = whole[-1]
    sizes = static_sizes(*mask.shape[1:], halve_samples=False)

    def visit(size: Size, index: jax.Array, made: dict) -> dict:
        prompts, tokens, mask = _take(whole, index)
        prompts, tokens, mask = _place((prompts, size.cut(tokens), size.cut(mask)), batch_sharding)
        put = lambda to, x: to.at[index, :, : size.tokens].set(x)
        return jax.tree.map(put, made, fn(prompts, tokens, mask=mask))

    shapes = jax.eval_shape(lambda: fn(*whole[:2], mask=mask))
    return visit_all(plan(_lengths(mask), sizes, microbatch), sizes, visit, _zeros(shapes))


def _take(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def _place(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    if sharding is None:
        return tree
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), tree)


def _lengths(mask: jax.Array) -> jax.Array:
    """Returns the number of tokens up to the last one under the mask: `[B, G]`."""
    return jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[-1] + 1), 0), axis=-1)


def _batch_metrics(arrays: dict[str, jax.Array], present: jax.Array) -> Metrics:
    spread = per_token(arrays["advantages"], arrays["mask"])
    idle = ~jnp.any(spread != 0, axis=(1, 2))
    return {
        "zero_gradient_groups": (jnp.sum(idle), jnp.float32(idle.size)),
        "advantage_abs": (jnp.sum(jnp.abs(spread)), jnp.sum(arrays["mask"])),
        "shaped_reward": (jnp.sum(jnp.where(present, arrays["rewards"], 0)), jnp.sum(present)),
    }


def train_step(
    policy: Policy,
    objective: cfg.Objective,
    need: Needs,
    tx: optax.GradientTransformation,
    state: TrainState,
    rows: Rows,
    how: Sampling,
    update: Update,
    *,
    microbatch: int,
    batch_sharding: jax.sharding.Sharding | None = None,
) -> tuple[TrainState, Metrics]:
    """Makes one optimizer update on one minibatch.

    A step whose loss or gradient is not finite changes neither parameters nor optimizer state; it is counted.
    """
    rows = _minibatch(rows, update, objective.minibatches)
    places = {"microbatch": microbatch, "batch_sharding": batch_sharding}
    grads, metrics = _gradient(policy, objective, need, state.params, rows, how, update, **places)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"][0])
    changes, opt_state = tx.update(grads, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, changes), opt_state)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), new, (state.params, state.opt_state)
    )
    metrics["grad_norm"] = (norm, jnp.float32(1))
    applied = finite.astype(jnp.int32)
    return TrainState(params, opt_state, state.updates + applied, state.skipped + 1 - applied), metrics


def _minibatch(rows: Rows, update: Update, minibatches: int) -> Rows:
    """Returns the prompts of this update; each pass over the batch has an order of its own."""
    if minibatches == 1:
        return rows
    total = rows.arrays["mask"].shape[0]
    size = total // minibatches
    one_pass, part = update.number // minibatches, update.number % minibatches
    order = jax.random.permutation(jax.random.fold_in(update.key, one_pass), total)
    return rows.take(jax.lax.dynamic_slice_in_dim(order, part * size, size))


def _gradient(
    policy: Policy,
    objective: cfg.Objective,
    need: Needs,
    params: Params,
    rows: Rows,
    how: Sampling,
    update: Update,
    *,
    microbatch: int,
    batch_sharding: jax.sharding.Sharding | None,
) -> tuple[Params, Metrics]:
    """Sums the gradient over microbatches of prompts.

    An aggregation is linear in the token losses, so its weights are found once for the whole minibatch, and
    any split into microbatches gives the same sum, as does any cut that leaves out zero terms: prompts and
    samples whose loss is zero whatever the policy does, and tokens after the last one of a microbatch.
    """
    mask = rows.arrays["mask"]
    token_weights = _aggregation_weights(providers.aggregate_of(objective), mask, rows.present)
    rows = rows.replace(arrays={**rows.arrays, "token_weights": token_weights})
    active = _active(objective, rows)
    rows = rows.replace(arrays={**rows.arrays, "active": active})
    # Other than by its advantage, a single sample is idle only where something filtered it.
    filtered = bool(objective.select) or rows.present is not None
    halve_samples = filtered and _scope(objective) == "sequence"
    if halve_samples:
        rows = rows.samples_first(active)
    sizes = static_sizes(*mask.shape[1:], halve_samples=halve_samples)
    needed = jnp.where(rows.arrays["active"], _lengths(rows.arrays["mask"]), 0)
    value_and_grad = jax.value_and_grad(
        lambda params, part: _loss(policy, objective, need, params, part, how), has_aux=True
    )

    def visit(size: Size, prompts: jax.Array, carry: tuple) -> tuple:
        part = rows.take(prompts).cut(size)
        part = Rows(*_place((part.prompts, part.present, part.arrays), batch_sharding), part.scalars)
        (_, measured), grads = value_and_grad(params, part)
        drift = jnp.maximum(carry[2], measured.pop("drift_max"))
        add = lambda a, b: jax.tree.map(jnp.add, a, b)
        return add(carry[0], grads), add(carry[1], measured), drift

    shapes = jax.eval_shape(lambda: _loss(policy, objective, need, params, rows, how)[1])
    shapes.pop("drift_max")
    start = (_zeros(params), _zeros(shapes), jnp.zeros(()))
    visits = plan(needed, sizes, microbatch or mask.shape[0])
    grads, metrics, drift = visit_all(visits, sizes, visit, start)
    first = (update.number == 0) & (visits.ends[-1] > 0)
    metrics["loss"] = (metrics["loss"][0], jnp.ones(()))
    # After the first update the policy is no longer the sampler's, so the difference says nothing.
    metrics["drift_mean"] = jax.tree.map(lambda a: jnp.where(first, a, 0), metrics["drift_mean"])
    metrics["drift_max"] = (jnp.where(first, drift, 0), first.astype(drift.dtype))
    return grads, metrics


def _aggregation_weights(aggregate: Callable, mask: jax.Array, present: jax.Array | None) -> jax.Array:
    """Returns `[B, G, T]`: d aggregate / d token loss."""
    weights = aggregation_weights(aggregate, mask)
    if present is not None and fact(aggregate, "counts_empty"):
        # The rows that are not there must not count as empty responses.
        weights *= present.size / jnp.maximum(jnp.sum(present), 1)
    return weights


def _scope(objective: cfg.Objective) -> str:
    """Returns the widest scope of the loss and its regularizers."""
    return max((scope_of(fn, "sequence") for fn in providers.loss_functions(objective)), key=SCOPES.index)


def _active(objective: cfg.Objective, rows: Rows) -> jax.Array:
    """Returns `[B, G]` bool: samples whose loss may have a gradient, and those that such a loss sees."""
    mask = rows.arrays["mask"]
    live = mask & (rows.arrays["token_weights"] != 0)
    only_loss = all(coefficient == 0 for coefficient, _ in objective.regularize)
    if only_loss and fact(objective.loss, "zero_at_zero_advantage"):
        live &= (per_token(rows.arrays["advantages"], mask) != 0) & (rows.arrays["weights"] != 0)
    live = jnp.any(live, axis=-1)
    seen_together = {"sequence": (), "group": 1, "batch": (0, 1)}[_scope(objective)]
    return jnp.broadcast_to(jnp.any(live, axis=seen_together, keepdims=True), live.shape)


def _loss(
    policy: Policy, objective: cfg.Objective, need: Needs, params: Params, rows: Rows, how: Sampling
) -> tuple[jax.Array, Metrics]:
    """Returns this part's share of the aggregated loss, and (sum, weight) metrics."""
    arrays, mask = dict(rows.arrays), rows.arrays["mask"]
    made = providers.response_arrays(
        policy, params, rows.prompts, arrays["tokens"], how, mask=mask, entropy="entropy" in need.live
    )
    arrays |= made
    logp = jax.lax.stop_gradient(arrays["logp"])
    if need.old_is_live:
        arrays["old_logp"] = logp
    apply = lambda fn: providers.call(fn, {**arrays, **rows.scalars}, rows.present, default_scope="sequence")
    total = apply(objective.loss) * arrays["weights"]
    metrics: Metrics = {}
    measured = mask & arrays["active"][..., None]  # whatever else the microbatch is filled up with
    tokens = jnp.sum(measured)
    mean = lambda value: (jnp.sum(jnp.where(measured, jax.lax.stop_gradient(value), 0)), tokens)
    for coefficient, fn in objective.regularize:
        term = apply(fn)
        total += coefficient * term
        metrics[f"regularize/{name_of(fn)}"] = mean(term)
    loss = jnp.sum(jnp.where(mask, total * arrays["token_weights"], 0))
    difference = jnp.where(measured, jnp.abs(logp - arrays["behavior_logp"]), 0)
    metrics |= {
        "loss": (loss, jnp.ones(())),
        "drift_mean": mean(difference),
        "drift_max": jnp.max(difference),
    }
    if "entropy" in arrays:
        metrics["entropy"] = mean(arrays["entropy"])
    if "old_logp" in arrays:
        metrics["ratio"] = mean(jnp.exp(logp - arrays["old_logp"]))
    return loss, metrics


def check_objective(objective: cfg.Objective, *, microbatch: int, stale: bool = False) -> Needs:
    """Checks at start that the engine can run the objective; returns what it asks for.

    Raises:
      ValueError: an array that nobody provides, or a loss of the whole batch in microbatches.
    """
    for fn in providers.loss_functions(objective):
        if scope_of(fn, "sequence") == "batch" and microbatch:
            raise ValueError(
                f"{name_of(fn)} needs the whole batch (scope 'batch'), but optimizer.microbatch is "
                f"{microbatch}; set it to 0"
            )
    return providers.needs(objective, stale=stale)
