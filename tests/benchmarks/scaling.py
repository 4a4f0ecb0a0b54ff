"""Shows that the cost of a step grows as it should.

    python -m tests.benchmarks.scaling --workload long

Twice the samples of the same prompts must cost less than twice as much, since a prompt is computed once; here
no response stops before the limit. Twice the limit on new tokens must cost nothing when the responses are the
same; here stop ids end all of them within the smaller limit. Prints a table of seconds, and a line of JSON.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm import config as cfg
from jaxrl_llm import keys
from jaxrl_llm.rollout.distribution import Sampling, sampling
from jaxrl_llm.rollout.groups import Collected
from jaxrl_llm.run import open_run
from jaxrl_llm.train import compile_programs, learn
from jaxrl_llm.types import Batch, Rollout
from tests.benchmarks.step import show
from tests.benchmarks.workloads import WORKLOADS


class Setting:
    """A run that rolls out and learns from the same prompts again and again, without changing the model."""

    def __init__(self, stack: contextlib.ExitStack, config: cfg.Config, **rollout: int):
        config = config.replace(
            rollout=config.rollout.replace(**rollout),
            optimizer=config.optimizer.replace(learning_rate=0.0),
            scoring=config.scoring.replace(workers=0),
        )
        self.run = stack.enter_context(open_run(config))
        self.programs = compile_programs(self.run)
        self.state = self.programs.init(self.run.params)
        self.prompts = jax.device_put(next(self.run.stream).prompts)

    def roll_out(self, how: Sampling) -> Rollout:
        options, key = self.run.config.rollout, keys.key(0, keys.Stream.ROLLOUT)
        sizes = {"group_size": options.group_size, "max_new_tokens": options.max_new_tokens}
        return jax.device_get(self.programs.generate(self.state.params, self.prompts, key, how, **sizes))

    def seconds(self, how: Sampling) -> tuple[float, float]:
        """Returns the seconds of one rollout and of one update in which every group has a gradient."""
        began = time.perf_counter()
        rollout = self.roll_out(how)
        rolled_out = time.perf_counter() - began
        right = np.arange(rollout.lengths.size).reshape(rollout.lengths.shape) % 2 == 0
        batch = Batch(self.prompts, rollout, right.astype(np.float32), correct=right, scored=None)
        seconds = {"rollout": rolled_out, "reward": 0.0}
        collected = Collected(batch, metrics={}, samples=[], seconds=seconds, tokens=0, stream={})
        self.state, metrics = learn(self.run, self.programs, self.state, 0, collected)
        return rolled_out, metrics["seconds/update"]


def doubled(
    config: cfg.Config, name: str, of: Callable[[Setting], Sampling], repeats: int
) -> dict[str, list[float]]:
    """Times a setting, and another with the rollout's field `name` doubled, in turn.

    Returns:
      seconds of the rollout and of the update, each for the two settings and their ratio.
    """
    value = getattr(config.rollout, name)
    with contextlib.ExitStack() as stack:
        settings = [Setting(stack, config, **{name: n}) for n in (value, 2 * value)]
        how = of(settings[0])
        times = np.array([[s.seconds(how) for s in settings] for _ in range(1 + repeats)])
    (rollout, rollout2), (update, update2) = np.median(times[1:], axis=0).T.tolist()
    return {"rollout": [rollout, rollout2, rollout2 / rollout], "update": [update, update2, update2 / update]}


def never(setting: Setting) -> Sampling:
    """No token ends a response."""
    return sampling(())


def within_limit(setting: Setting) -> Sampling:
    """The model's stop ids, and the last token of every response that they do not end."""
    rollout = setting.roll_out(setting.run.how)
    return sampling([*setting.run.stop_ids, *rollout.tokens[rollout.truncated, -1].tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="long")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    config = WORKLOADS[args.workload](1)
    found = {
        "group_size": doubled(config, "group_size", never, args.repeats),
        "max_new_tokens": doubled(config, "max_new_tokens", within_limit, args.repeats),
    }
    rows = []
    for name, parts in found.items():
        value = getattr(config.rollout, name)
        rows += [(f"{name} {value} to {2 * value}", part, *seconds) for part, seconds in parts.items()]
    show(args.workload, rows, ["doubled", "part", "seconds", "seconds, doubled", "ratio"])
    print(json.dumps({"workload": args.workload, **found}))


if __name__ == "__main__":
    main()
