"""Where the tests find games: three beside this file, and more under ../shared or ALFWORLD_DATA."""

import os
from pathlib import Path

from hgpo_jax.envs.alfworld.dataset import SPLITS, list_games

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
LOGIC = DATA / "logic"
GAMES = sorted(DATA.glob("json_*/*/*/*/game.tw-pddl"))
TINY = DATA / "tiny.tw-pddl"  # made up: what PDDL and grammars allow but the official games never use
SHARED = HERE.parents[1].parent / "shared" / "data"
RECORDINGS = SHARED / "conformance" / "alfworld.jsonl"
ARCHIVE = SHARED / "alfworld" / "json_2.1.1.tar.xz"


def some_games(number: int) -> list[Path]:
    """`number` games spread evenly over what is under ALFWORLD_DATA; none if it is not set."""
    if not number or "ALFWORLD_DATA" not in os.environ:
        return []
    paths: list[Path] = []
    for split in SPLITS:
        try:
            paths += [game.path for game in list_games(split)]
        except ValueError:  # the split is not there
            continue
    return paths[:: max(1, len(paths) // number)][:number]
