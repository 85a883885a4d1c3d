"""The states of text episodes where equality of observations is not equality of texts.

    env.state_key=./my_file.py:key     key(observation) -> a value that equal states share: text, number, dict, array, ...
    advantage.similarity=0.95          observations of a prompt group that are this similar (`advantages/similarity.py`)

Elsewhere states are equal if their observations are: on the host `EpisodeBuffer` numbers equal texts, in the compiled program
`advantages.grouping.state_ids` numbers equal rows.

An observation with a step counter or a clock occurs only once; without a peer group-based methods learn nothing from it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hgpo_jax.advantages.similarity import canonical_key, similar_states
from hgpo_jax.config import Config
from hgpo_jax.envs import user_code
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.utils.errors import ConfigError, RunError, one_line


def state_key_function(name: str) -> Callable:
    """Returns the function of `env.state_key=name`. Raises ConfigError if there is none."""
    try:
        return user_code.load_function(name, user_code.STATE_KEYS, "key(observation)")
    except ValueError as error:
        raise ConfigError(f"env.state_key={name}: {error}") from None


def key_numbers(texts: list[str], name: str) -> np.ndarray:
    """Returns i64[texts], the number of the first text with an equal key. Raises RunError if the function fails."""
    key = state_key_function(name)
    first: dict = {}
    numbers = []
    for number, text in enumerate(texts):
        try:
            numbers.append(first.setdefault(canonical_key(key(text)), number))
        except Exception as error:  # any error of the user's function
            fault = f"{type(error).__name__}: {error!s:.200}"
            raise RunError(one_line(f"env.state_key={name}: fails with {fault}, for the observation {text!r:.200}")) from None
    return np.array(numbers, np.int64)


def regroup(result: RolloutResult, config: Config) -> RolloutResult:
    """Returns a host rollout's result with the configured states: each is the number of its first text.

    Raises RunError.
    """
    e, report = result
    assert report is not None  # text episodes have one
    B, T = e.mask.shape
    turns = e.mask.sum(1)
    state_ids = np.zeros((B, T + 1), np.int64)  # before each turn, and after the last
    state_ids[:, :-1] = e.states
    state_ids[np.arange(B), turns] = e.next_states[np.arange(B), turns - 1]
    happened = (np.arange(T + 1) <= turns[:, None]) & (turns[:, None] > 0)
    if config.env.state_key:
        states = key_numbers(report.texts, config.env.state_key)[state_ids] if report.texts else state_ids
    else:
        assert config.advantage.similarity is not None
        texts = [
            [report.texts[number] for number in row] if any(row_happened) else []
            for row, row_happened in zip(state_ids.tolist(), happened, strict=True)
        ]
        clusters = similar_states(texts, happened, np.asarray(e.groups), config.advantage.similarity)
        first: dict[int, int] = {}
        for cluster, number in zip(clusters[happened].tolist(), state_ids[happened].tolist(), strict=True):
            first.setdefault(cluster, number)
        states = np.array([[first.get(cluster, 0) for cluster in row] for row in clusters.tolist()])
    before, after = (np.where(e.mask, part, 0).astype(np.int32) for part in (states[:, :-1], states[:, 1:]))
    return RolloutResult(e.replace(states=before, next_states=after), report)
