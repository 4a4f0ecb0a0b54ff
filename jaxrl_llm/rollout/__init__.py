"""How responses are generated: `distribution`, `sampler`, `slots`, `groups`. The menu holds strategies."""

from jaxrl_llm.rollout.slots import slot_schedule

__all__ = ["slot_schedule"]
