"""An estimator of one's own that cannot be compiled, or gives numbers that nothing can be learned from: a line says why."""

import numpy as np
import pytest

from hgpo_jax import advantages
from hgpo_jax.config import load
from hgpo_jax.learner.methods import check_numbers, method_named
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.job import build
from hgpo_jax.trainer.alarms import Alarms
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of
from tests.trainer.test_alarms import row

MINE = """import functools
import jax
import jax.numpy as jnp
import numpy as np
from hgpo_jax.advantages import Estimate

def made(of):
    return lambda batch: Estimate(advantages=(A := of(batch)), returns=A)

def whole(batch):
    advantages = np.zeros(batch.rewards.shape)
    return Estimate(advantages, advantages)

def filled(batch):
    advantages = np.zeros(batch.rewards.shape)
    advantages[0] = batch.rewards[0]
    return Estimate(advantages, advantages)

def branch(batch):
    return Estimate(batch.rewards, batch.rewards) if batch.rewards.sum() > 0 else None

def number(batch):
    return Estimate(batch.rewards * float(batch.mask.sum()), batch.rewards)

def chosen(batch):
    return Estimate(batch.rewards - batch.rewards[batch.mask].mean(), batch.rewards)

def spread(batch):
    same = batch.groups[:, None] == batch.groups
    scores = batch.rewards.sum(1)
    centred = scores - same @ scores / same.sum(1)
    std = jnp.sqrt(same @ centred**2 / same.sum(1))
    return made(lambda batch: jnp.broadcast_to((centred / std)[:, None], batch.mask.shape))(batch)

jitted = jax.jit(filled)
bound = functools.partial(filled)  # of no file
plain = made(lambda batch: batch.rewards)
huge = made(lambda batch: batch.rewards * 1e20)
rarely_nan = made(lambda batch: jnp.where(batch.rewards == 7, jnp.nan, 1.0))  # not before a reward of 7
rarely_huge = made(lambda batch: jnp.where(batch.rewards == 7, 1e16, 1.0))
"""
NUMPY = "NumPy cannot be compiled; use jax.numpy in its place"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    monkeypatch.setattr("hgpo_jax.learner.methods.ESTIMATORS", advantages.ESTIMATORS)
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize(("name", "said"), [
    ("filled", f"line 16, `advantages[0] = batch.rewards[0]`: {NUMPY}"),
    ("jitted", f"line 16, `advantages[0] = batch.rewards[0]`: {NUMPY}"),
    ("bound", NUMPY),
    ("branch", "line 20, `return Estimate(batch.rewards, batch.rewards) if batch.rewards.sum() > 0 else None`: values are not"),
    ("number", "line 23, `return Estimate(batch.rewards * float(batch.mask.sum()), batch.rewards)`: values are not"),
    ("chosen", "line 26, `return Estimate(batch.rewards - batch.rewards[batch.mask].mean(), batch.rewards)`: compiled arrays"),
    ("spread", "returns NaN for 5 of 9 steps (turn 0 of episode 0 first, counted from 0)"),
    ("huge", "returns numbers beyond 1e+15, whose squares leave float32, for 1 of 9 steps (turn 2 of episode 2 first, "),
])  # fmt: skip
def test_what_cannot_be_compiled_or_learned_from_is_refused_before_work_starts(mine, name, said):
    with refused(f"method={mine(name)}: {said}", ConfigError):
        build(load(None, [f"method={mine(name)}"]), mesh_of())


def test_numbers_that_can_be_learned_from_pass(mine):
    check_numbers(method_named(mine("plain")).estimator)
    check_numbers("hgpo")


@pytest.mark.parametrize(("name", "said"), [
    ("rarely_nan", "NaN for 2 of 5 steps (turn 1 of episode 0 first, counted from 0), and were skipped"),
    ("rarely_huge", "numbers beyond 1e+15, whose squares leave float32, for 2 of 5 steps"),
])  # fmt: skip
def test_the_first_time_that_an_estimator_gives_such_numbers_it_is_named(mine, name, said):
    e = Episodes.zeros(3, 2, 4, 2)
    e.mask[:, 0] = e.mask[:2, 1] = True
    e.rewards[0, 1] = e.rewards[2, 0] = 7
    e.rewards[2, 1] = 7  # of a turn that did not happen
    config = load(None, [f"method={mine(name)}"])
    alarms, skipped = Alarms(config), {"nonfinite_steps": 1.0}
    (warning,) = alarms.check(row(0, **skipped), e)
    assert f"1 updates were given advantages by method={mine(name)} that were {said}" in warning
    alarms.check(row(1, **skipped), e)
    with pytest.raises(RunError, match=r"such iterations in a row; mend method="):
        alarms.check(row(2, **skipped), e)
    fine = e.replace(rewards=np.zeros_like(e.rewards))  # then it is not the advantages
    assert "had a non-finite loss or gradient and were skipped" in Alarms(config).check(row(0, **skipped), fine)[0]
