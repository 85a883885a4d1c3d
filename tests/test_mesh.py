"""Mesh specs and the rule table."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from hgpo_jax.mesh import make_mesh, parse_mesh, partition

SPECS = {
    "auto": (8, 1, 1), "data=8": (8, 1, 1), "data=2,fsdp=4": (2, 4, 1), "data=2,fsdp=2,tensor=2": (2, 2, 2),
    "tensor=2,data=-1": (4, 1, 2), "fsdp=-1": (1, 8, 1), " data = 4 , tensor = 2 ": (4, 1, 2),
}  # fmt: skip
FORM, NUMBER = "expected auto or each of data, fsdp, tensor at most once", "the size of data must be a whole number, not "
POSITIVE, PRODUCT = "the size of data must be positive, or -1", "the sizes must multiply to the 8 devices available"
REFUSED = {
    "": FORM, "data": FORM, "batch=8": FORM, "data=2,data=4": FORM, "data=": NUMBER + "''", "data=x": NUMBER + "'x'",
    "data=0": POSITIVE, "data=-2": POSITIVE, "data=3": PRODUCT, "data=2": PRODUCT, "data=3,fsdp=-1": PRODUCT,
    "data=-1,fsdp=-1": "only one axis can be -1",
}  # fmt: skip


def test_specs():
    for spec, sizes in SPECS.items():
        assert tuple(parse_mesh(spec, 8).values()) == tuple(make_mesh(spec).shape.values()) == sizes
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())


@pytest.mark.parametrize(("spec", "message"), REFUSED.items())
def test_bad_specs_are_named(spec, message):
    with pytest.raises(ValueError) as caught:
        parse_mesh(spec, 8)
    assert str(caught.value).startswith(f"mesh={spec!r}: {message}") and "\n" not in str(caught.value)


def test_the_rule_table_places_dimensions():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert partition(("embed", "heads"), (64, 4), mesh) == P("fsdp", "tensor")
    assert partition(("batch", None), (8, 3), mesh) == P(("data", "fsdp"), None)
    assert partition(("embed", "mlp"), (7, 5), make_mesh("data=8")) == P(None, None)  # axes of size one split nothing
    mesh = make_mesh("tensor=8")
    assert partition(("embed", "kv_heads"), (64, 2), mesh) == P(None, None)  # beyond their number they are replicated
    with pytest.raises(ValueError, match=r"q_proj.*heads dimension of 14.*tensor = 8"):
        partition(("embed", "heads"), (64, 14), mesh, "q_proj")
