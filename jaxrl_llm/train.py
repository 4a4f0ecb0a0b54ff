"""The training loop. The only file that jits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import ahead, evaluate, keys, sharding, step
from jaxrl_llm import config as cfg
from jaxrl_llm.checkpoints import Checkpoints, digest, fingerprint
from jaxrl_llm.keys import Stream
from jaxrl_llm.metrics import MetricsWriter, Progress, finalize, log_versions, merge
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rollout import sampler
from jaxrl_llm.rollout.groups import Collected, collect
from jaxrl_llm.run import Run, StopSignal, checkpoint_folder, open_run, start_or_resume
from jaxrl_llm.step import Rows, TrainState
from jaxrl_llm.types import Prompts, Rollout


class Programs(NamedTuple):
    """The compiled functions of a run; each compiles once for each bucket of prompt lengths."""

    init: Callable
    copy: Callable
    generate: Callable
    start: Callable  # with `rollout.score_every`: `generate` in pieces
    advance: Callable
    prepare: Callable
    update: Callable
    digest: Callable


def compile_programs(run: Run) -> Programs:
    batch, everywhere = sharding.batch_sharding(run.mesh), sharding.replicated(run.mesh)
    micro, stale = run.config.optimizer.microbatch, run.config.rollout.stale
    method = (run.policy, run.config.objective, run.need)
    in_slots = {"slots": run.config.rollout.slots, "batch_sharding": batch}
    sizes = ("group_size", "max_new_tokens")
    update = functools.partial(step.train_step, *method, run.tx, microbatch=micro, batch_sharding=batch)
    # On a CPU the time goes to library calls: more optimizing of what is around them makes nothing faster.
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    jit = functools.partial(jax.jit, compiler_options=options)
    return Programs(
        # Updates donate their state, and `run.params` stay as the reference: so the state has a copy.
        init=jit(
            lambda params: jax.tree.map(jnp.copy, step.init_state(params, run.tx, stale=stale)),
            out_shardings=run.state_shardings,
        ),
        copy=jit(lambda params: jax.tree.map(jnp.copy, params)),
        generate=jit(
            functools.partial(sampler.generate, run.policy, **in_slots),
            static_argnames=sizes,
            out_shardings=batch,
        ),
        start=jit(functools.partial(sampler.start, run.policy, **in_slots), static_argnames=sizes),
        advance=jit(
            functools.partial(sampler.advance, run.policy, batch_sharding=batch), donate_argnames="decoding"
        ),
        prepare=jit(
            functools.partial(step.prepare, *method, microbatch=micro, batch_sharding=batch),
            out_shardings=(Rows(batch, batch, batch, everywhere), everywhere),
        ),
        update=jit(
            update,
            donate_argnames="state",
            out_shardings=(run.state_shardings.replace(sampler_params=None), everywhere),
        ),
        digest=jit(digest),
    )


def train(config: cfg.Config, run_dir: str | Path) -> dict[str, Any]:
    """Trains from the start, or goes on with the run in `run_dir`.

    Returns:
      the metrics of the last step; empty if no step was left to do.

    Raises:
      SystemExit: SIGINT or SIGTERM came; the step under way was finished and saved.
    """
    with (
        open_run(config) as run,
        StopSignal() as stop,
        ahead.compiling(run, compile_programs(run)) as (programs, compiled),
        ThreadPoolExecutor(1) as pool,
    ):
        checkpoints = Checkpoints(checkpoint_folder(run_dir), config.checkpoint, digest_fn=programs.digest)
        state, start = start_or_resume(run, checkpoints, programs.init)
        log_versions(run_dir, config)
        metrics: dict[str, Any] = {}
        with checkpoints, MetricsWriter(run_dir, start=start) as writer, Progress(config, start) as progress:
            compiled()
            if start == 0:
                first = evaluated(run, programs, state) | stamp(programs, state)
                writer.write(0, first)
                progress.update(0, first)
            else:
                progress.note(f"going on after step {start} of {config.steps}")
            ahead_of_time, sampler_params = None, state.sampler_params
            for number in range(start, config.steps):
                began = time.perf_counter()
                if ahead_of_time is None:
                    collected = roll_out(run, programs, sampler_params or state.params, number)
                else:
                    collected = ahead_of_time.result()
                if config.rollout.stale:
                    sampler_params = programs.copy(state.params)
                    if number + 1 < config.steps:
                        ahead_of_time = pool.submit(roll_out, run, programs, sampler_params, number + 1)
                state, metrics = learn(run, programs, state.replace(sampler_params=None), number, collected)
                state = state.replace(sampler_params=sampler_params)
                metrics["seconds/step"] = time.perf_counter() - began
                done, last = number + 1, number + 1 == config.steps
                stopping = stop.received is not None  # read once: a later signal ends the next step
                saves = last or stopping or done % config.checkpoint.every == 0
                if last or (config.evaluation.every and done % config.evaluation.every == 0):
                    metrics |= evaluated(run, programs, state)
                if saves:
                    metrics |= stamp(programs, state)
                writer.write(done, metrics, collected.samples)
                progress.update(done, metrics)
                if saves:
                    meta = {"config": cfg.to_json(config), "stream": collected.stream}
                    checkpoints.save(done, state, meta, metrics)
                if stopping and not last:
                    raise SystemExit(128 + stop.received)
        return metrics


def roll_out(run: Run, programs: Programs, params: Params, number: int) -> Collected:
    """Rolls out and scores the batch of step `number`."""
    options, key = run.config.rollout, keys.key(run.config.seed, Stream.ROLLOUT, number)
    respond = responder(run, programs, params, key)
    sizes = {"group_size": options.group_size, "max_new_tokens": options.max_new_tokens}

    def generate(prompts: Prompts) -> Iterator[tuple[Rollout, jax.Array]]:
        if not options.score_every:
            rollout = respond(prompts, run.how, **sizes)
            yield rollout, np.ones(rollout.lengths.shape, bool)
            return
        prompts = jax.device_put(prompts, sharding.batch_sharding(run.mesh))
        decoding, ended = programs.start(params, prompts, key, run.how, **sizes), np.zeros((), bool)
        while not ended.all():
            decoding = programs.advance(params, decoding, run.how, np.int32(options.score_every))
            rollout, ended = jax.device_get(sampler.responses(decoding))
            yield rollout, ended

    return collect(generate, run.stream, run.scorer, run.tokenizer, run.config)


def responder(run: Run, programs: Programs, params: Params, key: jax.Array) -> Callable[..., Rollout]:
    """Returns `(prompts, how, group_size, max_new_tokens) -> Rollout` with these parameters."""
    batch = sharding.batch_sharding(run.mesh)

    def respond(prompts, how, group_size, max_new_tokens):
        sizes = {"group_size": group_size, "max_new_tokens": max_new_tokens}
        return programs.generate(params, jax.device_put(prompts, batch), key, how, **sizes)

    return respond


def learn(
    run: Run, programs: Programs, state: TrainState, number: int, collected: Collected
) -> tuple[TrainState, dict[str, Any]]:
    """Makes the updates of step `number`; returns the new state and the step's metrics."""
    began, objective = time.perf_counter(), run.config.objective
    batch = jax.device_put(collected.batch, sharding.batch_sharding(run.mesh))
    scalars = {"step": np.int32(number), "total_steps": np.int32(run.config.steps)}
    ref_params = run.params if run.need.reference else None
    rows, measured = programs.prepare(state.params, ref_params, batch, run.how, scalars)
    measured = [collected.metrics, measured]
    key = keys.key(run.config.seed, Stream.SHUFFLE, number)
    for inner in range(objective.passes * objective.minibatches):
        state, numbers = programs.update(state, rows, run.how, step.Update(key, np.int32(inner)))
        measured.append(numbers)
    metrics = finalize(merge(jax.device_get(measured)))
    seconds = collected.seconds | {"update": time.perf_counter() - began}
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    metrics["tokens_per_second"] = collected.tokens / seconds["rollout"]
    updates = int(state.updates)
    return state, metrics | {
        "updates": updates,
        "skipped": int(state.skipped),
        "learning_rate": float(run.learning_rate(updates)),
    }


def evaluated(run: Run, programs: Programs, state: TrainState) -> dict[str, float]:
    """Evaluates on the held-out prompts, if there are any."""
    if not run.evaluation:
        return {}
    respond = responder(run, programs, state.params, keys.key(run.config.seed, Stream.EVALUATE))
    return evaluate.evaluate(
        respond, run.evaluation, run.scorer, run.tokenizer, run.config, stop_ids=run.stop_ids
    )


def stamp(programs: Programs, state: TrainState) -> dict[str, str]:
    """Returns the hash of the parameters, by which two runs can be compared."""
    return {"params_digest": fingerprint(state.params, programs.digest)}
