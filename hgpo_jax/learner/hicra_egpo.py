"""HICRA and EGPO: PPO's clipped surrogate, with advantages that favour the tokens of a plan, or an uncertain plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.learner import losses

ENTROPY_BOUND = 2.0  # EGPO's bonus is at most its weight times |A| / 2, so that the sum keeps A's sign


def hicra_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    planning: jax.Array,
    strength: float = 0.2,
    aggregate: str = "token-mean",
) -> tuple[jax.Array, losses.Stats]:
    """Computes the HICRA loss (arXiv 2509.03646): the advantage of a planning token is `A + strength |A|`.

    planning: bool[N, R], the tokens that plan; the rest as in `losses.policy_loss`, with its default clips. The paper finds
    planning tokens by phrases that it mines; here they are the parts of an answer before its action.
    """
    plain = losses.by_token(advantages)
    shaped = plain + strength * jnp.abs(plain) * planning
    return losses.policy_loss(logp, old_logp, shaped, mask, aggregate=aggregate)


def egpo_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    planning: jax.Array,
    entropy: jax.Array,
    bonus: float = 0.4,
    aggregate: str = "token-mean",
) -> tuple[jax.Array, losses.Stats]:
    """Computes the EGPO loss (arXiv 2508.05118): the advantage is `A + bonus min(H, |A| / 2)`.

    H is the mean entropy of the response's planning tokens, without gradient, and 0 where it has none. planning: bool[N, R],
    entropy: f32[N, R]; the rest as in `losses.policy_loss`, with its default clips.
    """
    planned = jnp.sum(planning, axis=-1, keepdims=True)
    mean = jnp.sum(jnp.where(planning, entropy, 0.0), axis=-1, keepdims=True) / jnp.maximum(planned, 1)
    plain = losses.by_token(advantages)
    shaped = plain + bonus * jnp.minimum(jax.lax.stop_gradient(mean), jnp.abs(plain) / ENTROPY_BOUND)
    return losses.policy_loss(logp, old_logp, shaped, mask, aggregate=aggregate)
