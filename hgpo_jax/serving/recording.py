"""Sessions of a server (`python -m hgpo_jax.serve --record FOLDER`) as dumps of Episodes, like those of a run."""

from __future__ import annotations

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.rollout.episodes import Episodes, dumped
from hgpo_jax.serving.sessions import Session, episodes_of
from hgpo_jax.utils.errors import ConfigError, RunError, one_line
from hgpo_jax.utils.files import atomic_write

log = logging.getLogger(__name__)

EVERY = 64  # sessions per dump
GROUPS = "groups.json"


class Recording:
    """A folder that `analysis.load` and the report read; a context manager that writes the remaining sessions.

    Sessions of an equal task, or without one with equal first prompts, are a prompt group, with the same number in all dumps of
    the folder. Sessions without a turn are left out.

    Raises ConfigError for a folder in which another policy was recorded, or another server records.
    """

    def __init__(self, folder: Path, config: Config, tokenizer):
        try:
            (folder / "episodes").mkdir(parents=True, exist_ok=True)
            before, fields = folder / "config.yaml", configuration.dump(config)
            if before.is_file() and before.read_text(encoding="utf-8") != fields:
                raise ConfigError(f"--record {folder}: was recorded with another policy or --max-turns; give another folder")
            self._lock = FileLock(folder / "lock", timeout=0)
            self._lock.acquire()
            with atomic_write(before) as file:
                file.write(fields)
            tokenizer.save_pretrained(folder / "policy")
            numbers = folder / GROUPS
            self._groups: dict[str, int] = json.loads(numbers.read_text()) if numbers.is_file() else {}
        except Timeout:
            raise ConfigError(f"--record {folder}: another server records in it; give another folder") from None
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror or error}") from None
        self._folder = folder
        self._sessions: list[Session] = []
        self._number = 1 + max(dumped(folder), default=-1)  # number of the next dump
        self._writer = ThreadPoolExecutor(1, "recording")
        self._failure = ""

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_) -> None:
        """Raises RunError if a dump could not be written."""
        self._dump()
        self._writer.shutdown()
        self._lock.release()
        if self._failure:
            raise RunError(f"--record {self._folder}: sessions were lost: {self._failure}")

    def add(self, session: Session) -> None:
        """Keeps a session that has ended."""
        if session.turns:
            self._sessions.append(session)
        if len(self._sessions) >= EVERY:
            self._dump()

    def _dump(self) -> None:
        if self._sessions:
            self._writer.submit(self._write, self._sessions, self._number)
            self._sessions, self._number = [], self._number + 1

    def _write(self, sessions: list[Session], number: int) -> None:
        try:
            self._save(sessions, self._folder / "episodes" / f"iteration-{number:05d}.npz")
        except Exception as error:  # after any error the server goes on
            self._failure = one_line(str(error))
            log.exception("%d sessions are lost", len(sessions))

    def _save(self, sessions: list[Session], file: Path) -> None:
        turns = [turn for session in sessions for turn in session.turns]
        empty = Episodes.zeros(
            len(sessions),
            max(len(session.turns) for session in sessions),
            max(len(turn.ids) for turn in turns),
            max(len(turn.tokens) for turn in turns),
        )
        names, groups = [session.name for session in sessions], np.array(list(map(self._group, sessions)), np.int32)
        with atomic_write(self._folder / GROUPS) as groups_file:  # before their numbers are used
            json.dump(self._groups, groups_file)
        episodes, report = episodes_of(sessions, names, groups, empty, {}, {})
        assert report is not None
        report.save(file.with_suffix(".json"))
        episodes.save(file)

    def _group(self, session: Session) -> int:
        """Returns the number of a session's prompt group in this folder."""
        key = json.dumps(session.turns[0].ids if session.task is None else session.task)
        return self._groups.setdefault(hashlib.sha256(key.encode()).hexdigest(), len(self._groups))
