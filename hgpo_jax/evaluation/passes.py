"""The passes of an evaluation that has not ended, kept so that a repeat of the command goes on after them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils.files import atomic_write
from hgpo_jax.utils.progress import say

# The arrays that results are made of.
NEEDED = ("mask", "judged", "success", "task", "invalid", "prompt_lengths", "response_lengths")
ABOUT = "about.json"
ENOUGH = 0.5  # share of episodes up to which a pass is not kept: something failed that may be mended
Played = tuple[Episodes, np.ndarray | None, list[str]]  # as `held_out.play_held_out` returns


class Passes:
    """Keeps what each pass of an evaluation played, one file each.

    folder: where; None keeps nothing. Once the result is written nobody needs it.
    about: all that decides the result, as JSON has it; passes of an evaluation that differs are removed.
    """

    def __init__(self, folder: Path | None = None, about: dict | None = None):
        self._folder, self._about = folder, json.dumps(about, sort_keys=True)
        if folder and folder.is_dir():
            file = folder / ABOUT
            if not file.is_file() or file.read_text() != self._about:
                shutil.rmtree(folder)

    def __call__(self, name: str, play: Callable[[], Played]) -> Played:
        """Returns what the pass of this name played, which is played now unless it is kept."""
        if self._folder is None:
            return play()
        file = self._folder / f"{name}.npz"
        if file.is_file():
            say(f"{name}: played before, in {file}")
            return _read(file)
        played = play()
        if played[0].mask[:, 0].mean() <= ENOUGH:
            return played
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._folder / ABOUT) as about:
            about.write(self._about)
        _write(file, *played)
        return played

    def end(self) -> None:
        """Removes what was kept."""
        if self._folder and self._folder.is_dir():
            shutil.rmtree(self._folder)


NONE_KEPT = Passes()


def _write(file: Path, episodes: Episodes, scores: np.ndarray | None, transcripts: list[str]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(getattr(episodes, name)) for name in NEEDED}
    if scores is not None:
        arrays["scores"] = scores
    arrays["transcripts"] = np.frombuffer(json.dumps(transcripts).encode(), np.uint8)
    with atomic_write(file, "wb") as out:
        np.savez_compressed(out, **arrays)


def _read(file: Path) -> Played:
    with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as kept:
        arrays = {name: kept[name] for name in kept.files}
    transcripts, scores = json.loads(arrays.pop("transcripts").tobytes()), arrays.pop("scores", None)
    others = dict.fromkeys(Episodes.__dataclass_fields__)
    return Episodes(**others | arrays), scores, transcripts
