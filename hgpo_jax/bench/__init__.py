"""Benchmarks, each a ratio to a limit or a peer in the same run: `python -m hgpo_jax.bench NAME`."""
