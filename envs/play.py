"""`python -m hgpo_jax.envs.play`: play an environment in the terminal and see what an agent sees.

    python -m hgpo_jax.envs.play household --seed 3 --tasks place two --rooms kitchen bedroom
    python -m hgpo_jax.envs.play sokoban --size 8 --boxes 2 --picture room.png    and a picture of the room, after each turn
    python -m hgpo_jax.envs.play alfworld path/to/game.tw-pddl
    python -m hgpo_jax.envs.play alfworld path/to/json_2.1.1/valid_seen --seed 7
    python -m hgpo_jax.envs.play webshop items_shuffle_1000.json.gz items_ins_v2_1000.json.gz --seed 7
    python -m hgpo_jax.envs.play search --seed 7              type <search> words</search> or <answer> words</answer>
    python -m hgpo_jax.envs.play ./my_env.py:MyEnv size=5     your own, or package.module:MyEnv, with its options

A command is typed as it stands in the list, or by its number there. Without a terminal, commands are read from standard
input, one per line. An empty line, or the end of the input, ends the game. To see a trained policy play:
`python -m hgpo_jax.watch RUN`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from hgpo_jax.envs import command_line, user_code
from hgpo_jax.envs.command_line import Parser, printable
from hgpo_jax.envs.protocol import INFO, BegunTextEnv, CompiledEnv, TextEnv, is_compiled, members

# Each environment is imported by its own function: some take jax, seconds to import, and others packages that may be missing.


def household(args):
    """The household in ALFWorld's wording, and the task to play."""
    from hgpo_jax.envs.household import Household
    from hgpo_jax.envs.household.text import HouseholdText

    return HouseholdText(_sized(Household, args)), args.seed


def household_team(args):
    """The household for two: you are the searcher and the carrier in turn."""
    from hgpo_jax.envs.household import HouseholdTeam
    from hgpo_jax.envs.household.text import HouseholdTeamText

    return HouseholdTeamText(_sized(HouseholdTeam, args)), args.seed


def household_subgoals(args):
    """The household whose agent says what it is about before it acts, in its own words."""
    from hgpo_jax.envs.compiled_as_text import Words
    from hgpo_jax.envs.household import HouseholdSubgoals

    return Words(_sized(HouseholdSubgoals, args)), args.seed


def _sized(household, args):
    return household(tuple(args.tasks), tuple(args.rooms), args.places, args.things, args.turns or 20)


def sokoban(args):
    """A generated room, drawn."""
    from hgpo_jax.envs.sokoban import Sokoban
    from hgpo_jax.envs.sokoban.text import SokobanText

    if args.picture and (args.picture.suffix != ".png" or not args.picture.parent.is_dir()):
        raise ValueError(f"--picture {args.picture}: must be a .png file in a folder that exists")
    return SokobanText(Sokoban(args.size, args.boxes, max_turns=args.turns or 50)), args.seed


def alfworld(args):
    """One game, or the one that the seed picks in a folder."""
    from hgpo_jax.envs.alfworld.text import AlfworldText

    games = [args.game]
    if args.game.is_dir():
        games = sorted(args.game.rglob("game.tw-pddl"))
        if not games:
            raise ValueError(f"{args.game}: no game.tw-pddl below this folder; unpack the ALFWorld games there")
    return AlfworldText(games, args.logic, args.turns or 50), args.seed % len(games)


def webshop(args):
    """The goal that the seed picks."""
    from hgpo_jax.envs.webshop.text import WebshopText

    files = [file for file in (args.items, args.attributes) if file]
    options = {"human": args.human, "human_goals": True} if args.human else {}
    env = WebshopText.open(*files, max_turns=args.turns or 15, **options)
    return env, args.seed % len(env)


def search(args):
    """A question of the generated world, or of your own data, to answer by searching."""
    from hgpo_jax.envs.search.makers import ALONE

    return _search(ALONE, args)


def search_team(args):
    """The same for three: you are the verifier, the searcher and the answerer in turn."""
    from hgpo_jax.envs.search.makers import TEAM

    return _search(TEAM, args)


def _search(kinds, args):
    from hgpo_jax.envs.search.makers import search_makers

    options = {"top_k": args.top_k, "max_turns": args.turns or 20}
    make, _ = search_makers(kinds, args.cache / "search", args.data, args.retriever, args.passages, **options)
    env = make()
    return env, args.seed % len(env) if hasattr(env, "__len__") else args.seed


def math(args):
    """A generated problem, or one of a folder's: calculate and answer between tags."""
    from hgpo_jax.envs.math.data import load
    from hgpo_jax.envs.math.problems import Problems
    from hgpo_jax.envs.math.text import GeneratedMath, ListedMath

    if args.data:
        try:
            data = load(args.data)
        except ValueError as error:
            raise ValueError(f"{args.data}: {error}") from None
        return ListedMath(data.test, data.kinds, args.turns or 20, data.latex), args.seed % len(data.test)
    return GeneratedMath(Problems(tuple(args.problems), args.operations, args.digits), args.turns or 20), args.seed


def own_environment(args):
    """Your own, by its place or an entry point's name: FILE.py:CLASS or package.module:CLASS; or gymnasium:ID."""
    _, make = user_code.load(user_code.locate(args.name, user_code.ENVIRONMENTS))
    fields = dict(option.partition("=")[::2] for option in args.options) | user_code.implied(args.name)
    if args.turns:
        taken = user_code.parameters(make)
        if not user_code.star(taken) and "max_turns" not in {each.name for each in taken}:
            raise ValueError(f"--turns {args.turns}: {args.name} has no option max_turns; leave it out")
        fields |= {"max_turns": args.turns}
    arguments = user_code.options(make, fields)
    try:
        env = make(**arguments)
    except user_code.ERRORS as error:
        raise ValueError(f"{args.name}: cannot be made: {type(error).__name__}: {error}") from None
    compiled = is_compiled(env)
    _refuse_incomplete(args.name, functools.partial(hasattr, env), members(CompiledEnv if compiled else TextEnv))
    if compiled:
        from hgpo_jax.envs.compiled_as_text import Words  # jax, as above

        env = Words(env)
    return env, args.seed % len(env) if hasattr(env, "__len__") else args.seed


def parser() -> Parser:
    p = Parser(
        prog="python -m hgpo_jax.envs.play",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    common = Parser(add_help=False)
    seed = functools.partial(command_line.whole_number, low=0)
    common.add_argument("--seed", type=seed, default=0, metavar="N", help="which task; default 0")
    common.add_argument("--turns", type=command_line.whole_number, metavar="N", help="actions after which the game ends")
    games = p.add_subparsers(metavar="ENVIRONMENT", required=True, parser_class=Parser)

    def add(start: Callable, name: str = "") -> Parser:
        g = games.add_parser(name or start.__name__, parents=[common], help=start.__doc__, allow_abbrev=False)
        g.set_defaults(start=start)
        return g

    for start in (household, household_team, household_subgoals):
        g = add(start)
        g.add_argument("--tasks", nargs="+", default=["place"], metavar="TASK", help="task types to draw from")
        g.add_argument("--rooms", nargs="+", default=["kitchen"], metavar="ROOM", help="rooms to draw from")
        g.add_argument("--places", type=int, default=6, metavar="N", help="receptacles, 6 to 12")
        g.add_argument("--things", type=int, default=4, metavar="N", help="things, 2 to 8")

    g = add(sokoban)
    g.add_argument("--size", type=int, default=6, metavar="N", help="cells along a side, 6 to 10")
    g.add_argument("--boxes", type=int, default=1, metavar="N", help="boxes, 1 to 4")
    g.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the room there after each turn")

    g = add(alfworld)
    g.add_argument("game", type=Path, metavar="GAME", help="a game.tw-pddl file, or a folder with such files")
    g.add_argument("--logic", type=Path, metavar="DIR", help="folder whose alfred.pddl and alfred.twl2 replace the file's")

    g = add(webshop)
    g.add_argument("items", type=Path, metavar="ITEMS", help="the catalogue, .json or .json.gz, or a built folder")
    g.add_argument("attributes", type=Path, nargs="?", metavar="ATTRIBUTES", help="attributes and synthetic instructions")
    g.add_argument("--human", type=Path, metavar="FILE", help="play the human instructions of this file")

    for start in (search, search_team):
        g = add(start)
        g.add_argument("--data", default="", metavar="FOLDER", help="questions and passages; default: a generated world")
        g.add_argument("--passages", type=command_line.whole_number, default=3000, metavar="N", help="of the generated world")
        g.add_argument(
            "--top-k", type=command_line.whole_number, default=3, metavar="N", help="passages for a search; default 3"
        )
        g.add_argument("--retriever", default="", metavar="URL", help="a server that finds the passages")
        g.add_argument("--cache", type=Path, default=Path("runs/cache"), metavar="FOLDER", help="of indexes")

    g = add(math)
    g.add_argument("--data", type=Path, metavar="FOLDER", help="a problem of its test.jsonl")
    g.add_argument("--problems", nargs="+", default=["arithmetic", "equation", "story"], metavar="KIND", help="to draw from")
    g.add_argument("--operations", type=int, default=2, metavar="N", help="operations in a problem, 1 to 8")
    g.add_argument("--digits", type=int, default=2, metavar="N", help="digits of its numbers, 1 to 6")

    g = add(own_environment, "own")
    g.add_argument("name", metavar="PLACE", help=f"where its class is{_installed()}")
    g.add_argument("options", nargs="*", metavar="option=value", help="keyword arguments of its class")
    return p


def _installed() -> str:
    names = ", ".join(user_code.installed(user_code.ENVIRONMENTS))
    return f", or one of {names}" if names else ""


def _refuse_incomplete(name: str, has: Callable[[str], bool], needed: dict[str, str]) -> None:
    """Raises ValueError if the object that `name` refers to lacks a required member."""
    for member, meaning in needed.items():
        if not has(member):
            raise ValueError(f"{name} lacks {member}: {meaning}")


def play(env, task: int, picture: Path | None = None, call: Callable = lambda function, argument: function(argument)) -> None:
    """Plays one episode, until it ends or the player quits.

    picture: the file of the environment's picture, if it has one. call: calls a function of the environment.
    """
    observation, commands = call(env.reset, task)
    begun = members(BegunTextEnv, beyond=TextEnv)
    _refuse_incomplete("the environment after reset(task)", functools.partial(hasattr, env), begun)
    print(f"Task: {printable(env.goal)}\n")
    for turn in range(1, env.max_turns + 1):
        _show(env, observation, picture)
        for number, command in enumerate(commands, 1):
            print(f"  {number:3d}  {printable(command)}")
        action = _ask(f"turn {turn} of {env.max_turns}> ")
        if not action:
            print("Stopped.")
            return
        if action.isdecimal() and 1 <= int(action) <= len(commands):
            action = commands[int(action) - 1]
        observation, commands, reward, done, info = call(env.step, action)
        _refuse_incomplete("the info of step(action)", info.__contains__, INFO)
        print()
        if not info["admissible"]:
            print("(That was not admissible; an agent is penalized for it.)")
        if done:
            break
    score = f", score {info['score']:g}" if info.get("score") is not None else ""
    outcome = "Success unknown" if info["won"] is None else "Solved" if info["won"] else "Not solved"
    _show(env, observation, picture)
    print(f"\n{outcome} after {turn} turns: reward {reward:g}{score}.")


def _call_users(function: Callable, argument):
    """Calls a function of a user's environment. Raises ValueError for any error of it."""
    try:
        return function(argument)
    except user_code.ERRORS as error:
        raise ValueError(f"{function.__name__}({argument!r:.80}) fails with {user_code.describe_error(error)}") from None


def _show(env, observation: str, picture: Path | None) -> None:
    """Prints what the environment says, and draws it."""
    print(printable(observation))
    if picture:
        from PIL import Image  # only here: few players ask for a picture

        Image.fromarray(env.picture()).save(picture)


def _ask(prompt: str) -> str:
    """Reads the next line; empty at the end of the input. Without a terminal the line is echoed."""
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError):
            return input(prompt).strip()
        return ""
    line = sys.stdin.readline().strip()
    print(f"{prompt}{printable(line)}")
    return line


def main() -> None:
    words = sys.argv[1:]
    named = words and (":" in words[0] or words[0] in user_code.installed(user_code.ENVIRONMENTS))
    args = parser().parse_args(["own", *words] if named else words)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # typeshed says TextIO
    env, task = args.start(args)
    try:
        play(env, task, getattr(args, "picture", None), **({"call": _call_users} if args.start is own_environment else {}))
    finally:
        getattr(env, "close", lambda: None)()


if __name__ == "__main__":
    command_line.run(main, (ValueError, ImportError))
