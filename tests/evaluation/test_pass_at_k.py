"""pass@k beside an enumeration of all subsets of a task's plays, and what several plays of each task count."""

import itertools
import json
from fractions import Fraction

import jax
import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax.evaluation import pass_at_k as samples
from hgpo_jax.evaluation.held_out import play_held_out, sampled_decoding
from hgpo_jax.evaluation.statistics import korn_graubard
from hgpo_jax.utils.errors import RunError
from tests.helpers.pretended import FakeJob, Runner


def enumerated(outcomes, k):
    """The share of the k-subsets of outcomes with a success in them."""
    subsets = list(itertools.combinations(outcomes, k))
    return float(Fraction(sum(map(any, subsets)), len(subsets)))


@pytest.mark.parametrize("k", range(1, 7))
def test_it_is_the_share_of_subsets_with_a_success(k):
    tasks = [(n, c) for n in range(k, 8) for c in range(n + 1)]
    plays, successes = np.array(tasks).T
    wanted = [enumerated([True] * c + [False] * (n - c), k) for n, c in tasks]
    np.testing.assert_allclose(samples.pass_at_k(successes, plays, k), wanted, rtol=1e-12)


def test_tasks_with_too_few_plays_are_left_out():
    found = samples.estimates(np.array([1, 0, 2]), np.array([4, 1, 4]), [1, 2, 8])
    assert [found[name]["tasks"] for name in ("pass@1", "pass@2", "pass@8")] == [3, 2, 0]
    assert found["pass@1"]["mean"] == pytest.approx((1 / 4 + 0 + 2 / 4) / 3)
    assert found["pass@2"]["mean"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert found["pass@2"]["interval"] == pytest.approx(korn_graubard([1 / 2, 5 / 6], [2, 2]))
    assert found["pass@8"] == {"mean": None, "interval": None, "tasks": 0}


def test_near_the_ends_a_task_counts_once():
    """Where nothing tells tasks apart, plays of one say little of others that were not drawn."""
    all_won, plays = np.full(128, 16), np.full(128, 16)
    low, high = samples.estimates(all_won, plays, [1])["pass@1"]["interval"]
    assert (low, high) == (pytest.approx(0.025 ** (1 / 128)), 1.0)
    one_short = all_won - (np.arange(128) == 0)
    assert samples.estimates(one_short, plays, [1])["pass@1"]["interval"][0] < 0.98
    half = np.full(128, 8)  # tasks that all are alike, which is seen
    low, high = samples.estimates(half, plays, [1])["pass@1"]["interval"]
    assert high - low < 0.05


class Sampled(Runner):
    """Outcomes also depend on the episode's key; odd tasks fail in the first play."""

    failing = False

    def rollout(self, params, tasks, keys, index, decoding, held_out):
        drawn = np.asarray(jax.random.key_data(keys)).astype(int)
        seeds = [[task, *key] for task, key in zip(tasks, drawn.tolist(), strict=True)]
        result = super().rollout(params, tasks, keys, index, decoding, held_out)
        judged = np.array([not (self.failing and task % 2) for task in tasks])
        success = np.array([np.random.default_rng(seed).random() < 0.5 for seed in seeds]) & judged
        return result._replace(episodes=result.episodes.replace(judged=judged, success=success))


def fake(episodes=10):
    return FakeJob(configuration.load(None, [f"evaluation.episodes={episodes}"]), Sampled(num_held_out_tasks=None))


def test_every_task_is_played_that_often_and_first_as_in_the_evaluation():
    job = fake()
    first = play_held_out(job, None, sampled_decoding(job.config.evaluation))[0].success
    once, result = (samples.evaluate_samples(job, None, n) for n in (1, 5))
    assert once["successes"] == first.astype(int).tolist() and once["plays"] == [1] * 10
    assert result["plays"] == [5] * 10 and 0 < sum(result["successes"]) < 50
    assert result["avg@5"] == result["pass@1"] and result["avg@5"]["mean"] == pytest.approx(sum(result["successes"]) / 50)
    assert [name for name in result if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@5"]
    solved = [c > 0 for c in result["successes"]]
    assert result["pass@5"]["mean"] == np.mean(solved)
    assert result["by_task"]["look"]["pass@5"]["mean"] == np.mean(solved[1::2])
    for name in ("pass@1", "pass@4"):
        low, high = result[name]["interval"]
        assert 0 <= low < result[name]["mean"] < high <= 1
    assert json.loads(json.dumps(result)) == result
    assert samples.describe_samples(result).splitlines()[0].startswith(f"avg@5   {result['avg@5']['mean']:7.1%} of 10 tasks (")
    assert samples.describe_samples({"avg@5": {"mean": 0.5, "tasks": 1, "interval": None}}) == "avg@5     50.0% of 1 task"


def test_plays_without_an_outcome_do_not_count():
    job = fake(4)
    job.runner.failing = True
    result = samples.evaluate_samples(job, None, 3)
    assert result["plays"] == [3, 0, 3, 0] and set(result["by_task"]) == {"place"} and result["pass@2"]["tasks"] == 2
    job.runner.select_tasks = lambda stream, seed, index: [1] * len(index)
    with pytest.raises(RunError, match="no play of any task has a known outcome"):
        samples.evaluate_samples(job, None, 2)
