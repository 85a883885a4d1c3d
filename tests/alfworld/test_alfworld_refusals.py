"""Broken files: one clear line as ValueError, never a crash of another kind, never a hang. And which games a folder offers."""

import json
from pathlib import Path

import pytest
from alfworld_places import DATA, GAMES, LOGIC

from hgpo_jax.config import load
from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES, list_games, type_in
from hgpo_jax.rollout.alfworld_games import alfworld_text
from hgpo_jax.utils.errors import ConfigError

TEXTS = json.loads(GAMES[0].read_text())


def refused(tmp_path: Path, content: str | dict) -> str:
    """The message with which a file of this content is refused."""
    path = tmp_path / "game.tw-pddl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:
        load_game(path).reset()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def changed(key: str, old: str, new: str) -> dict:
    assert old in TEXTS[key]
    return TEXTS | {key: TEXTS[key].replace(old, new)}


CASES = {
    "empty": ("", "broken JSON"),
    "no object": ("[1, 2]", "expected a JSON object"),
    "deep JSON": ("[" * 100_000, "JSON"),
    "no problem": ({k: v for k, v in TEXTS.items() if k != "pddl_problem"}, "'pddl_problem' is missing"),
    "empty domain": (TEXTS | {"pddl_domain": ""}, "expected one list"),
    "problem cut off": (TEXTS | {"pddl_problem": TEXTS["pddl_problem"][:3000]}, "missing ')'"),
    "extra bracket": (TEXTS | {"pddl_problem": TEXTS["pddl_problem"] + ")"}, "a ')' closes nothing"),
    "deep PDDL": (TEXTS | {"pddl_problem": "(" * 61 + ")" * 61}, "nested deeper"),
    "problem for domain": (TEXTS | {"pddl_problem": TEXTS["pddl_domain"]}, "(define (problem"),
    "no goal": (changed("pddl_problem", "(:goal", "(:aim"), "no (:goal"),
    "undeclared object": (changed("pddl_problem", "(atLocation agent1", "(atLocation agent7"), "not in (:objects)"),
    "wrong arity": (changed("pddl_problem", "(atLocation agent1", "(atLocation agent1 agent1"), "number of arguments"),
    "misspelt predicate": (
        changed("pddl_domain", "(holds ?a ?o)\n            (atLocation", "(hold ?a ?o) (atLocation"),
        "'hold' in action 'putobject' is not declared",
    ),
    "free variable": (changed("pddl_domain", "(pickupable ?o)\n            (atL", "(pickupable ?x)\n (atL"), "?x"),
    "no command": (changed("grammar", "action OpenObject", "action OpensObject"), "no command for it"),
    "undefined symbol": (changed("grammar", "#toggleObject.feedback#", "#toggle.feedback#"), "#toggle.feedback#"),
    "broken grammar JSON": (changed("grammar", '"intro": [', '"intro": '), "JSON of grammar"),
    "code in the grammar": (changed("grammar", "You close the {r.name}.", "{__import__('os').getcwd()}"), "expression"),
    "endless grammar": (changed("grammar", "-= Welcome to TextWorld, ALFRED! =-", "#intro#"), "without end"),
    "growing grammar": (changed("grammar", "-= Welcome to TextWorld, ALFRED! =-", "#task##intro##intro#"), "without end"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_files(name: str, tmp_path: Path) -> None:
    content, expected = CASES[name]
    assert expected in refused(tmp_path, content)


def test_a_condition_that_would_run_for_ever_is_refused(tmp_path: Path) -> None:
    many = " ".join(f"?x{i} - object" for i in range(8))
    data = changed(
        "pddl_domain",
        "(:action look\n    :parameters (?a - agent ?l - location)",
        f"(:action look\n    :parameters (?a - agent ?l - location {many})",
    )
    assert "too many combinations" in refused(tmp_path, data)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_game(tmp_path / "nothing.tw-pddl")
    with pytest.raises(FileNotFoundError):
        load_game(GAMES[0], logic=tmp_path)
    (tmp_path / "alfred.pddl").write_bytes(b"\xff\xfe(define")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_game(GAMES[0], logic=tmp_path)
    with pytest.raises(ValueError, match="with the logic in"):
        (tmp_path / "alfred.pddl").write_text("(define (domain x))")
        (tmp_path / "alfred.twl2").write_text((LOGIC / "alfred.twl2").read_text())
        load_game(GAMES[0], logic=tmp_path)


@pytest.mark.parametrize(("path", "kind"), [
    ("pick_two_obj_and_place-Pen-None-Desk-308/trial_T1/game.tw-pddl", 5), ("mine/look_at_obj_in_light-X/game.tw-pddl", 1),
    ("pick_and_place_simple_only/pick_heat_then_place_in_recep-X/trial/game.tw-pddl", 3), ("my-look_at_obj_in_light/game", 6),
])  # fmt: skip
def test_a_game_has_the_type_of_its_own_folder(path, kind):
    assert type_in(path) == kind


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
