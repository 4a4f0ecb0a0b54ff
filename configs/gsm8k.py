"""GSM8K from JSONL: the same model and method as the quickstart, on school mathematics.

    jaxrl-llm train --config=configs/gsm8k.py --run-dir=runs/gsm8k

Reads `gsm8k/train.jsonl` and `gsm8k/test.jsonl` (MIT licence; fields `question` and `answer`, the gold after
`####`) in the folder that the environment variable JAXRL_LLM_DATA names, by default `../shared/data`.
Expect: SmolLM2-135M-Instruct begins at a few per cent; on two cores a step takes minutes, on an accelerator
seconds.
"""

import os
from functools import partial
from pathlib import Path

from configs.default import get_config as default
from jaxrl_llm import config as cfg
from jaxrl_llm.data.sources import gsm8k_gold, jsonl
from jaxrl_llm.rewards import math_reward

FOLDER = Path(os.environ.get("JAXRL_LLM_DATA", "../shared/data")) / "gsm8k"
TEMPLATE = "{prompt}\nThink step by step, then write the answer after ####."


def get_config() -> cfg.Config:
    base = default()
    source = partial(jsonl, gold=gsm8k_gold, template=TEMPLATE)
    return base.replace(
        name="gsm8k",
        steps=500,
        data=base.data.replace(
            train=partial(source, path=str(FOLDER / "train.jsonl")),
            evaluation=partial(source, path=str(FOLDER / "test.jsonl"), limit=256),
            prompt_lengths=(128, 256),
        ),
        rollout=base.rollout.replace(max_new_tokens=256),
        scoring=cfg.Scoring(rewards=(cfg.Reward(math_reward),)),
        optimizer=base.optimizer.replace(learning_rate=5e-6, microbatch=1),
        evaluation=cfg.Evaluation(every=50, batch=64),
    )
