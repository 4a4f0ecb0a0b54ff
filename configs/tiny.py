"""A whole run of a random tiny model, in about 20 seconds on two CPU cores, most of it compiling.

    jaxrl-llm train --config=configs/tiny.py --run-dir=runs/tiny

The task: begin the response with the letter that the prompt asks for. The reward rises from near 0 to above
0.9 in 60 steps, and the held-out accuracy to 1.
"""

from configs.recipes.group_advantages import grpo
from jaxrl_llm import config as cfg
from jaxrl_llm.data.sources import examples
from jaxrl_llm.models.convert import tiny_model
from jaxrl_llm.types import Example

LETTERS = "abcd"


def letters() -> list[Example]:
    return examples([{"prompt": f"Say {letter}", "answer": letter} for letter in LETTERS])


def first_letter(completion: str, example: Example) -> float:
    """1.0 if the completion begins with the answer."""
    return float(completion[:1] == example.answer)


def on_tiny(config: cfg.Config) -> cfg.Config:
    """Returns a recipe's config on the tiny model and its task."""
    return config.replace(
        steps=60,
        model=cfg.Model(load=tiny_model),
        data=cfg.Data(train=letters, evaluation=letters, prompts_per_step=4, chat=False, prompt_lengths=(8,)),
        rollout=config.rollout.replace(group_size=16, max_new_tokens=4),
        scoring=cfg.Scoring(rewards=(cfg.Reward(first_letter),)),
        optimizer=cfg.Optimizer(learning_rate=6e-3),
        evaluation=cfg.Evaluation(every=10, batch=4, samples=16),
        checkpoint=cfg.Checkpoint(every=10),
    )


def get_config() -> cfg.Config:
    return on_tiny(grpo()).replace(name="tiny")
