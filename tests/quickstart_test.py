"""The main job, as a user starts it: minutes a seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.models.convert import DEFAULT_GGUF

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / DEFAULT_GGUF).is_file(), reason="run `bash launch/fetch_model.sh` first")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_raises_held_out_accuracy_by_half(seed, tmp_path):
    """SmolLM2-135M-Instruct on two-digit sums, 30 steps: at least 50 points on 256 sums never trained on."""
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", "--config=configs/quickstart.py"]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run(
        [*command, f"--run-dir={tmp_path}", "--set", f"seed={seed}"], cwd=ROOT, env=env, check=True
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 30
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.5
