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
    options = goal_options(goal)
    if isinstance(goal["goal_options"], Mapping):
        return [value for _, value in options]
    owner = option_owner(product)

    def best(wishes: list[str], choices: dict[str, str]) -> dict[str, str]:
        open_wishes = [wish for wish in wishes if not any(option_hit(value, wish) for value in choices.values())]
        if not open_wishes:
            return choices
        wish, *rest = open_wishes
        fits = [value for value in owner if owner[value] not in choices and option_hit(value, wish)]
        fits.sort(key=lambda value: value != wish)  # the exact value first
        outcomes = [best(rest, choices | {owner[value]: value}) for value in fits] or [best(rest, choices)]
        return max(outcomes, key=lambda outcome: _hits(outcome, options))

    return list(best(options, {}).values())


def why_unreachable(product: Product, goal: Mapping, nouns: Nouns) -> str | None:
    """Tells why buying just what `goal` asks for does not earn the full reward; None if it does.

    Args:
        product: the wanted product.
        goal: needs what `purchase_reward` needs; its price limit plays no part, it is always above the price.
        nouns: finds the nouns of a title.
    """
    if product.asin != product.asin.upper():
        return "its page cannot be opened: the asin is not upper case"
    choices = choose(product, asked_values(product, goal))
    parts = purchase_reward(product, goal, choices, 0.0, nouns)
    if parts["reward"] == 1.0:
        return None
    faults = [f"no attribute {a!r}" for a in goal["attributes"] if not has_attribute(product, a)]
    for option in goal_options(goal):
        if not any(option_hit(value, option) for value in choices.values()):
            name, value = option if isinstance(option, tuple) else ("", option)
            text = f"option {name}: {value!r}" if name else f"option {value!r}"
            faults.append(f"{text} is not counted when chosen" if value in choices.values() else f"{text} not choosable")
    kind = parts["r_type"]
    if kind is not None and kind < 1:
        faults.append("its title repeats few nouns too often")
    return "; ".join(faults)


def _hits(choices: Mapping[str, str], wishes: list) -> int:
    return sum(any(option_hit(value, wish) for value in choices.values()) for wish in wishes)
