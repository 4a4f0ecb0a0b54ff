"""Every exported function of arrays passes the contract suite; functions with a fault don't."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.contract import (
    MENUS,
    VOCABULARY,
    ContractError,
    check_advantage,
    check_function,
    check_loss,
    menu,
)
from jaxrl_llm.contract.inputs import SIZES, draw_inputs
from jaxrl_llm.losses import constant_length
from jaxrl_llm.select import masked_is_weights, truncated_is_weights
from jaxrl_llm.signature import scope

# By the method cards the default of these depends on the padded length, which the contract forbids.
PARAMETERS = {"constant_length": {"length": 10}}

EXPORTED = {(MENUS[stage], name): (stage, fn) for stage in MENUS for name, fn in menu(stage).items()}


@pytest.mark.parametrize("stage, fn", EXPORTED.values(), ids=[f"{m}.{n}" for m, n in EXPORTED])
def test_exported_function_keeps_the_contract(stage, fn):
    # All of `losses` answers to the contract of a loss.
    stage = "loss" if MENUS[stage] == MENUS["loss"] else stage
    check_function(partial(fn, **PARAMETERS.get(fn.__name__, {})), stage=stage)


@pytest.mark.parametrize("stage, fn", EXPORTED.values(), ids=[f"{m}.{n}" for m, n in EXPORTED])
def test_exported_function_is_documented(stage, fn):
    for part in ("Args:", "Returns:", "Source:"):
        assert part in fn.__doc__, f"{fn.__name__}: the docstring has no {part!r}"


@pytest.mark.parametrize(
    "fn",
    [
        partial(truncated_is_weights, level="sequence"),
        partial(masked_is_weights, level="sequence"),
        partial(masked_is_weights, level="geometric", weighted=False),
    ],
)
def test_weights_of_every_level_keep_the_contract(fn):
    check_function(fn, stage="select")


def test_menu_finds_the_stock_functions():
    assert {"group_zscore", "gae"} <= menu("advantage").keys()
    assert {"ppo_clip", "kl_k3", "token_mean"} <= menu("loss").keys()


# Functions of a fork


def soft_gate(logp, old_logp, advantages, mask, *, sharpness=4.0):
    ok = mask != 0
    select = lambda x: jnp.where(ok, x, 0)
    ratio = jnp.exp(jnp.minimum(select(logp) - select(old_logp), 20))
    return select(-select(advantages) * jax.nn.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness)


def test_check_loss_passes_a_loss_of_a_fork():
    check_loss(soft_gate)
    check_loss(partial(soft_gate, sharpness=8.0))


def test_check_advantage_passes_an_estimator_of_a_fork():
    check_advantage(lambda rewards: rewards - jnp.median(rewards))


def test_check_loss_takes_extra_arrays_by_axes_and_by_maker():
    def loss(logp, gate, level, mask):
        ok = mask != 0
        return jnp.where(ok, -jnp.where(ok, logp, 0) * jnp.where(ok, gate, 0) * level, 0)

    check_loss(loss, extra_arrays={"gate": "T", "level": lambda rng, sizes: rng.random()})
    with pytest.raises(ContractError, match="asks for 'gate'"):
        check_loss(loss)
    with pytest.raises(ContractError, match="is 'TX'; axes are letters of BGT"):
        check_loss(loss, extra_arrays={"gate": "TX", "level": ""})


def test_check_function_refuses_an_unknown_stage():
    with pytest.raises(ValueError, match="did you mean 'advantage'"):
        check_function(soft_gate, stage="advantages")


# Functions with a fault: each check can fail


def typo(logp, old_lopg, mask):
    return logp


def loose_hyperparameter(logp, mask, beta=0.1):
    return logp * beta


def unbound_hyperparameter(logp, mask, *, beta):
    return logp * beta


@scope("sequence", zero_at_zero_advantge=True)
def typo_in_fact(logp, mask):
    return logp


def branches_in_python(rewards):
    return rewards * 0 if rewards.std() < 1e-6 else rewards / rewards.std()


def forgets_token_axis(logp, advantages, mask):
    return -jnp.sum(jnp.where(mask != 0, jnp.where(mask != 0, advantages * logp, 0), 0))


@scope("group")
def transposes(token_rewards, mask):
    return jnp.where(mask != 0, token_rewards, 0).T


def casts_to_float32(rewards):
    return (rewards - rewards.mean()).astype(jnp.float32)


def cancels_in_float32(rewards):
    return (rewards + 1e6) - (jnp.mean(rewards) + 1e6)


def averages_over_padding(logp, advantages, mask):
    loss = jnp.where(mask != 0, -jnp.where(mask != 0, advantages * logp, 0), 0)
    return jnp.where(mask != 0, loss - jnp.mean(loss), 0)


def leaves_a_constant_on_padding(logp, advantages, mask):
    return 1.0 - jnp.where(mask != 0, advantages * logp, 0)


def multiplies_by_the_mask(logp, advantages, mask):
    return -advantages * logp * mask


def selects_the_output_alone(logp, old_logp, advantages, mask):
    return jnp.where(mask != 0, -advantages * jnp.exp(logp - old_logp), 0)


@scope("group")
def divides_by_an_empty_length(token_rewards, mask):
    kept = jnp.where(mask != 0, token_rewards, 0)
    return jnp.sum(kept, axis=-1) / jnp.sum(mask != 0, axis=-1)


def overflows(logp, ref_logp, mask):
    d = jnp.where(mask != 0, ref_logp, 0) - jnp.where(mask != 0, logp, 0)
    return jnp.exp(d) - d - 1


def divides_by_no_spread(rewards):
    return (rewards - rewards.mean()) / rewards.std()


def hides_a_stop_gradient(logp, old_logp, advantages, mask):
    select = lambda x: jnp.where(mask != 0, x, 0)
    ratio = jax.lax.stop_gradient(jnp.exp(select(logp) - select(old_logp)))
    return -ratio * select(advantages) * select(logp)


@scope("sequence", stop_gradient=True)
def lacks_its_stop_gradient(logp, ref_logp, mask):
    select = lambda x: jnp.where(mask != 0, x, 0)
    return 0.5 * jnp.square(select(logp) - select(ref_logp))


@scope("sequence")
def lets_gradient_into_weights(old_logp, behavior_logp, mask):
    select = lambda x: jnp.where(mask != 0, x, 0)
    return select(jnp.exp(jnp.clip(select(old_logp) - select(behavior_logp), -20, 20)))


def depends_on_order(rewards):
    return rewards - rewards[0]


@scope("batch")
def carries_over_prompts(rewards):
    return rewards - jnp.roll(rewards, 1, axis=0).mean(axis=1, keepdims=True)


def divides_by_the_others(rewards):
    size = rewards.shape[0]
    return (rewards - rewards.mean()) * size / jnp.asarray(size - 1, rewards.dtype)


@jax.custom_batching.custom_vmap
def _centered(rewards):
    return rewards - rewards.mean()


@_centered.def_vmap
def _centered_over_the_batch(axis_size, in_batched, rewards):
    return rewards - rewards.mean(), True


def mixes_under_vmap(rewards):
    return _centered(jax.lax.stop_gradient(rewards))  # it has no derivative


def wants_a_bool_mask(logp, advantages, mask):
    return jnp.where(~mask, 0, -jnp.where(~mask, 0, advantages) * jnp.where(~mask, 0, logp))


def wants_token_advantages(logp, advantages, mask):
    ok = mask != 0
    return -jnp.where(ok, advantages[: logp.shape[0]], 0) * jnp.where(ok, logp, 0)


@scope("sequence", zero_at_zero_advantage=True)
def pulls_at_zero_advantage(logp, advantages, mask):
    ok = mask != 0
    logp = jnp.where(ok, logp, 0)
    return jnp.where(ok, -advantages * logp, 0) + 0.01 * logp**2


@scope("batch", linear=True, output="")
def mean_square(token_loss, mask):
    kept = jnp.where(mask != 0, token_loss, 0)
    return jnp.sum(kept**2) / jnp.maximum(jnp.sum(mask != 0), 1)


@scope("batch", linear=True, output="")
def counts_empty_unsaid(token_loss, mask):
    return jnp.sum(jnp.where(mask != 0, token_loss, 0)) / (mask.shape[0] * mask.shape[1])


@scope("batch", linear=True, output="", counts_empty=True)
def counts_empty_for_nothing(token_loss, mask):
    return jnp.sum(jnp.where(mask != 0, token_loss, 0)) / jnp.maximum(jnp.sum(mask != 0), 1)


FAULTS = [
    (typo, "loss", "did you mean 'old_logp'"),
    (loose_hyperparameter, "loss", "neither an array nor keyword-only"),
    (unbound_hyperparameter, "loss", "has no default"),
    (typo_in_fact, "loss", "did you mean 'zero_at_zero_advantage'"),
    (branches_in_python, "advantage", "must run under jax.jit"),
    (forgets_token_axis, "loss", r"expected \[T\]"),
    (transposes, "advantage", "expected"),
    (casts_to_float32, "advantage", "must keep float64"),
    (cancels_in_float32, "advantage", "float32 must agree with float64"),
    (averages_over_padding, "loss", "padding must change nothing"),
    (leaves_a_constant_on_padding, "loss", "must be 0 on padding"),
    (constant_length, "loss", "padding must change nothing"),
    (multiplies_by_the_mask, "loss", "NaN outside the mask must not reach the"),
    (selects_the_output_alone, "loss", "must not reach the gradient"),
    (divides_by_an_empty_length, "advantage", "an empty mask must give finite values"),
    (overflows, "loss", "finite for logp -120.1 and ref_logp -0.1"),
    (divides_by_no_spread, "advantage", "finite for equal rewards"),
    (hides_a_stop_gradient, "loss", "declare @scope.*stop_gradient=True"),
    (lacks_its_stop_gradient, "loss", "stop_gradient missing"),
    (lets_gradient_into_weights, "select", "gradients must be 0"),
    (depends_on_order, "advantage", "the order along G must not matter"),
    (carries_over_prompts, "advantage", "the order along B must not matter"),
    (divides_by_the_others, "advantage", "a group of one"),
    (mixes_under_vmap, "advantage", "must give the same as a loop"),
    (wants_a_bool_mask, "loss", "must do as well as one of bool"),
    (wants_token_advantages, "loss", "one advantage for a response"),
    (pulls_at_zero_advantage, "loss", "declares zero_at_zero_advantage"),
    (mean_square, "loss", "declares linear"),
    (counts_empty_unsaid, "loss", "declare @scope.*counts_empty"),
    (counts_empty_for_nothing, "loss", "declares counts_empty"),
]


@pytest.mark.parametrize("fn, stage, message", FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_check_function_catches(fn, stage, message):
    with pytest.raises(ContractError, match=message):
        check_function(fn, stage=stage)


def test_check_function_lets_a_declared_order_pass():
    check_advantage(scope("group", ordered=True)(lambda rewards: rewards - rewards[0]))


# Inputs


@pytest.mark.parametrize("name_of_scope, lead", [("sequence", ""), ("group", "G"), ("batch", "BG")])
def test_draw_inputs_gives_the_shapes_of_the_scope(name_of_scope, lead):
    inputs = draw_inputs(VOCABULARY, name_of_scope, seed=0)
    shape = lambda axes: tuple(SIZES[a] for a in axes)
    assert inputs.arrays["rewards"].shape == shape(lead)
    assert inputs.arrays["logits"].shape == shape(lead + "TV")
    assert inputs.arrays["ref_rewards"].shape == shape("BM" if lead == "BG" else "M")
    assert inputs.arrays["group_size"].shape == ()
    for name, a in inputs.arrays.items():
        assert a.shape == shape(inputs.axes[name]), name


def test_draw_inputs_agree_with_each_other():
    arrays = draw_inputs(VOCABULARY, "batch", seed=0).arrays
    assert (arrays["mask"].sum(-1) == arrays["lengths"]).all()
    assert (arrays["step_ids"].max(-1) < arrays["step_mask"].sum(-1)).all()
    assert ((arrays["step_ids"] >= 0) == arrays["mask"]).all()
    assert (arrays["parent"] < range(SIZES["N"])).all()
