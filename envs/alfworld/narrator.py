"""Writes the player's texts: follows a grammar over the facts of a state."""

from collections.abc import Iterable, Mapping

from hgpo_jax.envs.alfworld.grammar import Entity, Grammar, Part, parse_condition
from hgpo_jax.envs.alfworld.query import View
from hgpo_jax.envs.alfworld.rules import Rules

MAX_DEPTH = 50  # symbols inside symbols; the real grammar needs 5
MAX_PIECES = 20_000  # parts of one text; the longest real text has about 250

Values = Mapping[str, str]  # variable as the grammar writes it (`o:object`) -> object id


class Narrator:
    """Texts of one game: its grammar, its entities, and the rules that answer the grammar's conditions."""

    __slots__ = ("entities", "grammar", "rules")

    def __init__(self, grammar: Grammar, rules: Rules, entities: Mapping[str, Entity]) -> None:
        self.grammar = grammar
        self.rules = rules
        self.entities = entities

    def check(self, roots: Iterable[tuple[Part, ...]]) -> None:
        """Raises ValueError if a text that can be reached from `roots` uses an undefined symbol."""
        todo = list(roots)
        reachable: set[str] = set()
        while todo:
            for part in todo.pop():
                symbols = [inner.value for inner in _inner(part) if inner.kind == "symbol"]
                if part.kind == "list":
                    symbols += ["list_empty", "list_separator", "list_last_separator"]
                for name in symbols:
                    if not self.grammar.symbols.get(name):
                        raise ValueError(f"the grammar uses #{name}#, which it does not define")
                    if name not in reachable:
                        reachable.add(name)
                        todo += [alternative.parts for alternative in self.grammar.symbols[name]]

    def text(self, parts: tuple[Part, ...], view: View, values: Values) -> str:
        """Writes the text of `parts` with these values of variables.

        Raises:
            ValueError: no alternative of a symbol fits, an unknown name, or a grammar without end.
        """
        return _Writer(self, view).write(parts, values, 0)

    def fixed(self, parts: tuple[Part, ...]) -> bool:
        """Whether the text of `parts` depends on nothing an action can change (cautious: symbols are not followed)."""
        for part in (inner for outer in parts for inner in _inner(outer)):
            if part.kind == "symbol":
                return False
            if part.condition and any(atom[1] in self.rules.changing for atom in parse_condition(part.condition)[1]):
                return False
        return True


def names_in(parts: tuple[Part, ...]) -> set[str]:
    """Returns names of the variables that `parts` (without following symbols) reads."""
    names: set[str] = set()
    for part in (inner for outer in parts for inner in _inner(outer)):
        if part.kind == "value":
            names |= part.value.names
        if part.condition:
            names |= {term.split(":")[0] for atom in parse_condition(part.condition)[1] for term in atom[2]}
    return names


def _inner(part: Part) -> tuple[Part, ...]:
    return (part.value,) if part.kind == "list" else (part,)


class _Writer:
    """One run through the grammar, with a count of pieces so that an endless grammar is rejected."""

    __slots__ = ("narrator", "pieces", "view")

    def __init__(self, narrator: Narrator, view: View) -> None:
        self.narrator = narrator
        self.view = view
        self.pieces = 0

    def write(self, parts: tuple[Part, ...], values: Values, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError("the grammar has a symbol that contains itself without end")
        texts: list[str] = []
        for part in parts:
            self.pieces += 1
            if self.pieces > MAX_PIECES:
                raise ValueError("the grammar writes a text without end")
            if part.kind == "text":
                texts.append(part.value)
            elif part.kind == "list":
                items = self.items(part.value, values, depth)
                if not items:
                    texts.append(self.symbol("list_empty", values, depth))
                elif len(items) == 1:
                    texts.append(items[0])
                else:
                    texts.append(self.symbol("list_separator", values, depth).join(items[:-1]))
                    texts.append(self.symbol("list_last_separator", values, depth) + items[-1])
            else:
                texts += self.items(part, values, depth)
        return "".join(texts)

    def items(self, part: Part, values: Values, depth: int) -> list[str]:
        """Writes a symbol or expression once for each way to fulfil its condition (once if it has none)."""
        if part.condition is None:
            return [self.item(part, values, depth)]
        query, new = self.narrator.rules.condition(part.condition, tuple(values))
        return [
            self.item(part, {**values, **dict(zip(new, row, strict=True))}, depth)
            for row in sorted(self.solutions(query, new, values))
        ]

    def solutions(self, query, new: tuple[str, ...], values: Values) -> list[tuple[str, ...]]:
        """Finds the rows of a condition; as in TextWorld, two variables never stand for the same object."""
        objects = tuple(values.values())
        rows = query.rows(self.view, objects)
        if not new:
            return list(rows)
        return [row for row in rows if len(set(row)) == len(new) and not set(row) & set(objects)]

    def item(self, part: Part, values: Values, depth: int) -> str:
        self.pieces += 1
        if part.kind == "symbol":
            return self.symbol(part.value, values, depth)
        try:
            entities = {key.split(":")[0]: self.narrator.entities[value] for key, value in values.items()}
            return str(part.value.evaluate(entities))
        except (KeyError, TypeError) as error:
            raise ValueError(f"cannot evaluate an expression of the grammar: {error}") from None

    def symbol(self, name: str, values: Values, depth: int) -> str:
        for alternative in self.narrator.grammar.symbols.get(name, ()):
            if alternative.condition:
                query, new = self.narrator.rules.condition(alternative.condition, tuple(values))
                if not self.solutions(query, new, values):
                    continue
            return self.write(alternative.parts, values, depth + 1)
        raise ValueError(f"no alternative of #{name}# in the grammar fits")
