"""Methods that train in ways of their own: a short run solves more held-out tasks than its warm start did."""

import json
import os

import jax
import numpy as np
import pytest

from hgpo_jax import analysis, report
from hgpo_jax.config import LearnerConfig
from hgpo_jax.envs.household import HouseholdTeam
from hgpo_jax.learner import losses
from hgpo_jax.learner.methods import METHODS
from hgpo_jax.learner.objective import make_policy_loss
from hgpo_jax.trainer import curves
from tests.helpers import fork_server
from tests.helpers.glossary import unexplained
from tests.helpers.tiny import MODEL, parameters, sampled_decisions
from tests.helpers.training import rows_of

TASKS = 256
SHORT = [
    "rollout.prompt_groups=16",
    "cloning.stop_at=0.2",
    f"evaluation.episodes={TASKS}",
    "log.tensorboard=false",
    "evaluation.every=1000",  # at the start
    "learner.warmup_steps=5",
    "advantage.invalid_penalty=0.1",
]  # of a few iterations; thresholds were found with these


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(name, *overrides)` -> (the folder, the rows): a short run that solves more held-out tasks than its start."""
    base = tmp_path_factory.mktemp("methods")

    def train(name, *overrides):
        # Compiled with some of LLVM's optimization: a fifth less processor time for all of so short a run.
        environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=1"}
        folder = base / name
        command = ["-m", "hgpo_jax.train", f"run_dir={folder}", f"cache_dir={base / 'cache'}", *SHORT, *overrides]
        done = fork_server.run(command, base, environment, timeout=900)
        assert done.returncode == 0, done.stderr
        rows = rows_of(folder)
        start = rows[0].pop("validation/success")
        success = json.loads((folder / "evaluation.json").read_text())["success"]["sampled"]
        # Two and a half standard errors of the difference on this many tasks.
        assert success > start + 0.1
        assert max(row["logp_difference"] for row in rows) < 1e-4
        assert not [name for row in rows for name in unexplained(row)]
        return folder, rows

    return train


@pytest.mark.parametrize(("method", "low", "high"), [("gspo", 3e-4, 4e-4), ("gagpo", 0.2, 0.2)])
def test_methods_with_one_ratio_for_each_response(method, low, high):
    rng = np.random.default_rng(0)
    rows = sampled_decisions(rng.normal(size=4))
    logp = rows.old_logp
    rows = rows.replace(old_logp=logp + 0.4 * rng.normal(size=logp.shape).astype(np.float32))
    plain = LearnerConfig(kl_weight=0, entropy_weight=0)
    _, stats, _ = jax.jit(make_policy_loss(MODEL, plain, METHODS[method], 1.0))(parameters(0), None, rows)
    expected, _ = losses.gspo_loss(logp, rows.old_logp, rows.advantages, rows.response_mask(), clip_low=low, clip_high=high)
    np.testing.assert_allclose(losses.divide(stats["loss"]), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_team_learns_and_its_roles_are_shown(train):
    run, rows = train("team", "env.name=household_team", "method=dr_mas", "iterations=8", "log.dump_every=8")
    of_roles = {name for row in rows for name in row if name.startswith("by_role/")}
    assert {panel.metric for panel in curves.ROLES} == {name.rpartition("/")[0] + "/" for name in of_roles}
    assert len(of_roles) == 2 * len(curves.ROLES)
    for row in rows:
        by_role = lambda part, row=row: [row[f"by_role/{part}/{role}"] for role in HouseholdTeam.roles]  # noqa: E731
        turns, shares = by_role("turns"), by_role("logp_gradient_share")
        assert sum(turns) == pytest.approx(row["turns"]) and sum(shares) == pytest.approx(1)
    dump = analysis.load(run)
    first = int(dump.episodes.mask.sum(1).argmax())
    assert [dump.role(first, turn) for turn in range(6)] == ["searcher", *["carrier"] * 4, "searcher"]
    assert "\n    searcher > " in dump.transcript(first) and dump.estimators[0] == "dr_mas"
    content = report.gather([run], 1, 1)
    assert [panel["metric"] for panel in content["data"]["panels"]["roles"]] == [panel.metric for panel in curves.ROLES]
    shown = {turn["role"] for turn in content["data"]["runs"][0]["dumps"][0]["groups"][0]["episodes"][0]["turns"]}
    assert shown == set(HouseholdTeam.roles)
    assert 'data-charts="roles"' in report.render(content)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_planner_and_its_executor_learn_in_turns(train):
    _, rows = train("plan", "env.name=household_plan", "method=himac", "iterations=12")
    planner = [row["by_role/logp_gradient_share/planner"] for row in rows]
    assert planner == [1, 0] * 6  # of what the loss pulls on
    # Where the executor learns, eight executions share one blueprint; where the planner does, it may write several.
    spread = [row["by_role/advantage_std/planner"] for row in rows]
    assert max(spread[1::2]) < 0.1 < min(spread[0::2])


@pytest.mark.slow
@pytest.mark.optimized
def test_answers_with_parts_learn(train):
    # With the default rate it loses again what it has won (hgpo_jax/envs/household/README.md).
    _, rows = train("parts", "env.name=household_subgoals", "method=hiper", "iterations=16", "learner.lr=5e-4")
    assert all(0 < row["switch_rate"] < 1 for row in rows)  # it has learned neither to keep nor to drop every subgoal
