"""WebShop as text tasks: `reset(task)` and `step(action)`, with reward and turn limit.

env = WebshopText.open("items.json.gz", "attributes.json.gz", first=500)
observation, commands = env.reset(0)
observation, commands, reward, done, info = env.step("search[blue cotton shirt]")
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from hgpo_jax.envs.webshop.commands import click, parse
from hgpo_jax.envs.webshop.oracle import next_command, purchase_plan
from hgpo_jax.envs.webshop.pages import SEP
from hgpo_jax.envs.webshop.shop import Shop, load_shop

WON_REWARD = 10.0  # as verl-agent pays, for a purchase with the full score only
SEARCH = "search[<your query>]"


class WebshopText:
    """Shopping tasks played one at a time, at most `max_turns` actions each. Task n is `shop.goals[first + n]`.

    Args:
      shop: where to shop.
      first, last: which goals; verl-agent trains on 500 and up and validates on the first 500.
      max_turns: actions after which an episode ends (15 in GiGPO's runs, 30 in HGPO's).
      seeds: used instead of the shop's own seed; of S seeds, task n is goal first + n // S of seed number n % S.

    Attributes:
      task_types: their names, here one; `task_type` is an index into it.
      goal: the instruction of the running episode.

    Raises:
      ValueError: no goal in that range, or a turn limit below 1.
    """

    task_types = ("shopping",)
    task_type = 0

    def __init__(self, shop: Shop, first: int = 0, last: int | None = None, max_turns: int = 15, seeds: Sequence[int] = ()):
        self._shop, self.max_turns, self._seeds = shop, max_turns, seeds or (shop.seed,)
        self._goals = range(len(shop.goals))[first:last]
        if first < 0 or not self._goals:
            raise ValueError(f"first={first}, last={last}: no goals there, the shop has {len(shop.goals)}")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be at least 1")

    @classmethod
    def open(cls, *files: str | os.PathLike, first=0, last=None, max_turns=15, seeds=(), **options) -> WebshopText:
        """Opens data files; `files` and `options` as in `load_shop`. Equal calls in one process share the shop."""
        shop = _open(tuple(os.fspath(file) for file in files), tuple(sorted(options.items())))
        return cls(shop, first, last, max_turns, seeds)

    def __len__(self) -> int:
        return len(self._goals) * len(self._seeds)

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts task number `task`; returns the first observation and the commands to choose from."""
        if not 0 <= task < len(self):
            raise IndexError(f"task={task}: there are {len(self)} goals")
        goal, which = divmod(task, len(self._seeds))
        self._current_shop = _with_seed(self._shop, self._seeds[which])
        self._session = self._current_shop.session(self._goals[goal])
        self._turns = 0
        self._plan: list[str] = []  # the expert's
        self.goal = self._session.goal["instruction_text"].strip()
        observation, _ = self._session.reset()
        return self._shorten(observation), self._commands()

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs one action; an inadmissible one shows the same page again.

        Returns: (observation, commands, reward, done, info). The reward is 10 for a purchase that scores exactly 1, else
        0. `info` holds `won`, `admissible`, `truncated` and `score`, the purchase's score in [0, 1].
        """
        verb, argument = parse(action)
        clickable = verb == "click" and argument != "search" and argument in self._session.actions["clickables"]
        observation, score, bought, _ = self._session.step(action)
        self._turns += 1
        won = bought and score == 1.0
        done = bought or self._turns >= self.max_turns
        info = {"won": won, "admissible": clickable or verb == "search", "score": score, "truncated": done and not bought}
        return self._shorten(observation), self._commands(), WON_REWARD * won, done, info

    def expert(self, history_length: int) -> str:
        """Returns the command of the oracle (`oracle.py`), which knows the intended product."""
        self._plan = self._plan or purchase_plan(self._current_shop, self._session.goal)
        return next_command(self._session, self._plan)

    def _commands(self) -> list[str]:
        actions = self._session.actions
        clicks = [click(label) for label in actions["clickables"] if label != "search"]
        return [SEARCH, *clicks] if actions["has_search_bar"] else clicks

    def _shorten(self, page: str) -> str:
        """Returns the text after the instruction, each part in quotes; a page without the instruction is returned unchanged."""
        parts = page.split(SEP)
        if self.goal not in parts:
            return page
        return SEP.join(f"'{part}'" for part in parts[parts.index(self.goal) + 1 :])


@functools.lru_cache(maxsize=4)
def _open(files: tuple[str, ...], options: tuple) -> Shop:
    return functools.partial(load_shop, **dict(options))(*files)


@functools.lru_cache(maxsize=512)
def _with_seed(shop: Shop, seed: int) -> Shop:
    return shop if seed == shop.seed else shop.with_seed(seed)
