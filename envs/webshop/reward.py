"""The reward of a purchase, with the original's quirks (`web_agent_site/engine/goal.py` of princeton-nlp/WebShop).

reward = r_type * (attributes hit + options hit + [price within the limit]) / (attributes + options + 1)
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from hgpo_jax.envs.webshop.fuzzy import similar
from hgpo_jax.envs.webshop.products import Product

# An option that contains one of these words counts as that word; the first in this order wins, so "peppermint" is
# "mint" and "colored" is "red".
COLOURS = (
    "alabaster",
    "apricot",
    "aqua",
    "ash",
    "asphalt",
    "azure",
    "banana",
    "beige",
    "black",
    "blue",
    "blush",
    "bordeaux",
    "bronze",
    "brown",
    "burgundy",
    "camel",
    "camo",
    "caramel",
    "champagne",
    "charcoal",
    "cheetah",
    "chestnut",
    "chocolate",
    "christmas",
    "coffee",
    "cognac",
    "copper",
    "coral",
    "cranberry",
    "cream",
    "crystal",
    "dark",
    "denim",
    "eggplant",
    "elephant",
    "espresso",
    "fuchsia",
    "gold",
    "granite",
    "grape",
    "graphite",
    "grass",
    "gray",
    "green",
    "grey",
    "heather",
    "indigo",
    "ivory",
    "ivy",
    "khaki",
    "lavender",
    "lemon",
    "leopard",
    "light",
    "lilac",
    "lime",
    "magenta",
    "maroon",
    "mauve",
    "merlot",
    "midnight",
    "mint",
    "mocha",
    "multicolor",
    "mushroom",
    "mustard",
    "natural",
    "navy",
    "nude",
    "olive",
    "orange",
    "peach",
    "pewter",
    "pink",
    "plum",
    "purple",
    "rainbow",
    "red",
    "rose",
    "royal",
    "rust",
    "sand",
    "sapphire",
    "seashell",
    "silver",
    "skull",
    "slate",
    "steel",
    "stone",
    "stonewash",
    "sunflower",
    "tan",
    "taupe",
    "teal",
    "tiger",
    "turquoise",
    "violet",
    "walnut",
    "wheat",
    "white",
    "wine",
    "yellow",
)

Nouns = Callable[[str], list[str]]  # title -> its nouns, lower case, repeats kept


def purchase_reward(
    product: Product, goal: Mapping, options: Mapping[str, str], price: float, nouns: Nouns
) -> dict[str, float | bool | None]:
    """Returns the reward and its parts for buying `product` with `options` at `price`.

    Args:
        product: the bought product.
        goal: needs `name`, `query`, `product_category`, `attributes`, `goal_options` (name -> value for synthetic
            goals, a list of values for human ones) and `price_upper`.
        options: chosen option values by option name.
        price: the drawn price of the product.
        nouns: finds the nouns of a title.

    Returns:
        `reward` in [0, 1]; `r_type`, `r_att`, `r_option` (None without goal options), `r_price` (bool) and their
        weights `w_*`; `query_match`, `category_match` and `title_score`, of which `r_type` is made.
    """
    attributes, wishes = goal["attributes"], goal_options(goal)
    attribute_hits = sum(has_attribute(product, attribute) for attribute in attributes)
    option_hits = sum(any(option_hit(value, option) for value in options.values()) for option in wishes)
    within = price <= goal["price_upper"]
    parts = len(attributes) + len(wishes) + 1
    kind = _type_reward(product, goal, nouns)
    return {
        "reward": (attribute_hits + option_hits + within) / parts * kind["r_type"],
        **kind,
        "r_att": attribute_hits / len(attributes),
        "w_att": len(attributes) / parts,
        "r_option": option_hits / len(wishes) if wishes else None,
        "w_option": len(wishes) / parts,
        "r_price": within,
        "w_price": 1 / parts,
    }


def goal_options(goal: Mapping) -> list:
    """Returns the wanted options: (name, value) tuples of a synthetic goal, plain values of a human one."""
    options = goal["goal_options"]
    return list(options.items()) if isinstance(options, Mapping) else list(options)


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether `product` has `attribute`, in its attribute list or anywhere in its texts."""
    return any(similar(other, attribute) for other in product.attributes) or any(
        attribute in text.lower() for text in (product.name, " ".join(product.bullets), product.description)
    )


@lru_cache(maxsize=1 << 16)
def option_hit(value: str, wish: str | tuple[str, str]) -> bool:
    """Whether the chosen `value` satisfies the option `wish`.

    A (name, value) tuple is compared in its printed form, so the words of the name never hurt; and its colour is
    only cut down to the bare colour word where an element equals that word, while the chosen value always is.
    """
    return similar(first_colour(value), str(first_colour(wish)))


def first_colour(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """Returns the first colour contained in `option`, or `option` itself."""
    return next((colour for colour in COLOURS if colour in option), option)


def _type_reward(product: Product, goal: Mapping, nouns: Nouns) -> dict[str, float | bool]:
    query_match = product.query == goal["query"]
    category_match = len(_levels(product.product_category) & _levels(goal["product_category"])) >= 2
    product_nouns, goal_nouns = nouns(product.name), nouns(goal["name"])
    title_score = len(set(product_nouns) & set(goal_nouns)) / len(goal_nouns) if goal_nouns else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1 if title_score else 0.0
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def _levels(product_category: str) -> set[str]:
    return {level.strip() for level in product_category.split("›")}
