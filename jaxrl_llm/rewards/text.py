"""Rewards from text: `f(completion, example) -> float`. Bind hyperparameters with `functools.partial`."""

from __future__ import annotations

import functools
import json
import re

from jaxrl_llm.rewards.declare import Judged, declares
from jaxrl_llm.rewards.verify import Verdict, judge
from jaxrl_llm.rewards.verify.expression import decimal
from jaxrl_llm.types import Example


@declares(self_check=True, imports=("sympy", "math_verify"))
def math_reward(completion: str, example: Example) -> Judged:
    """1 if the completion states the value of the gold answer, else 0. See `verify.math_equal`."""
    return Judged(judge(completion, example.answer))


@declares(self_check=True)
def exact_match(completion: str, example: Example) -> Judged:
    """1 if the completion is the gold answer, white space around it aside; an empty completion never is."""
    stated = completion.strip()
    if not stated:
        return Judged(Verdict.UNPARSED)
    return Judged(_verdict(stated == example.answer.strip()))


def regex_match(completion: str, example: Example, *, pattern: str) -> Judged:
    """1 if the last match of `pattern` captures the gold answer.

    Args:
      completion: searched with `re.finditer`.
      example: its `answer` is compared with the first group, white space around both aside.
      pattern: a regular expression. Without a group, any match scores 1.
    """
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return Judged(Verdict.UNPARSED)
    last = matches[-1]
    if not last.re.groups:
        return Judged(Verdict.CORRECT)
    captured = (last.group(1) or "").strip()
    return Judged(_verdict(bool(captured) and captured == example.answer.strip()))


def format_reward(
    completion: str,
    example: Example,
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*",
) -> float:
    """1.0 if the whole completion matches `pattern` (a dot matches line ends too), else 0.0."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


_NUMBER = re.compile(
    r"(?<![\w.])[-\u2212]?\$?(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?!\d|\.\d)"
)


@declares(self_check=True)
def last_number(completion: str, example: Example) -> Judged:
    """1 if the last integer or decimal in the completion equals the gold answer, as exact rationals.

    For short answers ("Answer with just the number."). The gold is read the same way; without a number in
    the completion it is unparsed.
    """
    said, gold = _last_number(completion), _last_number(example.answer)
    if said is None:
        return Judged(Verdict.UNPARSED)
    return Judged(_verdict(said == gold))


def stated_number(text: str) -> str | None:
    """Returns the last number in a text, in lowest terms; None if there is none."""
    number = _last_number(text)
    return None if number is None else str(number)


def _last_number(text: str):
    found = _NUMBER.findall(text)
    return decimal(re.sub(r"[,$]", "", found[-1]).replace("\u2212", "-")) if found else None


def _verdict(correct: bool) -> Verdict:
    return Verdict.CORRECT if correct else Verdict.WRONG


_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@declares(imports=("reasoning_gym",))
def reasoning_gym_reward(completion: str, example: Example) -> float:
    """The score, in [0, 1], that the example's own reasoning-gym dataset gives to the completion.

    Scored is what the last `<answer>...</answer>` encloses, else the whole completion, stripped.

    Args:
      completion: text of the response.
      example: its `meta` holds `dataset` (the dataset's name), `entry` (the dataset's row) and optionally
        `params` (the arguments that the dataset was created with).
    """
    missing = [name for name in ("dataset", "entry") if name not in example.meta]
    if missing:
        raise KeyError(
            f"example {example.id} has no meta[{missing[0]!r}]: reasoning_gym_reward scores only examples"
            " of a reasoning-gym source"
        )
    params = json.dumps(dict(example.meta.get("params", {})), sort_keys=True)
    dataset = _reasoning_gym_dataset(example.meta["dataset"], params)
    tagged = _ANSWER_TAG.findall(completion)
    return float(dataset.score_answer((tagged[-1] if tagged else completion).strip(), example.meta["entry"]))


@functools.lru_cache(maxsize=32)
def _reasoning_gym_dataset(name: str, params: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(params))
