"""Scores completions in worker processes that are killed at a hard limit."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxrl_llm.config import Reward, Scoring
from jaxrl_llm.rewards import scoring
from jaxrl_llm.rewards.scoring import KINDS, Outcome, RewardError
from jaxrl_llm.rewards.workers import LOST, Call, Workers
from jaxrl_llm.signature import did_you_mean, fact, name_of
from jaxrl_llm.types import Example

_log = logging.getLogger(__name__)

ON_ERROR = ("unscored", "raise")
CHUNK = 64  # samples sent to a worker at a time, at most
BUDGET = 0.5  # seconds after which a worker hands back an unfinished chunk


class Scores(NamedTuple):
    """Rewards of N samples."""

    rewards: np.ndarray  # [N] float64, the weighted sum; 0 where not scored
    scored: np.ndarray  # [N] bool; False: no loss for this sample
    terms: dict[str, np.ndarray]  # name -> [N] float64, before weighting; 0 where there is none
    counts: dict[str, int]  # kind -> how often, over all rewards: "wrong", "unparsed", "none", "not_finite",
    #                         "raised", "timed_out", "crashed"; and "unscored", the samples without a reward
    causes: tuple[str, ...]  # one line for each reward and kind of failure


class _Task(NamedTuple):
    reward: int
    indices: tuple[int, ...]


class Scorer:
    """Scores samples with several weighted rewards, in processes that can't hang or take down the trainer.

    Each call of a reward has `timeout` seconds, then its process is killed and the sample is unscored. Calls
    travel in chunks; if a chunk fails, its samples are tried one by one, so that only the one at fault is
    lost. A batched reward is one call for the whole list, with one limit. A sample is unscored if any reward
    of weight other than 0 has no number for it. Safe to use from several threads.

    Args:
      config: the rewards and how they run. `workers=0` runs them in this process, with no limit.

    Raises:
      RewardError: if a reward can't be sent to a worker process.
      ValueError: if the config is inconsistent.
    """

    def __init__(self, config: Scoring):
        _check(config)
        self.config = config
        self.names = [_name(reward) for reward in config.rewards]
        self._workers = None
        if config.workers:
            self._workers = Workers([reward.fn for reward in config.rewards], config.workers)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes. What they were doing is lost."""
        if self._workers is not None:
            self._workers.close()

    def score(self, completions: Sequence[str], examples: Sequence[Example]) -> Scores:
        """Scores `completions[i]` as a response to `examples[i]`.

        Raises:
          RewardError: if a reward returns something that isn't a number, or a batched one the wrong number of
            values; if it raises or its process dies and `on_error="raise"`; if processes keep dying.
        """
        if len(completions) != len(examples):
            raise ValueError(
                f"{len(completions)} completions for {len(examples)} examples: one each is needed"
            )
        return self._sum(self._outcomes(range(len(self.names)), completions, examples), examples)

    def score_parts(
        self, parts: Iterable[tuple[Sequence[int], Sequence[str]]], examples: Sequence[Example]
    ) -> Scores:
        """Scores completions that come in parts, each while the next ones are awaited.

        Args:
          parts: `(indices, completions)`: completion j of a part is a response to `examples[indices[j]]`; all
            parts together hold every index once. A batched reward waits for the last part.
          examples: of all samples.

        Raises:
          RewardError: as `score`.
        """
        texts: list[str] = [""] * len(examples)
        table: list[list[Outcome | None]] = [[None] * len(examples) for _ in self.names]
        batched = [r for r in range(len(self.names)) if self._is_batched(r)]
        others = [r for r in range(len(self.names)) if not self._is_batched(r)]
        running: list[tuple[list[int], Sequence[int], Future]] = []
        with ThreadPoolExecutor(thread_name_prefix="scoring") as pool:

            def send(rewards: list[int], indices: Sequence[int]) -> None:
                rows = [texts[i] for i in indices], [examples[i] for i in indices]
                running.append((rewards, indices, pool.submit(self._outcomes, rewards, *rows)))

            for indices, completions in parts:
                for i, text in zip(indices, completions, strict=True):
                    texts[i] = text
                send(others, indices)
            send(batched, range(len(examples)))
            for rewards, indices, future in running:
                for r, column in zip(rewards, future.result()):
                    for i, outcome in zip(indices, column):
                        table[r][i] = outcome
        return self._sum(table, examples)

    def check_gold(self, examples: Sequence[Example], n: int | None = None) -> None:
        """Checks that the gold answers of the first `n` examples (None: all) score 1 against themselves.

        Only rewards that declare `self_check` are asked.

        Raises:
          RewardError: naming the first answer that doesn't match itself.
        """
        examples = examples[:n]
        checked = [i for i, reward in enumerate(self.config.rewards) if fact(reward.fn, "self_check")]
        golds = [example.answer for example in examples]
        for i, outcomes in zip(checked, self._outcomes(checked, golds, examples)):
            bad = [(e, o) for e, o in zip(examples, outcomes) if o.value != 1.0]
            if bad:
                example, outcome = bad[0]
                raise RewardError(
                    f"{len(bad)} of {len(examples)} gold answers don't match themselves by {self.names[i]};"
                    f" the first is {example.answer!r} of example {example.id} ({outcome.kind}"
                    f"{': ' + outcome.cause if outcome.cause else ''}). Mend or drop these examples, or use"
                    " another reward"
                )

    # From outcomes to numbers.

    def _sum(self, outcomes: list[list[Outcome]], examples: Sequence[Example]) -> Scores:
        rewards, scored = np.zeros(len(examples)), np.ones(len(examples), bool)
        counts, causes = dict.fromkeys(KINDS, 0), []
        terms = {}
        for reward, name, column in zip(self.config.rewards, self.names, outcomes):
            has_value = np.array([outcome.value is not None for outcome in column], bool)
            values = np.array([0.0 if o.value is None else o.value for o in column], np.float64)
            terms[name] = values
            rewards += reward.weight * values
            if reward.weight != 0:
                scored &= has_value
            for kind, number in collections.Counter(o.kind for o in column if o.kind in counts).items():
                counts[kind] += number
            causes += _causes(name, column, examples)
        for cause in causes:
            _log.warning("%s", cause)
        counts["unscored"] = int((~scored).sum())
        return Scores(np.where(scored, rewards, 0.0), scored, terms, counts, tuple(causes))

    # Running.

    def _outcomes(
        self, rewards: Sequence[int], completions: Sequence[str], examples: Sequence[Example]
    ) -> list[list[Outcome]]:
        """Returns a list of N outcomes for each of the given rewards."""
        table: dict[int, list[Outcome | None]] = {r: [None] * len(completions) for r in rewards}
        run = self._run_inline if self.config.workers == 0 else self._run_pooled
        for task, outcomes in run(rewards, completions, examples):
            for i, outcome in zip(task.indices, outcomes):
                self._raise_if_asked(task, i, outcome, examples)
                table[task.reward][i] = outcome
        return [table[r] for r in rewards]

    def _raise_if_asked(self, task: _Task, i: int, outcome: Outcome, examples: Sequence[Example]) -> None:
        if self.config.on_error == "raise" and outcome.kind in ("raised", "crashed"):
            raise RewardError(
                f"reward {self.names[task.reward]} failed on sample {i} (example {examples[i].id}):"
                f" {outcome.cause}. Set scoring.on_error='unscored' to train on without such samples"
            )

    def _run_inline(
        self, rewards: Sequence[int], completions: Sequence[str], examples: Sequence[Example]
    ) -> Iterator[tuple[_Task, list[Outcome]]]:
        for r in rewards:
            fn, task = self.config.rewards[r].fn, _Task(r, tuple(range(len(completions))))
            if fact(fn, "batched"):
                yield task, scoring.call_batched(fn, completions, examples)
            else:
                yield task, scoring.call_each(fn, completions, examples, math.inf)

    def _run_pooled(
        self, rewards: Sequence[int], completions: Sequence[str], examples: Sequence[Example]
    ) -> Iterator[tuple[_Task, list[Outcome]]]:
        def send(task: _Task) -> tuple[_Task, Call]:
            texts, rows = [completions[i] for i in task.indices], [examples[i] for i in task.indices]
            return task, self._workers.send(task.reward, texts, rows, self._budget(task), self.config.timeout)

        waiting = collections.deque(send(task) for task in self._tasks(rewards, len(completions)))
        try:
            while waiting:
                task, call = waiting.popleft()
                result = self._workers.wait(call)
                if isinstance(result, list):
                    yield task, result
                    if rest := task.indices[len(result) :]:
                        waiting.append(send(_Task(task.reward, rest)))
                elif result.kind == LOST:
                    waiting.append(send(task))
                elif len(task.indices) > 1 and not self._is_batched(task.reward):
                    waiting.extend(send(_Task(task.reward, (i,))) for i in task.indices)
                else:
                    yield task, [result] * len(task.indices)
        finally:
            for _, call in waiting:
                call.future.cancel()

    def _tasks(self, rewards: Sequence[int], n: int) -> Iterator[_Task]:
        size = min(CHUNK, -(-n // (4 * self.config.workers)))
        for r in rewards:
            step = n if self._is_batched(r) else size
            yield from (_Task(r, tuple(range(i, min(i + step, n)))) for i in range(0, n, max(step, 1)))

    def _budget(self, task: _Task) -> float:
        return BUDGET if len(task.indices) > 1 and not self._is_batched(task.reward) else 0.0

    def _is_batched(self, reward: int) -> bool:
        return bool(fact(self.config.rewards[reward].fn, "batched"))


def _causes(name: str, outcomes: Sequence[Outcome], examples: Sequence[Example]) -> Iterator[str]:
    """One line for each kind of failure, with its first example."""
    for kind in ("not_finite", "raised", "timed_out", "crashed"):
        failed = [(e.id, o.cause) for e, o in zip(examples, outcomes) if o.kind == kind]
        if failed:
            first, cause = failed[0]
            yield f"reward {name}: {len(failed)} of {len(outcomes)} {kind}; example {first}: {cause}"


def _check(config: Scoring) -> None:
    names = [_name(reward) for reward in config.rewards]
    if len(set(names)) < len(names):
        raise ValueError(f"rewards {names} share a name: give each Reward its own `name`")
    if config.on_error not in ON_ERROR:
        raise ValueError(f"scoring.on_error={config.on_error!r}{did_you_mean(config.on_error, ON_ERROR)}")
    if config.workers < 0 or not config.timeout > 0:
        raise ValueError(
            f"scoring.workers={config.workers} and scoring.timeout={config.timeout}: workers must be at least"
            " 0 (which runs rewards inline), the timeout over 0 seconds"
        )


def _name(reward: Reward) -> str:
    return reward.name or name_of(reward.fn)
