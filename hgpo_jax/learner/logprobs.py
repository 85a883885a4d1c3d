"""Log-probability and entropy of each response token, in the update and wherever else a policy reads decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.policy import ModelConfig, lora, network
from hgpo_jax.policy.pictures import see
from hgpo_jax.policy.transformer import Qwen2
from hgpo_jax.policy.vocabulary import gather_logprobs
from hgpo_jax.sampling.constraint import restrict

Two = tuple[jax.Array, jax.Array]
MAX_LOGITS = 2**26  # 256 MB in float32, over the devices of fsdp and tensor together


def token_logprobs(
    model: Qwen2, batch: TrainingBatch, *, temperature: float = 1.0, remat: str = "none", max_logits: int = MAX_LOGITS
) -> Two:
    """Computes log-probability and entropy of each response token: (f32[N, R], f32[N, R]), 0 beyond a response's end.

    Both are of the distribution over the tokens that could be sampled: those that the model may write and, where decoding was
    constrained, the allowed ones (`batch.allowed`).

    temperature: of the distribution, as in sampling.
    max_logits: logits to hold at a time, over the devices of fsdp and tensor together; if the predictions need more, they are
    computed in chunks, and again in the backward pass. All logits together would be by far the largest array of an update
    (4,096 tokens of a vocabulary of 151,936 are 2.5 GB), and are never needed at once.
    """
    layout = batch.sequences()
    index = layout.response_index(batch.responses.shape[1], batch.response_lengths)
    pictures = None if batch.pictures is None else see(model, batch.pictures, remat)
    hidden = model.hidden(layout.tokens, layout.predict_slots, layout.segment_start, remat, pictures)
    M, Q = layout.predict_slots.shape
    targets = jnp.zeros((M, Q), jnp.int32).at[index].set(batch.responses, mode="drop")
    chosen: tuple[jax.Array, ...] = hidden, targets
    if batch.allowed is not None:
        words = batch.allowed.shape[-1]
        chosen += (jnp.zeros((M, Q, words), jnp.uint32).at[index].set(batch.allowed, mode="drop"),)

    def logprobs_of_chunk(model: Qwen2, hidden: jax.Array, targets: jax.Array, allowed: jax.Array | None = None) -> Two:
        logps = jax.nn.log_softmax(restrict(model.logits(hidden) / temperature, allowed, model.c.unwritten))
        return gather_logprobs(logps, targets), -(jnp.exp(logps) * logps).sum(-1)

    width = max(1, min(Q, max_logits // (M * model.c.vocab_size)))  # predictions of each sequence at a time
    if width == Q:
        out = logprobs_of_chunk(model, *chosen)
    else:
        chunks = -(-Q // width)

        def split(a: jax.Array) -> jax.Array:
            a = jnp.pad(a, ((0, 0), (0, chunks * width - Q), *((0, 0),) * (a.ndim - 2)))
            return jnp.moveaxis(a.reshape(M, chunks, width, *a.shape[2:]), 1, 0)

        graphdef, weights = nnx.split(model)
        body = jax.checkpoint(lambda weights, *inputs: logprobs_of_chunk(nnx.merge(graphdef, weights), *inputs))
        out = jax.lax.map(lambda inputs: body(weights, *inputs), tuple(split(a) for a in chosen))
        out = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(M, -1)[:, :Q], out)
    logp, entropy = (a.at[index].get(mode="fill", fill_value=0) for a in out)
    return logp, entropy


def make_logprobs(
    model: ModelConfig, temperature: float = 1.0, remat: str = "none"
) -> Callable[[Any, Any, TrainingBatch], Two]:
    """Builds `logprobs(params, reference, batch)`, `token_logprobs` of parameters.

    With `model.lora`, params are adapters and reference the weights that they are bound to; otherwise reference is not read.
    """
    graphdef = network(model)

    def logprobs(params: Any, reference: Any, batch: TrainingBatch) -> Two:
        if model.lora:
            params = lora.bind(reference, params)
        return token_logprobs(nnx.merge(graphdef, params), batch, temperature=temperature, remat=remat)

    return logprobs
