"""Which games a data folder offers, in which order, and what is said when something is wrong."""

import json
from pathlib import Path

import pytest
from alfworld_places import DATA, GAMES

from hgpo_jax.config import load
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES, list_games
from hgpo_jax.rollout.environments import alfworld_text
from hgpo_jax.utils.errors import ConfigError


def make(folder: Path, trial: str, task_type: str = TASK_TYPES[0], **game: object) -> None:
    (folder / trial).mkdir(parents=True)
    (folder / trial / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    if game:
        (folder / trial / "game.tw-pddl").write_text(json.dumps(game))


def test_games_beside_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(DATA))
    found = [game for split in ("valid_seen", "valid_train") for game in list_games(split)]
    assert sorted(game.path for game in found) == GAMES
    assert [game.task_type for game in found] == [TASK_TYPES[3], TASK_TYPES[1], TASK_TYPES[5]]
    assert found[0].trial == "pick_heat_then_place_in_recep-Apple-None-DiningTable-26/trial_T20190907_060234_011675"
    assert [game.split for game in found] == ["valid_seen", "valid_train", "valid_train"]
    assert list_games("valid_seen", DATA / "json_2.1.1") == list_games("valid_seen")


def test_rules_of_the_official_environment(tmp_path: Path) -> None:
    folder = tmp_path / "json_2.1.1" / "train"
    make(folder, "b/trial_2", solvable=True)
    make(folder, "b/trial_1", TASK_TYPES[4], solvable=True)
    make(folder, "a/trial_9", TASK_TYPES[5], solvable=True)
    make(folder, "a/unsolvable", solvable=False)
    make(folder, "a/unknown", other=1)
    make(folder, "a/no_game")
    make(folder, "movable_recep/trial", solvable=True)
    make(folder, "pick-AppleSliced/trial", solvable=True)
    make(folder, "a/other_type", "pick_and_place_with_movable_recep", solvable=True)
    assert [game.trial for game in list_games("train", tmp_path)] == ["a/trial_9", "b/trial_1", "b/trial_2"]
    assert [game.trial for game in list_games("train", tmp_path, [TASK_TYPES[4]])] == ["b/trial_1"]
    make(tmp_path / "json_2.0.9" / "train", "old", solvable=True)
    make(tmp_path / "json_2.1.10" / "train", "new", solvable=True)
    assert [game.trial for game in list_games("train", tmp_path)] == ["new"]


@pytest.mark.parametrize(("there", "fields", "message"), [
    (["valid_seen", "valid_train"], [], "no train/ .*; it has valid_seen, valid_train, give env.split=valid_train"),
    (["valid_seen", "valid_unseen"], [], "no train/ .*; it has valid_seen, valid_unseen, none of which is for env.split"),
    (["train", "valid_unseen"], [], "no valid_seen/ .*; it has train, valid_unseen, give env.held_out=valid_unseen"),
    (["train"], ["env.held_out=valid_unseen"], "no valid_unseen/ .*; it has train, none of which is for env.held_out"),
    (["valid_seen"], ["env.split=generated"], "no valid_train/ .*; it has valid_seen, none of which is for env.split"),
    ([], [], "no train/ or json_\\*/train/ in it; unpack the ALFWorld games there$"),
])  # fmt: skip
def test_a_download_of_some_splits_says_what_there_is(tmp_path, there, fields, message):
    for split in there:
        make(tmp_path / "json_2.1.1" / split, "a", solvable=True)
    config = load(None, ["env.name=alfworld", f"data={tmp_path}", "env.compiled=false", *fields])
    with pytest.raises(ConfigError, match=f"^env.data={tmp_path}: .*{message}") as caught:
        alfworld_text(config)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    make(tmp_path / "train", "x", solvable=False)
    (tmp_path / "valid_seen" / "y").mkdir(parents=True)
    for name in ("traj_data.json", "game.tw-pddl"):
        (tmp_path / "valid_seen" / "y" / name).write_text("{")
    for arguments, message in (
        (("train",), "set ALFWORLD_DATA"),
        (("train", tmp_path / "none"), "no such folder"),
        (("test", tmp_path), "unknown split 'test'"),
        (("valid_unseen", tmp_path), "no valid_unseen/"),
        (("train", tmp_path), "no solvable game"),
        (("train", tmp_path, ["cook"]), r"\['cook'\]"),
        (("valid_seen", tmp_path), "traj_data.json: broken JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            list_games(*arguments)
