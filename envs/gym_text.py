"""Gymnasium's environments as text environments: actions by their names, observations drawn or described.

    env = GymnasiumText("FrozenLake-v1", is_slippery=False)               # pip install 'hgpo_jax[gymnasium]'
    observation, commands = env.reset(0)
    observation, commands, reward, done, info = env.step("right")

The levels of MiniGrid and BabyAI (`pip install 'hgpo_jax[minigrid]'`) are described by `minigrid_text.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hgpo_jax.envs import user_code
from hgpo_jax.envs.command_line import one_line

DESCRIBE = "the option describe=FILE.py:NAME (in a run env.options.describe=FILE.py:NAME)"
MINIGRID = ("BabyAI-", "MiniGrid-")  # prefixes of the ids of its levels


class Facts(NamedTuple):
    """Facts from an environment's documentation that its program does not provide.

    actions: their names, in the order of their numbers.
    goal: the task.
    legend: how to read the environment's own observation.
    won_above: the last reward of a solved episode is above it; None: the rewards do not show which episodes are solved.
    """

    actions: tuple[str, ...] = ()
    goal: str = ""
    legend: str = ""
    won_above: float | None = None


# By prefix of the id; from the pages of https://gymnasium.farama.org/environments/toy_text/.
FACTS = {
    "Blackjack": Facts(
        ("stick", "hit"),
        "get closer to 21 than the dealer, but not above it",
        "the numbers are your sum, the dealer's open card (1 is an ace), and 1 if an ace of yours counts 11",
        won_above=0,
    ),
    "CliffWalking": Facts(
        ("up", "right", "down", "left"), "reach T without stepping on the cliff C", "you are at x", won_above=-100
    ),
    "FrozenLake": Facts(
        ("left", "down", "right", "up"),
        "walk from S over the ice F to the goal G without falling into a hole H",
        "you are at the letter in []",
        won_above=0,
    ),
    "Taxi": Facts(
        ("south", "north", "east", "west", "pick up", "drop off"),
        "bring the passenger to the destination",
        "the taxi is at [], the passenger waits at **, or else is in the taxi, the destination is at (); | is a wall",
        won_above=0,
    ),
}


SEEDS = 2**31  # many environments take no seed of more bits; tasks have 64


class GymnasiumText:
    """One of Gymnasium's environments whose actions are discrete, or texts. A task is the seed of its reset.

    Args:
      id: its registered name, such as FrozenLake-v1, or module:name or file.py:name if a module or a file registers it.
      describe: `package.module:NAME` or `FILE.py:NAME` of a function of (observation, the unwrapped environment) that
        describes the observation. By default a text is shown, MiniGrid's is described in words, a text rendering is shown, and
        whole numbers are written.
      actions: their names, which are the commands, in the order of their numbers. By default MiniGrid's own, those of
        `FACTS`, or else `action 0` and so on. Where actions are texts there are no commands.
      goal: the task in words. By default MiniGrid's mission, that of `FACTS`, or else `solve ID`.
      max_turns: actions after which an episode ends, by default the environment's own limit. A level with a limit of its own,
        such as MiniGrid's (option max_steps), ends there at the latest.
      won_above: an episode that terminates with a last reward above it is won. By default `is_success` or `success` in the
        environment's own info decides, or the reward if it is known to: in the environments of `FACTS`, and above 0 in
        MiniGrid's levels. For others success is unknown.
      survival: whether an episode is won by lasting until its time limit, as in CartPole, where the end is a fall. Every turn
        must then be one of the commands: during others the environment does not move.
      options: further arguments of `gymnasium.make`.

    Attributes:
      task_types: (id,); `task_type` is 0.
      goal: the task of the running episode.
      expert: only if there is a scripted player, that is for BabyAI's levels (`protocol.TextExpert`).

    Raises ValueError, in one line, if it cannot be made or played in text.
    """

    def __init__(
        self,
        id: str,
        describe: str = "",
        actions: tuple[str, ...] = (),
        goal: str = "",
        max_turns: int = 0,
        won_above: float | None = None,
        survival: bool = False,
        **options: Any,
    ):
        if max_turns < 0:
            raise ValueError(f"max_turns={max_turns}: must be a whole number above 0, or 0 for the environment's own limit")
        limit = {"max_episode_steps": max_turns} if max_turns else {}
        # The checker is for authors of environments; its warnings would appear among a run's output.
        place, _, name = id.rpartition(":")
        if place.endswith(".py"):
            try:
                user_code.module_of(place)
            except ValueError as error:
                raise ValueError(f"id={id}: {error}") from None
            id = name
        self._id, self._options = id, {"disable_env_checker": True, **limit, **options}
        self._env = self._make()
        self._levels = _minigrid_text(self._env)
        # `expert` is set only where it works: its presence signals that there is a scripted player.
        if self._levels and self._levels.has_bot(self._env):
            self._bot: Any = None  # made on first use
            self.expert = self._bot_command
        spec = self._env.spec
        of_gymnasium = str(spec.entry_point).startswith("gymnasium.")  # others may have similar names
        facts = next((FACTS[name] for name in FACTS if of_gymnasium and spec.name.startswith(name)), Facts())
        self._numbers = self._named_actions(actions, facts)
        self._view = self._chosen_view(describe)
        self._goal = goal or ("" if self._levels else self._known_goal(facts, described=bool(describe)))
        if survival and won_above is not None:
            raise ValueError(f"won_above={won_above}: survival=true decides what is won; leave one of the two out")
        self._survival, self._won_above = survival, won_above
        self._usually_above = 0.0 if self._levels else facts.won_above
        default_turns = spec.max_episode_steps or (self._levels.longest(self._env) if self._levels else 0)
        self.max_turns = max_turns or default_turns
        if not self.max_turns:
            raise ValueError(
                f"max_turns=0: {id} has no limit of its own; give the option max_turns=N (in a run env.options.max_turns=N)"
            )
        self.task_types, self.task_type = (id,), 0

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts the task with this seed; returns the first observation and the commands to choose from."""
        self._task, self._turns = int(task) % SEEDS, 0
        reset = self._levels.reset if self._levels else _reset
        observation, info = reset(self._env, self._task)
        self._past_actions: list[int] = []  # actions since the reset
        self.goal = self._goal or self._env.unwrapped.mission
        return self._see(observation, info)

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs one action; one that is not among the commands takes a turn and changes nothing.

        Returns: (observation, commands, the environment's reward, done, info with `won`, None at an end with unknown success,
        `admissible` and `truncated`).
        """
        self._turns += 1
        number = self._chosen(action.strip())
        reward, terminated, truncated = 0.0, False, False
        if number is not None:
            observation, reward, terminated, truncated, info = self._env.step(number)
            self._past_actions.append(number)
            self._see(observation, info)
        done = bool(terminated or truncated or self._turns >= self.max_turns)
        won = self._is_won(bool(terminated), float(reward)) if done else False
        info = {"won": won, "admissible": number is not None, "truncated": done and not terminated}
        return self._observation, list(self._commands), float(reward), done, info

    def _chosen(self, action: str) -> Any:
        """Returns the environment's action, None if this is none."""
        space = self._env.action_space
        if _is_text(space):
            return action if space.contains(action) else None
        return self._commands.get(action)

    def _is_won(self, terminated: bool, reward: float) -> bool | None:
        """Whether an episode that has ended is won; None if that is unknown."""
        if self._survival:
            return not terminated and len(self._past_actions) == self._turns
        for name in ("is_success", "success") if self._won_above is None else ():
            if self._info.get(name) is not None:
                return bool(self._info[name])
        above = self._usually_above if self._won_above is None else self._won_above
        return None if above is None else terminated and reward > above

    def _see(self, observation, info) -> tuple[str, list[str]]:
        self._info = info
        allowed = info.get("action_mask")  # actions that have an effect, in Taxi's format
        self._commands = {
            name: number for index, (name, number) in enumerate(self._numbers.items()) if allowed is None or allowed[index]
        }
        self._observation = self._view(observation)
        return self._observation, list(self._commands)

    def _bot_command(self, history_length: int) -> str:
        """Returns the command of the level's bot, which remembers the whole episode, whatever a prompt shows of it."""
        if self._bot is None:
            self._bot = self._levels.Bot(self._make())
        return list(self._numbers)[self._bot.action(self._task, self._past_actions)]

    def close(self) -> None:
        """Ends the environment."""
        self._env.close()

    # -- what it is made of -------------------------------------------------------------------------------------

    def _make(self, **more):
        extra = "gymnasium"
        try:
            import gymnasium

            if self._id.startswith(MINIGRID):
                extra = "minigrid"
                import minigrid  # noqa: F401 (registers its levels)
        except ImportError as error:
            raise ValueError(f"id={self._id}: {error}; pip install 'hgpo_jax[{extra}]'") from None
        try:
            env = gymnasium.make(self._id, **self._options, **more)
        except Exception as error:  # any error of an environment with its options
            raise ValueError(one_line(f"id={self._id}: cannot be made: {error!s:.300}")) from None
        if not isinstance(env.action_space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            kind = f"{env.action_space!s:.80}"
            raise ValueError(one_line(f"id={self._id}: its actions are {kind}; choose one with discrete actions, or texts"))
        return env

    def _named_actions(self, actions: tuple[str, ...], facts: Facts) -> dict[str, int]:
        """Returns name -> number of every action."""
        space = self._env.action_space
        if _is_text(space):
            if actions:
                raise ValueError(one_line(f"actions={','.join(actions)}: those of {self._id} are any texts; leave it out"))
            return {}
        count = int(space.n)
        names = actions or (self._levels.action_names(self._env) if self._levels else facts.actions)[:count]
        names = tuple(name.strip() for name in names) or tuple(f"action {number}" for number in range(count))
        if len(set(names)) != count or len(names) != count:
            option = f"actions={','.join(names)}"
            raise ValueError(one_line(f"{option}: {self._id} has {count} actions; name each, in the order of their numbers"))
        return {name: int(space.start) + index for index, name in enumerate(names)}

    def _drawing(self) -> str:
        """Returns the text that the environment draws. Raises ValueError."""
        drawn = self._env.render()
        drawn = "\n".join(map(str, drawn)) if isinstance(drawn, list | tuple) else drawn
        if not isinstance(drawn, str):
            kind = type(drawn).__name__
            raise ValueError(f"id={self._id}: draws a {kind} instead of a text; give {DESCRIBE}")
        return drawn

    def _known_goal(self, facts: Facts, described: bool) -> str:
        goal = facts.goal or f"solve {self._id}"
        return goal if described or not facts.legend else f"{goal}; {facts.legend}"

    def _chosen_view(self, describe: str) -> Callable[[Any], str]:
        """Returns a function that describes an observation."""
        if describe:
            try:
                _, function = user_code.load(user_code.locate(describe, user_code.ENVIRONMENTS))
            except ValueError as error:
                raise ValueError(f"describe={describe}: {error}") from None
            return lambda observation: function(observation, self._env.unwrapped)
        if self._levels:
            return self._levels.describe
        if _is_text(self._env.observation_space):
            return str
        if "ansi" in (self._env.metadata.get("render_modes") or ()) and "render_mode" not in self._options:
            self._env = self._make(render_mode="ansi")
            return lambda _: plain(self._drawing())
        if _whole_numbers(self._env.observation_space):
            return _numbers_text
        kind = f"{self._env.observation_space!s:.80}"
        raise ValueError(
            one_line(
                f"id={self._id}: its observations are {kind}, and it draws no text; "
                f"give {DESCRIBE}, a function of (observation, environment) that returns text"
            )
        )


def _reset(env, task: int):
    return env.reset(seed=task)


def _minigrid_text(env):
    """Returns the module that describes MiniGrid's levels, if this is one."""
    if "minigrid" not in sys.modules:  # code that registers its own levels has imported it
        return None
    from hgpo_jax.envs import minigrid_text  # needs the optional minigrid

    return minigrid_text if isinstance(env.unwrapped, minigrid_text.MiniGridEnv) else None


_COLOURED = re.compile(r"\x1b\[([\d;]*)m([^\x1b]*)\x1b\[0m")
_CODE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_CELL = re.compile(r"(?:\x1b\[[\d;]*m)*[^\x1b](?:\x1b\[0m)*")
_LAST_ACTION = re.compile(r"\A *\(\w+\)\n|\n *\(\w+\)\n*\Z")


def plain(drawing: str) -> str:
    """Converts a drawing for terminals to a text of the state alone.

    Colours become brackets: [background colour], *bold*, (other colours). The line that names the last action is removed.
    Blanks separate adjacent cells, because a tokenizer would read several letters as one word.
    """
    text = _LAST_ACTION.sub("", drawing).strip("\n")
    if "\n" in text and not re.search(r"[^\S\n]", text):
        text = "\n".join(" ".join(_CELL.findall(line)) for line in text.split("\n"))
    while (inner := _COLOURED.sub(_mark_colour, text)) != text:  # colours may be nested
        text = inner
    return _CODE.sub("", text)


def _mark_colour(match: re.Match) -> str:
    codes = [int(code or 0) for code in match[1].split(";")]
    if any(40 <= code <= 48 or 100 <= code <= 107 for code in codes):
        return f"[{match[2]}]"
    return f"*{match[2]}*" if 1 in codes else f"({match[2]})"


def _is_text(space) -> bool:
    from gymnasium import spaces  # optional

    return isinstance(space, spaces.Text)


def _whole_numbers(space) -> bool:
    from gymnasium import spaces  # optional

    if isinstance(space, spaces.Tuple):
        return all(map(_whole_numbers, space.spaces))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _numbers_text(observation) -> str:
    if isinstance(observation, tuple):
        return ", ".join(map(_numbers_text, observation))
    return ", ".join(str(int(number)) for number in np.ravel(observation))
