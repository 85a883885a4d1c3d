"""Rewards from outside: functions of text and of compiled episodes, what they may do wrong, and what a run records of them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutReport, RolloutResult
from hgpo_jax.rollout.reward_workers import read_rewards
from hgpo_jax.rollout.rewards import make_reward
from hgpo_jax.setup.build import build
from hgpo_jax.setup.job import Job
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import dynamic_sampling, step
from hgpo_jax.trainer.metrics import rollout_metrics, rollout_sums
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY

TEXTS = """
import os, time

def polite(episode):
    {"raises": lambda: 1 / 0, "hangs": lambda: time.sleep(600), "dies": lambda: os._exit(3)}.get(episode.goal, lambda: 0)()
    if episode.goal == "each turn":
        return [float(len(observation)) for observation in episode.observations[1:]]
    return "a lot" if episode.goal == "talks" else sum("please" in said for said in episode.responses)
"""
FUNCTIONS = """
import jax.numpy as jnp

def first_word(episode):
    return 1.0 * episode.responses[:, 0]

def short(episode):
    return 1.0 / (episode.task - 1) - jnp.float32(episode.mask.sum())

def of_goals(episode):
    return episode.goal

def too_many(episode):
    return jnp.zeros(9)

def branches(episode):
    return 1.0 if episode.success else 0.0

def alone():
    return 0.0

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(FUNCTIONS)
    (tmp_path / "texts.py").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward(*overrides, episodes=None):
    return make_reward(load(None, overrides), episodes if episodes is not None else Episodes.zeros(4, 3, 4, 2))


def played(turns, **fields):
    """Episodes with these numbers of turns, and the environment's reward 10 at the last."""
    e = Episodes.zeros(len(turns), 3, 4, 2)
    for episode, count in enumerate(turns):
        e.mask[episode, :count], e.states[episode, :count], e.next_states[episode, :count] = True, 0, 1
        e.rewards[episode, count - 1], e.success[episode] = 10, True
    return e.replace(groups=np.arange(len(turns), dtype=np.int32), **fields)


def text_result(goals, turns):
    responses, actions, admissible = ([[said] * count for count in turns] for said in ("Two, please.", "two", True))
    scores = np.ones(len(turns))
    report = RolloutReport(["seen", "afterwards"], goals, responses, actions, admissible, scores, failures={}, counts={})
    return RolloutResult(played(turns), report)


def test_text_episodes_get_rewards_and_one_whose_function_fails_is_left_out(here, monkeypatch):
    limits = "reward.time_limit=1", "reward.workers=2"
    with_rewards = reward("env.name=household_text", "reward.source=./texts.py:polite", "warm_start=none", *limits)
    goals = ["counts", "raises", "each turn", "hangs", "talks", "dies", "counts"]
    (e, report), sums = with_rewards(text_result(goals, [2, 3, 2, 1, 1, 2, 3]))
    np.testing.assert_array_equal(e.rewards, [[0, 12, 0], [0] * 3, [4, 20, 0], [0] * 3, [0] * 3, [0] * 3, [0, 0, 13]])
    assert e.mask.sum(1).tolist() == [2, 0, 2, 0, 0, 0, 3] and not e.success[[1, 3, 4, 5]].any()
    assert e.groups.tolist() == list(range(7))
    assert {number: reason.split(":")[1].strip() for number, reason in report.failures.items()} == {
        1: "ZeroDivisionError", 3: "no answer in 1 s", 4: "TypeError", 5: "its worker process died",
    }  # fmt: skip
    metrics = rollout_metrics([rollout_sums(e, 1.0, ("agent",)) | sums])
    assert metrics["reward/polite"] == 19 / 3 and metrics["reward/environment"] == 10 and metrics["reward/failed"] == 4
    assert metrics["return"] == 49 / 3


def test_a_run_whose_function_fails_in_every_episode_ends(here):
    fields = ["env.name=household_text", "reward=./texts.py:polite", "warm_start=none", "method=dapo"]
    config = load(None, [*fields, "rollout.prompt_groups=1", "rollout.group_size=3"])
    rollout = lambda params, *inputs: text_result(["raises", "talks", "talks"], [2, 3, 2])  # noqa: E731
    runner = types.SimpleNamespace(rollout=rollout, select_tasks=lambda *which: None, roles=("agent",), signals=())
    job = Job(config=config, mesh=None, policies={}, tokenizer=None, runner=runner, reward=reward(*fields))
    with pytest.raises(RunError, match=r"^iteration 5: all 3 episodes failed, in the first one: reward: ZeroDivisionError: "):
        step.sample(job, None, 4)


def test_a_function_is_not_asked_of_episodes_that_failed_before(here):
    with_rewards = reward("env.name=household_text", "reward=./texts.py:polite", "warm_start=none")
    failed = text_result(["counts", "counts", "raises"], [2, 1, 1])
    failed.report.failures[2] = "its environment failed"
    for field in ("mask", "rewards"):
        getattr(failed.episodes, field)[2] = 0
    (e, report), sums = with_rewards(failed)
    assert e.rewards.tolist() == [[0, 12, 0], [11, 0, 0], [0, 0, 0]]
    assert (float(sums["reward/environment"]), sums["reward/failed"]) == (20, 0)
    assert report.failures == {2: "its environment failed"}


def test_compiled_episodes_get_rewards_inside_a_program(here):
    responses = np.array([[[3, 0], [4, 0], [9, 0]], [[5, 0]] * 3], np.int32)
    e = played([2, 1], responses=responses, task=np.array([0, 1], np.int32))
    result = RolloutResult(jax.tree.map(jnp.asarray, e), None)
    (each_turn, _), sums = reward("reward=./scores.py:first_word", episodes=e)(result)
    assert each_turn.rewards.tolist() == [[3, 14, 0], [15, 0, 0]]
    assert (float(sums["reward/first_word"]), float(sums["reward/environment"]), int(sums["reward/failed"])) == (12, 20, 0)
    short = "reward=./scores.py:short"  # infinite for a task of type 1
    (at_the_end, _), sums = reward(short, episodes=e)(result)
    assert at_the_end.rewards.tolist() == [[0, 7, 0], [0] * 3]
    assert at_the_end.mask.sum(1).tolist() == [2, 0] and at_the_end.groups.tolist() == [0, 1]
    assert (float(sums["reward/short"]), int(sums["reward/failed"])) == (-3, 1)


@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_answers_near_their_limit_are_punished_as_in_dapo(method, monkeypatch):
    """Where groups are chosen, they are by what was reached alone."""
    monkeypatch.setattr(dynamic_sampling, "MAX_TRIES", 1)
    fields = [f"method={method}", "env.name=household_team_text", "warm_start=none", "rollout.prompt_groups=2",
              "rollout.group_size=2", "rollout.response_limit=100", "reward.overlong_cache=20"]  # fmt: skip
    config, e = load(None, fields), played([3, 2, 3, 1])
    check_together(config)
    e.response_lengths[:], e.agents[:] = [[80, 100, 20], [81, 90, 0], [81, 95, 100], [99, 0, 0]], [[0] * 3] * 2 + [[1] * 3] * 2
    e.rewards[2:], e.groups[:] = 0, [0, 0, 1, 1]
    e.rewards[2, 0] = 5  # the group whose rewards differ
    given = e.rewards.copy()
    runner = types.SimpleNamespace(
        rollout=lambda *_: RolloutResult(e, None), select_tasks=lambda *which: None, roles=("searcher", "carrier"), signals=()
    )
    (got, _), sums, _ = step.sample(Job(config, None, {}, None, runner), None, 0)
    expected = np.zeros((4, 3))
    for episode, turn in np.argwhere(e.mask):
        room = 100 - 20 - int(e.response_lengths[episode, turn])
        expected[episode, turn] = 0 if room >= 0 else max(-1, room / 20)
    want = given + expected
    np.testing.assert_allclose(got.rewards, want if method == "grpo" else [*want[2:], *np.zeros((2, 3))], atol=1e-6)
    assert rollout_metrics(sums)["reward/overlong"] == pytest.approx(expected.sum() / 4)
    assert expected.min() == -1 and (expected[e.mask] == 0).any() and len(set(expected.flat)) > 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "1 numbers were returned for 2 turns"),
        ([1.0, "2"], "a reward is a str, not a number"),
        (float("nan"), "a reward is nan"),
        ([0, 1e39], r"a reward is 1e\+39"),
        (None, "a NoneType was returned; return a number, or a list with one for each turn"),
    ],
)
def test_what_a_function_may_not_return(returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_rewards(returned, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward=score"], "reward.source='score': must be one of package.module:NAME or path/to/file.py:NAME"),
        (["reward=./none.py:score"], "reward.source=./none.py:score: no file"),
        (["reward=./scores.py:shor"], r"reward.source=./scores.py:shor: .* has no shor; did you mean short\?"),
        (["reward=./scores.py:number"], "reward.source=./scores.py:number: number is a int"),
        (["reward=./scores.py:alone"], "reward.source=./scores.py:alone: does not take one argument"),
        (["reward=./scores.py:too_many"], r"reward.source=./scores.py:too_many: returns shape \(9,\); return f32.., or f32.3."),
        (["reward=./scores.py:of_goals"], "reward.source=./scores.py:of_goals: line 11, `return episode.goal`: fails with Att"),
        (["reward=./scores.py:branches"], "reward.source=./scores.py:branches: line 17, `.* if .*`: values are not known"),
        (["reward.overlong_cache=8"], "reward.overlong_cache=8: the answers of env.name=household, compiled, have their own"),
        (
            ["env.name=household_text", "rollout.response_limit=8", "reward.overlong_cache=9"],
            "reward.overlong_cache=9: more than rollout.response_limit=8; give less",
        ),
        (["reward.sorce=add"], r"reward.sorce=add: no such field; did you mean reward.source\?"),
    ],
)
def test_mistakes_are_one_line(here, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        check_together(load(None, overrides))
        reward(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # compiles rollouts
def test_a_job_with_a_reward(here):
    byte_tokenizer().save_pretrained(here / "tok")
    text = ["env.name=household_text", "policy.tokenizer=tok", "rollout.prompt_limit=512", "rollout.response_limit=4"]
    kinds = {
        "first_word": ["reward=./scores.py:first_word"],
        "polite": ["reward=./texts.py:polite", *text],
    }
    for name, given in kinds.items():
        job = build(load(None, [*TINY, *given, "cache_dir=cache"]), mesh_of())
        with jax.set_mesh(mesh_of()):
            _, sums, _ = step.sample(job, job.given_params, 0)
        metrics = rollout_metrics(sums)
        assert metrics["reward/failed"] == 0 and metrics["reward/environment"] >= 0
        assert (metrics["reward/first_word"] > 0) if name == "first_word" else (metrics["reward/polite"] == 0)
