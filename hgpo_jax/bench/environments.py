"""Engines of environments: milliseconds of resets and steps, and rollouts of environments that have to be waited for.

    python -m hgpo_jax.bench envs --alfworld $ALFWORLD_DATA --webshop FOLDER --products 200000 --passages 1000000 --waiting 50

Limits are this project's own. A ratio compares with the original engine's time as recorded earlier on two other cores
(TextWorld 1.7.0, WebShop with Flask and Lucene); the original is not run here. An asynchronous rollout's ratio is to the
rollout of the same run that waits for all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from hgpo_jax.bench.artificial_environment import ArtificialEnvironment
from hgpo_jax.bench.limits import row, timed
from hgpo_jax.bench.rollout import NEVER, UNIFORM, ArtificialFormat
from hgpo_jax.config import PolicyConfig
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.alfworld.dataset import list_games
from hgpo_jax.envs.alfworld.game import load_game
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.envs.search.passages import Passages
from hgpo_jax.envs.webshop.catalogue import Catalogue, build
from hgpo_jax.envs.webshop.commands import click
from hgpo_jax.envs.webshop.products import read_products
from hgpo_jax.envs.webshop.shop import load_shop
from hgpo_jax.envs.webshop.synthetic import write_catalogue
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.rollout.environments import webshop_files
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.utils.errors import ConfigError

GAMES = 20  # games of a split, evenly spread
STEPS = 50  # of an episode of ALFWorld, the benchmark's limit
CLICKS = 15  # of an episode of WebShop
WORDS = 200_000  # of the made-up passages
WAITING, READY = 16, 0.25  # episodes that are waited for, each with a worker; rollout.ready_fraction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alfworld", metavar="FOLDER", help="ALFWorld's games; measures those of valid_seen")
    parser.add_argument("--webshop", metavar="FOLDER", help="WebShop's catalogue and attributes")
    several = functools.partial(whole_number, low=2)  # the first one has no goal
    parser.add_argument("--products", type=several, metavar="N", help="a synthetic WebShop of N products, in mapped files")
    parser.add_argument("--passages", type=several, metavar="N", help="an index of N made-up passages of 100 words, mapped")
    parser.add_argument("--waiting", type=whole_number, metavar="MS", help="rollouts whose steps take so long on average")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a limit_share is of the limit, less is better. Raises ConfigError for a folder without the data."""
    parts = ("alfworld", alfworld), ("webshop", webshop), ("products", products), ("passages", passages), ("waiting", waiting)
    rows = []
    for name, part in parts:
        if argument := getattr(args, name):
            try:
                rows += part(argument)
            except (ValueError, OSError, ImportError) as error:
                raise ConfigError(f"--{name} {argument}: {' '.join(str(error).split())}") from None
    if not rows:
        raise ConfigError(f"bench envs: nothing is asked for; give {', '.join(f'--{name}' for name, _ in parts)}")
    return rows


@contextlib.contextmanager
def clock(milliseconds: list[float]) -> Iterator[None]:
    """Appends the time of a `with` block."""
    began = time.perf_counter()
    yield
    milliseconds.append(1e3 * (time.perf_counter() - began))


def mean(name: str, times: list[float], limit: float | None = None, recorded: float | None = None) -> dict:
    """Returns the row of some times in ms. limit, recorded: the limit and the original engine's time."""
    value = statistics.fmean(times)
    return row(name, value, "ms", limit and value / limit, recorded and recorded / value)


def alfworld(folder: str) -> list[dict]:
    """Measures ALFWorld's engine, admissible commands included."""
    games = [game.path for game in list_games("valid_seen", folder)]
    games = games[:: -(-len(games) // GAMES)]
    load_game(games[0]).reset()  # compiles the domain, once per process
    loads: list[float] = []
    steps: list[float] = []
    for path in games:
        with clock(loads):
            game = load_game(path)
            game.reset()
        chance, commands = random.Random(0), game.commands
        for _ in range(STEPS):
            command = chance.choice(commands)
            with clock(steps):
                _, commands, _ = game.step(command)
    return [mean("alfworld load and reset", loads, 10, 3500), mean("alfworld step", steps, 0.3, 166)]


def webshop(folder: str) -> list[dict]:
    """Measures WebShop's engine on a catalogue."""
    times: dict[str, list[float]] = {"load": [], "reset": [], "click": [], "search": []}
    items, attributes, *_ = *webshop_files(folder), None
    with clock(times["load"]):
        shop = load_shop(items, attributes)
    visit(shop, times)
    return [
        mean("webshop load", times["load"], 1000),
        mean("webshop reset", times["reset"], 0.2, 8),
        mean("webshop click", times["click"], 0.2, 31),
        mean("webshop search", times["search"], 3),
    ]


def visit(shop, times: dict[str, list[float]]) -> None:
    """Plays random episodes, and appends the times of resets, searches and clicks."""
    chance = random.Random(0)
    for index in range(min(300, len(shop.goals))):
        session = shop.session(index)
        with clock(times["reset"]):
            session.reset()
        with clock(times["search"]):
            shop.catalogue.index.search(session.goal["instruction_text"].lower())
        *_, actions = session.step(f"search[{session.goal['query']}]")
        for _ in range(CLICKS):
            label = chance.choice([label for label in actions["clickables"] if label != "buy now"])
            with clock(times["click"]):
                *_, actions = session.step(click(label))


def products(count: int) -> list[dict]:
    """Measures a synthetic catalogue: building it in mapped files, and opening and searching these."""
    times: dict[str, list[float]] = {name: [] for name in ("build", "open", "reset", "search", "click")}
    with tempfile.TemporaryDirectory() as folder:
        files, built = write_catalogue(folder, count), Path(folder, "built")
        with clock(times["build"]):
            build(read_products(*files), built)
        with clock(times["open"]):
            Catalogue.open(built)
        visit(load_shop(built), times)
    rows = [mean(f"webshop of {count:,} products: {name}", times[name]) for name in ("build", "open", "search")]
    return [*rows, row(f"webshop of {count:,} products: slowest search", max(times["search"]), "ms")]


def passages(count: int) -> list[dict]:
    """Measures an index of passages whose words have Zipf's frequencies: building it in mapped files, and searching these for
    eight words, of which none is one of the thirty most frequent."""
    random, words = np.random.default_rng(0), np.array([f"w{number}" for number in range(WORDS)])
    cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))
    cumulative /= cumulative[-1]

    def texts(how_many: int, length: int, rarer_than: int = 0) -> Iterator[str]:
        low = cumulative[rarer_than - 1] if rarer_than else 0
        for _ in range(how_many):
            yield " ".join(words[np.searchsorted(cumulative, low + (1 - low) * random.random(length), side="right")])

    times: dict[str, list[float]] = {"build": [], "search": []}
    with tempfile.TemporaryDirectory() as folder:
        with clock(times["build"]):
            found = Passages.open(Path(folder), "bench", lambda: texts(count, 100))
        for query in texts(50, 8, rarer_than=30):
            with clock(times["search"]):
                found.retrieve([query], 3)
        size = sum(file.stat().st_size for file in Path(folder, "bench").iterdir())
    name = f"{count:,} passages:"
    return [
        row(f"{name} build", times["build"][0] / 1e3, "s"),
        mean(f"{name} search", times["search"], 20),
        row(f"{name} mapped files", size / 2**30, "GiB", size / 2**31),
    ]


def waiting(milliseconds: int) -> list[dict]:
    """Measures rollouts with steps that take time, by a tiny policy with responses of 8 tokens."""
    mesh, model = make_mesh("data=1", jax.devices()[:1]), ModelConfig(vocab_size=256, **PolicyConfig().sizes)
    text, tasks = ArtificialFormat(256, 20, 128, 128, NEVER), np.arange(WAITING)
    inputs = {SHARED: initialize(model, 0, mesh)}, tasks, jax.random.split(jax.random.key(0), WAITING), tasks, UNIFORM
    rows = []
    for kind in ("exponential", "constant"):
        make_env = functools.partial(ArtificialEnvironment, 20, milliseconds / 1e3, kind == "exponential")
        with contextlib.ExitStack() as stack:
            calls = {}
            for fraction in (1.0, READY):
                settings = TextSettings(WAITING, 0, response_limit=8, workers=WAITING, ready_fraction=fraction)
                rollout = HostRollout(make_env, text, {SHARED: network(model)}, mesh, settings)
                stack.callback(rollout.close)
                calls[fraction] = functools.partial(rollout, *inputs)
            seconds = {fraction: timing.median for fraction, timing in timed(calls, 3).items()}
        name = f"waiting {milliseconds} ms, {kind} times, {WAITING} episodes"
        rows.append(row(f"{name}: synchronous", seconds[1.0], "s"))
        rows.append(row(f"{name}: ready_fraction={READY}", seconds[READY], "s", ratio=seconds[1.0] / seconds[READY]))
    return rows
