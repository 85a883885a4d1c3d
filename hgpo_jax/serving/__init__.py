"""A policy behind OpenAI's chat API: any program that speaks it can play with the policy (`python -m hgpo_jax.serve`)."""
