"""The network that all tests of training share: as small as it can be with every kind of array, made once in a process."""

import functools

import jax
import numpy as np
from flax import nnx

from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.mesh import make_mesh

WORDS = 16
MODEL = ModelConfig(
    vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip


@functools.cache
def mesh_of(spec: str = "data=1"):
    """The mesh of a spec that names its sizes, over the first devices."""
    return make_mesh(spec, jax.devices()[: int(np.prod([int(part.split("=")[1]) for part in spec.split(",")]))])


@functools.cache
def parameters(seed: int):
    """MODEL's, as arrays of NumPy."""
    return jax.device_get(initialize(MODEL, seed, mesh_of()))


def sampled_decisions(advantages) -> TrainingBatch:
    """Four random decisions of one to three tokens, with the log-probabilities of `parameters(0)`."""
    rng = np.random.default_rng(0)
    rows = TrainingBatch(
        prompts=rng.integers(0, WORDS, (4, 3)), prompt_lengths=np.full(4, 3), responses=rng.integers(0, WORDS, (4, 3)),
        response_lengths=np.array([1, 2, 3, 3]), old_logp=np.zeros((4, 3)), advantages=np.float32(advantages),
    )  # fmt: skip
    logp, _ = jax.jit(lambda params, rows: token_logprobs(nnx.merge(network(MODEL), params), rows))(parameters(0), rows)
    return rows.replace(old_logp=logp)
