"""One shopping episode: pages, commands, and the reward of the purchase."""

import random
from typing import TYPE_CHECKING, TypedDict

from hgpo_jax.envs.lucene.index import TOP_K
from hgpo_jax.envs.webshop import pages
from hgpo_jax.envs.webshop.commands import parse
from hgpo_jax.envs.webshop.purchase import option_owner

if TYPE_CHECKING:
    from hgpo_jax.envs.webshop.shop import Shop


class Actions(TypedDict):
    """The possible actions on a page."""

    has_search_bar: bool
    clickables: list[str]


class Session:
    """An episode towards one goal. Create with `Shop.session`, then `reset`, then `step` until done.

    Attributes:
        goal: the goal, a dict as in `Shop.goals`.
        done: whether something was bought.
        keywords, page: of the last search, and the page of its results, from 1; not set before the first.
        asin, options: the product and options at hand; None and {} before a product is opened.
        purchase: after the purchase, the parts of its reward with `asin`, `options` and `price`; None before.
    """

    _kind: str  # of the page: search, results, item, sub or done
    _text: str
    _clickables: tuple[str, ...]
    keywords: list[str]
    page: int
    _position: int  # of the product at hand
    asin: str | None
    options: dict[str, str]
    purchase: dict | None

    def __init__(self, shop: "Shop", goal_index: int):
        self._shop, self._catalogue = shop, shop.catalogue
        self._goal_index = goal_index
        self.goal = shop.goals[goal_index]
        self._head = pages.head(self.goal["instruction_text"])
        self.reset()

    @property
    def actions(self) -> Actions:
        """The possible actions on the current page; `search[...]` works without a search bar, too."""
        return {"has_search_bar": self._kind == "search", "clickables": list(self._clickables)}

    def reset(self) -> tuple[str, Actions]:
        """Starts over; returns the observation and the available actions."""
        self._random = random.Random(f"{self._shop.seed}/{self._goal_index}")  # only for `search[<r>]`
        self.purchase = None
        self.done = False
        self._open_search()
        return self._text, self.actions

    def step(self, action: str) -> tuple[str, float, bool, Actions]:
        """Carries out a command and returns observation, reward, done and available actions.

        `search[words]` works on every page, `click[label]` for the labels in `clickables`. Anything else, commands that
        crash the original included, gives the same page again. After the purchase nothing has an effect any more.
        The reward is the score of the purchase in [0, 1], 0 for every other step.
        """
        if not self.done:
            verb, argument = parse(action)
            if verb == "search":
                self._open_results(argument.split(" "), 1)
            elif verb == "click" and argument in self._clickables and argument != "search":
                self._click(argument)
                if self.purchase is not None:
                    return self._text, self.purchase["reward"], True, self.actions
        return self._text, 0.0, self.done, self.actions

    def _click(self, label: str) -> None:
        # The order of these cases is the original's: a button's name wins over an option of the same name.
        if label == "buy now":
            self._buy()
        elif label == "back to search":
            self._open_search()
        elif label == "next >" and self._kind == "results":
            self._open_results(self.keywords, self.page + 1)
        elif label == "< prev" and self._kind == "results":
            self._open_results(self.keywords, self.page - 1)
        elif label == "< prev" and self._kind == "sub":
            self._open_item()
        elif label == "< prev":
            self._open_results(self.keywords, self.page)
        elif label in ("description", "features", "reviews", "attributes"):
            self._show("sub", pages.sub_page(self._catalogue.product(self._position), label))
        elif self._kind == "results":
            position = self._catalogue.position(label.upper())
            if position is not None:  # the original fails on an asin with small letters
                self._position, self.asin = position, label.upper()
                self._open_item()
        else:
            product = self._catalogue.product(self._position)
            self.options[option_owner(product)[label]] = label

    def _open_search(self) -> None:
        self.asin, self.options = None, {}
        self._show("search", pages.search_page(self.goal["instruction_text"]))

    def _open_results(self, keywords: list[str], page: int) -> None:
        positions = self._find(keywords)
        if positions is None:
            return
        self.keywords, self.page = keywords, page
        self.asin, self.options = None, {}
        on_page = positions[(page - 1) * pages.PAGE_SIZE : page * pages.PAGE_SIZE]
        products = [self._catalogue.product(position) for position in on_page]
        self._show("results", pages.results_page(products, page, len(positions)))

    def _find(self, keywords: list[str]) -> tuple[int, ...] | list[int] | None:
        """Returns the positions a search finds; None where the original crashes.

        The first word may ask for something other than a search: "<r>" random products (drawn again for each page),
        "<c> name" a category, "<q> text" a query label; "<a>" always crashes.
        """
        first, rest = keywords[0], keywords[1:]
        if first == "<r>":
            enough = len(self._catalogue) >= TOP_K
            return self._random.sample(range(len(self._catalogue)), TOP_K) if enough else None
        if first == "<a>":
            return None
        if first == "<c>":
            return self._catalogue.with_label("category", rest[0].strip()) if rest else None
        if first == "<q>":
            return self._catalogue.with_label("query", " ".join(rest).strip())
        return tuple(position for position, _ in self._catalogue.search(" ".join(keywords)))

    def _open_item(self) -> None:
        self._show("item", self._catalogue.item_page(self._position))

    def _buy(self) -> None:
        assert self.asin is not None  # only a product's page has the button
        price = self._shop.price(self.asin)
        parts = self._shop.reward(self.goal, self.asin, self.options, price)
        self.purchase = {"asin": self.asin, "options": dict(self.options), "price": price, **parts}
        self.done = True
        self._kind = "done"
        self._text, self._clickables = pages.done_page(self.asin, self.options, float(parts["reward"] or 0))

    def _show(self, kind: str, page: pages.Page) -> None:
        self._kind = kind
        text, self._clickables = page
        self._text = text if kind == "search" else self._head + text
