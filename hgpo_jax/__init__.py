"""hgpo_jax: group-based reinforcement learning for LLM agents, native to JAX.

Sub-packages are imported by name (`from hgpo_jax import advantages`), so that one of them can be used alone.
"""
