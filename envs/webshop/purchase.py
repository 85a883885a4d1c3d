"""The possible purchases: the options that can be chosen on the item page, and whether a goal can be met at all."""

from collections.abc import Iterable, Mapping

from hgpo_jax.envs.webshop.commands import click, parse
from hgpo_jax.envs.webshop.products import Product
from hgpo_jax.envs.webshop.reward import Nouns, goal_options, has_attribute, option_hit, purchase_reward

# On an item page these names are the page's own buttons, whatever option carries the same name; a click on "search"
# never does anything.
BUTTONS = frozenset(("back to search", "< prev", "description", "features", "reviews", "attributes", "buy now", "search"))


def option_owner(product: Product) -> dict[str, str]:
    """Returns for each choosable value the option it sets: the last one that has the value, as in the original."""
    owner = {value: name for name, values in product.options.items() for value in values}
    return {v: name for v, name in owner.items() if v not in BUTTONS and parse(click(v)) == ("click", v)}


def choose(product: Product, values: Iterable[str]) -> dict[str, str]:
    """Returns the options set after clicking `values` in turn; values that cannot be chosen change nothing."""
    owner = option_owner(product)
    return {owner[value]: value for value in values if value in owner}


def asked_values(product: Product, goal: Mapping) -> list[str]:
    """Returns the option values to click for `goal`.

    A synthetic goal names them. A human goal lists wishes, which need not be worded as on the page: for each, the
    first value that satisfies it, one per option, such that most wishes are met.
    """
    wanted = goal_options(goal)
    if isinstance(goal["goal_options"], Mapping):
        return [value for _, value in wanted]
    owner = option_owner(product)

    def best(wishes: list[str], chosen: dict[str, str]) -> dict[str, str]:
        open_wishes = [wish for wish in wishes if not any(option_hit(value, wish) for value in chosen.values())]
        if not open_wishes:
            return chosen
        wish, *rest = open_wishes
        fits = [value for value in owner if owner[value] not in chosen and option_hit(value, wish)]
        fits.sort(key=lambda value: value != wish)  # the exact value first
        outcomes = [best(rest, chosen | {owner[value]: value}) for value in fits] or [best(rest, chosen)]
        return max(outcomes, key=lambda outcome: _hits(outcome, wanted))

    return list(best(wanted, {}).values())


def why_unreachable(product: Product, goal: Mapping, nouns: Nouns) -> str | None:
    """Tells why buying just what `goal` asks for does not earn the full reward; None if it does.

    Args:
        product: the wanted product.
        goal: needs what `purchase_reward` needs; its price limit plays no part, it is always above the price.
        nouns: finds the nouns of a title.
    """
    if product.asin != product.asin.upper():
        return "its page cannot be opened: the asin is not upper case"
    chosen = choose(product, asked_values(product, goal))
    parts = purchase_reward(product, goal, chosen, 0.0, nouns)
    if parts["reward"] == 1.0:
        return None
    faults = [f"no attribute {a!r}" for a in goal["attributes"] if not has_attribute(product, a)]
    for wanted in goal_options(goal):
        if not any(option_hit(value, wanted) for value in chosen.values()):
            name, value = wanted if isinstance(wanted, tuple) else ("", wanted)
            read = f"option {name}: {value!r}" if name else f"option {value!r}"
            faults.append(f"{read} is not counted when chosen" if value in chosen.values() else f"{read} not choosable")
    kind = parts["r_type"]
    if kind is not None and kind < 1:
        faults.append("its title repeats few nouns too often")
    return "; ".join(faults)


def _hits(chosen: Mapping[str, str], wanted: list) -> int:
    return sum(any(option_hit(value, wish) for value in chosen.values()) for wish in wanted)
