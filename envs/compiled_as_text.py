"""A compiled environment as text tasks: `reset(task)` and `step(action)` in its own words.

`Words(env)` is for comparing the compiled and the text version; the environments for people and language models derive from it
(`envs/*/text.py`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable

import jax
import numpy as np

from hgpo_jax.envs.protocol import Expert, ListsActions, Team

BLANK = "_"  # an empty slot between words


class Words:
    """Generated tasks played one at a time. A task is the random key that it is generated from, as a 64-bit number.

    Args:
      env: the compiled environment; instances over the same one share its compiled functions. One that does not list its
        possible actions (`protocol.ListsActions`) offers no commands.

    Attributes:
      task_types: their names; `task_type` is an index into it.
      goal: the task of the running episode.
      roles: names in a team; `role` is the index of the one that acts next.
    """

    def __init__(self, env):
        self._env, self.max_turns, self.task_types = env, env.max_turns, env.task_types
        self._shared = env if isinstance(env, Hashable) else _ById(env)
        if isinstance(env, Team):
            self.roles = env.roles

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts the task of `jax.random.key(task)`; returns the first observation and the commands to choose from."""
        if not 0 <= task < 2**64:
            raise IndexError(f"task={task}: must be a whole number below 2**64")
        key = np.array([task >> 32, task & 0xFFFFFFFF], np.uint32)
        with jax.set_mesh(one_cpu()):
            self._state, output = jax.device_get(_programs(self._shared)[0](key))
        self._key = key
        self._past: dict[int, list[np.ndarray]] = defaultdict(list)  # each role's actions since the reset
        self.task_type = int(self._state.task)
        self.goal = self._goal(output["goal"])
        return self._see(output)

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs one action; an inadmissible one changes nothing.

        Returns: (observation, commands, the environment's reward, done, info with `won` and `admissible`).
        """
        ids = self._ids(action)
        with jax.set_mesh(one_cpu()):
            self._state, output = jax.device_get(_programs(self._shared)[1](self._state, ids))
        self._past[self.role].append(ids)
        info = {"won": bool(output["won"]), "admissible": not output["invalid"]}
        return *self._see(output), float(output["reward"]), bool(output["done"]), info

    def _expert(self, player, history_length: int) -> str:
        """Returns the action of a compiled environment's player (`protocol.Expert`) after the K past turns of its prompt."""
        length = max(history_length, 1)
        blank = [np.zeros(self._env.action_length, np.int32)] * length
        recent = np.array([*blank, *self._past[self.role]][-length:])
        turn = sum(map(len, self._past.values()))
        with jax.set_mesh(one_cpu()):
            ids = jax.device_get(_expert_action(self._shared, player)(self._state, recent, self._key, turn))
        return self._command(*self._words(ids))

    def _see(self, output) -> tuple[str, list[str]]:
        self.role = int(output["role"])
        listed = [words[legal] for legal, words in output["admissible"]]
        self._commands = {self._command(*self._words(ids)): ids for rows in listed for ids in rows}
        return self._tell(output["observation"]), sorted(self._commands)

    def _words(self, ids) -> list[str]:
        return [self._env.words[i] for i in ids]

    # -- the wording --------------------------------------------------------------------------------------------

    def _ids(self, action: str) -> np.ndarray:
        """Converts an action to word ids, i32[action_length]; an unknown word is -1."""
        id_of = {word: index for index, word in enumerate(self._env.words)} | {BLANK: 0}
        ids = [id_of.get(word, -1) for word in action.split()][: self._env.action_length]
        return np.array(ids + [0] * (self._env.action_length - len(ids)), np.int32)

    def _goal(self, ids) -> str:
        return _join(self._words(ids))

    def _command(self, *words: str) -> str:
        return _join(words)

    def _tell(self, ids) -> str:
        return _join(self._words(ids))


def _join(words) -> str:
    return " ".join(word or BLANK for word in words).rstrip(f" {BLANK}")


@functools.cache
def one_cpu() -> jax.sharding.Mesh:
    """Returns a mesh of one CPU, if jax may use it: a small environment needs none of the caller's devices.

    It is the last one: a device runs one program at a time, and the first one is where updates of simulated devices run.
    """
    axis = (jax.sharding.AxisType.Auto,)
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves it out, as in JAX_PLATFORMS=cuda
        devices = jax.local_devices()
    return jax.make_mesh((1,), ("environment",), axis_types=axis, devices=devices[-1:])


class _ById:
    """Stands for an environment without a hash, as a dataclass that is not frozen, where programs are shared."""

    def __init__(self, env):
        self.env = env

    def __eq__(self, other):
        return isinstance(other, _ById) and self.env is other.env

    def __hash__(self):
        return id(self.env)


@functools.lru_cache(maxsize=8)
def _programs(shared):
    """Builds jitted `reset(key data)` and `step(state, action)`, both -> (state, the ingredients of the text)."""
    env = shared.env if isinstance(shared, _ById) else shared

    def admissible(state):
        return [env.admissible(state)] if isinstance(env, ListsActions) else []

    def role(state):
        return env.role(state) if isinstance(env, Team) else 0

    @jax.jit
    def reset(key):
        state, observation = env.reset(jax.random.wrap_key_data(key, impl="threefry2x32"))
        output = {"observation": observation, "admissible": admissible(state), "role": role(state), "goal": env.goal(state)}
        return state, output

    @jax.jit
    def step(state, action):
        state, observation, reward, done, invalid = env.step(state, action)
        return state, {
            "observation": observation,
            "admissible": admissible(state),
            "role": role(state),
            "reward": reward,
            "done": done,
            "won": env.won(state),
            "invalid": invalid,
        }

    return reset, step


@functools.lru_cache(maxsize=8)
def _expert_action(shared, player: Expert):
    """Builds jitted `(state, recent, key data, turn) -> action`; the task and the turn break ties."""
    env = shared.env if isinstance(shared, _ById) else shared

    @jax.jit
    def action(state, recent, key, turn):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), turn)
        return player.expert_action(env, state, recent, key)

    return action
