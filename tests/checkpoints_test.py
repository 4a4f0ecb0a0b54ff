import logging
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as cfg
from jaxrl_llm.checkpoints import BEST, CheckpointError, Checkpoints, digest, fingerprint

KEEP_ALL = cfg.Checkpoint(keep_last=10, keep_best=1)


def state_of(value, size=1000):
    return {"params": {"w": jnp.arange(size, dtype=jnp.float32) + value}, "count": jnp.int32(value)}


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state_of(step), {"config": "{}", "position": step}, {})
    checkpoints.wait()


def test_restore_returns_what_was_saved(tmp_path):
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        assert checkpoints.restore(state_of(0)) is None
        save(checkpoints, 1, 2)
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        for step in (None, 1):
            got = checkpoints.restore(state_of(0), step)
            assert got.step == (step or 2) and got.meta["position"] == got.step
            jax.tree.map(np.testing.assert_array_equal, got.state, state_of(got.step))


def biggest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    file = biggest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(folder):
    file = biggest_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))


def empty(folder):
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        file.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_restore_passes_over_a_damaged_newest_checkpoint(tmp_path, damage, caplog):
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        save(checkpoints, 1, 2)
    damage(tmp_path / "c" / "2")
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints, caplog.at_level(logging.WARNING):
        got = checkpoints.restore(state_of(0))
        assert got.step == 1
        assert "checkpoint of step 2 is passed over" in caplog.text
        assert (tmp_path / "damaged_checkpoints" / "2").is_dir()
        save(checkpoints, 2)  # the step can be saved again
        assert checkpoints.restore(state_of(0)).step == 2


def test_restore_refuses_to_begin_anew_when_every_checkpoint_is_damaged(tmp_path):
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        save(checkpoints, 1)
    truncate(tmp_path / "c" / "1")
    with (
        Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints,
        pytest.raises(CheckpointError, match="no readable checkpoint"),
    ):
        checkpoints.restore(state_of(0))


def test_opening_clears_a_half_written_checkpoint_away(tmp_path):
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        save(checkpoints, 1)
    (tmp_path / "c" / "2.orbax-checkpoint-tmp-0" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        assert checkpoints.restore(state_of(0)).step == 1
    assert [p.name for p in (tmp_path / "c").iterdir() if "tmp" in p.name] == []


def test_save_keeps_the_last_and_the_best(tmp_path):
    options = cfg.Checkpoint(keep_last=2, keep_best=1)
    with Checkpoints(tmp_path / "c", options) as checkpoints:
        for step, accuracy in enumerate([0.1, 0.9, None, 0.3, None, 0.2], start=1):
            metrics = {} if accuracy is None else {BEST: accuracy}
            checkpoints.save(step, state_of(step), {}, metrics)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]


def test_save_refuses_when_the_disk_has_too_little_room(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        save(checkpoints, 1)
        usage = type("Usage", (), {"free": 100})
        monkeypatch.setattr("jaxrl_llm.checkpoints.shutil.disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match=r"needs .* GB .* are free.*goes on from step 1"):
            save(checkpoints, 2)
        assert checkpoints.restore(state_of(0)).step == 1


def test_save_that_fails_to_write_leaves_the_ones_before_it_whole(tmp_path):
    """A real failure of write(2): files may grow to 64 kB only, as on a full disk."""
    big = lambda value: state_of(value, size=200_000)
    with Checkpoints(tmp_path / "c", KEEP_ALL) as checkpoints:
        checkpoints.save(1, big(1), {}, {})
        checkpoints.wait()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints = Checkpoints(tmp_path / "c", KEEP_ALL)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
        with pytest.raises(CheckpointError, match="could not be written"):
            noise = jax.tree.map(lambda a: jax.random.normal(jax.random.key(0), a.shape), big(2))
            checkpoints.save(2, noise, {}, {})  # noise doesn't compress
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    with Checkpoints(tmp_path / "c", KEEP_ALL) as again:
        assert again.restore(big(0)).step == 1


def digest_of(tree):
    return fingerprint(tree, jax.jit(digest))


def test_digest_depends_on_every_bit_and_place_but_not_on_the_sharding():
    tree = {"a": jax.random.normal(jax.random.key(0), (8, 6)), "b": jnp.arange(4, dtype=jnp.bfloat16)}
    base = digest_of(tree)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
    sharded = {"a": jax.device_put(tree["a"], place("x", "y")), "b": jax.device_put(tree["b"], place("x"))}
    assert digest_of(sharded) == base
    swapped = {**tree, "a": tree["a"][jnp.array([1, 0, 2, 3, 4, 5, 6, 7])]}
    nudged = {**tree, "a": tree["a"].at[3, 2].set(jnp.nextafter(tree["a"][3, 2], 9.0))}
    renamed = {"c": tree["a"], "b": tree["b"]}
    assert len({base, digest_of(swapped), digest_of(nudged), digest_of(renamed)}) == 4
