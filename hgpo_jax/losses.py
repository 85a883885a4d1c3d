"""The losses under a short name, for programs of one's own: `from hgpo_jax.losses import policy_loss, kl`."""

from hgpo_jax.learner.losses import kl, policy_loss

__all__ = ["kl", "policy_loss"]
