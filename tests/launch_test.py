import os
import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
ARGUMENTS = ["--config=configs/tiny.py", "--run-dir=runs/a b", "--set", "steps=2"]


def local(script, *args, **env):
    command = ["bash", script, *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def test_local_shows_the_command_that_it_would_run():
    shown = local(LAUNCH / "local.sh", "--dry-run", *ARGUMENTS).stdout.splitlines()[-1]
    assert shown.endswith(
        r"/.venv/bin/jaxrl-llm train --config=configs/tiny.py --run-dir=runs/a\ b --set steps=2"
    )


def test_local_sets_up_an_environment_that_is_missing(tmp_path):
    script = tmp_path / "launch" / "local.sh"
    script.parent.mkdir()
    shutil.copy(LAUNCH / "local.sh", script)
    done = local(script, "--dry-run", *ARGUMENTS, EXTRAS="tpu")
    set_up, start = done.stdout.splitlines()
    assert set_up == f"bash {tmp_path}/launch/setup.sh tpu"
    assert start.startswith(f"{tmp_path}/.venv/bin/jaxrl-llm train --config=configs/tiny.py")
    assert not (tmp_path / ".venv").exists()


def test_local_without_arguments_says_how_to_use_it():
    done = local(LAUNCH / "local.sh")
    assert done.returncode == 2 and "usage" in done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_script_is_clean(script):
    subprocess.run(["shellcheck", script], check=True)
