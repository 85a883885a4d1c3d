"""GBPO: the ratio is drawn to a target that the response's margin over the median of its group sets; nothing is clipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.learner import losses


def gbpo_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    margins: jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    softness: float = 1e-4,
    aggregate: str = "token-mean",
) -> tuple[jax.Array, losses.Stats]:
    """Computes the GBPO loss: `|r - target| |A|` of each token, where

        target = 1 - clip_low + (clip_low + clip_high) sigmoid(margin / softness),

    which is practically 1 + clip_high or 1 - clip_low with the default of the authors' scripts; for a margin of 0 their mean.

    margins: f32[N] or f32[N, R], how far the score of a response is above the median of its prompt group (`Estimate.margins`);
        from estimators without margins, their advantages. The rest as in `losses.policy_loss`.

    Formula and defaults are those of the authors' code (github.com/bounded-ratio-rl/bounded_ratio_rl). Its scripts take 5 to
    10 epochs over a batch, where an update here takes one. Margins of other estimators than `gbpo` are our extension.
    """
    mask = mask.astype(bool)
    log_ratio = losses.log_ratios(logp, old_logp, mask)
    ratio = losses.ratios(log_ratio)
    # As 2 sigmoid(x) - 1 = tanh(x / 2), whose 0 is exact: a ratio of 1 with a margin of 0 is at its target, with a gradient of
    # 0. That of jax's absolute value would be 1.
    tanh = jnp.tanh(losses.by_token(margins) / (2 * softness))
    move = (clip_high - clip_low) / 2 + (clip_low + clip_high) / 2 * tanh
    distance = ratio - 1 - move
    values = jnp.where(mask, distance * jnp.sign(distance) * jnp.abs(losses.by_token(advantages)), 0.0)
    return losses.with_loss(losses.reduce_tokens(values, mask, aggregate), losses.ratio_stats(log_ratio, mask))
