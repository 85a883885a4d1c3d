"""Speed of the compiled games: `measure_compiled(paths)` plays random episodes (`python -m hgpo_jax.bench envs`).

It is not in `bench.py`, because the memory measured there must not include JAX.
"""

import os
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hgpo_jax.envs.alfworld.bench import EPISODE
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.tables import compile_games


def measure_compiled(paths: Sequence[str | os.PathLike], batch: int = 256, repeats: int = 5) -> list[dict]:
    """Times the compiled games, a batch of different ones at once: at every step the whole observation and all commands.

    Returns: rows as in `bench.measure`; seconds to compile the tables, and the median steps per second of `repeats` runs.

    Raises:
        ValueError: no path, or a file that is not a game or cannot be compiled.
    """
    start = time.perf_counter()
    env = CompiledAlfworld(compile_games(paths), EPISODE)
    rows = [{"name": f"compiled, tables of {len(env)} games", "value": time.perf_counter() - start, "unit": "s"}]

    @jax.jit
    def play(games, key):
        """Computes a checksum of all observations, so that XLA cannot omit any."""

        def turn(carry, key):
            states, total = carry
            filled, commands = jax.vmap(env.admissible)(states)
            chosen = jax.random.randint(key, (batch,), 0, filled.sum(1))
            states, observations, *_ = jax.vmap(env.step)(states, commands[jnp.arange(batch), chosen])
            return (states, total + observations.sum() + commands.sum()), None

        states, observations = jax.vmap(env.start)(games)
        return jax.lax.scan(turn, (states, observations.sum()), jax.random.split(key, EPISODE))[0][1]

    games = jnp.arange(batch) % len(env)
    jax.block_until_ready(play(games, jax.random.key(0)))
    times = []
    for seed in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(play(games, jax.random.key(seed)))
        times.append(time.perf_counter() - start)
    value = batch * EPISODE / statistics.median(times)
    return [*rows, {"name": f"compiled step, batch {batch}", "value": value, "unit": "steps/s"}]
