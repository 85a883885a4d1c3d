"""Where the tests find games: three beside this file, and more in ../shared for tests that need "data"."""

from pathlib import Path

from tests.helpers.needs import DATA as SHARED

DATA = Path(__file__).resolve().parent / "data"
LOGIC = DATA / "logic"
GAMES = sorted(DATA.glob("json_*/*/*/*/game.tw-pddl"))
TINY = DATA / "tiny.tw-pddl"  # made up: what PDDL and grammars allow but the official games never use
RECORDINGS = SHARED / "conformance" / "alfworld.jsonl"
ARCHIVE = SHARED / "alfworld" / "json_2.1.1.tar.xz"
