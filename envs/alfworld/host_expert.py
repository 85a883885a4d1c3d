"""The local expert for games on the host: it follows an episode in the compiled version, whose observations are identical."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.expert import expert_action
from hgpo_jax.envs.alfworld.tables import compile_games
from hgpo_jax.envs.compiled_as_text import one_cpu


class Following:
    """A list of games with the expert's state. It searches in an order learned from these games.

    Args: as in `AlfworldText`.
    """

    def __init__(self, games: Sequence[str], logic: str | None, max_turns: int, cache: str | None):
        self.env = CompiledAlfworld(compile_games(games, logic, cache=cache), max_turns)
        self._start, self._step = jax.jit(lambda game: self.env.start(game)[0]), jax.jit(lambda *now: self.env.step(*now)[0])
        self._action = jax.jit(lambda state, recent: expert_action(self.env, state, recent, None))

    def start(self, game: int):
        """Returns the state at the beginning of a game."""
        with jax.set_mesh(one_cpu()):
            return self._start(jnp.int32(game))

    def step(self, state, action: str):
        """Returns the state after an action."""
        with jax.set_mesh(one_cpu()):
            return self._step(state, self.env.encode(action))

    def command(self, state, past: Sequence[str]) -> str:
        """Returns the expert's command in a state, after these actions."""
        recent = np.array([self.env.encode(action) if action else np.zeros(3, np.int32) for action in past])
        with jax.set_mesh(one_cpu()):
            return self.env.command(self._action(state, recent))


@functools.lru_cache(maxsize=2)
def following(games: tuple[str, ...], logic: str | None, max_turns: int, cache: str | None) -> Following:
    """Returns the `Following` shared by all environments over the same games."""
    return Following(games, logic, max_turns, cache)
