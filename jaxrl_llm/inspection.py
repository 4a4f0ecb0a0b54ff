"""Finished or running models, looked at from outside the loop: evaluate and sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import config as cfg
from jaxrl_llm import keys
from jaxrl_llm.checkpoints import CheckpointError, Checkpoints
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.rollout.distribution import sampling
from jaxrl_llm.rollout.groups import detokenize
from jaxrl_llm.run import Run, checkpoint_folder, open_run
from jaxrl_llm.step import TrainState
from jaxrl_llm.train import Programs, compile_programs, evaluated
from jaxrl_llm.types import Example


@contextmanager
def opened(
    config: cfg.Config, run_dir: str | Path | None, step: int | None
) -> Iterator[tuple[Run, Programs, TrainState, int]]:
    """Opens a run with the state of a checkpoint, or with the model that it starts from.

    Args:
      run_dir: None: the model as loaded.
      step: which checkpoint; None: the newest.
    """
    with open_run(config) as run:
        programs = compile_programs(run)
        if run_dir is None:
            yield run, programs, programs.init(run.params), 0
            return
        with Checkpoints(checkpoint_folder(run_dir), config.checkpoint, read_only=True) as checkpoints:
            restored = checkpoints.restore(run.like(programs.init), step)
            if restored is None:
                raise CheckpointError(f"no checkpoint in {run_dir}; train there first, or give --config")
            yield run, programs, restored.state, restored.step


def evaluate_run(run_dir: str | Path, *, step: int | None, config: cfg.Config) -> dict[str, float]:
    """Evaluates a checkpoint on the config's held-out prompts.

    Returns:
      `step` and the metrics of `jaxrl_llm.evaluate.evaluate`.
    """
    if config.data.evaluation is None:
        raise ValueError("the config has no held-out prompts: set data.evaluation to a source")
    with opened(config, run_dir, step) as (run, programs, state, done):
        return {"step": done, **evaluated(run, programs, state)}


def sample(
    config: cfg.Config,
    run_dir: str | Path | None,
    *,
    step: int | None,
    prompt: str,
    n: int,
    temperature: float,
) -> list[str]:
    """Returns n responses to a prompt, which is rendered as in training."""
    with opened(config, run_dir, step) as (run, programs, state, _):
        one = PromptStream([Example(prompt, "")], run.tokenizer, config.data, seed=0)
        key = keys.key(np.random.SeedSequence().entropy % 2**31, keys.Stream.ROLLOUT)
        how = sampling(run.stop_ids, temperature=temperature)
        sizes = {"group_size": n, "max_new_tokens": config.rollout.max_new_tokens}
        rollout = programs.generate(state.params, one.draw(1).prompts, key, how, **sizes)
        return detokenize(run.tokenizer, jax.device_get(rollout))[0]
