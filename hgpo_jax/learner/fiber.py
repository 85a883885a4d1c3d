"""FiberPO: a surrogate whose ratio is bounded by what the whole response has moved, and then token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.learner import losses


def fiber_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    budget_up: float = 0.12,
    budget_down: float = 0.05,
    token_clip: float = 0.04,
) -> tuple[jax.Array, losses.Stats]:
    """Computes the FiberPO loss (arXiv 2603.08239, eq. 6-16 and 31-33): `-G A` of each token; each response counts once.

    With z the log-ratios of a response's T tokens, up = mean max(z, 0), down = mean max(-z, 0), and S_own the one of the two
    on z's side, S_other the other:
        base     = rollback(up; budget_up, T) - rollback(down; budget_down, T)
        residual = clip(z - sign(z) S_own, -token_clip, token_clip) - clip(-sign(z) S_other, -token_clip, token_clip)
        G        = exp(base + residual)
    G is the ratio itself where nothing is clipped. The gradient flows through all of it, with sign(0) = 1. The paper has
    neither experiments nor defaults; the values here are those of its figures.

    Arguments as in `losses.policy_loss`. The statistics count tokens, with plain ratios; `fiber_rollback` is the share of
    responses beyond a budget.
    """
    mask = mask.astype(bool)
    z = losses.log_ratios(logp, old_logp, mask)
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    count = jnp.maximum(lengths, 1)
    up, down = (jnp.sum(jnp.maximum(side, 0), axis=-1, keepdims=True) / count for side in (z, -z))
    rises = z >= 0
    sign = jnp.where(rises, 1.0, -1.0)
    own, other = jnp.where(rises, up, down), jnp.where(rises, down, up)
    base = rollback(up, budget_up, count) - rollback(down, budget_down, count)
    residual = jnp.clip(z - sign * own, -token_clip, token_clip) - jnp.clip(-sign * other, -token_clip, token_clip)
    gated = jnp.exp(base + residual)
    values = jnp.where(mask, -gated * losses.by_token(advantages), 0.0)
    beyond = ((up > budget_up) | (down > budget_down)).astype(jnp.float32)
    stats = losses.ratio_stats(z, mask) | {"fiber_rollback": losses.reduce_tokens(beyond, lengths > 0, "token-mean")}
    return losses.with_loss(losses.reduce_tokens(values, mask, "seq-mean-token-mean"), stats)


def rollback(x: jax.Array, budget: float, tokens: jax.Array) -> jax.Array:
    """Returns x up to the budget; beyond it, x falls to 0 with slope -tokens, and stays there."""
    size = jnp.abs(x)
    return jnp.where(size <= budget, x, jnp.sign(x) * jnp.maximum((tokens + 1) * budget - tokens * size, 0))
