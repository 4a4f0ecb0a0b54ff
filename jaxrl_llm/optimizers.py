"""Gradient transformations: optax chains and schedules that count optimizer updates."""

from __future__ import annotations

import optax

from jaxrl_llm import config as cfg
from jaxrl_llm.signature import did_you_mean

__all__: list[str] = []  # update-stage functions of method cards

SCHEDULES = ("constant", "linear", "cosine")


def schedule(optimizer: cfg.Optimizer, total_updates: int) -> optax.Schedule:
    """Returns `updates -> learning rate`.

    Args:
      optimizer: peak rate, kind of decay ("linear" and "cosine" end at 0), updates of linear warm-up.
      total_updates: optimizer updates of the whole run: steps x minibatches x passes.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup
    after = max(total_updates - warmup, 1)
    if optimizer.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif optimizer.schedule == "linear":
        decay = optax.linear_schedule(peak, 0.0, after)
    elif optimizer.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, after)
    else:
        raise ValueError(
            f"optimizer.schedule is {optimizer.schedule!r}{did_you_mean(optimizer.schedule, SCHEDULES)}"
        )
    if not warmup:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])


def adamw(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW without weight decay: the pretrained weights are not pulled to zero."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)


def build(optimizer: cfg.Optimizer, total_updates: int) -> optax.GradientTransformation:
    """Returns the transformation of a run: clipping by the global norm, then `optimizer.make`."""
    make = optimizer.make or adamw
    steps = [optax.clip_by_global_norm(optimizer.clip_norm)] if optimizer.clip_norm else []
    return optax.chain(*steps, make(schedule(optimizer, total_updates)))
