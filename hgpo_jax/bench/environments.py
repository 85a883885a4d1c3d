"""Environments: the compiled household as whole batches and, where their data is given, ALFWorld's and WebShop's engines.

    python -m hgpo_jax.bench envs --alfworld $ALFWORLD_DATA --webshop FOLDER --products 200000 --waiting 50
    python -m hgpo_jax.bench envs --alfworld $ALFWORLD_DATA --tokenizer Qwen/Qwen2.5-1.5B-Instruct

Limits are this project's own. A ratio compares with the original engine's time as recorded earlier on two other cores
(TextWorld 1.7.0, WebShop with Flask and Lucene); the original is not run here. An asynchronous rollout's ratio is to the
rollout of the same run that waits for all.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import numpy as np

from hgpo_jax.bench.device_text import measure_told
from hgpo_jax.bench.limits import alternate
from hgpo_jax.config import PolicyConfig
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.envs.household import TASKS, Household
from hgpo_jax.envs.household.expert import random_action
from hgpo_jax.envs.household.world import ROOMS
from hgpo_jax.envs.waiting import Waiting
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import read_tokenizer
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.environments import webshop_files
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.utils.errors import ConfigError

GAMES = 20  # games of a split, evenly spread
# Upper limits of the rows' values, in their units.
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
    parser.add_argument("--batch", type=whole_number, default=1024, help="the compiled environment's episodes at once")
    parser.add_argument("--repeats", type=whole_number, default=20, help="its timed calls, of which the median counts")
    parser.add_argument("--alfworld", metavar="FOLDER", help="ALFWorld's games; measures those of valid_seen")
    parser.add_argument("--tokenizer", metavar="PLACE", help="folder or hub id; these games also told in chat on the device")
    parser.add_argument("--webshop", metavar="FOLDER", help="WebShop's catalogue and attributes")
    several = functools.partial(whole_number, low=2)  # the first one has no goal
    parser.add_argument("--products", type=several, metavar="N", help="also a synthetic WebShop of N products")
    parser.add_argument(
        "--waiting",
        type=whole_number,
        metavar="MS",
        help="also rollouts of an artificial environment whose steps take so long on average, synchronous and asynchronous",
    )
    parser.add_argument("--episodes", type=whole_number, default=16, help="its episodes")
    parser.add_argument("--workers", type=whole_number, default=16, help="processes that play it")
    parser.add_argument("--ready-fraction", type=float, default=0.25, help="rollout.ready_fraction of asynchronous rollouts")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the limit, less is better) and ratio (recorded time of the original
    engine over ours), or None. Raises ConfigError for a folder without the data."""
    if not 0 < args.ready_fraction < 1:
        raise ConfigError(f"--ready-fraction {args.ready_fraction:g}: expected a fraction above 0 and below 1")
    tokenizer = None
    if args.tokenizer:
        if not args.alfworld:
            raise ConfigError(f"--tokenizer {args.tokenizer}: needs games to tell; give --alfworld FOLDER")
        try:
            tokenizer = read_tokenizer(args.tokenizer)
        except ValueError as error:
            raise ConfigError(f"--tokenizer {str(error).removeprefix('policy.tokenizer=')}") from None
    rows = household(args.batch, args.repeats)
    if args.alfworld:
        rows += alfworld(args.alfworld, tokenizer)
    if args.webshop:
        rows += webshop(args.webshop)
    if args.products:
        from hgpo_jax.envs.webshop.bench import measure_large

        name = f"webshop, {args.products:,} products"
        rows += [row(f"{name}: {r['name']}", r["value"], r["unit"]) for r in measure_large(args.products)]
    if args.waiting:
        rows += waiting(args.waiting / 1000, args.episodes, args.workers, args.ready_fraction)
    left_out = [f"--{name}" for name in ("alfworld", "webshop", "products", "waiting") if not getattr(args, name)]
    if left_out:
        print(f"left out, because not given: {', '.join(left_out)}")
    return rows


def row(name: str, value: float, unit: str) -> dict:
    limit, recorded = LIMITS.get(name), RECORDED.get(name)
    share = limit and value / limit
    return {"name": name, "value": value, "unit": unit, "limit_share": share, "ratio": recorded and recorded / value}


def household(batch: int, repeats: int) -> list[dict]:
    """Measures the compiled household."""
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


def alfworld(folder: str, tokenizer) -> list[dict]:
    """Measures ALFWorld's engine and the compiled games on some games of valid_seen; with a tokenizer also as chat."""
    from hgpo_jax.envs.alfworld.bench import measure
    from hgpo_jax.envs.alfworld.bench_compiled import measure_compiled
    from hgpo_jax.envs.alfworld.dataset import list_games

    try:
        games = [game.path for game in list_games("valid_seen", folder)]
        games = games[:: -(-len(games) // GAMES)]
        measured = measure(games) + measure_compiled(games)
        told = measure_told(games, tokenizer) if tokenizer else []
    except (ValueError, OSError) as error:
        raise ConfigError(f"--alfworld {folder}: {' '.join(str(error).split())}") from None
    return [row(f"alfworld {r['name']}", r["value"], r["unit"]) for r in measured] + told


def webshop(folder: str) -> list[dict]:
    """Measures WebShop's engine on a catalogue."""
    try:
        from hgpo_jax.envs.webshop.bench import measure

        measured = measure(*webshop_files(folder))
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"--webshop {folder}: {' '.join(str(error).split())}") from None
    return [row(f"webshop {r['name']}", r["value"], r["unit"]) for r in measured]


class Counted:
    """Prompts of 128 equal tokens, a different one each turn; any response is the one action."""

    end_tokens, prompt_limit = (-1,), 128

    def build(self, inputs):
        return [Prompt([each.turn + 1] * self.prompt_limit) for each in inputs]

    def parse(self, ids):
        return ParsedResponse("", "wait", True)


def waiting(mean: float, episodes: int, workers: int, ready_fraction: float, repeats: int = 3) -> list[dict]:
    """Measures rollouts of `Waiting` with a tiny policy and responses of 8 tokens: medians of `repeats` rounds."""
    mesh = make_mesh("data=1", jax.devices()[:1])
    model = ModelConfig(vocab_size=256, **PolicyConfig().sizes)
    params, keys, groups = initialize(model, 0, mesh), jax.random.split(jax.random.key(0), episodes), np.arange(episodes)
    rows = []
    rollouts: dict[float, HostRollout] = {}
    for kind in ("exponential", "constant"):
        make_env = functools.partial(Waiting, mean, kind == "exponential")
        for fraction in (1.0, ready_fraction):
            rollouts[fraction] = (
                rollouts[fraction].with_environment(make_env)
                if fraction in rollouts
                else HostRollout(
                    make_env,
                    Counted(),
                    network(model),
                    mesh,
                    batch=episodes,
                    history_length=0,
                    response_limit=8,
                    workers=workers,
                    ready_fraction=fraction,
                )
            )
        inputs = params, groups, keys, groups, Decoding()
        calls = {fraction: functools.partial(play, *inputs) for fraction, play in rollouts.items()}
        alternate(calls, 1)
        seconds = {fraction: statistics.median(times) for fraction, times in alternate(calls, repeats).items()}
        for rollout in rollouts.values():
            rollout.close()
        name = f"waiting, {kind} step times, {episodes} episodes, {workers} workers"
        rows += [
            row(f"{name}: synchronous", seconds[1.0], "s"),
            row(f"{name}: ready_fraction={ready_fraction:g}", seconds[ready_fraction], "s")
            | {"ratio": seconds[1.0] / seconds[ready_fraction]},
            row(f"{name}: steps of the slowest episode", max(sum(make_env().times(task)) for task in groups.tolist()), "s"),
        ]
    return rows
