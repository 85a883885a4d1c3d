"""The engine against recordings of the original (../shared/data/conformance), step by step and bit by bit."""

import json

import pytest
from webshop_tagger import perceptron_nouns
from webshop_tiny import SHARED

from hgpo_jax.envs.webshop import load_shop

RECORDINGS = SHARED / "conformance"
TAGGER = SHARED / "pos_tagger" / "averaged_perceptron_tagger.json.gz"


def recorded(name):
    path = RECORDINGS / f"webshop_{name}.jsonl"
    if not path.is_file():
        pytest.skip("the recordings are not here")
    lines = path.read_text("utf-8").splitlines()
    assert lines
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tagged(real_files):
    if not TAGGER.is_file():
        pytest.skip("the tagger's weights are not here")
    return load_shop(*real_files[:2], nouns=perceptron_nouns(TAGGER))


def test_every_recorded_step(tagged):
    for episode in recorded("transcripts"):
        session = tagged.with_seed(episode["seed"]).session(episode["goal_index"])
        assert {key: session.goal[key] for key in episode["goal"]} == episode["goal"]
        assert session.reset() == (episode["reset"]["obs"], episode["reset"]["available_actions"])
        for step in episode["steps"]:
            observation, reward, done, actions = session.step(step["action"])
            assert (observation, reward, done) == (step["obs"], step["reward"], step["done"])
            assert done or actions == step["available_actions"]  # the recorder had reset itself after a purchase
        if "final" in episode:
            final = episode["final"]
            assert {k: session.purchase[k] for k in ("asin", "options", "price", "reward")} == {
                k: final[k] for k in ("asin", "options", "price", "reward")
            }
            parts = final["reward_components"]
            assert {key: session.purchase[key] for key in parts} == parts


def test_every_recorded_search(real):
    for search in recorded("search"):
        assert real.search(search["query"]) == list(zip(search["asins"], search["scores"], strict=True))


def test_every_recorded_reward_with_the_recorders_tagger(tagged):
    for case in recorded("reward"):
        parts = tagged.reward(case["goal"], case["purchased_asin"], case["options"], case["price"])
        assert parts["reward"] == case["reward"]
        assert {key: parts[key] for key in case["components"]} == case["components"]


def test_recorded_rewards_that_no_tagger_changes_with_the_default_tagger(real):
    cases = [case for case in recorded("reward") if case["pos_insensitive"]]
    assert cases
    for case in cases:
        parts = real.reward(case["goal"], case["purchased_asin"], case["options"], case["price"])
        assert parts["reward"] == case["reward"]
        assert {k: parts[k] for k in case["components"] if k != "title_score"} == {
            k: v for k, v in case["components"].items() if k != "title_score"
        }


def test_known_counts_of_the_real_catalogue(real, real_files):
    # From measurements of the original: shared/reference/environments.md, B2 and B6.
    assert len(real.catalogue) == 1000
    assert len(real.goals) == 6910
    assert sum(goal["unreachable"] is not None for goal in real.goals) == 458
    assert sum(goal["price_upper"] == 1_000_000 for goal in real.goals) == 15
    sizes = [len(goal["goal_options"]) for goal in real.goals]
    assert [sizes.count(n) for n in range(4)] == [185, 538, 4729, 1458]
    assert len(load_shop(*real_files, human_goals=True).goals) == 13


@pytest.mark.slow
def test_oracle_wins_every_reachable_goal(real, real_files):
    from hgpo_jax.envs.webshop.oracle import success

    outcome = success(real)
    assert outcome["won"] == outcome["reachable"] == 6452
    assert outcome["success_reachable"] == 1
    assert success(load_shop(*real_files, human_goals=True))["won"] == 13
