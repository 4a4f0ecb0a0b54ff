"""What is wrong with a config, found before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from jaxrl_llm.config import fields
from jaxrl_llm.config.functions import menu
from jaxrl_llm.config.schema import Config, ConfigError, Mesh, stage_functions
from jaxrl_llm.signature import did_you_mean, fact, name_of


def check(config: Config, *, devices: int | None = None) -> None:
    """Checks a config at the start of a run.

    Args:
      config: what will run.
      devices: number of devices at hand; None leaves out what depends on it.

    Raises:
      ConfigError: every fault found, one a line, each with the value, the limit and a remedy.
    """
    faults = list(_types(config, "")) or [*_ranges(config), *_names(config), *_sizes(config, devices)]
    if faults:
        raise ConfigError("\n".join(faults))


def _types(node: Any, path: str) -> Iterator[str]:
    """Yields the fields whose value is not of the declared type."""
    for name, hint in fields.hints_of(type(node)).items():
        value, place = getattr(node, name), f"{path}{name}"
        if not fields.fits(value, hint):
            wanted = f"{fields.describe(hint)}{_meant(value, hint, place)}"
            yield f"{place} is {fields.shown(value)}, but wants {wanted}"
            continue
        parts = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for i, part in parts:
            if dataclasses.is_dataclass(part) and type(part).__module__ == type(node).__module__:
                yield from _types(part, f"{place}." if i is None else f"{place}.{i}.")


def _meant(value: Any, hint: Any, place: str) -> str:
    if not isinstance(value, str):
        return ""
    choices = [c for kind in fields.options(hint) if get_origin(kind) is Literal for c in get_args(kind)]
    if choices:
        return did_you_mean(value, choices)
    known = menu(place.split("."))
    return did_you_mean(value, known) + " (import the function itself)" if known else ""


def _at_least(config: Config) -> Iterator[tuple[str, float, float, str]]:
    """Yields (path, value, least value, what a remedy would be)."""
    c = config
    yield "steps", c.steps, 0, "0 only evaluates"
    yield "seed", c.seed, 0, "any number from 0 to 4294967295"
    yield "data.prompts_per_step", c.data.prompts_per_step, 1, "a step has at least one prompt"
    yield "rollout.group_size", c.rollout.group_size, 1, "1 samples one response a prompt"
    yield "rollout.max_new_tokens", c.rollout.max_new_tokens, 1, "a response has at least one token"
    yield "rollout.slots", c.rollout.slots, 0, "0 decodes all samples at once"
    yield "rollout.score_every", c.rollout.score_every, 0, "0 scores when all samples have ended"
    yield "rollout.top_k", c.rollout.top_k, 0, "0 keeps every token"
    yield "rollout.prompts_per_round", c.rollout.prompts_per_round, 0, "0 draws data.prompts_per_step"
    yield "rollout.max_rounds", c.rollout.max_rounds, 1, "1 samples once"
    yield "scoring.workers", c.scoring.workers, 0, "0 computes rewards in the trainer, with no time limit"
    yield "objective.minibatches", c.objective.minibatches, 1, "1 makes one update a pass"
    yield "objective.passes", c.objective.passes, 1, "1 uses each rollout once"
    yield "optimizer.learning_rate", c.optimizer.learning_rate, 0, "0 trains nothing"
    yield "optimizer.warmup", c.optimizer.warmup, 0, "0 has no warm-up"
    yield "optimizer.microbatch", c.optimizer.microbatch, 0, "0 takes the whole minibatch at once"
    yield "evaluation.every", c.evaluation.every, 0, "0 evaluates at the start and the end"
    yield "evaluation.batch", c.evaluation.batch, 1, "prompts at a time"
    yield "evaluation.samples", c.evaluation.samples, 0, "0 measures greedy accuracy only"
    yield "evaluation.temperature", c.evaluation.temperature, 0, "0 is greedy"
    if c.evaluation.max_new_tokens is not None:
        yield "evaluation.max_new_tokens", c.evaluation.max_new_tokens, 1, "none takes the rollout's"
    yield "checkpoint.every", c.checkpoint.every, 1, "steps between checkpoints"
    yield "checkpoint.keep_last", c.checkpoint.keep_last, 1, "a resume needs one"
    yield "checkpoint.keep_best", c.checkpoint.keep_best, 0, "0 keeps only the last ones"


def _ranges(config: Config) -> Iterator[str]:
    c = config
    for path, value, least, remedy in _at_least(config):
        if not (value >= least and math.isfinite(value)):
            yield f"{path} is {value}, but must be a finite number of at least {least}: {remedy}"
    if c.seed >= 2**32:
        yield f"seed is {c.seed}, but keys hold 32 bits: take one below {2**32}"
    if not c.rollout.temperature > 0 or not math.isfinite(c.rollout.temperature):
        yield (
            f"rollout.temperature is {c.rollout.temperature}, but must be above 0 in training: 0 is greedy, "
            "for evaluation only; take 1.0 to sample from the policy itself"
        )
    if not 0 < c.rollout.top_p <= 1:
        yield f"rollout.top_p is {c.rollout.top_p}, but must be in (0, 1]: 1.0 keeps every token"
    if not c.scoring.timeout > 0:
        yield f"scoring.timeout is {c.scoring.timeout} seconds, but must be above 0: a reward call needs time"
    if c.optimizer.clip_norm is not None and not c.optimizer.clip_norm > 0:
        yield f"optimizer.clip_norm is {c.optimizer.clip_norm}, but must be above 0: none clips nothing"
    if c.evaluation.samples and c.evaluation.temperature == 0:
        yield (
            f"evaluation.samples is {c.evaluation.samples} at evaluation.temperature 0, where all samples "
            "are equal: raise the temperature, or set evaluation.samples=0"
        )
    if c.evaluation.every and c.data.evaluation is None:
        yield f"evaluation.every is {c.evaluation.every}, but data.evaluation is none: set it, or every to 0"
    if c.rollout.stop_ids is not None and (not c.rollout.stop_ids or min(c.rollout.stop_ids) < 0):
        yield f"rollout.stop_ids is {c.rollout.stop_ids}, but wants token ids: none takes the tokenizer's"
    lengths = c.data.prompt_lengths
    if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
        yield f"data.prompt_lengths is {lengths}, but wants rising positive lengths, for example (64, 128)"


def _names(config: Config) -> Iterator[str]:
    if not config.name or "/" in config.name:
        yield f"name is {config.name!r}, but a run's name is not empty and has no '/'"
    names = Counter(r.name or name_of(r.fn) for r in config.scoring.rewards)
    for name, count in names.items():
        if count > 1:
            yield f"scoring.rewards has {count} rewards named {name!r}: give each Reward a name of its own"
    verdict = config.scoring.verdict
    if verdict is not None and verdict not in names:
        yield f"scoring.verdict is {verdict!r}, which is no reward{did_you_mean(verdict, names)}"
    for i, reward in enumerate(config.scoring.rewards):
        if not math.isfinite(reward.weight):
            yield f"scoring.rewards.{i}.weight is {reward.weight}, but must be finite"
    for i, (coefficient, fn) in enumerate(config.objective.regularize):
        if not math.isfinite(coefficient):
            yield f"objective.regularize.{i}.0 ({name_of(fn)}) is {coefficient}, but must be finite"


def _sizes(config: Config, devices: int | None) -> Iterator[str]:
    """Yields what does not divide, and groups too small for their estimator."""
    size = config.rollout.group_size
    for path, fn in stage_functions(config.objective):
        least = fact(fn, "min_group")
        if least is not None and size < least:
            yield (
                f"rollout.group_size is {size}, but {path}={name_of(fn)} compares the samples of a group and "
                f"needs at least {least}: raise rollout.group_size, or take an advantage that needs no group"
            )
    prompts, minibatches = config.data.prompts_per_step, config.objective.minibatches
    if prompts < 1 or minibatches < 1 or config.optimizer.microbatch < 0:
        return
    if prompts % minibatches:
        yield _indivisible("data.prompts_per_step", prompts, "objective.minibatches", minibatches)
        return
    part, name = prompts // minibatches, "a minibatch (data.prompts_per_step / objective.minibatches)"
    microbatch = config.optimizer.microbatch
    if microbatch:
        if part % microbatch:
            yield _indivisible(name, part, "optimizer.microbatch", microbatch)
        part, name = microbatch, "optimizer.microbatch"
    parts = {
        name: part,
        "rollout.prompts_per_round": config.rollout.prompts_per_round,
        "rollout.slots": config.rollout.slots,
        "evaluation.batch": config.evaluation.batch,
    }
    yield from _mesh(config.mesh, devices, parts)


def _mesh(mesh: Mesh, devices: int | None, parts: dict[str, int]) -> Iterator[str]:
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    shown = f"mesh data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
    if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
        yield f"{shown}: each axis is at least 1, and at most one is -1, which takes the devices that remain"
        return
    if -1 in sizes and devices is None:
        return
    fixed = math.prod(s for s in sizes if s != -1)
    if devices is not None and (devices % fixed if -1 in sizes else devices != fixed):
        yield f"{shown} does not multiply to the {devices} devices at hand: set one axis to -1"
        return
    shards = math.prod(devices // fixed if s == -1 else s for s in sizes[:2])
    for name, part in parts.items():
        if part % shards:
            yield _indivisible(name, part, "the number of batch shards (mesh.data x mesh.fsdp)", shards)


def _indivisible(name: str, value: int, divisor_name: str, divisor: int) -> str:
    up = -(-value // divisor) * divisor
    return f"{name} is {value}, which {divisor_name} = {divisor} does not divide: take {up}, for example"
