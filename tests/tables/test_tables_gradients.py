"""What is measured in runs of a plan: gradients of estimators against known expectations and loops, and true advantages."""

import dataclasses
import itertools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_plan import write_plan

from hgpo_jax import analysis
from hgpo_jax.advantages import parameters
from hgpo_jax.analysis import true_advantages
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.logprobs import make_logprobs
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.setup.build import build
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import advantage_errors, advantage_errors_in_runs, gradients, run_results
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.gradients import cosines, make_gradient, rloo_by_turn
from hgpo_jax.tables.plan import Cell
from hgpo_jax.trainer.step import training_batch
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.inspected import EXAMPLE
from tests.helpers.training import TINY, rows_of


def sampled(rng, batches, spread=2.0):
    """Gradients f64[3, M, 40] whose expectations have cosines 1, 1 and .6 to the first's; the second shares noise with both."""
    mean = np.zeros((3, 1, 40))
    mean[0, :, 0] = 3.0
    mean[1, :, 0] = 1.5
    mean[2, :, :2] = 0.6, 0.8
    noise = rng.normal(size=(2, batches, 40))
    return mean + spread * np.stack([noise[0], 0.5 * (noise[0] + noise[1]), 0.05 * noise[1]])


def test_noise_lowers_a_batchs_cosine_and_bias_the_expected_one():
    gradients = sampled(np.random.default_rng(0), 80, spread=1.0)
    half, biased, true = cosines(gradients[[1, 2, 0]], 2)
    assert true["expected"] == pytest.approx(1) and true["expected_error"] == pytest.approx(0, abs=1e-6)
    assert half["expected"] == pytest.approx(1, abs=3 * half["expected_error"])
    assert biased["expected"] == pytest.approx(0.6, abs=3 * biased["expected_error"])
    assert max(half["expected_error"], biased["expected_error"]) < 0.05
    # |E g| / sqrt(E |g|^2), times the expectation's cosine.
    for found, wanted in ((true, 3 / np.sqrt(9 + 40)), (half, 1.5 / np.sqrt(2.25 + 20)), (biased, 0.6 / np.sqrt(1.1))):
        assert found["batch"] == pytest.approx(wanted, abs=3 * found["batch_error"])
    parts = [gradients[:, :9, :20], np.zeros((3, 9, 65_536)), gradients[:, :9, 20:]]  # are added up one after another
    long = np.concatenate(parts, axis=2)
    for found, wanted in zip(cosines(long, 0), cosines(gradients[:, :9], 0), strict=True):
        assert found == pytest.approx(wanted)
    assert np.isnan(list(cosines(np.zeros((2, 9, 3)), 0)[1].values())).all()


def test_what_batches_share_does_not_count():
    """The mean over repetitions; products of a batch with itself, left in, would make it negative."""
    rng, mean, found = np.random.default_rng(2), np.zeros((2, 1, 40)), []
    mean[0, :, 0] = mean[1, :, 1] = 3.0
    for _ in range(300):
        noise = rng.normal(size=(2, 12, 40))
        noise[1] -= noise[0]
        found.append(cosines(mean + noise, 0)[1]["expected"])
    assert np.mean(found) == pytest.approx(0, abs=0.06)


def test_errors_are_those_of_repetitions():
    rng = np.random.default_rng(1)
    found = [cosines(sampled(rng, 48, spread=0.7), 0) for _ in range(200)]
    for estimator in (1, 2):
        for what in ("batch", "expected"):
            values = np.array([one[estimator][what] for one in found])
            errors = np.array([one[estimator][f"{what}_error"] for one in found])
            # The jackknife counts noise of pairs twice, and so errs on the safe side.
            assert 0.85 < np.sqrt(np.mean(errors**2)) / values.std(ddof=1) < 1.5, (estimator, what)


def test_rloo_by_turn_is_that_of_plain_loops():
    e = jax.tree.map(lambda array: array[:24], analysis.load(EXAMPLE, iteration=9).episodes)  # three tasks
    found, checked = np.asarray(rloo_by_turn(e, 0.9)), 0

    def after(b, t):
        return sum(0.9 ** (u - t) * float(e.rewards[b, u]) for u in range(t, int(e.mask[b].sum())))

    for b, t in zip(*np.nonzero(e.mask), strict=True):
        others = [c for c in np.flatnonzero(e.groups == e.groups[b]) if c != b]
        wanted = after(b, t) - np.mean([after(c, t) for c in others])
        assert found[b, t] == pytest.approx(wanted, abs=1e-5)
        checked += abs(wanted) > 0.1
    assert checked > 10 and not found[~e.mask].any()


def test_roles_with_weights_of_their_own_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(gradients, "restore", lambda *_: (types.SimpleNamespace(policies={"a": None, "b": None}), None, None))
    with pytest.raises(ConfigError, match="its roles have weights of their own"):
        gradients.measure("near/hgpo/s0", tmp_path, 0, batches=8)


@pytest.mark.slow
def test_the_gradient_is_that_of_mean_log_probabilities_weighted_by_advantages():
    mesh = make_mesh("data=1", jax.devices()[:1])
    with jax.set_mesh(mesh):
        # What the penalties of the loss would add is left out.
        job = build(load(None, [*TINY, "learner.kl_weight=0.5", "learner.entropy_weight=0.5"]), mesh)
        params = job.given_params
        tasks, *inputs = job.episode_inputs(0)
        e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
        e = e.replace(mask=e.mask & (np.arange(4) < 1 + np.arange(len(e.mask))[:, None] % 2))  # some end early
        advantages = np.where(e.mask, np.random.default_rng(0).normal(size=e.mask.shape), 0).astype(np.float32)
        found = make_gradient(job)(params, job.reference_copy(params), e, jnp.asarray(advantages))
        batch, logprobs = training_batch(e), make_logprobs(job.policy.model, job.config.rollout.temperature)

        def loss(params):
            tokens = batch.response_mask() & e.mask.reshape(-1)[:, None]
            weighted = logprobs(params, None, batch)[0] * advantages.reshape(-1)[:, None]
            return -jnp.where(tokens, weighted, 0).sum() / tokens.sum()

        wanted = jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params[SHARED]))])
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
    assert float(jnp.abs(wanted).max()) > 1e-4


GAMMA = 0.95


def loops(e, values, penalty):
    """`truth.parts` step by step, from returns and groups as the paper defines them."""
    returns, lengths = {}, e.mask.sum(1).tolist()
    for b, length in enumerate(lengths):
        rest = 0.0
        for t in reversed(range(length)):
            rest = float(e.rewards[b, t]) + GAMMA * rest
            returns[b, t] = {0.0: rest, penalty: rest - penalty * bool(e.invalid[b, t])}  # of this step alone, as released
    steps = sorted(returns)
    found = {name: np.zeros(e.mask.shape) for name in advantage_errors_in_runs.PARTS}
    baseline = np.zeros(e.mask.shape)
    for b, t in steps:
        levels = []
        for k in range(min(t, 2) + 1):
            history = tuple(e.states[b, t - k : t + 1])
            group = [
                (c, u) for c, u in steps
                if e.groups[c] == e.groups[b] and u >= k and tuple(e.states[c, u - k : u + 1]) == history
            ]  # fmt: skip
            apart = {p: returns[b, t][p] - np.mean([returns[step][p] for step in group]) for p in (0.0, penalty)}
            levels.append((k + 2.0, len(group), apart))

        def mean(p, weigh, levels=levels):
            weights = [weigh(w, n, apart[p]) for w, n, apart in levels]
            return sum(w * apart[p] for w, (_, _, apart) in zip(weights, levels, strict=True)) / max(sum(weights), 1e-9)

        dropped = lambda w, n, a: w if n > 1 and abs(a) > 1e-5 else 0.0  # noqa: E731
        found["HGPO, penalties in its returns"][b, t] = mean(penalty, dropped)
        found["HGPO, weights times peers"][b, t] = mean(0.0, lambda w, n, a: w * (n - 1))
        found["HGPO, no level dropped"][b, t] = mean(0.0, lambda w, n, a: w)
        found["return - true value"][b, t] = returns[b, t][0.0] - values[b, t]
        baseline[b, t] = returns[b, t][0.0] - mean(0.0, dropped)
    for b, length in enumerate(lengths):
        after = 0.0
        for t in reversed(range(length)):
            following = baseline[b, t + 1] if t + 1 < length else 0.0
            delta = float(e.rewards[b, t]) + GAMMA * following - baseline[b, t]
            after = delta + GAMMA * advantage_errors_in_runs.LAMBDA * after
            found["HGPO, bootstrapped"][b, t] = after
    return found


def test_parts_are_those_of_plain_loops():
    dump = analysis.load(EXAMPLE, iteration=9)
    # HGPO's own options are the released ones, whatever the run's.
    other = {"alpha": 2.0, "normalize": "mean_std"}
    own = dump.config.advantage.model_copy(update=other)
    e = jax.tree.map(lambda array: array[:32], dump.episodes)  # four tasks
    dump = dataclasses.replace(dump, episodes=e, config=dump.config.model_copy(update={"advantage": own}))
    values = np.random.default_rng(0).normal(size=e.mask.shape)
    assert dump.config.advantage.gamma == GAMMA and e.invalid[e.mask].any()
    own = dump.estimate("grpo", normalize="mean", invalid_penalty=0.0).advantages  # in the rewards' unit, as true ones are
    np.testing.assert_array_equal(advantage_errors.centred_advantages(dump, {"GRPO": {"name": "grpo"}})["GRPO"], own)
    found = advantage_errors_in_runs.parts(dump, values)
    assert tuple(found) == advantage_errors_in_runs.PARTS
    for name, wanted in loops(e, values, dump.config.advantage.invalid_penalty).items():
        assert np.abs(wanted[e.mask]).max() > 0.1
        np.testing.assert_allclose(found[name], wanted, atol=2e-4, err_msg=name)
    for one, other in itertools.combinations(found.values(), 2):
        assert np.abs(one - other).max() > 0.01


@pytest.mark.slow
def test_what_a_run_did_next_is_played_again(tmp_path, capsys, monkeypatch):
    """After 0 and 1 iterations of two: the success is the run's own, and GRPO is worse than a perfect baseline."""
    monkeypatch.setattr(advantage_errors_in_runs, "CONTINUATIONS", 8)
    monkeypatch.setattr(true_advantages, "ROWS", 1024)
    settings = {
        "few": {"title": "Few", "config": "household", "columns": {"AUC": "train/auc"},
                "fields": ["iterations=2", "rollout.prompt_groups=4", "learner.minibatch_size=64", "log.checkpoint_every=1",
                           "env.max_turns=10", "cloning.stop_at=0.2", "evaluation.episodes=8", "policy.hidden_size=32",
                           "policy.intermediate_size=64", "policy.num_hidden_layers=1", "cloning.episodes=1024"]},
    }  # fmt: skip
    table = {"title": "T", "settings": ["few"], "methods": ["hgpo"], "seeds": [0]}
    plan = write_plan(tmp_path, settings=settings, tables=[table], fields=["mesh=data=2"], published=None)
    runs = tmp_path / "runs"
    tables.main(["run", str(plan), "--runs", str(runs), f"cache_dir={tmp_path}/cache"])
    with pytest.raises(ConfigError, match=r"--at 7: .*few/hgpo/s0 has no checkpoint of it"):
        tables.main(["truth", str(plan), "--runs", str(runs), "--at", "7", "few/hgpo/s0"])
    for done in range(2):
        tables.main(["truth", str(plan), "--runs", str(runs), "--at", str(done), "few/hgpo/s0"])
    recorded = run_results.read_all(planning.read(plan), runs)[Cell("few", "hgpo", 0)]
    for done, found in enumerate(advantage_errors_in_runs.Measured.read(runs)):
        assert (found.iteration, found.success) == (done, pytest.approx(recorded.curve[done]))
        assert found.numbers["return - true value"]["cosine"] > found.numbers["GRPO"]["cosine"]
    said = capsys.readouterr().out
    assert said.count("few, at the start: hgpo/s0\n") == 2 and said.count("few, after 1 iteration: hgpo/s0\n") == 1

    tables.main(["gradients", str(plan), "--runs", str(runs), "--at", "1", "--batches", "8", "few/hgpo/s0"])
    (found,) = gradients.Directions.read(runs)
    assert (found.cell, found.iteration, found.batches) == ("few/hgpo/s0", 1, 8)
    own = found.numbers[gradients.RLOO_BY_TURN]
    assert own["expected"] == pytest.approx(1) and 0 < own["batch"] < 1
    assert "few, after 1 iteration: hgpo/s0; 8 batches\n" in capsys.readouterr().out

    # As a run that was killed after its first iteration leaves it.
    cell = runs / "few/hgpo/s0"
    for proof in ("evaluation.json", "transcripts.txt"):
        (cell / proof).unlink()
    shutil.rmtree(cell / "checkpoints" / "2")
    tables.main(["run", str(plan), "--runs", str(runs), f"cache_dir={tmp_path}/cache"])
    assert "resumed after iteration 1" in (runs / "few/hgpo/s0.log").read_text()
    assert [row["success"] for row in rows_of(cell)] == recorded.curve
    tables.main(["collect", str(runs)])
    assert json.loads((runs / "runs.json").read_text())["cells"][0]["done"]


def test_what_an_estimator_is_does_not_depend_on_the_run():
    for name, options in advantage_errors.ESTIMATORS.items():
        assert {"history_length", "lam", "alpha"} & set(parameters(options["name"])[1]) <= options.keys(), name
