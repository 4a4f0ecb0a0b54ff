import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm.config import Optimizer
from jaxrl_llm.optimizers import build, schedule


@pytest.mark.parametrize("kind, half, end", [("constant", 1, 1), ("linear", 0.5, 0), ("cosine", 0.5, 0)])
def test_schedule_counts_updates_after_the_warmup(kind, half, end):
    rate = schedule(Optimizer(learning_rate=1.0, schedule=kind, warmup=4), 24)
    assert [float(rate(n)) for n in (0, 2, 4)] == pytest.approx([0, 0.5, 1])
    assert float(rate(14)) == pytest.approx(half)
    assert float(rate(24)) == pytest.approx(end, abs=1e-6)


def test_schedule_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        schedule(Optimizer(schedule="cosin"), 10)


def test_build_clips_by_the_global_norm_before_the_transformation():
    tx = build(Optimizer(learning_rate=1.0, clip_norm=2.0, make=optax.sgd), 10)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    changes, _ = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, tx.init(params), params)
    assert optax.tree.norm(changes) == pytest.approx(2.0)
    assert float(changes["a"][0]) == pytest.approx(-1.2)
