"""Worker processes for reward functions: killed at a limit, replaced when they die, gone with the trainer."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import pebble

from jaxrl_llm.rewards import scoring
from jaxrl_llm.rewards.scoring import Outcome, RewardError
from jaxrl_llm.signature import fact, name_of
from jaxrl_llm.types import Example

MAX_DEATHS = 20  # workers that die one after the other while at work, with no result between them
MAX_RESTARTS = 3  # pools that break one after the other
LOST = "lost"  # the pool broke before the call had a result: send it again


class Call(NamedTuple):
    pool: pebble.ProcessPool
    future: Future


class Workers:
    """A pool of processes that hold the reward functions and score lists of samples with them.

    Processes are forked from a clean server that has imported this package, never from the trainer with its
    threads; a new one takes hundredths of a second.

    Args:
      functions: reward functions, importable by name.
      number: of processes.

    Raises:
      RewardError: if a function can't be pickled.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], number: int):
        self._number = number
        self._pickled = pickle.dumps([_pickle(fn) for fn in functions])
        methods = multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            modules = {module for fn in functions for module in fact(fn, "imports") or ()}
            self._context.set_forkserver_preload(["jaxrl_llm.rewards", *sorted(modules)])
        self._lock = threading.Lock()
        self._deaths = self._restarts = 0
        self._closed = False
        self._pool = self._new_pool()

    def send(
        self,
        index: int,
        completions: Sequence[str],
        examples: Sequence[Example],
        budget: float,
        timeout: float,
    ) -> Call:
        """Sends samples to function `index`.

        Args:
          index: of the function.
          completions: texts.
          examples: one for each.
          budget: seconds after which the worker starts no further sample (batched functions take all).
          timeout: seconds for one call; with the budget, the limit after which the process is killed.
        """
        pool = self._pool
        try:
            return Call(
                pool, pool.schedule(_run, (index, completions, examples, budget), timeout=budget + timeout)
            )
        except RuntimeError as error:  # the pool has broken
            future: Future = Future()
            future.set_exception(BrokenProcessPool(str(error)))
            return Call(pool, future)

    def wait(self, call: Call) -> list[Outcome] | Outcome:
        """Returns the outcomes of the samples that the worker got to, or one that says how the call failed.

        Raises:
          RewardError: if the function is broken, or workers die one after the other.
        """
        try:
            outcomes = _result(call)
        except TimeoutError as error:
            return Outcome("timed_out", None, f"no result after {error.args[-1]:g} s")
        except pebble.ProcessExpired as error:
            cause = f"its process died ({_describe(error.exitcode)})"
            self._deaths += 1
            if self._deaths > MAX_DEATHS:
                raise RewardError(f"{self._deaths} reward calls died in a row; the last: {cause}") from error
            return Outcome("crashed", None, cause)
        except BrokenProcessPool as error:
            self._replace(call.pool, error)
            return Outcome(LOST)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"samples can't be sent to a worker process ({error}); keep plain data in Example.meta, or"
                " set scoring.workers=0"
            ) from error
        self._deaths = self._restarts = 0
        return outcomes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            _stop(self._pool)

    def _new_pool(self) -> pebble.ProcessPool:
        pool = pebble.ProcessPool(
            self._number, initializer=_start, initargs=(self._pickled,), context=self._context
        )
        for _ in range(self._number):
            pool.schedule(_ready)  # start the processes now, not with the first reward
        return pool

    def _replace(self, broken: pebble.ProcessPool, cause: BaseException) -> None:
        """Starts a new pool, once for all threads that saw `broken` break."""
        with self._lock:
            if self._closed:
                raise RewardError("the scorer was closed: make a new one to score again")
            if self._pool is not broken:
                return
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                raise RewardError(
                    f"reward workers died at start {self._restarts} times ({cause}). Their own messages are"
                    " on stderr. A script that starts training needs `if __name__ == '__main__':` around it"
                ) from cause
            _stop(broken)
            self._pool = self._new_pool()


def _result(call: Call) -> list[Outcome]:
    """Waits for a result, looking now and then whether the pool still lives."""
    while True:
        try:
            return call.future.result(timeout=5.0)
        except TimeoutError:
            if call.future.done():
                raise
            if not call.pool.active:
                raise BrokenProcessPool("the pool stopped") from None


def _stop(pool: pebble.ProcessPool) -> None:
    pool.stop()
    pool.join()


def _pickle(fn: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(
            f"reward {name_of(fn)} can't be sent to a worker process ({error}); define it at the top level of"
            " an importable module, or set scoring.workers=0"
        ) from error


def _describe(exitcode: int) -> str:
    return f"signal {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


# What runs in the worker process.

_functions: list[Callable[..., Any]] = []  # loaded once, by _start
_startup_error: str | None = None


def _start(pickled: bytes) -> None:
    """Prepares the process: how it dies, where it computes, and what it imports before the first call."""
    global _startup_error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, even inside a C function
    _die_with_parent()
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")  # the accelerator is the trainer's
    try:
        for fn in pickle.loads(pickled):
            _functions.append(pickle.loads(fn))
            for module in fact(_functions[-1], "imports") or ():
                importlib.import_module(module)
    except Exception:  # told by the first call: the pool keeps silent about a worker that dies here
        _startup_error = traceback.format_exc()


def _die_with_parent() -> None:
    """Has the kernel kill this process when the trainer is gone, however it went.

    The pipe that tells of the parent's end sends a signal when it closes. Unlike a watching thread, that
    works while a C function holds the interpreter.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(os, "O_ASYNC"):
        return
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _ready() -> None:
    return None


def _run(index: int, completions: Sequence[str], examples: Sequence[Example], budget: float) -> list[Outcome]:
    if _startup_error is not None:
        raise RewardError(
            "a worker process could not load the reward functions; define them in an importable module, or"
            f" set scoring.workers=0\n{_startup_error}"
        )
    fn = _functions[index]
    if fact(fn, "batched"):
        return scoring.call_batched(fn, completions, examples)
    return scoring.call_each(fn, completions, examples, budget)
