"""The config that recipes start from: SmolLM2-135M-Instruct learns two-digit sums by GRPO.

    jaxrl-llm train --config=configs/default.py --run-dir=runs/default

A recipe replaces `objective` (and what else its paper changes); another task replaces `data` and `scoring`.
"""

import random
from functools import partial

from jaxrl_llm import config as cfg
from jaxrl_llm.advantages import group_zscore
from jaxrl_llm.data.sources import examples
from jaxrl_llm.losses import ppo_clip, token_mean
from jaxrl_llm.models.convert import from_gguf
from jaxrl_llm.rewards import last_number
from jaxrl_llm.rewards.text import stated_number
from jaxrl_llm.types import Example

HELD_OUT = 256


def sums(*, held_out: bool) -> list[Example]:
    """All sums of two two-digit numbers, in an order of their own; the first 256 are held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:HELD_OUT] if held_out else pairs[HELD_OUT:]
    return examples((f"What is {a} + {b}? Answer with just the number.", str(a + b)) for a, b in chosen)


def get_config() -> cfg.Config:
    return cfg.Config(
        name="default",
        steps=100,
        model=cfg.Model(load=from_gguf),
        data=cfg.Data(
            train=partial(sums, held_out=False),
            evaluation=partial(sums, held_out=True),
            prompts_per_step=8,
            prompt_lengths=(64,),
        ),
        rollout=cfg.Rollout(group_size=8, max_new_tokens=16),
        scoring=cfg.Scoring(rewards=(cfg.Reward(last_number),)),
        objective=cfg.Objective(advantage=group_zscore, loss=ppo_clip, aggregate=token_mean),
        optimizer=cfg.Optimizer(learning_rate=2e-5, microbatch=2),
        evaluation=cfg.Evaluation(every=10, batch=64, answer=stated_number),
        checkpoint=cfg.Checkpoint(every=10),
    )
