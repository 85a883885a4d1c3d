"""Episodes: the one record that rollouts produce and everything after them reads, in memory and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.advantages import state_ids
from hgpo_jax.utils.errors import one_line
from hgpo_jax.utils.files import atomic_write

# Field: kind of dtype, dimensions.
KINDS = {
    "prompts": ("i", "BTP"),
    "prompt_lengths": ("i", "BT"),
    "responses": ("i", "BTR"),
    "response_lengths": ("i", "BT"),
    "logp": ("f", "BTR"),
    "observations": ("i", "BTO"),
    "rewards": ("f", "BT"),
    "mask": ("b", "BT"),
    "invalid": ("b", "BT"),
    "states": ("i", "BT"),
    "next_states": ("i", "BT"),
    "actions": ("i", "BT"),
    "agents": ("i", "BT"),
    "groups": ("i", "B"),
    "success": ("b", "B"),
    "judged": ("b", "B"),
    "task": ("i", "B"),
    "truncated": ("b", "B"),
    "final_prompts": ("i", "BP"),
    "final_prompt_lengths": ("i", "B"),
}
# None in episodes without them.
OPTIONAL_KINDS = {"signals": ("f", "BTS"), "allowed": ("u", "BTRW"), "pictures": ("u", "BTXYC"), "finished": ("b", "BT")}


class Episodes(struct.PyTreeNode):
    """B episodes of at most T turns, trajectory-major. Entries of turns that did not happen are 0.

    A prompt has P slots, a response R, an observation O; there are S signals, and X x Y pixels of 3 colors. Tokens are the ids
    that were sampled and are trained on.
    """

    prompts: jax.Array  # i32[B, T, P], right-padded
    prompt_lengths: jax.Array  # i32[B, T]
    responses: jax.Array  # i32[B, T, R], right-padded
    response_lengths: jax.Array  # i32[B, T]
    logp: jax.Array  # f32[B, T, R], log-probabilities of the sampled tokens under the sampling distribution
    observations: jax.Array  # i32[B, T, O], observations before acting: the anchors of the step groups
    rewards: jax.Array  # f32[B, T], the environment's
    mask: jax.Array  # bool[B, T], turns that happened; a prefix of every row
    invalid: jax.Array  # bool[B, T], turns whose response was no admissible action
    states: jax.Array  # i32[B, T], equal exactly if the observations are equal
    next_states: jax.Array  # i32[B, T], the same for the observation after the action, including the last one
    actions: jax.Array  # i32[B, T], equal exactly if the actions are: those parsed from the responses, or whole responses
    agents: jax.Array  # i32[B, T], the role that acted, an index into the environment's `roles`
    groups: jax.Array  # i32[B], prompt group
    success: jax.Array  # bool[B], False if unknown
    judged: jax.Array  # bool[B], whether the environment reported success or failure
    task: jax.Array  # i32[B], task type
    truncated: jax.Array  # bool[B], a time limit ended the episode, not the task itself
    final_prompts: jax.Array  # i32[B, P], the next prompt of a truncated episode, right-padded
    final_prompt_lengths: jax.Array  # i32[B], 0 if there is none
    allowed: jax.Array | None = None  # u32[B, T, R, W], what each token could be (`sampling/constraint.py`); None: anything
    pictures: jax.Array | None = None  # u8[B, T, X, Y, C], what the prompts show of the observations; None without any
    finished: jax.Array | None = None  # bool[B, T], responses that ended by themselves; None: those that have an end token
    signals: jax.Array | None = None  # f32[B, T, S], the signals beside the reward (`rollout/signals.py`); None without any

    @classmethod
    def zeros(
        cls,
        batch: int,
        max_turns: int,
        prompt_slots: int,
        response_slots: int,
        signals: int = 0,
        words: int = 0,
        picture: tuple[int, int] | None = None,
        finished: bool = False,
    ) -> Episodes:
        """Makes episodes of NumPy arrays in which nothing happened, with observations of one slot.

        signals, words: S and W, 0 for episodes without `signals` or `allowed`. picture: X and Y; None without `pictures`.
        finished: whether there is an array of this name.
        """
        size = {"B": batch, "T": max_turns, "P": prompt_slots, "R": response_slots, "O": 1, "S": signals, "W": words}
        size |= dict(zip("XYC", (*picture, 3), strict=True)) if picture else {}
        dtype = {"i": np.int32, "f": np.float32, "b": bool, "u": np.uint32}
        arrays: dict[str, Any] = {
            name: np.zeros([size[dimension] for dimension in shape], np.uint8 if name == "pictures" else dtype[kind])
            for name, (kind, shape) in (KINDS | OPTIONAL_KINDS).items()
            if name in KINDS or (finished if name == "finished" else size.get(shape[-1]))
        }
        return cls(**arrays)

    def arrays(self) -> dict[str, Any]:
        """Returns the fields by name, without one that these episodes lack."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def signals_by_name(self, names: Sequence[str]) -> dict[str, jax.Array]:
        """Returns the signals f32[B, T] of these episodes, whose names are in the order of their columns."""
        if self.signals is None:
            return {}
        return {name: self.signals[..., index] for index, name in zip(range(self.signals.shape[-1]), names, strict=True)}

    def leave_out(self, episode: int) -> None:
        """Empties an episode of NumPy arrays; only its prompt group stays."""
        for name, values in self.arrays().items():
            if name != "groups":
                values[episode] = 0

    def save(self, path: str | Path) -> None:
        """Writes a compressed .npz, atomically."""
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in self.arrays().items()}
        with atomic_write(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Episodes:
        """Reads a file written by `save`. In files from before `actions` existed turns have whole responses, without `agents`
        one role; without `truncated` no episode is truncated, and without `judged` the success of all is known.

        Raises ValueError for any other file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if "agents" not in arrays:
                arrays["agents"] = np.zeros(arrays["mask"].shape, np.int32)
            if "actions" not in arrays:
                arrays["actions"] = np.asarray(action_ids(*(arrays[n] for n in ("responses", "response_lengths", "mask"))))
            if "judged" not in arrays:
                arrays["judged"] = arrays["mask"][:, 0]
            if "truncated" not in arrays:
                none = cls.zeros(len(arrays["mask"]), 0, 0, 0)
                arrays |= {name: getattr(none, name) for name in ("truncated", "final_prompts", "final_prompt_lengths")}
            episodes = cls(**arrays)
            episodes._check()
            return episodes
        except Exception as error:  # zip, zlib and NumPy raise many errors for a damaged file
            raise ValueError(one_line(f"{path}: not a dump of Episodes: {error}")) from None

    def _check(self) -> None:
        """Raises ValueError for arrays that no rollout produces."""
        B, T = self.mask.shape
        for name, array in self.arrays().items():
            kind, dimensions = (KINDS | OPTIONAL_KINDS)[name]
            shape = {"B": (B,), "BT": (B, T)}[dimensions.rstrip("PROSWXYC")]
            if array.dtype.kind != kind or array.shape[: len(shape)] != shape or array.ndim != len(dimensions):
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)} beside a mask of {[B, T]}")
            if kind == "i" and array.size and array.min() < 0:
                raise ValueError(f"{name} has {array.min()}, a number below 0")
        for name in ("prompt", "response", "final_prompt"):
            lengths, slots = getattr(self, f"{name}_lengths"), getattr(self, f"{name}s").shape[-1]
            if lengths.size and lengths.max() > slots:
                raise ValueError(f"{name}_lengths has {lengths.max()}, more than {name}s has slots")
        if (self.mask[:, 1:] > self.mask[:, :-1]).any():
            raise ValueError("mask has a turn after one that did not happen")


def action_ids(responses, lengths, mask) -> jax.Array:
    """Numbers responses i32[B, T, R] of `lengths` i32[B, T]: ids i32[B, T], equal exactly if these are; 0 outside the mask."""
    tokens = jnp.where(jnp.arange(responses.shape[-1]) < lengths[..., None], responses, 0)
    ids = state_ids(jnp.concatenate([lengths[..., None], tokens], axis=-1), mask)
    return jnp.where(mask, ids, 0)


def dumped(folder: str | Path) -> dict[int, Path]:
    """Returns iteration -> its dump in a run's folder, ascending."""
    files = sorted((Path(folder) / "episodes").glob("iteration-*.npz"))
    return {int(file.stem.split("-")[1]): file for file in files if file.stem.split("-")[1].isdigit()}
