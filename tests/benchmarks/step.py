"""Times the training step: alone, against the machine's limits, or in turn with other trainers.

    python -m tests.benchmarks.step --workload sum2
    python -m tests.benchmarks.step --workload sum2 --rounds 2 --peer NAME='COMMAND' --peer ...

Runs `train` itself, with every compiled program timed to its end. Prints a table and a line of JSON. A peer's
command must print such a line last, with `step_s`, the seconds of each of its steps, and perhaps `peak_gib`.

Figures are medians over the steps after the second. Shares are of rates measured in the same process after
training: float32 products of 2048 x 2048 matrices, and the reading of 512 MiB in a product with a vector.
With W weights in the layers' matrices, H in the head's, n tokens through the layers, m through the head:

    forward   2 (W n + H m) operations
    update    3 times as many
    decode    4 (W + H) bytes are read for one token of all samples

Only real tokens count, padding doesn't: prompt tokens once a group, and in the update only groups with a
non-zero advantage. Attention scores, the optimizer, and what the backward pass computes again are left out of
the operations, not out of the time. Decode is the rollout less a prefill timed alone; all samples are taken
to decode together. `idle_update_s` is an update in which no group counts. `overhead_ms` is the time from
update to update less compiled programs and reward. Peak memory is the trainer's process up to the last
update, without reward workers.

The model solves few problems of these workloads, and groups of equal rewards cost no update. `--every-group`
rewards odd lengths instead, so that nearly every group has a gradient: the most that a step can cost.
"""

import argparse
import functools
import itertools
import json
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrl_llm import config as cfg
from jaxrl_llm import train as loop
from jaxrl_llm.rollout import sampler
from jaxrl_llm.step import Rows
from tests.benchmarks.workloads import WORKLOADS, odd_length

WARM_UP = 2  # steps that no figure counts
COMPILED = "/jax/core/compile/backend_compile_duration"


class Call(NamedTuple):
    program: str
    end: float  # time.perf_counter
    seconds: float
    rows: Rows | None  # of an update
    peak_gib: float


class Timed:
    """A compiled program that notes each of its calls, from the start to the end on the device."""

    def __init__(self, name: str, program: Callable, calls: list[Call]):
        self._name, self._program, self._calls = name, program, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(self._program(*args, **kwargs))
        end = time.perf_counter()
        rows = next((a for a in args if isinstance(a, Rows)), None)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._calls.append(Call(self._name, end, end - began, rows, peak))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)  # lower, eval_shape


def measure(workload: str, config: cfg.Config) -> dict[str, Any]:
    """Trains and returns the figures."""
    calls: list[Call] = []
    compiled: list[tuple[float, float]] = []  # (when, seconds)

    def note(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            compiled.append((time.perf_counter(), seconds))

    jax.monitoring.register_event_duration_secs_listener(note)
    compile_programs = loop.compile_programs

    def timed(run):
        programs = compile_programs(run)
        names = ("generate", "prepare", "update")
        return programs._replace(**{name: Timed(name, getattr(programs, name), calls) for name in names})

    loop.compile_programs = timed
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loop.train(config, folder)
        logged = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in logged if row["step"] > 0]
    updates = [call for call in calls if call.program == "update"]
    reward = [row["seconds/reward"] for row in logged]
    overhead = []
    for (before, after), scored in zip(itertools.pairwise(updates), reward[1:]):
        inside = sum(call.seconds for call in calls if before.end < call.end <= after.end)
        overhead.append(after.end - before.end - inside - scored)
    first = next(call for call in calls if call.program == "generate")
    figures = {
        "workload": workload,
        "step_s": [row["seconds/step"] for row in logged],
        "rollout_s": steady([row["seconds/rollout"] for row in logged]),
        "reward_s": steady(reward),
        "update_s": steady([row["seconds/update"] for row in logged]),
        "tokens_per_second": steady([row["tokens_per_second"] for row in logged]),
        "overhead_ms": 1e3 * steady(overhead, WARM_UP - 1),
        "ready_s": first.end - first.seconds - began,
        "compilations": len(compiled),
        "compile_s": sum(seconds for _, seconds in compiled),
        "compilations_after_warm_up": sum(when > updates[WARM_UP - 1].end for when, _ in compiled),
        "peak_gib": updates[-1].peak_gib,
    }
    generate = [call.seconds for call in calls if call.program == "generate"]
    return figures | shares(config, updates[WARM_UP:], generate[WARM_UP:])


def shares(config: cfg.Config, updates: list[Call], generate: list[float]) -> dict[str, float]:
    """Returns the machine's rates and what prefill, decode and update reach of them."""
    policy, params, _, model = config.model.load()
    params = jax.device_put(params)
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    layers = model.layers * model.hidden * (attention + 3 * model.mlp)
    head = model.rows * model.hidden
    forward = lambda n, m: 2.0 * (layers * n + head * m)
    flops, bandwidth = limits()
    prefill = jax.jit(functools.partial(sampler.prefill, policy))
    found: dict[str, list[float]] = {}
    for update, seconds in zip(updates, generate):
        prompts, mask = update.rows.prompts, np.asarray(update.rows.arrays["mask"])
        lengths, prompt_lengths = mask.sum(-1), np.asarray(prompts.lengths)
        groups, rows = len(lengths), lengths.size
        prefill_s = best(prefill, params, prompts, repeats=2)
        decode_s = (seconds - prefill_s) / lengths.max()
        figures = {
            "prefill_s": prefill_s,
            "prefill_share": forward(prompt_lengths.sum(), 0) / prefill_s / flops,
            "decode_step_s": decode_s,
            "decode_share_of_bandwidth": 4 * (layers + head) / decode_s / bandwidth,
            "decode_share_of_matmul": forward(rows, rows) / decode_s / flops,
        }
        spread = np.asarray(update.rows.arrays["advantages"]).reshape(groups, -1)
        active = (spread != 0).any(1)
        figures["active_groups"] = active.sum()
        if active.any():
            fed = (prompt_lengths + (lengths - 1).clip(0).sum(1))[active].sum()
            work = 3 * forward(fed, lengths[active].sum())
            figures["update_share"] = work / update.seconds / flops
        else:
            figures["idle_update_s"] = update.seconds
        for name, value in figures.items():
            found.setdefault(name, []).append(float(value))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"matmul_gflops": flops / 1e9, "memory_gb_per_s": bandwidth / 1e9} | medians


def limits() -> tuple[float, float]:
    """Returns operations a second in large float32 products, and bytes a second read from memory."""
    square, large = jnp.ones((2048, 2048)), jnp.ones((2**15, 2**12))
    product = jax.jit(lambda a, b: a @ b.T)
    return 2 * 2048**3 / best(product, square, square), large.nbytes / best(product, large, large[:1])


def best(fn: Callable, *args: Any, repeats: int = 10) -> float:
    """Returns the least seconds of several calls after a first one."""
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - began)
    return min(times[1:])


def steady(values: list[float], warm_up: int = WARM_UP) -> float:
    """Returns the median after the warm-up, or the last value if nothing is after it."""
    return statistics.median(values[warm_up:] or values[-1:])


def compare(commands: dict[str, str], rounds: int) -> dict[str, Any]:
    """Runs the commands in turn, each in a process of its own; the first is ours."""
    results: dict[str, list[dict]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            results[name].append(run_command(name, command))
    out = {}
    for name, runs in results.items():
        kept = [value for run in runs for value in (run["step_s"][WARM_UP:] or run["step_s"][-1:])]
        peak = max(run.get("peak_gib", float("nan")) for run in runs)
        seconds = statistics.median(kept)
        ratio = (out["ours"]["step_s"] if out else seconds) / seconds
        out[name] = {"step_s": seconds, "peak_gib": peak, "ours_to_it": ratio, "runs": runs}
    return out


def run_command(name: str, command: str) -> dict[str, Any]:
    done = subprocess.run(command, shell=True, text=True, capture_output=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        raise RuntimeError(
            f"{name}: exit status {done.returncode}, no JSON at the end\n{done.stderr[-3000:]}"
        )
    return json.loads(last)


def show(title: str, rows: list[tuple], columns: list[str]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="sum2")
    parser.add_argument("--steps", type=int, help="default: 6; tiny: 40")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="run in turn with ours"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--every-group", action="store_true", help="a reward that gives every group a gradient"
    )
    args = parser.parse_args()
    steps = args.steps or (40 if args.workload == "tiny" else 6)
    if steps <= WARM_UP:
        parser.error(f"--steps is {steps}; the first {WARM_UP} steps are not counted, so give more")
    if args.peer:
        own = [
            sys.executable,
            "-m",
            "tests.benchmarks.step",
            "--workload",
            args.workload,
            "--steps",
            str(steps),
        ]
        own += ["--every-group"] * args.every_group
        peers = dict(peer.split("=", 1) for peer in args.peer)
        found = compare({"ours": shlex.join(own)} | peers, args.rounds)
        rows = [(name, *list(values.values())[:3]) for name, values in found.items()]
        show(args.workload, rows, ["trainer", "seconds a step", "peak GiB", "ours / it"])
        found = {"workload": args.workload, "every_group": args.every_group, **found}
    else:
        config = WORKLOADS[args.workload](steps)
        if args.every_group:
            config = config.replace(scoring=cfg.Scoring(rewards=(cfg.Reward(odd_length),)))
        found = measure(args.workload, config)
        rows = [(name, steady(value) if name == "step_s" else value) for name, value in found.items()]
        show(args.workload, rows[1:], ["figure", "value"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
