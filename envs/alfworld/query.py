"""Compiles formulas into queries over the facts of a game.

All questions about a game's facts are answered here: which actions are applicable, whether an effect's condition holds,
whether the goal is reached, what a sentence of the grammar lists. A formula is split into conjunctions. Each conjunction is
ordered (tests as soon as their variables have values, otherwise the fact with the fewest expected rows) and becomes a chain of
closures that walk the facts.

There are two kinds of facts. Those that no action changes are stored once per game and indexed; those that change are frozen
sets in a state, which makes states immutable and cheap to share.
"""

from collections.abc import Callable, Collection, Mapping
from operator import itemgetter

from hgpo_jax.envs.alfworld.formulas import Splitter, free_variables, is_variable
from hgpo_jax.envs.alfworld.pddl import Formula

WORK_LIMIT = 300_000  # maximum number of facts per request; the largest real game needs about 3,000
MAX_PARTS = 200  # of one conjunction; each is one level of calls when it is walked

Row = tuple[str, ...]


class View:
    """The view of a query: the unchanging facts, the state's facts, and the remaining work budget.

    Attributes:
        fixed: predicate -> set of argument tuples.
        index: (predicate, position) -> {value: rows}, filled on first use and shared by all views of a game.
        state: predicate -> frozenset of argument tuples.
        budget: facts that may still be looked at; below zero the request is refused.
    """

    __slots__ = ("budget", "fixed", "index", "state")

    def __init__(self, fixed: Mapping[str, Collection[Row]], index: dict, state: Mapping[str, frozenset[Row]]) -> None:
        self.fixed = fixed
        self.index = index
        self.state = state
        self.budget = WORK_LIMIT

    def rows_with(self, predicate: str, position: int, value: str) -> Collection[Row]:
        """Returns the unchanging facts of `predicate` that have `value` at `position`."""
        key = (predicate, position)
        table = self.index.get(key)
        if table is None:
            table = {}
            for row in self.fixed.get(predicate, ()):
                table.setdefault(row[position], []).append(row)
            self.index[key] = table
        return table.get(value, ())


Step = Callable[[View, list, set | None], bool]


class Query:
    """A compiled formula.

    Args:
        node: the formula.
        bound: variables whose values are given when the query is asked.
        out: variables whose values are wanted; must not be in `bound`.
        changing: predicates held in the state.
        sizes: expected number of facts per predicate; decides the order of work, never the result.
    """

    __slots__ = ("_bound", "_chains")

    def __init__(
        self,
        node: Formula,
        bound: tuple[str, ...],
        out: tuple[str, ...],
        changing: Collection[str],
        sizes: Mapping[str, int],
    ) -> None:
        self._bound = len(bound)
        self._chains = [_compile(parts, bound, out, changing, sizes) for parts in Splitter(bound).conjunctions(node)]

    def rows(self, view: View, values: Row = ()) -> set[Row]:
        """Returns all distinct values of the `out` variables, in no particular order."""
        solutions: set[Row] = set()
        for start, template in self._chains:
            env = template.copy()
            env[: self._bound] = values
            start(view, env, solutions)
        return solutions

    def any(self, view: View, values: Row = ()) -> bool:
        """Whether the formula holds for some values of the unbound variables."""
        for start, template in self._chains:
            env = template.copy()
            env[: self._bound] = values
            if start(view, env, None):
                return True
        return False


def _compile(parts, bound, out, changing, sizes) -> tuple[Step, list]:
    """Compiles one conjunction to (first step, list of slots with the constants filled in)."""
    slots = {name: i for i, name in enumerate(bound)}
    env: list = [None] * len(bound)
    parts = list(dict.fromkeys(parts))
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a condition has more than {MAX_PARTS} parts")
    facts = [part[1] if part[0] == "not" else part for part in parts]
    for term in dict.fromkeys(t for fact in facts if fact[0] == "atom" for t in fact[2] if not is_variable(t)):
        slots[term] = len(env)  # a constant is a slot that is filled from the start
        env.append(term)
    bound_terms = set(slots)
    plan: list[tuple[str, Formula, set[str]]] = []
    while parts:
        best = min(parts, key=lambda part: _cost(part, bound_terms, sizes))
        parts.remove(best)
        if _cost(best, bound_terms, sizes) == float("inf"):
            unknown = sorted(free_variables(best) - bound_terms)
            raise ValueError(f"nothing gives a value to {', '.join(unknown) or 'a variable'} in a condition")
        new = set() if best[0] != "atom" else {term for term in best[2] if term not in bound_terms}
        plan.append(("scan" if new else "test", best, set(bound_terms)))
        for name in best[2] if new else ():
            if name not in slots:
                slots[name] = len(env)
                env.append(None)
        bound_terms |= new
    missing = [name for name in out if name not in bound_terms]
    if missing:
        raise ValueError(f"nothing gives a value to {', '.join(missing)} in a condition")
    step = _collect([slots[name] for name in out])
    filters: list[Formula] = []
    for i in range(len(plan) - 1, -1, -1):
        kind, part, before = plan[i]
        if kind == "scan":
            step = _scan(part, before, slots, changing, filters, step)
            filters = []
        elif _is_filter(part, plan[:i], changing):
            filters.append(part)
        else:
            step = _test(part, slots, changing, sizes, step)
    return step, env


def _is_filter(part: Formula, before: list, changing: Collection[str]) -> bool:
    """Whether `part` says that a variable of the last walk has an unchanging property, e.g. a type."""
    if part[0] != "atom" or len(part[2]) != 1 or part[1] in changing:
        return False
    scans = [step for step in before if step[0] == "scan"]
    return bool(scans) and part[2][0] in scans[-1][1][2] and part[2][0] not in scans[-1][2]


def _cost(part: Formula, bound_terms: set[str], sizes: Mapping[str, int]) -> float:
    """Returns the expected rows: 0 for a test that is possible now, infinity for one that is not."""
    if part[0] != "atom" or part[1] == "=":
        return 0.0 if free_variables(part) <= bound_terms else float("inf")
    missing = sum(term not in bound_terms for term in part[2])
    if not missing:
        return 0.0
    size = sizes.get(part[1], 0)
    return 1.0 + size ** (missing / len(part[2])) + (1000.0 if part[1].startswith("type ") and size > 1 else 0.0)


def _getter(places: list[int]) -> Callable[[list], Row]:
    """Returns a function that reads several slots as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda env: (env[places[0]],)) if places else (lambda env: ())


def _collect(places: list[int]) -> Step:
    get = _getter(places)

    def collect(view: View, env: list, solutions: set | None) -> bool:
        if solutions is None:
            return True
        solutions.add(get(env))
        return False

    return collect


def _refuse() -> None:
    raise ValueError("a condition has too many combinations to try (is a type or a fact missing in the domain?)")


def _scan(part: Formula, bound_terms: set[str], slots: dict[str, int], changing, filters: list[Formula], then: Step) -> Step:
    """Builds a step that walks the facts of `part` and assigns each new variable its values in turn.

    `filters` are unary facts about the new variables: they are looked up once per walk rather than once per row.
    """
    _, predicate, terms = part
    checks = [(i, slots[term]) for i, term in enumerate(terms) if term in bound_terms]
    new = [term for term in dict.fromkeys(terms) if term not in bound_terms]
    binds = [(terms.index(term), slots[term]) for term in new]
    same = [(i, terms.index(term)) for i, term in enumerate(terms) if term not in bound_terms and terms.index(term) != i]
    in_state = predicate in changing
    key = None if in_state or not checks else checks.pop(0)
    kinds = [(terms.index(fact[2][0]), fact[1]) for fact in filters]

    def scan(view: View, env: list, solutions: set | None) -> bool:
        rows: Collection[Row]
        if in_state:
            rows = view.state.get(predicate, ())
        elif key is not None:
            rows = view.rows_with(predicate, key[0], env[key[1]])
        else:
            rows = view.fixed.get(predicate, ())
        view.budget -= 1 + len(rows)
        if view.budget < 0:
            _refuse()
        for i, slot in checks:
            value = env[slot]
            rows = [row for row in rows if row[i] == value]
        for i, j in same:
            rows = [row for row in rows if row[i] == row[j]]
        if not rows:
            return False
        for i, kind in kinds:
            members = view.fixed.get(kind, ())
            rows = [row for row in rows if (row[i],) in members]
        for row in rows:
            for i, slot in binds:
                env[slot] = row[i]
            if then(view, env, solutions):
                return True
        return False

    return scan


def _test(part: Formula, slots: dict[str, int], changing, sizes, then: Step) -> Step:
    """Builds a step that continues only if `part`, whose variables all have values, holds."""
    expected = part[0] != "not"
    inner = part if expected else part[1]
    if inner[0] == "atom":
        get = _getter([slots[term] for term in inner[2]])
        predicate = inner[1]
        if predicate == "=":
            left, right = (slots[term] for term in inner[2])

            def equal(view: View, env: list, solutions: set | None) -> bool:
                return (env[left] == env[right]) is expected and then(view, env, solutions)

            return equal
        in_state = predicate in changing

        def fact(view: View, env: list, solutions: set | None) -> bool:
            rows = (view.state if in_state else view.fixed).get(predicate, ())
            return (get(env) in rows) is expected and then(view, env, solutions)

        return fact

    names = tuple(sorted(free_variables(inner)))
    get = _getter([slots[name] for name in names])
    options = inner[1] if inner[0] == "or" else (inner,)
    queries = [Query(option, names, (), changing, sizes) for option in options]

    def formula(view: View, env: list, solutions: set | None) -> bool:
        view.budget -= 1
        if view.budget < 0:
            _refuse()
        values = get(env)
        return any(query.any(view, values) for query in queries) is expected and then(view, env, solutions)

    return formula
