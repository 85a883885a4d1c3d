"""Fresh episodes against TextWorld itself, with the extra `alfworld-check` (Python 3.11, 3.12).

Every game is played in its own wording and in the current release's. Texts, command lists and wins are compared at every step.
"""

import random
from pathlib import Path

import pytest
from alfworld_places import GAMES, LOGIC, TINY

from hgpo_jax.envs.alfworld import load_game

CASES = [*((path, logic) for path in GAMES for logic in (None, LOGIC)), (TINY, None)]


@pytest.mark.slow
@pytest.mark.needs("textworld")
@pytest.mark.parametrize(("path", "logic"), CASES, ids=lambda path: str(path and path.parent.parent.name))
def test_same_as_textworld(path: Path, logic: Path | None) -> None:
    from textworld_original import Original, choose

    chance = random.Random(f"{path.parent.name} {logic is None}")
    original, ours = Original(path, logic), load_game(path, logic)
    assert ours.reset() == original.reset()
    played = []
    for _ in range(30):
        played.append(choose(chance, ours))
        assert ours.step(played[-1]) == original.step(played[-1]), played
