"""Which tasks are trained on and which are held out: streams of random keys that never meet."""

from __future__ import annotations

import jax

STREAMS = {"train": 0, "held_out": 1, "warm_start": 2}
_ROOT = 20260222  # any constant: it names the family of streams


def task_keys(stream: str, seed: int, indices: jax.Array) -> jax.Array:
    """Random keys [N] of the tasks with these numbers (i32[N]) in a stream; equal arguments give equal tasks.

    Training and warm start differ by run (`seed`); held-out tasks are evaluated under seed 0 by every run.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(_ROOT), STREAMS[stream]), seed)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
