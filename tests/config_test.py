"""Load, override, check, save and compare configs."""

import dataclasses
import functools
import importlib
import math
import multiprocessing
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest

from jaxrl_llm import config as cfg
from jaxrl_llm.advantages import group_zscore, leave_one_out
from jaxrl_llm.losses import kl_k3, ppo_clip, token_mean
from jaxrl_llm.signature import scope


def load_model(path, *, dtype: str = "float32"):
    return path, dtype


def undeclared(rewards, *, top=2):
    return list(range(top))


def load_from(folder: Path):
    return folder


def examples(count: int = 4, names=("a", "b")):
    return [count, names]


def exact(completion, example):
    return float(completion == example.answer)


def short(completion, example, *, limit=20):
    return float(len(completion) < limit)


@scope("group", min_group=2)
def centered(rewards, *, power: float = 1.0):
    return rewards - rewards.mean()


def make_config(**changes) -> cfg.Config:
    return cfg.Config(
        model=cfg.Model(load=partial(load_model, path="a.gguf")),
        data=cfg.Data(train=examples),
        scoring=cfg.Scoring(rewards=(cfg.Reward(exact), cfg.Reward(short, weight=0.5))),
        objective=cfg.Objective(
            advantage=group_zscore, loss=partial(ppo_clip, clip_low=0.1), regularize=((0.01, kl_k3),)
        ),
    ).replace(**changes)


def set_(*items: str, **changes) -> cfg.Config:
    return cfg.override(make_config(**changes), items)


def checked(*items: str, devices=None, **changes) -> str:
    """Returns the message with which `check` refuses a config."""
    with pytest.raises(cfg.ConfigError) as error:
        cfg.check(set_(*items, **changes), devices=devices)
    return str(error.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None) or vars(sys.modules[name])):
            del sys.modules[name]
    importlib.invalidate_caches()


RECIPE_FILE = """
from functools import partial
from config_test import make_config
from jaxrl_llm.losses import ppo_clip

def soft_gate(logp, old_logp, advantages, mask, *, sharpness=4.0):
    return -advantages * mask * sharpness

def get_config():
    base = make_config()
    return base.replace(objective=base.objective.replace(loss=partial(soft_gate, sharpness=8.0)))

def long_run():
    return get_config().replace(steps=1000)

def no_config():
    return 3
"""


def write_recipe(path: Path, text: str = RECIPE_FILE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# replace


def test_replace_returns_a_copy():
    config = make_config()
    changed = config.replace(steps=7)
    assert (config.steps, changed.steps) == (100, 7)
    assert changed.objective is config.objective


@pytest.mark.parametrize(
    "make", [lambda: make_config().rollout.replace(group_sise=4), lambda: cfg.Rollout(group_sise=4)]
)
def test_replace_refuses_an_unknown_field(make):
    with pytest.raises(cfg.ConfigError, match="Rollout has no field 'group_sise'; did you mean 'group_size'"):
        make()


def test_config_survives_pickle():
    config = make_config()
    again = pickle.loads(pickle.dumps(config))
    assert cfg.to_json(again) == cfg.to_json(config)


# load


def test_load_config_imports_by_dotted_name_below_the_current_folder(folder):
    write_recipe(folder / "configs" / "recipes" / "gated.py")
    config = cfg.load_config("configs/recipes/gated.py")
    assert config.objective.loss.func.__module__ == "configs.recipes.gated"
    assert cfg.load_config("configs/recipes/gated.py:long_run").steps == 1000
    assert pickle.loads(pickle.dumps(config)).objective.loss.keywords == {"sharpness": 8.0}


def test_load_config_imports_by_stem_elsewhere(folder, tmp_path_factory):
    file = write_recipe(tmp_path_factory.mktemp("elsewhere") / "gated_elsewhere.py")
    config = cfg.load_config(f"{file}:get_config")
    assert config.objective.loss.func.__module__ == "gated_elsewhere"
    del sys.modules["gated_elsewhere"]


def call_first(value):
    return value.objective.loss.keywords["sharpness"]


def test_load_config_gives_functions_that_worker_processes_find(folder):
    write_recipe(folder / "my_fork" / "run.py")
    config = cfg.load_config("my_fork/run.py")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(call_first, (config,)) == 8.0


def test_load_config_refuses_a_name_that_is_taken(folder):
    write_recipe(folder / "json.py")
    with pytest.raises(cfg.ConfigError, match=r"imported as 'json', but that is .*json/__init__.py; rename"):
        cfg.load_config("json.py")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "configs/quickstat.py",
            r"no config file 'configs/quickstat.py'; did you mean 'configs/quickstart.py'",
        ),
        ("nowhere/run.py", "no config file 'nowhere/run.py'; nowhere holds no Python file"),
        ("configs/quickstart.py:long_rum", "has no function 'long_rum'; did you mean 'long_run'"),
        (
            "configs/quickstart.py:no_config",
            "no_config of configs/quickstart.py returned a int; a recipe returns",
        ),
        ("configs/notes.txt", "'configs/notes.txt' is not a Python file"),
    ],
)
def test_load_config_names_what_is_missing(folder, spec, message):
    write_recipe(folder / "configs" / "quickstart.py")
    (folder / "configs" / "notes.txt").write_text("")
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.load_config(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from jaxrl_llm.advantages import group_zscroe",
            r"line 1: ImportError: .*; did you mean 'group_zscore'",
        ),
        (
            "x = 1\n\ndef get_config():\n    return make_confg()\nmake_config = 1",
            "line 4: NameError.*'make_config'",
        ),
        (
            "import jaxrl_llm.config as c\nr = c.Rollout(temprature=1)",
            "no field 'temprature'; did you mean 'temp",
        ),
        ("def get_config(:\n", "line 1: SyntaxError"),
        ("\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_load_config_places_an_error_of_the_file(folder, text, message):
    """Pitfall 28: a misspelt estimator is refused at start, with a suggestion."""
    write_recipe(folder / "wrong.py", text)
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.load_config("wrong.py")


# override


def test_override_sets_values_of_every_type():
    config = set_(
        "steps=7",
        "optimizer.learning_rate=1",
        "data.shuffle=false",
        "data.on_long_prompt=truncate",
        "data.prompt_lengths=16,32",
        "data.system=Answer with = signs.",
        "rollout.stop_ids=[2, 7]",
        "optimizer.clip_norm=none",
        "name=007",
    )
    assert config.steps == 7
    assert type(config.optimizer.learning_rate) is float
    assert config.data.shuffle is False
    assert config.data.on_long_prompt == "truncate"
    assert config.data.prompt_lengths == (16, 32)
    assert config.data.system == "Answer with = signs."
    assert config.rollout.stop_ids == (2, 7)
    assert config.optimizer.clip_norm is None
    assert config.name == "007"
    cfg.check(config)


def test_override_reaches_into_tuples():
    config = set_(
        "scoring.rewards.0.weight=2", "objective.regularize.0.0=0.5", "scoring.rewards.1.fn.limit=9"
    )
    assert config.scoring.rewards[0].weight == 2.0
    assert config.scoring.rewards[1].fn.keywords == {"limit": 9}
    assert config.objective.regularize == ((0.5, kl_k3),)


def test_override_binds_hyperparameters():
    config = set_("objective.loss.clip_high=0.28", "objective.loss.clip_low=0.15", "model.load.path=b.gguf")
    assert config.objective.loss.func is ppo_clip
    assert config.objective.loss.keywords == {"clip_high": 0.28, "clip_low": 0.15}
    assert config.model.load() == ("b.gguf", "float32")
    assert set_("model.load=config_test:load_model", "model.load.path=c").model.load() == ("c", "float32")
    assert set_("model.load=config_test:load_from", "model.load.folder=1").model.load() == Path("1")
    config = set_("objective.advantage=config_test:undeclared", "objective.advantage.top=3")
    assert config.objective.advantage(0) == [0, 1, 2]  # a whole number stays one
    assert set_("data.train.count=9").data.train()[0] == 9


def test_override_takes_functions_by_name():
    config = set_(
        "objective.loss=config_test:short",
        "objective.advantage=leave_one_out",
        "objective.aggregate=token_mean",
        "objective.select=truncated_is_weights,overlong_filter",
    )
    assert config.objective.loss is short
    assert config.objective.advantage is leave_one_out
    assert config.objective.aggregate is token_mean
    assert [f.__name__ for f in config.objective.select] == ["truncated_is_weights", "overlong_filter"]


def test_override_leaves_the_given_config_alone():
    config = make_config()
    before = cfg.to_json(config)
    cfg.override(config, ["objective.loss.clip_low=0.3", "steps=1"])
    assert cfg.to_json(config) == before


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("objective.advantage=group_zscroe", "no stock function 'group_zscroe'; did you mean 'group_zscore'"),
        ("objective.loss=jaxrl_llm.losses:ppo_clp", "has no 'ppo_clp'; did you mean 'ppo_clip'"),
        ("objective.loss=jaxrl_llm.loses:ppo_clip", "no module 'jaxrl_llm.loses'; did you mean 'losses'"),
        ("objective.loss=my_fork:gate", "no module 'my_fork'; run from the folder that holds it"),
        ("objectve.loss=x", "the config has no field 'objectve'; did you mean 'objective'"),
        ("rollout.temprature=1", "rollout has no field 'temprature'; did you mean 'temperature'"),
        (
            "objective.loss.clip_hihg=1",
            "is ppo_clip, which has no hyperparameter 'clip_hihg'; did you mean 'clip_high'",
        ),
        ("objective.loss.logp=1", "has no hyperparameter 'logp'"),
        ("objective.loss.clip_high=big", "objective.loss.clip_high wants a number, not the string 'big'"),
        ("steps=many", "steps wants an int, not the string 'many'"),
        ("steps=1.5", r"steps wants an int, not 1.5 \(float\)"),
        ("steps=true", "steps wants an int"),
        ("data.shuffle=1", r"data.shuffle wants true or false, not 1 \(int\)"),
        ("data.on_long_prompt=drp", "data.on_long_prompt is 'drp'; did you mean 'drop'"),
        ("data.prompt_lengths=64", r"wants a tuple, each an int, not 64 \(int\)"),
        ("scoring.rewards.2.weight=1", "scoring.rewards is a tuple of 2 and takes an index from 0 to 1"),
        ("scoring.rewards=exact", "scoring.rewards wants a tuple, each a Reward"),
        ("rollout=3", "rollout is a section; set one of its fields: group_size, "),
        ("optimizer.make.b1=0.5", "optimizer.make is not set; set it first"),
        ("steps.x=1", r"steps is 100 \(int\) and has no parts"),
        ("steps", "cannot read 'steps': write path=value"),
    ],
)
def test_override_refuses(item, message):
    """Pitfall 28: a typo in a name is refused at start, with a suggestion."""
    with pytest.raises(cfg.ConfigError, match=message):
        set_(item)


# check


def test_check_accepts_the_stock_config():
    cfg.check(make_config())
    cfg.check(make_config(), devices=8)
    cfg.check(set_("optimizer.learning_rate=0", "steps=0"))


def test_check_refuses_a_string_for_a_function():
    """Pitfall 28: `advantage="group_zscroe"` is refused, with a suggestion."""
    objective = make_config().objective.replace(advantage="group_zscroe")
    message = checked(objective=objective)
    assert "objective.advantage is the string 'group_zscroe', but wants a function" in message
    assert "did you mean 'group_zscore'" in message


def test_check_finds_wrong_types_anywhere():
    scoring = cfg.Scoring(rewards=(cfg.Reward(exact, weight="2"),))
    message = checked(scoring=scoring, steps=2.5)
    assert "scoring.rewards.0.weight is the string '2', but wants a number" in message
    assert "steps is 2.5 (float), but wants an int" in message


def test_check_refuses_a_group_of_one_with_a_group_estimator():
    """Pitfall 28 (bad input): group size 1 with a group-relative advantage."""
    config = ["rollout.group_size=1", "objective.advantage=config_test:centered"]
    message = checked(*config)
    assert "rollout.group_size is 1, but objective.advantage=centered" in message
    assert "at least 2: raise rollout.group_size" in message
    cfg.check(set_("rollout.group_size=1", "objective.advantage=config_test:exact"))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            ["data.prompts_per_step=8", "objective.minibatches=3"],
            "objective.minibatches = 3 does not divide: take 9",
        ),
        (["optimizer.microbatch=3"], "is 8, which optimizer.microbatch = 3 does not divide: take 9"),
        (["objective.minibatches=2", "optimizer.microbatch=8"], "is 4, which optimizer.microbatch = 8"),
        (["mesh.data=3"], r"is 8, which the number of batch shards \(mesh.data x mesh.fsdp\) = 3"),
        (
            ["mesh.data=2", "mesh.fsdp=2", "optimizer.microbatch=2"],
            "microbatch is 2, which .* = 4 does not divide",
        ),
        (["mesh.data=0"], "each axis is at least 1, and at most one is -1"),
        (["mesh.fsdp=-1"], "at most one is -1"),
    ],
)
def test_check_refuses_what_does_not_divide(items, message):
    with pytest.raises(cfg.ConfigError, match=message):
        cfg.check(set_(*items))


def test_check_counts_devices():
    cfg.check(set_("mesh.tensor=2"), devices=8)
    assert "does not multiply to the 8 devices" in checked("mesh.tensor=3", devices=8)
    assert "does not multiply to the 8 devices" in checked("mesh.data=4", devices=8)
    assert "= 8 does not divide: take 16" in checked("data.prompts_per_step=12", devices=8)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("rollout.temperature=0", "must be above 0 in training: 0 is greedy, for evaluation only"),
        ("rollout.temperature=-1", "rollout.temperature is -1.0"),
        ("rollout.top_p=0", "rollout.top_p is 0.0, but must be in (0, 1]"),
        ("rollout.top_p=1.1", "rollout.top_p is 1.1"),
        (
            "rollout.top_k=-1",
            "rollout.top_k is -1, but must be a finite number of at least 0: 0 keeps every token",
        ),
        ("rollout.group_size=0", "rollout.group_size is 0"),
        ("rollout.max_new_tokens=0", "rollout.max_new_tokens is 0"),
        ("rollout.stop_ids=()", "none takes the tokenizer's"),
        ("steps=-1", "steps is -1, but must be a finite number of at least 0"),
        ("seed=4294967296", "keys hold 32 bits"),
        ("data.prompt_lengths=128,64", "wants rising positive lengths"),
        ("data.prompt_lengths=()", "wants rising positive lengths"),
        ("scoring.timeout=0", "scoring.timeout is 0.0 seconds, but must be above 0"),
        ("scoring.timeout=nan", "scoring.timeout wants a number"),
        ("scoring.workers=-1", "scoring.workers is -1"),
        ("scoring.rewards.0.weight=1e999", "scoring.rewards.0.weight is inf, but must be finite"),
        ("scoring.verdict=exat", "which is no reward; did you mean 'exact'"),
        ("objective.regularize.0.0=1e999", "objective.regularize.0.0 (kl_k3) is inf, but must be finite"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1.0"),
        ("optimizer.clip_norm=0", "none clips nothing"),
        ("evaluation.every=5", "data.evaluation is none"),
        ("checkpoint.every=0", "checkpoint.every is 0"),
        ("name=a/b", "has no '/'"),
    ],
)
def test_check_refuses_out_of_range(item, message):
    """Pitfall 7 (temperature 0 is for evaluation only), and the limits of every number."""
    with pytest.raises(cfg.ConfigError) as error:
        cfg.check(set_(item))
    assert message in str(error.value)


def test_check_refuses_greedy_pass_at_k():
    message = checked("evaluation.samples=4", "evaluation.temperature=0")
    assert "where all samples are equal" in message


def test_check_refuses_rewards_of_one_name():
    scoring = cfg.Scoring(rewards=(cfg.Reward(exact), cfg.Reward(partial(exact))))
    assert "2 rewards named 'exact': give each Reward a name" in checked(scoring=scoring)


def test_check_reports_every_fault_at_once():
    message = checked("rollout.temperature=0", "steps=-1", "rollout.top_k=-1")
    assert len(message.splitlines()) == 3


# save, load, compare


def rich_config() -> cfg.Config:
    load = partial(load_model, "a", dtype="float16")
    source = partial(
        examples,
        names=["x", ("y", 1)],
        count={"a": None, "b": math.inf},
        extra=partial(exact, Path("data/x.jsonl")),
        tagged={"fn": 1, "class": "no"},
    )
    base = make_config(model=cfg.Model(load), data=cfg.Data(train=source, evaluation=examples), seed=3)
    advantage = (cfg.Stage(partial(centered, power=2.0), to="advantages"), group_zscore)
    return base.replace(objective=base.objective.replace(advantage=advantage, aggregate=token_mean))


@pytest.mark.parametrize("make", [make_config, rich_config])
def test_from_json_inverts_to_json(make):
    config = make()
    text = cfg.to_json(config)
    again = cfg.from_json(text)
    assert type(again) is cfg.Config
    assert cfg.to_json(again) == text
    assert cfg.differences(config, again) == []
    assert type(again.data.train) is type(config.data.train)
    if isinstance(config.data.train, functools.partial):
        mine, other = config.data.train, again.data.train
        assert (other.func, other.keywords["names"]) == (mine.func, mine.keywords["names"])
        assert other.keywords["count"] == mine.keywords["count"]
        assert other.keywords["tagged"] == mine.keywords["tagged"]
        assert other.keywords["extra"].args == mine.keywords["extra"].args
        assert again.model.load.args == ("a",)
    simple = [f.name for f in dataclasses.fields(cfg.Config) if f.name not in ("model", "data", "objective")]
    assert all(getattr(again, name) == getattr(config, name) for name in simple)


def test_to_json_refuses_what_has_no_name():
    def closure(completion, example):
        return 1.0

    for fn in (closure, lambda completion, example: 1.0, functools.lru_cache(closure), [].append):
        scoring = cfg.Scoring(rewards=(cfg.Reward(fn, name="mine"),))
        with pytest.raises(
            cfg.ConfigError, match=r"config.scoring.rewards.0.fn: .*define the function at module level"
        ):
            cfg.to_json(make_config(scoring=scoring))
    with pytest.raises(cfg.ConfigError, match=r"config.model.load.seen: a set cannot be saved"):
        cfg.to_json(make_config(model=cfg.Model(partial(load_model, seen={1}))))


def test_from_json_refuses_a_foreign_text():
    text = cfg.to_json(make_config())
    with pytest.raises(cfg.ConfigError, match="not JSON"):
        cfg.from_json(text[:-5])
    with pytest.raises(cfg.ConfigError, match="holds a int"):
        cfg.from_json("3")
    with pytest.raises(cfg.ConfigError, match="Config has no field 'stpes'; did you mean 'steps'"):
        cfg.from_json(text.replace('"steps"', '"stpes"'))
    with pytest.raises(cfg.ConfigError, match="has no 'ppo_clop'; did you mean 'ppo_clip'"):
        cfg.from_json(text.replace(":ppo_clip", ":ppo_clop"))


def test_differences_names_both_values():
    config = make_config()
    other = set_(
        "rollout.temperature=0.5", "objective.loss.clip_low=0.3", "objective.advantage=leave_one_out"
    )
    group, policy = "jaxrl_llm.advantages.group", "jaxrl_llm.losses.policy"
    assert cfg.differences(config, other) == [
        f"objective.advantage: {group}:group_zscore -> {group}:leave_one_out",
        f"objective.loss: {policy}:ppo_clip(clip_low=0.1) -> {policy}:ppo_clip(clip_low=0.3)",
        "rollout.temperature: 1.0 -> 0.5",
    ]
    assert cfg.differences(cfg.to_json(config), cfg.to_json(other)) == cfg.differences(config, other)


def test_differences_lets_a_run_go_on_for_longer():
    free = ["steps=500", "checkpoint.every=3", "mesh.fsdp=2", "scoring.workers=7", "optimizer.microbatch=2"]
    assert cfg.differences(make_config(), set_(*free)) == []
    cosine = ["optimizer.schedule=cosine"]
    assert cfg.differences(set_(*cosine), set_(*cosine, "steps=500")) == ["steps: 100 -> 500"]


def test_stage_functions_yields_every_stage():
    config = rich_config()
    paths = [path for path, _ in cfg.stage_functions(config.objective)]
    assert paths == [
        "objective.advantage.0",
        "objective.advantage.1",
        "objective.loss",
        "objective.regularize.0.1",
        "objective.aggregate",
    ]
