"""Environments: the compiled household as whole batches and, where their data is given, ALFWorld's and WebShop's engines.

    python -m hgpo_jax.bench envs --alfworld ALFWORLD_DATA --webshop FOLDER --products 200000

Limits are this project's own. A ratio compares with the original engine's time as it was once recorded on two other cores
(TextWorld 1.7.0, WebShop with Flask and Lucene); the original is not run here.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax

from envs.household import TASKS, Household
from envs.household.expert import random_action
from envs.household.world import ROOMS
from hgpo_jax.bench import policies
from hgpo_jax.config import ConfigError
from hgpo_jax.environments import webshop_files

GAMES = 20  # of a split, evenly spread
# What a row's value must stay below, in its unit.
LIMITS = {
    "alfworld load and reset": 10.0,
    "alfworld step": 0.3,
    "alfworld memory of 1,000 live environments, each loaded on its own": 1000.0,
    "webshop load": 1.0,
    "webshop reset": 0.2,
    "webshop click": 0.2,
    "webshop search": 3.0,
    "webshop memory of 256 environments": 300.0,
}
# The original engines' recorded times, in ms.
RECORDED = {"alfworld load and reset": 3500.0, "alfworld step": 166.0, "webshop reset": 8.0, "webshop click": 31.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=policies.positive, default=1024, help="the compiled environment's episodes at once")
    parser.add_argument("--repeats", type=policies.positive, default=20, help="its timed calls, of which the median counts")
    parser.add_argument("--alfworld", metavar="FOLDER", help="ALFWorld's games; measures those of valid_seen")
    parser.add_argument("--webshop", metavar="FOLDER", help="WebShop's catalogue and attributes")
    parser.add_argument("--products", type=policies.positive, metavar="N", help="also a synthetic WebShop catalogue of so many")


def run(args: argparse.Namespace) -> list[dict]:
    """Rows of name, value, unit, limit_share (of the limit, less is better) and ratio (recorded time of the original engine
    over ours), or None. Raises ConfigError for a folder without the data."""
    rows = []  # data first, which may be refused
    if args.alfworld:
        rows += alfworld(args.alfworld)
    if args.webshop:
        rows += webshop(args.webshop)
    if args.products:
        from envs.webshop.bench import measure_large

        name = f"webshop, {args.products:,} products"
        rows += [row(f"{name}: {r['name']}", r["value"], r["unit"]) for r in measure_large(args.products)]
    left_out = [f"--{name}" for name in ("alfworld", "webshop", "products") if not getattr(args, name)]
    if left_out:
        print(f"left out, because not given: {', '.join(left_out)}")
    return household(args.batch, args.repeats) + rows


def row(name: str, value: float, unit: str) -> dict:
    limit, recorded = LIMITS.get(name), RECORDED.get(name)
    share = limit and value / limit
    return {"name": name, "value": value, "unit": unit, "limit_share": share, "ratio": recorded and recorded / value}


def household(batch: int, repeats: int) -> list[dict]:
    """The compiled household."""
    env = Household(tasks=tuple(TASKS), rooms=tuple(ROOMS))
    keys = jax.random.split(jax.random.key(0), batch)
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    state, _ = reset(keys)
    actions = jax.jit(jax.vmap(lambda s, k: random_action(env, s, k)))(state, keys)
    rows = []
    for name, call in (("reset", lambda: reset(keys)), ("step", lambda: step(state, actions))):
        jax.block_until_ready(call())
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - began)
        rows.append(row(f"household {name}, batch {batch:,}", batch / statistics.median(times), f"{name}s/s"))
    return rows


def alfworld(folder: str) -> list[dict]:
    """ALFWorld's engine on some games of valid_seen."""
    from envs.alfworld.bench import measure
    from envs.alfworld.dataset import list_games

    try:
        games = [game.path for game in list_games("valid_seen", folder)]
        measured = measure(games[:: -(-len(games) // GAMES)])
    except (ValueError, OSError) as error:
        raise ConfigError(f"--alfworld {folder}: {' '.join(str(error).split())}") from None
    return [row(f"alfworld {r['name']}", r["value"], r["unit"]) for r in measured]


def webshop(folder: str) -> list[dict]:
    """WebShop's engine on a catalogue."""
    try:
        from envs.webshop.bench import measure

        measured = measure(*webshop_files(folder))
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"--webshop {folder}: {' '.join(str(error).split())}") from None
    return [row(f"webshop {r['name']}", r["value"], r["unit"]) for r in measured]
