"""Speed and memory of the engine: `measure(paths)` plays random episodes of the given games.

    python -m envs.alfworld.bench GAME_FILE [GAME_FILE ...]
"""

import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Iterable
from itertools import cycle, islice

from envs.alfworld.game import Game, load_game

EPISODE = 50  # steps, the limit the benchmark uses


def measure(paths: Iterable[str | os.PathLike], live: int = 50) -> list[dict]:
    """Times loading, resetting and stepping (admissible commands included), and weighs live environments.

    Args:
        paths: game files; each is loaded and played for `EPISODE` random steps.
        live: how many environments are alive while memory is measured.

    Returns:
        Rows `{"name": str, "value": float, "unit": str}`; times are means over the games and the slowest game.

    Raises:
        ValueError: no path, or a file that is no game.
    """
    paths = list(paths)
    if not paths:
        raise ValueError("no game files to measure; give the paths of some game.tw-pddl files")
    load_game(paths[0]).reset()  # compiles the domain, once per process
    times: dict[str, list[float]] = {"load": [], "reset": [], "step": []}
    for path in paths:
        start = time.perf_counter()
        game = load_game(path)
        times["load"].append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        game.reset()
        times["reset"].append((time.perf_counter() - start) * 1e3)
        times["step"].append(_play(game) * 1e6)
    rows = []
    for name, values in times.items():
        unit = "us" if name == "step" else "ms"
        rows.append({"name": f"alfworld {name}", "value": sum(values) / len(values), "unit": unit})
        rows.append({"name": f"alfworld {name}, slowest game", "value": max(values), "unit": unit})
    separate = _bytes_each(lambda: [load_game(path) for path in islice(cycle(paths), live)], live)
    shared = _bytes_each(lambda: [game.copy() for _ in range(live)], live)
    rows.append({"name": "alfworld memory per live environment, loaded separately", "value": separate, "unit": "bytes"})
    rows.append({"name": "alfworld memory per live environment, of one loaded game", "value": shared, "unit": "bytes"})
    return rows


def _play(game: Game, steps: int = EPISODE) -> float:
    """Seconds per step of a random episode."""
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


def _bytes_each(make, number: int) -> float:
    """Python memory that `number` played environments keep, per environment."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        games = make()
        for game in games:
            game.reset()
            _play(game)
        return (tracemalloc.get_traced_memory()[0] - before) / number
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    for line in measure(sys.argv[1:]):
        print(json.dumps(line))
