"""Environments, one folder each. They know nothing of hgpo_jax.

The names that `env.name=` takes stand in the table of `hgpo_jax/rollout/environments.py`.
"""
