"""The engine: recorded episodes of TextWorld letter by letter, queries against a plain evaluation, properties of every game,
and the planner; all 474 solvable games of ../shared in the slow set."""

import json
import random
import tarfile
from itertools import product
from pathlib import Path

import pytest
from alfworld_places import ARCHIVE, DATA, GAMES, LOGIC, RECORDINGS, TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.envs.alfworld import Game, load_game
from hgpo_jax.envs.alfworld.formulas import predicates
from hgpo_jax.envs.alfworld.pddl import parse_domain, parse_problem
from hgpo_jax.envs.alfworld.planner import Unsolvable, plan, read_goal
from hgpo_jax.envs.alfworld.query import Query, View

EVERY = [(path, logic) for path in GAMES for logic in (None, LOGIC)]
LETTERS = "lok go to\tinventry1{}#?()\0é\u2028\U0001f600İ"
LOADED = [load_game(path, logic) for path, logic in EVERY]


def walk(game: Game, chance: random.Random, steps: int) -> list:
    return [game.step(chance.choice(game.commands)) for _ in range(steps)]


@given(st.sampled_from(LOADED), st.integers(0, 2**32), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_every_admissible_command_does_something(loaded: Game, seed: int, steps: int) -> None:
    game = loaded.fresh()
    walk(game, random.Random(seed), steps)
    commands = game.commands
    assert commands == sorted(set(commands))
    for command in commands:
        observation, _, _ = game.copy().step(command)
        assert observation != "Nothing happens."
        assert observation == game.copy().step(f" \t{command}\n")[0]


@given(st.sampled_from(LOADED), st.integers(0, 2**32), st.text(st.sampled_from(LETTERS), max_size=20))
@settings(max_examples=30, deadline=None)
def test_other_commands_change_nothing(loaded: Game, seed: int, text: str) -> None:
    game = loaded.fresh()
    walk(game, random.Random(seed), 5)
    before, commands = game.state, game.commands
    for wrong in (text, "", " ", commands[0].upper(), commands[0] + "x", "go to the moon 1", "take", "look look", "\0"):
        if wrong.strip() not in commands:
            assert game.step(wrong) == ("Nothing happens.", commands, game.won)
            assert game.state == before


@given(st.sampled_from(LOADED), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_copies_and_shared_games_are_independent(loaded: Game, seed: int) -> None:
    """Episodes of one loaded game, played in turns, equal the same episodes played alone."""
    first, second = loaded.fresh(), loaded.fresh()
    walk(first, random.Random(seed), 10)
    third = first.copy()
    streams = [random.Random(seed + i) for i in range(3)]
    mixed = [walk(game, chance, 1)[0] for _ in range(10) for game, chance in zip((first, second, third), streams, strict=True)]
    alone_first, alone_second = loaded.fresh(), loaded.fresh()
    walk(alone_first, random.Random(seed), 10)
    assert mixed[0::3] == walk(alone_first, random.Random(seed), 10)
    assert mixed[1::3] == walk(alone_second, random.Random(seed + 1), 10)
    assert loaded.state is loaded.data.initial


def test_play_goes_on_after_a_win_and_reset_starts_over() -> None:
    game = LOADED[0].fresh()
    start = game.reset()
    results = [game.step(command) for command in plan(game)]
    assert [won for _, _, won in results] == [False] * (len(results) - 1) + [True]
    assert game.step("look")[2] is True
    assert game.reset() == start and start[0].endswith(game.task) and not game.won


def test_a_changed_grammar_and_domain_are_followed(tmp_path: Path) -> None:
    """Whoever may only look at what is open cannot examine a closed drawer: rules and words are read, not built in."""
    data, changed = json.loads(GAMES[0].read_text()), tmp_path / "game.tw-pddl"
    start = data["pddl_domain"].index("(:action examineReceptacle")
    where = data["pddl_domain"].index("(atLocation ?a ?l)", start)
    data["pddl_domain"] = data["pddl_domain"][:where] + "(opened ?r) " + data["pddl_domain"][where:]
    data["grammar"] = data["grammar"].replace("close {r}", "shut {r} gently").replace("You close", "Softly you close")
    changed.write_text(json.dumps(data))
    for path, examines, shut, says in ((GAMES[0], True, "close {}", "You"), (changed, False, "shut {} gently", "Softly you")):
        game = load_game(path)
        go = next(command for command in game.commands if command.startswith("go to drawer"))
        drawer = go.removeprefix("go to ")
        game.step(go)
        assert (f"examine {drawer}" in game.commands) is examines
        game.step(f"open {drawer}")
        assert game.step(shut.format(drawer))[0].startswith(f"{says} close the {drawer}")


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
    """One in its own wording, the next in the current one; every third, as the expert of test_alfworld_expert.py plays all."""
    assert {split: len(paths) for split, paths in official.items()} == {
        "valid_seen": 140,
        "valid_unseen": 134,
        "valid_train": 200,
    }
    for paths in official.values():
        for number, path in enumerate(paths[::3]):
            assert check(load_game(path, LOGIC if number % 2 else None)) <= 50, path


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


OBJECTS = ("a", "b", "c")
VARIABLES = ("?x", "?y", "?z")
ARITY = {"p": 1, "q": 2, "r": 2, "=": 2}  # q is in the state, the others never change
TERMS = st.sampled_from((*VARIABLES, "a"))
ATOMS = st.sampled_from(sorted(ARITY)).flatmap(
    lambda name: st.tuples(st.just("atom"), st.just(name), st.tuples(*[TERMS] * ARITY[name]))
)
TYPED = ("and", tuple(("atom", "type object", (name,)) for name in VARIABLES))


def grow(parts: st.SearchStrategy) -> st.SearchStrategy:
    several = st.lists(parts, max_size=3).map(tuple)
    return (
        st.tuples(st.sampled_from(["and", "or"]), several)
        | st.tuples(st.just("not"), parts)
        | st.tuples(st.sampled_from(VARIABLES), parts).map(
            lambda pair: ("exists", pair[:1], ("and", (("atom", "type object", pair[:1]), pair[1])))
        )
    )


FORMULAS = st.recursive(ATOMS, grow, max_leaves=8)
ROWS = {arity: st.frozensets(st.tuples(*[st.sampled_from(OBJECTS)] * arity)) for arity in (1, 2)}
FACTS = st.fixed_dictionaries({"p": ROWS[1], "q": ROWS[2], "r": ROWS[2]})


def holds(node: tuple, facts: dict, values: dict) -> bool:
    """The textbook meaning of a formula."""
    if node[0] == "and":
        return all(holds(part, facts, values) for part in node[1])
    if node[0] == "or":
        return any(holds(part, facts, values) for part in node[1])
    if node[0] == "not":
        return not holds(node[1], facts, values)
    if node[0] == "exists":
        return any(
            holds(node[2], facts, values | dict(zip(node[1], row, strict=True)))
            for row in product(OBJECTS, repeat=len(node[1]))
        )
    row = tuple(values.get(term, term) for term in node[2])
    return row[0] == row[1] if node[1] == "=" else row in facts[node[1]]


@given(FORMULAS, FACTS, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_queries_mean_what_the_formula_says(node: tuple, facts: dict, known: int) -> None:
    """With the first `known` variables given, the rows of the others are exactly those that fulfil the formula."""
    facts = facts | {"type object": frozenset((name,) for name in OBJECTS)}
    view = View({name: rows for name, rows in facts.items() if name != "q"}, {}, {"q": facts["q"]})
    bound, out = VARIABLES[:known], VARIABLES[known:]
    query = Query(("and", (TYPED, node)), bound, out, {"q"}, {name: len(rows) for name, rows in facts.items()})
    for given_values in product(OBJECTS, repeat=known):
        expected = {
            row
            for row in product(OBJECTS, repeat=len(out))
            if holds(node, facts, dict(zip(bound + out, given_values + row, strict=True)))
        }
        assert query.rows(view, given_values) == expected
        assert query.any(view, given_values) is bool(expected)


def test_a_condition_around_a_forall_holds_for_all_of_it() -> None:
    when = "(when (q ?a) (forall (?b - thing) (p ?b)))"
    domain = parse_domain(f"(define (domain d) (:predicates (p ?a) (q ?a)) (:action x :parameters (?a) :effect {when}))")
    (effect,) = domain.actions[0].effects
    assert (effect.variables, predicates(effect.condition)) == (("?b",), {"q", "type thing"})


def test_of_two_actions_with_one_wording_the_first_by_name_counts(tmp_path: Path) -> None:
    """Not the one that a set happens to hand out first."""
    data = json.loads(TINY.read_text())
    data["grammar"] = data["grammar"].replace("smash {i}", "smash it", 1)
    (tmp_path / "game.tw-pddl").write_text(json.dumps(data))
    game = load_game(tmp_path / "game.tw-pddl")
    game.step("wait")  # now both cups can be smashed
    assert sum(command.startswith("smash") for command in load_game(TINY).commands) >= 1
    assert game.step("smash it")[0].startswith("smashed cup 2:")  # cup_bar_1, the smaller id
