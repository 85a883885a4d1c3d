"""A shopper who knows the goal: search, page on if need be, open the product, choose the options, buy.

The upper bound in tables and the source of warm-start episodes. Over all goals of a catalogue:
    python -m hgpo_jax.envs.webshop.oracle ITEMS ATTRIBUTES
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from hgpo_jax.envs import command_line
from hgpo_jax.envs.webshop.commands import click, parse, search
from hgpo_jax.envs.webshop.pages import PAGE_SIZE
from hgpo_jax.envs.webshop.purchase import asked_values, option_owner
from hgpo_jax.envs.webshop.session import Session
from hgpo_jax.envs.webshop.shop import Shop, load_shop

_PRICE = re.compile(r", and price lower than [\d.]+ dollars$")


def shortest_purchase(shop: Shop, goal: Mapping) -> list[str] | None:
    """Returns the commands that buy what `goal` asks for; None if no tried search finds the product.

    The words of the instruction are tried first, as an agent would, then the product's name. The first search that shows the
    product on its first page wins, or else the one that shows it earliest.
    """
    goal_position = shop.catalogue.position(goal["asin"])
    product = shop.catalogue.product(goal_position)
    best = None
    for words in (_PRICE.sub("", goal["instruction_text"]).removeprefix("Find me "), goal["name"]):
        command = search(words)
        positions = [position for position, _ in shop.catalogue.search(command[len("search[") : -1].lower())]
        if goal_position in positions:
            turns = positions.index(goal_position) // PAGE_SIZE
            if best is None or turns < best.count(click("next >")):
                best = [command] + [click("next >")] * turns
            if turns == 0:
                break
    if best is None:
        return None
    owner = option_owner(product)
    options = [click(value) for value in asked_values(product, goal) if value in owner]
    return [*best, click(product.asin.lower()), *options, click("buy now")]


def purchase_plan(shop: Shop, goal: Mapping) -> list[str]:
    """Returns `shortest_purchase`; if no search finds the product, buys the first result for the instruction's words."""
    if plan := shortest_purchase(shop, goal):
        return plan
    command = search(goal["instruction_text"])
    results = shop.catalogue.search(parse(command)[1])
    position = results[0][0] if results else shop.catalogue.position(goal["asin"])
    return [command, click(shop.catalogue.product(position).asin.lower()), click("buy now")]


def next_command(session: Session, plan: list[str]) -> str:
    """Returns the next command of a shopper with this plan on the current page, wherever earlier commands have led."""
    pages = plan.count(click("next >"))
    product, *choices = plan[1 + pages :]
    actions = session.actions
    if actions["has_search_bar"]:
        return plan[0]
    if "buy now" in actions["clickables"]:
        assert session.asin is not None  # the page's product
        if click(session.asin.lower()) != product:
            return click("back to search")
        clicks = {click(value.lower()) for value in session.options.values()}
        return next(choice for choice in choices if choice.lower() not in clicks)
    if session.asin is not None:  # a page about a product
        return click("< prev")
    if product in map(click, actions["clickables"]):
        return product
    on_the_way = parse(plan[0])[1] == " ".join(session.keywords) and session.page <= pages
    return click("next >" if on_the_way else "back to search")


def success(shop: Shop) -> dict[str, float]:
    """Plays the oracle on every goal of `shop`.

    Returns:
        `goals`, `won` (reward exactly 1.0) and `reachable` (goals not marked unreachable) as counts, `success` and
        `success_reachable` as fractions, `score` (mean reward), `steps` (mean commands of the won goals).
    """
    won, won_reachable, reachable, scores, steps = 0, 0, 0, 0.0, 0
    for index in range(len(shop.goals)):
        session = shop.session(index)
        session.reset()
        commands = shortest_purchase(shop, session.goal) or []
        reward = 0.0
        for command in commands:
            _, reward, _, _ = session.step(command)
        scores += reward
        reachable += session.goal["unreachable"] is None
        if reward == 1.0:
            won += 1
            won_reachable += session.goal["unreachable"] is None
            steps += len(commands)
    goals = len(shop.goals)
    return {
        "goals": goals,
        "won": won,
        "reachable": reachable,
        "success": won / max(goals, 1),
        "success_reachable": won_reachable / max(reachable, 1),
        "score": scores / max(goals, 1),
        "steps": steps / max(won, 1),
    }


def main() -> None:
    p = command_line.Parser(
        prog="python -m hgpo_jax.envs.webshop.oracle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("items", type=Path, metavar="ITEMS", help="the catalogue, .json or .json.gz, or a built folder")
    p.add_argument("attributes", type=Path, nargs="?", metavar="ATTRIBUTES", help="attributes and synthetic instructions")
    args = p.parse_args()
    for name, value in success(load_shop(args.items, args.attributes)).items():
        print(f"{name}: {value:g}")


if __name__ == "__main__":
    command_line.run(main, (ValueError, ImportError))
