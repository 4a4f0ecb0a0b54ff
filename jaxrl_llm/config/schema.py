"""The frozen dataclasses of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm.signature import did_you_mean
from jaxrl_llm.types import Example


class ConfigError(ValueError):
    """A config that cannot be run, or a name in it that does not exist."""


class Replaceable:
    """A frozen dataclass whose copies and constructor refuse unknown fields with a suggestion."""

    def __new__(cls, *args: Any, **fields: Any):
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
        return super().__new__(cls)

    def replace(self, **changes: Any):
        """Returns a copy with some fields changed.

        Raises:
          ConfigError: an unknown field.
        """
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Model(Replaceable):
    """Which model; how it computes (precision, rematerialisation) is bound to the loader."""

    load: Callable[
        ..., Any
    ]  # () -> LoadedModel(policy, params, tokenizer), e.g. partial(from_gguf, path=...)


@dataclass(frozen=True)
class Data(Replaceable):
    """Where prompts come from and how they are cut into steps."""

    train: Callable[[], list[Example]]  # a source; any sequence of examples
    evaluation: Callable[[], list[Example]] | None = None
    prompts_per_step: int = 8  # B
    shuffle: bool = True
    system: str | None = None  # system message put before text prompts
    chat: bool = True  # render prompts through the tokenizer's chat template
    prompt_lengths: tuple[int, ...] = (64, 128, 256, 512)  # buckets of P; the last is the limit
    on_long_prompt: Literal["drop", "truncate"] = "drop"  # "truncate" keeps the last tokens; both are counted


@dataclass(frozen=True)
class Rollout(Replaceable):
    """How responses are sampled."""

    group_size: int = 8  # G
    max_new_tokens: int = 64  # T
    slots: int = 0  # samples decoded at a time, a finished one making room for the next; 0: all at once
    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    stop_ids: tuple[int, ...] | None = None  # None: the tokenizer's
    keep: Callable | None = None  # which groups to keep (dynamic sampling); None keeps all
    prompts_per_round: int = 0  # prompts drawn in one round when `keep` is set; 0: data.prompts_per_step
    max_rounds: int = 10  # rounds of sampling to fill the batch when `keep` is set
    on_short_batch: Literal["continue", "stop"] = "continue"  # with fewer groups, when rounds run out
    score_every: int = 0  # decode steps after which finished samples go to be scored meanwhile; 0: at the end
    stale: bool = False  # sample step n + 1 while step n is learned, from the parameters before it


@dataclass(frozen=True)
class Reward(Replaceable):
    """One reward function and its weight in the sum."""

    fn: Callable  # (completion: str, example: Example) -> float | None
    weight: float = 1.0
    name: str | None = None  # None: the function's name


@dataclass(frozen=True)
class Scoring(Replaceable):
    """How rewards are computed."""

    rewards: tuple[Reward, ...] = ()
    verdict: str | None = None  # the reward whose value of 1 means a correct answer; None: the first
    workers: int = 2  # processes; 0: in the trainer itself, with no time limit (for debugging)
    timeout: float = 10.0  # seconds for one call, then the worker is killed and the sample is unscored
    # "unscored": the sample has no loss and is counted; "raise": training ends
    on_error: Literal["unscored", "raise"] = "unscored"


@dataclass(frozen=True)
class Stage(Replaceable):
    """A function of arrays and the name under which its result goes on.

    A NamedTuple result goes under its fields' names instead.
    """

    fn: Callable
    to: str
    add: bool = False  # add to what is already there under `to`


@dataclass(frozen=True)
class Objective(Replaceable):
    """From rewards to a gradient. Every function is written for its own scope; the engine vmaps."""

    advantage: Callable | tuple[Callable | Stage, ...]  # a bare function's result goes to `advantages`
    loss: Callable  # [T] for one response
    shape: tuple[Stage, ...] = ()  # reward stage: changes `rewards`, makes `token_rewards`
    select: tuple[Callable | Stage, ...] = ()  # a bare function's result multiplies the loss, as `weights`
    regularize: tuple[tuple[float, Callable], ...] = ()  # (coefficient, [T] function) added to the loss
    aggregate: Callable | None = None  # None: token_mean
    minibatches: int = 1  # optimizer updates in one pass over the rollouts
    passes: int = 1  # passes over the rollouts


@dataclass(frozen=True)
class Optimizer(Replaceable):
    """The gradient transformation; schedules count optimizer updates."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two end at 0
    warmup: int = 0  # updates of linear warm-up from 0
    make: Callable | None = None  # schedule -> optax transformation; None: adamw
    clip_norm: float | None = 1.0
    microbatch: int = 0  # prompts (with all their samples) in one forward and backward pass; 0: all


@dataclass(frozen=True)
class Evaluation(Replaceable):
    """Accuracy on held-out prompts."""

    # What maj@k takes a vote on: text -> answer, or None for no vote. None: verify.extract.final_answer.
    answer: Callable[[str], str | None] | None = None
    every: int = 0  # steps; 0: only at the start and the end
    batch: int = 64  # prompts at a time
    samples: int = 0  # samples a prompt for pass@k and maj@k; 0: greedy accuracy only
    temperature: float = 1.0
    max_new_tokens: int | None = None  # None: the rollout's


@dataclass(frozen=True)
class Checkpoint(Replaceable):
    every: int = 10  # steps
    keep_last: int = 2
    keep_best: int = 1  # by held-out greedy accuracy


@dataclass(frozen=True)
class Mesh(Replaceable):
    """Devices along each axis; -1 takes the rest."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Config(Replaceable):
    """A whole run."""

    model: Model
    data: Data
    scoring: Scoring
    objective: Objective
    rollout: Rollout = field(default_factory=Rollout)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    mesh: Mesh = field(default_factory=Mesh)
    name: str = "run"
    seed: int = 0
    steps: int = 100


def stage_functions(objective: Objective) -> Iterator[tuple[str, Callable]]:
    """Yields the path and the function of every stage of `objective`, in the order of the step."""
    stages = [("shape", objective.shape), ("advantage", objective.advantage), ("select", objective.select)]
    for name, stage in stages:
        for i, part in enumerate(stage if isinstance(stage, tuple) else (stage,)):
            path = f"objective.{name}.{i}" if isinstance(stage, tuple) else f"objective.{name}"
            yield path, part.fn if isinstance(part, Stage) else part
    yield "objective.loss", objective.loss
    for i, (_, fn) in enumerate(objective.regularize):
        yield f"objective.regularize.{i}.1", fn
    if objective.aggregate is not None:
        yield "objective.aggregate", objective.aggregate
