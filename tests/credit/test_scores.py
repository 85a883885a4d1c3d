"""Scores of advantages whose bias and noise are put in."""

import contextlib
import dataclasses
import io
import json

import numpy as np
import pytest
from synthetic import SITUATIONS, snapshot

from hgpo_jax.credit import card
from hgpo_jax.credit.scores import score, shared_square


@pytest.fixture(scope="module")
def large():
    return snapshot(batches=16, groups=16)


def test_noise_is_variance_whatever_the_scale(large):
    one, true = large
    numbers = score(3 * (true + 2 * np.random.default_rng(1).normal(size=true.shape)), one)
    spread = np.mean(true[one["mask"]] ** 2)
    assert numbers["scale"] == pytest.approx(3, abs=0.2) and numbers["recurs"] == 1
    assert numbers["bias2"] == pytest.approx(0, abs=0.05)
    assert numbers["variance"] == pytest.approx(4 / spread, rel=0.1)
    assert 1 / numbers["cosine"] ** 2 - 1 == pytest.approx(numbers["bias2"] + numbers["variance"], rel=0.02)


def test_what_a_situation_always_adds_is_bias(large):
    one, true = large
    extra = 0.5 * np.random.default_rng(2).normal(size=SITUATIONS)[one["situations"]]
    numbers = score(true + extra, one)
    mask, spread = one["mask"], np.mean(true[one["mask"]] ** 2)
    rest = (true + extra) / numbers["scale"] - true
    assert numbers["bias2"] == pytest.approx(np.mean(rest[mask] ** 2) / spread, rel=0.01)
    assert numbers["variance"] == pytest.approx(0, abs=1e-2)


def test_what_a_batch_shares_is_no_bias(large):
    """The episodes of a batch are compared with each other; their errors are not independent."""
    one, true = large
    extra = np.random.default_rng(3).normal(size=(16, SITUATIONS))[one["batch"][:, None], one["situations"]]
    numbers = score(true + extra, one)
    assert abs(numbers["bias2"]) < 0.15 * numbers["variance"]


def test_the_truth_has_noise_of_its_own():
    one, true = snapshot(batches=16, groups=16, noise=0.5)
    numbers = score(true, one)
    assert numbers["cosine"] == pytest.approx(1, abs=0.01)
    assert numbers["bias2"] == pytest.approx(0, abs=0.01) and numbers["variance"] == pytest.approx(0, abs=0.02)


def test_signs_count_where_the_truth_is_clear():
    one, _ = snapshot(noise=0.1)
    true, mask = one["true_advantages"], one["mask"]
    clear = np.abs(true) > 2 * one["standard_error"]
    assert 0 < clear[mask].mean() < 1
    assert score(np.where(clear, true, -true), one)["sign"] == 1
    assert score(-true, one)["sign"] == 0
    assert score(0 * true, one)["sign"] == 0.5


def test_products_are_of_different_batches_only():
    values, situation, batch = np.array([1.0, 2, 3, 5]), np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    mean, recurs = shared_square(values, situation, batch)
    assert mean == (1 * 3 + 2 * 3) / 2 and recurs.tolist() == [True, True, True, False]
    assert np.isnan(shared_square(values, np.arange(4), batch)[0])


def test_an_estimator_that_points_away_has_no_scale():
    one, true = snapshot()
    numbers = score(-true, one)
    assert numbers["cosine"] < 0 and np.isnan(numbers["bias2"]) and np.isnan(numbers["variance"])


def test_a_policy_that_never_wins_has_no_scores():
    one, true = snapshot(noise=0)
    one = dataclasses.replace(one, arrays=one.arrays | {"true_advantages": 0 * one["true_advantages"]})
    numbers = score(true, one)
    assert all(np.isnan(numbers[name]) for name in ("cosine", "bias2", "variance", "sign", "scale"))


def test_rare_wins_outside_of_recurring_situations():
    """The steps that recur have no advantage; another one has."""
    one, _ = snapshot(noise=0)
    situations = np.where(one["situations"] == 0, 1, one["situations"])
    situations[0, 0], true = 0, 0 * one["true_advantages"]
    true[0, 0] = 1
    one = dataclasses.replace(one, arrays=one.arrays | {"true_advantages": true, "situations": situations})
    numbers = score(true, one)
    assert numbers["cosine"] == pytest.approx(1) and np.isnan(numbers["bias2"]) and np.isnan(numbers["variance"])


@pytest.mark.parametrize(
    ("environment", "says", "not_said"),
    [("sokoban", "nothing personal", "ALFWorld"), ("alfworld", "MIT", "decides"), ("x.py:E", "decides on their", "apache")],
)
def test_the_card_says_what_was_played(environment, says, not_said, tmp_path):
    snapshot(environment=environment)[0].save(tmp_path / "drawn.npz")
    card.write(tmp_path)
    text = (tmp_path / card.FILE).read_text()
    assert f"The policies played {environment}." in text and says in text and not_said not in text
    assert text.startswith("---\n")


def test_the_card_scores_without_the_library(tmp_path, monkeypatch):
    one, _ = snapshot()
    one.save(tmp_path / "drawn.npz")
    card.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / card.FILE).read_text()
    assert "| drawn.npz | drawn | hgpo, 3, 0 | 50% | 4 | 128 |" in text
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(text.split("```python\n")[1].split("```")[0], names)
    with np.load("drawn.npz") as stored:  # no pickles
        assert json.loads(str(stored["about"]))["gamma"] == 0.9
    name, cosine = out.getvalue().split()
    assert name == "drawn.npz" and float(cosine) == pytest.approx(score(names["estimated"], one)["cosine"], abs=1e-3)
    same = one["groups"][:, None] == one["groups"]
    returns = one["rewards"] @ np.tril(0.9 ** np.abs(np.subtract.outer(range(5), range(5))))
    expected = [returns[b, 0] - returns[same[b], 0].mean() for b in range(len(returns))]
    np.testing.assert_allclose(names["estimated"][:, 0], expected, atol=1e-5)
