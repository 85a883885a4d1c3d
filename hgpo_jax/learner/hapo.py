"""HAPO: PPO's clipped surrogate, with clips and advantages that follow how uncertain the policy is at each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.learner import losses

PIVOT = 0.8  # quantile of the log-entropies from which on a token counts as uncertain
LEAST_ENTROPY = 1e-8  # ours: what rounds to 0 has no logarithm


def hapo_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    entropy: jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 10.0,
    clip_slope: float = 1.0,
    advantage_slope: float = 1.0,
    as_released: bool = False,
    aggregate: str = "token-mean",
) -> tuple[jax.Array, losses.Stats]:
    """Computes the HAPO loss: the clipped surrogate with, for each token of relative entropy h from -1 to 1,

        h <= 0: clip_low (1 - clip_slope h); A (1 + advantage_slope h) inside the zone, and A outside;
        h > 0: clip_high (1 + clip_slope h); A (1 + advantage_slope h) outside the zone, and A inside.

    The zone is `1 - low / 2 < r < 1 + high / 2`, with the token's own clips. h is log H less its 0.8-quantile (nearest) over
    the tokens of the micro-batch, as in the authors' code; what is above 0 is divided by the largest, what is below by the
    smallest, in absolute value. No gradient flows through it.

    entropy: f32[N, R]; the rest as in `losses.policy_loss`.
    as_released: |h| in place of h. The authors' code (github.com/starriver030515/HAPO), of which the results are, divides
        by a negative number below the quantile; its text, and branches that this makes idle, mean the default.
    """
    mask = mask.astype(bool)
    h = relative_entropy(jax.lax.stop_gradient(entropy), mask)
    h = jnp.abs(h) if as_released else h
    low = clip_low * (1 - clip_slope * jnp.minimum(h, 0))
    high = clip_high * (1 + clip_slope * jnp.maximum(h, 0))
    log_ratio = losses.log_ratios(logp, old_logp, mask)
    ratio = losses.ratios(log_ratio)
    inside = (1 - low / 2 < ratio) & (ratio < 1 + high / 2)
    shaped = losses.by_token(advantages) * jnp.where(inside == (h <= 0), 1 + advantage_slope * h, 1.0)
    loss, stats = losses.clipped_surrogate(log_ratio, shaped, mask, low, high, dual_clip)
    return losses.with_loss(losses.reduce_tokens(loss, mask, aggregate), stats)


def relative_entropy(entropy: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns h of `hapo_loss`, f32[N, R] from -1 to 1, 0 outside the mask."""
    logs = jnp.log(jnp.maximum(entropy, LEAST_ENTROPY))
    ordered = jnp.sort(jnp.where(mask, logs, jnp.inf).ravel())
    place = jnp.round(PIVOT * jnp.maximum(mask.sum() - 1, 0)).astype(jnp.int32)
    h = jnp.where(mask, logs - ordered[place], 0.0)
    return h / jnp.where(h > 0, h.max(), jnp.maximum(-h.min(), LEAST_ENTROPY))
