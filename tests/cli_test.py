"""The command line, and the table of methods."""

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from config_test import make_config

from jaxrl_llm import cli, methods
from jaxrl_llm import config as cfg

ROOT = Path(__file__).resolve().parents[1]
RECIPES = """
from config_test import make_config

def get_config():
    return make_config()
"""


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line sends the package's messages to standard error; other tests want them elsewhere."""
    logger = logging.getLogger("jaxrl_llm")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Stands in for training, evaluation and sampling; returns what they are called with."""
    got = {}

    def train(config, run_dir):
        got["train"] = (config, run_dir)

    def sample(config, run_dir=None, *, step, prompt, n, temperature):
        got["sample"] = (config, run_dir, step, temperature)
        return [f"{prompt} {i}" for i in range(n)]

    def evaluate_run(run_dir, *, step, config):
        got["evaluate"] = (config, run_dir, step)
        return {"eval/accuracy": 0.25}

    for name, functions in (("train", (train,)), ("inspection", (sample, evaluate_run))):
        module = types.ModuleType(f"jaxrl_llm.{name}")
        vars(module).update({f.__name__: f for f in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_run", raising=False)
    (tmp_path / "my_run.py").write_text(RECIPES)
    yield got
    sys.modules.pop("my_run", None)


def test_train_gets_the_config_with_the_overrides(calls):
    args = [
        "train",
        "--config=my_run.py",
        "--run-dir=runs/x",
        "--set",
        "steps=7",
        "--set=objective.loss.clip_high=0.3",
    ]
    assert cli.main(args) == 0
    config, run_dir = calls["train"]
    assert (config.steps, run_dir) == (7, Path("runs/x"))
    assert config.objective.loss.keywords == {"clip_low": 0.1, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config=my_rum.py"], "error: no config file 'my_rum.py'; did you mean 'my_run.py'?"),
        (["--config=my_run.py:get_confg"], "did you mean 'get_config'"),
        (["--config=my_run.py", "--set", "objective.advantage=group_zscroe"], "did you mean 'group_zscore'"),
        (["--config=my_run.py", "--set", "rollout.temperature=0"], "must be above 0 in training"),
        (["--config=my_run.py", "--set", "steps"], "cannot read 'steps'"),
    ],
)
def test_train_refuses_bad_input_in_one_message(calls, capsys, args, message):
    """Pitfall 28: a typo is refused at start with a suggestion, and with no traceback."""
    assert cli.main(["train", "--run-dir=r", *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert "train" not in calls
    with pytest.raises(cfg.ConfigError):
        cli.main(["train", "--run-dir=r", "--debug", *args])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), cfg.ConfigError("mended by you")])
def test_main_prints_errors_that_the_user_can_mend(calls, capsys, monkeypatch, error):
    def fail(config, run_dir):
        if isinstance(error, cfg.ConfigError):
            make_config().replace(no_such_field=1)
        raise error

    monkeypatch.setattr(sys.modules["jaxrl_llm.train"], "train", fail)
    assert cli.main(["train", "--config=my_run.py", "--run-dir=r"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_main_lets_bugs_show_their_traceback(calls, monkeypatch):
    def fail(config, run_dir):
        json.loads("{")

    monkeypatch.setattr(sys.modules["jaxrl_llm.train"], "train", fail)
    with pytest.raises(json.JSONDecodeError):
        cli.main(["train", "--config=my_run.py", "--run-dir=r"])


def test_main_ends_quietly_when_interrupted(calls, monkeypatch, capsys):
    def stop(config, run_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["jaxrl_llm.train"], "train", stop)
    assert cli.main(["train", "--config=my_run.py", "--run-dir=r"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_evaluate_reads_the_saved_config(calls, capsys, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(cfg.to_json(make_config(steps=9)))
    assert cli.main(["evaluate", "--run-dir=r", "--step=4", "--set", "evaluation.batch=2"]) == 0
    config, run_dir, step = calls["evaluate"]
    assert (config.steps, config.evaluation.batch, run_dir, step) == (9, 2, Path("r"), 4)
    assert capsys.readouterr().out.split() == ["eval/accuracy", "0.25"]
    assert cli.main(["evaluate", "--run-dir=nowhere"]) == 2
    assert "nowhere is no run folder" in capsys.readouterr().err


def test_sample_prints_every_response(calls, capsys):
    assert cli.main(["sample", "--config=my_run.py", "--prompt=hi", "--n=2", "--temperature=0.5"]) == 0
    assert capsys.readouterr().out == "--- 1 ---\nhi 0\n--- 2 ---\nhi 1\n"
    assert calls["sample"][1:] == (None, None, 0.5)
    assert cli.main(["sample", "--config=my_run.py", "--prompt=hi", "--n=0"]) == 2
    assert cli.main(["sample", "--config=my_run.py", "--prompt=hi", "--step=3"]) == 2


def test_report_prints_the_page_it_wrote(calls, capsys, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert cli.main(["report", "r", "--out=page.html"]) == 0
    assert capsys.readouterr().out == "page.html\n"
    assert cli.main(["report", "no_run"]) == 2


@pytest.mark.parametrize("args", [[], ["trian"], ["train"], ["train", "--run=x"], ["sample", "--prompt=x"]])
def test_main_shows_usage_for_a_wrong_command(args, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    assert "usage: jaxrl-llm" in capsys.readouterr().err


def test_help_is_quick():
    """No heavy library is imported before a command needs it."""
    script = (
        "import sys; from jaxrl_llm.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: print(sorted({'jax', 'flax', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "--config" in out
    assert out.splitlines()[-1] == "[]"


# methods


def test_all_methods_reads_the_menus():
    found = {m.name: m for m in methods.all_methods()}
    clip = found["ppo_clip"]
    assert (clip.stage, clip.scope) == ("loss", "sequence")
    assert clip.arrays == ("logp", "old_logp", "advantages", "mask")
    assert clip.hyperparameters == "clip_low=0.2, clip_high=0.2"
    assert "1707.06347" in clip.source
    assert found["group_zscore"].stage == "advantage"
    assert found["token_mean"].stage == "aggregate"
    assert found["kl_k3"].stage == "regularize"


RECIPE_FILE = '''
from functools import partial
from config_test import make_config
from jaxrl_llm.losses import kl_k3, ppo_clip

def clipped():
    """Clip the ratio | both ways.

    Paper: Proximal Policy Optimization (arXiv:1707.06347).
    """
    return make_config()

def needs_a_base(base):
    """Not a recipe."""
'''


def test_all_recipes_lists_what_they_ask_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "configs" / "recipes"
    folder.mkdir(parents=True)
    (folder / "clip_family_of_the_test.py").write_text(RECIPE_FILE)
    monkeypatch.setattr(methods, "import_file", lambda file, root: methods_import(file))
    [recipe] = methods.all_recipes(tmp_path)
    assert recipe.spec == "configs/recipes/clip_family_of_the_test.py:clipped"
    assert recipe.functions == ("group_zscore", "ppo_clip", "kl_k3")
    assert recipe.claim == "Clip the ratio | both ways."
    assert {"rewards", "logp", "old_logp", "ref_logp", "mask"} <= set(recipe.arrays)
    assert "advantages" not in recipe.arrays
    monkeypatch.setattr(methods, "all_recipes", lambda: [recipe])
    text = methods.to_markdown()
    assert r"| Clip the ratio \| both ways. |" in text
    assert "[arXiv:1707.06347](https://arxiv.org/abs/1707.06347)" in text
    columns = text.splitlines()[0].count("|")
    assert all(line.replace(r"\|", "").count("|") == columns for line in text.split("\n\n")[0].splitlines())


def methods_import(file):
    """Imports a recipe file by its stem: `configs` is a package of this repository already."""
    from jaxrl_llm.config.load import import_file

    return import_file(file, file.parent)


def test_methods_prints_tables(capsys):
    assert cli.main(["methods"]) == 0
    assert "ppo_clip" in capsys.readouterr().out
    assert cli.main(["methods", "--markdown"]) == 0
    assert "| `ppo_clip` | loss | sequence | `logp`, `old_logp`," in capsys.readouterr().out


def test_methods_fills_a_readme(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- methods -->\nold\n<!-- /methods -->\nafter\n")
    assert cli.main(["methods", f"--readme={readme}"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- methods -->") and text.endswith("<!-- /methods -->\nafter\n")
    assert "ppo_clip" in text and "old\n" not in text
    assert methods.with_table(text) == text
    readme.write_text("no markers")
    assert cli.main(["methods", f"--readme={readme}"]) == 2
    assert "put <!-- methods --> and <!-- /methods -->" in capsys.readouterr().err


def test_readme_lists_every_method():
    text = (ROOT / "README.md").read_text()
    assert methods.with_table(text) == text, "run: jaxrl-llm methods --readme README.md"


def test_sample_reads_its_programs_from_the_users_cache(tmp_path):
    """The second start compiles nothing: it adds no file to the cache."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {
        "JAX_PLATFORMS": "cpu"
    }
    env |= {"XDG_CACHE_HOME": str(tmp_path)}
    command = ["sample", "--config=configs/tiny.py", "--prompt=Say a", "--n=1", "--temperature=0"]
    outputs, entries = [], []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-m", "jaxrl_llm.cli", *command],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(run.stdout)
        entries.append({path.name for path in tmp_path.rglob("jit_*-cache")})
    assert outputs[0] == outputs[1]
    assert entries[0] == entries[1] and any(name.startswith("jit_generate") for name in entries[0])
