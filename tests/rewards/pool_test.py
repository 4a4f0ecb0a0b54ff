import concurrent.futures
import functools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from jaxrl_llm.config import Reward, Scoring
from jaxrl_llm.rewards import exact_match, last_number, math_reward
from jaxrl_llm.rewards.declare import batched
from jaxrl_llm.rewards.pool import Scorer
from jaxrl_llm.rewards.scoring import RewardError
from jaxrl_llm.types import Example

EXAMPLES = [Example(prompt="?", answer=str(i), id=100 + i) for i in range(5)]


def scripted(completion, example):
    """Does what the completion says."""
    match completion.split():
        case ["raise"]:
            raise ZeroDivisionError("no such thing")
        case ["exit"]:
            sys.exit(0)
        case ["sleep"]:
            time.sleep(60)
        case ["spin"]:
            9**9**8  # holds the interpreter for minutes
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["none"]:
            return None
        case ["text"]:
            return "0.5"
        case ["numpy"]:
            return np.float32(0.5)
        case ["pid"]:
            return float(os.getpid())
    return float(completion)


@batched
def one_for_all(completions, examples):
    return [1.0]


@batched
def length_rank(completions, examples):
    return [None if not c else sorted(completions, key=len).index(c) for c in completions]


def leave_trace(completion, example, *, folder):
    (pathlib.Path(folder) / str(example.id)).touch()
    return scripted(completion, example)


def slow(completion, example):
    time.sleep(0.2)
    return 1.0


def score(fn, completions, **config):
    config = {"workers": 1, "timeout": 1.0, **config}
    examples = [Example(prompt="?", answer="1", id=i) for i in range(len(completions))]
    with Scorer(Scoring(rewards=(Reward(fn),), **config)) as scorer:
        return scorer.score(completions, examples)


@pytest.fixture(scope="module")
def scorer():
    config = Scoring(rewards=(Reward(scripted), Reward(last_number, 0.0)), workers=2, timeout=1.0)
    with Scorer(config) as scorer:
        yield scorer


@pytest.mark.parametrize("workers", [0, 1])
def test_score_flags_only_the_slot_that_raised(workers):
    """Pitfall 14: the scorer raises on the 2nd of 5."""
    scores = score(scripted, ["0", "raise", "2", "3", "4"], workers=workers)
    np.testing.assert_array_equal(scores.rewards, [0, 0, 2, 3, 4])
    np.testing.assert_array_equal(scores.scored, [True, False, True, True, True])
    assert scores.counts["raised"] == 1 and scores.counts["unscored"] == 1
    assert "scripted" in scores.causes[0] and "ZeroDivisionError: no such thing" in scores.causes[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_score_refuses_a_batched_reward_of_the_wrong_length(workers):
    """Pitfall 14: a function returns [1.0] for 4."""
    with pytest.raises(RewardError, match="one_for_all returned 1 values for 4 completions"):
        score(one_for_all, ["a", "b", "c", "d"], workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_score_leaves_a_missing_reward_unscored_and_counts_it(workers):
    """Pitfall 15: [1, None, 0, 0]."""
    scores = score(scripted, ["1", "none", "0", "0"], workers=workers)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0, 0])
    np.testing.assert_array_equal(scores.scored, [True, False, True, True])
    assert scores.counts["none"] == 1 and scores.counts["unscored"] == 1


def test_score_counts_each_failure_apart(scorer):
    """Pitfall 17: wrong, unparsed, timed out, crashed are counted apart; the rest of the batch is scored."""
    texts = ["1", "sleep", "0.5", "die", "raise", "none", "nan", "2", "inf", "exit"]
    examples = [Example(prompt="?", answer="1", id=i) for i in range(len(texts))]
    start = time.monotonic()
    scores = scorer.score(texts, examples)
    assert time.monotonic() - start < 8
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0.5, 0, 0, 0, 0, 2, 0, 0])
    assert list(np.flatnonzero(~scores.scored)) == [1, 3, 4, 5, 6, 8, 9]
    expected = {"timed_out": 1, "crashed": 1, "raised": 2, "none": 1, "not_finite": 2, "unscored": 7}
    assert scores.counts == {**expected, "wrong": 2, "unparsed": 7}
    assert any("signal SIGKILL" in cause for cause in scores.causes)


def test_score_counts_wrong_and_unparsed_answers_apart():
    """Pitfall 17: a tower of powers neither hangs nor scores."""
    scores = score(math_reward, ["1", "2", "", "9^{9^{9^{9}}}", r"so \boxed{1}"])
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0, 0, 1])
    assert scores.scored.all()
    assert scores.counts["wrong"] == 1 and scores.counts["unparsed"] == 2


def test_score_kills_a_verifier_that_hangs():
    """Pitfall 17: what SymPy would compute for hours; the samples beside it keep their verdicts."""
    scores = score(math_reward, ["2", r"\prod_{k=1}^{1000000000} k", "1", "3"])
    assert scores.scored.tolist() == [True, False, True, True]
    assert scores.rewards.tolist() == [0, 0, 1, 0]
    assert scores.counts["timed_out"] == 1 and scores.counts["wrong"] == 2


def test_score_stops_a_call_that_holds_the_interpreter():
    """Pitfall 17: a killable process with a hard limit."""
    start = time.monotonic()
    scores = score(scripted, ["spin"])
    assert scores.counts["timed_out"] == 1
    assert time.monotonic() - start < 8


def test_score_works_from_eight_threads_at_once(scorer):
    """Pitfall 17: calls from 8 threads."""

    def one(k):
        return scorer.score([str(k), "raise", str(k + 0.5)], EXAMPLES[:3]).rewards

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for k, rewards in enumerate(threads.map(one, range(8))):
            np.testing.assert_array_equal(rewards, [k, 0, k + 0.5])


@pytest.mark.parametrize("workers", [0, 1])
def test_score_ends_training_with_the_cause_when_asked(workers):
    """Pitfall 19: a reward raises at the 3rd sample."""
    with pytest.raises(RewardError, match=r"scripted failed on sample 2 \(example 2\): ZeroDivisionError"):
        score(scripted, ["0", "1", "raise", "3"], workers=workers, on_error="raise")
    with pytest.raises(RewardError, match=r"sample 2 .*its process died \(signal SIGKILL\)"):
        score(scripted, ["0", "1", "die", "3"], on_error="raise")


def test_score_goes_on_after_an_idle_worker_was_killed(scorer):
    """Pitfall 19: a worker is killed with signal 9."""
    pid = int(scorer.score(["pid"], EXAMPLES[:1]).rewards[0])
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    np.testing.assert_array_equal(scorer.score(["1", "2", "3"], EXAMPLES[:3]).rewards, [1, 2, 3])
    assert time.monotonic() - start < 8


def killed_once(completion, example):
    """Its process dies by signal 9 the first time."""
    marker = pathlib.Path(example.meta["marker"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_score_loses_nothing_when_a_worker_is_killed_at_work(tmp_path):
    """Pitfall 19: a worker is killed with signal 9."""
    examples = [Example("?", "1", i, {"marker": str(tmp_path / "marker")}) for i in range(8)]
    with Scorer(Scoring(rewards=(Reward(killed_once),), workers=1)) as scorer:
        scores = scorer.score(["x"] * 8, examples)
    assert scores.scored.all() and scores.rewards.sum() == 8


def test_score_stops_when_every_call_kills_its_worker():
    with pytest.raises(RewardError, match=r"died in a row; the last: .*SIGKILL"):
        score(scripted, ["die"] * 40, workers=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_score_keeps_fractions(workers):
    """Pitfall 26: 0.7 stays 0.7."""
    scores = score(scripted, ["0.7", "numpy", "1"], workers=workers)
    assert scores.rewards.dtype == np.float64
    assert scores.rewards.tolist() == [0.7, 0.5, 1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_score_refuses_what_is_not_a_number(workers):
    with pytest.raises(RewardError, match=r"scripted returned '0.5' of type str"):
        score(scripted, ["1", "text"], workers=workers)


def test_score_sums_weighted_rewards_and_keeps_the_terms_apart():
    rewards = (Reward(scripted, 2.0, name="said"), Reward(last_number, 0.5), Reward(length_rank, 0.0))
    with Scorer(Scoring(rewards=rewards, workers=0)) as scorer:
        scores = scorer.score(["1", "0.25"], [Example("?", "1"), Example("?", "1")])
    np.testing.assert_allclose(scores.rewards, [2.5, 0.5])
    assert {name: list(term) for name, term in scores.terms.items()} == {
        "said": [1, 0.25],
        "last_number": [1, 0],
        "length_rank": [0, 1],
    }


def test_score_hands_a_batched_reward_the_whole_list():
    scores = score(length_rank, ["ccc", "a", "", "bb"])
    assert scores.rewards.tolist() == [3, 1, 0, 2]
    assert scores.scored.tolist() == [True, True, False, True]


def test_score_parts_equals_score_and_works_while_the_next_part_is_awaited(tmp_path):
    """The second part comes only when the first one has been scored; a batched reward sees the whole."""
    rewards = (Reward(functools.partial(leave_trace, folder=tmp_path)), Reward(length_rank, weight=0.5))
    completions = ["0.5", "none", "1", "0.25", "0"]

    def parts():
        yield [3, 1], [completions[3], completions[1]]
        until = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < until, "the first part was not scored meanwhile"
            time.sleep(0.01)
        yield [0, 2, 4], [completions[0], completions[2], completions[4]]

    with Scorer(Scoring(rewards=rewards, workers=1)) as scorer:
        got, want = scorer.score_parts(parts(), EXAMPLES), scorer.score(completions, EXAMPLES)
    np.testing.assert_array_equal(got.rewards, want.rewards)
    np.testing.assert_array_equal(got.scored, want.scored)
    assert got.counts == want.counts and got.counts["none"] == 1


def test_score_takes_turns_with_slow_calls_within_their_own_limits():
    """Eight calls of 0.2 s are not one call over the limit of 1 s."""
    scores = score(slow, ["x"] * 8)
    assert scores.rewards.tolist() == [1.0] * 8


def test_score_of_nothing_is_empty(scorer):
    scores = scorer.score([], [])
    assert scores.rewards.shape == (0,) and scores.counts["unscored"] == 0


def test_score_is_fast_for_cheap_rewards(scorer):
    texts, examples = ["It is 12."] * 1000, [Example("?", "12")] * 1000
    with Scorer(Scoring(rewards=(Reward(last_number),))) as cheap:
        cheap.score(texts[:10], examples[:10])
        start = time.monotonic()
        scores = cheap.score(texts, examples)
        seconds = time.monotonic() - start
    assert scores.rewards.sum() == 1000
    assert seconds < 2.0  # 0.1 s on an idle machine


def test_scorer_refuses_what_it_cannot_send():
    with pytest.raises(RewardError, match=r"<lambda> can't be sent .* top level"):
        Scorer(Scoring(rewards=(Reward(lambda c, e: 1.0),)))
    assert (
        Scorer(Scoring(rewards=(Reward(lambda c, e: 1.0),), workers=0)).score(["a"], EXAMPLES[:1]).rewards
        == 1
    )


def test_scorer_refuses_a_bad_config():
    with pytest.raises(ValueError, match="did you mean 'raise'"):
        Scorer(Scoring(rewards=(Reward(scripted),), workers=0, on_error="rais"))
    with pytest.raises(ValueError, match="share a name"):
        Scorer(Scoring(rewards=(Reward(scripted), Reward(scripted)), workers=0))
    with pytest.raises(ValueError, match="timeout=0"):
        Scorer(Scoring(rewards=(Reward(scripted),), workers=0, timeout=0))


def test_check_gold_names_an_answer_that_does_not_match_itself():
    golds = [Example("?", "12", 7), Example("?", "twelve", 8)]
    with Scorer(Scoring(rewards=(Reward(last_number), Reward(scripted)), workers=0)) as scorer:
        scorer.check_gold(golds, n=1)
        with pytest.raises(RewardError, match=r"1 of 2 gold answers .* 'twelve' of example 8 \(unparsed"):
            scorer.check_gold(golds)


def test_check_gold_sees_through_partial():
    reward = Reward(functools.partial(exact_match))
    with Scorer(Scoring(rewards=(reward,), workers=0)) as scorer, pytest.raises(RewardError, match="''"):
        scorer.check_gold([Example("?", "")])


def test_score_after_close_says_so():
    scorer = Scorer(Scoring(rewards=(Reward(scripted),), workers=1))
    scorer.close()
    with pytest.raises(RewardError, match="scorer was closed"):
        scorer.score(["1"], EXAMPLES[:1])


TRAINER = """
    import sys, time
    from jaxrl_llm.config import Reward, Scoring
    from jaxrl_llm.rewards import last_number
    from jaxrl_llm.rewards.pool import Scorer
    from jaxrl_llm.types import Example
    sys.path.insert(0, {folder!r})
    from pool_test import scripted

    if __name__ == "__main__":
        scorer = Scorer(Scoring(rewards=(Reward(scripted),), workers=2, timeout=100.0))
        print(int(scorer.score(["pid"], [Example("?", "1")]).rewards[0]), flush=True)
        if sys.argv[1] == "hang":
            scorer.score(["spin", "sleep"], [Example("?", "1")] * 2)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["leave", "hang"])
def test_workers_do_not_outlive_the_trainer(tmp_path, how):
    """Whether the trainer ends without `close`, or is killed while its workers hang."""
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER.format(folder=os.path.dirname(__file__))))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    trainer = subprocess.Popen([sys.executable, script, how], **pipes, text=True)
    worker = psutil.Process(int(trainer.stdout.readline()))
    family = [worker, *worker.parent().children(), worker.parent()]
    if how == "hang":
        time.sleep(1.0)
        trainer.kill()
    trainer.communicate("\n", timeout=10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
