"""The pictures of a table, by what is drawn, and that the committed results hold all that they need."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_hex
from scipy import stats
from small_plan import PLANS

from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import compare, documents, plan_results
from hgpo_jax.tables import figures as curves
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.tables.run_results import Result
from hgpo_jax.utils import figures
from hgpo_jax.utils.errors import ConfigError

RECORD = PLANS / "results" / "household.json"


@pytest.fixture(scope="module")
def household():
    """(plan, cells with their results, rows) of the committed results."""
    plan = planning.read(PLANS / "household.yaml")
    found = plan_results.read_record(plan, RECORD).cells
    return plan, found, compare.table_rows(plan, found)


def shown_by(figure) -> dict:
    figure.canvas.draw()
    return {axis.get_title(): axis for axis in figure.axes}


def test_the_record_holds_what_the_pictures_need(household):
    _, found, made = household
    assert all(result and result.done and len(result.curve) == 40 for result in found.values())
    kept = {(p["table"], p["setting"], p["method"], p["column"]): p for p in json.loads(RECORD.read_text())["paired"]}
    again = {(r.table, r.setting, r.method, r.column): r.versus for r in made if r.versus}
    assert kept.keys() == again.keys()
    said = (PLANS / "results" / "household.md").read_text()
    assert "\n".join(documents.power(household[0], made)) in said
    for key, versus in again.items():
        assert versus.mean == pytest.approx(kept[key]["mean"], abs=2e-3)  # cells are kept in three digits
        assert list(versus.interval) == pytest.approx(kept[key]["interval"], abs=2e-2)


def test_a_panel_for_each_setting_names_few_methods(household):
    plan, found, _ = household
    panels = shown_by(curves.draw_curves(plan, found))
    assert list(panels) == [
        f"{table.title}\n{plan.settings[setting].title}" for table in plan.tables for setting in table.settings
    ]
    tables = {table.title: table for table in plan.tables}
    colors = {}
    for title, axis in panels.items():
        table = tables[title.partition("\n")[0]]
        many = len(table.methods) > 3
        names = {text.get_text(): text for text in axis.texts[:-1]}
        shown = table.highlight or table.methods[:3]
        assert set(names) == {f"{plan.methods[method].title} ({len(table.seeds['household'])} runs)" for method in shown}
        grey = [line for line in axis.lines if to_hex(line.get_color()) == figures.PALE]
        assert len(grey) == len(table.methods) - len(shown)
        assert len(axis.collections) == (0 if many else len(shown))  # bands
        for name, text in names.items():
            (line,) = (line for line in axis.lines if line.get_color() == text.get_color())
            assert text.xy == (37, line.get_ydata()[-1])  # at its line's end
            colors.setdefault(name.partition(" (")[0], set()).add(line.get_color())
        places = sorted(text.xyann[1] for text in names.values())
        low, high = axis.get_ylim()
        assert np.diff(places).min() > 0.06 * (high - low)  # names do not touch
        note = axis.texts[-1].get_text().replace("\n", " ")
        assert ("grey: GRPO, HGPO K = 0, HGPO K = 4, EB-GAE" in note) == (table.title == "All methods")
    # A method has the baseline's colour where it is that, and one of its own in all other panels.
    baselines = {plan.methods[table.baseline].title for table in plan.tables}
    assert {name for name, own in colors.items() if figures.DARK in own} == baselines
    others = [color for own in colors.values() for color in own - {figures.DARK}]
    assert len(others) == len(set(others)) == len([own for own in colors.values() if own != {figures.DARK}])


def test_a_line_is_the_mean_over_seeds(household):
    plan, found, _ = household
    axis = shown_by(curves.draw_curves(plan, found))["HGPO against GiGPO\nhousehold, place two of a kind"]
    own = np.array([found[Cell("household-two", "gigpo", seed)].curve for seed in range(10, 34)])
    (line,) = (line for line in axis.lines if line.get_color() == figures.DARK)
    assert line.get_xdata().tolist() == list(range(2, 38))
    np.testing.assert_allclose(line.get_ydata(), np.convolve(own.mean(0), np.ones(5) / 5, "valid"))
    mean, half = curves.band(own)
    np.testing.assert_allclose(mean + half, stats.t.interval(0.95, 23, own.mean(0), stats.sem(own))[1])


def test_the_forest_has_every_difference_sorted_by_the_first_number(household):
    plan, _, made = household
    figure = curves.draw_differences(plan, made)
    figure.canvas.draw()
    columns = list(plan.settings["household"].columns)
    for i, axis in enumerate(figure.axes):
        setting = ("household", "household-two")[i // 4]
        first = figure.axes[4 * (i // 4)]
        names = dict(zip(first.get_yticks(), (label.get_text() for label in first.get_yticklabels()), strict=True))
        last = max(names)
        place = {name: y for y, name in names.items() if y >= last - 5}  # below the heading of the last table
        assert names[0] == "HGPO against GiGPO: minus GiGPO (24 pairs)"
        drawn = {bar.lines[0].get_ydata()[0]: bar for bar in axis.containers}
        rows = [r for r in made if (r.table, r.setting, r.column) == ("All methods", setting, columns[i % 4]) and r.versus]
        assert len(rows) == 6 and len(drawn) == 2 + 1 + 6
        for row in rows:
            mark, _, (interval,) = drawn[place[plan.methods[row.method].title]].lines
            assert mark.get_xdata()[0] == pytest.approx(row.versus.mean)
            ((ends),) = interval.get_segments()
            low, high = row.versus.interval
            assert ends[:, 0].tolist() == pytest.approx([low, high])
            assert (mark.get_markerfacecolor() != "white") == (low > 0 or high < 0)
        if i % 4 == 0:
            means = [r.versus.mean for r in sorted(rows, key=lambda r: place[plan.methods[r.method].title])]
            assert means == sorted(means, reverse=True)  # the first place is on top
    # Two methods of "All methods" are compared with the same baseline over more pairs in the first table.
    once = [r for r in made if r.versus and (r.table, r.method) not in {("All methods", "hgpo-k2"), ("All methods", "eb-td")}]
    outside = sum(not r.versus.interval[0] <= 0 <= r.versus.interval[1] for r in once)
    assert f"leaves out 0: {outside} of 56 different ones, about 2.8 expected by chance" in figure.get_suptitle()
    assert len(once) == 56


def result(curve) -> Result:
    return Result(done=True, iterations=3, numbers={"train/auc": (50.0, None)}, curve=curve, seconds=1.0)


def test_nothing_to_compare_is_no_picture(small):
    found = {cell: None for cell in planning.cells(small)} | {Cell("near", "hgpo", 0): result([0.1, 0.2, 0.3])}
    assert curves.draw_curves(small, found) is None
    assert curves.draw_differences(small, compare.table_rows(small, found)) is None


def test_a_record_that_is_none_is_refused_in_one_line(tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, more, fragment in (
        (None, (), "no such file"),
        ('{"cells": [{"cell": "a"}]}', (), "is not a record of runs"),
        ('{"cells": []}', ("--to", "no/such"), "no such folder"),
    ):
        if text:
            (tmp_path / "small.json").write_text(text)
        with pytest.raises(ConfigError, match=fragment) as refused:
            tables.main(["draw", "small.json", "--plan", "small.yaml", *more])
        assert "\n" not in str(refused.value)
