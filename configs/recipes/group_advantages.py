"""Recipes of methods whose idea is the advantage of a group of responses to one prompt.

Each runs with

    jaxrl-llm train --config=configs/recipes/group_advantages.py:NAME --run-dir=runs/NAME
"""

from functools import partial

import jax
import jax.numpy as jnp

from configs.default import get_config
from jaxrl_llm import config as cfg
from jaxrl_llm.advantages import (
    discounted_return_to_go,
    group_mean_centered,
    group_zscore,
    leave_one_out,
    masked_whiten,
)
from jaxrl_llm.losses import (
    constant_length,
    kl_k3,
    ppo_clip,
    reinforce_loss,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from jaxrl_llm.rewards import kl_shaped_token_rewards
from jaxrl_llm.signature import scope


def grpo() -> cfg.Config:
    """GRPO: rewards standardised within the group, clipped ratio, KL to the reference in the loss.

    Paper: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300).
    Claim: no critic is needed; the group's mean is the baseline.
    Expect: held-out accuracy on two-digit sums rises above 0.6 within 30 steps.
    """
    base = get_config()
    return base.replace(
        name="grpo",
        objective=cfg.Objective(
            advantage=group_zscore, loss=ppo_clip, regularize=((0.04, kl_k3),), aggregate=sequence_mean
        ),
    )


def dr_grpo() -> cfg.Config:
    """Dr. GRPO: rewards centred but not scaled, token losses divided by a constant length.

    Paper: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783).
    Claim: without the two divisions of GRPO, no prompts and no long wrong answers are favoured.
    Expect: as GRPO on accuracy, with responses that don't grow.
    """
    base = grpo()
    aggregate = partial(constant_length, length=base.rollout.max_new_tokens)
    return base.replace(
        name="dr_grpo",
        objective=cfg.Objective(advantage=group_mean_centered, loss=ppo_clip, aggregate=aggregate),
    )


@scope("sequence")
def response_reward(token_rewards: jax.Array) -> jax.Array:
    """Returns the sum of a response's token rewards `[T]`: one reward that the whole response earned."""
    return jnp.sum(token_rewards)


def rloo() -> cfg.Config:
    """RLOO: REINFORCE whose baseline is the mean reward of the group's other samples.

    The KL to the reference is folded into each sample's reward, as one number a response.

    Paper: Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740).
    Claim: PPO's clip, critic and GAE are not needed where the policy starts from a strong model.
    Expect: as GRPO on accuracy.
    """
    base = grpo()
    shape = (
        cfg.Stage(partial(kl_shaped_token_rewards, beta=0.05), "token_rewards"),
        cfg.Stage(response_reward, "rewards"),
    )
    return base.replace(
        name="rloo",
        objective=cfg.Objective(
            shape=shape, advantage=leave_one_out, loss=reinforce_loss, aggregate=sequence_sum
        ),
    )


def reinforce_plus_plus() -> cfg.Config:
    """REINFORCE++: KL in the token rewards, return-to-go, whitened over every token of the batch.

    Paper: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).
    Claim: normalising over the whole batch is steadier than over small groups.
    Expect: as GRPO on accuracy; one sample a prompt is enough for it to run.
    """
    base = grpo()
    return base.replace(
        name="reinforce_plus_plus",
        objective=cfg.Objective(
            shape=(cfg.Stage(partial(kl_shaped_token_rewards, beta=0.01), "token_rewards"),),
            advantage=(discounted_return_to_go, masked_whiten),
            loss=ppo_clip,
            aggregate=token_mean,
        ),
    )
