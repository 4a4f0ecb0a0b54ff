"""Groups of scored responses until a batch is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import config as cfg
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.prompts import take_kept
from jaxrl_llm.rewards.pool import Scorer, Scores
from jaxrl_llm.types import Batch, Example, Prompts, Rollout


class Collected(NamedTuple):
    """One step's batch, with what the logs say of it."""

    batch: Batch  # numpy arrays
    metrics: dict[str, tuple[float, float]]  # name -> (sum, weight)
    samples: list[dict[str, Any]]  # texts with rewards
    seconds: dict[str, float]  # rollout, reward
    tokens: int  # sampled, those of groups not kept included
    stream: dict[str, Any]  # where the prompt stream goes on


class _Group(NamedTuple):
    """One prompt's responses, on the host."""

    example: Example
    texts: list[str]
    prompts: Prompts  # arrays of this prompt alone
    rollout: Rollout
    rewards: np.ndarray  # [G]
    correct: np.ndarray  # [G] bool
    scored: np.ndarray  # [G] bool
    terms: dict[str, np.ndarray]


class NoContrastError(RuntimeError):
    """Dynamic sampling ran out of rounds."""


def collect(
    generate: Callable[[Prompts], Iterator[tuple[Rollout, jax.Array]]],
    stream: PromptStream,
    scorer: Scorer,
    tokenizer: Tokenizer,
    config: cfg.Config,
) -> Collected:
    """Samples and scores groups until the batch holds `data.prompts_per_step` of them.

    Without `rollout.keep` one round fills the batch. With it, groups that it refuses are thrown away and
    further prompts are drawn, at most `rollout.max_rounds` times; surplus groups are cut off in order. When
    the rounds run out, the batch goes on with fewer groups (its other rows have no loss), or the run stops.

    Args:
      generate: the sampler, with this step's parameters and key. It gives the rollout so far and which of its
        samples `[B, G]` have ended, once or several times; in the end all have. They are scored as they end.
    """
    want, options = config.data.prompts_per_step, config.rollout
    rounds: list[list[_Group]] = []
    kept: list[list[bool]] = []
    seconds = {"rollout": 0.0, "reward": 0.0}
    counts: dict[str, int] = {}
    while sum(map(sum, kept)) < want and len(rounds) < (options.max_rounds if options.keep else 1):
        groups = _one_round(generate, stream, scorer, tokenizer, config, seconds, counts)
        rounds.append(groups)
        kept.append(_kept(groups, options.keep))
    chosen = [rounds[r][i] for r, i in take_kept(kept, want)]
    if len(chosen) < want and options.on_short_batch == "stop":
        raise NoContrastError(
            f"{len(rounds)} rounds of {len(rounds[0])} prompts gave {len(chosen)} of {want} groups that "
            f"rollout.keep accepts; use easier or harder prompts, raise rollout.max_rounds, or set "
            "rollout.on_short_batch=continue"
        )
    drawn = [group for groups in rounds for group in groups]
    metrics = _metrics(drawn, counts) | {
        "sampling_rounds": (len(rounds), 1),
        "short_batch": (float(len(chosen) < want), 1),
        "kept_groups": (sum(map(sum, kept)), len(drawn)),
    }
    tokens = int(sum(group.rollout.lengths.sum() for group in drawn))
    return Collected(
        _batch(chosen or drawn[:1], want, bool(chosen)),
        metrics,
        _samples(drawn),
        seconds,
        tokens,
        stream.state(),
    )


def detokenize(tokenizer: Tokenizer, rollout: Rollout) -> list[list[str]]:
    """Returns the text of each response, `[B][G]`, without special tokens."""
    return [
        [tokenizer.decode(row[:length].tolist()) for row, length in zip(rows, lengths)]
        for rows, lengths in zip(np.asarray(rollout.tokens), np.asarray(rollout.lengths))
    ]


def verdicts(scores: Scores, scoring: cfg.Scoring) -> np.ndarray:
    """Returns `[N]` bool: whether the verdict's reward is 1 (or more); an unscored sample is not correct."""
    name = scoring.verdict or next(iter(scores.terms))
    return np.nan_to_num(scores.terms[name], nan=0.0) >= 1


def _one_round(generate, stream, scorer, tokenizer, config, seconds, counts) -> list[_Group]:
    started = time.perf_counter()
    drawn = stream.draw(config.rollout.prompts_per_round or config.data.prompts_per_step)
    size = config.rollout.group_size
    rollout, sampled, texts = None, started, [""] * (len(drawn.examples) * size)

    def finished() -> Iterator[tuple[np.ndarray, list[str]]]:
        """Gives the samples that have ended since the last look."""
        nonlocal rollout, sampled
        seen = np.zeros(len(texts), bool)
        for rollout, done in map(jax.device_get, generate(drawn.prompts)):
            sampled = time.perf_counter()
            new = np.flatnonzero(np.ravel(done) & ~seen)
            seen[new] = True
            rows = (a.reshape(len(texts), *a.shape[2:])[new] for a in (rollout.tokens, rollout.lengths))
            for i, row, length in zip(new, *rows):
                texts[i] = tokenizer.decode(row[:length].tolist())
            if new.size:
                yield new, [texts[i] for i in new]

    scores = scorer.score_parts(finished(), [example for example in drawn.examples for _ in range(size)])
    seconds["rollout"] += sampled - started
    seconds["reward"] += time.perf_counter() - sampled
    for name, count in scores.counts.items():
        counts[name] = counts.get(name, 0) + count
    by_group = lambda a: np.asarray(a).reshape(-1, size)
    rewards, correct, scored = map(
        by_group, (scores.rewards, verdicts(scores, config.scoring), scores.scored)
    )
    terms = {name: by_group(values) for name, values in scores.terms.items()}
    of = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    return [
        _Group(
            example,
            texts[i * size : (i + 1) * size],
            of(drawn.prompts, i),
            of(rollout, i),
            rewards[i],
            correct[i],
            scored[i],
            of(terms, i),
        )
        for i, example in enumerate(drawn.examples)
    ]


def _kept(groups: list[_Group], keep: Callable | None) -> list[bool]:
    """Asks `keep` about each group's rewards; a group with an unscored sample is judged by the others."""
    if keep is None:
        return [True] * len(groups)
    return [
        bool(g.scored.any()) and bool(np.asarray(keep(g.rewards[g.scored].astype(np.float32)[None]))[0])
        for g in groups
    ]


def _batch(groups: list[_Group], want: int, real: bool) -> Batch:
    """Stacks groups; rows are repeated up to `want`, marked as not scored."""
    absent = want - len(groups) if real else want
    index = np.minimum(np.arange(want), len(groups) - 1)
    width = max(g.prompts.tokens.shape[-1] for g in groups)
    widen = lambda p: p.replace(tokens=np.pad(p.tokens, (0, width - p.tokens.shape[-1])))
    stack = lambda trees: jax.tree.map(lambda *a: np.stack(a)[index], *trees)
    scored = np.stack([g.scored for g in groups])[index]
    scored &= (np.arange(want) < want - absent)[:, None]
    return Batch(
        prompts=stack([widen(g.prompts) for g in groups]),
        rollout=stack([g.rollout for g in groups]),
        rewards=np.where(scored, np.stack([g.rewards for g in groups])[index], 0).astype(np.float32),
        correct=np.stack([g.correct for g in groups])[index] & scored,
        scored=None if scored.all() else scored,
    )


def _metrics(groups: list[_Group], counts: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Means over every sample that was drawn, those of groups not kept included."""
    scored = np.stack([g.scored for g in groups])
    total = lambda name: float(np.stack([getattr(g, name) for g in groups])[scored].sum())
    samples = float(scored.size)
    out = {
        "reward": (total("rewards"), float(scored.sum())),
        "accuracy": (total("correct"), float(scored.sum())),
        "unscored": (float((~scored).sum()), 1.0),
        "response_length": (float(sum(g.rollout.lengths.sum() for g in groups)), samples),
        "truncated": (float(sum(g.rollout.truncated.sum() for g in groups)), samples),
    }
    for name in groups[0].terms:
        values = np.stack([g.terms[name] for g in groups])[scored]
        out[f"reward/{name}"] = (float(values.sum()), float(values.size))
    return out | {f"scoring/{name}": (float(count), 1.0) for name, count in counts.items()}


def _samples(groups: list[_Group], count: int = 4) -> list[dict[str, Any]]:
    """Returns the first sample of the first few groups, as text."""
    return [
        {
            "prompt": g.example.prompt,
            "completion": g.texts[0],
            "gold": g.example.answer,
            "reward": float(g.rewards[0]) if g.scored[0] else None,
            "terms": {name: float(values[0]) for name, values in g.terms.items()},
        }
        for g in groups[:count]
    ]
