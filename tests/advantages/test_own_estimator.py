"""An estimator of one's own: with a loss in one file it is a method; if nothing can be learned from it, a line says why."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import hgpo_jax
from hgpo_jax import advantages
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.config import load
from hgpo_jax.learner.loss_table import check_loss_numbers, configured
from hgpo_jax.learner.methods import check_numbers, method_named
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.build import build
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer.alarms import Alarms
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY, rows_of
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

def by_length(batch, *, task, lengths):
    return made(lambda batch: (task[:, None] + 1) * batch.rewards / jnp.where(batch.mask, lengths, 1))(batch)

jitted = jax.jit(filled)
bound = functools.partial(filled)  # of no file
plain = made(lambda batch: batch.rewards)
huge = made(lambda batch: batch.rewards * 1e20)
padded = made(lambda batch: jnp.where(batch.mask, batch.rewards, jnp.nan))
rarely_nan = made(lambda batch: jnp.where(batch.rewards == 7, jnp.nan, 1.0))  # not before a reward of 7
rarely_huge = made(lambda batch: jnp.where(batch.rewards == 7, 1e16, 1.0))
"""
NUMPY = "NumPy cannot be compiled; use jax.numpy in its place"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    for module in ("learner.methods", "analysis.dumps"):
        monkeypatch.setattr(f"hgpo_jax.{module}.ESTIMATORS", advantages.ESTIMATORS)
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


def test_parameters_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def anything(batch, **options):\n    pass\n")
    mine = f"{tmp_path / 'mine.py'}:anything"
    for name, said in (("math:hypot", "is not an estimator; write"), (mine, "takes **options; name")):
        with refused(f"method={name}: {said}", ConfigError):
            method_named(name)


def test_numbers_that_can_be_learned_from_pass(mine):
    check_numbers(method_named(mine("plain")).estimator)
    check_numbers(method_named(mine("padded")).estimator)  # of steps that did not happen nothing is asked
    mask = np.array([[True, False]])
    estimated = advantages.estimate(
        mine("padded"), rewards=mask * 2.0, mask=mask, states=mask * 0, groups=np.zeros(1, int), invalid=~mask
    )
    np.testing.assert_array_equal(estimated.advantages, [[2, 0]])
    check_numbers(method_named(mine("by_length")).estimator)  # a response is never without a token
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


def test_an_estimator_reads_the_type_of_a_task_and_the_tokens_of_each_response(mine):
    e = Episodes.zeros(2, 2, 4, 4)
    e.mask[:, 0] = e.mask[1, 1] = True
    e.rewards[:], e.task[:], e.response_lengths[:] = [[6, 0], [6, 6]], [0, 2], [[3, 0], [2, 4]]
    dump = Dump(e, load(None, [f"method={mine('by_length')}"]), None)
    assert Dump(e, load(None, [f"method={mine('plain')}"]), None).estimators[0] == mine("plain")  # read here for the first time
    np.testing.assert_allclose(dump.estimate().advantages, [[2, 0], [9, 4.5]])


FILE = Path(__file__).with_name("cispo.py")
CISPO = [f"method={FILE}:compared", f"learner.loss={FILE}:cispo", "learner.loss_options.weight_cap=1.5"]


@pytest.mark.slow
def test_a_method_in_one_file_is_accepted_and_its_loss_is_the_formula(mine):
    config = load(None, CISPO)
    check_together(config)
    method = method_named(config.method)
    check_numbers(config.method)
    check_loss_numbers(config.learner, method)
    old, log_ratio, A = np.float32([[-1, -2, -3]]), np.log(np.float32([[0.5, 1.2, 4.0]])), np.float32([2])
    loss = lambda logp: configured(config.learner, method)(logp, old, A, old < 0)[0]  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(old + log_ratio), -2 / 3 * np.array([[0.5, 1.2, 1.5]]), rtol=1e-5)


@pytest.mark.slow
def test_a_method_in_one_file_trains(tmp_path, mine):
    run = hgpo_jax.fit(load(None, [*TINY, *CISPO, "iterations=2", f"cache_dir={tmp_path / 'cache'}"]), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and rows[0]["nonfinite_steps"] == 0 < rows[0]["grad_norm"]
    assert not any(name.startswith("clip_fraction") for name in rows[0])
    sources = json.loads((tmp_path / "run" / "provenance.json").read_text())[0]
    assert sources["method"]["file"] == sources["learner.loss"]["file"] == str(FILE)
    assert run.config.learner.loss_options == {"weight_cap": 1.5}
