"""True advantages in runs of a plan: HGPO's parts against plain loops, and a run."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from small_plan import write_plan

from hgpo_jax import analysis
from hgpo_jax.advantages import parameters
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import bias, gradients, results, truth
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.inspected import EXAMPLE

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
    found = {name: np.zeros(e.mask.shape) for name in truth.PARTS}
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
            after = float(e.rewards[b, t]) + GAMMA * following - baseline[b, t] + GAMMA * truth.LAMBDA * after
            found["HGPO, bootstrapped"][b, t] = after
    return found


def test_parts_are_those_of_plain_loops():
    dump = analysis.load(EXAMPLE, iteration=9)
    # HGPO's own options are the released ones, whatever the run's.
    other = {"alpha": 2.0, "weight_offset": 1.0, "base_group": True, "normalize": "mean_std"}
    own = dump.config.advantage.model_copy(update=other)
    e = jax.tree.map(lambda array: array[:32], dump.episodes)  # four tasks
    dump = dataclasses.replace(dump, episodes=e, config=dump.config.model_copy(update={"advantage": own}))
    values = np.random.default_rng(0).normal(size=e.mask.shape)
    assert dump.config.advantage.gamma == GAMMA and e.invalid[e.mask].any()
    own = dump.estimate("grpo", normalize="mean", invalid_penalty=0.0).advantages  # in the rewards' unit, as true ones are
    np.testing.assert_array_equal(bias.centred(dump, {"GRPO": {"name": "grpo"}})["GRPO"], own)
    found = truth.parts(dump, values)
    assert tuple(found) == truth.PARTS
    for name, wanted in loops(e, values, dump.config.advantage.invalid_penalty).items():
        assert np.abs(wanted[e.mask]).max() > 0.1
        np.testing.assert_allclose(found[name], wanted, atol=2e-4, err_msg=name)
    for one, other in itertools.combinations(found.values(), 2):
        assert np.abs(one - other).max() > 0.01


@pytest.mark.slow
def test_what_a_run_did_next_is_played_again(tmp_path, capsys):
    """After 0 and 1 iterations of two: the success is the run's own, and GRPO is worse than a perfect baseline."""
    settings = {
        "few": {"title": "Few", "config": "household", "columns": {"AUC": "train/auc"},
                "fields": ["iterations=2", "rollout.prompt_groups=4", "learner.minibatch_size=64", "log.checkpoint_every=1",
                           "env.max_turns=10", "cloning.stop_at=0.2", "evaluation.episodes=8"]},
    }  # fmt: skip
    table = {"title": "T", "settings": ["few"], "methods": ["hgpo"], "seeds": [0]}
    plan = write_plan(tmp_path, settings=settings, tables=[table], fields=["mesh=auto"], published=None)
    runs = tmp_path / "runs"
    tables.main(["run", str(plan), "--runs", str(runs), f"cache_dir={tmp_path}/cache"])
    with pytest.raises(ConfigError, match=r"--at 7: .*few/hgpo/s0 has no checkpoint of it"):
        tables.main(["truth", str(plan), "--runs", str(runs), "--at", "7", "few/hgpo/s0"])
    for done in range(2):
        tables.main(["truth", str(plan), "--runs", str(runs), "--at", str(done), "few/hgpo/s0"])
    recorded = results.read_all(planning.read(plan), runs)[Cell("few", "hgpo", 0)]
    for done, found in enumerate(truth.KIND.read(runs)):
        assert (found.iteration, found.success) == (done, pytest.approx(recorded.curve[done]))
        assert found.errors["return - true value"]["cosine"] > found.errors["GRPO"]["cosine"]
    said = capsys.readouterr().out
    assert said.count("few, at the start: hgpo/s0\n") == 2 and said.count("few, after 1 iteration: hgpo/s0\n") == 1

    tables.main(["gradients", str(plan), "--runs", str(runs), "--at", "1", "--batches", "12", "few/hgpo/s0"])
    (found,) = gradients.KIND.read(runs)
    assert (found.cell, found.iteration, found.batches) == ("few/hgpo/s0", 1, 12)
    own = found.cosines[gradients.RLOO_BY_TURN]
    assert own["expected"] == pytest.approx(1) and 0 < own["batch"] < 1
    assert "few, after 1 iteration: hgpo/s0; 12 batches\n" in capsys.readouterr().out


def test_what_an_estimator_is_does_not_depend_on_the_run():
    for name, options in bias.ESTIMATORS.items():
        assert {"history_length", "lam", "alpha"} & set(parameters(options["name"])[1]) <= options.keys(), name
