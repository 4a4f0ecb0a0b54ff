"""Metrics, the files of a run, and the progress display."""

import io
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_test import make_config
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from jaxrl_llm import config as cfg
from jaxrl_llm.metrics import MetricsWriter, Progress, finalize, log_versions, merge


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def events(folder):
    """Reads TensorBoard's record files: length, its checksum, the event, its checksum."""
    out = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            assert masked_crc32c(data[12 : 12 + size]) == int.from_bytes(
                data[12 + size : 16 + size], "little"
            )
            out.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return out


# (sum, weight)


def test_merge_does_not_depend_on_the_split():
    """Pitfall 2: 10 tokens of loss 1 and 6 tokens of loss 3 have the mean 1.75, never 2.0."""
    whole = finalize({"loss": (28.0, 16.0)})
    parts = finalize(merge([{"loss": (10.0, 10.0)}, {"loss": (18.0, 6.0)}]))
    assert whole == parts == {"loss": 1.75}


def test_merge_keeps_names_that_one_part_lacks_and_takes_the_larger_maximum():
    merged = merge([{"a": (1.0, 1.0), "drift_max": (3.0, 1.0)}, {"b": (4.0, 2.0), "drift_max": (0.0, 0.0)}])
    assert finalize(merged) == {"a": 1.0, "drift_max": 3.0, "b": 2.0}


def test_finalize_reads_device_arrays_and_marks_a_missing_mean():
    out = finalize({"x": (jnp.float32(3.0), jnp.int32(2)), "none": (0.0, 0.0)})
    assert out["x"] == 1.5
    assert math.isnan(out["none"])


# files


def test_write_appends_one_line_a_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"eval/accuracy": 0.25, "params_digest": "ab12"})
        writer.write(1, {"reward": np.float32(0.5), "loss": math.nan, "norm": jnp.float32(math.inf), "n": 3})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/accuracy": 0.25, "params_digest": "ab12"},
        {"step": 1, "reward": 0.5, "loss": None, "norm": None, "n": 3},
    ]


def test_write_keeps_any_text_in_samples(tmp_path):
    sample = {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "completion": "vier \u2028 \n <script> \ud800 😀",
        "reward": None,
        "terms": {"exact": math.nan, "format": 1.0},
        "gold": "4",
    }
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {}, [sample])
    got = lines(tmp_path / "samples.jsonl")
    assert got == [{"step": 1, **sample, "terms": {"exact": None, "format": 1.0}}]


def test_write_sends_finite_numbers_to_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"reward": 0.5, "eval/pass@4": 0.75, "loss": math.nan, "params_digest": "ab12"})
    scalars = {
        (e.step, v.tag): v.simple_value for e in events(tmp_path / "tensorboard") for v in e.summary.value
    }
    assert scalars == {(3, "reward"): 0.5, (3, "eval/pass_4"): 0.75}


def test_write_survives_kill_9(tmp_path):
    script = (
        "import os, sys; from jaxrl_llm.metrics import MetricsWriter; w = MetricsWriter(sys.argv[1]);"
        "[w.write(i, {'reward': i / 2}, [{'completion': 'x'}]) for i in range(3)]; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert done.returncode == -9
    assert [row["reward"] for row in lines(tmp_path / "metrics.jsonl")] == [0.0, 0.5, 1.0]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [0, 1, 2]


def test_write_leaves_the_file_whole_when_the_disk_is_full(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5})
        before = (tmp_path / "metrics.jsonl").read_bytes()

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(2, {"reward": 0.75})
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_rewind_drops_what_came_after_the_checkpoint(tmp_path):
    """Pitfall 11: a resumed run's log reads as if nothing had happened."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"reward": float(step)}, [{"completion": "a\nb"}])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "rew')
    with MetricsWriter(tmp_path, start=3) as writer:
        assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
        writer.write(4, {"reward": 40.0}, [{"completion": "c"}])
    assert [row["reward"] for row in lines(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 2.0, 3.0, 40.0]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [0, 1, 2, 3, 4]
    starts = [e.step for e in events(tmp_path / "tensorboard") if e.session_log.status == SessionLog.START]
    assert starts == [4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl", "tensorboard"]


def test_rewind_to_nothing_begins_anew(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 1.0}, [{"completion": "x"}])
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 2.0})
    assert [row["reward"] for row in lines(tmp_path / "metrics.jsonl")] == [2.0]
    assert lines(tmp_path / "samples.jsonl") == []


def test_rewind_reports_unreadable_lines(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\x00\x00\n[3]\n{"step": 2}\n')
    with MetricsWriter(tmp_path, start=2):
        assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "2 unreadable lines are dropped" in caplog.text


# progress


class Clock:
    """Counts the seconds that a test gives it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def shown(updates, *, steps, start=0, seconds=1.0, **options):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=100, highlight=False, **options)
    config = make_config(steps=steps)
    with Progress(config, start, console=console, clock=clock) as progress:
        for step, values in updates:
            clock.now += seconds
            progress.update(step, values)
    return out.getvalue()


def test_progress_prints_lines_where_there_is_no_terminal():
    updates = [(step, {"reward": step / 10, "accuracy": 0.25, "unscored": 2}) for step in range(1, 11)]
    text = shown(updates, steps=10, seconds=3.0, force_terminal=False)
    assert text.splitlines()[3] == (
        "step  4/10  reward 0.400  accuracy 0.250  unscored 2  3.00 s/step  ETA 0:00:18"
    )
    assert len(text.splitlines()) == 10
    assert "\x1b" not in text


def test_progress_thins_quick_steps_but_keeps_first_last_and_evaluations():
    updates = [
        (step, {"reward": 0.5} | ({"eval/accuracy": 0.75} if step == 25 else {})) for step in range(1, 51)
    ]
    got = [
        line.split()[1] for line in shown(updates, steps=50, seconds=0.01, force_terminal=False).splitlines()
    ]
    assert got == ["1/50", "25/50", "50/50"]


def test_progress_estimates_without_the_compiling_steps():
    updates = [(step, {}) for step in range(6, 10)]
    out, clock = io.StringIO(), Clock()
    with Progress(
        make_config(steps=10), 5, console=Console(file=out, width=100, force_terminal=False), clock=clock
    ) as progress:
        for (step, values), seconds in zip(updates, [60.0, 30.0, 2.0, 2.0]):
            clock.now += seconds
            progress.update(step, values)
    assert out.getvalue().splitlines()[-1] == "step  9/10  2.00 s/step  ETA 0:00:02"


def test_progress_shows_a_live_line_on_a_terminal():
    text = shown(
        [(1, {"reward": 0.5, "eval/accuracy": 0.25}), (2, {"reward": 0.75})], steps=4, force_terminal=True
    )
    assert "step 2/4" in text
    assert "reward 0.750  held-out 0.250" in text
    assert "step 1: held-out accuracy 0.250\n" in text.replace("\x1b[2K", "").replace("\r", "")


# versions


def test_log_versions_keeps_every_start(tmp_path):
    config = make_config()
    log_versions(tmp_path / "run", config)
    log_versions(tmp_path / "run", config)
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert len(starts) == 2
    assert starts[0]["versions"]["jax"] == jax.__version__
    assert starts[0]["devices"] == {"cpu": jax.device_count()}
    assert set(starts[0]["versions"]) >= {"jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"}
    assert cfg.differences((tmp_path / "run" / "config.json").read_text(), config) == []


def test_log_versions_names_the_commit(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.chdir(tmp_path)
    for name, dirty in (("one", False), ("two", True)):
        folder = tmp_path.parent / f"{tmp_path.name}-{name}"
        log_versions(folder, make_config())
        assert json.loads((folder / "run.json").read_text())["starts"][0]["git"] == {
            "commit": commit,
            "dirty": dirty,
        }
        (tmp_path / "new.py").write_text("")
