"""The device mesh, and the one table that maps dimensions to the mesh axes that split them.

There are three axes: `data` splits the batch, `fsdp` the batch and the parameters, `tensor` heads and feed-forward; `fsdp` and
`tensor` together split the vocabulary. A spec is written `data=2,fsdp=4,tensor=1`; one axis may be -1 (the remaining devices),
and `auto` puts every device on `data`. A mesh smaller than the number of devices uses the first ones, unless several processes
share them.
"""

from __future__ import annotations

import math
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
MAX_DEVICES = 2**20  # limit of a mesh to plan for

# Logical axis of an array's dimension -> mesh axes that split it.
RULES: dict[str | None, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor", "fsdp"),
    "vocab_of_rows": ("tensor",),  # beside a batch that fsdp splits
}


def parse_mesh(spec: str, devices: int) -> dict[str, int]:
    """Parses axis sizes from a spec; omitted axes have size 1.

    Raises:
      ValueError: a malformed or unknown axis, sizes that exceed `devices`, or that do not divide them if one is -1.
    """
    if spec.strip() == "auto":
        return {"data": devices, "fsdp": 1, "tensor": 1}
    text = repr(spec[:100])
    sizes = dict.fromkeys(AXES, 1)
    axes = set()
    for part in spec.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals or name in axes:
            raise ValueError(f"mesh={text}: expected auto or each of {', '.join(AXES)} at most once, as in data=2,fsdp=4")
        if not re.fullmatch(r"-?[0-9]{1,9}", number):
            raise ValueError(f"mesh={text}: the size of {name} must be a whole number, not {number[:50]!r}")
        sizes[name] = int(number)
        if sizes[name] == 0 or sizes[name] < -1:
            raise ValueError(f"mesh={text}: the size of {name} must be positive, or -1 for what is left")
        axes.add(name)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh={text}: only one axis can be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if devices % fixed:
            raise ValueError(f"mesh={text}: {fixed} does not divide the {devices} devices available; -1 is what is left")
        sizes[open_axes[0]] = devices // fixed
    if fixed > devices:
        raise ValueError(f"mesh={text}: needs {fixed} devices, {devices} are available; give smaller sizes, or auto for all")
    return sizes


def make_mesh(spec: str, devices: list | None = None) -> Mesh:
    """Makes a mesh over the first of `devices` (all by default) from a spec. Axes are Auto: the compiler places collectives.

    Raises ValueError as in `parse_mesh`, and if some of several processes would have unused devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(spec, len(devices))
    count = math.prod(sizes.values())
    if count < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh={spec[:100]!r}: takes {count} of the {len(devices)} devices, and {jax.process_count()} processes must take "
            "all; one axis may be -1"
        )
    shape, names, types = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=devices[:count])
    except (NotImplementedError, AssertionError):  # of TPUs, whose axes jax alone does not split, or an odd part of a slice
        return Mesh(_arranged(shape, devices[:count]), names, axis_types=types)


def _arranged(shape: tuple[int, ...], devices: list) -> np.ndarray:
    """Arranges devices as their network is if it can be split like that, or else in their own order."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, AssertionError, ValueError):
        return np.array(devices).reshape(shape)


def abstract_mesh(spec: str) -> AbstractMesh:
    """Makes the mesh of a spec without devices, to plan for. Raises ValueError; the spec must state its sizes."""
    counts = re.findall(r"=\s*([0-9]{1,9})\b", spec)
    if not counts or "-1" in spec:
        raise ValueError(f"mesh={spec[:100]!r}: give all sizes, as in data=1,fsdp=8; there are no devices to count here")
    devices = math.prod(map(int, counts))
    if devices > MAX_DEVICES:
        raise ValueError(f"mesh={spec[:100]!r}: {devices:,} devices; the largest mesh that is planned for has {MAX_DEVICES:,}")
    sizes = parse_mesh(spec, devices)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, name: str = "array", mesh_axes=AXES
) -> PartitionSpec:
    """Returns the PartitionSpec of an array whose dimensions have these logical axes, over some `mesh_axes`.

    Key-value heads that the tensor axis does not divide are replicated, the usual layout of grouped-query attention; any
    other dimension that does not divide is an error.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(n for n in RULES.get(axis, ()) if n in mesh_axes and mesh.shape[n] > 1)
        parts = math.prod(mesh.shape[n] for n in names)
        if size % parts:
            if axis != "kv_heads":
                raise ValueError(
                    f"mesh {dict(mesh.shape)}: {name} of shape {shape} has a {axis} dimension of {size}, "
                    f"which {' x '.join(names)} = {parts} does not divide; choose a smaller {names[-1]} axis"
                )
            names = ()
        spec.append(names if len(names) > 1 else (names[0] if names else None))
    return PartitionSpec(*spec)


def sharding(axes, shape, mesh: Mesh, name: str = "array") -> NamedSharding:
    """Binds `partition` to the mesh."""
    return NamedSharding(mesh, partition(axes, shape, mesh, name))


def max_across_devices(count: jax.Array) -> jax.Array:
    """Returns the largest `count` i32[] over the manual axes of a shard_map whose other axes the compiler splits.

    A loop with this number of iterations has the same number on all devices. It must, if its body holds collectives of those
    other axes: a collective-permute waits for every device of the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    others = any(mesh.shape[n] > 1 for n in mesh.axis_names if n not in mesh.manual_axes)
    manual = tuple(n for n in mesh.manual_axes if mesh.shape[n] > 1)
    return jax.lax.pmax(count, manual) if manual and others else count


def auto_axes(axis: str) -> tuple[str, ...]:
    """Lists the axes of the mesh in context that split a logical axis and are left to the compiler (axis type Auto)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in RULES[axis] if mesh.shape.get(n, 1) > 1 and n not in mesh.manual_axes)


def all_auto_axes() -> set[str]:
    """Lists all axes of the mesh in context that are left to the compiler, those of size one too."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins the layout of an intermediate to the mesh of `jax.set_mesh`; without one (or on one device) does nothing."""
    if not any(auto_axes(axis) for axis in RULES if axis):
        return x
    return jax.lax.with_sharding_constraint(x, partition_in_context(axes, x.shape))


def partition_in_context(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Computes `partition` over the axes of the mesh in context that are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = tuple(n for n in mesh.axis_names if mesh.shape[n] > 1 and n not in mesh.manual_axes)
    return partition(axes, shape, mesh, mesh_axes=automatic)
