"""hgpo_jax: group-based reinforcement learning for LLM agents, native to JAX.

Sub-packages are imported by name (`from hgpo_jax import advantages`), so that one of them can be used alone.
"""

import os

# transformers serves tokenizers and configs here; that PyTorch is absent is meant, not worth a warning.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
