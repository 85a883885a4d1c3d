"""A tiny policy with random weights and the byte tokenizer."""

import functools

import jax
import numpy as np
from flax import nnx

from hgpo_jax.policy import ModelConfig, Policy, initialize
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import embedding_rows
from hgpo_jax.sampling.generate import Decoding, generate
from tests.helpers.chat_tokenizers import byte_tokenizer

READ, SAMPLED = 256, 48  # tokens of the longest prompt and response of `generated`


def byte_policy() -> Policy:
    return Policy(*_network(), byte_tokenizer())


@functools.cache
def _network():
    model = ModelConfig(
        vocab_size=embedding_rows(len(byte_tokenizer())), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    return model, initialize(model, 3, make_mesh("data=1", jax.devices()[:1]))


@functools.partial(jax.jit, static_argnums=(0, 6))
def _generate(graphdef, params, ids, length, key, decoding, end):
    model = nnx.merge(graphdef, params)
    return generate(
        model, model.decode_blocks(), ids, length, key[None], max_new=SAMPLED, end_tokens=(end,), decoding=decoding
    )  # fmt: skip


def generated(policy: Policy, ids: list[int], key, limit: int, decoding: Decoding) -> tuple[list[int], np.ndarray]:
    """A response by the rollout's sampler: its tokens, the end token included, and their log-probabilities.

    A shorter response is the beginning of a longer one, so that one program does for every limit.
    """
    padded = np.zeros((1, READ), np.int32)
    padded[0, : len(ids)] = ids
    end = policy.tokenizer.eos_token_id
    out = _generate(policy.graphdef, policy.params, padded, np.array([len(ids)], np.int32), key, decoding, end)
    n = min(int(out.lengths[0]), limit)
    return np.asarray(out.tokens[0, :n]).tolist(), np.asarray(out.logp[0, :n])
