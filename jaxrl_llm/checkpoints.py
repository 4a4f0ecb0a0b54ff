"""Orbax checkpoints of a whole run: parameters, optimizer, counters, data position and config.

Random keys are functions of the seed and the step, so none is stored. A checkpoint becomes visible by a
rename when it is complete; what was written before is never touched by a failing save.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxrl_llm import config as cfg

log = logging.getLogger(__name__)

BEST = "eval/accuracy"  # the metric that `keep_best` compares


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class Restored(NamedTuple):
    step: int  # completed training steps
    state: Any
    meta: dict[str, Any]


def digest(array: jax.Array) -> jax.Array:
    """Returns two uint32 sums: a hash of the array's bits and their places.

    Sums of integers do not depend on their order, so the digest is the same for every sharding.
    """
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[array.dtype.itemsize]
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = place * jnp.uint32(bits.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    first = _mix(bits ^ _mix(place + jnp.uint32(1)))
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(_mix(first), dtype=jnp.uint32)])


def _mix(x: jax.Array) -> jax.Array:
    """Spreads every bit of a uint32 over all others (two rounds of multiply and shift)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def fingerprint(tree: Any, digest_fn: Callable[[jax.Array], jax.Array] = digest) -> str:
    """Returns 16 hex digits from the names, shapes and digests of a tree's arrays.

    Args:
      digest_fn: `digest`, jitted by the caller.
    """
    out = hashlib.sha256()
    sums = jax.device_get(jax.tree.map(digest_fn, tree))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), pair in zip(leaves, jax.tree.leaves(sums), strict=True):
        out.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} ".encode())
        out.update(pair.tobytes())
    return out.hexdigest()[:16]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        folder: Path,
        options: cfg.Checkpoint,
        *,
        digest_fn: Callable[[jax.Array], jax.Array] = digest,
        read_only: bool = False,
    ):
        """Opens `folder`, clearing away what an interrupted save has left.

        Args:
          folder: made if missing.
          options: how many of the last and of the best to keep.
          digest_fn: `digest`, jitted by the caller.
          read_only: change nothing, since the run may be going on.
        """
        self._folder = Path(folder).absolute()
        self._digest, self._read_only = digest_fn, read_only
        policies = ocp.checkpoint_managers
        keep = [policies.LatestN(options.keep_last)]
        if options.keep_best:
            ranked = dict(n=options.keep_best, keep_checkpoints_without_metrics=False)
            keep.append(policies.BestN(get_metric_fn=lambda metrics: metrics[BEST], **ranked))
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
                save_interval_steps=0 if read_only else 1,
            ),
            item_names=("state", "meta"),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any], metrics: dict[str, float]) -> None:
        """Starts to write a checkpoint; returns when the arrays have been copied.

        Args:
          step: completed training steps.
          state: the pytree to keep.
          meta: what is not an array, as JSON.
          metrics: the step's metrics; `eval/accuracy`, if present, ranks the checkpoint.

        Raises:
          CheckpointError: too little room, or the save before this one failed.
        """
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < need * 1.02:
            raise CheckpointError(
                f"a checkpoint of step {step} needs {need / 1e9:.3g} GB in {self._folder}, but "
                f"{free / 1e9:.3g} GB are free; make room or lower checkpoint.keep_last and keep_best, then "
                f"start the same command again: it goes on from step {max(self.steps(), default=0)}"
            )
        if step in self.steps():
            return
        meta = {**meta, "state_digest": fingerprint(state, self._digest)}
        ranked = {BEST: metrics[BEST]} if BEST in metrics else None
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)),
                metrics=ranked,
            )
        except Exception as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Waits for the save under way; raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(None, error) from error

    def _failed(self, step: int | None, error: Exception) -> CheckpointError:
        which = "the checkpoint" if step is None else f"the checkpoint of step {step}"
        return CheckpointError(
            f"{which} could not be written to {self._folder}: {error}. The checkpoints before it are whole "
            f"({self.steps()}); mend the cause (is the disk full?) and start the same command again"
        )

    def restore(self, like: Any, step: int | None = None) -> Restored | None:
        """Reads the newest whole checkpoint, or that of `step`; None if there is none.

        A checkpoint that cannot be read, or whose arrays do not have the digest that was saved with them, is
        moved aside with a message, and the one before it is tried.

        Args:
          like: the state's pytree of arrays or ShapeDtypeStructs; their shardings decide where it is put.

        Raises:
          CheckpointError: there are checkpoints, but none can be read.
        """
        steps = self.steps() if step is None else [s for s in self.steps() if s == step]
        for candidate in reversed(steps):
            try:
                return self._read(candidate, like)
            except Exception as error:  # Orbax and TensorStore raise many types for a damaged file
                log.warning("checkpoint of step %d is passed over: %s", candidate, str(error).split("\n")[0])
                if step is None and not self._read_only:
                    self._move_aside(candidate)
        if step is not None or steps:
            raise CheckpointError(
                f"no readable checkpoint{'' if step is None else f' of step {step}'} in {self._folder} "
                f"(there: {self.steps()}); name another step, or start with a new run folder"
            )
        return None

    def read_meta(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def _read(self, step: int, like: Any) -> Restored:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        out = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()),
        )
        got, want = fingerprint(out["state"], self._digest), out["meta"]["state_digest"]
        if got != want:
            raise ValueError(f"its arrays have digest {got}, but {want} was saved with them")
        return Restored(step, out["state"], out["meta"])

    def _move_aside(self, step: int) -> None:
        aside = self._folder.parent / "damaged_checkpoints"
        aside.mkdir(exist_ok=True)
        target = aside / str(step)
        if target.exists():
            shutil.rmtree(target)
        (self._folder / str(step)).rename(target)
        self._manager.reload()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error on its way out is the one to show, not what the save under way may say.
        if kind in (None, SystemExit):
            self.wait()
        self._manager.close()
