"""Measurements, each a ratio to a limit or a peer of the same run: `python -m hgpo_jax.bench NAME`."""
