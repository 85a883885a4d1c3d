"""`bench rollout`: steps of both schedules against what can be counted by hand, and answers that end as they should."""

import numpy as np
import pytest

from hgpo_jax.bench import limits, rollout
from hgpo_jax.bench.artificial_environment import ArtificialEnvironment

SMALL = [
    "--repeats", "1", "--turns", "4", "--mean", "12", "--longest", "40", "--shortest-prompt", "10", "--longest-prompt", "30",
]  # fmt: skip


@pytest.mark.slow
def test_fewer_steps_than_lockstep(bench):
    tokens, lockstep, steps, all_steps, answer, _ = bench("rollout", *SMALL, "--episodes", "24", "--slots", "8")
    assert 0.9 < steps["value"] < 1.7 < all_steps["value"]
    assert tokens["ratio"] == pytest.approx(tokens["value"] / lockstep["value"])
    assert tokens["limit_share"] == pytest.approx(1 / steps["value"])
    assert 8 < answer["value"] < 16  # 12, less what is cut


@pytest.mark.slow
def test_equal_answers_need_no_more_steps_than_there_must_be(bench):
    *_, steps, all_steps, answer, _ = bench("rollout", *SMALL, "--episodes", "8", "--slots", "8", "--equal")
    assert steps["value"] == all_steps["value"] == 1 and answer["value"] == 40


@pytest.mark.slow
def test_partial_rollouts_need_fewer_steps_and_leave_fewer_slots_idle(bench):
    small = ("--turns", "8", "--mean", "4", "--longest", "8", "--shortest-prompt", "10", "--longest-prompt", "30")
    whole, time, used, *rows = bench("rollout", *small, "--episodes", "16", "--slots", "16", "--keep", "2")[:9]
    for fewer, quicker, more_used in (rows[:3], rows[3:]):  # interrupted answers are read again, or go on in their slots
        assert fewer["value"] < whole["value"] and fewer["ratio"] == pytest.approx(whole["value"] / fewer["value"])
        assert quicker["ratio"] == pytest.approx(time["value"] / quicker["value"])
        assert 0 < used["value"] < more_used["value"] <= 1


def test_the_fewest_steps():
    assert rollout.fewest(np.array([[5, 4], [2, 2]]), 2) == 4 + 3  # the longest episode, without the first tokens
    assert rollout.fewest(np.array([[5, 4], [3, 4]]), 1) == 4 + 3 + 2 + 3


def test_waiting_times_are_a_tasks_own_and_have_the_mean():
    env = ArtificialEnvironment(10_000, 0.5, spread=True)
    assert env.times(3) == env.times(3) != env.times(4)
    assert np.mean(env.times(3)) == pytest.approx(0.5, rel=0.05) and np.std(env.times(3)) == pytest.approx(0.5, rel=0.05)
    assert ArtificialEnvironment(3, 0.5).times(3) == [0.5] * 3


def test_rates_bound_the_work_by_the_slower_of_two():
    rates = limits.Rates(operations=10.0, reading=2.0)
    assert rates.seconds(bytes_read=4, operations=10) == 2 and rates.seconds(bytes_read=4, operations=30) == 3
