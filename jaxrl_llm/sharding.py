"""One mesh and one table of rules decide where every array lives.

Parameters carry logical axis names; a table maps each name to mesh axes. The table is an argument, never
ambient state, so a compiled program can't be reused under other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm import config as cfg
from jaxrl_llm.signature import did_you_mean

MESH_AXES = ("data", "fsdp", "tensor")

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(sizes: cfg.Mesh, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a mesh with the axes data, fsdp and tensor; a size of -1 takes the devices that remain.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = [sizes.data, sizes.fsdp, sizes.tensor]
    fixed = 1
    for size in shape:
        fixed *= size if size != -1 else 1
    if shape.count(-1) == 1 and len(devices) % fixed == 0:
        shape[shape.index(-1)] = len(devices) // fixed
    product = shape[0] * shape[1] * shape[2]
    if product != len(devices):
        raise ValueError(
            f"mesh data={sizes.data}, fsdp={sizes.fsdp}, tensor={sizes.tensor} does not multiply to the "
            f"{len(devices)} devices at hand; set one axis to -1 or change the sizes"
        )
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Returns the partition of an array whose dimensions have the logical names `axes`.

    Raises:
      ValueError: an unknown logical name, or two dimensions on one mesh axis.
    """
    used: dict[str, str] = {}
    out = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"no rule for logical axis {axis!r}{did_you_mean(axis, rules)}")
        places = rules[axis] if axis is not None else None
        for place in (places,) if isinstance(places, str) else places or ():
            if place in used:
                raise ValueError(f"axes {axes}: {used[place]!r} and {axis!r} both map to mesh axis {place!r}")
            used[place] = axis
        out.append(places)
    return PartitionSpec(*out)


def param_shardings(mesh: jax.sharding.Mesh, axes: Any, rules: Rules = RULES) -> Any:
    """Returns the shardings of parameters whose tree of logical axes is `axes`."""
    return jax.tree.map(
        lambda a: NamedSharding(mesh, spec(a, rules)), axes, is_leaf=lambda a: isinstance(a, tuple)
    )


def batch_sharding(mesh: jax.sharding.Mesh, rules: Rules = RULES) -> NamedSharding:
    """Returns the sharding of arrays whose first axis is B."""
    return NamedSharding(mesh, spec(("batch",), rules))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
