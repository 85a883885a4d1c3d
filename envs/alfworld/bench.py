"""Speed and memory of the engine: `measure(paths)` plays random episodes of the games (`python -m hgpo_jax.bench envs`)."""

import os
import random
import time
from collections.abc import Sequence
from itertools import cycle, islice

from hgpo_jax.envs.alfworld.game import Game, load_game
from hgpo_jax.envs.measure import in_own_process

EPISODE = 50  # steps, the benchmark's limit
LIVE = 1000  # environments that are alive during the measurement of memory


def measure(paths: Sequence[str | os.PathLike], live: int = LIVE) -> list[dict]:
    """Times loading, resetting and stepping (admissible commands included), and measures the memory of live environments.

    Args:
        paths: game files; each is loaded and played for `EPISODE` random steps.
        live: number of environments alive while memory is measured, in a separate process.

    Returns:
        Rows `{"name": str, "value": float, "unit": str}`; times are means over the games and the slowest game.

    Raises:
        ValueError: no path, or a file that is not a game.
    """
    if not paths:
        raise ValueError("no game files to measure; give the paths of some game.tw-pddl files")
    load_game(paths[0]).reset()  # compiles the domain, once per process
    times: dict[str, list[float]] = {"load and reset": [], "reset again": [], "step": []}
    for path in paths:
        start = time.perf_counter()
        game = load_game(path)
        game.reset()
        times["load and reset"].append((time.perf_counter() - start) * 1e3)
        times["step"].append(_play(game) * 1e3)
        start = time.perf_counter()
        game.reset()
        times["reset again"].append((time.perf_counter() - start) * 1e3)
    rows = []
    for name, values in times.items():
        rows.append({"name": name, "value": sum(values) / len(values), "unit": "ms"})
        rows.append({"name": f"{name}, slowest game", "value": max(values), "unit": "ms"})
    for name, task in (("each loaded on its own", "live_loaded"), ("of shared games", "live_shared")):
        mb = in_own_process(__name__, task, live, *paths)["mb"]
        rows.append({"name": f"memory of {live:,} live environments, {name}", "value": mb, "unit": "MB"})
    return rows


def live_loaded(live: str, *paths: str) -> dict:
    """Plays `live` environments that share no game."""
    return _live([load_game(path) for path in islice(cycle(paths), int(live))])


def live_shared(live: str, *paths: str) -> dict:
    """Plays `live` environments of as many games as there are files."""
    games = [load_game(path) for path in paths]
    return _live([game.fresh() for game in islice(cycle(games), int(live))])


def _live(games: list[Game]) -> dict:
    for game in games:
        game.reset()
        _play(game)
    return {"live": len(games)}


def _play(game: Game, steps: int = EPISODE) -> float:
    """Returns the seconds per step of a random episode."""
    chance = random.Random(0)
    commands = game.commands
    chosen = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        command = chance.choice(commands)
        chosen += time.perf_counter() - begin
        _, commands, _ = game.step(command)
    return (time.perf_counter() - start - chosen) / steps
