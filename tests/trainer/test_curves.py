"""curves.png, by what is drawn: values, marks, labels and ticks of the matplotlib figure."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from hgpo_jax.trainer import curves
from hgpo_jax.utils import figures
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused

EVALUATION = {
    "success": {"sampled": 0.75, "greedy": 0.5}, "interval": {"sampled": [0.7, 0.8], "greedy": [0.25, 0.625]},
    "turns": {"sampled": 9.0, "greedy": 8.0}, "invalid": {"sampled": 0.25, "greedy": 0.125},
}  # fmt: skip


def run_folder(folder: Path, rows: list[dict], evaluation=None, settings="name: small\nseed: 7\n") -> Path:
    (folder / "config.yaml").write_text(settings)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluation:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def rows_of(count: int, **values) -> list[dict]:
    """Rows whose metrics are functions of the iteration."""
    return [{"iteration": i} | {name: value(i) for name, value in values.items()} for i in range(count)]


def drawn(folder: Path, **more) -> dict:
    """Title -> axes of the figure of a run's folder, after it was laid out."""
    figure = curves.draw(curves.read_rows(folder), held_out=curves.read_held_out(folder), **more)
    figure.canvas.draw()
    return {axis.get_title(): axis for axis in figure.axes}


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def line(axis, label: str):
    """The line of a label, or of an error bar's marker."""
    found = [line for line in axis.lines if line.get_label() == label]
    found += [bar.lines[0] for bar in axis.containers if bar.get_label() == label]
    (only,) = found
    return only


def test_the_bold_line_is_the_mean_around_each_iteration(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.uniform(size=40).tolist()
    axis = drawn(run_folder(tmp_path, rows_of(40, success=values.__getitem__)))["Success"]
    bold, raw = axis.lines
    assert raw.get_ydata().tolist() == values
    assert raw.get_alpha() < 0.5 < bold.get_linewidth() - raw.get_linewidth()
    wanted = [np.mean(values[i - 2 : i + 3]) for i in range(2, 38)]
    np.testing.assert_allclose(bold.get_ydata()[2:-2], wanted)
    assert np.isnan([*bold.get_ydata()[:2], *bold.get_ydata()[-2:]]).all()
    assert "mean over 5 iterations" in axis.figure.get_suptitle()


def test_smoothing_leaves_gaps_alone_and_ends_where_the_window_does():
    np.testing.assert_array_equal(figures.smooth([1, 2, 6, 2, 1], 3), [math.nan, 3, 10 / 3, 3, math.nan])
    np.testing.assert_array_equal(figures.smooth([1, math.nan, 3, 5, 7], 3), [math.nan, math.nan, 4, 5, math.nan])
    assert figures.smooth([3.0, 1.0], 1).tolist() == [3, 1]
    assert [figures.smoothing_window(n) for n in (1, 8, 16, 40, 80, 10**4)] == [1, 1, 3, 5, 11, 51]


def test_held_out_results_stand_where_they_were_found(tmp_path):
    rows = rows_of(6, success=lambda i: i / 10, turns=lambda i: 9, invalid=lambda i: 0.4, kl=lambda i: 0.1)
    for i in (0, 3):
        rows[i] |= {"validation/success": 0.25 + i / 10, "validation/invalid": 0.125}
    axes = drawn(run_folder(tmp_path, rows, EVALUATION))
    for mode, low, value, high in (("sampled", 0.7, 0.75, 0.8), ("greedy", 0.25, 0.5, 0.625)):
        name = f"held-out, {mode}: {value:.1%} ({low:.1%} to {high:.1%})"
        assert name in labels(axes["Success"])
        mark = line(axes["Success"], name)
        assert mark.get_xdata()[0] == pytest.approx(6, abs=0.2)
        assert mark.get_ydata().tolist() == [value]
        (bar,) = (bar for bar in axes["Success"].containers if bar.get_label() == name)
        ((segment,),) = (part.get_segments() for part in bar.lines[2])
        assert segment[:, 1].tolist() == pytest.approx([low, high])
    assert line(axes["Episode length"], "held-out, sampled").get_ydata().tolist() == [9]
    assert line(axes["Valid actions"], "held-out, greedy").get_ydata().tolist() == [0.875]
    assert not axes["KL to the reference policy"].containers
    validations = line(axes["Success"], "held-out, while training")
    assert (validations.get_xdata().tolist(), validations.get_ydata().tolist()) == ([0, 3], [0.25, 0.55])
    assert line(axes["Valid actions"], "held-out, while training").get_ydata().tolist() == [0.875, 0.875]


def test_the_end_of_a_warm_start_is_marked(tmp_path):
    run_folder(tmp_path, rows_of(5, success=lambda i: 0.31 + i / 10))
    axis = drawn(tmp_path, warm_start=True)["Success"]
    mark = line(axis, "the warm start ends at 31%")
    assert (mark.get_xdata().tolist(), mark.get_ydata().tolist()) == ([0], [0.31])
    assert to_hex(mark.get_color()) != to_hex(axis.lines[0].get_color())
    assert labels(drawn(tmp_path)["Success"]) == ["in training"]


def test_panels_say_what_they_show(tmp_path):
    metrics = ("success", "turns", "invalid", "return", "kl", "entropy", "grad_norm")
    rows = rows_of(3, **dict.fromkeys(metrics, lambda i: 0.25), **{f"peers/level{k}": lambda i: 0.5 for k in range(3)})
    axes = drawn(run_folder(tmp_path, [row | {"seconds": {"rollout": 1.0, "update": 2.0}} for row in rows]))
    units = {title: axis.get_ylabel() for title, axis in axes.items()}
    assert units == {
        "Success": "share of episodes", "Episode length": "turns", "Valid actions": "share of actions",
        "Return": "discounted rewards", "KL to the reference policy": "nats per token", "Entropy": "nats per token",
        "Gradient norm": "norm, before clipping", "Steps with a peer, by level": "share of steps",
        "Time per iteration": "seconds",
    }  # fmt: skip
    assert set(axes["Valid actions"].lines[0].get_ydata()) == {0.75}
    assert labels(axes["Steps with a peer, by level"]) == ["level 0", "level 1", "level 2"]
    assert labels(axes["Time per iteration"]) == ["rollout", "update"]
    assert [title for title, axis in axes.items() if axis.get_xlabel()] == list(axes)[-3:]
    few = drawn(run_folder(tmp_path, [{name: row[name] for name in ("iteration", *metrics[:3], "kl")} for row in rows]))
    assert [title for title, axis in few.items() if axis.get_xlabel()] == list(few)[1:]  # Success has one below it


@pytest.mark.parametrize("count", [1, 2, 40, 2000])
def test_the_x_axis_has_whole_iterations(count, tmp_path):
    axes = drawn(run_folder(tmp_path, rows_of(count, success=lambda i: 0.5, kl=lambda i: 0.1)))
    for axis in axes.values():
        assert all(float(place).is_integer() for place in axis.get_xticks())
        low, high = axis.get_xlim()
        seen = [place for place in axis.get_xticks() if low <= place <= high]
        assert len(seen) >= 2
        assert axis.lines[0].get_marker() == ("." if count == 1 else "")


@pytest.mark.parametrize("value", [1e-9, 1.00001, 123456.7, -3.0])
def test_tick_labels_are_the_values_themselves(value, tmp_path):
    rows = rows_of(9, kl=lambda i: value * (1 + 1e-6 * i), cosine=lambda i: value, entropy=lambda i: value)
    for axis in drawn(run_folder(tmp_path, rows)).values():
        assert axis.yaxis.get_offset_text().get_text() == ""
        assert axis.xaxis.get_offset_text().get_text() == ""
        low, high = axis.get_ylim()
        assert low < value < high
        for label in axis.get_yticklabels():
            said = float(label.get_text().replace("−", "-"))
            assert said == pytest.approx(label.get_position()[1], rel=1e-6, abs=1e-6 * abs(value))


def test_gaps_and_shares(tmp_path):
    axes = drawn(run_folder(tmp_path, rows_of(6, success=lambda i: 1, kl=lambda i: 0.1 if i % 2 else None)))
    assert np.isnan(axes["KL to the reference policy"].lines[0].get_ydata()[::2]).all()
    assert axes["Success"].get_ylim() == (-0.02, 1.02)
    assert {label.get_text() for label in axes["Success"].get_yticklabels()} >= {"0%", "100%"}


def test_the_picture_is_of_the_run_in_the_folder(tmp_path, monkeypatch):
    curves.plot_curves(tmp_path)
    assert not list(tmp_path.iterdir())  # no rows are no picture
    settings = "name: small\nmethod: gigpo\nseed: 7\nwarm_start: none\n"
    run_folder(tmp_path, rows_of(3, success=lambda i: 0.5), EVALUATION, settings)
    asked = []
    draw = curves.draw
    monkeypatch.setattr(curves, "draw", lambda *args, **more: asked.append((*args, more)) or draw(*args, **more))
    curves.plot_curves(tmp_path)
    ((rows, title, held_out, more),) = asked
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert title == "small, gigpo, seed 7"
    assert held_out["sampled"] == {"success": 0.75, "interval": (0.7, 0.8), "turns": 9, "valid": 0.75}
    assert more == {"warm_start": False}
    assert sorted(path.suffix for path in tmp_path.glob("curves*")) == [".png"]


@pytest.mark.parametrize("text", ["{", '{"success": 1}'])
def test_a_damaged_evaluation_is_refused_in_one_line(text, tmp_path):
    run_folder(tmp_path, rows_of(1, success=lambda i: 1))
    (tmp_path / "evaluation.json").write_text(text)
    with refused("evaluation.json: not an evaluation", ConfigError):
        curves.plot_curves(tmp_path)
