"""Sessions of a server (`python -m hgpo_jax.serve --record FOLDER`) as dumps of Episodes, like those of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.errors import ConfigError
from hgpo_jax.files import atomic_write
from hgpo_jax.inspect.dumps import dumped
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.serving.sessions import Session, episodes_of

log = logging.getLogger(__name__)

EVERY = 64  # sessions of a dump


class Recording:
    """A folder that `inspect.load` and the report read; use as a context, with which what is left is written.

    Sessions whose first prompts are equal are a prompt group. Those without a turn are left out.

    Raises ConfigError for a folder that holds something else.
    """

    def __init__(self, folder: Path, config: Config, tokenizer):
        try:
            (folder / "episodes").mkdir(parents=True, exist_ok=True)
            other = [path.name for path in folder.iterdir() if path.name not in ("config.yaml", "episodes", "policy")]
            if other:
                raise ConfigError(f"--record {folder}: holds {other[0]}, which is no recording's; give another folder")
            with atomic_write(folder / "config.yaml") as file:
                file.write(configuration.dump(config))
            tokenizer.save_pretrained(folder / "policy")
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror or error}") from None
        self._folder, self._end = folder, (tokenizer.eos_token_id,)
        self._kept: list[Session] = []
        self._number = 1 + max(dumped(folder), default=-1)  # of the next dump
        self._writer = ThreadPoolExecutor(1, "recording")
        self._written: list[Future] = []

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_) -> None:
        """Raises OSError where a dump could not be written."""
        self._dump()
        self._writer.shutdown()
        for dump in self._written:
            dump.result()

    def add(self, session: Session) -> None:
        """Keeps a session that has ended."""
        if session.turns:
            self._kept.append(session)
        if len(self._kept) >= EVERY:
            self._dump()

    def _dump(self) -> None:
        if self._kept:
            self._written.append(self._writer.submit(self._write, self._kept, self._number))
            self._kept, self._number = [], self._number + 1

    def _write(self, sessions: list[Session], number: int) -> None:
        turns = [turn for session in sessions for turn in session.turns]
        empty = Episodes.zeros(
            len(sessions), max(len(session.turns) for session in sessions), max(len(turn.ids) for turn in turns),
            max(len(turn.tokens) for turn in turns),
        )  # fmt: skip
        names = [session.name for session in sessions]
        episodes, report = episodes_of(sessions, names, prompt_groups(sessions), empty, self._end, {}, {})
        assert report is not None
        file = self._folder / "episodes" / f"iteration-{number:05d}.npz"
        try:
            report.save(file.with_suffix(".json"))
            episodes.save(file)
        except OSError as error:
            log.error("%d sessions are lost: %s", len(sessions), error)
            raise


def prompt_groups(sessions: Sequence[Session]) -> np.ndarray:
    """i32[B]: sessions with equal first prompts have a number in common."""
    numbers: dict[tuple[int, ...], int] = {}
    return np.array([numbers.setdefault(tuple(s.turns[0].ids), len(numbers)) for s in sessions], np.int32)
