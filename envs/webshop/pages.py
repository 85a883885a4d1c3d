"""The text of WebShop's pages and their clickable labels, as the original's "text" mode prints its HTML.

Pages are tuples (text, clickables). The text of every page but the first and the last starts with the instruction,
which the session puts in front.
"""

import json
from collections.abc import Mapping, Sequence

from hgpo_jax.envs.webshop.products import Product

SEP = " [SEP] "
PAGE_SIZE = 10
_SUB_PAGES = ("Description", "Features", "Reviews")
_DONE = (
    "Thank you for shopping with us!",
    "Your code:",
    "None",
    "(Paste it in your MTurk interface.)",
    "Purchased",
    "asin",
    "{asin}",
    "options",
    "{options}",
    "attrs",
    "None",
    "category",
    "None",
    "query",
    "None",
    "product category",
    "None",
    "Target",
    "asin",
    "options",
    "attrs",
    "price upper",
    "instuction text",
    "category",
    "product category",
    "query",
    "Goal",
    "None",
    "Reward",
    "Your score (min 0.0, max 1.0)",
    "{reward}",
    "Reward Details",
    "None",
)

Page = tuple[str, tuple[str, ...]]


def search_page(instruction: str) -> Page:
    """Returns the first page, complete."""
    return SEP.join(("WebShop", "Instruction:", *_part(instruction), "Search")), ("search",)


def head(instruction: str) -> str:
    """Returns the beginning of the text of every page that follows."""
    return SEP.join(("Instruction:", *_part(instruction), ""))


def results_page(products: Sequence[Product], page: int, total: int) -> Page:
    """Returns page number `page` of a search, which may lie past the end."""
    buttons = ["Back to Search", "< Prev", "Next >"] if page > 1 else ["Back to Search", "Next >"]
    parts = [buttons[0], f"Page {page} (Total results: {total})", *buttons[1:]]
    for product in products:
        parts += [product.asin, *_part(product.name), product.price_tag]
    return SEP.join(parts), _clickables([*buttons, *(product.asin for product in products)])


def item_page(product: Product) -> Page:
    """Returns the page of a product; it does not show which options are chosen."""
    parts = ["Back to Search", "< Prev"]
    for name, values in product.options.items():
        parts += [text for label in (name, *values) for text in _part(label)]
    parts += [*_part(product.name), f"Price: {product.price_tag}", "Rating: N.A.", *_SUB_PAGES, "Buy Now"]
    buttons = _clickables(["Back to Search", "< Prev", *_SUB_PAGES, "Buy Now"])
    choices = (value for values in product.options.values() for value in values)
    return SEP.join(parts), tuple(dict.fromkeys((*buttons, *choices)))


def sub_page(product: Product, name: str) -> Page:
    """Returns the "description", "features", "reviews" or "attributes" page of a product.

    The last has no button of its own here; an option value of that name leads to it.
    """
    content = {
        "description": _part(product.description),
        "features": [bullet.strip() for bullet in product.bullets],  # an empty bullet leaves an empty part
        "reviews": [],
        "attributes": [*product.attributes, product.category, product.query, product.product_category],
    }[name]
    buttons = ["Back to Search", "< Prev"]
    return SEP.join((*buttons, *content)), _clickables(buttons)


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """Returns the page after a purchase, complete."""
    options_json = json.dumps(options, sort_keys=True)
    for character in "<>&'":  # the characters that Flask's tojson escapes
        options_json = options_json.replace(character, f"\\u{ord(character):04x}")
    values = {"{asin}": asin, "{options}": options_json, "{reward}": str(reward)}
    return SEP.join(values.get(part, part) for part in _DONE), ()


def _part(text: str) -> list[str]:
    """Returns the one part an element's text makes; an element without text makes none."""
    return [] if text in ("", "\n") else [text.strip()]


def _clickables(labels: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label.lower() for label in labels))
