"""Numbers that are wrong are said, once each, and end the run when they come again and again."""

import math

import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.trainer.alarms import Alarms
from hgpo_jax.utils.errors import RunError


def row(iteration, **more):
    usual = {"steps": 8.0, "ratio": 1.0, "approx_kl": 0.01, "logp_difference": 1e-6, "nonfinite_steps": 0.0}
    usual["unfinished_share"] = 0.0
    return {"iteration": iteration, **usual, **more}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("ratio", 2.5, "1.2"), ("ratio", 0.8, "1.2"), ("ratio", math.nan, "1.2"),
        ("approx_kl", math.inf, "0.1"), ("logp_difference", 0.01, "0.001"),
    ],
)  # fmt: skip
def test_a_number_above_its_limit_is_said_once_until_it_was_below(name, value, limit):
    alarms = Alarms(load())
    assert alarms.check(row(3)) == []
    (said,) = alarms.check(row(4, **{name: value}))
    assert said.startswith(f"iteration 5: {name} is ")
    assert said.endswith(f", its limit is {limit}" + "; lower learner.lr" * (name == "approx_kl"))
    assert alarms.check(row(5, **{name: value})) == []
    assert alarms.check(row(6)) == []
    assert len(alarms.check(row(7, **{name: value}))) == 1


def test_fewer_bits_may_differ_more():
    assert Alarms(load(None, ["policy.compute_dtype=bfloat16"])).check(row(0, logp_difference=0.1)) == []


def test_skipped_updates_are_said_and_end_the_run_after_so_many_in_a_row():
    alarms = Alarms(load())
    bad = {"nonfinite_steps": 2.0, "logp_difference": math.nan}
    assert "2 updates had a non-finite loss or gradient" in alarms.check(row(0, **bad))[0]
    assert "nonfinite-00001.npz" in alarms.check(row(1, **bad))[0]
    alarms.check(row(2))
    with pytest.raises(RunError, match="the run stops after 3 such iterations in a row"):
        for iteration in (3, 4, 5):
            alarms.check(row(iteration, **bad))
    assert iteration == 5
    earlier = [row(0), *(row(i, nonfinite_steps=1.0) for i in (1, 2))]  # a resumed run counts on
    assert Alarms(load(), earlier[:2]).check(row(2, nonfinite_steps=1.0))
    with pytest.raises(RunError):
        Alarms(load(), earlier).check(row(3, nonfinite_steps=1.0))


@pytest.mark.parametrize(("fields", "mend"), [
    (["method=beacon"], "mend what env.name=household returns"),
    (["method=gdpo", "reward=./mine.py:score"], r"mend what env.name=household or reward.source=\S*mine.py:score returns"),
])  # fmt: skip
def test_a_signal_that_is_no_number_is_not_blamed_on_the_method(fields, mend):
    e = Episodes.zeros(2, 2, 4, 2, signals=1)
    e.mask[:] = True
    e.signals[1, 0] = np.nan
    alarms = Alarms(load(None, fields))
    for iteration in (0, 1):
        (warning,) = alarms.check(row(iteration, nonfinite_steps=1.0), e)
        assert "1 updates were given signals[1, 0, 0] is nan" in warning
    with pytest.raises(RunError, match=f"3 such iterations in a row; {mend}$"):
        alarms.check(row(2, nonfinite_steps=1.0), e)


@pytest.mark.parametrize(("rows", "said"), [
    ([{"success": 0.5, "won_unrewarded": 1.0}] * 3, [0]), ([{"success": 0.5, "won_unrewarded": 0.9}] * 3, []),
    ([{"success": 0.0, "rewarded": 0.1}] * 12, [9]), ([{"success": 0.0, "rewarded": 0.0}] * 12, [9]),
    ([{"success": 0.2}] + [{"success": 0.0, "rewarded": 0.0}] * 11, []),
    ([{"success": math.nan, "rewarded": 0.0}] * 12, []),
    ([{"success": 0.1, "rewarded": 0.1}] + [{"success": 0.0, "rewarded": 0.1}] * 12, []),
    ([{"success": math.nan, "rewarded": 0.1}] * 12, []),  # unknown
    ([{"peers/level0": 0.2, "turns": 5.0}] * 3, [0]), ([{"peers/level0": 0.23, "turns": 5.0}] * 3, []),  # the first is shared
    ([{"peers/level0": 0.0, "turns": 1.0}] * 3, []), ([{"turns": 5.0}] * 3, []),
    ([{"unfinished": 51.0, "steps": 100}] * 3, [0]), ([{"malformed": 51.0, "steps": 100}] * 3, [0]),
    ([{"unfinished": 50.0, "malformed": 50.0, "steps": 100}] * 3, []),
    ([{"prompts_cut": 6.0, "steps": 100}] * 3, [0]), ([{"prompts_cut": 5.0, "steps": 100}] * 3, []),
])  # fmt: skip
def test_what_is_odd_about_an_environment_is_said_once(rows, said):
    alarms = Alarms(load())
    assert [i for i, more in enumerate(rows) if alarms.check(row(i, **more))] == said
    if len(rows) == 12:  # a resumed run counts on, from a file where what is unknown is null
        known = lambda success: None if math.isnan(success) else success  # noqa: E731
        earlier = [row(i, **more | {"success": known(more["success"])}) for i, more in enumerate(rows)]
        assert bool(Alarms(load(), earlier[:9]).check(row(9, **rows[9]))) == bool(said)


def test_causes_by_which_many_programs_fail_are_said_once_each():
    alarms = Alarms(load())
    assert alarms.check(row(0, **{"failed/crash": 0.1, "failed/no_reward": 0.0})) == []
    (said,) = alarms.check(row(1, **{"failed/crash": 0.05, "failed/no_reward": 0.25}))
    assert said.startswith("iteration 2: 25% of the episodes failed, by no reward")
    assert len(alarms.check(row(2, **{"failed/crash": 0.5, "failed/no_reward": 0.25}))) == 1


def test_many_episodes_that_are_left_out_are_said_once():
    """Of those whose environment failed nothing is learned, which may be all that did what fails."""
    alarms = Alarms(load(None, ["rollout.prompt_groups=4", "rollout.group_size=5"]))
    assert alarms.check(row(0, excluded=2.0)) == []
    (said,) = alarms.check(row(1, excluded=3.0))
    assert said.startswith("iteration 2: 3 of 20 episodes failed and are left out") and alarms.check(row(2, excluded=3.0)) == []


def test_a_failing_reward_function_is_said_once():
    alarms = Alarms(load())
    assert alarms.check(row(0, **{"reward/failed": 3.0})) == [
        "iteration 1: the reward function failed in 3 episodes, which are left out"
    ]
    assert alarms.check(row(1, **{"reward/failed": 2.0})) == alarms.check(row(2, **{"reward/failed": 0.0})) == []


def test_a_run_that_leaves_out_every_answer_is_warned():
    cut = {"unfinished_share": 1.0}
    (said,) = Alarms(load(None, ["learner.unfinished=mask"])).check(row(0, **cut))
    assert "every answer was cut at its limit" in said and "rollout.response_limit" in said
    assert Alarms(load()).check(row(0, **cut)) == []


def test_a_run_whose_filter_drops_everything_is_warned_once():
    alarms = Alarms(load(None, ["advantage.keep=valid"]))
    assert alarms.check(row(0, kept_share=0.1)) == []
    (said,) = alarms.check(row(1, kept_share=0.0))
    assert said.startswith("iteration 2: method=hgpo with advantage.keep=valid kept no step, and nothing is learned; ")
    assert alarms.check(row(2, **{"kept_share": 0.0, "peers/level0": 0.0, "turns": 5.0})) == []  # nothing is compared


def test_a_run_that_finds_no_task_to_learn_from_is_warned_once():
    alarms = Alarms(load(None, ["method=dapo"]))
    assert alarms.check(row(0, kept_groups=3, rollouts=4)) == []
    (said,) = alarms.check(row(1, kept_groups=0, rollouts=4))
    assert said.startswith("iteration 2: method=dapo learns from tasks whose episodes differ in success, and none of 4")
    assert alarms.check(row(2, kept_groups=0, rollouts=4, excluded=100)) == []  # of 4 x 256


def test_a_run_without_a_turn_to_learn_from_ends():
    with pytest.raises(RunError, match=r"^iteration 5: the reward function gave no finite numbers in any of its 8 episodes$"):
        Alarms(load()).check(row(4, steps=0.0, **{"reward/failed": 8.0}))
