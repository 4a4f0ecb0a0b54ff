"""The step against its plain twin: whole sequences, no sharing, no microbatches, no skipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import config as cfg
from jaxrl_llm import keys, step
from jaxrl_llm.advantages import (
    discounted_return_to_go,
    group_mean_centered,
    group_zscore,
    leave_one_out,
    masked_whiten,
)
from jaxrl_llm.losses import (
    constant_length,
    entropy_bonus,
    kl_k3,
    ppo_clip,
    reinforce_loss,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from jaxrl_llm.models.decoder import DecoderConfig, decoder
from jaxrl_llm.models.policy import Block
from jaxrl_llm.providers import needs, response_arrays
from jaxrl_llm.rewards.shape import kl_shaped_token_rewards
from jaxrl_llm.rollout.distribution import sampling
from jaxrl_llm.select import masked_is_weights, overlong_filter, truncated_is_weights
from jaxrl_llm.types import Batch, Prompts, Rollout

CONFIG = DecoderConfig(
    vocab_size=31, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32, max_positions=64, tied=False
)
POLICY = decoder(CONFIG)
B, G, T, P = 4, 3, 5, 7
HOW = sampling((), temperature=0.8)


def params_of(seed):
    return POLICY.init(jax.random.key(seed))


def batch_of(seed=0, *, rewards=None, scored=None):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, (B, G))
    keep = np.arange(T) < lengths[..., None]
    prompts = Prompts(
        rng.integers(1, 31, (B, P)).astype(np.int32),
        rng.integers(1, P + 1, B).astype(np.int32),
        np.arange(B, dtype=np.int32),
    )
    rollout = Rollout(
        tokens=np.where(keep, rng.integers(1, 31, (B, G, T)), 0).astype(np.int32),
        lengths=lengths.astype(np.int32),
        truncated=lengths == T,
        behavior_logp=np.where(keep, rng.normal(-3, 0.3, (B, G, T)), 0).astype(np.float32),
    )
    rewards = rng.normal(size=(B, G)) if rewards is None else np.asarray(rewards, float)
    if scored is not None:
        rewards = np.where(scored, rewards, 0)
    return Batch(prompts, rollout, rewards.astype(np.float32), rewards >= 1, scored)


def objective_of(**changes):
    return cfg.Objective(**{"advantage": group_zscore, "loss": ppo_clip, "aggregate": token_mean} | changes)


def prepare(objective, params, ref_params, batch, scalars, *, microbatch):
    run = functools.partial(step.prepare, POLICY, objective, needs(objective), microbatch=microbatch)
    return jax.jit(run)(params, ref_params, batch, HOW, scalars)


def gradient_of(objective, batch, params, *, microbatch=0, ref_params=None):
    """The engine's gradient, read from an update of plain gradient descent with rate 1."""
    need, tx = needs(objective), optax.sgd(1.0)
    scalars = {"step": np.int32(0), "total_steps": np.int32(1)}
    rows, measured = prepare(objective, params, ref_params, batch, scalars, microbatch=microbatch)
    run = jax.jit(functools.partial(step.train_step, POLICY, objective, need, tx, microbatch=microbatch))
    which = step.Update(keys.key(0, keys.Stream.SHUFFLE), np.int32(0))
    state, metrics = run(step.init_state(params, tx), rows, HOW, which)
    return jax.tree.map(lambda a, b: a - b, params, state.params), metrics | measured


@jax.jit
def whole_sequence(params, ids, start):
    """Log-probabilities `[T]` and entropies from one pass over a sequence; the response begins at `start`."""
    block = Block(ids[None, None], jnp.arange(ids.size)[None, None])
    hidden = POLICY.apply(params, [block])[0].hidden[0, 0]
    hidden = jax.lax.dynamic_slice_in_dim(hidden, start - 1, T)
    logp = jax.nn.log_softmax(POLICY.head(params, hidden) / 0.8)
    taken = jax.lax.dynamic_slice_in_dim(ids, start, T)
    return logp[jnp.arange(T), taken], -jnp.sum(jnp.exp(logp) * logp, -1)


def plain_logp(params, batch, i, g):
    """Log-probabilities and entropies of one response, its own tokens only."""
    n, m = int(batch.prompts.lengths[i]), int(batch.rollout.lengths[i, g])
    ids = np.zeros(P + T, np.int32)
    ids[:n], ids[n : n + m] = batch.prompts.tokens[i, :n], batch.rollout.tokens[i, g, :m]
    return jax.tree.map(lambda a: a[:m], whole_sequence(params, ids, n))


def close(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(b))) + 1e-9)


def plain_grpo(params, batch, ref_params, beta, bonus):
    """GRPO with a KL and an entropy term, written out as in the paper, response by response."""
    total, tokens = 0.0, 0
    for i in range(B):
        r = np.asarray(batch.rewards[i], np.float64)
        advantages = (r - r.mean()) / (r.std() + 1e-6)
        for g in range(G):
            logp, entropy = plain_logp(params, batch, i, g)
            old = jax.lax.stop_gradient(logp)
            d = plain_logp(ref_params, batch, i, g)[0] - logp
            ratio = jnp.exp(logp - old)
            term = -advantages[g] * ratio + beta * (jnp.exp(d) - d - 1) - bonus * entropy
            total, tokens = total + jnp.sum(term), tokens + logp.size
    return total / tokens


@pytest.mark.parametrize("microbatch", [0, 1, 2])
def test_train_step_equals_grpo_written_out(microbatch):
    params, ref_params, batch = params_of(0), params_of(1), batch_of()
    objective = objective_of(regularize=((0.1, kl_k3), (1.0, functools.partial(entropy_bonus, coef=0.02))))
    got, metrics = gradient_of(objective, batch, params, microbatch=microbatch, ref_params=ref_params)
    value, want = jax.value_and_grad(plain_grpo)(params, batch, ref_params, 0.1, 0.02)
    close(got, want)
    np.testing.assert_allclose(metrics["loss"][0], value, rtol=1e-5)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean, sequence_sum, constant_length])
def test_train_step_is_the_same_for_every_microbatch_split(aggregate):
    """Pitfall 2: the split into microbatches changes nothing."""
    params, batch = params_of(0), batch_of(1)
    want, metrics = gradient_of(objective_of(aggregate=aggregate), batch, params)
    for microbatch in (1, 2, 4):
        got, again = gradient_of(objective_of(aggregate=aggregate), batch, params, microbatch=microbatch)
        close(got, want, 1e-5)
        for name in metrics:
            np.testing.assert_allclose(again[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("devices", [2, 4])
def test_train_step_is_the_same_on_several_devices(devices):
    """Pitfall 2: the same value on 1, 2 and 4 devices."""
    params, batch = params_of(0), batch_of(1)
    want, _ = gradient_of(objective_of(), batch, params)
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    place = lambda tree, *axes: jax.device_put(tree, jax.NamedSharding(mesh, jax.P(*axes)))
    got, _ = gradient_of(objective_of(), place(batch, "data"), place(params))
    close(got, want, 1e-5)


def test_train_step_leaves_groups_without_contrast_out_exactly():
    params = params_of(0)
    batch = batch_of(rewards=[[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]])
    skipping = objective_of()
    visiting = objective_of(
        loss=lambda logp, old_logp, advantages, mask: ppo_clip(logp, old_logp, advantages, mask)
    )
    got, metrics = gradient_of(skipping, batch, params, microbatch=1)
    want, _ = gradient_of(visiting, batch, params, microbatch=1)
    close(got, want, 1e-6)
    assert float(metrics["zero_gradient_groups"][0]) == 2
    # Two of four groups were visited: the ratio is a mean over their tokens only.
    assert int(metrics["ratio"][1]) == int(batch.rollout.mask[np.array([1, 3])].sum())


def test_train_step_of_a_batch_without_contrast_is_zero_and_finite():
    got, metrics = gradient_of(objective_of(), batch_of(rewards=np.ones((B, G))), params_of(0), microbatch=2)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(got))
    assert float(metrics["loss"][0]) == 0


def test_prepare_leaves_an_unscored_sample_out_of_its_group():
    """Pitfall 15: [1, None, 0, 0]: statistics over three; no loss for the unscored sample."""
    scored = np.ones((B, G), bool)
    scored[1, 1] = False
    batch = batch_of(rewards=[[1, 0, 0], [1, 9, 0], [0, 1, 0], [1, 1, 0]], scored=scored)
    objective = objective_of(advantage=leave_one_out, aggregate=constant_length)
    scalars = {"step": np.int32(0), "total_steps": np.int32(1)}
    rows, _ = prepare(objective, params_of(0), None, batch, scalars, microbatch=0)
    np.testing.assert_allclose(rows.arrays["advantages"][1], [1, 0, -1])  # leave-one-out of [1, 0]
    np.testing.assert_allclose(rows.arrays["advantages"][0], [1, -0.5, -0.5])
    assert not np.asarray(rows.arrays["mask"][1, 1]).any()
    # The gradient is that of a batch in which the sample was never drawn: 11 responses in the normaliser.
    got, _ = gradient_of(objective, batch, params_of(0))

    def plain(params):
        total = 0.0
        for i in range(B):
            present = [g for g in range(G) if scored[i, g]]
            r = np.asarray(batch.rewards[i])[present]
            advantages = (r - r.mean()) * len(r) / (len(r) - 1)
            for g, a in zip(present, advantages):
                total -= a * jnp.sum(plain_logp(params, batch, i, g)[0])
        return total / (scored.sum() * T)

    close(got, jax.grad(plain)(params_of(0)))


def test_by_group_sees_sizes_as_they_are():
    from jaxrl_llm.providers import call

    seen = jnp.array([[True, True, True], [True, False, True], [False, False, False], [False, True, False]])
    rewards = jnp.array([[1.0, 0, 2], [3, 99, 5], [7, 7, 7], [99, 4, 99]])
    got = jax.jit(lambda r: call(group_mean_centered, {"rewards": r}, seen, default_scope="group"))(rewards)
    np.testing.assert_allclose(got, [[0, -1, 1], [-1, 0, 1], [0, 0, 0], [0, 0, 0]])


def test_prepare_without_absent_rows_equals_the_program_that_allows_them():
    batch = batch_of(rewards=[[1, 0, 0], [1, 9, 0], [0, 1, 0], [1, 1, 0]])
    objective = objective_of(advantage=leave_one_out, aggregate=constant_length)
    got, _ = gradient_of(objective, batch, params_of(0))
    want, _ = gradient_of(objective, batch.replace(scored=np.ones((B, G), bool)), params_of(0))
    close(got, want)


def test_prepare_runs_the_stages_of_reinforce_plus_plus():
    params, ref_params, batch = params_of(0), params_of(1), batch_of(2)
    objective = objective_of(
        shape=(cfg.Stage(functools.partial(kl_shaped_token_rewards, beta=0.1), "token_rewards"),),
        advantage=(discounted_return_to_go, masked_whiten),
    )
    need = needs(objective)
    assert need.reference and need.forward
    scalars = {"step": np.int32(0), "total_steps": np.int32(1)}
    rows, _ = prepare(objective, params, ref_params, batch, scalars, microbatch=2)
    returns, mask = np.zeros((B, G, T)), np.asarray(batch.rollout.mask)
    for i in range(B):
        for g in range(G):
            kl = plain_logp(params, batch, i, g)[0] - plain_logp(ref_params, batch, i, g)[0]
            token_rewards = -0.1 * np.asarray(kl)
            token_rewards[-1] += batch.rewards[i, g]
            returns[i, g, : kl.size] = np.cumsum(token_rewards[::-1])[::-1]
    valid = returns[mask]
    want = np.where(mask, (returns - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8), 0)
    np.testing.assert_allclose(rows.arrays["advantages"], want, atol=2e-5)


def test_prepare_applies_select_stages_to_weights_and_mask():
    params, batch = params_of(0), batch_of(3)
    objective = objective_of(select=(truncated_is_weights, cfg.Stage(overlong_filter, "mask")))
    scalars = {"step": np.int32(0), "total_steps": np.int32(1)}
    rows, _ = prepare(objective, params, None, batch, scalars, microbatch=0)
    mask, kept = np.asarray(batch.rollout.mask), ~np.asarray(batch.rollout.truncated)
    np.testing.assert_array_equal(rows.arrays["mask"], mask & kept[..., None])
    for i in range(B):
        for g in range(G):
            old = np.asarray(plain_logp(params, batch, i, g)[0])
            want = np.minimum(np.exp(old - batch.rollout.behavior_logp[i, g, : old.size]), 2)
            np.testing.assert_allclose(rows.arrays["weights"][i, g, : old.size], want, rtol=1e-4)


def test_needs_computes_only_what_is_asked_for():
    plain = needs(objective_of())
    assert not plain.reference and not plain.forward and plain.live == {"logp"} and plain.old_is_live
    assert needs(objective_of(regularize=((0.1, kl_k3),))).reference
    assert "entropy" in needs(objective_of(regularize=((1.0, entropy_bonus),))).live
    several = needs(objective_of(passes=2))
    assert several.forward and not several.old_is_live
    assert not needs(objective_of(loss=reinforce_loss, passes=2)).forward


def test_needs_refuses_an_array_that_nobody_provides():
    """Pitfall 28: a typo in a name is an error with a suggestion."""

    def my_loss(logp, old_lopg, mask):
        return logp * mask

    with pytest.raises(ValueError, match=r"my_loss.*'old_lopg'.*did you mean 'old_logp'"):
        needs(objective_of(loss=my_loss))


def test_train_step_skips_and_counts_a_step_that_is_not_finite():
    """Pitfall 3: the loss of step 2 is poisoned; parameters and optimizer state stay as they were."""
    params, objective = params_of(0), objective_of()
    tx, need = optax.adam(1e-2), needs(objective)
    run = jax.jit(functools.partial(step.train_step, POLICY, objective, need, tx, microbatch=2))
    which = step.Update(keys.key(0, keys.Stream.SHUFFLE), np.int32(0))
    scalars = {"step": np.int32(0), "total_steps": np.int32(3)}
    states = [step.init_state(params, tx)]
    for number in range(3):
        batch = batch_of(number)
        if number == 1:
            batch = batch.replace(rewards=np.where(np.arange(G) == 0, np.nan, batch.rewards))
        rows, _ = prepare(objective, params, None, batch, scalars, microbatch=2)
        states.append(run(states[-1], rows, HOW, which)[0])
    assert [int(s.skipped) for s in states] == [0, 0, 1, 1]
    assert [int(s.updates) for s in states] == [0, 1, 1, 2]
    for a, b in zip(
        jax.tree.leaves((states[1].params, states[1].opt_state)),
        jax.tree.leaves((states[2].params, states[2].opt_state)),
    ):
        np.testing.assert_array_equal(a, b)


def test_train_step_counts_updates_over_minibatches_and_passes():
    """Pitfall 21: 4 rollouts x 2 minibatches x 2 passes are 16 updates; the rate is half at update 8."""
    from jaxrl_llm.optimizers import build, schedule

    options = cfg.Optimizer(learning_rate=1e-2, schedule="linear")
    rate, tx = schedule(options, 16), build(options, 16)
    objective = objective_of(minibatches=2, passes=2)
    need = needs(objective)
    run = jax.jit(functools.partial(step.train_step, POLICY, objective, need, tx, microbatch=1))
    state = step.init_state(params_of(0), tx)
    ratios = []
    for number in range(4):
        scalars = {"step": np.int32(number), "total_steps": np.int32(4)}
        rows, _ = prepare(objective, state.params, None, batch_of(number), scalars, microbatch=1)
        for inner in range(4):
            which = step.Update(keys.key(0, keys.Stream.SHUFFLE, number), np.int32(inner))
            if int(state.updates) == 8:
                np.testing.assert_allclose(rate(int(state.updates)), 0.5e-2, rtol=1e-6)
            state, metrics = run(state, rows, HOW, which)
            ratios.append(float(metrics["ratio"][0] / metrics["ratio"][1]))
    assert int(state.updates) == 16 and float(rate(16)) == 0
    assert (
        int(
            optax.tree_utils.tree_get(
                state.opt_state, "count", filtering=lambda p, _: "ScaleByAdam" in str(p)
            )
        )
        == 16
    )
    assert abs(ratios[0] - 1) < 1e-5 and abs(ratios[2] - 1) > 1e-4


def test_minibatches_of_a_pass_cover_every_prompt_once():
    rows = step.Rows(
        None, jnp.ones((B, G), bool), {"mask": jnp.ones((B, G, T)), "id": jnp.arange(B)[:, None]}, {}
    )
    for one_pass in range(3):
        ids = [
            step._minibatch(rows, step.Update(jax.random.key(3), jnp.int32(2 * one_pass + part)), 2).arrays[
                "id"
            ]
            for part in range(2)
        ]
        assert sorted(np.concatenate(ids).ravel().tolist()) == list(range(B))


def test_response_arrays_holds_logits_of_a_chunk_only():
    """Pitfall 25: no [B, T, V] array in the program, forward or backward."""
    batch = batch_of()

    def total(params):
        made = response_arrays(
            POLICY, params, batch.prompts, batch.rollout.tokens, HOW, entropy=True, chunk=8
        )
        return jnp.sum(made["logp"]) + jnp.sum(made["entropy"])

    text = str(jax.make_jaxpr(jax.grad(total))(params_of(0)))
    assert "f32[8,31]" in text
    for shape in ("f32[60,31]", "f32[4,3,5,31]", "f32[12,5,31]", "f32[64,31]", "f32[8,8,31]"):
        assert shape not in text, shape


def test_response_arrays_does_not_depend_on_the_chunk_or_on_padding():
    """Pitfall 6: a prompt of 3 tokens alone and beside a longer one; log-probs equal to 1e-5."""
    batch, params = batch_of(), params_of(0)
    mask = np.asarray(batch.rollout.mask)
    arrays = [
        np.asarray(
            response_arrays(POLICY, params, batch.prompts, batch.rollout.tokens, HOW, chunk=chunk)["logp"]
        )
        for chunk in (1, 7, 512)
    ]
    for other in arrays[1:]:
        np.testing.assert_allclose(other[mask], arrays[0][mask], atol=1e-6)
    for i in range(B):
        for g in range(G):
            want = plain_logp(params, batch, i, g)[0]
            np.testing.assert_allclose(arrays[0][i, g][mask[i, g]], want, atol=1e-5)


def test_select_of_pure_rejection_renormalises():
    params, batch = params_of(0), batch_of(4)
    reject = functools.partial(masked_is_weights, weighted=False, low=0.8, high=1.25)
    got, _ = gradient_of(objective_of(select=(cfg.Stage(reject, "mask"),)), batch, params)

    logps = {(i, g): plain_logp(params, batch, i, g)[0] for i in range(B) for g in range(G)}

    def plain(params):
        total, tokens = 0.0, 0
        for (i, g), old in logps.items():
            r = np.asarray(batch.rewards[i], np.float64)
            ratio = np.exp(old - batch.rollout.behavior_logp[i, g, : old.size])
            keep = (ratio >= 0.8) & (ratio <= 1.25)
            advantage = (r[g] - r.mean()) / (r.std() + 1e-6)
            total -= advantage * jnp.sum(plain_logp(params, batch, i, g)[0] * keep)
            tokens += keep.sum()
        return total / tokens

    close(got, jax.grad(plain)(params))
