"""A job whose episodes are random numbers: for what is counted and written, not what is played."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np

from hgpo_jax import config as configuration
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult


@dataclasses.dataclass
class Runner:
    """A runner whose episodes are random numbers drawn from their task; 3 tasks are held out."""

    task_types = ("place", "look")
    num_held_out_tasks: int | None = 3

    def select_tasks(self, stream, seed, index):
        assert stream == "held_out"
        return [(seed or 0) * 1000 + int(i) % (self.num_held_out_tasks or 10**6) for i in index]

    def rollout(self, params, tasks, keys, index, decoding, held_out):
        assert held_out
        B, T = len(tasks), 5
        rng = np.random.default_rng([*tasks, int(decoding.temperature * 10)])
        mask = np.arange(T) < rng.integers(1, T + 1, B)[:, None]
        episodes = Episodes(**{name: None for name in Episodes.__dataclass_fields__} | {
            "mask": mask, "invalid": mask & (rng.random((B, T)) < 0.3), "success": rng.random(B) < 0.5,
            "judged": mask[:, 0],
            "task": np.array([task % 2 for task in tasks]), "prompt_lengths": rng.integers(1, 50, (B, T)) * mask,
            "response_lengths": rng.integers(1, 9, (B, T)) * mask,
        })  # fmt: skip
        return RolloutResult(episodes, SimpleNamespace(scores=np.arange(B) / 10))

    def story(self, result, index):
        return SimpleNamespace(text=lambda: f"{int(result.episodes.mask[index].sum())} turns")


@dataclasses.dataclass
class FakeJob:
    config: configuration.Config
    runner: Runner
    batch: int = 4
    given_params = None
    policies = {}  # noqa: RUF012
    on_rollout_mesh = staticmethod(contextlib.nullcontext)

    def base_rollout_params(self, params):
        return params
