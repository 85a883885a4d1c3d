"""The oracle shopper and the measurements."""

import numpy as np
import pytest
from webshop_tiny import ATTRIBUTES, ITEMS, write

from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.bench import measure, measure_large
from hgpo_jax.envs.webshop.oracle import shortest_purchase, success
from hgpo_jax.envs.webshop.text import WebshopText


def test_oracle_buys_what_is_asked(tiny):
    goal = next(g for g in tiny.goals if g["goal_options"] == {"color": "blue | white", "size": "large"})
    assert shortest_purchase(tiny, goal) == [
        "search[soft cotton things with color: blue | white, and size: large]",
        "click[b000000001]", "click[blue | white]", "click[large]", "click[buy now]",
    ]  # fmt: skip


def test_oracle_wins_just_the_reachable_goals(tiny, tiny_files):
    outcome = success(tiny)
    assert outcome == {
        "goals": 8, "won": 6, "reachable": 6, "success": 6 / 8, "success_reachable": 1.0,
        "score": pytest.approx((6 + 2 / 3 + 2 / 3) / 8), "steps": (4 * 5 + 3 + 4) / 6,
    }  # fmt: skip
    assert success(load_shop(*tiny_files, human_goals=True))["won"] == 2


def test_oracle_pages_on(tmp_path):
    items = [ITEMS[0] | {"asin": f"B0{number:08}", "customization_options": {}} for number in range(25)]
    last = items[-1]["asin"]  # the products are alike, so every search lists them by asin
    shop = load_shop(*write(tmp_path, items, {last: ATTRIBUTES["B000000001"]})[:2])
    plan = shortest_purchase(shop, shop.goals[0])
    assert plan[1:] == ["click[next >]", "click[next >]", f"click[{last.lower()}]", "click[buy now]"]
    assert success(shop)["won"] == 1


def test_oracle_gives_up_where_no_search_finds_the_product(tmp_path):
    items = [ITEMS[0] | {"asin": f"B0{number:08}", "customization_options": {}} for number in range(60)]
    shop = load_shop(*write(tmp_path, items, {items[-1]["asin"]: ATTRIBUTES["B000000001"]})[:2])
    assert shortest_purchase(shop, shop.goals[0]) is None
    assert success(shop)["won"] == 0


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_the_expert_buys_what_the_plan_buys(tiny, noise):
    """Also after random clicks, searches and unheard-of commands."""
    env, draw = WebshopText(tiny, max_turns=60), np.random.default_rng(0)
    for task, goal in enumerate(tiny.goals):
        _, commands = env.reset(task)
        bought, score, turns = False, 0.0, 0
        while not bought and turns < 60:
            label, turns = env.expert(2), turns + 1
            others = [command for command in [*commands, "search[chair]", "sing"] if command != "click[buy now]"]
            action = label if draw.random() >= noise else str(draw.choice(others))
            _, commands, _, bought, info = env.step(action)
            score = info["score"]
            assert info["admissible"] or action != label
        plan = shortest_purchase(tiny, goal)
        session = tiny.session(task)
        session.reset()
        wanted = [session.step(command) for command in plan][-1][1] if plan else score
        assert bought and score == wanted and (noise or not plan or turns == len(plan)), goal


@pytest.mark.slow
def test_the_expert_in_the_real_shop(real):
    env = WebshopText(real, max_turns=15)
    won = []
    for task in range(100):
        env.reset(task)
        done = False
        while not done:
            _, _, _, done, info = env.step(env.expert(2))
        won.append((info["won"], real.goals[task]["unreachable"] is None))
    assert all(one for one, reachable in won if reachable) and sum(reachable for _, reachable in won) > 50


def test_measure(tiny_files):
    rows = measure(*tiny_files[:2])
    assert [set(row) for row in rows] == [{"name", "value", "unit"}] * len(rows)
    names = {row["name"]: row["value"] for row in rows}
    assert {"load", "new session", "reset", "search", "click", "buy", "memory of 256 environments"} == set(names)
    assert all(value > 0 for value in names.values())


@pytest.mark.slow
def test_measure_large():
    rows = {row["name"]: row["value"] for row in measure_large(2000)}
    assert rows["products"] == 2000 and rows["build"] > 0 and rows["search"] > 0


@pytest.mark.slow
def test_budgets_of_speed_and_memory(real_files):
    # Ten times the usual figures, so that a busy machine does not fail the test; memory does not depend on it.
    rows = {row["name"]: row["value"] for row in measure(*real_files[:2])}
    assert rows["reset"] < 0.2 and rows["click"] < 0.2 and rows["search"] < 3
    assert rows["memory of 256 environments"] < 300
