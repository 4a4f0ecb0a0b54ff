"""A step cut to what its microbatches need, against the same step at full size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import config as cfg
from jaxrl_llm import keys, step
from jaxrl_llm.advantages import group_zscore
from jaxrl_llm.losses import entropy_bonus, kl_k3, ppo_clip, reinforce_loss
from jaxrl_llm.models.policy import Output, Policy
from jaxrl_llm.providers import needs
from jaxrl_llm.rollout.distribution import sampling
from jaxrl_llm.select import masked_is_weights, overlong_filter
from jaxrl_llm.sizes import Size
from jaxrl_llm.types import Batch, Prompts, Rollout

B, G, T, P, D, V = 6, 4, 40, 5, 8, 13
HOW = sampling(())


def bag_of_words(shapes):
    """A small causal policy: a token's state is the sum of all embeddings up to it, the prompt's too.

    It notes the shapes of the blocks that it is traced with.
    """

    def apply(params, blocks, past=()):
        shapes.extend(block.tokens.shape for block in blocks)
        outputs, before = [], 0.0
        for tokens, positions, mask in blocks:
            own = params["embed"][tokens] * (1 if mask is None else mask[..., None])
            keys = own[None, ..., None, :]
            total = (before + jnp.cumsum(own, axis=2)) / (1 + positions[..., None])
            before += jnp.sum(own, axis=2, keepdims=True)
            outputs.append(Output(jnp.tanh(total), keys, keys))
        return tuple(outputs)

    return Policy(
        init=lambda key: {"embed": jax.random.normal(key, (V, D))},
        apply=apply,
        head=lambda params, hidden: hidden @ params["embed"].T,
        axes=None,
        vocab_size=V,
        max_positions=100,
    )


def batch_of(dtype, *, longest=(3, 40, 14, 20, 40, 7)):
    """Groups of very different length; the last three samples of group 1 and two of group 4 are truncated."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, np.array(longest)[:, None] + 1, (B, G))
    lengths[:, 0] = longest
    lengths[1, 1:], lengths[4, :2] = T, T
    lengths[1, 0] = 11
    keep = np.arange(T) < lengths[..., None]
    draw = lambda *shape: rng.integers(1, V, shape).astype(np.int32)
    prompts = Prompts(draw(B, P), rng.integers(1, P + 1, B).astype(np.int32), np.arange(B, dtype=np.int32))
    rollout = Rollout(
        tokens=np.where(keep, draw(B, G, T), 0),
        lengths=lengths.astype(np.int32),
        truncated=lengths == T,
        behavior_logp=np.where(keep, rng.normal(-2.5, 0.3, keep.shape), 0).astype(dtype),
    )
    rewards = rng.normal(size=(B, G))
    rewards[3] = 1  # a group without contrast
    return Batch(prompts, rollout, rewards.astype(dtype), rewards > 0, None)


def objective_of(**changes):
    return cfg.Objective(**{"advantage": group_zscore, "loss": ppo_clip} | changes)


def gradient_of(objective, batch, microbatch, *, dtype="float32", shapes=None):
    policy = bag_of_words([] if shapes is None else shapes)
    cast = lambda tree: jax.tree.map(lambda a: a.astype(dtype), tree)
    params, reference = cast(policy.init(jax.random.key(0))), cast(policy.init(jax.random.key(1)))
    need, tx = needs(objective), optax.sgd(1.0)
    scalars = {"step": np.int32(0), "total_steps": np.int32(1)}
    run = functools.partial(step.prepare, policy, objective, need, microbatch=microbatch)
    rows, measured = jax.jit(run)(params, reference, batch, HOW, scalars)
    which = step.Update(keys.key(0, keys.Stream.SHUFFLE), np.int32(0))
    run = functools.partial(step.train_step, policy, objective, need, tx, microbatch=microbatch)
    state, metrics = jax.jit(run)(step.init_state(params, tx), rows, HOW, which)
    return jax.tree.map(lambda a, b: a - b, params, state.params), metrics | measured, rows.arrays


OVERLONG = cfg.Stage(overlong_filter, "mask")
OBJECTIVES = {
    "plain": {},
    "overlong": {"select": (OVERLONG,)},
    "rejection": {"select": (functools.partial(masked_is_weights, level="geometric", low=0.9, high=1.1),)},
    "regularized": {"regularize": ((0.1, kl_k3), (1.0, functools.partial(entropy_bonus, coef=0.02)))},
    "group": {"loss": reinforce_loss, "select": (OVERLONG,)},
}


@pytest.mark.parametrize(
    "name, microbatch, dtype, rtol",
    [(name, micro, "float64", 1e-12) for name, micro in zip(OBJECTIVES, (2, 1, 2, 3, 2))]
    + [("plain", 0, "float32", 1e-5), ("plain", 1, "float32", 1e-5), ("overlong", 2, "float32", 1e-5)],
)
def test_train_step_cut_to_what_is_needed_equals_the_uncut_one(name, microbatch, dtype, rtol, monkeypatch):
    with jax.enable_x64(dtype == "float64"):
        run = functools.partial(gradient_of, objective_of(**OBJECTIVES[name]), batch_of(dtype), microbatch)
        got = run(dtype=dtype)
        whole = lambda samples, tokens, *, halve_samples: (Size(samples, tokens),)
        monkeypatch.setattr(step, "static_sizes", whole)
        want = run(dtype=dtype)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(b))))


def sizes_visited(objective, batch, microbatch, monkeypatch):
    """The sizes of the microbatches whose gradient was computed."""
    visited, plain = [], step.visit_all

    def recording(visits, sizes, visit, carry):
        def noted(size, prompts, carry):
            jax.debug.callback(lambda: visited.append(tuple(size)))
            return visit(size, prompts, carry)

        return plain(visits, sizes, noted, carry)

    monkeypatch.setattr(step, "visit_all", recording)
    jax.block_until_ready(gradient_of(objective, batch, microbatch)[0])
    jax.effects_barrier()
    return sorted(visited)


def test_train_step_visits_each_microbatch_at_its_own_length(monkeypatch):
    """Responses up to 3, 40, 14, 20, 40 and 7 tokens; the group of 20 has no contrast."""
    shapes = []
    gradient_of(objective_of(), batch_of("float32"), 1, shapes=shapes)
    # The last token is never fed: blocks of 15, 31 and 39 tokens.
    assert {shape[-1] for shape in shapes if shape[1] == G} == {15, 31, 39}
    got = sizes_visited(objective_of(), batch_of("float32"), 1, monkeypatch)
    assert got == [(4, 16), (4, 16), (4, 16), (4, 40), (4, 40)]


def test_train_step_leaves_filtered_samples_out(monkeypatch):
    """The overlong filter leaves one sample of 11 tokens in group 1 and two in group 4."""
    objective = objective_of(select=(OVERLONG,))
    got = sizes_visited(objective, batch_of("float32"), 1, monkeypatch)
    assert sum(samples == 2 for samples, _ in got) == 2 and (2, 32) in got


def test_train_step_keeps_all_samples_of_a_group_for_a_loss_that_sees_the_group(monkeypatch):
    objective = objective_of(loss=reinforce_loss, select=(OVERLONG,))
    got = sizes_visited(objective, batch_of("float32"), 1, monkeypatch)
    assert {samples for samples, _ in got} == {G}


def test_prepare_runs_each_part_at_its_own_length(monkeypatch):
    """Two prompts at a time, long ones together: 40 and 40, 20 and 14, 7 and 3 tokens."""
    objective = objective_of(passes=2)
    got = sizes_visited(objective, batch_of("float32"), 2, monkeypatch)
    of_prepare = [(4, 16), (4, 32), (4, 40)]
    for size in of_prepare:
        got.remove(size)
    assert got == [(4, 16), (4, 16), (4, 40)]
