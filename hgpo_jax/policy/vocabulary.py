"""Look-ups along a vocabulary that is split over mesh axes, which XLA's partitioner cannot do by itself."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hgpo_jax.policy.mesh import all_auto_axes, auto_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(size, table, tokens):
    """Selects rows of a table [size, D]; adds their gradients in float32, and rounds each device's sums once.

    A token of a prompt may occur thousands of times in a batch. A sum of equal terms in bfloat16 stops at 256 of them.
    """
    return jnp.take(table, tokens, axis=0)


def _rows_forward(size, table, tokens):
    return jnp.take(table, tokens, axis=0), tokens


def _rows_backward(size, tokens, g):
    sums = jnp.zeros((size, g.shape[-1]), jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return sums.astype(g.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def embedding_lookup(table, tokens):
    """Looks up rows of a table [V, D] that is split over the vocabulary, i32[B, S] -> [B, S, D].

    Every device looks up all tokens in its own part, and the parts are added: the table stays in place. The compiler alone may
    gather a table, and aborts for one that two mesh axes split inside a shard_map over a third. Rows of tokens that the other
    axes of a batch do not divide are looked up by all of them.
    """
    axes = auto_axes("vocab")
    if not axes:
        return _rows(table.shape[0], table, tokens)

    def lookup_in_shard(shard, tokens):
        local = tokens - jax.lax.axis_index(axes) * shard.shape[0]
        inside = (local >= 0) & (local < shard.shape[0])
        shard = jax.lax.pcast(shard, batch_axes, to="varying")
        embeddings = _rows(shard.shape[0], shard, jnp.where(inside, local, 0))
        return jax.lax.psum(jnp.where(inside[..., None], embeddings, 0), axes)

    mesh = jax.sharding.get_abstract_mesh()
    batch_axes = tuple(axis for axis in auto_axes("batch") if axis not in axes)
    if tokens.shape[0] % math.prod(mesh.shape[axis] for axis in batch_axes):
        batch_axes = ()
    rows = PartitionSpec(batch_axes or None)
    # Over all axes: if one were left to the compiler, the sum would carry a sharding, with which XLA's CPU compiler aborts for
    # bfloat16. `check_vma` stays true, so that the backward pass does not add the same gradients of all devices.
    lookup = jax.shard_map(lookup_in_shard, in_specs=(PartitionSpec(axes), rows), out_specs=rows, axis_names=all_auto_axes())
    return lookup(table, tokens)


def gather_logprobs(logps, tokens):
    """Selects the entries of f32[..., V] at tokens i32[...], f32[...].

    It is a sum under a mask, because XLA's partitioner aborts on a gather from an array whose rows and vocabulary are both
    split inside a shard_map over a third mesh axis.
    """
    return jnp.where(jnp.arange(logps.shape[-1]) == tokens[..., None], logps, 0.0).sum(-1)
