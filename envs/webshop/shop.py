"""The shop: a catalogue under one seed, with its goals, prices, search and reward."""

import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from hgpo_jax.envs.webshop.catalogue import Catalogue, build
from hgpo_jax.envs.webshop.goals import ORDERS, GoalBook, GoalList, HumanGoals, SyntheticGoals
from hgpo_jax.envs.webshop.nouns import title_nouns
from hgpo_jax.envs.webshop.products import read_products
from hgpo_jax.envs.webshop.reward import Nouns, purchase_reward
from hgpo_jax.envs.webshop.session import Session

_open_catalogues: weakref.WeakValueDictionary[tuple, Catalogue] = weakref.WeakValueDictionary()


class Shop:
    """One seed's shop. Shops over the same catalogue share everything that the seed does not change.

    Attributes:
        goals: sequence of goals, see `GoalList`.
        catalogue: the products and the index.
        seed, order: the arguments of `load_shop`.
    """

    def __init__(self, book: GoalBook, seed: int, order: str, nouns: Nouns, reachable_only: bool):
        if order not in ORDERS:
            raise ValueError(f"order={order!r}: choose one of {', '.join(map(repr, ORDERS))}")
        self._book, self._nouns, self._reachable_only = book, nouns, reachable_only
        self.seed, self.order = seed, order
        self.catalogue = book.catalogue
        self.goals = GoalList(book, seed, order, reachable_only)

    def with_seed(self, seed: int, order: str | None = None) -> "Shop":
        """Returns the shop of another seed (and order); it shares catalogue, index and caches with this one."""
        return Shop(self._book, seed, order or self.order, self._nouns, self._reachable_only)

    def session(self, goal_index: int) -> Session:
        """Returns an episode towards `goals[goal_index]`.

        Raises:
            IndexError: there is no such goal.
        """
        if not -len(self.goals) <= goal_index < len(self.goals):
            raise IndexError(f"goal_index={goal_index}: there are {len(self.goals)} goals")
        return Session(self, goal_index)

    def search(self, query: str) -> list[tuple[str, float]]:
        """Returns (asin, score) of the 50 best products for `query`, best first, scores to four decimals."""
        results = self.catalogue.search(query.lower())
        return [(self.catalogue.product(position).asin, round(score, 4)) for position, score in results]

    def reward(self, goal: Mapping, asin: str, options: Mapping[str, str], price: float) -> dict[str, float | bool | None]:
        """Returns `reward`, `r_type`, `r_att`, `r_option`, `r_price` and more for a purchase; see `purchase_reward`.

        Raises:
            KeyError: the catalogue has no such asin.
        """
        return purchase_reward(self.catalogue.product(self._position(asin)), goal, options, price, self._nouns)

    def price(self, asin: str) -> float:
        """Returns the price of a product under this seed.

        Raises:
            KeyError: the catalogue has no such asin.
        """
        return self.goals.price(self._position(asin))

    def _position(self, asin: str) -> int:
        position = self.catalogue.position(asin)
        if position is None:
            raise KeyError(f"no product {asin!r} in the catalogue")
        return position


def load_shop(
    items: Path | str,
    attributes: Path | str | None = None,
    human: Path | str | None = None,
    human_goals: bool = False,
    seed: int = 0,
    order: str = "verl-agent",
    *,
    reachable_only: bool = False,
    nouns: Nouns = title_nouns,
) -> Shop:
    """Loads WebShop's data files.

    Args:
        items: the catalogue, `.json` or `.json.gz`, or a folder built with `python -m hgpo_jax.envs.webshop.catalogue`.
        attributes: the attributes and synthetic instructions; not needed with a built folder, which holds them.
        human: the human instructions; needed for `human_goals`.
        human_goals: play the human instructions instead of the synthetic ones.
        seed: of prices, price limits and (in order "verl-agent") the order of the goals.
        order: "verl-agent" (each seed its own order) or "original" (one order for all seeds).
        reachable_only: leave out goals that cannot reach a reward of 1.0.
        nouns: finds the nouns of a title, see `hgpo_jax.envs.webshop.nouns`.

    Raises:
        ValueError: a file is broken or an argument is wrong or missing; one line with the fix.
        FileNotFoundError: a file is missing.
    """
    if human_goals and human is None:
        raise ValueError("human_goals=True needs the human instructions; pass human=items_human_ins*.json")
    catalogue = _catalogue(Path(items), Path(attributes) if attributes else None)
    nouns = functools.lru_cache(maxsize=1 << 14)(nouns)
    book = HumanGoals(catalogue, nouns, human) if human_goals and human is not None else SyntheticGoals(catalogue, nouns)
    return Shop(book, seed, order, nouns, reachable_only)


def _catalogue(items: Path, attributes: Path | None) -> Catalogue:
    """Returns the catalogue of the files, the same object for as long as a shop uses it and the files stay the same."""
    load: Callable[[], Catalogue]
    if items.is_dir():
        files, load = [items / "meta.json"], functools.partial(Catalogue.open, items)
    elif attributes is None:
        raise ValueError("attributes is missing; pass items_ins_v2*.json, or a built catalogue folder as items")
    else:
        files, load = [items, attributes], functools.partial(_build, items, attributes)
    key = tuple((file.resolve(), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists())
    catalogue = _open_catalogues.get(key)
    if catalogue is None:
        catalogue = _open_catalogues[key] = load()
    return catalogue


def _build(items: Path, attributes: Path) -> Catalogue:
    return build(read_products(items, attributes))
