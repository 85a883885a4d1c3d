"""Parameters on a mesh: shapes, shardings, random initial values created in place, conversion to another dtype."""

from __future__ import annotations

import functools
import logging

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hgpo_jax.config.choices import LINEARS
from hgpo_jax.policy.mesh import sharding
from hgpo_jax.policy.model_config import ModelConfig
from hgpo_jax.policy.transformer import Qwen2

# Logical axes of each parameter by its last two names; a leading "layers" axis is never split, nor are other parameters.
PARAMETER_AXES = {
    "embed_tokens.embedding": ("vocab", None),
    "q_proj.kernel": ("embed", "heads"),
    "q_proj.bias": ("heads",),
    "k_proj.kernel": ("embed", "kv_heads"),
    "k_proj.bias": ("kv_heads",),
    "v_proj.kernel": ("embed", "kv_heads"),
    "v_proj.bias": ("kv_heads",),
    "o_proj.kernel": ("heads", "embed"),
    "gate_proj.kernel": ("embed", "mlp"),
    "up_proj.kernel": ("embed", "mlp"),
    "down_proj.kernel": ("mlp", "embed"),
    "lm_head.kernel": (None, "vocab"),
    # Of a vision tower. Queries, keys and values are in one kernel, whose outputs the heads' axis would cut elsewhere.
    "qkv.kernel": ("embed", None),
    "proj.kernel": ("heads", "embed"),
    "gate_proj.bias": ("mlp",),
    "up_proj.bias": ("mlp",),
}
# An adapter is split like its kernel, but never along its rank.
for _name in (*LINEARS, "qkv", "proj"):
    _inputs, _outputs = PARAMETER_AXES[f"{_name}.kernel"]
    PARAMETER_AXES |= {f"{_name}.lora_a": (_inputs, None), f"{_name}.lora_b": (None, _outputs)}


@functools.cache  # a run asks for it dozens of times, and each would trace it anew
def _abstract(config: ModelConfig):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(state)


def network(config: ModelConfig):
    """Returns the network's graph definition: `nnx.merge(network(config), params)` is a `Qwen2`."""
    return _abstract(config)[0]


def shapes(config: ModelConfig) -> dict:
    """Returns the parameters as ShapeDtypeStructs, without allocating anything."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _abstract(config)[1])  # the caller's own


def shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """Returns a NamedSharding for every parameter. Raises ValueError if a dimension does not divide."""
    if config.num_key_value_heads % mesh.shape["tensor"]:
        _log_replication(config.num_key_value_heads, mesh.shape["tensor"])

    def sharding_of(path, leaf):
        name = ".".join(part.key for part in path[-2:])
        axes = PARAMETER_AXES.get(name, (None,) * leaf.ndim)
        axes = (None,) * (leaf.ndim - len(axes)) + axes
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        if config.vision and path[0].key == "visual":
            heads["heads"] = config.vision.num_heads
        # A head is never cut in two, so head dimensions divide by heads rather than by elements.
        shape = tuple(heads.get(axis, size) for axis, size in zip(axes, leaf.shape, strict=True))
        return sharding(axes, shape, mesh, name)

    return jax.tree_util.tree_map_with_path(sharding_of, shapes(config))


def shardings_like(tree, config: ModelConfig, mesh: Mesh):
    """Returns a NamedSharding for every array of a tree that holds copies of the parameters, such as an optimizer's moments.

    An array whose path ends with a parameter's is sharded like it; any other is replicated.
    """
    parameters = {
        jax.tree_util.keystr(path): placed for path, placed in jax.tree_util.tree_leaves_with_path(shardings(config, mesh))
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding_of(path, _):
        name = jax.tree_util.keystr(path)
        return next((placed for suffix, placed in parameters.items() if name.endswith(suffix)), replicated)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def storage_shardings(tree, config: ModelConfig, mesh: Mesh, *, offload: bool):
    """Returns `shardings_like` for stored arrays between updates; with `offload`, all but scalars are in the host's memory."""
    on_devices = shardings_like(tree, config, mesh)
    if not offload:
        return on_devices
    # XLA's host offloading does not accept scalars on all backends, and they would save little.
    return jax.tree.map(lambda a, placed: placed.with_memory_kind("pinned_host") if a.ndim else placed, tree, on_devices)


def place(params, placed):
    """Moves arrays to these shardings, and descriptions of arrays (`jax.ShapeDtypeStruct`), too."""

    def moved(a, sharding):
        return a.update(sharding=sharding) if isinstance(a, jax.ShapeDtypeStruct) else jax.device_put(a, sharding)

    return jax.tree.map(moved, params, placed)


def cast(params, dtype: str):
    """Casts the parameters to another floating-point type.

    A critic's head stays: rounded to bfloat16, a value between 4 and 8 would move in steps of 0.03.
    """
    if isinstance(params, dict) and params.keys() == {"body", "value"}:
        return params | {"body": cast(params["body"], dtype)}
    return jax.tree.map(lambda a: a.astype(dtype), params)


@functools.cache  # logged once, not at every call
def _log_replication(kv_heads: int, tensor: int) -> None:
    logging.getLogger(__name__).warning(
        "mesh axis tensor=%d does not divide the %d key-value heads: every device holds all of them", tensor, kv_heads
    )


@functools.cache  # compiled once in a process
def _create(config: ModelConfig, mesh: Mesh):
    create = lambda key: nnx.to_pure_dict(nnx.split(Qwen2(config, nnx.Rngs(key)))[1])  # noqa: E731
    # The key is an argument, not a constant, so that one compilation serves every seed.
    return jax.jit(create, out_shardings=shardings(config, mesh))


def initialize(config: ModelConfig, seed: int, mesh: Mesh) -> dict:
    """Makes random parameters, each created in its shards on the mesh; the values are the same on every mesh."""
    return _create(config, mesh)(jax.random.key(seed))
