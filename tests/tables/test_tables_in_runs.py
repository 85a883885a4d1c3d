"""What is measured in runs of a plan, by either command: what is kept, shown and refused."""

import itertools
import json
import sys

import numpy as np
import pytest
from small_plan import SMALL, finish, write_plan

from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import advantage_errors_in_runs, figures, gradients, plan_results
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError


def true_advantages(cell, iteration, lift=0.0):
    names = enumerate(advantage_errors_in_runs.Measured.estimators)
    errors = {name: {"cosine": 0.1 + 0.05 * i + lift, "mse": 1.0 + i} for i, name in names}
    return advantage_errors_in_runs.Measured(cell=cell, iteration=iteration, success=0.5, invalid=0.125, errors=errors)


def directions(cell, iteration, lift=0.0):
    cosines = {
        name: {"batch": 0.1 + 0.05 * i + lift, "batch_error": 0.03, "expected": 0.2 + 0.05 * i, "expected_error": 0.04}
        for i, name in enumerate(gradients.Directions.estimators)
    }
    return gradients.Directions(cell=cell, iteration=iteration, batches=16, success=0.5, cosines=cosines)


MAKE = {advantage_errors_in_runs.Measured: true_advantages, gradients.Directions: directions}
every = pytest.mark.parametrize("kind", MAKE, ids=lambda kind: kind.name)


def ended(runs, small, method, seed):
    cell = Cell("near", method, seed)
    finish(runs, small, cell, [0.1, 0.2, 0.3])
    (runs / cell.name / "config.yaml").write_text("iterations: 3\nenv: {name: sokoban}\n")
    (runs / cell.name / "transcripts.txt").touch()
    for iteration in (1, 2):
        (runs / cell.name / "checkpoints" / str(iteration)).mkdir(parents=True)


@every
def test_a_run_is_measured_once_and_shown_beside_the_tables(tmp_path, small, monkeypatch, capsys, collect, kind):
    runs, asked, name = tmp_path / "runs", [], kind.name
    for method, seed in itertools.product(("gigpo", "hgpo"), range(2)):
        ended(runs, small, method, seed)

    def measure(cell, folder, iteration, **more):
        assert folder == runs / cell and more == ({"batches": 16} if kind is gradients.Directions else {})
        asked.append((cell, iteration))
        return MAKE[kind](cell, iteration, 0.1 * len(asked))

    monkeypatch.setattr(sys.modules[kind.__module__], "measure", measure)
    batches = ["--batches", "16"] if kind is gradients.Directions else []
    ask = [name, str(tmp_path / "small.yaml"), "--runs", str(runs), *batches, "--at"]
    tables.main([*ask, "2", "near/hgpo/s0"])
    tables.main([*ask, "2", "near/hgpo/s0", "near/gigpo/s1"])
    assert asked == [("near/hgpo/s0", 2), ("near/gigpo/s1", 2)]
    said = capsys.readouterr().out
    assert "near, after 2 iterations: hgpo/s0" in said and "near, after 2 iterations: hgpo/s0, gigpo/s1" in said
    if kind is gradients.Directions:
        with pytest.raises(ConfigError, match=r"--batches 9: near/hgpo/s0 was measured with 16; delete .*gradients\.json"):
            tables.main([*ask[:4], "--batches", "9", "--at", "2", "near/hgpo/s0"])
    if kind is advantage_errors_in_runs.Measured:
        assert "| GRPO | 0.200 | 1.000 |" in said and "| GRPO | 0.250 ± 0.050 | 1.000 ± 0.000 |" in said
    else:
        assert "| GRPO | 0.200 ± 0.030 | 0.200 ± 0.040 |" in said and "| GRPO | 0.250 ± 0.021 | 0.200 ± 0.028 |" in said
    tables.main([*ask, "1", "near/hgpo/s0"])
    assert asked[2:] == [("near/hgpo/s0", 1)]

    said, _ = collect()
    assert f"## {kind.title}\n" in said
    assert "near, after 2 iterations: hgpo/s0, gigpo/s1" in said and "near, after 1 iteration: hgpo/s0" in said
    out = tmp_path / "out"
    kept = plan_results.read_record(small, out / "small.json").measured[kind]
    assert kept == kind.read(runs) and len(kept) == 3
    picture = out / f"small-{name}.png"
    picture.unlink()
    tables.main(["draw", str(out / "small.json"), "--plan", str(tmp_path / "small.yaml")])
    assert str(picture) in capsys.readouterr().out.splitlines() and picture.is_file()
    # A plan that has lost a method since shows the others.
    less = {"tables": [SMALL["tables"][0] | {"methods": ["gigpo"]}], "methods": {"gigpo": SMALL["methods"]["gigpo"]}}
    fewer = planning.read(write_plan(tmp_path, published=None, **less))
    (out / "small.json").unlink()
    assert "after 2 iterations: gigpo/s1" in collect()[0]
    assert [one.cell for one in plan_results.read_record(fewer, out / "small.json").measured[kind]] == ["near/gigpo/s1"]


@every
def test_the_picture_has_every_run_and_the_mean(small, kind):
    make = MAKE[kind]
    found = [make("near/gigpo/s0", 2), make("near/hgpo/s0", 2, 0.1), make("near/hgpo/s1", 2, 0.2)]
    names = list(kind.estimators)
    figure = figures.draw_measured(small, kind, found)
    for axis, key in zip(figure.axes, kind.labels, strict=True):
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
        marks = [line.get_xdata() for line in axis.lines if len(line.get_xdata()) == len(names)]
        wanted = [[one.numbers[name][key] for name in names] for one in found]
        np.testing.assert_allclose(marks, [*wanted, np.mean(wanted, axis=0)])
        assert len({line.get_color() for line in axis.lines if len(line.get_xdata()) == len(names)}) == 3
        assert axis.get_xscale() == ("log" if key == "mse" else "linear")
    assert "3 runs after 2 iterations" in figure.axes[0].get_title(loc="left")
    assert len(figures.draw_measured(small, kind, [make("near/hgpo/s0", 3, -0.5), *found]).axes) == 4
    assert figures.draw_measured(small, kind, []) is None


@every
def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path, small, monkeypatch, kind):
    for method, seed in (("hgpo", 0), ("hgpo", 1), ("hgpo", 2), ("gigpo", 0), ("gigpo", 1), ("gigpo", 2)):
        ended(tmp_path / "runs", small, method, seed)
    (tmp_path / "runs/near/hgpo/s1/evaluation.json").unlink()
    (tmp_path / "runs/near/hgpo/s2/config.yaml").write_text("iterations: 3\nenv: {name: household_text}\n")
    (tmp_path / "runs/near/gigpo/s1/config.yaml").write_text("iterations: 3\nenv: {name: sokoban}\nreward: mine.py:score\n")
    (tmp_path / "runs/near/gigpo/s0/checkpoints/2").rmdir()
    (tmp_path / "runs/near/gigpo/s2/config.yaml").write_text("iterations: 3\nenv: {name: sokoban}\nrollout: {group_size: 1}\n")
    monkeypatch.setattr(sys.modules[kind.__module__], "measure", lambda *_, **__: pytest.fail("measured"))
    command = [kind.name, str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs"), "--at", "2", "near/hgpo/s0"]
    for name, fragment in (
        ("near/hgpo/s9", "no such cell"),
        ("near/hgpo/s3", "the run has not ended"),
        ("near/hgpo/s1", "the run has not ended"),
        ("near/hgpo/s2", "env.name=household_text: this needs an environment compiled"),
        ("near/gigpo/s1", "this needs rollout.group_size of 2 or more, and no reward.source"),
        ("near/gigpo/s2", "this needs rollout.group_size of 2 or more, and no reward.source"),
        ("near/gigpo/s0", "has no checkpoint of it; log.checkpoint_every and keep_checkpoints"),
    ):
        with pytest.raises(ConfigError, match=f"{name}:? {fragment}"):
            tables.main([*command, name])


def test_too_few_batches_are_refused(tmp_path, small):
    with pytest.raises(ConfigError, match="--batches 7: give 8 or more"):
        tables.main(["gradients", str(tmp_path / "small.yaml"), "--at", "2", "--batches", "7", "near/hgpo/s0"])


@every
def test_a_damaged_measurement_is_refused_in_one_line(tmp_path, small, collect, kind):
    incomplete = MAKE[kind]("a", 1).model_dump(by_alias=True)
    incomplete["errors" if kind is advantage_errors_in_runs.Measured else "cosines"].pop(kind.estimators[-1])
    (tmp_path / "runs").mkdir()
    for text in ("{", "[1]", '[{"cell": "a"}]', json.dumps([incomplete])):
        kind.file(tmp_path / "runs").write_text(text)
        with pytest.raises(ConfigError, match=rf"{kind.name}\.json: is damaged") as refused:
            collect()
        assert "\n" not in str(refused.value)


@every
def test_what_was_measured_elsewhere_is_kept(tmp_path, small, collect, kind):
    finish(tmp_path / "runs", small, Cell("near", "hgpo", 0), [0.1, 0.2, 0.3])
    ours, theirs = MAKE[kind]("near/hgpo/s0", 2, 0.5), MAKE[kind]("near/hgpo/s0", 0, 0.25)
    file, record = kind.file(tmp_path / "runs"), tmp_path / "out" / "small.json"
    file.write_text(json.dumps([theirs.model_dump(by_alias=True)]))
    collect()
    file.write_text(json.dumps([ours.model_dump(by_alias=True)]))
    with pytest.raises(ConfigError, match=f"1 results would be lost, as {kind.name} of near/hgpo/s0 at the start"):
        collect()
    collect("runs", f"--record={record}")
    assert plan_results.read_record(small, record).measured[kind] == [ours, theirs]
