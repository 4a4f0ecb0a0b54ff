"""Sources of examples. A config binds one: `train=partial(jsonl, path="train.jsonl", gold=gsm8k_gold)`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.signature import did_you_mean
from jaxrl_llm.types import Example

Row = Mapping[str, Any]
Field = str | Callable[[Row], Any]  # the name of a field, or a function of the row


def examples(items: Iterable[Example | Row | tuple[Any, Any]]) -> list[Example]:
    """Makes examples of what is in memory.

    Args:
      items: `(prompt, answer)` pairs, mappings with `prompt` and `answer` (other entries go to `meta`), or
        examples, which are taken as they are but for their `id`.

    Returns:
      Examples with ids 0, 1, ...

    Raises:
      ValueError: no items, or one that is none of these.
    """
    out = []
    for i, item in enumerate(items):
        if isinstance(item, Example):
            out.append(dataclasses.replace(item, id=i))
        elif isinstance(item, Mapping):
            out.append(_example(item, i, f"item {i}", "prompt", "answer"))
        elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
            out.append(Example(item[0], _text(item[1]), i))
        else:
            raise ValueError(f"item {i} is {item!r}; give an Example, a mapping, or a (prompt, answer) pair")
    return _not_empty(out, "the list of examples", None)


def jsonl(
    path: str | Path,
    *,
    prompt: Field = "question",
    answer: Field = "answer",
    gold: Callable[[str], str] | None = None,
    template: str | None = None,
    limit: int | None = None,
) -> list[Example]:
    """Reads a file with one JSON object a line, or one JSON list of objects.

    Args:
      path: the file.
      prompt: field of the prompt (text, or a list of messages), or a function of the row.
      answer: field of the answer, or a function of the row.
      gold: takes the gold answer out of the answer's text.
      template: text around the prompt, with `{prompt}` in its place.
      limit: read at most this many rows; None reads all.

    Returns:
      Examples; `id` is the index of the row, `meta["row"]` the row.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no rows; or with the line: text that is not JSON, a missing field, an answer without gold.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path} (from {Path.cwd()}); give its path")
    out = []
    for where, row in _json_rows(path):
        if limit is not None and len(out) >= limit:
            break
        out.append(_example(row, len(out), where, prompt, answer, gold, template))
    return _not_empty(out, path, limit)


def tfds(
    name: str | Path,
    split: str = "train",
    *,
    prompt: Field = "question",
    answer: Field = "answer",
    gold: Callable[[str], str] | None = None,
    template: str | None = None,
    limit: int | None = None,
    data_dir: str | None = None,
) -> list[Example]:
    """Reads a prepared TFDS dataset by random access, with no TensorFlow.

    Args:
      name: the dataset's name (`"gsm8k"`, `"my_data/config:1.0.0"`), or the folder of its version, where
        `dataset_info.json` lies. It must be stored in a format of random access, such as `array_record`.
      split: `"train"`, `"train[:10%]"` ...
      data_dir: where prepared datasets lie, for a name.
      prompt: see `jsonl`; likewise `answer`, `gold`, `template`, `limit`.

    Returns:
      Examples; `id` is the index of the row, `meta["row"]` the row with bytes decoded.
    """
    import tensorflow_datasets

    if (Path(name) / "dataset_info.json").is_file():
        source = tensorflow_datasets.builder_from_directory(str(name)).as_data_source(split)
    else:
        source = tensorflow_datasets.data_source(str(name), split=split, data_dir=data_dir, download=False)
    count = len(source) if limit is None else min(limit, len(source))
    out = [
        _example(_decoded(source[i]), i, f"{name}, {split}, row {i}", prompt, answer, gold, template)
        for i in range(count)
    ]
    return _not_empty(out, f"{name}, split {split}", limit)


def reasoning_gym(name: str, *, size: int, seed: int, **params: Any) -> list[Example]:
    """Generates tasks of a reasoning-gym dataset, to be scored by the dataset's own scorer.

    Args:
      name: such as `"leg_counting"`.
      size: number of tasks.
      seed: of the tasks; give held-out tasks another seed.
      **params: the dataset's own parameters.

    Returns:
      Examples whose `meta` has `dataset`, `params` and `entry`: what `score_answer` of the dataset needs.
      `answer` is "" where the dataset has no single right answer.

    Raises:
      ValueError: unknown dataset or parameter, or a value that the dataset refuses.
    """
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no dataset {name!r}{did_you_mean(name, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    for param in params:
        if param not in known:
            raise ValueError(f"dataset {name!r} has no parameter {param!r}{did_you_mean(param, known)}")
    try:
        dataset = gym.create_dataset(name, size=size, seed=seed, **params)
    except AssertionError as error:  # how reasoning-gym refuses a value
        raise ValueError(f"dataset {name!r} refuses size={size}, seed={seed}, {params}: {error}") from error
    out = []
    for i, entry in enumerate(dataset):
        meta = {"dataset": name, "params": params, "entry": entry}
        out.append(Example(entry["question"], _text(entry["answer"]), i, meta))
    return _not_empty(out, f"reasoning-gym dataset {name!r}", size)


def gsm8k_gold(answer: str) -> str:
    """Returns the number after `####` of a GSM8K solution, thousands separators removed."""
    _, mark, gold = answer.rpartition("####")
    if not mark or not gold.strip():
        raise ValueError(f"no '#### answer' in {answer[-80:]!r}")
    return gold.strip().replace(",", "")


def svamp_prompt(row: Row) -> str:
    """Returns the story and the question of an SVAMP problem."""
    body = row["Body"].strip()
    return f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {row['Question'].strip()}"


def svamp_answer(row: Row) -> str:
    """Returns the answer of an SVAMP problem, whole numbers without a decimal point: 51.0 is "51"."""
    return _text(row["Answer"])


def _example(
    row: Row,
    index: int,
    where: str,
    prompt: Field,
    answer: Field,
    gold: Callable[[str], str] | None = None,
    template: str | None = None,
) -> Example:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with fields")
    text, target = _get(row, prompt, where), _text(_get(row, answer, where))
    if template is not None:
        if "{prompt}" not in template or not isinstance(text, str):
            raise ValueError(
                f"{where}: template {template!r} needs '{{prompt}}' in it, and prompts that are text"
            )
        text = template.replace("{prompt}", text)
    if gold is not None:
        try:
            target = gold(target)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return Example(text, target, index, {"row": row})


def _get(row: Row, field: Field, where: str) -> Any:
    try:
        return field(row) if callable(field) else row[field]
    except KeyError as error:
        missing = error.args[0]
        raise ValueError(f"{where} has no field {missing!r}{did_you_mean(str(missing), row)}") from error


def _text(value: Any) -> str:
    """Returns a value of a row as text: None as "", whole floats as integers."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the place and the content of each row."""
    with path.open(encoding="utf-8") as file:
        start = file.read(4096).lstrip()[:1]
        file.seek(0)
        if start == "[":
            for i, row in enumerate(_parse(file.read(), path, 1)):
                yield f"{path}, item {i}", row
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", _parse(line, path, number)


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise ValueError(f"{path}, line {at}, column {error.colno}: not JSON: {error.msg}") from error


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {name: _decoded(v) for name, v in value.items()}
    return value


def _not_empty(out: list[Example], where: Any, limit: int | None) -> list[Example]:
    if not out:
        raise ValueError(f"{where} holds no examples (limit {limit}); give one that does")
    return out
