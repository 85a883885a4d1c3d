"""CISPO (MiniMax, 2025, arXiv 2506.13585), as a user would add it: this file is all that a run with it takes.

python -m hgpo_jax.train method=tests/advantages/cispo.py:compared learner.loss=tests/advantages/cispo.py:cispo
"""

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import Estimate
from hgpo_jax.losses import by_token, log_ratios, ratio_stats, reduce_tokens, with_loss


def compared(batch, *, invalid_penalty=0.1):
    """Each episode's score against the mean of its prompt group, over the group's standard deviation."""
    scores = batch.rewards.sum(1, keepdims=True) - invalid_penalty * batch.invalid
    group = (batch.groups[:, None] == batch.groups).astype(jnp.float32)
    mean = lambda values: (group @ (values * batch.mask).sum(1) / (group @ batch.mask.sum(1)))[:, None]  # noqa: E731
    centred = scores - mean(scores)
    std = jnp.sqrt(mean(centred**2))
    return Estimate(jnp.where(batch.mask, centred / (std + 1e-6), 0), scores)


def cispo(logp, old_logp, advantages, mask, *, weight_cap=2.0, aggregate="token-mean"):
    """Weights the log-probability of each token by its advantage and its ratio, which is bounded and has no gradient."""
    log_ratio = log_ratios(logp, old_logp, mask)
    weights = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), weight_cap))
    values = -weights * by_token(advantages) * jnp.where(mask, logp, 0.0)
    return with_loss(reduce_tokens(values, mask, aggregate), ratio_stats(log_ratio, mask))
