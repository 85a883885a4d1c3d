"""Reads the PDDL of a game: s-expressions, the domain (actions) and the problem (objects, facts, goal).

Formulas are reduced to five node kinds, so that the query compiler (`query.py`) stays small:
`("and", parts)`, `("or", parts)`, `("not", part)`, `("exists", variables, part)` and `("atom", predicate, terms)`.
Types are facts like any other (`("atom", "type location", ("?l",))`), `forall` is a negated `exists`. As in Fast
Downward's reader, which ALFWorld uses, everything is lower case, `;` starts a comment and `,` is an ordinary character.
(So a parameter list written with a comma names a type that no object has; the official domain has one such slip in
`examineObject`, and its consequence is part of the game's behaviour.)
"""

from dataclasses import dataclass, field

MAX_DEPTH = 60  # nesting of brackets; real files stay below 12. Keeps every recursion below bounded.

Formula = tuple
TRUE: Formula = ("and", ())
FALSE: Formula = ("or", ())


@dataclass(frozen=True, slots=True)
class Effect:
    """One literal that an action makes true or false.

    Attributes:
        variables: variables of an enclosing `forall`.
        condition: what must hold in the old state (`TRUE` when unconditional).
        positive: False deletes the fact.
        predicate, terms: the literal.
    """

    variables: tuple[str, ...]
    condition: Formula
    positive: bool
    predicate: str
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Action:
    """An action schema; `parameters` are (variable, type) pairs and `precondition` includes their types."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    precondition: Formula
    effects: tuple[Effect, ...]


@dataclass(slots=True)
class Domain:
    """Types (with all their supertypes), predicates (name -> number of arguments), constants and actions."""

    supertypes: dict[str, frozenset[str]] = field(default_factory=dict)
    arity: dict[str, int] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class Problem:
    """Objects (name -> type), initial facts (predicate -> set of argument tuples) and the goal."""

    objects: dict[str, str]
    facts: dict[str, set[tuple[str, ...]]]
    goal: Formula


def parse_lists(text: str) -> list:
    """Returns the one bracketed list in `text` as nested Python lists of lower-case words.

    Raises:
        ValueError: unbalanced or too deeply nested brackets, text outside the list, or none at all.
    """
    top: list = []
    stack = [top]
    for line in text.splitlines():
        line = line.split(";", 1)[0].lower().replace("(", " ( ").replace(")", " ) ").replace("?", " ?")
        for word in line.split():
            if word == "(":
                if len(stack) > MAX_DEPTH:
                    raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}")
                stack[-1].append([])
                stack.append(stack[-1][-1])
            elif word == ")":
                stack.pop()
                if not stack:
                    raise ValueError("a ')' closes nothing")
            else:
                stack[-1].append(word)
    if len(stack) > 1:
        raise ValueError(f"{len(stack) - 1} missing ')' at the end (file cut off?)")
    if len(top) != 1 or not isinstance(top[0], list):
        raise ValueError("expected one list, '(define ...)'")
    return top[0]


def _words(items: list, what: str) -> list[str]:
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected only words in {what}, found a list")
    return items


def typed_list(items: list, what: str) -> tuple[tuple[str, str], ...]:
    """Parses `[a, b, -, t, c]` -> `((a, t), (b, t), (c, object))`.

    Raises:
        ValueError: a nested list, or a '-' without a type behind it.
    """
    pairs: list[tuple[str, str]] = []
    pending: list[str] = []
    words = iter(_words(items, what))
    for word in words:
        if word != "-":
            pending.append(word)
            continue
        kind = next(words, None)
        if kind is None:
            raise ValueError(f"a '-' without a type behind it in {what}")
        pairs += [(name, kind) for name in pending]
        pending = []
    return tuple(pairs + [(name, "object") for name in pending])


def _type_atoms(variables: tuple[tuple[str, str], ...]) -> tuple[Formula, ...]:
    return tuple(("atom", f"type {kind}", (name,)) for name, kind in variables)


def formula(node: list, domain: Domain, what: str) -> Formula:
    """Turns a parsed condition into a formula; an empty list is `TRUE`.

    Raises:
        ValueError: an undeclared predicate, a wrong number of arguments or operands.
    """
    if not isinstance(node, list):
        raise ValueError(f"expected a list in {what}, found the word {node!r}")
    if not node:
        return TRUE
    tag, rest = node[0], node[1:]
    if not isinstance(tag, str):
        raise ValueError(f"expected a word at the start of a list in {what}")
    operands = {"not": 1, "imply": 2, "exists": 2, "forall": 2, "=": 2}.get(tag)
    if operands is not None and len(rest) != operands:
        raise ValueError(f"'{tag}' takes {operands} operand(s), found {len(rest)} in {what}")
    if tag in ("and", "or"):
        return (tag, tuple(formula(part, domain, what) for part in rest))
    if tag == "not":
        return ("not", formula(rest[0], domain, what))
    if tag == "imply":
        return ("or", (("not", formula(rest[0], domain, what)), formula(rest[1], domain, what)))
    if tag in ("exists", "forall"):
        if not isinstance(rest[0], list):
            raise ValueError(f"'{tag}' needs a list of variables in {what}")
        variables = typed_list(rest[0], what)
        names = tuple(name for name, _ in variables)
        if not all(name.startswith("?") for name in names):
            raise ValueError(f"'{tag}' needs variables that start with '?' in {what}")
        body = formula(rest[1], domain, what)
        if tag == "exists":
            return ("exists", names, ("and", (*_type_atoms(variables), body)))
        return ("not", ("exists", names, ("and", (*_type_atoms(variables), ("not", body)))))
    terms = tuple(_words(rest, what))
    if tag != "=" and domain.arity.get(tag) != len(terms):
        fault = f"takes {domain.arity[tag]} argument(s), not {len(terms)}" if tag in domain.arity else "is not declared"
        raise ValueError(f"predicate '{tag}' in {what} {fault}")
    return ("atom", tag, terms)


def _effects(node: list, domain: Domain, what: str, variables: tuple = (), condition: Formula = TRUE) -> list[Effect]:
    if not isinstance(node, list):
        raise ValueError(f"expected a list in {what}, found the word {node!r}")
    if not node or node[0] == "increase":  # costs do not change the state
        return []
    if node[0] == "and":
        return [effect for part in node[1:] for effect in _effects(part, domain, what, variables, condition)]
    if node[0] in ("forall", "when"):
        if len(node) != 3:
            raise ValueError(f"'{node[0]}' takes 2 operands in {what}")
        if node[0] == "when":
            condition = ("and", (condition, formula(node[1], domain, what)))
        else:
            bound = typed_list(node[1], what)
            variables += tuple(name for name, _ in bound)
            condition = ("and", (condition, *_type_atoms(bound)))
        return _effects(node[2], domain, what, variables, condition)
    literal = formula(node, domain, what)
    positive = literal[0] != "not"
    atom = literal if positive else literal[1]
    if atom[0] != "atom" or atom[1] == "=":
        raise ValueError(f"an effect in {what} is not a fact")
    return [Effect(variables, condition, positive, atom[1], atom[2])]


def _sections(text: str, kind: str) -> list[list]:
    """Returns the parts of `(define (kind name) ...)`; raises ValueError if the text is not of that form."""
    tree = parse_lists(text)
    head = tree[1] if len(tree) > 1 else None
    if tree[:1] != ["define"] or not isinstance(head, list) or head[:1] != [kind]:
        raise ValueError(f"expected '(define ({kind} ...) ...)'")
    for part in tree[2:]:
        if not isinstance(part, list) or not part or not isinstance(part[0], str):
            raise ValueError(f"expected only lists that start with a word inside the {kind}")
    return tree[2:]


def _parse_action(body: list, domain: Domain) -> Action:
    if not body or not isinstance(body[0], str):
        raise ValueError("an action without a name")
    what = f"action '{body[0]}'"
    if len(body) % 2 == 0 or not all(isinstance(key, str) for key in body[1::2]):
        raise ValueError(f"{what} is not made of ':key value' pairs")
    parts = dict(zip(body[1::2], body[2::2], strict=True))
    if not isinstance(parts.get(":parameters", []), list):
        raise ValueError(f"{what} needs a list of parameters")
    parameters = typed_list(parts.get(":parameters", []), what)
    condition = formula(parts.get(":precondition", []), domain, what)
    return Action(
        name=body[0],
        parameters=parameters,
        precondition=("and", (*_type_atoms(parameters), condition)),
        effects=tuple(_effects(parts.get(":effect", []), domain, what)),
    )


def parse_domain(text: str) -> Domain:
    """Reads a PDDL domain.

    Raises:
        ValueError: one line that names the section or action that is wrong.
    """
    sections = _sections(text, "domain")
    domain = Domain()
    parents: dict[str, set[str]] = {"object": set()}
    for name, *body in sections:
        if name == ":types":
            for child, parent in typed_list(body, "(:types)"):
                parents.setdefault(child, set()).add(parent)
                parents.setdefault(parent, {"object"})
        elif name == ":constants":
            domain.constants.update(typed_list(body, "(:constants)"))
        elif name == ":predicates":
            for predicate in body:
                if not isinstance(predicate, list) or not predicate or not isinstance(predicate[0], str):
                    raise ValueError("(:predicates) holds something that is not '(name ?argument ...)'")
                domain.arity[predicate[0]] = len(typed_list(predicate[1:], "(:predicates)"))
    for kind in parents:
        above: set[str] = set()
        todo = [kind]
        while todo:
            todo += parents[(last := todo.pop())] - above - {last}
            above.add(last)
        domain.supertypes[kind] = frozenset(above | {"object"})
    domain.actions = [_parse_action(body, domain) for name, *body in sections if name == ":action"]
    if not domain.actions:
        raise ValueError("the domain has no action")
    return domain


def parse_problem(text: str, domain: Domain) -> Problem:
    """Reads a PDDL problem against its domain. Numeric values (`(= (distance ..) 3)`) are read over.

    Raises:
        ValueError: one line that says what is wrong.
    """
    sections = {part[0]: part[1:] for part in _sections(text, "problem")}
    for needed in (":objects", ":init", ":goal"):
        if needed not in sections:
            raise ValueError(f"the problem has no ({needed} ...)")
    objects = dict(domain.constants)
    objects.update(typed_list(sections[":objects"], "(:objects)"))
    ids = {name: name for name in objects}  # one string object per id: the facts share it
    facts: dict[str, set[tuple[str, ...]]] = {}
    for fact in sections[":init"]:
        if not isinstance(fact, list) or not fact or not isinstance(fact[0], str):
            raise ValueError("(:init) holds something that is not a fact")
        if fact[0] == "=":
            continue
        try:
            facts.setdefault(fact[0], set()).add(tuple([ids[term] for term in fact[1:]]))
        except (KeyError, TypeError):
            raise ValueError(f"a '{fact[0]}' fact in (:init) names something that is not in (:objects)") from None
    for name, rows in facts.items():
        # A predicate the domain does not declare is a fact like any other, as in TextWorld: rules cannot refer to it.
        if {len(row) for row in rows} != {domain.arity.get(name, len(next(iter(rows))))}:
            raise ValueError(f"'{name}' facts in (:init) have a wrong number of arguments")
    if len(sections[":goal"]) != 1:
        raise ValueError("(:goal ...) must hold exactly one condition")
    return Problem(objects, facts, formula(sections[":goal"][0], domain, "(:goal)"))
