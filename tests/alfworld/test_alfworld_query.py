"""Compiled queries against a plain evaluation of the same formula over all assignments."""

import json
from itertools import product
from pathlib import Path

from alfworld_places import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.formulas import predicates
from hgpo_jax.envs.alfworld.pddl import parse_domain
from hgpo_jax.envs.alfworld.query import Query, View

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
