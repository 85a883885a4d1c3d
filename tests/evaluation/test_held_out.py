"""What is random in a run: no two of its parts draw from one random key, and validations are no part of the last evaluation."""

import functools
import types

import jax
import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.evaluation import held_out as evaluation
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.build import build
from hgpo_jax.trainer import behavior_cloning, loop, step
from tests.helpers.pretended import FakeJob, Runner
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_two_parts_of_a_run_draw_from_one_random_key(monkeypatch, tmp_path, seed):
    """All that samples and shuffles in a run is run, and what it is given noted; rollouts and updates are empty."""
    fields = [*TINY, "warm_start=cloning", "cloning.max_steps=6", "cloning.check_every=1", "cloning.episodes=8", f"seed={seed}"]
    with jax.set_mesh(mesh_of()):
        job = build(load(None, [*fields, f"cache_dir={tmp_path}"]), mesh_of())
        nothing = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), job.abstract_episodes())
        used: dict[bytes, list] = {}

        def note(part, keys):
            for key in np.asarray(jax.random.key_data(keys)).reshape(-1, 2):
                used.setdefault(key.tobytes(), []).append(part)

        def rollout(part, params, tasks, keys, groups, decoding, held_out=False):
            note(part, keys)
            return RolloutResult(nothing, None)

        def generate_play(env, expert, key, tasks, **settings):
            note("play", jax.random.split(key, len(tasks)))  # one for each episode
            return play(env, expert, key, tasks, **settings)

        play = behavior_cloning.generate_play
        monkeypatch.setattr(behavior_cloning, "generate_play", generate_play)
        monkeypatch.setattr(behavior_cloning.Student, "learn", lambda self, key, steps: (note("cloning", key), (0.0, 0))[1])
        story = types.SimpleNamespace(text=lambda: "")  # nothing was played
        monkeypatch.setattr(job.runner, "story", lambda *_: story)
        monkeypatch.setattr(evaluation, "summarize", lambda *_: dict.fromkeys(("success", "turns", "invalid"), 0.0))
        monkeypatch.setattr(loop, "summarize", evaluation.summarize)
        play_as = lambda part: monkeypatch.setattr(job.runner, "rollout", functools.partial(rollout, part))  # noqa: E731
        play_as("practice")
        behavior_cloning.clone(job)
        play_as("training")
        for number in range(8):
            step.sample(job, None, number)
            note("shuffling", job.key(number, 1))
        play_as("validation")
        loop.validate(job, None)
        play_as("evaluation")
        evaluation.play_held_out(job, None, Decoding())
    shared = {tuple(parts) for parts in used.values() if len(parts) > 1}
    assert not shared
    parts = {part for parts in used.values() for part in parts}
    assert parts == {"practice", "training", "shuffling", "validation", "evaluation", "play", "cloning"}


class Listed(Runner):
    def select_tasks(self, stream, seed, index):
        if stream == "validation":
            assert self.num_held_out_tasks is None
            return [-1 - int(i) for i in index]
        return super().select_tasks(stream, seed, index)


@pytest.mark.parametrize(("listed", "episodes", "apart"), [
    (None, 6, True), (30, 6, True), (12, 6, True), (11, 6, False), (6, 6, False), (3, 6, False),
])  # fmt: skip
def test_validations_play_tasks_that_the_final_evaluation_does_not_where_there_are_enough(listed, episodes, apart):
    job, played = FakeJob(load(None, [f"evaluation.episodes={episodes}"]), Listed(num_held_out_tasks=listed)), []
    usual = job.runner.rollout

    def rollout(params, tasks, keys, index, decoding, held_out):
        played.append((tasks, np.asarray(jax.random.key_data(keys)).tolist()))
        return usual(params, [abs(task) for task in tasks], keys, index, decoding, held_out)

    job.runner.rollout = rollout
    count = evaluation.num_evaluated(job)
    validation, _, _ = evaluation.play_held_out(job, None, Decoding(), validation=True)
    first = len(played)
    final, _, _ = evaluation.play_held_out(job, None, Decoding())
    tasks = [[task for tasks, _ in some for task in tasks][:count] for some in (played[:first], played[first:])]
    assert evaluation.validates_apart(job) == apart and len(validation.success) == len(final.success) == count
    assert len(set(tasks[0])) == len(set(tasks[1])) == count
    assert set(tasks[0]).isdisjoint(tasks[1]) if apart else set(tasks[0]) == set(tasks[1])
    keys = [{tuple(key) for _, some in part for key in some} for part in (played[:first], played[first:])]
    assert keys[0].isdisjoint(keys[1])
