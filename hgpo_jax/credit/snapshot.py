"""Snapshots: batches of episodes of one policy, with the true advantage of every step, in one file of NumPy arrays.

A snapshot holds M batches, each as large as an estimator sees at a time. All of them play the same tasks, in the same prompt
groups, so that the same situation occurs in several batches: what an estimator's errors have in common there is its bias.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from hgpo_jax.config import Section
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.files import atomic_write

FORMAT = 1

# Array: kind of dtype, dimensions; B episodes of all batches, at most T steps each, S signals, D directions of gradients.
KINDS = {
    "rewards": ("f", "BT"),
    "mask": ("b", "BT"),  # steps that happened, a prefix of every row
    "invalid": ("b", "BT"),  # steps whose response was no admissible action
    "states": ("i", "BT"),  # within a batch, equal exactly if the observations before the steps are
    "next_states": ("i", "BT"),  # the same of the observations after them
    "actions": ("i", "BT"),  # within a batch, equal exactly if the actions are
    "agents": ("i", "BT"),  # the role that acted
    "lengths": ("i", "BT"),  # tokens of the response
    "groups": ("i", "B"),  # prompt group; no two batches share a number
    "success": ("b", "B"),
    "task": ("i", "B"),  # the task's type
    "batch": ("i", "B"),  # from 0
    "situations": ("i", "BT"),  # equal exactly if the policy did the same in the same full state: one true advantage
    "true_advantages": ("f", "BT"),  # Q - V, in the unit of the rewards, without penalties
    "standard_error": ("f", "BT"),  # of each of them
    "true_values": ("f", "BT"),  # V of the state before the step
}
OPTIONAL_KINDS = {
    "signals": ("f", "BTS"),
    "gradients": ("f", "BTD"),  # of the log-probability of the step's response, in directions of each batch, up to a factor
}


class About(Section):
    """What a snapshot says of itself.

    run: a digest of what the policy learned with. setting: the name that snapshots are pooled under. level: the success that
    was asked for; success: that of the episodes. prompt_groups: of a batch. iteration: of the run that trained the policy.
    parameters: of the policy. signals: their names. gradient_seeds: of each batch's directions, as in `jax.random.key`. fields:
    those of the run that are not at their defaults.
    """

    format: int
    run: str
    setting: str
    level: float
    success: float
    seed: int
    iteration: int
    method: str
    environment: str
    gamma: float
    history_length: int
    prompt_groups: int
    batches: int
    continuations: int
    parameters: int
    signals: list[str]
    gradient_seeds: tuple[int, ...] = ()
    versions: dict[str, str]
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The arrays of `KINDS`, and of `OPTIONAL_KINDS` if there are any, by name."""

    arrays: dict[str, np.ndarray]
    about: About

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def batches(self) -> list[np.ndarray]:
        """Returns the rows of each batch."""
        return [np.flatnonzero(self["batch"] == batch) for batch in np.unique(self["batch"])]

    def save(self, file: Path) -> None:
        """Writes a compressed .npz, atomically."""
        arrays: dict[str, Any] = self.arrays | {"about": np.array(self.about.model_dump_json())}
        with atomic_write(file, "wb") as opened:
            np.savez_compressed(opened, **arrays)


def load(file: Path) -> Snapshot:
    """Reads a snapshot. Raises ConfigError for a file that is damaged, of another format, or none."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        about = json.loads(str(arrays.pop("about")))
        number = about["format"]
        if number == FORMAT:
            snapshot = Snapshot(arrays, About.model_validate(about))
            _check(snapshot)
            return snapshot
    except Exception as error:  # zip, zlib and NumPy raise many errors for a damaged file
        raise ConfigError(one_line(f"{file}: is no snapshot, or a damaged one: {error}")) from None
    raise ConfigError(f"{file}: is a snapshot of format {number!r:.20}, and this version reads {FORMAT}; make it again")


def load_all(folder: Path) -> dict[str, Snapshot]:
    """Reads all snapshots of a folder, by name. Raises ConfigError."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ConfigError(f"{folder}: holds no snapshots; `credit snapshot {folder}` makes some")
    return {file.stem: load(file) for file in files}


def _check(snapshot: Snapshot) -> None:
    """Raises ValueError for arrays that no snapshot has."""
    arrays = snapshot.arrays
    kinds = KINDS | {name: kind for name, kind in OPTIONAL_KINDS.items() if name in arrays}
    if wrong := arrays.keys() ^ kinds.keys():
        raise ValueError(f"{min(wrong)} is {'missing' if min(wrong) in kinds else 'unknown'}")
    B, T = arrays["mask"].shape
    for name, (kind, dimensions) in kinds.items():
        array, shape = arrays[name], (B, T)[: len(dimensions)]
        if array.dtype.kind != kind or array.ndim != len(dimensions) or array.shape[: len(shape)] != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)} beside a mask of {[B, T]}")
        if kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} holds a number that is not finite")
        if kind == "i" and array.size and array.min() < 0:
            raise ValueError(f"{name} holds {array.min()}, a number below 0")
    signals = arrays["signals"].shape[2:] if "signals" in arrays else (0,)
    if signals != (len(snapshot.about.signals),):
        raise ValueError(f"signals are {signals[0]}, with {len(snapshot.about.signals)} names")
    if not arrays["mask"][:, 0].all() or (arrays["mask"][:, 1:] > arrays["mask"][:, :-1]).any():
        raise ValueError("mask is not a prefix of every row")
