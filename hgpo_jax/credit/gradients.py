"""Each step's policy gradient in random directions: what a snapshot keeps of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.logprobs import make_logprobs
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.placement import cast
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.job import Job
from hgpo_jax.trainer.step import training_batch

ROWS = 32  # gradients in memory at a time


def projections(job: Job, params, reference, e: Episodes, key: jax.Array, directions: int) -> np.ndarray:
    """Computes f16[B, T, D]: `step_gradients` in D = `directions` Gaussian directions, divided by their root mean square.

    Products of gradients are products of these on average, up to a factor. A cosine c has a standard error of about
    (1 - c^2) / sqrt(D).
    """
    leaves, tree = jax.tree.flatten(params[SHARED])
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, (directions, *leaf.shape)) for k, leaf in zip(keys, leaves, strict=True)]
    found = step_gradients(job, params, reference, e, jax.tree.unflatten(tree, drawn))
    size = np.sqrt(np.mean(found[np.asarray(e.mask)] ** 2))
    return (found / (size if size > 0 else 1)).astype(np.float16)


def step_gradients(job: Job, params, reference, e: Episodes, directions: Any) -> np.ndarray:
    """Computes f32[B, T, D]: the derivatives of the log-probability of each step's response in D directions; 0 where none was.

    params, reference: of the one policy, as `TrainState.params` and `Job.reference_copy` have them.
    directions: like `params` of the policy, each leaf with a first axis D.
    """
    dtype, logprobs = job.config.policy.compute_dtype, make_logprobs(job.policy.model, job.config.rollout.temperature)

    def response_logp(params, reference, row) -> jax.Array:
        rows = jax.tree.map(lambda a: a[None], row)
        return logprobs(cast(params, dtype), reference, rows)[0].sum()

    @jax.jit
    def project(params, reference, directions, rows) -> jax.Array:
        gradients = jax.vmap(jax.grad(response_logp), (None, None, 0))(params, reference, rows)
        products = jax.tree.map(lambda g, d: g.reshape(len(g), -1) @ d.reshape(len(d), -1).T, gradients, directions)
        return jnp.stack(jax.tree.leaves(products)).sum(0)

    batch, steps = jax.device_get((training_batch(e), jnp.flatnonzero(e.mask)))
    chunks = []
    with jax.set_mesh(make_mesh("data=1", jax.local_devices()[:1])):  # no mesh splits a response by itself
        weights = jax.device_put(jax.device_get((params[SHARED], reference[SHARED], directions)))
        for begin in range(0, len(steps), ROWS):
            chunk = np.resize(steps[begin : begin + ROWS], ROWS)  # repeats fill up: one shape, one program
            rows = jax.tree.map(lambda a, chunk=chunk: a[chunk], batch)
            chunks.append(np.asarray(project(*weights, rows)))
    found = np.zeros((e.mask.size, chunks[0].shape[1]), np.float32)
    found[steps] = np.concatenate(chunks)[: len(steps)]
    return found.reshape(*e.mask.shape, -1)
