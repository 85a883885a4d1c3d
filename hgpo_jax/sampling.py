"""Sampling: one prefill, then a compiled decode loop that ends when every row has ended.

Each row has its own random key, folded with the position of the token, so that what a row samples depends neither on its
batch mates nor on the mesh. Log-probabilities are those of the distribution that was sampled from.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from hgpo_jax.mesh import constrain, largest_count


@chex.dataclass(frozen=True)
class Responses:
    """tokens i32[B, R] (0 after the end), logp f32[B, R] (0 after the end), lengths i32[B] (the end token included)."""

    tokens: chex.Array
    logp: chex.Array
    lengths: chex.Array


def sample_token(logits, keys, temperature):
    """One token per row.

    Args:
      logits: f32[B, V].
      keys: a random key per row.
      temperature: scalar; 0 takes the most likely token.

    Returns: (tokens i32[B], log-probabilities f32[B] at this temperature, at 1 when it is 0).
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled)
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
    return token, pick(jax.nn.log_softmax(scaled), token)


def pick(logps, tokens):
    """The entries of f32[..., V] at tokens i32[...], f32[...].

    A sum under a mask, because XLA's partitioner aborts on a gather from an array whose rows and vocabulary are both
    split inside a shard_map over a third mesh axis.
    """
    return jnp.where(jnp.arange(logps.shape[-1]) == tokens[..., None], logps, 0.0).sum(-1)


def generate(model, prompts, lengths, keys, *, max_new: int, end: int, temperature) -> Responses:
    """Samples a response to each prompt.

    Args:
      model: a bound `Qwen2`.
      prompts: i32[B, P], right-padded.
      lengths: i32[B], tokens of each prompt, at least 1.
      keys: a random key per row.
      max_new: R, the longest response.
      end: the token that ends a response.
      temperature: scalar.
    """
    rows, width = prompts.shape
    hidden, cache = model.prefill(prompts, lengths - 1, width + max_new - 1)

    def draw(hidden, i):
        logits = constrain(model.logits(hidden), "batch", "vocab_of_rows")
        return sample_token(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i), temperature)

    token, logp = draw(hidden, 0)
    tokens = jnp.zeros((rows, max_new), jnp.int32).at[:, 0].set(token)
    logps = jnp.zeros((rows, max_new), jnp.float32).at[:, 0].set(logp)
    ended = token == end
    count = jnp.ones(rows, jnp.int32)

    def unfinished(carry):
        return (carry[0] < max_new) & (carry[-1] > 0)

    def step(carry):
        i, token, cache, tokens, logps, count, ended, _ = carry
        hidden, cache = model.decode(token, lengths + i - 1, cache)
        token, logp = draw(hidden, i)
        token, logp = jnp.where(ended, 0, token), jnp.where(ended, 0.0, logp)
        tokens, logps = tokens.at[:, i].set(token), logps.at[:, i].set(logp)
        count, ended = count + ~ended, ended | (token == end)
        return i + 1, token, cache, tokens, logps, count, ended, largest_count((~ended).sum())

    carry = (jnp.int32(1), token, cache, tokens, logps, count, ended, largest_count((~ended).sum()))
    _, _, _, tokens, logps, count, _, _ = jax.lax.while_loop(unfinished, step, carry)
    return Responses(tokens=tokens, logp=logps, lengths=count)
