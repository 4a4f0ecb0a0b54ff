"""Policy surrogates, terms added to them, and the aggregation of token losses."""

from jaxrl_llm.losses.policy import ppo_clip, reinforce_loss
from jaxrl_llm.losses.regularize import entropy_bonus, kl_k1, kl_k2, kl_k3, kl_k3_k2grad, token_entropy
from jaxrl_llm.masked import constant_length, sequence_mean, sequence_sum, token_mean

__all__ = [
    "constant_length",
    "entropy_bonus",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_k2grad",
    "ppo_clip",
    "reinforce_loss",
    "sequence_mean",
    "sequence_sum",
    "token_entropy",
    "token_mean",
]
