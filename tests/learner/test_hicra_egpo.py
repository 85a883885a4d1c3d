"""HICRA and EGPO: the advantages that they give their tokens, by worked numbers, and where planning tokens come from."""

import jax
import numpy as np
import pytest

from hgpo_jax.config import LearnerConfig, load
from hgpo_jax.learner import losses
from hgpo_jax.learner.hicra_egpo import egpo_loss, hicra_loss
from hgpo_jax.learner.methods import METHODS
from hgpo_jax.learner.objective import make_policy_loss
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused
from tests.helpers.tiny import MODEL, parameters, sampled_decisions
from tests.learner.test_losses import ADVANTAGES, LENGTHS, MASK, NEW, OLD, N, R

PLANNING = MASK & (np.arange(R) < 2)
ENTROPY = np.float32(np.random.default_rng(5).random((N, R)) * 2)


@pytest.mark.parametrize(("advantage", "expected"), [(1, 1.2), (-1, -0.8), (0.5, 0.6)])
def test_hicra_worked_numbers(advantage, expected):
    one, yes = np.zeros((1, 1), np.float32), np.ones((1, 1), bool)
    assert hicra_loss(one, one, np.float32([advantage]), yes, planning=yes)[0] == pytest.approx(-expected)
    assert hicra_loss(one, one, np.float32([advantage]), yes, planning=~yes)[0] == pytest.approx(-advantage)


WORKED = [(1, 1, 1.2), (-1, 1, -0.8), (1, 3, 1.2), (0, 2, 0), (1, 0.1, 1.04)]


@pytest.mark.parametrize(("advantage", "entropy", "expected"), WORKED)
def test_egpo_worked_numbers(advantage, entropy, expected):
    """The last one is below the bound."""
    zeros, yes = np.zeros((1, 3), np.float32), np.ones((1, 3), bool)
    entropies = np.float32([[entropy - 0.05, entropy + 0.05, 9]])
    plan = np.array([[True, True, False]])
    loss, _ = egpo_loss(zeros, zeros, np.float32([advantage]), yes, planning=plan, entropy=entropies)
    assert loss == pytest.approx(-expected)


@pytest.mark.slow
def test_a_batch_is_that_of_the_clipped_surrogate_with_other_advantages():
    shaped, uncertain = np.zeros((2, N, R), np.float32)
    for i in range(N):
        H = np.mean(ENTROPY[i, : min(2, LENGTHS[i])]) if LENGTHS[i] else 0
        for j in range(LENGTHS[i]):
            A = ADVANTAGES[i]
            shaped[i, j] = A + 0.2 * abs(A) * (j < 2)
            uncertain[i, j] = A + 0.4 * np.clip(H, -abs(A) / 2, abs(A) / 2)
    for found, advantages in (
        (hicra_loss(NEW, OLD, ADVANTAGES, MASK, planning=PLANNING)[0], shaped),
        (egpo_loss(NEW, OLD, ADVANTAGES, MASK, planning=PLANNING, entropy=ENTROPY)[0], uncertain),
    ):
        np.testing.assert_allclose(found, losses.policy_loss(NEW, OLD, advantages, MASK)[0], rtol=1e-5)
    slope = jax.grad(lambda entropy: egpo_loss(NEW, OLD, ADVANTAGES, MASK, planning=PLANNING, entropy=entropy)[0])(ENTROPY)
    assert not slope.any()


def test_an_environment_without_plans_is_refused():
    check_together(load(None, ["learner.loss=egpo", "env.name=household_subgoals"]))
    with refused("learner.rollout_correction=token: learner.loss=egpo adds a bonus that it does not weigh", ConfigError):
        check_together(load(None, ["learner.loss=egpo", "env.name=household_subgoals", "learner.rollout_correction=token"]))
    with refused("learner.loss=hicra: needs answers with switch, subgoal and action parts, which env.name=", ConfigError):
        check_together(load(None, ["learner.loss=hicra"]))


@pytest.mark.slow
def test_hicra_egpo_tokens_are_the_parts_before_the_action():
    settings = LearnerConfig(kl_weight=0, entropy_weight=0, loss="hicra")
    loss = jax.jit(make_policy_loss(MODEL, settings, METHODS["hgpo"], 1.0, plan_words=2))
    _, stats, _ = loss(parameters(0), None, sampled_decisions(np.ones(4)))
    np.testing.assert_allclose(losses.divide(stats["loss"]), -(9 + 0.2 * 7) / 9, rtol=1e-5)  # 7 of 9 tokens plan
