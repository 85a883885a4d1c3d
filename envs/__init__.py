"""Environments, one folder each. They do not depend on hgpo_jax.

The table of `hgpo_jax/rollout/environments.py` holds the names for `env.name=`.
"""
