"""The stream of training prompts, and batches of held-out ones.

The order of a stream is a function of (seed, position), so a position is all that a checkpoint needs, and
every host of a run knows the whole batch, of which it takes its slice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxrl_llm.config import Data
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.types import Example, Prompts

_log = logging.getLogger(__name__)

# grain's shuffle looks for the next place of an order of 2^16 of them: with few rows that takes milliseconds.
_SMALL = 1024


class PromptBatch(NamedTuple):
    """This host's part of one draw from the stream."""

    examples: list[Example]  # [B]
    prompts: Prompts  # numpy arrays


class EvaluationBatch(NamedTuple):
    """Held-out prompts; the last batch repeats its last prompt so that shapes stay the same."""

    examples: list[Example]  # [B]
    prompts: Prompts  # numpy arrays
    valid: np.ndarray  # [B] bool; False: a repetition, not to be counted


class _Row(NamedTuple):
    example: Example
    ids: list[int]


class _Rows(NamedTuple):
    rows: list[_Row]
    dropped: int
    truncated: int


class _Permuted:
    """Rows in a new order each epoch, without end, for sets that fit one permutation."""

    def __init__(self, rows: list[_Row], seed: int):
        self._rows, self._seed = rows, seed

    def __getitem__(self, position: int) -> _Row:
        epoch, place = divmod(position, len(self._rows))
        return self._rows[_permutation(len(self._rows), self._seed, epoch)[place]]


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


class PromptStream(Iterator[PromptBatch]):
    """An endless stream of prompts: every example once an epoch, each epoch in another order.

    Attributes:
      position: how many prompts have been drawn, on all hosts together.
      dropped: examples left out because their prompt is over the length limit.
      truncated: examples whose prompt was cut to its last tokens.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        data: Data,
        seed: int,
        *,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Encodes every prompt.

        Args:
          examples: what the source gave.
          tokenizer: of the model.
          data: batch size, order, length limit and buckets.
          seed: of the order.
          process_index: this host, in [0, process_count).
          process_count: hosts that share the stream.

        Raises:
          ValueError: no example is left, or one cannot be encoded.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index {process_index} is not in [0, {process_count})")
        rows, self.dropped, self.truncated = _encode(examples, tokenizer, data, "training")
        self.position = 0
        self._data = data
        self._pad_id = tokenizer.pad_id
        self._process = (process_index, process_count)
        self._identity = {
            "examples": len(rows),
            "prompts": _digest(row.example for row in rows),
            "shuffle": data.shuffle,
            "seed": seed,
        }
        if data.shuffle and len(rows) < _SMALL:
            self._dataset = _Permuted(rows, seed)
        else:
            dataset = grain.MapDataset.source(rows).seed(seed)
            self._dataset = (dataset.shuffle() if data.shuffle else dataset).repeat()

    def __next__(self) -> PromptBatch:
        return self.draw(self._data.prompts_per_step)

    def draw(self, count: int) -> PromptBatch:
        """Draws `count` prompts and returns this host's `count / process_count` of them.

        All hosts pad to one width: the smallest bucket that holds the longest of the `count` prompts.

        Raises:
          ValueError: `count` is not a positive multiple of the number of hosts.
        """
        index, hosts = self._process
        if count < 1 or count % hosts:
            raise ValueError(
                f"cannot draw {count} prompts on {hosts} hosts; data.prompts_per_step (and "
                f"rollout.prompts_per_round) must be a positive multiple of {hosts}"
            )
        drawn = [self._dataset[self.position + i] for i in range(count)]
        width = _bucket(max(len(row.ids) for row in drawn), self._data.prompt_lengths)
        start = index * (count // hosts)
        mine = slice(start, start + count // hosts)
        uid = np.arange(self.position, self.position + count, dtype=np.int32)[mine]
        self.position += count
        return PromptBatch([row.example for row in drawn[mine]], _pad(drawn[mine], uid, width, self._pad_id))

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the position and what identifies the stream."""
        return {"position": self.position, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; the number of hosts may be another one.

        Raises:
          ValueError: `state` is of a stream with other prompts or another order.
        """
        differs = [
            f"{name} (saved {state.get(name)!r}, now {value!r})"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if differs:
            raise ValueError(
                f"the saved position belongs to another stream of prompts: {', '.join(differs)}; "
                "give the data and seed of the saved run, or start a new run folder"
            )
        self.position = int(state["position"])


def batches_for_evaluation(
    examples: Sequence[Example], tokenizer: Tokenizer, data: Data, batch: int
) -> list[EvaluationBatch]:
    """Returns every held-out example once, in order, in batches of one size.

    Prompts over the length limit are treated as `data.on_long_prompt` says, with a warning that counts them.

    Args:
      examples: the held-out examples.
      tokenizer: of the model.
      data: length limit and buckets.
      batch: B, at least 1.

    Raises:
      ValueError: no example is left, or one cannot be encoded.
    """
    if batch < 1:
        raise ValueError(f"evaluation.batch is {batch}; it must be at least 1")
    rows = _encode(examples, tokenizer, data, "held-out").rows
    out = []
    for start in range(0, len(rows), batch):
        places = np.arange(start, start + batch, dtype=np.int32)
        chosen = [rows[min(i, len(rows) - 1)] for i in places]
        width = _bucket(max(len(row.ids) for row in chosen), data.prompt_lengths)
        prompts = _pad(chosen, places, width, tokenizer.pad_id)
        out.append(EvaluationBatch([row.example for row in chosen], prompts, places < len(rows)))
    return out


def _encode(examples: Sequence[Example], tokenizer: Tokenizer, data: Data, use: str) -> _Rows:
    """Encodes prompts and applies the length limit; `use` names the examples in messages."""
    if not len(examples):
        raise ValueError(f"the {use} data is empty; check the source's path, split and limit")
    limit = data.prompt_lengths[-1]
    encoded = [_Row(example, _prompt_ids(example, tokenizer, data)) for example in examples]
    long = sum(len(row.ids) > limit for row in encoded)
    if not long:
        return _Rows(encoded, dropped=0, truncated=0)
    longest = max(len(row.ids) for row in encoded)
    _log.warning(
        "%d of %d %s prompts are over the limit of %d tokens (the longest has %d): %s",
        *(long, len(encoded), use, limit, longest),
        "dropped" if data.on_long_prompt == "drop" else f"cut to their last {limit} tokens",
    )
    if data.on_long_prompt == "truncate":
        return _Rows([_Row(r.example, r.ids[-limit:]) for r in encoded], dropped=0, truncated=long)
    kept = [row for row in encoded if len(row.ids) <= limit]
    if not kept:
        raise ValueError(
            f"all {len(encoded)} {use} prompts are over the {limit}-token limit (the longest has {longest}); "
            "raise the last of data.prompt_lengths, or set data.on_long_prompt=truncate"
        )
    return _Rows(kept, dropped=long, truncated=0)


def _prompt_ids(example: Example, tokenizer: Tokenizer, data: Data) -> list[int]:
    try:
        ids = tokenizer.prompt(example.prompt, system=data.system, chat=data.chat)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"example {example.id} cannot be encoded: {error!r}; its prompt is {_short(example)}"
        ) from error
    if not ids:
        raise ValueError(f"example {example.id} has no tokens; its prompt is {_short(example)}")
    return ids


def _short(example: Example) -> str:
    text = repr(example.prompt)
    return text if len(text) <= 200 else text[:200] + "..."


def _bucket(length: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds `length` tokens."""
    return min(b for b in buckets if b >= length)


def _pad(rows: Sequence[_Row], uid: np.ndarray, width: int, pad_id: int) -> Prompts:
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for row, out in zip(rows, tokens):
        out[: len(row.ids)] = row.ids
    return Prompts(tokens=tokens, lengths=np.array([len(row.ids) for row in rows], np.int32), uid=uid)


def _digest(examples: Iterator[Example]) -> str:
    """Hashes prompts and answers, not token ids: a chat template may write today's date."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.prompt, example.answer]).encode() + b"\n")
    return digest.hexdigest()[:16]
