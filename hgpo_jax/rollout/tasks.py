"""Which tasks are trained on and which are held out: streams of random keys that never meet."""

from __future__ import annotations

import jax
import numpy as np

STREAMS = {"train": 0, "held_out": 1, "warm_start": 2}
_ROOT = 20260222  # any constant: it names the family of streams


def task_keys(stream: str, seed: int, indices: jax.Array) -> jax.Array:
    """Random keys [N] of the tasks with these numbers (i32[N]) in a stream; equal arguments give equal tasks.

    Training and warm start differ by run (`seed`); held-out tasks are evaluated under seed 0 by every run.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(stream_key(stream, seed), indices)


def stream_key(stream: str, seed: int) -> jax.Array:
    """The key of a stream: its task n has `fold_in(stream_key(stream, seed), n)`."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(_ROOT), STREAMS[stream]), seed)


def task_numbers(stream: str, seed: int, indices, count: int) -> np.ndarray:
    """i64[N]: for environments with `count` tasks, the tasks with these numbers (N of them) in a stream.

    A stream goes through all tasks in a random order, then through all again in another.
    """
    passes, places = np.divmod(np.asarray(indices), count)
    orders = {n: np.random.default_rng([_ROOT, STREAMS[stream], seed, n]).permutation(count) for n in set(passes.tolist())}
    return np.array([orders[n][place] for n, place in zip(passes.tolist(), places.tolist(), strict=True)], np.int64)
