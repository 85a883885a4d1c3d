"""Fresh episodes against TextWorld itself; skipped unless the extra `alfworld-check` is installed (Python 3.11, 3.12).

    pytest -s tests/alfworld/test_alfworld_textworld.py                             # the three games beside this file
    ALFWORLD_DATA=.. ALFWORLD_CHECK_GAMES=40 pytest -s tests/alfworld/test_alfworld_textworld.py    # and 40 others

Every game is played in its own wording and in the current release's. Texts, command lists and wins are compared at
every step; ALFWORLD_CHECK_SEED changes the episodes.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from alfworld_places import GAMES, LOGIC, TINY, some_games

from hgpo_jax.envs.alfworld import load_game

pytest.importorskip("textworld")
pytest.importorskip("fast_downward")
from textworld_original import Original, choose  # needs TextWorld

STEPS = 30
PATHS = GAMES + some_games(int(os.environ.get("ALFWORLD_CHECK_GAMES", "0")))


CASES = [(path, logic) for path in PATHS for logic in (None, LOGIC)] + [(TINY, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "logic"), CASES, ids=lambda path: str(path and path.parent.parent.name))
def test_same_as_textworld(path: Path, logic: Path | None) -> None:
    chance = random.Random(f"{path.parent.name} {logic is None} {os.environ.get('ALFWORLD_CHECK_SEED', '0')}")
    original, ours = Original(path, logic), load_game(path, logic)
    assert ours.reset() == original.reset()
    played = []
    for _ in range(STEPS):
        played.append(choose(chance, ours))
        assert ours.step(played[-1]) == original.step(played[-1]), played
    verbs = Counter((command.split() or ["(empty)"])[0] for command in played)
    print(f" {len(played)} steps equal to TextWorld's: {dict(verbs)}")
