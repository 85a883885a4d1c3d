"""The losses and their parts under a short name, for user programs: `from hgpo_jax.losses import policy_loss, kl`."""

from hgpo_jax.learner.losses import (
    by_token,
    clipped_surrogate,
    kl,
    log_ratios,
    policy_loss,
    ratio_stats,
    reduce_tokens,
    with_loss,
)

__all__ = ["by_token", "clipped_surrogate", "kl", "log_ratios", "policy_loss", "ratio_stats", "reduce_tokens", "with_loss"]
