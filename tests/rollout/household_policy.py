"""A tiny policy for the household, cloned just long enough that some of its episodes succeed.

`python -m tests.rollout.household_policy` clones it again and writes data/household_policy.npz.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hgpo_jax.envs.household import Household, expert
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import ModelConfig, initialize, network, shapes
from hgpo_jax.policy.tokenizer import vocabulary_size
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.trainer.behavior_cloning import generate_play
from tests.helpers.tiny import mesh_of

ENV = Household(max_turns=10, things=2)
END, ACT = len(ENV.words) + 1, len(ENV.words) + 2  # as the word tokenizer numbers them
K = 2
MODEL = ModelConfig(
    vocab_size=vocabulary_size(ENV.words), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, rope_theta=100.0, initializer_range=0.1,
)  # fmt: skip
FILE = Path(__file__).parent / "data" / "household_policy.npz"


def cloned():
    """Its parameters."""
    leaves, tree = jax.tree.flatten(shapes(MODEL))
    with np.load(FILE) as file:
        values = [file[f"{index}"] for index in range(len(leaves))]
    assert [value.shape for value in values] == [leaf.shape for leaf in leaves], "clone it again"
    return jax.tree.unflatten(tree, [value.astype(np.float32) for value in values])


def clone():
    """Clones the household's scripted expert."""
    tasks = task_keys("warm_start", 0, jnp.arange(256))
    play, _ = generate_play(ENV, expert, jax.random.key(0), tasks, noise=0.2, history_length=K, end=END, act=ACT)
    happened = np.flatnonzero(play.response_lengths > 0)
    play = jax.tree.map(lambda a: a[happened], jax.device_get(play))
    optimizer = optax.adam(5e-3, b2=0.98)

    @jax.jit
    def learn(params, state, at):
        rows = jax.tree.map(lambda a: jnp.asarray(a)[at], play)

        def loss(params):
            logp, _ = token_logprobs(nnx.merge(network(MODEL), params), rows)
            return -jnp.where(jnp.arange(logp.shape[1]) < rows.response_lengths[:, None], logp, 0).sum() / len(logp)

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params = initialize(MODEL, 0, mesh_of("data=1"))
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for _ in range(1500):
        params, state = learn(params, state, rng.integers(len(happened), size=32))
    return jax.device_get(params)


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    leaves = jax.tree.leaves(clone())
    np.savez_compressed(FILE, **{f"{index}": leaf.astype(np.float16) for index, leaf in enumerate(leaves)})
