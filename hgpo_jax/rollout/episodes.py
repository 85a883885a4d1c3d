"""Episodes: the one record that rollouts produce and everything after them reads, in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.advantages import state_ids
from hgpo_jax.errors import one_line
from hgpo_jax.files import atomic_write

# Field: kind of dtype, dimensions after [B, T]; None for [B] alone.
KINDS = {
    "prompts": ("i", 1), "prompt_lengths": ("i", 0), "responses": ("i", 1), "response_lengths": ("i", 0), "logp": ("f", 1),
    "observations": ("i", 1), "rewards": ("f", 0), "mask": ("b", 0), "invalid": ("b", 0), "states": ("i", 0),
    "next_states": ("i", 0), "actions": ("i", 0), "agents": ("i", 0), "groups": ("i", None), "success": ("b", None),
    "task": ("i", None),
}  # fmt: skip


class Episodes(struct.PyTreeNode):
    """B episodes of at most T turns, trajectory-major. Entries of turns that did not happen are 0.

    A prompt has P slots, a response R, an observation O; tokens are the ids that were sampled and are trained on.
    """

    prompts: jax.Array  # i32[B, T, P], right-padded
    prompt_lengths: jax.Array  # i32[B, T]
    responses: jax.Array  # i32[B, T, R], right-padded
    response_lengths: jax.Array  # i32[B, T]
    logp: jax.Array  # f32[B, T, R], of the sampled tokens under the sampling distribution
    observations: jax.Array  # i32[B, T, O], what the policy saw before acting: the anchor of the step groups
    rewards: jax.Array  # f32[B, T], the environment's
    mask: jax.Array  # bool[B, T], turns that happened; a prefix of every row
    invalid: jax.Array  # bool[B, T], turns whose response was no admissible action
    states: jax.Array  # i32[B, T], equal exactly where observations are equal
    next_states: jax.Array  # i32[B, T], the same of what was seen after the action, the last one included
    actions: jax.Array  # i32[B, T], equal exactly where the actions are: what was found in the responses, or all of these
    agents: jax.Array  # i32[B, T], the role that acted, an index into the environment's `roles`
    groups: jax.Array  # i32[B], prompt group
    success: jax.Array  # bool[B]
    task: jax.Array  # i32[B], task type

    @classmethod
    def zeros(cls, batch: int, max_turns: int, prompt_slots: int, response_slots: int) -> Episodes:
        """Episodes of NumPy arrays in which nothing happened, with observations of one slot."""
        width = {"prompts": prompt_slots, "responses": response_slots, "logp": response_slots, "observations": 1}
        dtype = {"i": np.int32, "f": np.float32, "b": bool}
        arrays: dict[str, Any] = {}
        for name, (kind, dimensions) in KINDS.items():
            shape = (batch,) if dimensions is None else (batch, max_turns, *(width[name] for _ in range(dimensions)))
            arrays[name] = np.zeros(shape, dtype[kind])
        return cls(**arrays)

    def save(self, path: str | Path) -> None:
        """Writes a compressed .npz, atomically."""
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in vars(self).items()}
        with atomic_write(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Episodes:
        """Reads what `save` wrote. Turns from before there were `actions` have whole responses, without `agents` one role.

        Raises ValueError for another file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if "agents" not in arrays:
                arrays["agents"] = np.zeros(arrays["mask"].shape, np.int32)
            if "actions" not in arrays:
                arrays["actions"] = np.asarray(action_ids(*(arrays[n] for n in ("responses", "response_lengths", "mask"))))
            episodes = cls(**arrays)
            episodes._check()
            return episodes
        except Exception as error:  # zip, zlib and NumPy have many ways to say that a file is damaged
            raise ValueError(one_line(f"{path}: not a dump of Episodes: {error}")) from None

    def _check(self) -> None:
        """Raises ValueError for arrays that no rollout makes."""
        B, T = self.mask.shape
        for name, (kind, width) in KINDS.items():
            array, shape = getattr(self, name), ((B,) if width is None else (B, T))
            if array.dtype.kind != kind or array.shape[:2] != shape or array.ndim != len(shape) + (width or 0):
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)} beside a mask of {[B, T]}")
            if kind == "i" and array.size and array.min() < 0:
                raise ValueError(f"{name} has {array.min()}, a number below 0")
        for name in ("prompt", "response"):
            lengths, slots = getattr(self, f"{name}_lengths"), getattr(self, f"{name}s").shape[-1]
            if lengths.size and lengths.max() > slots:
                raise ValueError(f"{name}_lengths has {lengths.max()}, more than {name}s has slots")
        if (self.mask[:, 1:] > self.mask[:, :-1]).any():
            raise ValueError("mask has a turn after one that did not happen")


def action_ids(responses, lengths, mask) -> jax.Array:
    """Numbers i32[B, T] of responses i32[B, T, R] of `lengths` i32[B, T], equal exactly where these are; 0 outside the mask."""
    tokens = jnp.where(jnp.arange(responses.shape[-1]) < lengths[..., None], responses, 0)
    ids = state_ids(jnp.concatenate([lengths[..., None], tokens], axis=-1), mask)
    return jnp.where(mask, ids, 0)
