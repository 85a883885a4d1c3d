"""Goals and prices, drawn as the original draws them (`load_products` and `get_goals` of princeton-nlp/WebShop).

A `GoalBook` holds what no seed changes; a `GoalList` adds one seed's prices, price limits and order. A list keeps two
small arrays and makes a goal when it is asked for, so hundreds of seeds cost little.
"""

import functools
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hgpo_jax.envs.webshop.catalogue import Catalogue
from hgpo_jax.envs.webshop.products import read_json
from hgpo_jax.envs.webshop.purchase import why_unreachable
from hgpo_jax.envs.webshop.reward import Nouns

ORDERS = ("verl-agent", "original")
ORIGINAL_SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000


class GoalBook:
    """The goals before prices and order, in groups that share one price limit.

    Attributes:
        position: product of each group; `start`: int64, first goal of each group, and their number at the end.
    """

    def __init__(self, catalogue: Catalogue, nouns: Nouns, position: npt.ArrayLike, counts: npt.ArrayLike):
        self.catalogue, self._nouns = catalogue, nouns
        self.position = np.asarray(position)
        self.start = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self.unreachable = functools.lru_cache(maxsize=1 << 16)(self._unreachable)

    def __len__(self) -> int:
        return int(self.start[-1])

    def goal(self, number: int) -> tuple[int, dict]:
        """Returns the group of goal `number` and the goal, without price."""
        group = int(np.searchsorted(self.start, number, "right")) - 1
        product = self.catalogue.product(int(self.position[group]))
        shared = {
            "asin": product.asin,
            "category": product.category,
            "query": product.query,
            "name": product.name,
            "product_category": product.product_category,
        }
        return group, shared | self._wish(product, group, number - int(self.start[group]))

    def _wish(self, product, group: int, choice: int) -> dict:
        raise NotImplementedError

    def _unreachable(self, number: int) -> str | None:
        """Tells why goal `number` cannot reach a reward of 1.0, None if it can."""
        group, goal = self.goal(number)
        goal["price_upper"] = NO_LIMIT
        return why_unreachable(self.catalogue.product(int(self.position[group])), goal, self._nouns)


class SyntheticGoals(GoalBook):
    """One goal per choice of options of each product that has an instruction."""

    def __init__(self, catalogue: Catalogue, nouns: Nouns):
        super().__init__(catalogue, nouns, catalogue.goal_position, catalogue.goal_count)

    def _wish(self, product, group: int, choice: int) -> dict:
        options = {}
        for name in sorted(product.options, reverse=True):  # the last option name varies fastest
            choice, which = divmod(choice, len(product.options[name]))
            options[name] = product.options[name][which]
        options = dict(sorted(options.items()))
        request = ", and ".join(f"{name}: {value}" for name, value in options.items())
        return {
            "instruction_text": product.instruction + (f" with {request}" if request else ""),
            "attributes": product.instruction_attributes,
            "goal_options": options,
            "weight": float(self.catalogue.goal_weight[group]),
        }


class HumanGoals(GoalBook):
    """One goal per human instruction that names attributes.

    Raises:
        ValueError: the file is broken; one line naming file, field, fault and fix.
    """

    def __init__(self, catalogue: Catalogue, nouns: Nouns, path: Path | str):
        self._wishes = []
        instructions = read_json(path)
        if not isinstance(instructions, dict):
            raise ValueError(f"{Path(path).name}: is not a JSON object; pass items_human_ins*.json here")
        places = [(catalogue.position(asin), asin) for asin in instructions]
        for position, asin in sorted((place, asin) for place, asin in places if place is not None):
            entries = instructions[asin] if isinstance(instructions[asin], list) else [None]
            self._wishes += [(position, wish) for entry in entries if (wish := _human_wish(entry, asin, path))]
        super().__init__(catalogue, nouns, [position for position, _ in self._wishes], [1] * len(self._wishes))

    def _wish(self, product, group: int, choice: int) -> dict:
        return dict(self._wishes[group][1])


def _human_wish(entry, asin: str, path: Path | str) -> dict | None:
    """Returns the goal fields of one human instruction, None if it names no attribute (the original skips those)."""
    for field, kind in (("instruction", str), ("instruction_attributes", list), ("instruction_options", list)):
        value = entry.get(field) if isinstance(entry, dict) else None
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in value):
            what = "a string" if kind is str else "a list of strings"
            raise ValueError(f"{Path(path).name}: product {asin}, field '{field}' is not {what}; write {what}")
    if not entry["instruction_attributes"]:
        return None
    return {
        "instruction_text": entry["instruction"].strip("."),
        "attributes": entry["instruction_attributes"],
        "goal_options": entry["instruction_options"],
        "weight": 1,
    }


class GoalList:
    """The goals of one seed, in playing order.

    `goals[i]` is a dict with `asin`, `category`, `query`, `name`, `product_category`, `instruction_text`,
    `attributes`, `price_upper`, `goal_options`, `weight`, and `unreachable`: None, or why no purchase of just what is
    asked can earn 1.0.

    Args:
        book: the goals.
        seed: of the prices and, in order "verl-agent", of the shuffle.
        order: "verl-agent" shuffles with the seed, so that index i is another goal for each seed and test indices of
            one seed are train goals of another, as in published runs; "original" has one shuffle for all seeds.
        reachable_only: leave out goals marked `unreachable`.
    """

    def __init__(self, book: GoalBook, seed: int, order: str, reachable_only: bool = False):
        catalogue = book.catalogue
        draw = random.Random(seed)
        ends = zip(catalogue.low[catalogue.ranged].tolist(), catalogue.high[catalogue.ranged].tolist(), strict=True)
        self._book = book
        self._drawn = np.array([draw.uniform(low, high) for low, high in ends])
        self._limit = np.array([_price_limit(self.price(int(position)), draw) for position in book.position], float)
        numbers = list(range(len(book)))
        random.Random(seed if order == "verl-agent" else ORIGINAL_SHUFFLE_SEED).shuffle(numbers)
        if reachable_only:
            numbers = [number for number in numbers if book.unreachable(number) is None]
        self._numbers = np.array(numbers, np.int32 if len(book) < 1 << 31 else np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict:
        number = int(self._numbers[index])
        group, goal = self._book.goal(number)
        limit = float(self._limit[group])
        if limit < NO_LIMIT:
            goal["instruction_text"] += f", and price lower than {limit:.2f} dollars"
        goal["price_upper"] = limit if limit < NO_LIMIT else NO_LIMIT
        goal["unreachable"] = self._book.unreachable(number)
        return goal

    def price(self, position: int) -> float:
        """Returns the price of the product at `position` under this seed."""
        catalogue = self._book.catalogue
        i = int(np.searchsorted(catalogue.ranged, position))
        drawn = i < len(catalogue.ranged) and catalogue.ranged[i] == position
        return float(self._drawn[i] if drawn else catalogue.low[position])


def _price_limit(price: float, draw: random.Random) -> float:
    """Draws a limit among the next four multiples of ten above `price`, at most 990; NO_LIMIT if there are not two."""
    first = int(price // 10) + 1 if price < 990 else 100
    candidates = [10.0 * tens for tens in range(first, min(first + 4, 100))]
    return max(draw.sample(candidates, 2)) if len(candidates) > 1 else NO_LIMIT
