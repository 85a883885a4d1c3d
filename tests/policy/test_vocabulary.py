"""Rows of a table that several devices hold are the rows of the table, and so are their gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy.vocabulary import embedding_lookup
from tests.helpers.tiny import mesh_of


def weighted(lookup, table, tokens, weights):
    rows = lookup(table, tokens)
    return (rows * weights).astype(jnp.float32).sum(), rows


def alone(*arrays):
    return jax.grad(weighted, 1, has_aux=True)(embedding_lookup, *arrays)


def on_data(*arrays):
    """As the update does: each index of the data axis has its own tokens, and the gradients are summed by us."""

    def mapped(table, tokens, weights):
        gradient, rows = jax.grad(weighted, 1, has_aux=True)(embedding_lookup, table, tokens, weights)
        return jax.lax.psum(gradient.astype(jnp.float32), "data"), rows

    split = P("data")
    in_specs, out_specs = (P(), split, split), (P(), split)
    return jax.shard_map(mapped, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False)(*arrays)


MESHES = ["data=2,fsdp=3", "data=2,fsdp=2", "data=2,tensor=2", "data=2,fsdp=2,tensor=2"]
CASES = [(spec, call) for spec in MESHES for call in (alone, on_data)]


@pytest.mark.parametrize(("spec", "call"), [*CASES, ("data=4,tensor=2", alone)])  # four do not divide the rows
def test_the_lookup_and_its_gradient(spec, call):
    table = jax.random.normal(jax.random.key(0), (24, 8), jnp.bfloat16)
    tokens = jnp.arange(12).reshape(6, 2) * 2  # each once: sums of several gradients are rounded
    weights = jax.random.normal(jax.random.key(1), (6, 2, 8), jnp.bfloat16)
    plain = jax.grad(weighted, 1, has_aux=True)(lambda table, tokens: table[tokens], table, tokens, weights)
    with jax.set_mesh(mesh_of(spec)):
        lowered = jax.jit(call).lower(table, tokens, weights)
        # XLA's CPU compiler ends the process for a sum of bfloat16 whose reduction carries a sharding.
        assert not re.search(r"sdy.sharding_constraint .* : tensor<bf16>", lowered.as_text())
        ours = lowered.compile()(table, tokens, weights)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, pair) for pair in (ours, plain)))


@pytest.mark.parametrize("spec", ["data=1", "data=2,fsdp=2"])
def test_gradients_of_a_frequent_token_are_added_in_float32(spec):
    """A sum of ones in bfloat16 would stop at 256."""
    table, tokens = jnp.ones((4, 8), jnp.bfloat16), jnp.where(jnp.arange(4096) < 4000, 1, 2).reshape(4, 1024)
    with jax.set_mesh(mesh_of(spec)):
        gradient = jax.jit(jax.grad(lambda table: embedding_lookup(table, tokens).astype(jnp.float32).sum()))(table)
    np.testing.assert_array_equal(gradient, jnp.repeat(jnp.array([[0], [4000], [96], [0]], jnp.bfloat16), 8, axis=1))
