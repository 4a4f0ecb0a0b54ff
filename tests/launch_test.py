import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def test_local_shows_the_command_that_it_would_run():
    command = ["bash", LAUNCH / "local.sh", "--dry-run", "--config=configs/tiny.py", "--run-dir=runs/a b"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.endswith("/.venv/bin/jaxrl-llm train --config=configs/tiny.py --run-dir=runs/a\\ b\n")


def test_local_without_arguments_says_how_to_use_it():
    done = subprocess.run(["bash", LAUNCH / "local.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_clean(script):
    subprocess.run(["shellcheck", script], check=True)
