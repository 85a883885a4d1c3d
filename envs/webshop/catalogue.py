"""The read-only catalogue: products and search index, shared by all shops, seeds and environments.

One format for a thousand products and for a million: numpy arrays, kept in memory (`build` without a folder) or built
once into a folder and mapped from there (`build` with a folder, then `Catalogue.open`). Build a folder with
    python -m hgpo_jax.envs.webshop.catalogue ITEMS ATTRIBUTES FOLDER
"""

import argparse
import functools
import io
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hgpo_jax.envs import command_line
from hgpo_jax.envs.lucene.index import Index, IndexBuilder
from hgpo_jax.envs.webshop.pages import item_page
from hgpo_jax.envs.webshop.products import Product, read_products, search_text

FORMAT = {"format": "hgpo_jax webshop catalogue", "version": 1}
_META = "meta.json"
_RECORDS = "records.bin"


class Catalogue:
    """Products by position (their order in the file, which is the order of the original's random draws).

    Attributes:
        asins: bytes array, sorted; `asin_order` (int32) gives the position of each.
        low, high: float64 price per position; `high` is nan where there is a single price.
        goal_position, goal_count: int32, int64 per product with an instruction: position, number of option choices.
        goal_weight: float64, the original's sampling weight of each of its goals.
        index: the search index.
    """

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict):
        self._arrays = arrays
        self._meta = meta
        self.asins, self.asin_order = arrays["asins"], arrays["asin_order"]
        self.low, self.high = arrays["low"], arrays["high"]
        self.goal_position, self.goal_count = arrays["goal_position"], arrays["goal_count"]
        self.goal_weight = arrays["goal_weight"]
        self.ranged = np.flatnonzero(~np.isnan(self.high))  # positions whose price is drawn
        self.index = Index(arrays, meta["documents"], arrays["asin_rank"])
        # Results that depend only on the files: decoded products, their pages, search results.
        self.product = functools.lru_cache(maxsize=1 << 14)(self._product)
        self.item_page = functools.lru_cache(maxsize=1 << 12)(lambda position: item_page(self.product(position)))
        self.search = functools.lru_cache(maxsize=1 << 10)(self._search)

    def __len__(self) -> int:
        return len(self.low)

    @classmethod
    def open(cls, folder: Path | str) -> "Catalogue":
        """Maps a folder that `build` made.

        Raises:
            ValueError: the folder is not such a folder, or of another version.
        """
        folder = Path(folder)
        try:
            meta = json.loads((folder / _META).read_text("utf-8"))
            if not isinstance(meta, dict) or {key: meta.get(key) for key in FORMAT} != FORMAT:
                raise ValueError("another format or version")
            arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in folder.glob("*.npy")}
            arrays["records"] = np.memmap(folder / _RECORDS, np.uint8, "r")
            _check(arrays, meta)
            return cls(arrays, meta)
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise ValueError(f"{folder.name}: no built catalogue ({error}); build it again") from None

    def position(self, asin: str) -> int | None:
        """Returns the position of an asin, None if the catalogue lacks it."""
        key = asin.encode("utf-8", "surrogatepass")
        i = int(np.searchsorted(self.asins, key))
        return int(self.asin_order[i]) if i < len(self.asins) and self.asins[i] == key else None

    def _product(self, position: int) -> Product:
        start, end = self._arrays["record_start"][position : position + 2]
        try:
            return Product(*json.loads(self._arrays["records"][start:end].tobytes()))
        except (ValueError, TypeError):
            raise ValueError(f"record {position} of the built catalogue is damaged; build it again") from None

    def _search(self, query: str) -> tuple[tuple[int, float], ...]:
        """Returns (position, score) of the best 50 products, best first."""
        positions, scores = self.index.search(query)
        return tuple(zip(positions.tolist(), scores.tolist(), strict=True))

    def with_label(self, label: str, value: str) -> tuple[int, ...]:
        """Returns the positions of all products whose `label` ("category" or "query") is `value`."""
        codes = self._meta[label]
        code = codes.index(value) if value in codes else -1
        return tuple(np.flatnonzero(self._arrays[label] == code).tolist())


def build(products: Iterable[Product], folder: Path | str | None = None) -> Catalogue:
    """Builds a catalogue from products in file order.

    Args:
        products: from `read_products`.
        folder: where to write it, new or empty, for catalogues that should not be held in memory; None keeps it in memory.

    Raises:
        ValueError: there are no products, or the folder holds something.
    """
    if folder is not None and Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise ValueError(f"{folder}: is not empty; remove it, or build in another folder")
    products = iter(products)
    first = next(products, None)  # before anything is written
    if first is None:
        raise ValueError("the catalogue holds no product; pass a file with at least one")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    index = IndexBuilder()
    labels: dict[str, dict[str, int]] = {"category": {}, "query": {}}
    rows: dict[str, list] = {name: [] for name in ("asins", "low", "high", "category", "query")}
    record_start, goals = [0], []
    memory = io.BytesIO()
    with memory if folder is None else open(Path(folder) / _RECORDS, "wb") as records:
        for position, product in enumerate(itertools.chain([first], products)):
            record_start.append(record_start[-1] + records.write(json.dumps(product).encode()))
            index.add(search_text(product))
            rows["asins"].append(product.asin.encode("utf-8", "surrogatepass"))
            rows["low"].append(product.prices[0])
            rows["high"].append(product.prices[1] if len(product.prices) == 2 else math.nan)
            for label, codes in labels.items():
                rows[label].append(codes.setdefault(getattr(product, label), len(codes)))
            if product.instruction is not None:
                count = math.prod(len(values) for values in product.options.values())
                goals.append((position, count, product.instruction_attributes))
        content = np.frombuffer(memory.getvalue(), np.uint8)  # of a catalogue without a folder

    arrays = index.finish()
    asins = np.array(rows["asins"])
    order = np.argsort(asins, kind="stable").astype(np.int32)
    arrays |= {
        "asins": asins[order],
        "asin_order": order,
        "asin_rank": np.argsort(order).astype(np.int32),
        "record_start": np.array(record_start, np.int64),
        "low": np.array(rows["low"]),
        "high": np.array(rows["high"]),
        "category": np.array(rows["category"], np.int32),
        "query": np.array(rows["query"], np.int32),
        "goal_position": np.array([position for position, _, _ in goals], np.int32),
        "goal_count": np.array([count for _, count, _ in goals], np.int64),
        "goal_weight": _goal_weights(goals),
    }
    meta = FORMAT | {"documents": index.documents} | {label: list(codes) for label, codes in labels.items()}
    if folder is None:
        return Catalogue(arrays | {"records": content}, meta)
    for name, values in arrays.items():
        np.save(Path(folder) / f"{name}.npy", values)
    (Path(folder) / _META).write_text(json.dumps(meta), "utf-8")  # last: a folder without it is unfinished
    return Catalogue.open(folder)


def _check(arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Raises ValueError, or KeyError for missing arrays, unless a folder's arrays have the dtypes and sizes of one build."""
    products, goals = len(arrays["asins"]), len(arrays["goal_position"])
    terms, postings = len(arrays["term_start"]) - 1, len(arrays["post_doc"])
    expected = {
        "S": {"asins": products},
        "f": {"low": products, "high": products, "goal_weight": goals, "post_damp": postings},
        "i": {
            "asin_order": products,
            "asin_rank": products,
            "category": products,
            "query": products,
            "record_start": products + 1,
            "goal_position": goals,
            "goal_count": goals,
            "term_start": terms + 1,
            "post_start": terms + 1,
            "post_doc": postings,
        },
    }
    for kind, sizes in expected.items():
        for name, size in sizes.items():
            if arrays[name].dtype.kind != kind or arrays[name].shape != (size,):
                raise ValueError(f"{name}.npy does not fit the other files")
    ends = {"record_start": len(arrays["records"]), "term_start": len(arrays["term_text"]), "post_start": postings}
    if not products or any(arrays[name][-1] != end for name, end in ends.items()):
        raise ValueError("a file is cut off")
    if not isinstance(meta["documents"], int) or not all(isinstance(meta[label], list) for label in ("category", "query")):
        raise ValueError(f"{_META} holds something other than numbers and labels")


def _goal_weights(goals: list[tuple[int, int, list[str]]]) -> np.ndarray:
    """Returns per product the weight of each of its goals: the mean over attributes of 1 / goals with the attribute."""
    goals_with: dict[str, int] = {}
    for _, count, attributes in goals:
        for attribute in attributes:
            goals_with[attribute] = goals_with.get(attribute, 0) + count
    weights = []
    for _, _, attributes in goals:
        total = 0.0
        for attribute in attributes:  # not sum(): since Python 3.12 it rounds differently from the original
            total += 1.0 / (goals_with[attribute] or 1)
        weights.append(total / len(attributes))
    return np.array(weights, float)


def main() -> None:
    """Builds a folder from the two files."""
    p = command_line.Parser(
        prog="python -m hgpo_jax.envs.webshop.catalogue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("items", type=Path, metavar="ITEMS", help="the catalogue, .json or .json.gz")
    p.add_argument("attributes", type=Path, metavar="ATTRIBUTES", help="attributes and synthetic instructions")
    p.add_argument("folder", type=Path, metavar="FOLDER", help="where to build; new or empty")
    args = p.parse_args()
    print(f"{len(build(read_products(args.items, args.attributes), args.folder))} products in {args.folder}")


if __name__ == "__main__":
    command_line.run(main, (ValueError, ImportError))
