"""The official games of ../shared, unpacked once, for tests that need "data"."""

import tarfile
from pathlib import Path

import pytest
from alfworld_places import ARCHIVE

from hgpo_jax.envs.alfworld.dataset import list_games


@pytest.fixture(scope="session")
def official(tmp_path_factory) -> dict[str, list[Path]]:
    """The files of the 474 games by split."""
    folder = tmp_path_factory.mktemp("official")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return {split: [game.path for game in list_games(split, folder)] for split in ("valid_seen", "valid_unseen", "valid_train")}


@pytest.fixture(scope="session")
def some_official(official) -> list[Path]:
    """Every sixth of them."""
    return [path for games in official.values() for path in games][::6]
