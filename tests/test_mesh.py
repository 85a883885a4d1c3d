"""Mesh specs and the rule table."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from hgpo_jax.mesh import make_mesh, parse_mesh, partition


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("auto", (8, 1, 1)),
        ("data=8", (8, 1, 1)),
        ("data=2,fsdp=4", (2, 4, 1)),
        ("data=2,fsdp=2,tensor=2", (2, 2, 2)),
        ("tensor=2,data=-1", (4, 1, 2)),
        ("fsdp=-1", (1, 8, 1)),
        (" data = 4 , tensor = 2 ", (4, 1, 2)),
    ],
)
def test_specs(spec, sizes):
    assert tuple(parse_mesh(spec, 8).values()) == sizes
    assert tuple(make_mesh(spec).shape.values()) == sizes


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "data",
        "data=",
        "data=x",
        "data=3",
        "data=2",
        "data=-1,fsdp=-1",
        "data=0",
        "data=-2",
        "batch=8",
        "data=2,data=4",
    ],
)
def test_bad_specs_are_named(spec):
    with pytest.raises(ValueError, match="mesh=") as caught:
        parse_mesh(spec, 8)
    assert "\n" not in str(caught.value)


def test_rule_table_places_dimensions():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert partition(("embed", "heads"), (64, 4), mesh) == P("fsdp", "tensor")
    assert partition(("batch", None), (8, 3), mesh) == P(("data", "fsdp"), None)


def test_axes_of_size_one_split_nothing():
    mesh = make_mesh("data=8")
    assert partition(("embed", "mlp"), (7, 5), mesh) == P(None, None)


def test_key_value_heads_beyond_their_number_are_replicated():
    mesh = make_mesh("tensor=8")
    assert partition(("embed", "kv_heads"), (64, 2), mesh) == P(None, None)


def test_a_dimension_that_does_not_divide_is_refused():
    mesh = make_mesh("tensor=8")
    with pytest.raises(ValueError, match=r"q_proj.*heads dimension of 14.*tensor = 8"):
        partition(("embed", "heads"), (64, 14), mesh, "q_proj")


def test_all_devices_are_used_once():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())
