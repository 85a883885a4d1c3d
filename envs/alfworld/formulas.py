"""Formulas as data: their variables and predicates, and how they are split into conjunctions for `query.py`."""

from collections.abc import Collection

from hgpo_jax.envs.alfworld.pddl import Formula

MAX_CONJUNCTIONS = 64


def free_variables(node: Formula) -> frozenset[str]:
    """Returns variables of a formula that no `exists` inside it binds. A variable starts with '?' or holds a ':' (grammar)."""
    if node[0] == "atom":
        return frozenset(term for term in node[2] if is_variable(term))
    if node[0] == "exists":
        return free_variables(node[2]) - set(node[1])
    parts = node[1] if node[0] in ("and", "or") else node[1:]
    return frozenset().union(*map(free_variables, parts))


def predicates(node: Formula) -> frozenset[str]:
    """Returns the predicates that a formula mentions."""
    if node[0] == "atom":
        return frozenset((node[1],))
    parts = node[1] if node[0] in ("and", "or") else node[2:] if node[0] == "exists" else node[1:]
    return frozenset().union(*map(predicates, parts))


def is_variable(term: str) -> bool:
    """Whether a term is a variable: those of PDDL start with '?', those of a text grammar are written `name:type`."""
    return term.startswith("?") or ":" in term


def _rename(node: Formula, names: dict[str, str]) -> Formula:
    if node[0] == "atom":
        return ("atom", node[1], tuple(names.get(term, term) for term in node[2]))
    if node[0] == "exists":
        return ("exists", node[1], _rename(node[2], {k: v for k, v in names.items() if k not in node[1]}))
    if node[0] == "not":
        return ("not", _rename(node[1], names))
    return (node[0], tuple(_rename(part, names) for part in node[1]))


class Splitter:
    """Turns a formula into alternative conjunctions whose parts are facts, negations, or `or`s kept as tests."""

    def __init__(self, bound: Collection[str]) -> None:
        self.bound = set(bound)
        self.fresh = 0

    def conjunctions(self, node: Formula) -> list[tuple[Formula, ...]]:
        alternatives: list[tuple[Formula, ...]] = [()]
        parts = self._flat(node)
        bound = self.bound.union(
            *(part[2] for part in parts if part[0] == "atom" and part[1] != "=" and not part[1].startswith("type "))
        )
        for part in parts:
            if part[0] == "or" and len(part[1]) == 1:
                choices = self.conjunctions(part[1][0])
            elif part[0] == "or" and not free_variables(part) <= bound:
                # It may provide a variable's values (otherwise all objects would be tried), so each option becomes a
                # conjunction.
                choices = [choice for option in part[1] for choice in self.conjunctions(option)]
            else:
                choices = [(part,)]
            alternatives = [a + b for a in alternatives for b in choices]
            if len(alternatives) > MAX_CONJUNCTIONS:
                raise ValueError(f"a condition needs more than {MAX_CONJUNCTIONS} cases")
        return alternatives

    def _flat(self, node: Formula) -> list[Formula]:
        if node[0] == "and":
            return [part for child in node[1] for part in self._flat(child)]
        if node[0] == "exists":
            # The new names cannot clash: '!' occurs in no variable.
            names = {name: f"?!{self.fresh + i}" for i, name in enumerate(node[1])}
            self.fresh += len(names)
            return self._flat(_rename(node[2], names))
        if node[0] == "not" and node[1][0] == "not":
            return self._flat(node[1][1])
        return [node]
