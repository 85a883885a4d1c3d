"""`python -m tests.helpers.role_gradients ITERATIONS CACHE`: the gradient of a role that acts where things go badly.

A run with GRPO in `relief.py`'s household, which succeeds more and more. Of the episodes of each iteration it prints, as JSON,
what the gradient of the second role alone would be under several estimators: its norm over the role's own steps, as if it had
a policy of its own, and its mean squared advantage.
"""

import json
import sys

import jax
import jax.numpy as jnp
import optax

from hgpo_jax.advantages import estimate
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.optimizer import lr_scale
from hgpo_jax.learner.policy_loss import make_policy_loss
from hgpo_jax.learner.update import make_update
from hgpo_jax.setup.job import build
from hgpo_jax.trainer.behavior_cloning import warm_start
from hgpo_jax.trainer.step import make_train_step, sample, training_batch

SETTINGS = (
    "env.name=tests/helpers/relief.py:Relief", "method=grpo", "advantage.normalize=mean_std", "rollout.prompt_groups=16",
    "rollout.group_size=16", "learner.lr=1e-3", "learner.warmup_steps=5", "advantage.invalid_penalty=0.1",
)  # fmt: skip
ESTIMATORS = {
    "grpo, per step": ("grpo", "per_step"), "grpo, per trajectory": ("grpo", "per_trajectory"),
    "dr_mas": ("dr_mas", "per_step"),
}  # fmt: skip


def main(iterations: int, cache: str) -> None:
    config = load(None, [*SETTINGS, f"cache_dir={cache}"])
    job = build(config)
    start = warm_start(job)
    reference, (learn, init) = job.reference_copy(start), make_train_step(job)
    state = init(start)
    alone = config.learner.model_copy(update={"kl_weight": 0.0, "entropy_weight": 0.0})
    loss, still = make_policy_loss(job.policy.model, alone, job.method, config.rollout.temperature), optax.sgd(0.0)
    sizes = {"minibatch_size": 10**9, "microbatch_size": config.learner.microbatch_size}
    update = jax.jit(make_update(loss, still, job.mesh, **sizes))
    for iteration in range(iterations):
        (e, _), _, _ = sample(job, job.rollout_params(state.params, reference), iteration)
        own = e.mask & (e.agents == 1)
        order, count = jnp.argsort(~own.reshape(-1)), own.sum()
        row = {"success": float(e.success.mean()), "steps": int(count)}
        params = state.params[SHARED]
        for shown, (name, statistics) in ESTIMATORS.items():
            batch = {field: getattr(e, field) for field in ("rewards", "mask", "states", "groups", "invalid")}
            batch |= {"agents": e.agents} if name == "dr_mas" else {}
            A = estimate(name, **batch, normalize="mean_std", statistics=statistics).advantages
            decisions = training_batch(e).replace(advantages=A.reshape(-1))
            _, _, stats = update(params, still.init(params), None, decisions, order, count, 1.0)
            row[shown] = {"norm": float(stats["grad_norm"]), "squared": float((A**2).sum(where=own) / count)}
        print(json.dumps(row), flush=True)
        scale = jnp.float32(lr_scale(config.learner, iteration, iterations))
        state, _ = learn(state, reference, e, job.key(iteration, 1), scale)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
