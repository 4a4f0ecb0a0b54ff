"""Compiles a run's programs before they are needed, several at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm import keys, sharding
from jaxrl_llm.run import Run
from jaxrl_llm.step import Update
from jaxrl_llm.types import Batch, Prompts

if TYPE_CHECKING:
    from jaxrl_llm.train import Programs


@contextlib.contextmanager
def compiling(run: Run, programs: Programs) -> Iterator[tuple[Programs, Callable[[], None]]]:
    """Starts to compile every program that training will call, at every prompt length it may meet.

    A jitted function that is called later with arguments of these shapes and shardings finds its program.

    Yields:
      the programs, and a function that waits until all are compiled and raises what went wrong.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    jobs = [pool.submit(lower) for lower in _lowerings(run, programs)]

    def wait() -> None:
        for job in jobs:
            job.result()

    try:
        yield programs, wait
    finally:
        pool.shutdown(cancel_futures=True)


def _lowerings(run: Run, programs: Programs) -> list[Callable[[], Any]]:
    """Returns what compiles each program, the slowest first."""
    config, key, place = run.config, keys.key(0, keys.Stream.ROLLOUT), sharding.batch_sharding(run.mesh)
    count, size = config.data.prompts_per_step, config.rollout.group_size
    state = run.like(programs.init)

    def rows(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def prompts(number: int, width: int) -> Prompts:
        return Prompts(tokens=rows(number, width), lengths=rows(number), uid=rows(number))

    def sampler(number: int, width: int, group_size: int, max_new_tokens: int) -> tuple[tuple, dict]:
        sizes = {"group_size": group_size, "max_new_tokens": max_new_tokens}
        return (state.params, prompts(number, width), key, run.how), sizes

    def compile_sampler(*call: int) -> None:
        args, sizes = sampler(*call)
        programs.generate.lower(*args, **sizes).compile()

    def step_arguments(width: int) -> tuple:
        args, sizes = sampler(count, width, size, config.rollout.max_new_tokens)
        batch = Batch(
            prompts=prompts(count, width),
            rollout=programs.generate.eval_shape(*args, **sizes),
            rewards=rows(count, size, dtype=np.float32),
            correct=rows(count, size, dtype=bool),
            scored=None,
        )
        scalars = {"step": np.int32(0), "total_steps": np.int32(0)}
        return state.params, run.params if run.need.reference else None, batch, run.how, scalars

    def compile_prepare(width: int) -> None:
        programs.prepare.lower(*step_arguments(width)).compile()

    def compile_update(width: int) -> None:
        made, _ = programs.prepare.eval_shape(*step_arguments(width))
        programs.update.lower(
            state.replace(sampler_params=None), made, run.how, Update(key, np.int32(0))
        ).compile()

    widths = config.data.prompt_lengths
    out = [lambda w=w: compile_update(w) for w in widths]
    out += [lambda call=call: compile_sampler(*call) for call in _sampler_calls(run)]
    out += [lambda w=w: compile_prepare(w) for w in widths]
    arrays = dict.fromkeys(jax.tree.leaves(state))
    return out + [lambda array=array: programs.digest.lower(array).compile() for array in arrays]


def _sampler_calls(run: Run) -> list[tuple[int, int, int, int]]:
    """Returns (prompts, their length, samples, new tokens) of every call of the whole sampler, each once."""
    options, evaluation = run.config.rollout, run.config.evaluation
    number = options.prompts_per_round or run.config.data.prompts_per_step
    widths = () if options.score_every else run.config.data.prompt_lengths
    calls = [(number, w, options.group_size, options.max_new_tokens) for w in widths]
    length = evaluation.max_new_tokens or options.max_new_tokens
    samples = [n for n in (1, evaluation.samples) if n]
    for batch in run.evaluation:
        calls += [(*batch.prompts.tokens.shape, n, length) for n in samples]
    return list(dict.fromkeys(calls))
