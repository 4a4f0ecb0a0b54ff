"""Rewards: numbers for responses.

A reward is `f(completion, example) -> float | None`; None means "no score". `pool.Scorer` runs a config's
rewards in processes with a hard limit. Functions of arrays that change rewards are in `shape`.
"""

from jaxrl_llm.rewards.shape import kl_shaped_token_rewards, soft_overlong_penalty
from jaxrl_llm.rewards.text import (
    exact_match,
    format_reward,
    last_number,
    math_reward,
    reasoning_gym_reward,
    regex_match,
)

__all__ = [
    "exact_match",
    "format_reward",
    "kl_shaped_token_rewards",
    "last_number",
    "math_reward",
    "reasoning_gym_reward",
    "regex_match",
    "soft_overlong_penalty",
]
