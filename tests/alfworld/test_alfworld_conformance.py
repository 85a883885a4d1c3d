"""Recorded episodes of TextWorld, replayed letter by letter: those beside this file, and those of ../shared/data."""

import json
import tarfile
from pathlib import Path

import pytest
from alfworld_places import ARCHIVE, DATA, LOGIC, RECORDINGS

from hgpo_jax.envs.alfworld import load_game

OWN = [json.loads(line) for line in (DATA / "recorded.jsonl").read_text().splitlines()]


def replay(path: Path, logic: Path | None, reset: dict, steps: list[dict]) -> int:
    game = load_game(path, logic)
    assert game.reset() == (reset["obs"], reset["admissible_commands"])
    for number, step in enumerate(steps):
        expected = (step["obs"], step["admissible_commands"], step["won"])
        assert game.step(step["action"]) == expected, f"step {number}: {step['action']!r}"
    return len(steps)


def test_own_recordings() -> None:
    for story in OWN:
        assert replay(DATA / story["game"], LOGIC if story["logic"] else None, story, story["steps"]) == 40
    # A replay proves something only about what was played.
    steps = [step for story in OWN for step in story["steps"]]
    verbs = {step["action"].partition(" ")[0] for step in steps}
    assert {"go", "take", "put", "move", "open", "close", "heat", "use", "examine", "look", "inventory", "help"} <= verbs
    assert any(step["obs"] == "Nothing happens." for step in steps) and any(step["won"] for step in steps)


@pytest.mark.needs("data")
def test_shared_recordings(tmp_path: Path) -> None:
    """All recorded episodes of ../shared: the wording of the current release on problems of release 2.1.1."""
    stories = [json.loads(line) for line in RECORDINGS.read_text().splitlines()]
    wanted = {f"json_2.1.1/{story['game']}" for story in stories}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.name in wanted:
                (tmp_path / member.name).parent.mkdir(parents=True)
                (tmp_path / member.name).write_bytes(archive.extractfile(member).read())
    steps = 0
    for story in stories:
        steps += replay(tmp_path / "json_2.1.1" / story["game"], LOGIC, story["reset"], story["steps"])
    assert (len(stories), steps) == (10, 305)
