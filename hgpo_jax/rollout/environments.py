"""The environments that `env.name=` names: a table of built-in ones, and a user's own from outside the repository.

All differences between environments are in the table `ENVIRONMENTS`; no other code checks an environment's name.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from hgpo_jax.config import Config, EnvConfig
from hgpo_jax.envs import user_code
from hgpo_jax.envs.alfworld import expert as alfworld_expert
from hgpo_jax.envs.household import Household, HouseholdPlan, HouseholdSubgoals, HouseholdTeam
from hgpo_jax.envs.household import expert as household_expert
from hgpo_jax.envs.household.text import HouseholdTeamText, HouseholdText
from hgpo_jax.envs.math.data import load as load_problems
from hgpo_jax.envs.math.problems import Problems
from hgpo_jax.envs.math.team import GeneratedTeam, ListedTeam
from hgpo_jax.envs.math.text import GeneratedMath, ListedMath
from hgpo_jax.envs.protocol import Expert, Pictured, is_compiled
from hgpo_jax.envs.search.makers import ALONE, TEAM, Kinds, search_makers
from hgpo_jax.envs.search.retrieval_client import TIME_LIMIT
from hgpo_jax.envs.sokoban import Sokoban, SokobanPixels
from hgpo_jax.envs.sokoban import expert as sokoban_expert
from hgpo_jax.envs.sokoban.text import SokobanText
from hgpo_jax.rollout.alfworld_games import alfworld, alfworld_games, alfworld_text
from hgpo_jax.rollout.requirements import check_compiled, check_text
from hgpo_jax.rollout.workers import end
from hgpo_jax.utils.errors import ConfigError

Makers = tuple[Callable[[], Any], Callable[[], Any]]  # makers of a text environment for training, and of one for the evaluation


@dataclasses.dataclass(frozen=True)
class Environment:
    """The object behind an environment's name.

    options: fields of `env` that it reads, besides the common ones.
    compiled: makes the compiled environment. text: returns the factories of the text environment. If both exist, `backend.py`
      decides between them.
    games: the numbers of the games of each stream of tasks (`rollout/tasks.py`), i32[.], if a compiled environment has a
      list of games; otherwise its tasks are generated.
    agent: whether every episode starts a command, which asks for its turns itself (`serving/agent_rollout.py`).
    expert: the scripted player that the warm start of a compiled environment clones, if it has one.
    template: file with the prompts of a text environment, or a name in `rollout/templates/`.
    fallback: characters at the end of a malformed response that are taken as its action, as in verl-agent.
    lower_case: whether actions lose their capitals, as verl-agent's do. Elsewhere they are the policy's words, or in the
      environment's spelling where it lists such a command.
    pictures: whether it shows pictures in place of observations (`protocol.Pictured`). Its text environment then is played on
      the device alone.
    picture_size: height and width of the pictures of a user's own text environment (`protocol.TextPictured`), seen on the host.
    free_text: whether actions may hold any words, so that commands are no complete list.
    max_turns: that of a user's own environment; for built-in ones it is a field.
    digest: hash of the code of a user's own environment, "" for built-in ones.
    splits: whether the tasks to evaluate on are others than those to train on.
    """

    options: tuple[str, ...] = ()
    compiled: Callable[[Config], Any] | None = None
    text: Callable[[Config], Makers] | None = None
    games: Callable[[Config], dict[str, np.ndarray]] | None = None
    agent: bool = False
    expert: Expert | None = None
    template: str = "text"
    fallback: int = 30
    lower_case: bool = False
    pictures: bool = False
    picture_size: tuple[int, int] | None = None
    free_text: bool = False
    max_turns: int | None = None
    digest: str = ""
    splits: bool = True

    @property
    def is_seen(self) -> bool:
        """Whether prompts show pictures."""
        return self.pictures or self.picture_size is not None


def _from_fields(make: type, options: tuple[str, ...], config: Config):
    """Makes an environment with the fields of `env` that it reads. Raises ConfigError."""
    try:
        return make(**{name: getattr(config.env, name) for name in options})
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None


def _as_text(text: type, make: Callable[[Config], Any], config: Config) -> Makers:
    """Returns the factories of a compiled environment as text."""
    maker = functools.partial(text, make(config))
    return maker, maker


def webshop_text(config: Config) -> Makers:
    """Returns the factories of shops with the goals for training, and with those for evaluation. Raises ConfigError."""
    env = config.env
    data = env.data
    if not data:
        raise ConfigError(f"env.data=: {env.name} needs its data; give data=FOLDER")
    try:
        from hgpo_jax.envs.webshop.text import WebshopText  # needs packages of the extra webshop

        files = webshop_files(data)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"env.data={data}: {error}") from None
    options = {"max_turns": env.max_turns, "order": env.goal_order}
    make = functools.partial(WebshopText.open, *files, **options)
    # verl-agent shuffles the goals separately for each prompt group and each of its 128 validation episodes.
    seeds = (range(config.rollout.prompt_groups), range(1000, 1128)) if env.goal_order == "verl-agent" else ((), ())
    # The first 500 goals are for evaluation, as in WebShop.
    return functools.partial(make, first=500, seeds=seeds[0]), functools.partial(make, first=0, last=500, seeds=seeds[1])


def webshop_files(folder: str) -> list[Path]:
    """Returns the catalogue and the attributes in a folder of WebShop's files; of a built catalogue, the folder alone.

    The processes of `env.workers` share what is mapped from a built one. Raises ValueError.
    """
    if Path(folder, "meta.json").is_file():  # which is written last
        return [Path(folder)]
    catalogues, attributes = (_by_size(Path(folder), stem) for stem in ("items_shuffle", "items_ins(?:_v2)?"))
    pairs = [(catalogues[size], attributes[size]) for size in sorted(catalogues.keys() & attributes.keys())]
    if len(catalogues) == len(attributes) == 1:
        pairs = list(zip(catalogues.values(), attributes.values(), strict=True))
    if not pairs:
        built = "or a catalogue that hgpo_jax.envs.webshop.catalogue has built"
        raise ValueError(f"expected WebShop's items_shuffle*.json and items_ins*.json (or .json.gz) in it, {built}")
    if len(pairs) > 1:
        names = " and ".join(catalogue.name for catalogue, _ in pairs)
        raise ValueError(f"holds the catalogues {names}; give a folder with one of them and its attributes")
    return [*pairs[0]]


def _by_size(folder: Path, stem: str) -> dict[str, Path]:
    """Returns WebShop's files of a kind by the end of their names, as "_1000" of the small catalogue's and "" of the whole
    one's. stem: a regular expression."""
    files = sorted(folder.glob("items_*")) if folder.is_dir() else []
    matches = ((re.fullmatch(rf"{stem}(.*)\.json(?:\.gz)?", file.name), file) for file in files)
    return {match[1]: file for match, file in matches if match}


def search_text(kinds: Kinds, config: Config) -> Makers:
    """Returns the factories of questions for training, and of held-out ones. Raises ConfigError."""
    env = config.env
    try:
        # A last request may take as long; then the worker that waits would count as hung.
        patience = max(0.0, 0.8 * env.time_limit - TIME_LIMIT)
        options = env.data, env.retriever, env.passages, env.top_k, env.max_turns, patience
        return search_makers(kinds, Path(config.cache_dir, "search"), *options)
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None


def math_text(generated: type[GeneratedMath], listed: type[ListedMath], config: Config) -> Makers:
    """Returns the factories of mathematics for training and for evaluation, generated or from files. Raises ConfigError."""
    env = config.env
    fields = {name: getattr(env, name) for name in GENERATED_MATH}
    if not env.data:
        try:
            make = functools.partial(generated, Problems(*fields.values()), env.max_turns)
        except ValueError as error:
            raise ConfigError(f"env.{error}") from None
        return make, functools.partial(make, held_out=True)
    for name, value in fields.items():
        if value != EnvConfig.model_fields[name].default:
            raise ConfigError(f"env.{name}={value}: env.data={env.data} has the problems; leave out one of the two")
    try:
        data = load_problems(env.data)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={env.data}: {error}") from None
    options: dict[str, Any] = {"task_types": data.kinds, "max_turns": env.max_turns, "latex": data.latex}
    return functools.partial(listed, data.train, **options), functools.partial(listed, data.test, **options)


GENERATED_MATH = ("problems", "operations", "digits")
SEARCH = ("data", "retriever", "passages", "top_k", "max_turns")
HOUSEHOLD, SOKOBAN = ("tasks", "rooms", "places", "max_turns"), ("size", "max_turns")
household = functools.partial(_from_fields, Household, HOUSEHOLD)
household_milestones = functools.partial(_from_fields, Household, (*HOUSEHOLD, "milestones"))
household_team = functools.partial(_from_fields, HouseholdTeam, HOUSEHOLD)
household_plan = functools.partial(_from_fields, HouseholdPlan, HOUSEHOLD)
household_subgoals = functools.partial(_from_fields, HouseholdSubgoals, HOUSEHOLD)
sokoban = functools.partial(_from_fields, Sokoban, SOKOBAN)
sokoban_pixels = functools.partial(_from_fields, SokobanPixels, (*SOKOBAN, "tile"))

ENVIRONMENTS = {
    "household": Environment((*HOUSEHOLD, "milestones"), compiled=household_milestones, expert=household_expert),
    "household_text": Environment(
        HOUSEHOLD,
        text=functools.partial(_as_text, HouseholdText, household),
        template="household",
    ),
    "household_team": Environment(HOUSEHOLD, compiled=household_team, expert=cast(Expert, HouseholdTeam)),
    "household_team_text": Environment(
        HOUSEHOLD,
        text=functools.partial(_as_text, HouseholdTeamText, household_team),
        template="household",
    ),
    "household_plan": Environment(HOUSEHOLD, compiled=household_plan, expert=cast(Expert, HouseholdPlan)),
    "household_subgoals": Environment(HOUSEHOLD, compiled=household_subgoals, expert=cast(Expert, HouseholdSubgoals)),
    "sokoban": Environment(SOKOBAN, compiled=sokoban, expert=sokoban_expert),
    "sokoban_pixels": Environment(
        (*SOKOBAN, "tile"),
        compiled=sokoban_pixels,
        text=functools.partial(_as_text, SokobanText, sokoban_pixels),  # for people: a policy sees pictures, on the device
        expert=sokoban_expert,
        template="sokoban_pixels",
        fallback=20,
        lower_case=True,
        pictures=True,
    ),
    "sokoban_text": Environment(
        SOKOBAN,
        text=functools.partial(_as_text, SokobanText, sokoban),
        template="sokoban",
        fallback=20,
        lower_case=True,
    ),
    "alfworld": Environment(
        ("data", "split", "generated", "held_out", "max_turns"),
        compiled=alfworld,
        text=alfworld_text,
        games=alfworld_games,
        expert=alfworld_expert,
        template="alfworld",
        lower_case=True,
    ),
    "math": Environment(
        (*GENERATED_MATH, "data", "max_turns"),
        text=functools.partial(math_text, GeneratedMath, ListedMath),
        template="math",
        free_text=True,
    ),
    "math_team": Environment(
        (*GENERATED_MATH, "data", "max_turns"),
        text=functools.partial(math_text, GeneratedTeam, ListedTeam),
        template="math_team",
        free_text=True,
    ),
    "webshop": Environment(
        ("data", "goal_order", "max_turns"),
        text=webshop_text,
        template="webshop",
        fallback=20,
        lower_case=True,
        free_text=True,
    ),
    "search": Environment(SEARCH, text=functools.partial(search_text, ALONE), template="search", free_text=True),
    "search_team": Environment(SEARCH, text=functools.partial(search_text, TEAM), template="search_team", free_text=True),
    "agent": Environment(("command", "failed", "preload", "num_held_out_tasks", "max_turns"), agent=True),
}


def environment(env: EnvConfig) -> Environment:
    """Returns the environment that `env.name` names. Raises ConfigError if it cannot be found or made."""
    return ENVIRONMENTS[env.name] if env.name in ENVIRONMENTS else _from_outside(*_outside(env), env.time_limit)


def max_turns(env: EnvConfig) -> int:
    """Returns the turns after which an episode ends: `env.max_turns`, or the limit of a user's own environment."""
    return environment(env).max_turns or env.max_turns


def made_outside(env: EnvConfig) -> tuple[Callable[[], Any], Any]:
    """Returns the factory of a user's own environment and one instance, which may lack anything. Raises ConfigError."""
    return _make(*_outside(env))


def expert_of(env) -> Expert | None:
    """Returns the scripted player in a user's own environment: its class, whose methods take `env` as a module's do."""
    return cast(Expert, type(env)) if isinstance(env, Expert) else None


def _outside(env: EnvConfig) -> tuple[str, str, str]:
    """Returns the environment's name as the user wrote it, its place, and its options as JSON."""
    return env.name, user_code.locate(env.name, user_code.ENVIRONMENTS), json.dumps(env.options | user_code.implied(env.name))


def _make(label: str, name: str, options: str) -> tuple[Callable[[], Any], Any]:
    try:
        _, target = user_code.load(name)
    except ValueError as error:
        raise ConfigError(f"env.name={label}: {error}") from None
    try:
        arguments = user_code.options(target, json.loads(options))
    except ValueError as error:
        raise ConfigError(f"env.options.{error}") from None
    make = functools.partial(user_code.make, name, arguments)
    try:
        return make, make()
    except user_code.ERRORS as error:
        raise ConfigError(f"env.name={label}: cannot be made: {type(error).__name__}: {' '.join(str(error).split())}") from None


@functools.lru_cache(maxsize=8)
def _from_outside(label: str, name: str, options: str, time_limit: float) -> Environment:
    """Describes a user's own environment, which is made once to find out its kind."""
    make, env = _make(label, name, options)
    compiled, lists_commands = is_compiled(env), True
    try:
        if compiled:
            check_compiled(env)
        else:
            lists_commands = check_text(env, time_limit)
    except ValueError as error:
        raise ConfigError(f"env.name={label}: {error}") from None
    code = [name, *user_code.code_in(json.loads(options)).values()]
    digest = " ".join(user_code.version(place)["sha256"] or "" for place in code)
    about: dict[str, Any] = {"max_turns": int(env.max_turns), "digest": digest}
    if compiled:
        return Environment(compiled=lambda _: env, expert=expert_of(env), pictures=isinstance(env, Pictured), **about)
    drawn = not hasattr(env, "__len__")  # whether its tasks are
    about["picture_size"] = getattr(env, "picture_size", None)
    end(env)
    target, given, held_out = user_code.load(name)[1], json.loads(options), make
    if split := "held_out" not in given and any(each.name == "held_out" for each in user_code.parameters(target)):
        held_out = functools.partial(user_code.make, name, user_code.options(target, given | {"held_out": True}))
    about |= {} if lists_commands else {"template": "free", "free_text": True}
    return Environment(text=lambda _: (make, held_out), splits=split or drawn, **about)
