"""hgpo_jax: group-based reinforcement learning for LLM agents, native to JAX.

`hgpo_jax.load_config`, `fit`, `evaluate_policy`, `generate` and the other names of `hgpo_jax.api` are the Python API; they are
imported on first use. Sub-packages are imported by name (`from hgpo_jax import advantages`), so that each can be used alone.

Shapes are written in these letters everywhere, in docstrings, comments and names (`q_BSHE` is a [B, S, H, E] array):

    Episodes
      B  batch: the episodes of a rollout; inside the network, its input rows
      T  turns of an episode
      P  token slots of a prompt
      R  token slots of a response
      O  token slots of an observation
      A  token slots of an action
      K  history length: past turns in a prompt, and the deepest level of HGPO's groups
      L  levels of groups, in the estimators (K + 1 of them in HGPO)

    Learning
      N  decisions to learn from (one prompt and its response each), B x T of an iteration
      M  rows that the network processes at a time: sequences of a micro-batch, prompts of a decode batch
      S  token slots of a sequence
      Q  slots of a sequence whose next token is predicted

    Network
      V  vocabulary            H  query heads
      D  hidden width          G  key-value heads
      F  feed-forward width    E  width of a head
      C  slots of the key-value cache
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hgpo_jax.api import (
        Config,
        ConfigError,
        Policy,
        Run,
        RunError,
        estimate,
        evaluate_policy,
        fit,
        generate,
        load_config,
        load_policy,
        load_run,
    )

__all__ = [
    "Config",
    "ConfigError",
    "Policy",
    "Run",
    "RunError",
    "estimate",
    "evaluate_policy",
    "fit",
    "generate",
    "load_config",
    "load_policy",
    "load_run",
]

# Only tokenizers and configs of transformers are used. PyTorch is deliberately absent, so its warning is silenced.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    """Imports a name of the API on first use, which takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hgpo_jax.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
