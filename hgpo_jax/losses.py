"""The losses under a short name, for user programs: `from hgpo_jax.losses import policy_loss, kl`."""

from hgpo_jax.learner.losses import kl, policy_loss

__all__ = ["kl", "policy_loss"]
