"""One training step as pure functions: arrays -> advantages -> select -> loss -> update."""

from __future__ import annotations

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
from jaxrl_llm.signature import fact, name_of, scope_of
from jaxrl_llm.types import Batch, Prompts

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, weight)


@flax.struct.dataclass
class TrainState:
    """All that an update changes."""

    params: Params
    opt_state: Any
    updates: jax.Array  # [] int32, optimizer updates applied
    skipped: jax.Array  # [] int32, updates left out because they were not finite


@flax.struct.dataclass
class Rows:
    """A batch made ready for the loss: everything in it is constant during its updates."""

    prompts: Prompts
    present: jax.Array | None  # [B, G] bool: rows that have a reward; None: all
    arrays: dict[str, jax.Array]  # [B, G] or [B, G, T]: tokens, mask, weights, and what the loss asks for
    scalars: dict[str, jax.Array]

    def take(self, index: jax.Array) -> Rows:
        """Returns the rows of some prompts."""
        rows = jax.tree.map(lambda a: a[index], (self.prompts, self.present, self.arrays))
        return Rows(*rows, self.scalars)


@flax.struct.dataclass
class Update:
    """Which update of the run this is; all traced."""

    key: jax.Array  # the step's shuffling key
    number: jax.Array  # [] int32, counts the updates on this batch from 0


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    return TrainState(params, tx.init(params), jnp.int32(0), jnp.int32(0))


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
) -> tuple[Rows, Metrics]:
    """Computes what the signatures ask for, then runs the reward, advantage and select stages.

    Args:
      ref_params: the reference policy; needed only if `need.reference`.
      how: the sampling distribution of the rollout.
      scalars: step, total_steps.
      microbatch: prompts in one forward pass.
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
        of_part = lambda part: providers.response_arrays(policy, params, *part, how, entropy=entropy)
        return _in_parts(of_part, (batch.prompts, rollout.tokens), microbatch)

    if need.forward:
        made = jax.lax.stop_gradient(forward(params, "entropy" in need.plan))
        arrays |= made | {"old_logp": made["logp"]}
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


def _in_parts(fn: Callable, batch: Any, size: int) -> Any:
    """Maps `fn` over a batch in parts of `size` prompts."""
    total = jax.tree.leaves(batch)[0].shape[0]
    if size in (0, total):
        return fn(batch)
    parts = jax.tree.map(lambda a: a.reshape(total // size, size, *a.shape[1:]), batch)
    return jax.tree.map(lambda a: a.reshape(total, *a.shape[2:]), jax.lax.map(fn, parts))


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
    any split into microbatches gives the same sum. Prompts whose loss is zero whatever the policy does come
    last in the order and are not visited.
    """
    mask = rows.arrays["mask"]
    token_weights = _aggregation_weights(providers.aggregate_of(objective), mask, rows.present)
    rows = rows.replace(arrays={**rows.arrays, "token_weights": token_weights})
    total = mask.shape[0]
    size = microbatch or total
    value_and_grad = jax.value_and_grad(
        lambda params, part: _loss(policy, objective, need, params, part, how), has_aux=True
    )
    active = _active(objective, rows)
    order = jnp.argsort(~active, stable=True)
    count = -(-jnp.sum(active) // size)

    def visit(i, carry):
        part = rows.take(jax.lax.dynamic_slice_in_dim(order, i * size, size))
        if batch_sharding is not None:
            place = lambda a: jax.lax.with_sharding_constraint(a, batch_sharding)
            part = part.replace(
                **{n: jax.tree.map(place, getattr(part, n)) for n in ("prompts", "present", "arrays")}
            )
        (_, measured), grads = value_and_grad(params, part)
        drift = jnp.maximum(carry[2], measured.pop("drift_max"))
        add = lambda a, b: jax.tree.map(jnp.add, a, b)
        return add(carry[0], grads), add(carry[1], measured), drift

    part = jax.eval_shape(lambda: rows.take(order[:size]))
    shapes = jax.eval_shape(lambda p: _loss(policy, objective, need, params, p, how)[1], part)
    shapes.pop("drift_max")
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    grads, metrics, drift = jax.lax.fori_loop(0, count, visit, (zeros(params), zeros(shapes), jnp.zeros(())))
    first = (update.number == 0) & (count > 0)
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


def _active(objective: cfg.Objective, rows: Rows) -> jax.Array:
    """Returns `[B]` bool: prompts whose loss may have a gradient."""
    mask = rows.arrays["mask"]
    live = mask & (rows.arrays["token_weights"] != 0)
    only_loss = all(coefficient == 0 for coefficient, _ in objective.regularize)
    if only_loss and fact(objective.loss, "zero_at_zero_advantage"):
        live &= (per_token(rows.arrays["advantages"], mask) != 0) & (rows.arrays["weights"] != 0)
    return jnp.any(live, axis=(1, 2))


def _loss(
    policy: Policy, objective: cfg.Objective, need: Needs, params: Params, rows: Rows, how: Sampling
) -> tuple[jax.Array, Metrics]:
    """Returns this part's share of the aggregated loss, and (sum, weight) metrics."""
    arrays, mask = dict(rows.arrays), rows.arrays["mask"]
    made = providers.response_arrays(
        policy, params, rows.prompts, arrays["tokens"], how, entropy="entropy" in need.live
    )
    # Padding has log-probabilities of its own; a zero there keeps them out of ratios.
    arrays |= {name: jnp.where(mask, value, 0) for name, value in made.items()}
    logp = jax.lax.stop_gradient(arrays["logp"])
    if need.old_is_live:
        arrays["old_logp"] = logp
    apply = lambda fn: providers.call(fn, {**arrays, **rows.scalars}, rows.present, default_scope="sequence")
    total = apply(objective.loss) * arrays["weights"]
    metrics: Metrics = {}
    tokens = jnp.sum(mask)
    mean = lambda value: (jnp.sum(jnp.where(mask, jax.lax.stop_gradient(value), 0)), tokens)
    for coefficient, fn in objective.regularize:
        term = apply(fn)
        total += coefficient * term
        metrics[f"regularize/{name_of(fn)}"] = mean(term)
    loss = jnp.sum(jnp.where(mask, total * arrays["token_weights"], 0))
    difference = jnp.where(mask, jnp.abs(logp - arrays["behavior_logp"]), 0)
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


def check_objective(objective: cfg.Objective, *, microbatch: int) -> Needs:
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
    return providers.needs(objective)
