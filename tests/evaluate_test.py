import itertools

import numpy as np
import pytest

from jaxrl_llm.evaluate import majority_correct, pass_at_k, summarize


@pytest.mark.parametrize("n, c", [(5, 0), (5, 2), (6, 3), (4, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n, c):
    verdicts = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = list(itertools.combinations(verdicts, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_refuses_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        pass_at_k(5, 2, k)


@pytest.mark.parametrize(
    "answers, correct, want",
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority_correct_takes_the_most_frequent_answer(answers, correct, want):
    assert majority_correct(answers, correct) == want


def test_summarize_averages_over_prompts():
    correct = np.array([[True, False], [False, False]])
    got = summarize(correct, [["1", "2"], ["3", "3"]], ks=(1, 2))
    assert got == {"pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25}
