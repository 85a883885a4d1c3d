"""Speed and memory of the engine (`python -m hgpo_jax.bench envs`).

`measure(items, attributes)` takes a catalogue, `measure_large(products)` makes a synthetic one, built into mapped files.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from hgpo_jax.envs.measure import in_own_process
from hgpo_jax.envs.webshop.catalogue import Catalogue, build
from hgpo_jax.envs.webshop.commands import click
from hgpo_jax.envs.webshop.oracle import shortest_purchase
from hgpo_jax.envs.webshop.products import read_products
from hgpo_jax.envs.webshop.shop import Shop, load_shop
from hgpo_jax.envs.webshop.synthetic import write_catalogue

ENVIRONMENTS = 256  # verl-agent's: 128 to train in 16 groups of one seed each, 128 to validate with a seed each
TURNS = 15


class Row(TypedDict):
    """A measured number."""

    name: str
    value: float
    unit: str


def measure(items: Path | str, attributes: Path | str) -> list[Row]:
    """Returns rows (name, value, unit): loading, session, reset, click, search, purchase, and memory of 256."""
    start = time.perf_counter()
    shop = load_shop(items, attributes)
    rows = [_row("load", time.perf_counter() - start, "s")]
    count = min(1000, len(shop.goals))
    rows.append(_row("new session", _mean_ms(shop.session, range(count)), "ms"))
    sessions = [shop.session(index) for index in range(count)]
    rows.append(_row("reset", _mean_ms(lambda session: session.reset(), sessions), "ms"))
    queries = list(dict.fromkeys(session.goal["instruction_text"].lower() for session in sessions))
    rows.append(_row("search", _mean_ms(shop.catalogue.index.search, queries), "ms"))
    rows += _walk(shop, count)
    rows.append(_row(f"memory of {ENVIRONMENTS} environments", in_own_process(__name__, "live", items, attributes)["mb"], "MB"))
    return rows


def _walk(shop: Shop, episodes: int) -> list[Row]:
    """Times random clicks, and the purchases of the oracle."""
    rng, spent, clicks = random.Random(0), 0.0, 0
    for index in range(episodes):
        session = shop.session(index)
        _, actions = session.reset()
        session.step(f"search[{session.goal['query']}]")
        actions = session.actions
        for _ in range(TURNS):
            label = rng.choice([label for label in actions["clickables"] if label != "buy now"])
            start = time.perf_counter()
            _, _, _, actions = session.step(click(label))
            spent += time.perf_counter() - start
            clicks += 1
    bought = 0.0
    for index in range(episodes):
        session = shop.session(index)
        *before, buy = shortest_purchase(shop, session.goal) or [""]
        for command in before:
            session.step(command)
        start = time.perf_counter()
        session.step(buy)
        bought += time.perf_counter() - start
    return [_row("click", 1e3 * spent / clicks, "ms"), _row("buy", 1e3 * bought / episodes, "ms")]


def measure_large(products: int) -> list[Row]:
    """Returns rows for a synthetic catalogue of `products`: building, and opening and searching the mapped files."""
    with tempfile.TemporaryDirectory() as folder:
        items, attributes = write_catalogue(folder, products)
        rows = [_row("products", products, ""), _row("input", items.stat().st_size / 1e6, "MB")]
        built = in_own_process(__name__, "build_folder", items, attributes, folder)
        rows += [_row("build", built["seconds"], "s"), _row("build, peak memory", built["mb"], "MB")]
        used = in_own_process(__name__, "use_folder", folder)
        rows.append(_row("built files", sum(f.stat().st_size for f in Path(folder, "built").iterdir()) / 1e6, "MB"))
        units = {"open": "ms", "shop": "s", "search": "ms", "slowest search": "ms", "click": "ms", "buy": "ms"}
        return (
            rows
            + [_row(name, used[name], unit) for name, unit in units.items()]
            + [_row("after use, peak memory", used["mb"], "MB")]
        )


def live(items: str, attributes: str) -> dict[str, float]:
    """Plays a little in all environments of a training run."""
    first = load_shop(items, attributes)
    half = ENVIRONMENTS // 2
    shops = [first.with_seed(seed) for seed in range(half // 8)]
    environments = [(shops[i // 8], i) for i in range(half)] + [(first.with_seed(1000 + i), i) for i in range(half)]
    sessions = [shop.session(index % len(shop.goals)) for shop, index in environments]
    for session in sessions:
        session.reset()
        for command in (f"search[{session.goal['instruction_text']}]", click(session.goal["asin"].lower())):
            session.step(command)
    return {"sessions": len(sessions)}


def build_folder(items: str, attributes: str, folder: str) -> dict[str, float]:
    """Builds a catalogue below `folder`."""
    start = time.perf_counter()
    build(read_products(items, attributes), Path(folder) / "built")
    return {"seconds": time.perf_counter() - start}


def use_folder(folder: str) -> dict[str, float]:
    """Opens, searches and plays the built catalogue."""
    start = time.perf_counter()
    catalogue = Catalogue.open(Path(folder) / "built")
    opened = time.perf_counter() - start
    start = time.perf_counter()
    shop = load_shop(Path(folder) / "built")
    shop_seconds = time.perf_counter() - start
    goals = [shop.goals[index] for index in range(min(300, len(shop.goals)))]
    times = []
    for goal in goals:
        start = time.perf_counter()
        catalogue.index.search(goal["name"])
        times.append(1e3 * (time.perf_counter() - start))
    walked = {row["name"]: row["value"] for row in _walk(shop, min(100, len(shop.goals)))}
    return walked | {
        "open": 1e3 * opened,
        "shop": shop_seconds,
        "search": sum(times) / len(times),
        "slowest search": max(times),
    }


def _mean_ms(function: Callable, arguments) -> float:
    start = time.perf_counter()
    for argument in arguments:
        function(argument)
    return 1e3 * (time.perf_counter() - start) / len(arguments)


def _row(name: str, value: float, unit: str) -> Row:
    return {"name": name, "value": round(float(value), 4), "unit": unit}
