"""Episodes: the one record that rollouts produce and everything after them reads, in memory and on disk."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import chex
import numpy as np


@chex.dataclass(frozen=True)
class Episodes:
    """B episodes of at most T turns, trajectory-major. Entries of turns that did not happen are 0.

    A prompt has P slots, a response R, an observation W; tokens are the ids that were sampled and are trained on.
    """

    prompts: chex.Array  # i32[B, T, P], right-padded
    prompt_lengths: chex.Array  # i32[B, T]
    responses: chex.Array  # i32[B, T, R], right-padded
    response_lengths: chex.Array  # i32[B, T]
    logp: chex.Array  # f32[B, T, R], of the sampled tokens under the sampling distribution
    observations: chex.Array  # i32[B, T, W], what the policy saw before acting: the anchor of the step groups
    rewards: chex.Array  # f32[B, T], the environment's
    mask: chex.Array  # bool[B, T], turns that happened; a prefix of every row
    invalid: chex.Array  # bool[B, T], turns whose response was no admissible action
    states: chex.Array  # i32[B, T], equal exactly where observations are equal
    next_states: chex.Array  # i32[B, T], the same of what was seen after the action, the last one included
    groups: chex.Array  # i32[B], prompt group
    success: chex.Array  # bool[B]
    task: chex.Array  # i32[B], task type

    def save(self, path: str | Path) -> None:
        """Writes a compressed .npz, whole or not at all."""
        path = Path(path)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez_compressed(file, **{name: np.asarray(value) for name, value in self.items()})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Episodes:
        """Reads what `save` wrote. Raises ValueError for another file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(**{name: file[name] for name in file.files})
        except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a dump of Episodes: {error}") from None
