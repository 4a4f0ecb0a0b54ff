"""Whole runs of a very small model: learning, logs, stop and resume."""

import json
import os
import signal
from functools import partial

import jax
import numpy as np
import pytest

from configs.recipes import group_advantages, rollout_and_data
from configs.tiny import get_config, on_tiny
from jaxrl_llm import ahead
from jaxrl_llm import config as cfg
from jaxrl_llm.checkpoints import CheckpointError
from jaxrl_llm.data.sources import examples
from jaxrl_llm.inspection import evaluate_run, sample
from jaxrl_llm.models.convert import tiny_model
from jaxrl_llm.rollout.groups import NoContrastError
from jaxrl_llm.run import open_run
from jaxrl_llm.train import compile_programs, evaluated, learn, roll_out, train

SMALL = dict(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32)


def small(**changes):
    """A run of seconds: four steps of the smallest model, rewards computed inline."""
    base = get_config()
    return base.replace(
        **{
            "steps": 4,
            "model": cfg.Model(load=partial(tiny_model, **SMALL)),
            "data": base.data.replace(prompts_per_step=2),
            "rollout": base.rollout.replace(group_size=4),
            "scoring": cfg.Scoring(rewards=(cfg.Reward(spread),), workers=0),
            "optimizer": cfg.Optimizer(learning_rate=1e-3, microbatch=1),
            "evaluation": cfg.Evaluation(batch=4),
            "checkpoint": cfg.Checkpoint(every=1, keep_last=10),
            "mesh": cfg.Mesh(data=1, fsdp=1, tensor=1),
        }
        | changes
    )


def spread(completion, example):
    """A reward that varies between samples of an untrained model."""
    return sum(ord(c) % 3 for c in completion) / 10


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr("jaxrl_llm.sharding.jax.devices", lambda: first)


def lines(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def digests(run_dir):
    return {line["step"]: line["params_digest"] for line in lines(run_dir) if "params_digest" in line}


def prompts(run_dir):
    return [(line["step"], line["prompt"], line["completion"]) for line in lines(run_dir, "samples.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps in one go."""
    run_dir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        first = jax.devices()[:1]
        patch.setattr("jaxrl_llm.sharding.jax.devices", lambda: first)
        train(small(), run_dir)
    return run_dir


def test_train_raises_the_reward_of_the_tiny_config(tmp_path):
    metrics = train(get_config(), tmp_path)
    rewards = [line["reward"] for line in lines(tmp_path)[1:]]
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.8
    assert metrics["eval/accuracy"] == 1


def test_train_writes_a_whole_run_folder(whole):
    rows = lines(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "eval/accuracy" in rows[0] and "eval/accuracy" in rows[-1]
    assert {"reward", "reward/spread", "grad_norm", "drift_max", "seconds/rollout", "skipped"} <= set(rows[1])
    assert not cfg.differences((whole / "config.json").read_text(), small())
    assert "jax" in json.loads((whole / "run.json").read_text())["starts"][0]["versions"]
    assert list((whole / "tensorboard").iterdir()) and len(prompts(whole)) == 8


@pytest.mark.parametrize("stops", [(1, 3), (2, 3), (3,)])
def test_train_goes_on_as_if_it_had_never_stopped(whole, tmp_path, stops):
    """Pitfall 11: runs cut at different steps see the same prompts and end with bit-equal parameters."""
    for steps in (*stops, 4):
        train(small(steps=steps), tmp_path)
    assert digests(tmp_path) == digests(whole)
    assert prompts(tmp_path) == prompts(whole)


def test_train_with_stale_rollouts_goes_on_as_if_it_had_never_stopped(tmp_path):
    config = small(rollout=small().rollout.replace(stale=True))
    for name, stops in {"whole": (4,), "stopped": (1, 3, 4)}.items():
        for steps in stops:
            train(config.replace(steps=steps), tmp_path / name)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "whole")
    assert prompts(tmp_path / "stopped") == prompts(tmp_path / "whole")


def test_train_with_stale_rollouts_samples_from_the_parameters_of_one_step_before(whole, tmp_path):
    """Steps 1 and 2 sample from the first parameters, and the ratio against the sampler shows it."""
    train(small(rollout=small().rollout.replace(stale=True)), tmp_path)
    ratios = [row["ratio"] for row in lines(tmp_path)[1:]]
    assert abs(ratios[0] - 1) < 1e-5 and all(abs(ratio - 1) > 1e-4 for ratio in ratios[1:])
    assert prompts(tmp_path)[:2] == prompts(whole)[:2] and prompts(tmp_path)[4:] != prompts(whole)[4:]


@pytest.mark.parametrize("changes", [{"score_every": 2}, {"slots": 3}, {"score_every": 2, "slots": 3}])
def test_train_is_the_same_when_it_scores_meanwhile_or_refills_slots(whole, tmp_path, changes):
    train(small(rollout=small().rollout.replace(**changes)), tmp_path)
    assert prompts(tmp_path) == prompts(whole)
    np.testing.assert_allclose(
        [row["grad_norm"] for row in lines(tmp_path)[1:]],
        [row["grad_norm"] for row in lines(whole)[1:]],
        rtol=1e-3,
    )


def test_train_crosses_an_epoch_boundary_the_same_way(tmp_path):
    """Pitfall 11: 6 prompts, batch 2: six steps; 3 + 3; 2 + 2 + 2."""
    data = cfg.Data(
        train=partial(examples, [(f"Say {c}", c) for c in "abcdef"]), prompts_per_step=2, prompt_lengths=(32,)
    )
    seen = []
    for stops in ((6,), (3, 6), (2, 4, 6)):
        run_dir = tmp_path / str(len(seen))
        for steps in stops:
            train(small(steps=steps, data=data), run_dir)
        seen.append((digests(run_dir)[6], prompts(run_dir)))
    assert seen[0] == seen[1] == seen[2]
    first, second = (sorted(p for s, p, _ in seen[0][1] if s in steps) for steps in ((1, 2, 3), (4, 5, 6)))
    assert first == second == [f"Say {c}" for c in "abcdef"]


def test_train_samples_with_the_restored_weights(whole, tmp_path):
    """Pitfall 10: after a restart the first greedy rollout is that of the saved parameters."""
    config = small(optimizer=cfg.Optimizer(learning_rate=0.1, microbatch=1))
    train(config.replace(steps=2), tmp_path)
    trained = sample(config, tmp_path, step=2, prompt="Say a", n=1, temperature=0)
    again = evaluate_run(tmp_path, step=2, config=config)
    assert again["eval/accuracy"] == lines(tmp_path)[2]["eval/accuracy"]
    assert trained != sample(config, None, step=None, prompt="Say a", n=1, temperature=0)


def test_train_shows_the_drift_between_sampler_and_trainer(tmp_path):
    """Pitfall 8: with learning rate 0 for 3 steps the difference is logged and under 1e-4."""
    train(small(steps=3, optimizer=cfg.Optimizer(learning_rate=0.0)), tmp_path)
    rows = lines(tmp_path)[1:]
    assert all(0 <= row["drift_mean"] <= row["drift_max"] < 1e-4 for row in rows)
    assert len({row["params_digest"] for row in rows}) == 1


COMPILED, BY_SAMPLE = [], []


def counting(completion, example):
    """Notes how many programs have been compiled so far."""
    BY_SAMPLE.append(len(COMPILED))
    return spread(completion, example)


def test_train_compiles_nothing_after_the_second_step(tmp_path):
    """Pitfall 27, and the trap of optimizer states without shardings: five steps, prompts of many lengths."""
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: COMPILED.append(name) if "backend_compile" in name else None
    )
    texts = [("Say " + "a" * n, "a") for n in (1, 9, 3, 12, 7, 2)]
    data = cfg.Data(train=partial(examples, texts), prompts_per_step=2, prompt_lengths=(32,))
    scoring = cfg.Scoring(rewards=(cfg.Reward(counting),), workers=0)
    train(small(steps=5, data=data, scoring=scoring, checkpoint=cfg.Checkpoint(every=2)), tmp_path)
    samples_a_step = 2 * 4
    assert COMPILED
    assert BY_SAMPLE[2 * samples_a_step] == len(
        COMPILED
    )  # the first sample of step 3, and the end of the run


def test_compiling_ahead_leaves_nothing_to_compile():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **facts: compiled.append(facts["fun_name"]) if "backend_compile" in name else None
    )
    config = small(data=small().data.replace(prompt_lengths=(8, 16)))
    with open_run(config) as run, ahead.compiling(run, compile_programs(run)) as (programs, wait):
        wait()
        state = programs.init(run.params)
        assert {"jit(train_step)", "jit(prepare)", "jit(generate)"} <= set(compiled)
        compiled.clear()
        evaluated(run, programs, state)
        learn(run, programs, state, 0, roll_out(run, programs, state.params, 0))
        assert not compiled


def test_train_refuses_a_config_that_the_checkpoint_was_not_made_with(whole):
    with pytest.raises(CheckpointError, match=r"rollout\.temperature: 1\.0 -> 0\.5"):
        train(small(steps=5, rollout=small().rollout.replace(temperature=0.5)), whole)


def terminating(completion, example):
    """Sends SIGTERM to the run in the middle of its second step."""
    BY_SAMPLE.append(len(COMPILED))
    if len(BY_SAMPLE) == 12:
        os.kill(os.getpid(), signal.SIGTERM)
    return 0.5


def test_train_stops_and_saves_on_a_signal(tmp_path):
    BY_SAMPLE.clear()
    scoring = cfg.Scoring(rewards=(cfg.Reward(terminating),), workers=0)
    config = small(scoring=scoring, data=small().data.replace(evaluation=None))
    with pytest.raises(SystemExit) as stopped:
        train(config, tmp_path)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2]
    assert (tmp_path / "checkpoints" / "2").is_dir()


def raises_at_third(completion, example):
    calls = raises_at_third.__dict__.setdefault("calls", [])
    calls.append(completion)
    if len(calls) == 3:
        raise RuntimeError("the grader is out of paper")
    return 0.5


@pytest.mark.parametrize("policy", ["raise", "unscored"])
def test_train_ends_or_goes_on_when_a_reward_raises(tmp_path, policy):
    """Pitfall 19: a reward raises at the 3rd sample: training ends with the cause, or counts it."""
    raises_at_third.__dict__.pop("calls", None)
    data = small().data.replace(evaluation=None)
    scoring = cfg.Scoring(rewards=(cfg.Reward(raises_at_third),), workers=0, on_error=policy)
    if policy == "raise":
        with pytest.raises(RuntimeError, match="out of paper"):
            train(small(steps=1, scoring=scoring, data=data), tmp_path)
    else:
        assert train(small(steps=1, scoring=scoring, data=data), tmp_path)["unscored"] == 1


def constant(completion, example):
    return 1.0


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_train_bounds_dynamic_sampling(tmp_path, policy):
    """Pitfall 20: a constant reward: bounded rounds, then a short step with a metric, or a stop."""
    base = on_tiny(rollout_and_data.dapo())
    rollout = base.rollout.replace(group_size=4, max_rounds=3, on_short_batch=policy)
    scoring = cfg.Scoring(rewards=(cfg.Reward(constant),), workers=0)
    config = small(steps=1, rollout=rollout, objective=base.objective, scoring=scoring)
    if policy == "stop":
        with pytest.raises(NoContrastError, match="easier or harder prompts"):
            train(config, tmp_path)
        return
    metrics = train(config, tmp_path)
    assert metrics["sampling_rounds"] == 3 and metrics["short_batch"] == 1 and metrics["kept_groups"] == 0
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0


RECIPES = (
    group_advantages.grpo,
    group_advantages.dr_grpo,
    group_advantages.rloo,
    group_advantages.reinforce_plus_plus,
    rollout_and_data.dapo,
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda fn: fn.__name__)
def test_recipe_trains(recipe, tmp_path):
    config = recipe()
    config = small(
        steps=3,
        rollout=config.rollout.replace(group_size=4, max_new_tokens=4),
        objective=config.objective,
        data=small().data.replace(evaluation=None),
    )
    train(config, tmp_path)
    rows = lines(tmp_path)
    assert all(row["skipped"] == 0 and np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows[1:])
    assert len(set(digests(tmp_path).values())) == 4


def test_train_is_the_same_on_four_devices(whole, tmp_path, monkeypatch):
    """Four steps on four virtual devices, with parameters and batch sharded."""
    four = jax.local_devices()[:4]
    monkeypatch.setattr("jaxrl_llm.sharding.jax.devices", lambda: four)
    base = small(mesh=cfg.Mesh(data=2, fsdp=2, tensor=1))
    config = base.replace(
        data=base.data.replace(prompts_per_step=4), optimizer=cfg.Optimizer(learning_rate=1e-3)
    )
    train(config, tmp_path / "four")
    monkeypatch.setattr("jaxrl_llm.sharding.jax.devices", lambda: four[:1])
    train(config.replace(mesh=cfg.Mesh(data=1, fsdp=1, tensor=1)), tmp_path / "one")
    assert prompts(tmp_path / "four") == prompts(tmp_path / "one")
    for a, b in zip(lines(tmp_path / "four"), lines(tmp_path / "one")):
        for name in ("loss", "grad_norm", "reward"):
            np.testing.assert_allclose(a.get(name, 0), b.get(name, 0), rtol=1e-3, atol=1e-5)
