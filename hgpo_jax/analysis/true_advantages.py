"""True advantages of a rollout's steps, from many continuations before and after each of them.

    truth = true_advantages(job, params, tasks, episodes, continuations=64)
    diagnostics.against_truth(estimate("hgpo", **batch).advantages, truth.advantages, truth.standard_error, episodes.mask)

A compiled environment can go on from any state, so the policy itself measures a step's value: without groups, bootstrapping or
bias, and with a standard error for each step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import Job
from hgpo_jax.utils.errors import ConfigError

ROWS = 4096  # continuations in one program


class Truth(NamedTuple):
    """All are f64[B, T], 0 where no step happened. Returns are discounted and contain no penalty for invalid actions.

    advantages: Q - V. standard_error: of each of them. values: V of the state before the step.
    """

    advantages: np.ndarray
    standard_error: np.ndarray
    values: np.ndarray


def true_advantages(job: Job, params, tasks, episodes: Episodes, *, continuations: int = 64, seed: int = 0) -> Truth:
    """Computes Q - V of every step from `continuations` episodes that the policy plays on from the states before and after it.

    The advantage is r_t + gamma mean(returns after the step) - mean(returns from before it); the two means share no sample.

    Args:
      job: one with a compiled environment.
      params: the weights that sampled the episodes, as `runner.rollout` takes them.
      tasks: [B], those of that rollout.
      episodes: its record.

    Raises:
      ConfigError: the environment cannot go on from a state, or fewer than two continuations are requested.
    """
    runner, config = job.runner, job.config
    if not isinstance(runner, CompiledRunner):
        raise ConfigError(f"env.name={config.env.name}: true advantages need a compiled environment")
    if continuations < 2:
        raise ConfigError(f"continuations={continuations}: give at least 2, for a standard error")
    mask = np.asarray(episodes.mask)
    B, T = mask.shape
    states = runner.replay(tasks, episodes)
    before = np.flatnonzero(np.pad(mask, ((0, 0), (0, 1))))  # the state after the last turn is worth nothing
    rows = np.repeat(before, continuations)
    decoding, gamma = Decoding(temperature=config.rollout.temperature), config.advantage.gamma
    returns, key = np.zeros(len(rows)), jax.random.key(seed)
    for begin in tqdm(range(0, len(rows), ROWS), desc="continuations", unit_scale=ROWS, leave=False, disable=None):
        chunk = np.resize(rows[begin : begin + ROWS], ROWS)  # repeats fill up: one shape, one program
        keys = jax.random.split(jax.random.fold_in(key, begin), ROWS)
        rewards = runner.play_on(params, jax.tree.map(lambda a, chunk=chunk: a[chunk], states), keys, decoding)
        returns[begin : begin + ROWS] = (np.asarray(rewards) @ gamma ** np.arange(T))[: len(rows) - begin]
    samples = returns.reshape(len(before), continuations)
    values, variances = np.zeros((2, B * (T + 1)))
    values[before], variances[before] = samples.mean(1), samples.var(1, ddof=1) / continuations
    values, variances = values.reshape(B, T + 1), variances.reshape(B, T + 1)
    advantages = np.asarray(episodes.rewards, np.float64) + gamma * values[:, 1:] - values[:, :-1]
    error = np.sqrt(gamma**2 * variances[:, 1:] + variances[:, :-1])
    return Truth(np.where(mask, advantages, 0.0), np.where(mask, error, 0.0), np.where(mask, values[:, :-1], 0.0))
