"""ALFWorld's text game without TextWorld: `load_game(path)`, `game.reset()`, `game.step(command)`.

    game = load_game("game.tw-pddl")
    observation, commands = game.reset()
    observation, commands, won = game.step("go to desk 1")

A `GameData` holds the constant part and is shared by any number of live episodes (`game.fresh()`, `game.copy()`); a `Game`
holds one episode. There is no step limit here: the caller counts the steps.
"""

import json
import os
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from hgpo_jax.envs.alfworld.grammar import Command, Entity, Grammar, parse_grammar, parse_text
from hgpo_jax.envs.alfworld.narrator import Narrator, names_in
from hgpo_jax.envs.alfworld.pddl import Domain, Formula, Problem, parse_problem
from hgpo_jax.envs.alfworld.query import Row, View
from hgpo_jax.envs.alfworld.rules import ActionRule, Rules, State, rules_for

NOTHING_HAPPENS = "Nothing happens."
WON_REWARD = 10.0  # as verl-agent pays
MEMO_LIMIT = 256  # remembered command lists per action and game; a house has about 40 places
INTRO = parse_text("#intro#")
_GOAL = re.compile(r'Your task is to: ([^"]*?)\.?"')
_PLACE_HOLDER = "UNKNOWN GOAL"  # placeholder in the official grammar file for the goal in a game's file


class GameData:
    """One game's unchanging part.

    Attributes:
        path: where it came from (for messages and for the task type).
        rules, narrator: the compiled domain and the text of the game.
        fixed: facts no action changes, by predicate; includes `type <name>` for every type.
        initial: the changing facts at the start.
        goal, goal_formula: the compiled goal, and its formula for the planner.
        commands: for each action of the domain, how it is typed and answered.
    """

    __slots__ = (
        "_memo",
        "_texts",
        "commands",
        "fixed",
        "goal",
        "goal_formula",
        "index",
        "initial",
        "narrator",
        "path",
        "rules",
    )

    def __init__(self, path: str, domain_text: str, grammar: Grammar, problem_text: str) -> None:
        holder: list[Problem] = []

        def sizes_of(domain: Domain) -> dict[str, int]:
            holder.append(parse_problem(problem_text, domain))
            facts = {name: len(rows) for name, rows in holder[0].facts.items()}
            return facts | {name: len(rows) for name, rows in _type_facts(domain, holder[0]).items()}

        self.path = path
        self.rules: Rules = rules_for(domain_text, sizes_of)
        problem = holder[0] if holder else parse_problem(problem_text, self.rules.domain)
        types = _type_facts(self.rules.domain, problem)
        changing = self.rules.changing
        self.fixed = types | {name: frozenset(rows) for name, rows in problem.facts.items() if name not in changing}
        self.initial: State = {name: frozenset(rows) for name, rows in problem.facts.items() if name in changing}
        self.index: dict = {}
        self.goal_formula: Formula = problem.goal
        self.goal = self.rules.query(problem.goal, (), ())
        self.narrator = Narrator(grammar, self.rules, _entities(problem))
        self.commands: list[Command] = []
        for rule in self.rules.actions:
            command = grammar.commands.get(rule.name)
            if command is None:
                raise ValueError(f"the domain has an action '{rule.name}' but the grammar has no command for it")
            self.commands.append(command)
        roots = [part for command in self.commands for part in command]
        self.narrator.check([INTRO, *roots])
        self._memo: dict[int, dict] = {}
        self._texts = [self._text_cache(rule) for rule in self.rules.actions]

    def _text_cache(self, rule: ActionRule) -> tuple[Callable[[Row], object] | None, dict]:
        """Caches texts: (the arguments that a command depends on, texts by those arguments)."""
        template = self.commands[rule.number].template
        if not self.narrator.fixed(template):
            return None, {}
        used = names_in(template)
        places = [i for i, key in enumerate(rule.keys) if key.split(":")[0] in used]
        return (itemgetter(*places) if places else lambda values: None), {}

    def view(self, state: State) -> View:
        """Returns the facts of `state` as queries see them."""
        return View(self.fixed, self.index, state)

    def choices(self, view: View) -> dict[str, tuple[ActionRule, Row]]:
        """Returns the admissible commands with the action of each."""
        choices: dict[str, tuple[ActionRule, Row]] = {}
        for rule in reversed(self.rules.actions):  # of two actions with the same wording, the domain's first one counts
            if len(rule.reads) > 1 or self._texts[rule.number][0] is None:
                choices.update(self._choices_of(rule, view))
                continue
            # Going, looking and examining a receptacle depend on the agent's place alone: worth remembering.
            memo = self._memo.setdefault(rule.number, {})
            key = view.state.get(rule.reads[0]) if rule.reads else None
            if key not in memo:
                if len(memo) >= MEMO_LIMIT:
                    memo.clear()
                memo[key] = self._choices_of(rule, view)
            choices.update(memo[key])
        return choices

    def _choices_of(self, rule: ActionRule, view: View) -> dict[str, tuple[ActionRule, Row]]:
        choices: dict[str, tuple[ActionRule, Row]] = {}
        project, texts = self._texts[rule.number]
        for values in rule.query.rows(view):
            text = texts.get(project(values)) if project is not None else None
            if text is None:
                text = self._write(rule, values, view)
                if project is not None:
                    texts[project(values)] = text
            if text not in choices or values < choices[text][1]:  # the choice must not depend on the order of a set
                choices[text] = (rule, values)
        return choices

    def _write(self, rule: ActionRule, values: Row, view: View) -> str:
        bindings = dict(zip(rule.keys, values, strict=True))
        return self.narrator.text(self.commands[rule.number].template, view, bindings)


class Game:
    """One live episode; starts in the initial state. Episodes of the same game share their `data`."""

    __slots__ = ("_choices", "_state", "data")

    def __init__(self, data: GameData) -> None:
        self.data = data
        self._state = data.initial
        self._choices: dict[str, tuple[ActionRule, Row]] | None = None

    def fresh(self) -> "Game":
        """Returns another episode of the same game, from the start."""
        return Game(self.data)

    def copy(self) -> "Game":
        """Returns an independent episode that goes on from here."""
        other = Game(self.data)
        other._state, other._choices = self._state, self._choices  # both are replaced, never changed
        return other

    @property
    def state(self) -> State:
        """The changing facts: predicate -> set of argument tuples. Must not be modified."""
        return self._state

    @property
    def choices(self) -> dict[str, tuple[ActionRule, Row]]:
        """Admissible commands, unsorted, each with its action and arguments. Must not be modified."""
        if self._choices is None:
            self._choices = self.data.choices(self.data.view(self._state))
        return self._choices

    @property
    def commands(self) -> list[str]:
        """Admissible commands, sorted, without duplicates."""
        return sorted(self.choices)

    @property
    def won(self) -> bool:
        """Whether the goal holds now."""
        return self.data.goal.any(self.data.view(self._state))

    @property
    def task(self) -> str:
        """The task in the wording of the first observation, with its full stop."""
        intro = self.data.narrator.text(INTRO, self.data.view(self.data.initial), {})
        return intro.partition("Your task is to: ")[2].strip()

    def reset(self) -> tuple[str, list[str]]:
        """Goes back to the start; returns the first observation and the admissible commands."""
        self._state, self._choices = self.data.initial, None
        view = self.data.view(self._state)
        return self.data.narrator.text(INTRO, view, {}), self.commands

    def step(self, command: str) -> tuple[str, list[str], bool]:
        """Does `command`; returns the observation, the admissible commands and whether the goal is reached.

        A command must be one of the admissible ones, letter by letter after stripping blanks; for any other text the
        observation is "Nothing happens." and the state stays. An episode may go on after it is won, as in TextWorld.

        Raises:
            ValueError: the file's grammar or domain has a fault that shows only now; no released game has one.
        """
        choice = self.choices.get(command.strip())
        if choice is None:
            return NOTHING_HAPPENS, self.commands, self.won
        rule, values = choice
        data = self.data
        try:
            self._state, self._choices = data.rules.apply(rule, values, data.view(self._state)), None
            bindings = dict(zip(rule.keys, values, strict=True))
            observation = data.narrator.text(data.commands[rule.number].feedback, data.view(self._state), bindings)
            return observation, self.commands, self.won
        except ValueError as error:
            raise ValueError(f"{data.path}: {error}; correct its grammar or domain") from None


def _type_facts(domain: Domain, problem: Problem) -> dict[str, frozenset[Row]]:
    rows: dict[str, set[Row]] = {}
    for name, kind in problem.objects.items():
        for above in domain.supertypes.get(kind, (kind, "object")):
            rows.setdefault(f"type {above}", set()).add((name,))
    return {name: frozenset(values) for name, values in rows.items()}


def _entities(problem: Problem) -> dict[str, Entity]:
    """Names everything that occurs in an initial fact, as AlfredDemangler does.

    An id is `name_bar_<position>`. Equal names are numbered by the sorted ids, the first id getting the highest number.
    """
    ids = sorted({term for rows in problem.facts.values() for row in rows for term in row})
    count: dict[str, int] = {}
    entities: dict[str, Entity] = {}
    for id in reversed(ids):
        name, bar, _ = id.partition("_bar_")
        number = ""
        if bar:
            name += "basin" if "basin" in id else ""
            count[name] = count.get(name, 0) + 1
            number = str(count[name])
        # Without a number the name keeps a blank at its end; no game shows such a name, but a grammar could.
        entities[id] = Entity(id, problem.objects[id], f"{name} {number}")
    return entities


def load_game(path: str | os.PathLike, logic: str | os.PathLike | None = None) -> Game:
    """Reads a `game.tw-pddl` file.

    Args:
        path: the file, of any ALFWorld release with PDDL games (2.1.1 and later).
        logic: folder with `alfred.pddl` and `alfred.twl2` that replace the file's own domain and grammar; gives a game
            of release 2.1.1 the wording of the current one. The file's task sentence is kept.

    Returns:
        A live episode in its initial state.

    Raises:
        OSError: a file cannot be opened.
        ValueError: one line: which file, what is wrong with it, how to correct it.
    """
    path = Path(path)
    data = _read_json(path)
    texts = {}
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(data.get(key), str):
            raise ValueError(f"{path}: the text {key!r} is missing; generate the game again or take the released file")
        texts[key] = data[key]
    if logic is not None:
        logic = Path(logic)
        texts["pddl_domain"] = _read_text(logic / "alfred.pddl")
        goal = _GOAL.search(texts["grammar"])
        if goal is None:
            raise ValueError(f"{path}: its grammar has no 'Your task is to: ...' to carry over; load it without logic=")
        texts["grammar"] = _read_text(logic / "alfred.twl2").replace(_PLACE_HOLDER, goal[1])
    try:
        grammar = parse_grammar(texts["grammar"])
        game = Game(GameData(str(path), texts["pddl_domain"], grammar, texts["pddl_problem"]))
        game.reset()  # the first texts must be complete: better to fail now than in the middle of a run
        return game
    except (ValueError, RecursionError) as error:
        where = f"{path} with the logic in {logic}" if logic is not None else str(path)
        raise ValueError(f"{where}: {error}; unpack the released file again, or correct its PDDL or grammar") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); unpack the released file again") from None


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: broken JSON ({error}); unpack the released file again") from None
    except RecursionError:
        raise ValueError(f"{path}: JSON nested too deeply; unpack the released file again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}; is this a game.tw-pddl file?")
    return data
