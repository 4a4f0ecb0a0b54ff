"""The workloads of the benchmarks: configs whose prompts other trainers can be given too.

sum2  4 prompts x 8 samples x 32 new tokens: two-digit sums.
long  2 prompts x 8 samples x 64 new tokens: a GSM8K problem after three solved ones, 450 to 1100 tokens.
tiny  the config `configs/tiny.py`: almost no arithmetic, so that what is left is the loop's own time.

sum2 and long train SmolLM2-135M-Instruct in float32 by GRPO with AdamW at 1e-6 and no KL term. Prompts come
in a fixed order from seed 0.
"""

import json
import random
from collections.abc import Callable
from functools import partial

from configs.gsm8k import FOLDER
from configs.quickstart import get_config as quickstart
from configs.tiny import get_config as tiny_config
from jaxrl_llm import config as cfg
from jaxrl_llm.data.sources import examples, gsm8k_gold
from jaxrl_llm.types import Example

COUNT = 64  # prompts made; the longest of `long` has 1063 tokens


def sums(seed: int = 0) -> list[Example]:
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(COUNT)]
    return examples((f"What is {a} + {b}? Answer with just the number.", str(a + b)) for a, b in pairs)


def few_shot(seed: int = 0) -> list[Example]:
    problems = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    draw = random.Random(seed)
    return examples(_with_shots(*draw.sample(problems, 4)) for _ in range(COUNT))


def _with_shots(*problems: dict[str, str]) -> tuple[str, str]:
    *solved, asked = problems
    shots = [f"Problem: {p['question']}\nSolution: {p['answer']}" for p in solved]
    question = f"Problem: {asked['question']}\nSolve it; end with the number."
    return "\n\n".join([*shots, question]), gsm8k_gold(asked["answer"])


def odd_length(completion: str, example: Example) -> float:
    """Half of all responses, whatever the task: nearly every group has a gradient."""
    return float(len(completion) % 2)


def _real(
    steps: int,
    *,
    train: Callable[[], list[Example]],
    prompts: int,
    new: int,
    lengths: tuple[int, ...],
    microbatch: int,
) -> cfg.Config:
    base = quickstart()
    data = base.data.replace(
        train=train, evaluation=None, prompts_per_step=prompts, prompt_lengths=lengths, shuffle=False
    )
    return base.replace(
        steps=steps,
        data=data,
        rollout=base.rollout.replace(group_size=8, max_new_tokens=new),
        optimizer=cfg.Optimizer(learning_rate=1e-6, microbatch=microbatch),
        evaluation=cfg.Evaluation(),
        checkpoint=cfg.Checkpoint(every=steps),
    )


def _tiny(steps: int) -> cfg.Config:
    base = tiny_config()
    return base.replace(
        steps=steps,
        data=base.data.replace(evaluation=None),
        evaluation=cfg.Evaluation(),
        checkpoint=cfg.Checkpoint(every=steps),
    )


# Name -> config of a number of steps.
WORKLOADS: dict[str, Callable[[int], cfg.Config]] = {
    "sum2": partial(_real, train=sums, prompts=4, new=32, lengths=(48,), microbatch=2),
    "long": partial(_real, train=few_shot, prompts=2, new=64, lengths=(768, 1088), microbatch=1),
    "tiny": _tiny,
}
