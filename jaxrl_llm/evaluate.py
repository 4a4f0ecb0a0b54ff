"""Held-out accuracy, pass@k and maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxrl_llm import config as cfg
from jaxrl_llm.data.pipeline import EvaluationBatch
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.rewards.pool import Scorer
from jaxrl_llm.rewards.verify.extract import final_answer
from jaxrl_llm.rollout.distribution import Sampling, sampling
from jaxrl_llm.rollout.groups import detokenize, verdicts
from jaxrl_llm.types import Rollout

__all__: list[str] = []  # metric-stage functions of method cards


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the probability that k of `samples` responses, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k): unbiased for the pass rate of k fresh responses.

    Args:
      samples: n, responses to the prompt.
      correct: c, how many of them are right.
      k: 1 <= k <= n.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; it must lie between 1 and the {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Returns the chance that the most frequent answer is right: 1 or 0, or a share where answers tie.

    Args:
      answers: the parsed answer of each response; None has no vote.
      correct: the verdict of each response.

    Returns:
      0.0 when no response has an answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    verdict = dict(zip(answers, correct))
    winners = [answer for answer, count in votes.items() if count == top]
    return sum(bool(verdict[answer]) for answer in winners) / len(winners)


def summarize(
    correct: np.ndarray, answers: Sequence[Sequence[str | None]], *, ks: Sequence[int]
) -> dict[str, float]:
    """Returns pass@k for each k, and maj@n, averaged over prompts.

    Args:
      correct: `[N, n]` bool, verdicts of n responses to each of N prompts.
      answers: N lists of n parsed answers.
      ks: values of k.
    """
    samples = correct.shape[1]
    counts = correct.sum(axis=1)
    out = {f"pass@{k}": float(np.mean([pass_at_k(samples, int(c), k) for c in counts])) for k in ks}
    out[f"maj@{samples}"] = float(np.mean([majority_correct(a, c) for a, c in zip(answers, correct)]))
    return out


def evaluate(
    respond: Callable[..., Rollout],
    batches: Sequence[EvaluationBatch],
    scorer: Scorer,
    tokenizer: Tokenizer,
    config: cfg.Config,
    *,
    stop_ids: Iterable[int],
) -> dict[str, float]:
    """Evaluates a policy on held-out prompts.

    Args:
      respond: `(prompts, how, group_size, max_new_tokens) -> Rollout`, the sampler with its parameters.
      batches: every held-out prompt once.
      scorer: gives the verdicts.
      config: how many samples, at which temperature; which reward is the verdict.
      stop_ids: ids that end a response.

    Returns:
      `eval/accuracy` (greedy), `eval/response_length` and `eval/truncated`; with `options.samples` = n > 0
      also `eval/pass@k` for the powers of two up to n, and `eval/maj@n`.
    """

    options, scoring = config.evaluation, config.scoring
    answer = options.answer or final_answer
    length = options.max_new_tokens or config.rollout.max_new_tokens

    def run(how: Sampling, group_size: int) -> tuple[np.ndarray, list[list[str | None]], Rollout]:
        correct, answers, rollouts = [], [], []
        for batch in batches:
            rollout = jax.device_get(respond(batch.prompts, how, group_size, length))
            texts = detokenize(tokenizer, rollout)
            scores = scorer.score(
                [text for group in texts for text in group],
                [example for example in batch.examples for _ in range(group_size)],
            )
            correct.append(verdicts(scores, scoring).reshape(-1, group_size)[batch.valid])
            answers += [[answer(text) for text in g] for g, ok in zip(texts, batch.valid) if ok]
            rollouts.append(jax.tree.map(lambda a, keep=batch.valid: a[keep], rollout))
        return np.concatenate(correct), answers, rollouts

    correct, _, rollouts = run(sampling(stop_ids, temperature=0), 1)
    out = {
        "accuracy": float(np.mean(correct)),
        "response_length": float(np.mean(np.concatenate([r.lengths for r in rollouts]))),
        "truncated": float(np.mean(np.concatenate([r.truncated for r in rollouts]))),
    }
    if options.samples:
        ks = sorted({*(2**i for i in range(options.samples.bit_length())), options.samples})
        correct, answers, _ = run(sampling(stop_ids, temperature=options.temperature), options.samples)
        out |= summarize(correct, answers, ks=[k for k in ks if k <= options.samples])
    return {f"eval/{name}": value for name, value in out.items()}
