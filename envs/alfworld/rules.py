"""An executable domain: its actions as queries and effects. One `Rules` serves every game with the same domain."""

from collections.abc import Mapping
from typing import NamedTuple

from hgpo_jax.envs.alfworld.formulas import free_variables, predicates
from hgpo_jax.envs.alfworld.grammar import parse_condition
from hgpo_jax.envs.alfworld.pddl import FALSE, TRUE, Action, Domain, Effect, Formula, parse_domain
from hgpo_jax.envs.alfworld.query import Query, Row, View

State = dict[str, frozenset[Row]]


class CompiledEffect(NamedTuple):
    """An effect whose rows are found by `query` (None: exactly one, made of the action's own arguments).

    Attributes:
        fact, opposite: the predicate that gains the row and the one that loses it (`p` and `not_p`, or reversed).
        places: for each argument its position among the action's arguments followed by the query's row; a constant
            of the domain stands there as itself.
    """

    query: Query | None
    fact: str
    opposite: str
    places: tuple[int | str, ...]


class ActionRule(NamedTuple):
    """A runnable action.

    Attributes:
        number: position in the domain.
        variables: parameter names as in PDDL (`?o`).
        keys: the same as the text grammar writes them (`o:object`).
        query: finds the argument tuples for which the action is applicable.
        reads: the changing predicates on which that depends.
    """

    number: int
    name: str
    variables: tuple[str, ...]
    keys: tuple[str, ...]
    query: Query
    reads: tuple[str, ...]
    effects: tuple[CompiledEffect, ...]


class Rules:
    """Runnable actions of a domain.

    Attributes:
        changing: predicates that effects change, each also with its `not_` form (see `apply`).
    """

    def __init__(self, domain: Domain, sizes: Mapping[str, int]) -> None:
        self.domain = domain
        self.sizes = dict(sizes)
        touched = {effect.predicate for action in domain.actions for effect in action.effects}
        self.changing = frozenset(touched | {"not_" + name for name in touched})
        self.actions = tuple(self._action(i, action) for i, action in enumerate(domain.actions))
        self._conditions: dict[tuple, tuple[Query, tuple[str, ...]]] = {}

    def query(self, node: Formula, bound: tuple[str, ...], out: tuple[str, ...]) -> Query:
        """Compiles `node`; raises ValueError if it cannot be answered."""
        return Query(node, bound, out, self.changing, self.sizes)

    def condition(self, text: str, bound: tuple[str, ...]) -> tuple[Query, tuple[str, ...]]:
        """Compiles a condition of the grammar in which `bound` variables have values: (query, its new variables).

        The new variables come in the order of their first appearance, which is the order rows are sorted in.
        """
        key = (text, bound)
        if key not in self._conditions:
            node = parse_condition(text)
            terms = dict.fromkeys(term for atom in node[1] for term in atom[2])
            new = tuple(term for term in terms if term not in bound)
            types = tuple(("atom", f"type {term.split(':')[1]}", (term,)) for term in new)
            self._conditions[key] = (self.query(("and", node[1] + types), bound, new), new)
        return self._conditions[key]

    def _action(self, number: int, action: Action) -> ActionRule:
        names = tuple(name for name, _ in action.parameters)
        unknown = free_variables(action.precondition) - set(names)
        if unknown:
            raise ValueError(f"action '{action.name}' uses {', '.join(sorted(unknown))}, which is not a parameter")
        idle = _without_effect(action)
        condition = action.precondition if idle == FALSE else ("and", (action.precondition, ("not", idle)))
        return ActionRule(
            number=number,
            name=action.name,
            variables=names,
            keys=tuple(f"{name.lstrip('?')}:{kind}" for name, kind in action.parameters),
            query=self.query(condition, (), names),
            reads=tuple(sorted(predicates(action.precondition) & self.changing)),
            # Deletions come first, so that an addition of the same fact wins.
            effects=tuple(self._effect(action, effect, names) for effect in sorted(action.effects, key=lambda e: e.positive)),
        )

    def _effect(self, action: Action, effect: Effect, names: tuple[str, ...]) -> CompiledEffect:
        everything = names + effect.variables
        unknown = {term for term in effect.terms if term.startswith("?")} | free_variables(effect.condition)
        unknown -= set(everything)
        if unknown:
            raise ValueError(f"an effect of '{action.name}' uses {', '.join(sorted(unknown))}, which is not a parameter")
        query = None if effect.condition == TRUE else self.query(effect.condition, names, effect.variables)
        fact, opposite = effect.predicate, "not_" + effect.predicate
        if not effect.positive:
            fact, opposite = opposite, fact
        places = tuple(everything.index(term) if term in everything else term for term in effect.terms)
        return CompiledEffect(query, fact, opposite, places)

    def apply(self, rule: ActionRule, values: Row, view: View) -> State:
        """Returns the state after an action; the old one is not changed.

        A deleted fact is remembered as `not_<fact>` until it is added again: this is how TextWorld keeps track, and the
        grammar's `not_inreceptacle(o, r)` is true only for objects that were taken out of `r`, never for the others.
        """
        gained: dict[str, set[Row]] = {}
        lost: dict[str, set[Row]] = {}
        for effect in rule.effects:
            for solution in ((),) if effect.query is None else effect.query.rows(view, values):
                pool = values + solution
                row = tuple([pool[place] if isinstance(place, int) else place for place in effect.places])
                gained.setdefault(effect.fact, set()).add(row)
                lost.setdefault(effect.opposite, set()).add(row)
                gained.get(effect.opposite, set()).discard(row)
                lost.get(effect.fact, set()).discard(row)
        state = dict(view.state)
        nothing: frozenset[Row] = frozenset()
        for name, rows in lost.items():
            if rows & (old := state.get(name, nothing)):
                state[name] = old - rows
        for name, rows in gained.items():
            if not rows <= (old := state.get(name, nothing)):
                state[name] = old | rows
        return state


def _without_effect(action: Action) -> Formula:
    """Returns a condition under which an action would change nothing: such an instance does not exist for Fast Downward.

    An effect vanishes if the precondition already demands it; a deletion vanishes if the same fact is also added. This
    is why one cannot go to a receptacle at one's own location, while looking twice is fine.
    """
    required = action.precondition[1]
    todo = list(required)
    literals: set[tuple] = set()
    while todo:
        node = todo.pop()
        if node[0] == "and":
            todo += node[1]
        elif node[0] == "atom":
            literals.add((True, node[1], node[2]))
        elif node[0] == "not" and node[1][0] == "atom":
            literals.add((False, node[1][1], node[1][2]))
    cases = []
    for effect in action.effects:
        same = {terms for sign, name, terms in literals if (sign, name) == (effect.positive, effect.predicate)}
        if not effect.positive:
            added = [e for e in action.effects if e.positive and e.condition == effect.condition]
            same |= {e.terms for e in added if e.predicate == effect.predicate}
        options = []
        for terms in same:
            equal = {("atom", "=", tuple(sorted(p))) for p in zip(terms, effect.terms, strict=True) if p[0] != p[1]}
            options.append(("and", tuple(sorted(equal))))
        if not options:
            return FALSE
        cases.append(options[0] if len(options) == 1 else ("or", tuple(sorted(options))))
    flat = tuple(dict.fromkeys(part for case in cases for part in (case[1] if case[0] == "and" else (case,))))
    return flat[0] if len(flat) == 1 else ("and", flat)


_CACHE: dict[str, Rules] = {}


def rules_for(domain_text: str, sizes_of) -> Rules:
    """Returns the rules of a domain, compiled once per domain text.

    Args:
        domain_text: PDDL.
        sizes_of: `f(domain) -> {predicate: number of facts}` of a typical problem; orders the work of queries.
    """
    if domain_text not in _CACHE:
        domain = parse_domain(domain_text)
        rules = Rules(domain, sizes_of(domain))
        if len(_CACHE) >= 8:  # a data set has one or two domains; more means tests or a search over domains
            _CACHE.clear()
        _CACHE[domain_text] = rules
    return _CACHE[domain_text]
