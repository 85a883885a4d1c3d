"""A tiny policy with random weights and the byte tokenizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, initialize
from hgpo_jax.policy.tokenizer import embedding_rows
from hgpo_jax.sampling import Decoding, generate
from tests.helpers.chat_tokenizers import byte_tokenizer


def byte_policy() -> Policy:
    tokenizer = byte_tokenizer()
    model = ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    return Policy(model, initialize(model, 3, make_mesh("data=1", jax.devices()[:1])), tokenizer)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _generate(graphdef, params, ids, key, decoding, limit, end):
    model = nnx.merge(graphdef, params)
    length = jnp.array([ids.shape[1]])
    return generate(
        model, model.decode_blocks(), ids, length, key[None], max_new=limit, end_tokens=(end,), decoding=decoding
    )  # fmt: skip


def generated(policy: Policy, ids: list[int], key, limit: int, decoding: Decoding) -> tuple[list[int], np.ndarray]:
    """A response by the rollout's sampler: its tokens, the end token included, and their log-probabilities."""
    end = policy.tokenizer.eos_token_id
    out = _generate(policy.graphdef, policy.params, jnp.asarray([ids]), key, decoding, limit, end)
    n = int(out.lengths[0])
    return np.asarray(out.tokens[0, :n]).tolist(), np.asarray(out.logp[0, :n])
