"""Mesh specs and the rule table."""

import jax
import pytest
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy.mesh import make_mesh, parse_mesh, partition
from tests.helpers.refusals import refused

SPECS = {
    "auto": (8, 1, 1), "data=8": (8, 1, 1), "data=2,fsdp=4": (2, 4, 1), "data=2,fsdp=2,tensor=2": (2, 2, 2),
    "tensor=2,data=-1": (4, 1, 2), "fsdp=-1": (1, 8, 1), " data = 4 , tensor = 2 ": (4, 1, 2),
    "data=1": (1, 1, 1), "data=3": (3, 1, 1), "fsdp=2,tensor=2": (1, 2, 2),
}  # fmt: skip
FORM, NUMBER = "expected auto or each of data, fsdp, tensor at most once", "the size of data must be a whole number, not "
POSITIVE, MORE = "the size of data must be positive, or -1", "needs {} devices, 8 are available; give smaller sizes, or auto"
REFUSED = {
    "": FORM, "data": FORM, "batch=8": FORM, "data=2,data=4": FORM, "data=": NUMBER + "''", "data=x": NUMBER + "'x'",
    "data=0": POSITIVE, "data=-2": POSITIVE, "data=9": MORE.format(9), "data=4,fsdp=4": MORE.format(16),
    "data=9,fsdp=-1": "9 does not divide the 8 devices", "data=3,fsdp=-1": "3 does not divide the 8 devices",
    "data=-1,fsdp=-1": "only one axis can be -1",
}  # fmt: skip


def test_specs():
    for spec, sizes in SPECS.items():
        assert tuple(parse_mesh(spec, 8).values()) == tuple(make_mesh(spec).shape.values()) == sizes
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())


def test_fewer_devices_are_the_first_ones_of_one_process(monkeypatch):
    assert list(make_mesh("data=2,tensor=1").devices.flat) == jax.devices()[:2]
    assert list(make_mesh("data=1", jax.devices()[3:]).devices.flat) == jax.devices()[3:4]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert make_mesh("data=8").size == make_mesh("auto").size == 8
    with pytest.raises(ValueError, match=r"^mesh='data=2': takes 2 of the 8 devices, and 2 processes must take all; "):
        make_mesh("data=2")


@pytest.mark.parametrize(("spec", "message"), REFUSED.items())
def test_bad_specs_are_named(spec, message):
    with refused(f"mesh={spec!r}: {message}"):
        parse_mesh(spec, 8)


def test_the_rule_table_places_dimensions():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    assert partition(("embed", "heads"), (64, 4), mesh) == P("fsdp", "tensor")
    assert partition(("batch", None), (8, 3), mesh) == P(("data", "fsdp"), None)
    assert partition(("embed", "mlp"), (7, 5), make_mesh("data=8")) == P(None, None)  # axes of size one split nothing
    mesh = make_mesh("tensor=8")
    assert partition(("embed", "kv_heads"), (64, 2), mesh) == P(None, None)  # beyond their number they are replicated
    with pytest.raises(ValueError, match=r"q_proj.*heads dimension of 14.*tensor = 8"):
        partition(("embed", "heads"), (64, 14), mesh, "q_proj")


@pytest.mark.parametrize("fault", [NotImplementedError("Failed to find assignment"), AssertionError()])
def test_tpus_that_jax_alone_does_not_arrange_keep_their_order(fault, monkeypatch):
    """A slice of 4 x 4 for data=2,fsdp=8, or three chips of four."""

    def refuse(*given, **options):
        raise fault

    monkeypatch.setattr(jax, "make_mesh", refuse)
    ours = make_mesh("data=2,fsdp=4")
    assert dict(ours.shape) == {"data": 2, "fsdp": 4, "tensor": 1} and set(ours.axis_types) == {jax.sharding.AxisType.Auto}
    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    assert make_mesh("data=2,fsdp=4").devices.ravel().tolist() == jax.devices() and ours.devices.size == 8
