"""The engine against recordings of the original (../shared/data/conformance), step by step and bit by bit; and the shopper in
the real shop."""

import json

import pytest
from webshop_tagger import perceptron_nouns

from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.oracle import success
from hgpo_jax.envs.webshop.text import WebshopText
from tests.helpers.needs import DATA

pytestmark = pytest.mark.needs("data")


def recorded(name):
    lines = (DATA / "conformance" / f"webshop_{name}.jsonl").read_text("utf-8").splitlines()
    assert lines
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tagged(real_files):
    nouns = perceptron_nouns(DATA / "pos_tagger" / "averaged_perceptron_tagger.json.gz")
    return load_shop(*real_files[:2], nouns=nouns)


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
            final = {key: episode["final"][key] for key in ("asin", "options", "price", "reward")}
            final |= episode["final"]["reward_components"]
            assert {key: session.purchase[key] for key in final} == final


def test_every_recorded_search(real):
    for search in recorded("search"):
        assert real.search(search["query"]) == list(zip(search["asins"], search["scores"], strict=True))


def test_every_recorded_reward(tagged, real):
    """With the recorder's tagger; and with the default one where no tagger changes the reward."""
    cases = recorded("reward")
    assert any(case["pos_insensitive"] for case in cases)
    for case in cases:
        given = case["goal"], case["purchased_asin"], case["options"], case["price"]
        parts = tagged.reward(*given)
        expected = case["components"] | {"reward": case["reward"]}
        assert {key: parts[key] for key in expected} == expected
        if case["pos_insensitive"]:
            parts, _ = real.reward(*given), expected.pop("title_score")
            assert {key: parts[key] for key in expected} == expected


def test_known_counts_of_the_real_catalogue(real, real_files):
    # From measurements of the original: shared/reference/environments.md, B2 and B6.
    assert (len(real.catalogue), len(real.goals)) == (1000, 6910)
    assert sum(goal["unreachable"] is not None for goal in real.goals) == 458
    assert sum(goal["price_upper"] == 1_000_000 for goal in real.goals) == 15
    sizes = [len(goal["goal_options"]) for goal in real.goals]
    assert [sizes.count(n) for n in range(4)] == [185, 538, 4729, 1458]
    assert len(load_shop(*real_files, human_goals=True).goals) == 13


@pytest.mark.slow
def test_oracle_wins_every_reachable_goal(real, real_files):
    outcome = success(real)
    assert outcome["won"] == outcome["reachable"] == 6452
    assert outcome["success_reachable"] == 1
    assert success(load_shop(*real_files, human_goals=True))["won"] == 13


def test_the_expert_in_the_real_shop(real):
    env, reachable = WebshopText(real, max_turns=15), 0
    for task in range(30):
        env.reset(task)
        done = False
        while not done:
            _, _, _, done, info = env.step(env.expert(2))
        assert info["won"] or real.goals[task]["unreachable"] is not None
        reachable += real.goals[task]["unreachable"] is None
    assert reachable > 15
