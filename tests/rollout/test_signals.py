"""Signals: numbers beside the reward, from an environment and from a reward function, on their way into an estimator."""

import types

import numpy as np
import pytest

from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.config import load
from hgpo_jax.rollout import rewards
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.requirements import check_text
from hgpo_jax.rollout.result import RolloutReport, RolloutResult
from hgpo_jax.rollout.reward_workers import read_streams
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, LocalWorkers
from hgpo_jax.setup.build import check_signals
from hgpo_jax.setup.job import Job
from hgpo_jax.trainer import step
from hgpo_jax.trainer.metrics import rollout_metrics
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused

GOOD = {"cost": 2, "format": 0.5}
SCORES = """
def score(episode):
    if episode.goal == "lacks":
        return 1.0, {}
    return 1.0, {"polite": [float(len(said)) for said in episode.responses]}

score.signals = ("polite",)

def plain(episode):
    return 0.0

def one_word(episode):
    return 0.0

one_word.signals = "polite"
"""


class Told:
    """An environment of two turns whose steps have the signals that it is made with."""

    max_turns, task_types, task_type, goal, signals = 2, ("any",), 0, "it", ("format", "cost")

    def __init__(self, told=GOOD):
        self.told = told

    def reset(self, task):
        return "seen", ["go"]

    def step(self, action):
        return "seen", ["go"], 1.0, False, {"won": False, "admissible": True, "signals": self.told}


class Undeclared(Told):
    signals = ()


def answer(env):
    """What a worker answers to the first step in an environment that passed the check before a run."""
    workers = LocalWorkers(lambda: Told())
    workers._make_env = lambda: env
    workers.send([(0, 0, ("go",))])
    ((_, found),) = workers.receive(1)
    return found


def test_an_environments_signals_have_the_declared_order():
    assert LocalWorkers(Told).spec.signals == ("format", "cost")
    assert answer(Told()).signals == [0.5, 2.0]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"format": 1.0}, "signals lacks cost; give a number for each of format, cost"),
        (GOOD | {"formt": 1.0}, "signals has 'formt', which is not declared; name it in the attribute signals, or leave"),
        ([1.0, 2.0], "signals is a list; give a dict with format, cost"),
        (GOOD | {"cost": float("nan")}, "signal cost is nan"),
        (GOOD | {"cost": "2"}, "signal cost is a str, not Real"),
    ],
)
def test_wrong_signals_cost_their_episode_and_are_named(told, said):
    found = answer(Told(told))
    assert isinstance(found, EnvFailure) and said in found.reason
    if "signals" in said:  # names are seen before a run begins
        with pytest.raises(ValueError, match=said.split("'")[0]):
            check_text(Told(told))


def test_what_is_not_declared_is_refused_before_a_run():
    with pytest.raises(ValueError, match="signals has 'cost', which is not declared"):
        check_text(Undeclared())
    wrong = Told()
    wrong.signals = "format"
    with pytest.raises(ValueError, match="Told: signals is 'format'; give different words"):
        check_text(wrong)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (1.0, r"1.0 was returned; with signals return \(reward, dict of polite\)"),
        ((1.0, {}), "signals lacks polite"),
        ((1.0, {"polite": [1.0]}), "1 numbers were returned for 2 turns"),
        ((1.0, {"polite": float("inf")}), "signal polite is inf; give a finite number"),
    ],
)
def test_what_a_function_with_signals_may_not_return(returned, said):
    with pytest.raises((TypeError, ValueError), match=said):
        read_streams(returned, 2, ("polite",))


def test_a_functions_signals_are_as_long_as_its_rewards():
    assert read_streams((1.0, {"b": 2, "a": [3, 4]}), 2, ("a", "b")) == [[0, 1], [3, 4], [0, 2]]
    assert read_streams((3, 4), 2, ()) == [[3, 4]]  # without signals a tuple holds rewards


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Makes the job of episodes of one, two and one turns, of which the last one fails in the reward function."""
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.setattr(rewards, "ProcessWorkers", lambda make, *_, local: local(make))
    turns, goals = [1, 2, 1], ["it", "it", "lacks"]
    report = RolloutReport(
        ["seen"], goals, [["yes", "no"][:n] for n in turns], [["go"] * n for n in turns], [[True] * n for n in turns],
        np.zeros(3), failures={}, counts={},
    )  # fmt: skip

    def make(*overrides, signals=("format", "cost"), function="score"):
        e = Episodes.zeros(3, 2, 4, 2, len(signals))
        e.mask[:] = np.arange(2) < np.array(turns)[:, None]
        if signals:
            e.signals[:] = e.mask[..., None] * np.float32([0.5, 2.0])[: len(signals)]
        runner = types.SimpleNamespace(
            rollout=lambda *_: RolloutResult(e, report), select_tasks=lambda *_: None, roles=("agent",), signals=signals
        )
        fields = ["method=gdpo", "env.name=household_text", "warm_start=none", "rollout.prompt_groups=1",
                  "rollout.group_size=3", f"reward={tmp_path}/scores.py:{function}", *overrides]  # fmt: skip
        config = load(None, fields)
        return Job(config, None, {}, None, runner, rewards.make_reward(config, e))

    return make


def checked(job):
    check_signals(job.config, job.runner.signals, job.signals)


def test_both_sources_reach_episodes_metrics_and_a_dump(job, tmp_path):
    both = job()
    checked(both)
    assert both.signals == ("format", "cost", "polite")
    (e, report), sums, _ = step.sample(both, None, 0)
    np.testing.assert_array_equal(e.signals, [[[0.5, 2, 3], [0] * 3], [[0.5, 2, 3], [0.5, 2, 2]], np.zeros((2, 3))])
    assert "signals lacks polite" in report.failures[2]
    metrics = rollout_metrics(sums)
    assert (metrics["signal/format"], metrics["signal/cost"], metrics["signal/polite"]) == (0.75, 3, 4)
    e.save(tmp_path / "dump.npz")
    np.testing.assert_array_equal(Episodes.load(tmp_path / "dump.npz").signals, e.signals)
    dump = Dump(e, both.config, None)
    assert "gdpo" in dump.estimators and dump.estimate().advantages.any()


def test_without_signals_nothing_is_kept(job, tmp_path):
    none = job("method=grpo", signals=(), function="plain")
    (e, _), sums, _ = step.sample(none, None, 0)
    e.save(tmp_path / "dump.npz")
    assert "signals" not in np.load(tmp_path / "dump.npz").files and Episodes.load(tmp_path / "dump.npz").signals is None
    assert not any(name.startswith("signal/") for name in rollout_metrics(sums))
    assert "gdpo" not in Dump(e, none.config, None).estimators


def test_a_buffer_keeps_the_signals_of_each_turn():
    e = Episodes.zeros(1, 2, 4, 2, 2)
    buffer = EpisodeBuffer(e, [0], history_length=1, strict=False)
    buffer.add_output(0, EnvOutput("seen", ["go"], "it", 0))
    buffer._actions[0].append("go")
    buffer.add_output(0, EnvOutput("seen", ["go"], "it", 0, signals=[0.5, 2.0]))
    np.testing.assert_array_equal(e.signals, [[[0.5, 2], [0, 0]]])


def test_what_does_not_fit_together_is_refused_before_a_run(job):
    with refused("needs signals, and neither env.name=household_text nor a reward function has any; declare them", ConfigError):
        checked(job(signals=(), function="plain"))
    household = types.SimpleNamespace(signals=())
    with refused("neither env.name=household nor a reward function has any; give env.milestones=true", ConfigError):
        checked(Job(load(None, ["method=beacon"]), None, {}, None, household))
    with refused("signals are polite, polite, of which env.name=household_text has polite", ConfigError):
        checked(job(signals=("polite",)))
    with refused("advantage.signal_weights=1.0,2.0: give one for each signal: format, cost, polite", ConfigError):
        checked(job("advantage.signal_weights=1,2"))
    with refused("method=beacon: the first of the signals format, cost, polite must be called milestones", ConfigError):
        checked(job("method=beacon"))
    checked(job("method=beacon", signals=("milestones", "cost")))
    with refused("signals is 'polite'; give different words", ConfigError):
        job(function="one_word")
    with refused("signals are for text episodes; env.name=household is compiled", ConfigError):
        job("env.name=household")
