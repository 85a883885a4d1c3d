"""The oracle shopper."""

import numpy as np
import pytest
from webshop_tiny import ATTRIBUTES, ITEMS, write

from hgpo_jax.envs.webshop import load_shop
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


def test_oracle_pages_on_and_gives_up_where_no_search_finds_the_product(tmp_path):
    items = [ITEMS[0] | {"asin": f"B0{number:08}", "customization_options": {}} for number in range(60)]
    for count, pages in ((20, 1), (21, 2), (25, 2), (60, None)):
        last = items[count - 1]["asin"]  # the products are alike, so every search lists them by asin
        shop = load_shop(*write(tmp_path, items[:count], {last: ATTRIBUTES["B000000001"]})[:2])
        plan = shortest_purchase(shop, shop.goals[0])
        if pages is None:
            assert plan is None
        else:
            assert plan[1:] == [*["click[next >]"] * pages, f"click[{last.lower()}]", "click[buy now]"]
        assert success(shop)["won"] == (pages is not None)


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
