"""Outside rewards: `reward=my_module:score` or `reward=./file.py:score`, added to the environment's.

For text episodes a worker process calls the function (`rollout/reward_workers.py`). For a compiled environment it is pure
JAX, `score(episode: Episodes without B) -> f32[] or f32[T]`: the reward of the last turn, or of every turn.

An episode whose function fails, times out or returns no finite numbers is left out of the update, like one whose environment
fails: with the environment's reward alone it would be compared with group members that have other rewards. A run in which
all episodes fail ends.

`overlong` punishes answers that come near their limit, with or without such a function.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config import Config
from hgpo_jax.config.schema import RewardConfig
from hgpo_jax.envs import user_code
from hgpo_jax.rollout.backend import backend, one_environment
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.process_workers import ProcessWorkers
from hgpo_jax.rollout.result import RolloutReport, RolloutResult
from hgpo_jax.rollout.reward_workers import EpisodeTexts, LocalReward, reward_function
from hgpo_jax.rollout.signals import declaration_fault, declared
from hgpo_jax.rollout.turn_budgets import BUDGET
from hgpo_jax.rollout.workers import EnvFailure
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.untraceable import untraceable

log = logging.getLogger(__name__)

Reward = Callable[[RolloutResult], tuple[RolloutResult, dict]]


def make_reward(config: Config, episodes: Episodes) -> Reward:
    """Builds a function that adds the configured function's rewards to the result of a rollout.

    It returns the result, and sums over its episodes for `metrics.rollout_metrics`: `reward/NAME` of the function's rewards,
    `reward/environment` of the environment's, and `reward/failed`, how many episodes are left out.

    episodes: shapes and dtypes of a rollout's episodes. Raises ConfigError if the function cannot be used.
    """
    source = config.reward.source
    function = reward_function(source)
    if fault := declaration_fault(function):
        raise ConfigError(f"reward.source={source}: {fault}")
    name = f"reward/{source.rpartition(':')[2]}"
    if backend(config) == "compiled":
        if declared(function):
            raise ConfigError(f"reward.source={source}: signals are for text episodes; env.name={config.env.name} is compiled")
        _check_compiled(source, function, episodes)
        return functools.partial(_add_compiled, jax.jit(functools.partial(_with_compiled, function, name)))
    return TextReward(user_code.locate(source, user_code.REWARDS), name, config.reward, declared(function))


def signal_names(config: Config) -> tuple[str, ...]:
    """Returns the names of the signals in `Episodes.signals`: the budget's, the environment's, the reward function's.

    The last two are made to find out. Raises the errors of making them.
    """
    budget = (BUDGET,) if config.env.budgets else ()
    with one_environment(config) as env:
        return (*budget, *declared(env), *reward_signals(config))


def reward_signals(config: Config) -> tuple[str, ...]:
    """Returns the names of the reward function's signals. Raises ConfigError if it cannot be loaded."""
    return declared(reward_function(config.reward.source)) if config.reward.source else ()


def _check_compiled(source: str, function: Callable, episodes: Episodes) -> None:
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), episodes)
    try:
        result = jax.eval_shape(function, one)
    except Exception as error:  # any error of the user's function
        raise ConfigError(one_line(f"reward.source={source}: {untraceable(function, error):.500}")) from None
    shape = getattr(result, "shape", None)
    if shape not in ((), one.mask.shape):
        result_text = f"a {type(result).__name__}" if shape is None else f"shape {shape}"
        turns = one.mask.shape[0]
        raise ConfigError(f"reward.source={source}: returns {result_text}; return f32[], or f32[{turns}], one for each turn")


def _add_compiled(program: Callable, result: RolloutResult) -> tuple[RolloutResult, dict]:
    episodes, sums = program(result.episodes)
    return RolloutResult(episodes, result.report), sums


def _with_compiled(function: Callable, name: str, e: Episodes) -> tuple[Episodes, dict]:
    rewards = jax.vmap(function)(e).astype(jnp.float32)
    if rewards.ndim == 1:
        last = jnp.arange(e.mask.shape[1]) == e.mask.sum(1, keepdims=True) - 1
        rewards = jnp.where(last, rewards[:, None], 0)
    rewards = jnp.where(e.mask, rewards, 0)
    finite = jnp.isfinite(rewards).all(1)
    left_out = lambda a: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.zeros_like(a))  # noqa: E731
    rewards, episodes = left_out(rewards), jax.tree.map(left_out, e).replace(groups=e.groups)
    sums = _sums(name, rewards, episodes.rewards, (~finite).sum())
    return episodes.replace(rewards=rewards + episodes.rewards), sums


def _sums(name: str, rewards, environment, failed) -> dict:
    return {name: rewards.sum(), "reward/environment": environment.sum(), "reward/failed": failed}


def overlong(config: Config, e: Episodes) -> jax.Array | np.ndarray:
    """Computes the soft punishment of overlong answers (DAPO: Yu et al., 2025, arXiv 2503.14476, eq. 13), a reward f32[B, T].

    With L the limit of answers and C `reward.overlong_cache`, an answer of n tokens gets 0 up to L - C, and beyond that
    (L - C - n) / C, so -1 at the limit.
    """
    xp = np if isinstance(e.rewards, np.ndarray) else jnp  # the arrays of a host rollout stay on the host, in every process
    cache = config.reward.overlong_cache
    punished = xp.clip((config.rollout.response_limit - cache - e.response_lengths) / cache, -1, 0)
    return punished.astype(xp.float32)


class TextReward:
    """The reward function of text episodes, whose processes start with the first of these.

    settings: how many there are, and how long a call may take. signals: the names of those that it adds.
    """

    def __init__(self, place: str, name: str, settings: RewardConfig, signals: tuple[str, ...] = ()):
        self._load, self._name, self.signals = functools.partial(user_code.load, place), name, signals
        self._settings = settings
        self._workers: ProcessWorkers | None = None

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers:
            self._workers.close()
            self._workers = None

    def __call__(self, result: RolloutResult) -> tuple[RolloutResult, dict]:
        e, report = result
        assert report is not None  # text episodes have one
        # A timeout must not occur in one process alone.
        answers = distributed.broadcast_from_process_0(lambda: self._ask(e, report))
        streams = np.zeros((1 + len(self.signals), *e.rewards.shape), np.float32)
        failures = dict(report.failures)
        for episode, values, reason in answers:
            if reason:
                failures[episode] = f"reward: {reason}"
                e.leave_out(episode)
            else:
                streams[:, episode, : len(values[0])] = values
        if failed := [episode for episode in failures if episode not in report.failures]:
            log.warning("%d episodes are excluded, the first one: %s", len(failed), failures[failed[0]])
        scores, signals = streams[0], np.moveaxis(streams[1:], 0, -1)
        sums = _sums(self._name, scores, e.rewards, len(failed))
        if self.signals:
            e = e.replace(signals=signals if e.signals is None else np.concatenate([e.signals, signals], -1))
        return RolloutResult(e.replace(rewards=scores + e.rewards), dataclasses.replace(report, failures=failures)), sums

    def _ask(self, e: Episodes, report: RolloutReport) -> list[tuple[int, list[list[float]], str]]:
        """Returns (episode, the `read_streams` of its turns, why there are none) for every episode that was played."""
        played = np.flatnonzero(e.mask[:, 0]).tolist()
        if self._workers is None:
            count, limit = self._settings.workers, self._settings.time_limit
            self._workers = ProcessWorkers(self._load, count, len(e.mask), limit, local=LocalReward)
        self._workers.send([(episode, _as_text(e, report, episode)) for episode in played])
        answers = sorted(self._workers.receive(len(played)))
        return [(n, [], a.reason) if isinstance(a, EnvFailure) else (n, a, "") for n, a in answers]


def _as_text(e: Episodes, report: RolloutReport, episode: int) -> EpisodeTexts:
    turns = int(e.mask[episode].sum())
    states = [*e.states[episode, :turns].tolist(), int(e.next_states[episode, turns - 1])]
    return EpisodeTexts(
        goal=report.goals[episode],
        observations=[report.texts[state] for state in states],
        responses=report.responses[episode],
        rewards=e.rewards[episode, :turns].tolist(),
        success=bool(e.success[episode]) if e.judged[episode] else None,
    )
