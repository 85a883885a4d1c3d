"""A tiny policy for the household, cloned just long enough that some of its episodes succeed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs.household import Household
from hgpo_jax.learner import make_cloning_loss, make_update
from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.tokenizer import vocabulary_size
from hgpo_jax.warm_start import generate_play

ENV = Household(max_turns=10, things=2)
END, ACT = len(ENV.words) + 1, len(ENV.words) + 2  # as the word tokenizer numbers them
K = 2
MODEL = ModelConfig(
    vocab_size=vocabulary_size(ENV.words), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, rope_theta=100.0, initializer_range=0.1,
)  # fmt: skip


def mesh_of(spec):
    count = int(np.prod([int(part.split("=")[1]) for part in spec.split(",")]))
    return make_mesh(spec, jax.devices()[:count])


def cloned():
    """Its parameters, on the host."""
    mesh = mesh_of("data=1")
    play, _ = generate_play(ENV, jax.random.key(0), 0, episodes=256, noise=0.2, history_length=K, end=END, act=ACT)
    happened = play.response_lengths > 0
    optimizer = optax.adam(5e-3, b2=0.98)
    update = make_update(make_cloning_loss(network(MODEL)), optimizer, mesh, minibatch_size=32, microbatch_size=32)

    @jax.jit
    def learn(params, state, key):
        order = jnp.argsort(jax.random.uniform(key, happened.shape) + 2.0 * ~happened)
        return update(params, state, None, play, order, happened.sum(), 1.0)

    params = initialize(MODEL, 0, mesh)
    state = optimizer.init(params)
    for epoch in range(4):
        params, state, _ = learn(params, state, jax.random.key(epoch))
    return jax.device_get(params)
