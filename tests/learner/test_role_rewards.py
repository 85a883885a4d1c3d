"""Roles that learn from rewards of their own (`roles.NAME.reward`): advantages worked by hand, and what is refused."""

import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.learner.methods import estimate_episodes
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.build import build
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

TEAM = ("env.name=math_team", "advantage.by_role=true", "advantage.normalize=mean", "advantage.invalid_penalty=0")
SOLVER, VERIFIER = range(2)


def two_episodes():
    """Of one problem, solver and verifier in turns: the first is won, with a wrong verdict, and the second is lost."""
    e = Episodes.zeros(2, 4, 1, 1, signals=3)  # format, calculation, verdict
    e.mask[:] = True
    e.agents[:] = [SOLVER, VERIFIER, SOLVER, VERIFIER]
    e.states[:] = np.arange(8).reshape(2, 4)
    e.rewards[0, 3] = 10
    e.signals[0, 1, 2] = -1
    return e


@pytest.mark.parametrize(
    ("fields", "solver", "verifier"),
    [
        ((), 5, 5),
        (("roles.verifier.reward=verdict",), 5, -0.5),
        (("roles.verifier.reward=reward,verdict",), 5, 4.5),
        (("roles.solver.reward=verdict", "roles.verifier.reward=format"), -0.5, 0),
    ],
)
def test_a_role_learns_from_its_own_reward(fields, solver, verifier):
    record = estimate_episodes(load(None, [*TEAM, "method=grpo", *fields]), two_episodes(), "grpo")
    np.testing.assert_allclose(record.advantages, np.outer([1, -1], [solver, verifier] * 2), atol=1e-6)


def test_a_turn_budget_before_the_signals_is_none_of_them():
    e = two_episodes()
    budgets = np.broadcast_to(np.float32([[4], [8]])[..., None], (2, 4, 1))
    e = e.replace(signals=np.concatenate([budgets, e.signals], -1))
    fields = (*TEAM, "method=grpo", "env.template=math_plain", "env.budgets=4,8", "roles.verifier.reward=verdict")
    record = estimate_episodes(load(None, fields), e, "grpo")
    np.testing.assert_allclose(record.advantages, np.outer([1, -1], [5, -0.5] * 2), atol=1e-6)
    with pytest.raises(ValueError, match="zip"):
        estimate_episodes(load(None, fields), two_episodes(), "grpo")


def test_levels_are_those_of_the_own_reward():
    fields = (*TEAM[:-2], "method=hgpo", "roles.verifier.reward=verdict")
    e, own = two_episodes(), two_episodes()
    e.states[:], own.states[:] = np.arange(4), np.arange(4)  # the same in both, so that every level compares them
    own.rewards[:] = own.signals[..., 2]
    record, team, alone = (
        estimate_episodes(load(None, given), episodes, "hgpo")
        for given, episodes in ((fields, e), (fields[:-1], e), (fields[:-1], own))
    )
    for role, source in ((SOLVER, team), (VERIFIER, alone)):
        acts = e.agents == role
        for name in ("advantages", "returns", "level_advantages", "level_weights"):
            np.testing.assert_array_equal(getattr(record, name)[acts], getattr(source, name)[acts])
    assert np.abs(record.level_advantages[e.agents == VERIFIER]).max() > 0


def test_what_is_refused():
    small = [f"policy.{name}=16" for name in ("hidden_size", "intermediate_size")]
    unknown = load("math_small", ["env.name=math_team", "roles.verifier.reward=verdict,cost", *small])
    why = "there is no signal cost; give reward, format, calculation, verdict"
    with refused(f"roles.verifier.reward=verdict,cost: {why}", ConfigError):
        build(unknown, mesh_of())
    for field, why in (
        ("method=ppo", "has one critic"), ("method=gdpo", "compares signals"), ("method=graphgpo", "compares success"),
        ("method=dapo", "chooses prompt groups by the team's reward"), ("reward.overlong_cache=4", "lowers the team's reward"),
    ):  # fmt: skip
        with refused(f"roles.verifier.reward=verdict: {field} {why}", ConfigError):
            check_together(load("math_small", ["env.name=math_team", field, "roles.verifier.reward=verdict"]))
    with refused("roles.verifier.reward=verdict,verdict: a signal is named twice", ConfigError):
        check_together(load("math_small", ["env.name=math_team", "roles.verifier.reward=verdict,verdict"]))
