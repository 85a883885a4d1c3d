"""Goals, prices and orders: the original's draws, replayed here with the random calls written out; and the oracle shopper."""

import itertools
import random

import numpy as np
import pytest
from webshop_tiny import ATTRIBUTES, ITEMS, write

from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.oracle import shortest_purchase, success
from hgpo_jax.envs.webshop.text import WebshopText

PRICES = {"B000000002": (1010.0, 1020.5), "B000000007": (5.0, 35.0)}
OPTIONS = {  # option names sorted, values in file order
    "B000000001": {"color": ["red", "blue | white"], "size": ["small", "large"]},
    "B000000004": {"fit": ["medium", "features"], "none": [], "size": ["medium", "tall"]},
    "B000000006": {"flavor name": ["peppermint cookie", "plain"]},
}


def expected_goals(seed, shuffle_seed):
    """Draw the tiny catalogue's goals in the original's order of random calls, from one generator."""
    rng = random.Random(seed)
    prices = {item["asin"]: 19.99 for item in ITEMS}
    for asin, ends in PRICES.items():  # catalogue order
        prices[asin] = rng.uniform(*ends)
    goals = []
    for asin, wish in ATTRIBUTES.items():  # catalogue order as well
        if "instruction" not in wish:
            continue
        above = [10.0 * i for i in range(1, 100) if 10.0 * i > prices[asin]][:4]
        limit, text = 1000000, ""
        if len(above) >= 2:
            limit = sorted(rng.sample(above, 2))[1]
            text = f", and price lower than {limit:.2f} dollars"
        options = OPTIONS.get(asin, {})
        for choice in itertools.product(*options.values()):
            chosen = dict(zip(options, choice, strict=True))
            named = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
            wanted = wish["instruction"] + (f" with {named}" if named else "") + text
            goals.append((asin, wanted, limit, chosen))
    rng.seed(shuffle_seed)
    rng.shuffle(goals)
    return goals, prices


def drawn(shop):
    return [(g["asin"], g["instruction_text"], g["price_upper"], g["goal_options"]) for g in shop.goals]


@pytest.mark.parametrize(("seed", "order"), [(0, "verl-agent"), (1, "verl-agent"), (1000, "original")])
def test_draws_follow_the_original(tiny_files, seed, order):
    shop = load_shop(*tiny_files[:2], seed=seed, order=order)
    goals, prices = expected_goals(seed, seed if order == "verl-agent" else 233)
    assert drawn(shop) == goals
    assert {asin: shop.price(asin) for asin in PRICES} == {asin: prices[asin] for asin in PRICES}
    assert shop.price("B000000003") == 100.0 and shop.price("B00000000B") == 100.0
    assert len(goals) == 8  # 2 x 2 options, a hat, no coat (an option without values), two flavours, a cap


def test_orders(tiny, tiny_files):
    def wishes(shop):
        return [(goal["asin"], goal["goal_options"]) for goal in shop.goals]

    assert wishes(tiny.with_seed(5)) == wishes(tiny)  # "original": one order for all seeds
    shuffled = [wishes(tiny.with_seed(seed, "verl-agent")) for seed in range(5)]
    assert any(order != shuffled[0] for order in shuffled)
    assert tiny.with_seed(5).catalogue is load_shop(*tiny_files[:2], seed=9).catalogue is tiny.catalogue  # read once
    with pytest.raises(ValueError, match="order='other': choose one of 'verl-agent', 'original'"):
        tiny.with_seed(0, "other")


def test_weights(tiny):
    weights = {goal["asin"]: goal["weight"] for goal in tiny.goals}
    # goals per attribute: machine wash 4, soft 4, warm 1 + 1, waterproof 1, sweet 2
    assert weights["B000000001"] == (1 / 4 + 1 / 4) / 2
    assert weights["B000000007"] == (1 / 2 + 1 / 1) / 2
    assert weights["B000000002"] == 1 / 2 and weights["B000000006"] == 1 / 2


def test_goal_fields(tiny):
    goal = next(g for g in tiny.goals if g["asin"] == "B000000001")
    assert {key: goal[key] for key in ("category", "query", "name", "product_category", "attributes")} == {
        "category": "fashion", "query": "cotton things", "name": "Red Cotton Shirt",
        "product_category": "Clothing › Women › Tops", "attributes": ["machine wash", "soft"],
    }  # fmt: skip
    assert tiny.goals[-1] == tiny.goals[len(tiny.goals) - 1]
    with pytest.raises(IndexError, match="there are 8 goals"):
        tiny.session(8)


def test_unreachable_goals_are_marked_and_left_out(tiny, tiny_files):
    marks = {(g["asin"], *g["goal_options"].values()): g["unreachable"] for g in tiny.goals}
    mint = marks["B000000006", "peppermint cookie"]
    assert mint == "option flavor name: 'peppermint cookie' is not counted when chosen"
    assert marks["B000000006", "plain"] is None
    assert marks["B000000007",] == "no attribute 'waterproof'"
    assert marks["B000000001", "red", "small"] is None
    assert marks["B000000001", "blue | white", "small"] is None
    left = load_shop(*tiny_files[:2], order="original", reachable_only=True)
    assert drawn(left) == [goal for goal, g in zip(drawn(tiny), tiny.goals, strict=True) if g["unreachable"] is None]


def test_a_value_that_only_another_option_can_set_makes_a_goal_unreachable(tmp_path):
    # Both options have "m"; a click on it sets the second, and the click on "l" then replaces it.
    both = {"a": [{"value": "m"}], "b": [{"value": "m"}, {"value": "l"}]}
    item = ITEMS[0] | {"customization_options": both}
    shop = load_shop(*write(tmp_path, [item], {item["asin"]: ATTRIBUTES[item["asin"]]})[:2])
    marks = {tuple(g["goal_options"].values()): g["unreachable"] for g in shop.goals}
    assert marks["m", "m"] is None
    assert marks["m", "l"] == "option a: 'm' not choosable"


def test_human_goals(tiny_files):
    shop = load_shop(*tiny_files, human_goals=True, order="original")
    goals = {goal["asin"]: goal for goal in shop.goals}
    assert set(goals) == {"B000000001", "B000000007"}  # the one without attributes and the one not sold are left out
    shirt = goals["B000000001"]
    assert shirt["instruction_text"].startswith("i want a large shirt in blue, and price lower than ")
    assert (shirt["goal_options"], shirt["attributes"], shirt["weight"]) == (["blue", "large"], ["soft"], 1)
    assert shirt["unreachable"] is None
    rng = random.Random(0)
    prices = [rng.uniform(*ends) for ends in PRICES.values()]
    limits = [max(rng.sample([10.0 * i for i in range(1, 100) if 10.0 * i > price][:4], 2)) for price in (19.99, prices[1])]
    assert [goals[asin]["price_upper"] for asin in ("B000000001", "B000000007")] == limits
    with pytest.raises(ValueError, match="pass human="):
        load_shop(*tiny_files[:2], human_goals=True)


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
