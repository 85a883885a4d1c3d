"""Environments, one folder each. They know nothing of hgpo_jax."""
