"""Credit for each response or token, from rewards."""

from jaxrl_llm.advantages.group import group_mean_centered, group_zscore, leave_one_out
from jaxrl_llm.advantages.tokens import discounted_return_to_go, gae, masked_whiten

__all__ = [
    "discounted_return_to_go",
    "gae",
    "group_mean_centered",
    "group_zscore",
    "leave_one_out",
    "masked_whiten",
]
