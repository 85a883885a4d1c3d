"""Environments, one folder each. They need nothing of hgpo_jax outside this folder.

The table of `hgpo_jax/rollout/environments.py` holds the names for `env.name=`.
"""
