import json
import pickle

import pytest

from jaxrl_llm.rewards import (
    exact_match,
    format_reward,
    last_number,
    math_reward,
    reasoning_gym_reward,
    regex_match,
)
from jaxrl_llm.rewards.declare import Judged
from jaxrl_llm.rewards.verify import Verdict
from jaxrl_llm.types import Example


def gold(answer):
    return Example(prompt="?", answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("115", "115", Verdict.CORRECT),
        ("79 + 36 = 115.", "115", Verdict.CORRECT),
        ("It is **1,150**", "1150", Verdict.CORRECT),
        ("1.50", "1.5", Verdict.CORRECT),
        ("1.5e3", "1500", Verdict.CORRECT),
        ("x=-5", "-5", Verdict.CORRECT),
        ("\u22125", "-5", Verdict.CORRECT),
        ("7-5", "5", Verdict.CORRECT),
        ("$12", "12", Verdict.CORRECT),
        ("1,2,3", "3", Verdict.CORRECT),
        ("115 or 116", "115", Verdict.WRONG),
        ("1150", "115", Verdict.WRONG),
        ("0.115", "115", Verdict.WRONG),
        ("1,2,3", "123", Verdict.WRONG),
        ("5", "-5", Verdict.WRONG),
        ("-5", "5", Verdict.WRONG),
        ("1e-1", "1", Verdict.WRONG),
        ("", "115", Verdict.UNPARSED),
        ("no number", "115", Verdict.UNPARSED),
        ("", "", Verdict.UNPARSED),
    ],
)
def test_last_number_compares_the_last_number_exactly(completion, answer, verdict):
    reward = last_number(completion, gold(answer))
    assert reward.verdict is verdict and reward == (verdict is Verdict.CORRECT)


def test_math_reward_scores_the_stated_answer():
    assert math_reward(r"so \boxed{\frac12}", gold("0.5")) == 1.0
    assert math_reward(r"so \boxed{0.4}", gold("0.5")).verdict is Verdict.WRONG
    assert math_reward("", gold("0.5")).verdict is Verdict.UNPARSED


def test_exact_match_ignores_outer_white_space_only():
    assert exact_match(" yes\n", gold("yes")) == 1.0
    assert exact_match("Yes", gold("yes")) == 0.0
    assert exact_match(" ", gold("")).verdict is Verdict.UNPARSED


def test_regex_match_compares_the_last_capture():
    pattern = r"Answer: (\w*)"
    assert regex_match("Answer: A, no, Answer: B", gold("B"), pattern=pattern) == 1.0
    assert regex_match("Answer: A, no, Answer: B", gold("A"), pattern=pattern) == 0.0
    assert regex_match("B", gold("B"), pattern=pattern).verdict is Verdict.UNPARSED
    assert regex_match("Answer: ", gold(""), pattern=pattern) == 0.0
    assert regex_match("well, well", gold(""), pattern="well") == 1.0


def test_format_reward_matches_the_whole_completion():
    assert format_reward("<think>\na\n</think>\n<answer>4</answer>", gold("5")) == 1.0
    assert format_reward("<think>a</think> 4", gold("4")) == 0.0
    assert format_reward("12", gold(""), pattern=r"\d+") == 1.0
    assert format_reward("12 ", gold(""), pattern=r"\d+") == 0.0


def test_reasoning_gym_reward_is_the_datasets_own_score():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    params = {"size": 3, "seed": 1}
    dataset = reasoning_gym.create_dataset("chain_sum", **params)
    meta = {"dataset": "chain_sum", "params": params, "entry": json.loads(json.dumps(dataset[0]))}
    example = Example(prompt=dataset[0]["question"], answer=dataset[0]["answer"], meta=meta)
    right, wrong = dataset[0]["answer"], str(int(dataset[0]["answer"]) + 1)
    assert reasoning_gym_reward(f" {right}\n", example) == 1.0
    assert reasoning_gym_reward(f"<answer>{wrong}</answer> no: <answer>{right}</answer>", example) == 1.0
    assert reasoning_gym_reward(wrong, example) == dataset.score_answer(wrong, dataset[0]) < 1.0
    with pytest.raises(KeyError, match=r"example 0 has no meta\['dataset'\]"):
        reasoning_gym_reward("1", gold("1"))


def test_judged_survives_pickling_as_a_float():
    reward = pickle.loads(pickle.dumps(Judged(Verdict.UNPARSED)))
    assert reward == 0.0 and isinstance(reward, float) and reward.verdict is Verdict.UNPARSED
