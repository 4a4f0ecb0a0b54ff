"""Recipes of methods whose idea is which prompts and responses are trained on.

Each runs with

    jaxrl-llm train --config=configs/recipes/rollout_and_data.py:NAME --run-dir=runs/NAME
"""

from functools import partial

from configs.recipes.group_advantages import grpo
from jaxrl_llm import config as cfg
from jaxrl_llm.advantages import group_zscore
from jaxrl_llm.losses import ppo_clip, token_mean
from jaxrl_llm.prompts import dynamic_sampling_keep
from jaxrl_llm.rewards import soft_overlong_penalty


def dapo() -> cfg.Config:
    """DAPO: a higher upper clip, token-level averaging, only groups with contrast, a soft length limit.

    Paper: Yu et al. 2025, DAPO (arXiv:2503.14476).
    Claim: entropy doesn't collapse and every prompt of the batch has a gradient.
    Expect: as GRPO in fewer updates, at more sampled tokens an update.
    """
    base = grpo()
    limit = base.rollout.max_new_tokens
    penalty = partial(soft_overlong_penalty, max_length=limit, cache=limit // 4)
    return base.replace(
        name="dapo",
        rollout=base.rollout.replace(keep=dynamic_sampling_keep, max_rounds=10),
        objective=cfg.Objective(
            shape=(cfg.Stage(penalty, "rewards", add=True),),
            advantage=group_zscore,
            loss=partial(ppo_clip, clip_low=0.2, clip_high=0.28),
            aggregate=token_mean,
        ),
    )
