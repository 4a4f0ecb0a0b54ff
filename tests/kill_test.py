"""Runs killed at random moments end as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "jaxrl_llm.cli", "train", "--config=configs/tiny.py"]
SETTINGS = ["steps=16", "checkpoint.every=2", "checkpoint.keep_last=2", "evaluation.every=4", "mesh.data=1"]
IGNORED = ("seconds/", "tokens_per_second")


def start(run_dir, env):
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [*COMMAND, f"--run-dir={run_dir}", *settings]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def history(run_dir, name):
    rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(IGNORED)} for row in rows]


@pytest.fixture
def env(tmp_path):
    out = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    return {k: v for k, v in out.items() if k != "XLA_FLAGS"}


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_is_bit_equal(tmp_path, env):
    """kill -9, SIGTERM and SIGINT anywhere: in start-up, rollout, update, evaluation or a save."""
    assert start(tmp_path / "whole", env).wait() == 0
    began = time.monotonic()
    assert start(tmp_path / "again", env).wait() == 0
    duration = time.monotonic() - began
    rng, kills = random.Random(0), 0
    while kills < 10:
        process = start(tmp_path / "killed", env)
        try:
            process.wait(timeout=rng.uniform(0.3, 1.0) * duration)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL if kills % 3 else rng.choice([signal.SIGTERM, signal.SIGINT]))
            process.wait()
            kills += 1
        if process.returncode == 0 and kills < 10:
            # The run got to its end between two kills: take its last checkpoints away, and go on.
            saved = sorted((tmp_path / "killed" / "checkpoints").iterdir(), key=lambda p: int(p.name))
            for folder in saved[1:]:
                shutil.rmtree(folder)
    last = start(tmp_path / "killed", env)
    assert last.wait() == 0, last.stderr.read().decode()
    for name in ("metrics.jsonl", "samples.jsonl"):
        want = history(tmp_path / "whole", name)
        got = history(tmp_path / "killed", name)
        assert [row["step"] for row in got] == [row["step"] for row in want]
        # A signal saves at a step of its own, which then carries a digest too.
        digests = [[row.pop("params_digest", None) for row in rows] for rows in (got, want)]
        assert got == want
        assert all(a == b for a, b in zip(*digests) if b is not None)
