"""ALFWorld as text tasks: `reset(task)` and `step(action)`, with reward, turn limit and a choice of games.

env = AlfworldText([game.path for game in list_games("valid_seen")])
observation, commands = env.reset(3)
observation, commands, reward, done, info = env.step("go to desk 1")
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from hgpo_jax.envs.alfworld.dataset import TASK_TYPES, type_in
from hgpo_jax.envs.alfworld.game import WON_REWARD, Game, load_game

HELP = "help"  # admissible in newer releases, but not shown to agents


class AlfworldText:
    """Games played one at a time, at most `max_turns` actions each. Task n is `games[n]`.

    Args:
      games: paths of `game.tw-pddl` files.
      logic: as in `load_game`.
      max_turns: actions after which an episode ends (50 in ALFWorld).
      cache: folder for the games that the expert has compiled.

    Attributes:
      task_types: their names; `task_type` is an index into it, read from the game's path.
      goal: the task of the running episode, with its full stop.

    Raises:
      ValueError: no games, or a turn limit below 1.
    """

    task_types = (*TASK_TYPES, "unknown")

    def __init__(
        self,
        games: Sequence[str | os.PathLike],
        logic: str | os.PathLike | None = None,
        max_turns: int = 50,
        cache: str | os.PathLike | None = None,
    ):
        if not games:
            raise ValueError("games: is empty; name at least one game.tw-pddl file")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be at least 1")
        self._games, self.max_turns = [os.fspath(game) for game in games], max_turns
        self._logic, self._cache = (None if path is None else os.fspath(path) for path in (logic, cache))

    def __len__(self) -> int:
        return len(self._games)

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts task number `task`; returns the first observation and the commands to choose from."""
        if not 0 <= task < len(self):
            raise IndexError(f"task={task}: there are {len(self)} games")
        path = self._games[task]
        self._game = _load(path, self._logic).fresh()
        self._task = task
        self._past: list[str] = []  # actions since the reset
        self._followed: tuple[int, Any] | None = None  # number of actions the expert has followed, its state then
        self.goal = self._game.task
        self.task_type = type_in(path)
        observation, _ = self._game.reset()
        return observation, self._commands()

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs one action; an inadmissible one shows "Nothing happens.".

        Returns: (observation, commands, reward 10 on success else 0, done, info with `won` and `admissible`).
        """
        admissible = action.strip() in self._game.choices
        observation, _, won = self._game.step(action)
        self._past.append(action)
        info = {"won": won, "admissible": admissible}
        return observation, self._commands(), WON_REWARD * won, won or len(self._past) >= self.max_turns, info

    def expert(self, history_length: int) -> str:
        """Returns the command of the local expert (`expert.py`); it remembers as many actions as a prompt shows."""
        from hgpo_jax.envs.alfworld.host_expert import following  # processes that only step need no jax

        games = following(tuple(self._games), self._logic, self.max_turns, self._cache)
        done, state = self._followed or (0, games.start(self._task))
        for action in self._past[done:]:
            state = games.step(state, action)
        self._followed = len(self._past), state
        length = max(history_length, 1)
        return games.command(state, [*[""] * length, *self._past][-length:])

    def _commands(self) -> list[str]:
        return [command for command in self._game.commands if command != HELP]


@functools.lru_cache(maxsize=1024)  # a game takes less than 1 MB, and a prompt group plays the same one
def _load(path: str, logic: str | os.PathLike | None) -> Game:
    return load_game(path, logic)
