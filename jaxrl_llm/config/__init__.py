"""Frozen dataclasses of a run, and what is done with them: load, override, check, save, compare.

A config holds functions, not their names: `loss=partial(ppo_clip, clip_high=0.28)`. Strings
`package.module:name` appear only on the command line and in the saved JSON.
"""

from jaxrl_llm.config.check import check
from jaxrl_llm.config.load import load_config
from jaxrl_llm.config.override import override
from jaxrl_llm.config.saved import differences, flatten, from_json, to_json
from jaxrl_llm.config.schema import (
    Checkpoint,
    Config,
    ConfigError,
    Data,
    Evaluation,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Replaceable,
    Reward,
    Rollout,
    Scoring,
    Stage,
    stage_functions,
)

__all__ = [
    "Checkpoint",
    "Config",
    "ConfigError",
    "Data",
    "Evaluation",
    "Mesh",
    "Model",
    "Objective",
    "Optimizer",
    "Replaceable",
    "Reward",
    "Rollout",
    "Scoring",
    "Stage",
    "check",
    "differences",
    "flatten",
    "from_json",
    "load_config",
    "override",
    "stage_functions",
    "to_json",
]
