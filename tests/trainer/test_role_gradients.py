"""What GRPO's normalisation over a whole prompt group does to the gradient of a role that acts where things go badly.

Dr. MAS (Feng et al., 2026, arXiv 2602.08847) says by what: with mean and std (m, s) of the group and (m_k, s_k) of the role,
its squared gradient norm grows by (s_k^2 + (m_k - m)^2) / s^2, and with statistics of its own it does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.advantages import estimate
from hgpo_jax.policy import network
from tests.helpers.tiny import MODEL, WORDS, parameters

GROUPS, MEMBERS, T, P = 4, 16, 8, 5
B, RELIEF = GROUPS * MEMBERS, 4  # from this turn on the second role acts


@pytest.fixture(scope="module")
def team():
    """Fourteen of sixteen episodes are won by the first role; of the two in which the second one takes over, one is."""
    member = np.arange(B) % MEMBERS
    turns = np.where(member < 14, RELIEF, T)
    mask = np.arange(T) < turns[:, None]
    last = np.arange(T) == turns[:, None] - 1
    return {
        "rewards": np.float32(10 * last * (member < 15)[:, None]), "mask": mask, "states": np.zeros((B, T), np.int32),
        "groups": (np.arange(B) // MEMBERS).astype(np.int32),
    }, ((np.arange(T) >= RELIEF) & mask).astype(np.int32)  # fmt: skip


@jax.jit
def mean_squared_norm(params, weights, prompts):
    """E |sum w grad log p|^2 over answers of one token that the policy itself samples; weights f32[N], prompts i32[N, P]."""

    def logps(params):
        model = nnx.merge(network(MODEL), params)
        return jax.nn.log_softmax(model.logits(model.hidden(prompts, jnp.full((len(prompts), 1), P - 1)))[:, 0])

    def squared_norm(key):
        answers = jax.random.categorical(key, logps(params))
        gradient = jax.grad(lambda p: (weights * jnp.take_along_axis(logps(p), answers[:, None], 1)[:, 0]).sum())(params)
        return sum((g**2).sum() for g in jax.tree.leaves(gradient))

    return jax.lax.map(squared_norm, jax.random.split(jax.random.key(1), 100)).mean()


def test_the_gradient_of_a_rare_role_is_inflated_by_grpo_and_not_by_dr_mas(team):
    batch, agents = team
    scores = np.repeat([10.0, 10.0, 0.0], [14, 1, 1])
    m, s, m_k, s_k = scores.mean(), scores.std(ddof=1), 5.0, 5.0
    grown = (s_k**2 + (m_k - m) ** 2) / s**2
    assert grown > 6
    grpo = estimate("grpo", **batch, normalize="mean_std", statistics="per_trajectory").advantages
    own = estimate("dr_mas", **batch, agents=agents, normalize="mean_std").advantages
    rows, turns = np.nonzero(agents)
    # The same prompts in the won and in the lost episode, so that sizes of gradients do not go with advantages.
    prompts = jnp.asarray(np.tile(np.random.default_rng(0).integers(0, WORDS, (T - RELIEF, P)), (2 * GROUPS, 1)))
    weights = grpo[rows, turns], own[rows, turns], np.ones(len(rows), np.float32)
    inflated, calm, plain = (float(mean_squared_norm(parameters(0), jnp.asarray(w), prompts)) for w in weights)
    assert inflated / plain == pytest.approx(grown, rel=0.1)
    assert calm / plain == pytest.approx(7 / 8, rel=0.1)  # the variance of the role's eight steps over that of a sample
