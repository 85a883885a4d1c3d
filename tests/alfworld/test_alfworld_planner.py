"""The planner: the games beside this file at once, all 474 solvable games of ../shared in the slow set."""

import random
from pathlib import Path

import pytest
from alfworld_places import GAMES, LOGIC

from hgpo_jax.envs.alfworld import Game, load_game
from hgpo_jax.envs.alfworld.pddl import parse_domain, parse_problem
from hgpo_jax.envs.alfworld.planner import Unsolvable, plan, read_goal


def check(game: Game) -> int:
    """Plays the plan: each command admissible, won at the last one and not before. Returns its length."""
    commands = plan(game)
    copy = game.copy()
    results = []
    for command in commands:
        assert command in copy.commands
        results.append(copy.step(command)[2])
    assert results == [False] * (len(commands) - 1) + [True]
    return len(commands)


@pytest.mark.parametrize("path", GAMES, ids=lambda path: path.parent.parent.name)
def test_from_the_start_and_from_anywhere(path: Path) -> None:
    game = load_game(path, None if path == GAMES[0] else LOGIC)
    state = game.state
    assert 3 <= check(game) <= 12
    assert game.state is state
    chance = random.Random(5)
    for _ in range(20):
        game.step(chance.choice(game.commands))
        if not game.won:
            assert check(game) <= 50


def test_nothing_to_do_when_won_and_why_there_is_no_plan() -> None:
    game = load_game(GAMES[0])
    commands = plan(game)
    assert plan(game, max_steps=len(commands)) == commands
    with pytest.raises(Unsolvable, match=f"more than {len(commands) - 1}"):
        plan(game, max_steps=len(commands) - 1)
    for command in commands:
        game.step(command)
    assert plan(game) == []
    domain = parse_domain((LOGIC / "alfred.pddl").read_text())

    def goal(text: str):
        return parse_problem(f"(define (problem x) (:objects BoxType - otype) (:init) (:goal {text}))", domain).goal

    with pytest.raises(Unsolvable, match="none of the six"):
        read_goal(goal("(exists (?o - object) (and (objectType ?o BoxType) (isSliced ?o)))"))
    with pytest.raises(Unsolvable, match="on all objects"):
        read_goal(goal("(forall (?r - receptacle) (not (opened ?r)))"))


@pytest.mark.slow
@pytest.mark.needs("data")
def test_all_solvable_games(official: dict) -> None:
    """One in its own wording, the next in the current one."""
    assert {split: len(paths) for split, paths in official.items()} == {
        "valid_seen": 140, "valid_unseen": 134, "valid_train": 200
    }
    for paths in official.values():
        for number, path in enumerate(paths):
            assert check(load_game(path, LOGIC if number % 2 else None)) <= 50, path
