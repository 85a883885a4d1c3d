"""Broken files: one clear line as ValueError, never a crash of another kind, never a hang."""

import json
from pathlib import Path

import pytest
from alfworld_places import GAMES, LOGIC

from hgpo_jax.envs.alfworld import load_game

DATA = json.loads(GAMES[0].read_text())


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
    assert old in DATA[key]
    return DATA | {key: DATA[key].replace(old, new)}


CASES = {
    "empty": ("", "broken JSON"),
    "cut off": (GAMES[0].read_text()[:5000], "broken JSON"),
    "no object": ("[1, 2]", "expected a JSON object"),
    "deep JSON": ("[" * 100_000, "JSON"),
    "no problem": ({k: v for k, v in DATA.items() if k != "pddl_problem"}, "'pddl_problem' is missing"),
    "wrong kind": (DATA | {"grammar": 3}, "'grammar' is missing"),
    "empty domain": (DATA | {"pddl_domain": ""}, "expected one list"),
    "problem cut off": (DATA | {"pddl_problem": DATA["pddl_problem"][:3000]}, "missing ')'"),
    "extra bracket": (DATA | {"pddl_problem": DATA["pddl_problem"] + ")"}, "a ')' closes nothing"),
    "deep PDDL": (DATA | {"pddl_problem": "(" * 61 + ")" * 61}, "nested deeper"),
    "problem for domain": (DATA | {"pddl_problem": DATA["pddl_domain"]}, "(define (problem"),
    "no goal": (changed("pddl_problem", "(:goal", "(:aim"), "no (:goal"),
    "undeclared object": (changed("pddl_problem", "(atLocation agent1", "(atLocation agent7"), "not in (:objects)"),
    "wrong arity": (changed("pddl_problem", "(atLocation agent1", "(atLocation agent1 agent1"), "number of arguments"),
    "misspelt predicate": (changed("pddl_domain", "(holds ?a ?o)\n            (atLocation", "(hold ?a ?o) (atLocation"),
                           "'hold' in action 'putobject' is not declared"),
    "free variable": (changed("pddl_domain", "(pickupable ?o)\n            (atL", "(pickupable ?x)\n (atL"), "?x"),
    "no command": (changed("grammar", "action OpenObject", "action OpensObject"), "no command for it"),
    "undefined symbol": (changed("grammar", "#toggleObject.feedback#", "#toggle.feedback#"), "#toggle.feedback#"),
    "broken grammar JSON": (changed("grammar", '"intro": [', '"intro": '), "JSON of grammar"),
    "code in the grammar": (changed("grammar", "You close the {r.name}.", "{__import__('os').getcwd()}"), "expression"),
    "endless grammar": (changed("grammar", "-= Welcome to TextWorld, ALFRED! =-", "#intro#"), "without end"),
    "growing grammar": (changed("grammar", "-= Welcome to TextWorld, ALFRED! =-", "#task##intro##intro#"),
                        "without end"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_files(name: str, tmp_path: Path) -> None:
    content, expected = CASES[name]
    assert expected in refused(tmp_path, content)


def test_a_condition_that_would_run_for_ever_is_refused(tmp_path: Path) -> None:
    many = " ".join(f"?x{i} - object" for i in range(8))
    data = changed("pddl_domain", "(:action look\n    :parameters (?a - agent ?l - location)",
                   f"(:action look\n    :parameters (?a - agent ?l - location {many})")
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
