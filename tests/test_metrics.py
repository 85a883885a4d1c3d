"""What a run writes for people: rows that survive an interruption, and a picture of them."""

import json
import math

import pytest

from hgpo_jax.metrics import MetricsWriter, flatten, plot_curves, read_metrics


def write(folder, rows, **options):
    writer = MetricsWriter(folder, tensorboard=False, **options)
    for row in rows:
        writer.write(row)
    writer.close()


def row(iteration, **more):
    return {"iteration": iteration, "success": 0.25 * iteration, "seconds": {"rollout": 0.5, "update": 1.5}, **more}


def test_rows_come_back_as_they_were_written(tmp_path):
    write(tmp_path, [row(0), row(1)])
    assert read_metrics(tmp_path) == [row(0), row(1)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1]


@pytest.mark.parametrize("keep", [0, 2, 3, 9])
def test_a_resumed_run_keeps_the_iterations_before_its_checkpoint(tmp_path, keep):
    write(tmp_path, [row(i) for i in range(4)])
    write(tmp_path, [row(keep, again=1.0)], keep=keep)
    assert read_metrics(tmp_path) == [row(i) for i in range(min(keep, 4))] + [row(keep, again=1.0)]


def test_a_half_written_last_line_is_dropped(tmp_path):
    write(tmp_path, [row(0), row(1)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(2))[:-9])
    assert read_metrics(tmp_path) == [row(0), row(1)]
    write(tmp_path, [row(2)], keep=3)
    assert read_metrics(tmp_path) == [row(0), row(1), row(2)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_null(tmp_path, value):
    write(tmp_path, [row(0, kl=value, inner={"x": value, "y": 1.0})])

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    back = json.loads(line, parse_constant=refuse)
    assert back["kl"] is None
    assert back["inner"] == {"x": None, "y": 1.0}


def test_nested_numbers_have_dotted_names():
    assert flatten({"a": 1, "b": {"c": 2, "d": 3}}) == {"a": 1, "b.c": 2, "b.d": 3}


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []
    plot_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(row(0, kl=math.nan))
    writer.close()
    assert [p for p in (tmp_path / "tensorboard").iterdir() if p.stat().st_size > 0]


def test_curves_are_a_picture_even_of_one_row_and_of_gaps(tmp_path):
    write(tmp_path, [row(0, kl=math.nan, **{"peers/level0": 1.0, "peers/level1": 0.5})])
    plot_curves(tmp_path, "one row")
    one = (tmp_path / "curves.png").read_bytes()
    assert one.startswith(b"\x89PNG\r\n\x1a\n")
    write(tmp_path, [row(i, kl=0.1 if i % 2 else None, **{"peers/level0": 1.0}) for i in range(1, 6)], keep=1)
    plot_curves(tmp_path, "six rows")
    assert (tmp_path / "curves.png").read_bytes() != one
    assert not list(tmp_path.glob("*.partial*"))
