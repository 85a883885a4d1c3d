"""Speed and memory of the WebShop engine.

    python -m envs.webshop.bench ITEMS ATTRIBUTES      the 1,000-product catalogue
    python -m envs.webshop.bench --products 200000     a synthetic catalogue, built into mapped files
"""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from envs.webshop.catalogue import Catalogue, build
from envs.webshop.commands import click
from envs.webshop.oracle import shortest_purchase
from envs.webshop.products import read_products
from envs.webshop.shop import Shop, load_shop
from envs.webshop.synthetic import write_catalogue

ENVIRONMENTS = 256  # verl-agent's: 128 to train in 16 groups of one seed each, 128 to validate with a seed each
TURNS = 15
Row = dict[str, str | float]


def measure(items: Path | str, attributes: Path | str) -> list[Row]:
    """Return rows (name, value, unit): loading, session, reset, click, search, purchase, and memory of 256."""
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
    rows.append(_row(f"memory of {ENVIRONMENTS} environments", _child("memory", items, attributes)["mb"], "MB"))
    return rows


def _walk(shop: Shop, episodes: int) -> list[Row]:
    """Time random clicks, and the purchases of the oracle."""
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
    """Return rows for a synthetic catalogue of `products`: building, and opening and searching the mapped files."""
    with tempfile.TemporaryDirectory() as folder:
        items, attributes = write_catalogue(folder, products)
        rows = [_row("products", products, ""), _row("input", items.stat().st_size / 1e6, "MB")]
        built = _child("build", items, attributes, folder)
        rows += [_row("build", built["seconds"], "s"), _row("build, peak memory", built["mb"], "MB")]
        used = _child("use", folder, folder)
        rows.append(_row("built files", sum(f.stat().st_size for f in Path(folder, "built").iterdir()) / 1e6, "MB"))
        units = {"open": "ms", "shop": "s", "search": "ms", "slowest search": "ms", "click": "ms", "buy": "ms"}
        return rows + [_row(name, used[name], unit) for name, unit in units.items()] + [
            _row("after use, peak memory", used["mb"], "MB")
        ]


def _child(task: str, *paths: Path | str) -> dict[str, float]:
    """Run a task in a fresh process, so that its memory is its own."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "envs.webshop.bench", "--task", task, *map(str, paths)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"bench task {task!r} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def _task_memory(items: str, attributes: str) -> dict[str, float]:
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


def _task_build(items: str, attributes: str, folder: str) -> dict[str, float]:
    start = time.perf_counter()
    build(read_products(items, attributes), Path(folder) / "built")
    return {"seconds": time.perf_counter() - start}


def _task_use(folder: str, _: str) -> dict[str, float]:
    start = time.perf_counter()
    catalogue = Catalogue.open(Path(folder) / "built")
    opened = time.perf_counter() - start
    start = time.perf_counter()
    shop = load_shop(Path(folder) / "built")
    shop_seconds = time.perf_counter() - start
    goals = [shop.goals[index] for index in range(300)]
    times = []
    for goal in goals:
        start = time.perf_counter()
        catalogue.index.search(goal["name"])
        times.append(1e3 * (time.perf_counter() - start))
    walked = {row["name"]: row["value"] for row in _walk(shop, 100)}
    return walked | {
        "open": 1e3 * opened, "shop": shop_seconds, "search": sum(times) / len(times), "slowest search": max(times),
    }  # fmt: skip


def _mean_ms(function: Callable, arguments) -> float:
    start = time.perf_counter()
    for argument in arguments:
        function(argument)
    return 1e3 * (time.perf_counter() - start) / len(arguments)


def _row(name: str, value: float, unit: str) -> Row:
    return {"name": name, "value": round(float(value), 4), "unit": unit}


def _peak_mb() -> float:
    """Most memory this process ever held, in MB."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage: there Linux counts the parent's memory at the time of the fork as the child's own.
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3  # bytes there, kilobytes elsewhere


def main() -> None:
    """Print the rows, or run one task of a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="ITEMS ATTRIBUTES")
    parser.add_argument("--products", type=int, help="size of a synthetic catalogue")
    parser.add_argument("--task", choices=("memory", "build", "use"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        result = {"memory": _task_memory, "build": _task_build, "use": _task_use}[arguments.task](*arguments.paths)
        print(json.dumps(result | {"mb": _peak_mb()}))
        return
    if not arguments.products and len(arguments.paths) != 2:
        parser.error("give ITEMS and ATTRIBUTES, or --products")
    for row in measure_large(arguments.products) if arguments.products else measure(*arguments.paths):
        print(f"{row['name']:32} {row['value']:12,.4g} {row['unit']}")


if __name__ == "__main__":
    main()
