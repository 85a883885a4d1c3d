"""Sampling of tokens from a policy: prefill and decode, batches and slots."""
