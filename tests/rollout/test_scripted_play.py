"""Play of text environments by their own expert, or with random commands."""

import time

import numpy as np
import pytest

from hgpo_jax.envs.household import Household
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.envs.protocol import TextExpert
from hgpo_jax.envs.sokoban import Sokoban
from hgpo_jax.envs.sokoban.text import SokobanText
from hgpo_jax.rollout import requirements
from hgpo_jax.rollout.scripted_play import play


class Count:
    """Counts up to the task; the expert says what comes next."""

    max_turns, task_types, task_type, goal = 6, ("count",), 0, "count"
    faulty = False

    def reset(self, task):
        self.task, self.at = task, 0
        return "0", ["1", "2", "3"]

    def expert(self, history_length):
        if self.faulty:
            raise KeyError("expert")
        return str(self.at + 1)

    def step(self, action):
        self.at += action == str(self.at + 1)
        won = self.at == self.task
        return str(self.at), ["1", "2", "3"], 10.0 * won, won, {"won": won, "admissible": action in "123"}


class Random:
    """The same without an expert."""

    max_turns, task_types = Count.max_turns, Count.task_types
    task_type, goal, reset, step = 0, "count", Count.reset, Count.step


def test_without_noise_the_expert_plays_and_prompts_show_what_was_before():
    (bare,) = play(Count, [3], noise=0.0, history_length=0, seed=0)
    assert [(list(turn.history), turn.turn) for turn in bare.inputs] == [([], 0), ([], 1), ([], 2)]
    (episode,) = play(Count, [3], noise=0.0, history_length=2, seed=0)
    assert episode.won and episode.commands == ["1", "2", "3"]
    assert [turn.observation for turn in episode.inputs] == ["0", "1", "2"]
    assert [list(turn.history) for turn in episode.inputs] == [[], [("0", "1")], [("0", "1"), ("1", "2")]]
    assert [turn.turn for turn in episode.inputs] == [0, 1, 2]


def test_with_noise_the_label_stays_the_experts():
    episodes = list(play(Count, range(1, 4), noise=0.9, history_length=1, seed=0))
    for episode in episodes:
        assert episode.commands == [str(int(turn.observation) + 1) for turn in episode.inputs]
    done = [action for episode in episodes for turn in episode.inputs for _, action in turn.history]
    assert len(set(done)) > 1 and any(len(episode.inputs) > task for task, episode in enumerate(episodes, 1))


def test_without_an_expert_commands_are_random_and_equal_for_equal_seeds():
    first, again, other = (
        [episode.commands for episode in play(Random, [3] * 8 + [2] * 8, noise=0.3, history_length=1, seed=seed)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert {command for commands in first for command in commands} == {"1", "2", "3"}


@pytest.mark.parametrize(("time_limit", "waited"), [(None, "0.3 s"), (0.2, r"0.2 s \(env.time_limit\)")])
def test_an_environment_that_hangs_does_not_hang_its_caller(time_limit, waited, monkeypatch):
    monkeypatch.setattr(requirements, "LIMIT", 0.3)
    monkeypatch.setattr(Count, "step", lambda self, action: time.sleep(60))
    with pytest.raises(ValueError, match=rf"^task 3 cannot be played: Hangs: step\('1'\) gives no answer in {waited}; see why"):
        list(play(Count, [3], noise=0.0, history_length=1, seed=0, time_limit=time_limit))


def test_what_cannot_be_played_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr(Count, "faulty", True)
    with pytest.raises(
        ValueError, match=r"^task 3 .*: expert\(1\): line \d+, `raise KeyError.*: fails with KeyError: 'expert'$"
    ):
        list(play(Count, [3], noise=0.0, history_length=1, seed=0))
    monkeypatch.setattr(Random, "step", lambda self, action: 1 / 0)
    with pytest.raises(ValueError, match=r"^task 1 cannot be played: ZeroDivisionError: division by zero$"):
        list(play(Random, [1], noise=0.0, history_length=1, seed=0))
    monkeypatch.setattr(Random, "reset", lambda self, task: ("0", []))
    with pytest.raises(ValueError, match=r"task 1 cannot .* lists no commands to choose from, and has no expert"):
        list(play(Random, [1], noise=0.0, history_length=1, seed=0))


@pytest.mark.parametrize("make", [lambda: HouseholdText(Household()), lambda: SokobanText(Sokoban())])
def test_the_embedded_experts_solve_their_texts(make):
    env = make()
    assert isinstance(env, TextExpert)
    episodes = list(play(lambda: env, range(8), noise=0.0, history_length=2, seed=0))
    assert np.mean([episode.won for episode in episodes]) > 0.8
    for episode in episodes:
        assert all(command in turn.commands for turn, command in zip(episode.inputs, episode.commands, strict=True))
