"""Reads a game's text grammar (`.twl2`): commands, feedback, and the sentences that they consist of.

A file is a list of items: `grammar :: ` with a block of JSON in triple quotes, and `action NAME { template :: "..";
feedback :: ".."; }`, which may hold such a block too. The JSON maps a symbol to alternatives
`{"condition": .., "rhs": ..}`; the first one whose condition holds is used. In a `rhs`

    #name#                      another symbol
    {expression}                a Python-like expression over entities, e.g. `o.indefinite + ' ' + o.name`
    {expression | condition}    the same once for every way to fulfil the condition
    [{expression | condition}]  the same as an enumeration

The reader imitates TextWorld's parser, because the player's texts depend on it: white space at the start of a text is dropped
(so `help` does not begin with an empty line), tabs between parts are dropped, and a text ends silently at the first
character that fits nowhere.
"""

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from hgpo_jax.envs.alfworld.pddl import Formula


class Entity:
    """Something that has a name in the text; `str(entity)` is that name."""

    __slots__ = ("id", "name", "type")
    indefinite = "a"
    definite = "the"

    def __init__(self, id: str, type: str, name: str) -> None:
        self.id, self.type, self.name = id, type, name

    def __str__(self) -> str:
        return self.name


Evaluate = Callable[[Mapping[str, Entity]], Any]  # of any type in the grammar's language


class Expression(NamedTuple):
    """A compiled expression and the entity names it uses."""

    names: frozenset[str]
    evaluate: Evaluate


class Part(NamedTuple):
    """One piece of a right-hand side.

    Attributes:
        kind: 'text', 'symbol', 'value', or 'list' (an enumeration).
        value: the text, the symbol's name, the compiled expression, or the inner Part of a list.
        given: the condition text of `{.. | condition}`, else None.
    """

    kind: str
    value: Any
    condition: str | None = None


class Alternative(NamedTuple):
    """One way to write a symbol: usable when `condition` (may be empty) holds."""

    condition: str
    parts: tuple[Part, ...]


class Command(NamedTuple):
    """The wording of an action and of its feedback."""

    template: tuple[Part, ...]
    feedback: tuple[Part, ...]


class Grammar(NamedTuple):
    """Symbols with their alternatives, and commands by lower-case action name."""

    symbols: dict[str, tuple[Alternative, ...]]
    commands: dict[str, Command]


_LEADING = re.compile(r"(?:[\t]+|//[^\n]*\n?|\s+)*")
_TABS = re.compile(r"\t*")


def _after(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    """Returns the end of the match of a pattern that always matches, possibly the empty text."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


_SYMBOL = re.compile(r"#\t*([\w()/!<>\-\s,.]+)#")
_LITERAL = re.compile(r'[^;|"<>\[\]#{}]*')
_QUOTED = re.compile(r'"\t*([^;|"<>\[\]#{}]*)"')
_CONDITIONAL = re.compile(r"\{\t*(?:#([\w()/!<>\-\s,.]+)#|([^|\[\]{}\n<>]+))(?:\s*\|\s*([^;|{}\n\[\]#]+))?\}")


@lru_cache(maxsize=4096)  # games share nearly all their sentences
def parse_text(text: str) -> tuple[Part, ...]:
    """Splits a right-hand side, template or feedback into parts.

    Raises:
        ValueError: an expression that cannot be evaluated safely.
    """
    text = text.replace("\\n", "\n")
    at = _after(_LEADING, text)
    parts: list[Part] = []
    while at < len(text):
        at = _after(_TABS, text, at)
        if result := _conditional(text, at, "["):
            inner, end = result
            if text[end : end + 1] != "]":
                break
            parts.append(Part("list", inner))
            at = end + 1
        elif result := _conditional(text, at):
            parts.append(result[0])
            at = result[1]
        elif match := _SYMBOL.match(text, at):
            parts.append(Part("symbol", match[1]))
            at = match.end()
        elif match := _QUOTED.match(text, at) or _LITERAL.match(text, at):
            if match.end() == at:
                break
            parts.append(Part("text", match[match.re.groups]))
            at = match.end()
    return tuple(parts)


def _conditional(text: str, at: int, opening: str = "") -> tuple[Part, int] | None:
    if not text.startswith(opening, at):
        return None
    match = _CONDITIONAL.match(text, at + len(opening))
    if match is None:
        return None
    symbol, expression, condition = match.groups()
    if symbol is not None:
        return Part("symbol", symbol, condition), match.end()
    return Part("value", parse_expression(expression.strip()), condition), match.end()


_ATTRIBUTES = ("name", "id", "type", "indefinite", "definite")


@lru_cache(maxsize=1024)
def parse_expression(text: str) -> Expression:
    """Compiles an expression made of entities, their attributes, strings, `+`, `or`, `and` and brackets.

    Nothing else is allowed: a game file is data and must not run code.

    Raises:
        ValueError: any other kind of expression.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes in a broken file are not a warning about anyone's code
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):  # the last two: hundreds of nested brackets
        raise ValueError(f"cannot read the expression {text[:60]!r} in the grammar") from None
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Expression(names, _compile(tree, text, 0))


def _compile(node: ast.expr, text: str, depth: int) -> Evaluate:
    if depth > 40:
        raise ValueError(f"the expression {text[:60]!r} in the grammar is nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return lambda entities: node.value
    if isinstance(node, ast.Name):
        return lambda entities: entities[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _ATTRIBUTES:
        name, attribute = node.value.id, node.attr
        return lambda entities: getattr(entities[name], attribute)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _compile(node.left, text, depth + 1), _compile(node.right, text, depth + 1)
        return lambda entities: left(entities) + right(entities)
    if isinstance(node, ast.BoolOp):
        first, *rest = [_compile(value, text, depth + 1) for value in node.values]
        stop_at = isinstance(node.op, ast.Or)

        def boolean(entities: Mapping[str, Entity]) -> object:
            value = first(entities)
            for part in rest:
                if bool(value) is stop_at:
                    break
                value = part(entities)
            return value

        return boolean
    raise ValueError(f"the expression {text[:60]!r} in the grammar uses more than names, strings, '+', 'or', 'and'")


_PREDICATE = re.compile(r"\s*([\w/]+)\s*\(([^()]*)\)\s*")
_PLACEHOLDER = re.compile(r"\s*([\w']+)\s*:\s*([\w/-]+)\s*")


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Formula:
    """Parses `p(a:t, b:u) & q(b:u)` -> a conjunction; its variables are written `a:t`.

    Raises:
        ValueError: anything else.
    """
    atoms = []
    for piece in text.split("&"):
        match = _PREDICATE.fullmatch(piece)
        terms = [_PLACEHOLDER.fullmatch(term) for term in match[2].split(",")] if match and match[2].strip() else []
        matches = [term for term in terms if term is not None]
        if match is None or len(matches) < len(terms):
            raise ValueError(f"cannot read the condition {text[:80]!r} in the grammar")
        atoms.append(("atom", match[1], tuple(f"{term[1]}:{term[2]}" for term in matches)))
    return ("and", tuple(atoms))


_SPACE = re.compile(r"(?:\s+|#[^\n]*)*")
_ITEM = re.compile(r'grammar\s*::\s*"""(.*?)"""\s*;|action\s+([\w/-]+)\s*\{', re.DOTALL)
_FIELD = re.compile(r'(template|feedback)\s*::\s*"([^"]*)"\s*;|(grammar|pddl)\s*::\s*"""(.*?)"""\s*;|(\})', re.DOTALL)


def parse_grammar(text: str) -> Grammar:
    """Reads a whole `.twl2` text.

    Raises:
        ValueError: one line that says which item is wrong.
    """
    symbols: dict[str, tuple[Alternative, ...]] = {}
    commands: dict[str, Command] = {}
    at = _after(_SPACE, text)
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            raise ValueError(f"expected 'grammar ::' or 'action NAME {{' in the grammar, found {text[at : at + 40]!r}")
        at = item.end()
        if item[2] is None:
            symbols.update(_parse_symbols(item[1], "grammar"))
        else:
            fields: dict[str, str] = {}
            at = _parse_action(text, at, item[2], fields, symbols)
            commands[item[2].lower()] = Command(parse_text(fields["template"]), parse_text(fields["feedback"]))
        at = _after(_SPACE, text, at)
    return Grammar(symbols, commands)


def _parse_action(text: str, at: int, name: str, fields: dict[str, str], symbols: dict) -> int:
    """Fills `fields` and `symbols` from the body of an action; returns the position behind its closing bracket."""
    while True:
        part = _FIELD.match(text, _after(_SPACE, text, at))
        if part is None:
            raise ValueError(f"cannot read the body of action {name} in the grammar near {text[at : at + 40]!r}")
        at = part.end()
        if part[5]:
            break
        if part[1]:
            fields[part[1]] = part[2]
        elif part[3] == "grammar":
            # In an action's own grammar, lines that start with '#' are comments.
            lines = [line for line in part[4].split("\n") if not line.lstrip().startswith("#")]
            symbols.update(_parse_symbols("\n".join(lines), f"action {name}"))
    if set(fields) != {"template", "feedback"}:
        raise ValueError(f"action {name} in the grammar needs a template and a feedback")
    return at


def _parse_symbols(text: str, what: str) -> dict[str, tuple[Alternative, ...]]:
    try:
        data = json.loads(textwrap.dedent(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the JSON of {what} in the grammar is broken: {error}") from None
    try:
        return {
            name: tuple(_alternative(rule["rhs"], rule.get("condition", "")) for rule in rules) for name, rules in data.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"the JSON of {what} in the grammar is not {{symbol: [{{'rhs': text}}, ..]}}") from None


def _alternative(rhs: str, condition: str) -> Alternative:
    if condition:
        parse_condition(condition)  # refuse a broken one now, not in the middle of an episode
    parts = parse_text(rhs)
    for part in parts:
        inner = part.value if part.kind == "list" else part
        if inner.condition:
            parse_condition(inner.condition)
    return Alternative(condition, parts)
