"""Metrics from (sum, weight) pairs to the console, JSON lines and TensorBoard.

A metric stays a sum and a weight until it is printed, so its value does not depend on how the step was split
into microbatches, updates or devices.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm import config as cfg

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

Metrics = Mapping[str, tuple[Any, Any]]  # name -> (sum, weight), scalars
Row = Mapping[str, float | int | str | None]  # name -> value, as printed

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
CONFIG_FILE, VERSIONS_FILE = "config.json", "run.json"


def merge(parts: Iterable[Metrics]) -> dict[str, tuple[Any, Any]]:
    """Adds sums and weights by name; a name that ends in `_max` takes the larger of each instead.

    Args:
      parts: metrics of parts of a step; a name may be missing in some.
    """
    out: dict[str, tuple[Any, Any]] = {}
    for part in parts:
        for name, pair in part.items():
            join = np.maximum if name.endswith("_max") else np.add
            out[name] = tuple(map(join, out[name], pair)) if name in out else tuple(pair)
    return out


def finalize(metrics: Metrics) -> dict[str, float]:
    """Divides sums by weights; a metric without weight is NaN.

    Args:
      metrics: `(sum, weight)` by name, on the host or on devices.
    """
    on_host = jax.device_get(dict(metrics))
    return {n: float(total) / float(weight) if weight else math.nan for n, (total, weight) in on_host.items()}


class MetricsWriter:
    """Writes a run's metrics and sample texts.

    `metrics.jsonl` and `samples.jsonl` hold one JSON object a line and are on the disk when `write` returns,
    so a killed process loses no step that it has reported. `tensorboard/` holds event files.
    """

    def __init__(self, run_dir: str | Path, *, start: int = 0):
        """Opens the run folder, and drops what an earlier process wrote after its last checkpoint.

        Args:
          run_dir: made if missing.
          start: completed steps at which this process goes on; 0 begins anew.
        """
        self._folder = Path(run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._events = None
        self.rewind(start if start else -1)

    def rewind(self, step: int) -> None:
        """Drops every line of a step above `step`, and a half-written last line.

        Args:
          step: the step to go back to; -1 drops everything.
        """
        for name in (METRICS_FILE, SAMPLES_FILE):
            _keep_lines(self._folder / name, step)
        self.close()
        from tensorboardX import SummaryWriter  # takes a second to import

        folder = self._folder / "tensorboard"
        # TensorBoard hides the events from this step on that older files hold.
        purge = step + 1 if folder.exists() else None
        suffix = f".{os.getpid()}.{time.monotonic_ns()}"
        self._events = SummaryWriter(str(folder), purge_step=purge, filename_suffix=suffix)

    def write(self, step: int, values: Row, samples: Iterable[Mapping[str, Any]] = ()) -> None:
        """Writes one line of metrics, and a line for each sample.

        Args:
          step: completed training steps.
          values: numbers and strings by name; a number that is not finite is written as null.
          samples: prompt, completion, reward, terms (reward by name) and gold of some responses.
        """
        _append(self._folder / SAMPLES_FILE, [{"step": step, **sample} for sample in samples])
        _append(self._folder / METRICS_FILE, [{"step": step, **values}])
        for name, value in values.items():
            value = _plain(value)
            if isinstance(value, (int, float)):
                self._events.add_scalar(re.sub(r"[^-/\w.]", "_", name), value, step)
        self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """Returns JSON's form of a value: Python scalars, null for what is not finite."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        value = np.asarray(value).tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _append(path: Path, rows: list[Mapping[str, Any]]) -> None:
    """Appends JSON lines and waits until they are on the disk; on failure the file is as before."""
    if not rows:
        return
    text = "".join(json.dumps(_plain(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its JSON escape
    with open(path, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def _keep_lines(path: Path, step: int) -> None:
    """Rewrites a file of JSON lines without the steps above `step`, atomically."""
    if not path.exists():
        return
    kept, unreadable, total = [], 0, 0
    with open(path, "rb") as file:
        for line in file:
            total += 1
            if not line.endswith(b"\n"):
                continue  # the process ended while it wrote this line
            try:
                keep = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                unreadable += 1
                continue
            if keep:
                kept.append(line)
    if unreadable:
        log.warning("%s: %d unreadable lines are dropped", path, unreadable)
    if len(kept) < total:
        write_atomically(path, b"".join(kept))


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file by a rename, so that a reader finds the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Progress:
    """Shows step, reward, accuracy, rate and time left: a live line on a terminal, plain lines elsewhere."""

    def __init__(
        self,
        config: cfg.Config,
        start: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = 2.0,
    ):
        """
        Args:
          config: gives the name and the number of steps.
          start: steps completed before this process.
          console: where to show it; None: standard output.
          clock: seconds.
          interval: least seconds between two plain lines; evaluations and the last step are always shown.
        """
        import rich.console
        from rich import progress

        self._steps, self._clock, self._interval = config.steps, clock, interval
        self._console = console or rich.console.Console(highlight=False)
        self._began = self._printed = clock()
        self._rate = 0.0
        self._held_out: float | None = None
        self._first = start + 1
        self._bar = None
        if self._console.is_terminal:
            columns = ("step {task.completed}/{task.total}", progress.BarColumn(24), "{task.fields[shown]}")
            self._bar = progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task(
                config.name, total=config.steps, completed=start, shown="compiling"
            )

    def update(self, step: int, values: Row) -> None:
        """Shows a finished step, or the evaluation before the first one.

        Args:
          step: completed steps.
          values: its metrics, as printed.
        """
        now = self._clock()
        took, self._began = now - self._began, now
        # The first two steps compile; from the third on the rate is a running mean.
        self._rate = 0.8 * self._rate + 0.2 * took if step > self._first + 2 else took
        evaluated = values.get("eval/accuracy") is not None
        self._held_out = values["eval/accuracy"] if evaluated else self._held_out
        if step < self._first:
            if evaluated:
                self.note(f"step {step}: held-out accuracy {self._held_out:.3f}")
            return
        line = self._line(step, values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=line)
            if evaluated:
                self.note(f"step {step}: held-out accuracy {self._held_out:.3f}")
        elif evaluated or step in (self._first, self._steps) or now - self._printed >= self._interval:
            self._printed = now
            self.note(f"step {step:>{len(str(self._steps))}}/{self._steps}  {line}")

    def _line(self, step: int, values: Row) -> str:
        shown = [("reward", values.get("reward")), ("accuracy", values.get("accuracy"))]
        parts = [
            f"{name} {value:.3f}"
            for name, value in [*shown, ("held-out", self._held_out)]
            if value is not None
        ]
        parts += [f"{name} {values[name]:g}" for name in ("skipped", "unscored") if values.get(name)]
        left = datetime.timedelta(seconds=round(self._rate * (self._steps - step)))
        return "  ".join([*parts, f"{self._rate:.2f} s/step", f"ETA {left}"])

    def note(self, text: str) -> None:
        """Prints a line of text, above the live line if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def log_versions(run_dir: str | Path, config: cfg.Config) -> None:
    """Writes `config.json`, and adds this start of the run to `run.json`.

    A start is: when, with which versions, commit, command line and devices. A resumed run has several.
    """
    path = Path(run_dir) / VERSIONS_FILE
    starts = json.loads(path.read_text())["starts"] if path.exists() else []
    packages = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    devices = jax.devices()
    starts.append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "name": config.name,
            "command": sys.argv,
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "git": _git_commit(Path.cwd()) or _git_commit(Path(__file__).parent),
            "devices": {
                kind: sum(d.device_kind == kind for d in devices) for kind in {d.device_kind for d in devices}
            },
            "processes": jax.process_count(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path.with_name(CONFIG_FILE), cfg.to_json(config).encode())
    write_atomically(path, json.dumps({"starts": starts}, indent=2).encode())


def _git_commit(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository around `folder`; None if there is none, or no git."""

    def git(*command: str) -> str | None:
        try:
            out = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return commit and {"commit": commit, "dirty": git("status", "--porcelain") != ""}
