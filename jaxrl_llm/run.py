"""What a run holds, opened and checked before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import optax

from jaxrl_llm import config as cfg
from jaxrl_llm import optimizers, sharding
from jaxrl_llm.checkpoints import CheckpointError, Checkpoints, Restored
from jaxrl_llm.data.pipeline import EvaluationBatch, PromptStream, batches_for_evaluation
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.providers import Needs
from jaxrl_llm.rewards.pool import Scorer
from jaxrl_llm.rollout.distribution import Sampling, sampling
from jaxrl_llm.step import TrainState, check_objective, init_state


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that stays the same from step to step."""

    config: cfg.Config
    mesh: jax.sharding.Mesh
    policy: Policy
    params: Params  # as loaded, on the mesh: the start of training
    tokenizer: Tokenizer
    stream: PromptStream
    evaluation: Sequence[EvaluationBatch]
    scorer: Scorer
    need: Needs
    tx: optax.GradientTransformation
    learning_rate: optax.Schedule
    stop_ids: tuple[int, ...]

    @property
    def how(self) -> Sampling:
        """The sampling distribution of training."""
        options = self.config.rollout
        return sampling(
            self.stop_ids, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
        )

    @property
    def state_shardings(self) -> TrainState:
        """Where parameters, optimizer state and counters live."""
        params = sharding.param_shardings(self.mesh, self.policy.axes)
        everywhere, stale = sharding.replicated(self.mesh), self.config.rollout.stale
        state = jax.eval_shape(lambda p: init_state(p, self.tx, stale=stale), self.params)
        opt_state = optax.tree_map_params(
            self.tx, lambda _, s: s, state.opt_state, params, transform_non_params=lambda _: everywhere
        )
        return TrainState(params, opt_state, everywhere, everywhere, params if stale else None)

    def like(self, init: Callable[[Params], TrainState]) -> TrainState:
        """Returns the shapes and shardings of the state that `init` makes."""
        place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        return jax.tree.map(place, jax.eval_shape(init, self.params), self.state_shardings)


def load_model(config: cfg.Config, mesh: jax.sharding.Mesh) -> tuple[Policy, Params, Tokenizer]:
    """Loads the model and puts its parameters on the mesh."""
    policy, params, tokenizer, _ = config.model.load()
    return policy, jax.device_put(params, sharding.param_shardings(mesh, policy.axes)), tokenizer


@contextlib.contextmanager
def open_run(config: cfg.Config) -> Iterator[Run]:
    """Checks the config against the model, the data and the devices; starts the reward workers.

    Raises:
      ValueError: something does not fit; the message says what, the limit and the remedy.
    """
    cfg.check(config, devices=len(jax.devices()))
    need = check_objective(
        config.objective, microbatch=config.optimizer.microbatch, stale=config.rollout.stale
    )
    mesh = sharding.make_mesh(config.mesh)
    policy, params, tokenizer = load_model(config, mesh)
    _check_lengths(config, policy)
    examples = config.data.train()
    stream = PromptStream(examples, tokenizer, config.data, config.seed)
    held_out = config.data.evaluation() if config.data.evaluation else []
    evaluation = (
        batches_for_evaluation(held_out, tokenizer, config.data, config.evaluation.batch) if held_out else []
    )
    objective = config.objective
    updates = config.steps * objective.minibatches * objective.passes
    stop_ids = config.rollout.stop_ids
    with Scorer(config.scoring) as scorer:
        scorer.check_gold(examples)
        yield Run(
            config=config,
            mesh=mesh,
            policy=policy,
            params=params,
            tokenizer=tokenizer,
            stream=stream,
            evaluation=evaluation,
            scorer=scorer,
            need=need,
            tx=optimizers.build(config.optimizer, updates),
            learning_rate=optimizers.schedule(config.optimizer, updates),
            stop_ids=tuple(sorted(tokenizer.stop_ids)) if stop_ids is None else stop_ids,
        )


def _check_lengths(config: cfg.Config, policy: Policy) -> None:
    longest = config.data.prompt_lengths[-1] + config.rollout.max_new_tokens
    if longest > policy.max_positions:
        raise ValueError(
            f"data.prompt_lengths allows {config.data.prompt_lengths[-1]} tokens and rollout.max_new_tokens "
            f"{config.rollout.max_new_tokens} more, {longest} in all, but the model has "
            f"{policy.max_positions} positions; lower one of them"
        )


def start_or_resume(
    run: Run, checkpoints: Checkpoints, init: Callable[[Params], TrainState]
) -> tuple[TrainState, int]:
    """Returns the state and the number of completed steps: of the newest checkpoint, or of a new run.

    Raises:
      CheckpointError: the checkpoint was made with another config.
    """
    restored = checkpoints.restore(run.like(init))
    if restored is None:
        return init(run.params), 0
    _check_same(run.config, restored)
    run.stream.restore(restored.meta["stream"])
    return restored.state, restored.step


def _check_same(config: cfg.Config, restored: Restored) -> None:
    changed = cfg.differences(cfg.from_json(restored.meta["config"]), config)
    if changed:
        raise CheckpointError(
            f"the checkpoint of step {restored.step} was made with another config:\n  "
            + "\n  ".join(changed)
            + "\nset these back, or train in a new run folder"
        )


class StopSignal:
    """Notes the first SIGINT or SIGTERM, so that the step under way ends and is saved.

    A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        print(
            f"{self.received.name}: the step under way ends and is saved; once more stops at once", flush=True
        )


def checkpoint_folder(run_dir: Path) -> Path:
    return Path(run_dir) / "checkpoints"
