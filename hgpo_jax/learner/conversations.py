"""Conversations: turns whose prompts begin with an earlier turn's prompt and response, so that one forward pass serves all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.rollout.episodes import Episodes


def chains(e: Episodes) -> jax.Array:
    """Finds the turns that extend each other, by ids: the number of the chain of each turn, i32[B, T].

    The number is that of the chain's first turn in B x T. A turn follows the longest turn before it that its prompt begins
    with; where a conversation branches, the first turn continues the chain, and every other one begins its own. A turn that
    extends none, for instance because its prompt was cut, begins its own, too.
    """
    B, T, P = e.prompts.shape
    lengths = e.prompt_lengths + e.response_lengths
    turns = jnp.arange(T)

    def extended_by(turn: jax.Array) -> jax.Array:
        """Marks the turns whose prompts begin with the text of this one, bool[B, T]."""
        prompt, response, begin = e.prompts[:, turn], e.responses[:, turn], e.prompt_lengths[:, turn, None]
        at = jnp.arange(P) - begin
        answer = jnp.take_along_axis(response, jnp.clip(at, 0, response.shape[1] - 1), axis=1)
        text, length = jnp.where(at < 0, prompt, answer), lengths[:, turn, None]
        same = ((e.prompts == text[:, None]) | (jnp.arange(P) >= length[..., None])).all(-1)
        return same & (length <= e.prompt_lengths) & (turns > turn) & e.mask[:, turn, None] & e.mask

    extends = jnp.moveaxis(jax.lax.map(extended_by, turns), 0, 2)  # bool[B, T, T]: whether a turn extends another
    longest = jnp.where(extends.any(2), jnp.argmax(jnp.where(extends, lengths[:, None], 0), axis=2), -1)
    branches = ((longest[:, :, None] == longest[:, None]) & (turns < turns[:, None])).any(2)
    begin = jnp.where((longest >= 0) & ~branches, longest, turns)
    for _ in range(T.bit_length()):  # each time twice as far back
        begin = jnp.take_along_axis(begin, begin, axis=1)
    return jnp.arange(B)[:, None] * T + begin


def statistics(batch: TrainingBatch) -> dict[str, jax.Array]:
    """Describes the chains of the decisions that happened: their mean number of decisions, and `token_share`.

    This is the share of the decisions' tokens that is left to compute when each chain is computed once.
    """
    assert batch.chain is not None
    happened = batch.response_lengths > 0
    lengths = jnp.where(happened, batch.prompt_lengths + batch.response_lengths, 0)
    longest = jnp.zeros_like(lengths).at[batch.chain].max(lengths)
    return {
        "conversation/turns": happened.sum() / jnp.maximum((longest > 0).sum(), 1),
        "conversation/token_share": longest.sum() / jnp.maximum(lengths.sum(), 1),
    }
