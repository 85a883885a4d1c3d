"""True advantages in runs of a plan: HGPO's parts against plain loops, what is kept, shown and refused, and a run."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from small_plan import SMALL, finish, write_plan

from hgpo_jax import inspect
from hgpo_jax.errors import ConfigError
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import curves, results, truth
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.bias import ESTIMATORS
from hgpo_jax.tables.plan import Cell
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
    dump = inspect.load(EXAMPLE)
    # HGPO's own options are the released ones, whatever the run's.
    own = dump.config.advantage.model_copy(update={"alpha": 2.0, "weight_offset": 1.0, "base_group": True})
    dump = dataclasses.replace(dump, config=dump.config.model_copy(update={"advantage": own}))
    e = dump.episodes
    values = np.random.default_rng(0).normal(size=e.mask.shape)
    assert dump.config.advantage.gamma == GAMMA and e.invalid[e.mask].any()
    found = truth.parts(dump, values)
    assert tuple(found) == truth.PARTS
    for name, wanted in loops(e, values, dump.config.advantage.invalid_penalty).items():
        assert np.abs(wanted[e.mask]).max() > 0.1
        np.testing.assert_allclose(found[name], wanted, atol=2e-4, err_msg=name)
    for one, other in itertools.combinations(found.values(), 2):
        assert np.abs(one - other).max() > 0.01


def measured(cell, iteration, lift=0.0):
    names = (*ESTIMATORS, *truth.PARTS)
    errors = {name: {"cosine": 0.1 + 0.05 * i + lift, "mse": 1.0 + i} for i, name in enumerate(names)}
    return truth.Measured(cell, iteration, 0.5, 0.125, errors)


def ended(runs, small, method, seed):
    cell = Cell("near", method, seed)
    finish(runs, small, cell, [0.1, 0.2, 0.3])
    (runs / cell.name / "config.yaml").write_text("iterations: 3\nenv: {name: sokoban}\n")
    (runs / cell.name / "transcripts.txt").touch()
    for iteration in (1, 2):
        (runs / cell.name / "checkpoints" / str(iteration)).mkdir(parents=True)


def test_a_run_is_measured_once_and_shown_beside_the_tables(tmp_path, small, monkeypatch, capsys):
    runs, asked = tmp_path / "runs", []
    for method, seed in itertools.product(("gigpo", "hgpo"), range(2)):
        ended(runs, small, method, seed)

    def measure(cell, folder, iteration):
        assert folder == runs / cell
        asked.append((cell, iteration))
        return measured(cell, iteration, 0.1 * len(asked))

    monkeypatch.setattr(truth, "measure", measure)
    ask = ["truth", str(tmp_path / "small.yaml"), "--runs", str(runs), "--at"]
    tables.main([*ask, "2", "near/hgpo/s0"])
    tables.main([*ask, "2", "near/hgpo/s0", "near/gigpo/s1"])
    assert asked == [("near/hgpo/s0", 2), ("near/gigpo/s1", 2)]
    said = capsys.readouterr().out
    assert "near, after 2 iterations: hgpo/s0\n" in said and "| GRPO | 0.200 | 1.000 |" in said
    assert "near, after 2 iterations: hgpo/s0, gigpo/s1\n" in said and "| GRPO | 0.250 ± 0.050 | 1.000 ± 0.000 |" in said
    tables.main([*ask, "1", "near/hgpo/s0"])
    assert asked[2:] == [("near/hgpo/s0", 1)]

    capsys.readouterr()
    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert "near, after 2 iterations: hgpo/s0, gigpo/s1\n" in said and "near, after 1 iterations: hgpo/s0\n" in said
    kept = truth.read_record(small, tmp_path / "small.json")
    assert kept == truth.read_truth(runs) and len(kept) == 3
    # A plan that has lost a method since shows the others.
    (tmp_path / "less").mkdir()
    changes = {"tables": [SMALL["tables"][0] | {"methods": ["gigpo"]}], "methods": {"gigpo": SMALL["methods"]["gigpo"]}}
    less = write_plan(tmp_path / "less", published=None, **changes)
    tables.main(["collect", str(runs), "--plan", str(less), "--to", str(tmp_path / "less")])
    assert "after 2 iterations: gigpo/s1\n" in capsys.readouterr().out
    assert [one.cell for one in truth.read_record(small, tmp_path / "less" / "small.json")] == ["near/gigpo/s1"]
    (tmp_path / "small-truth.png").unlink()
    tables.main(["draw", str(tmp_path / "small.json"), "--plan", str(tmp_path / "small.yaml")])
    assert str(tmp_path / "small-truth.png") in capsys.readouterr().out.splitlines()
    assert (tmp_path / "small-truth.png").is_file()


def test_the_picture_has_every_run_and_the_mean(small):
    found = [measured("near/gigpo/s0", 2), measured("near/hgpo/s0", 2, 0.1), measured("near/hgpo/s1", 2, 0.2)]
    figure = curves.draw_truth(small, found)
    names = [*ESTIMATORS, *truth.PARTS]
    for axis, what in zip(figure.axes, ("cosine", "mse"), strict=True):
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
        marks = [line.get_xdata() for line in axis.lines if len(line.get_xdata()) == len(names)]
        wanted = [[one.errors[name][what] for name in names] for one in found]
        np.testing.assert_allclose(marks, [*wanted, np.mean(wanted, axis=0)])
        assert len({line.get_color() for line in axis.lines if len(line.get_xdata()) == len(names)}) == 3
        assert axis.get_xscale() == ("linear" if what == "cosine" else "log")
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith("Near: ") and "3 runs after 2 iterations" in title
    later = curves.draw_truth(small, [*found, measured("near/hgpo/s0", 3, -0.5)])
    assert len(later.axes) == 4 and later.axes[2].get_xlim()[0] < -0.3
    assert curves.draw_truth(small, []) is None


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        (["near/hgpo/s9"], "near/hgpo/s9: no such cell"),
        (["near/hgpo/s3"], "near/hgpo/s3: the run has not ended"),
        (["near/hgpo/s1"], "near/hgpo/s1: the run has not ended"),
        (["near/hgpo/s2"], "near/hgpo/s2: env.name=household_text: true advantages need an environment compiled"),
        (["near/gigpo/s0"], "--at 2: .*near/gigpo/s0 has no checkpoint of it; log.checkpoint_every, keep_checkpoints"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path, small, monkeypatch, names, fragment):
    for method, seed in (("hgpo", 0), ("hgpo", 1), ("hgpo", 2), ("gigpo", 0)):
        ended(tmp_path / "runs", small, method, seed)
    (tmp_path / "runs/near/hgpo/s1/evaluation.json").unlink()
    (tmp_path / "runs/near/hgpo/s2/config.yaml").write_text("iterations: 3\nenv: {name: household_text}\n")
    (tmp_path / "runs/near/gigpo/s0/checkpoints/2").rmdir()
    monkeypatch.setattr(truth, "measure", None)
    names = ["near/hgpo/s0", *names]
    with pytest.raises(ConfigError, match=fragment):
        tables.main(["truth", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs"), "--at", "2", *names])


@pytest.mark.parametrize("text", ["{", "[1]", '[{"cell": "a"}]', json.dumps([measured("a", 1)._asdict() | {"errors": {}}])])
def test_a_damaged_measurement_is_refused_in_one_line(tmp_path, small, text):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "truth.json").write_text(text)
    with pytest.raises(ConfigError, match=r"truth\.json: is damaged") as refused:
        tables.main(["collect", str(tmp_path / "runs"), "--plan", str(tmp_path / "small.yaml")])
    assert "\n" not in str(refused.value)


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
    for done, found in enumerate(truth.read_truth(runs)):
        assert (found.iteration, found.success) == (done, pytest.approx(recorded.curve[done]))
        assert found.errors["return - true value"]["cosine"] > found.errors["GRPO"]["cosine"]
    said = capsys.readouterr().out
    assert said.count("few, after 0 iterations: hgpo/s0\n") == 2 and said.count("few, after 1 iterations: hgpo/s0\n") == 1
