"""The critic of PPO and HiPER: a Qwen2.5 of the policy's size whose output is the value of the coming turn.

It reads the prompt as the policy does, up to the last token before the response. Its body starts as a copy of the policy and
its head at zero. PPO has one value per turn: a response is one action here (Schulman et al., 2016, arXiv 1506.02438). HiPER
has three, for the switch, subgoal and action parts of an answer. The last one is read after the subgoal, at the token before
the action, the others at the end of the prompt (as in github.com/JonP07/HiPER-agent).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hgpo_jax.learner import losses
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.objective import Loss
from hgpo_jax.policy import ModelConfig, network
from hgpo_jax.rollout.episodes import Episodes

Values = Callable[[dict[str, Any], TrainingBatch], jax.Array]


def initialize_critic(params: dict[str, Any], heads: tuple[int, ...] = ()) -> dict[str, Any]:
    """Makes the critic's parameters from the policy's: {"body": its blocks without the language-model head, "value": the head}.

    heads: (3,) for three in one array. All of it is trained, so its dtype is float32; with adapters the policy's may differ.
    """
    body = {name: part for name, part in params.items() if name != "lm_head"}
    width = params["embed_tokens"]["embedding"].shape[1]
    head = {"kernel": jnp.zeros((*heads, width), jnp.float32), "bias": jnp.zeros(heads, jnp.float32)}
    return {"body": jax.tree.map(lambda a: jnp.array(a, jnp.float32, copy=True), body), "value": head}


def make_values(config: ModelConfig, remat: str = "none", plan_words: int = 0) -> Values:
    """Builds `values(params, batch) -> f32[N]`, the discounted return that the critic expects from each decision on.

    plan_words: for three heads, the number of words of the switch and subgoal parts; `values` are then f32[N, 3].
    """
    graphdef = network(dataclasses.replace(config, tie_word_embeddings=True))  # tied: a body without a head of its own

    def values(params: dict[str, Any], batch: TrainingBatch) -> jax.Array:
        model = nnx.merge(graphdef, params["body"])
        layout = batch.sequences()
        hidden = model.hidden(layout.tokens, layout.predict_slots, segment_start=layout.segment_start, remat=remat)
        # A response's first token is predicted at the end of the prompt; one that ends too early has no token after its plan.
        where = layout.sequence, layout.offset
        if plan_words:
            last = jnp.maximum(batch.response_lengths - 1, 0)[:, None]
            where = where[0][:, None], where[1][:, None] + jnp.minimum(jnp.array([0, 0, plan_words]), last)
        hidden = hidden.at[where].get(mode="fill", fill_value=0)
        head: dict[str, jax.Array] = params["value"]
        predicted: jax.Array = (hidden.astype(jnp.float32) * head["kernel"]).sum(-1) + head["bias"]
        return predicted

    return values


def values_of_episodes(
    predict: Callable[[TrainingBatch, jax.Array, jax.Array], jax.Array],
    batch: TrainingBatch,
    e: Episodes,
    order: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values of the decisions f32[N, ...], and after the last one of each truncated episode f32[B, ...], else 0.

    If such an episode has no final prompt, like an agent's, its last prompt replaces it.
    order, count: as for `predict`, of the decisions.
    """
    B, T = e.mask.shape
    has_prompt = e.final_prompt_lengths > 0
    finals = TrainingBatch(
        prompts=e.final_prompts,
        prompt_lengths=e.final_prompt_lengths,
        response_lengths=has_prompt.astype(jnp.int32),
        responses=jnp.zeros((B, *e.responses.shape[2:]), e.responses.dtype),
        old_logp=jnp.zeros((B, *e.logp.shape[2:])),
        advantages=jnp.zeros(B),
    )
    numbers = B * T + jnp.arange(B)
    if batch.chain is not None:
        finals = finals.replace(chain=numbers)  # each on its own
    batch = batch.replace(agents=None, allowed=None)  # the policy's alone
    # In front, because entries that count come first.
    order = jnp.concatenate([numbers, order])
    values = predict(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, finals), order, B + count)
    values, after = values[: B * T], values[B * T :]
    by_turn = values.reshape(B, T, *values.shape[1:])
    last = by_turn[jnp.arange(B), jnp.maximum(e.mask.sum(1) - 1, 0)]
    like = (B,) + (1,) * (after.ndim - 1)
    after = jnp.where(has_prompt.reshape(like), after, last)
    return values, jnp.where(e.truncated.reshape(like), after, 0.0)


def targets(batch: TrainingBatch) -> jax.Array:
    """Marks the values that learn, bool[N], or with three heads bool[N, 3]."""
    happened = batch.response_lengths > 0
    return happened if batch.has_target is None else happened[:, None] & batch.has_target


def make_value_loss(values: Values, clip: float) -> Loss:
    """Builds PPO's clipped value loss as numerators: `loss(params, None, batch)`; the batch holds `values` and `returns`."""

    def loss(params: dict[str, Any], _: object, batch: TrainingBatch) -> tuple[jax.Array, losses.Stats, jax.Array]:
        counts = targets(batch)
        predicted = values(params, batch)
        assert batch.values is not None and batch.returns is not None
        _, stats = losses.value_loss(predicted, batch.values, batch.returns, counts, clip=clip)
        total = stats.pop("loss")
        decisions = (batch.response_lengths > 0).sum()  # over which gradients are means, too, whatever the number of heads
        stats = {"loss": (total[0], decisions), "value_clip_fraction": stats["value_clip_fraction"]}
        error = jnp.where(counts, jnp.square(predicted - batch.returns), 0.0)
        stats["squared_error"] = (error.sum(), total[1])
        return total[0], stats, jnp.float32(0)

    return loss
