import jax
import pytest

from jaxrl_llm import config as cfg
from jaxrl_llm.models.convert import tiny_model
from jaxrl_llm.sharding import RULES, make_mesh, param_shardings, spec


def test_make_mesh_gives_the_rest_of_the_devices_to_one_axis():
    mesh = make_mesh(cfg.Mesh(data=-1, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (4, 4, 1)])
def test_make_mesh_refuses_sizes_that_do_not_multiply_to_the_devices(sizes):
    with pytest.raises(ValueError, match="does not multiply to the 8 devices"):
        make_mesh(cfg.Mesh(*sizes))


def test_spec_refuses_unknown_axes_and_collisions():
    assert spec(("vocab", "embed"), RULES) == jax.P("tensor", "fsdp")
    with pytest.raises(ValueError, match="did you mean 'embed'"):
        spec(("embd",), RULES)
    with pytest.raises(ValueError, match="'heads' and 'mlp' both map to mesh axis 'tensor'"):
        spec(("heads", "mlp"), RULES)


def test_param_shardings_cover_every_parameter():
    policy, params, *_ = tiny_model()
    shardings = param_shardings(make_mesh(cfg.Mesh(data=2, fsdp=2, tensor=2)), policy.axes)
    placed = jax.device_put(params, shardings)
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    assert placed["embed"]["weight"].sharding.spec == jax.P("tensor", "fsdp")
