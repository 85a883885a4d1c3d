"""Gradients of estimators where states are told apart by what is done, too: in `place two of a kind` nothing shows it.

    python -m tests.helpers.progress_gradients RUN 20 40        # a run with env.tasks=two; after 20 iterations, 40 batches

`tables gradients` (there the two cosines are explained) with states as they are seen, and with the number of things that are
placed already as a part of every state.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.earlier_policies import restore
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.tables.advantage_errors import centred_advantages
from hgpo_jax.tables.gradients import FIRST, RLOO_BY_TURN, cosines, make_gradient, rloo_by_turn

SHOWN = ("HGPO K = 2", "EB-GAE", "EB-TD")


def placed(job, tasks, e: Episodes) -> np.ndarray:
    """i[B, T]: how many things of the kind asked for lie in the best of the goal's places, before each turn."""
    B, T = e.mask.shape
    states, env = job.runner.replay(tasks, e).env, job.runner.env
    wanted = states.kind == states.goal_kind[:, None]
    goals = jnp.asarray(env._place_kind)[states.room] == states.goal_place[:, None]
    there = wanted[:, :, None] & (states.where[:, :, None] == jnp.arange(env.places)) & goals[:, None]
    return np.asarray(there.sum(1).max(1)).reshape(B, T + 1)[:, :T]


def main(run: str, iteration: str, batches: str) -> None:
    job, reference, state = restore(Path(run), int(iteration))
    params, gradient = job.rollout_params(state.params, reference), make_gradient(job)
    found: dict[str, list[np.ndarray]] = {}
    for number in range(FIRST, FIRST + int(batches)):
        tasks, *inputs = job.episode_inputs(number)
        e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
        done = placed(job, tasks, e)
        advantages = {RLOO_BY_TURN: rloo_by_turn(e, job.config.advantage.gamma)}
        for known, states in (("seen", e.states), ("seen and done", e.states * (done.max() + 1) + done)):
            of_each = centred_advantages(Dump(e.replace(states=states.astype(np.int32)), job.config, job.tokenizer))
            advantages |= {f"{name}, {known}": of_each[name] for name in SHOWN}
        for name, values in advantages.items():
            found.setdefault(name, []).append(np.asarray(gradient(state.params, reference, e, jnp.asarray(values))))
    for name, x in zip(found, cosines(np.array(list(found.values())), 0), strict=True):
        one, expected = (f"{x[what]:.3f} ± {x[f'{what}_error']:.3f}" for what in ("batch", "expected"))
        print(f"{name:28s}one batch {one}    expectation {expected}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
