"""What a run writes for people: rows that survive an interruption, and a picture of them."""

import hashlib
import json
import math
import re

import pytest
from tensorboardX.proto.event_pb2 import Event

from hgpo_jax.trainer.metrics import MetricsWriter, WeightsAndBiases, _identity, flatten, read_metrics, unknown_by_role
from hgpo_jax.trainer.tensorboard import TensorBoard
from hgpo_jax.utils.errors import ConfigError


def write(folder, rows, **options):
    writer = MetricsWriter(folder, **options)
    for row in rows:
        writer.write(row)
    writer.close()


def row(iteration, **more):
    return {"iteration": iteration, "success": 0.25 * iteration, "seconds": {"rollout": 0.5, "update": 1.5}, **more}


@pytest.mark.parametrize("keep", [0, 3, 9])
def test_a_resumed_run_keeps_the_iterations_before_its_checkpoint(tmp_path, keep):
    assert read_metrics(tmp_path) == []
    write(tmp_path, [row(i) for i in range(4)])
    assert read_metrics(tmp_path) == [row(i) for i in range(4)]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(4))[:-9])  # half-written
    assert read_metrics(tmp_path) == [row(i) for i in range(4)]
    write(tmp_path, [row(keep, again=1.0)], keep=keep)
    assert read_metrics(tmp_path) == [row(i) for i in range(min(keep, 4))] + [row(keep, again=1.0)]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b'{"iteration": "1"}', b"", b"[" * 100_000])
def test_a_damaged_line_is_named_and_costs_no_row_after_it(tmp_path, line):
    write(tmp_path, [row(0), row(1)])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 3 is not a row of metrics"):
        write(tmp_path, [], keep=9)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole + line + b"\n" + whole
    (tmp_path / "metrics.jsonl").write_bytes(whole + line)  # as what a machine leaves that lost its power
    assert read_metrics(tmp_path) == [row(0), row(1)]


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


def test_tensorboard_gets_the_same_numbers(tmp_path):
    write(tmp_path, [row(5, kl=math.nan)], loggers={"TensorBoard": lambda: TensorBoard(tmp_path, 5)})
    (file,) = (tmp_path / "tensorboard").iterdir()
    _, start, event = events(file.read_bytes())
    assert start.session_log.status == start.session_log.START
    assert start.step == event.step == 5
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert values.keys() == {"success", "seconds/rollout", "seconds/update", "kl"} and values["seconds/update"] == 1.5


def events(data: bytes) -> list[Event]:
    """The records of an events file: length, checksum, event, checksum."""
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_tensorboard_on_a_full_disk_is_left_out(tmp_path, capsys):
    def full():
        board = TensorBoard(tmp_path, 0)
        board._events._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        return board

    write(tmp_path, [row(i, **{f"more{j}": 0.0 for j in range(30)}) for i in range(3)], loggers={"TensorBoard": full})
    assert len(read_metrics(tmp_path)) == 3
    assert capsys.readouterr().err.startswith("warning: TensorBoard fails and is left out from now on: [Errno 28]")


class Raises:
    """A logger that works for a while."""

    def __init__(self, rows: int, closes: bool = True):
        self.left, self.closes, self.seen = rows, closes, []

    def write(self, row):
        if not self.left:
            raise ConnectionError("no\nnetwork")
        self.left -= 1
        self.seen.append(row["iteration"])

    def close(self):
        if not self.closes:
            raise OSError("cannot close")


def test_a_logger_that_fails_is_left_out_and_stops_nothing(tmp_path, capsys):
    def cannot_begin():
        raise ImportError("not installed")

    good, bad, late = Raises(9), Raises(1), Raises(9, closes=False)
    loggers = {"first": cannot_begin, "bad": lambda: bad, "good": lambda: good, "late": lambda: late}
    write(tmp_path, [row(i) for i in range(4)], loggers=loggers)
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert (good.seen, bad.seen, late.seen) == ([0, 1, 2, 3], [0], [0, 1, 2, 3])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" fails")[0] for line in said] == ["warning: first", "warning: bad", "warning: late"]
    assert said[1].endswith("no network")


@pytest.mark.needs("wandb")
def test_weights_and_biases_offline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    make = lambda: WeightsAndBiases(tmp_path, "tests", {"seed": 1})  # noqa: E731
    write(tmp_path, [row(0), row(1, kl=math.nan)], loggers={"Weights & Biases": make})
    write(tmp_path, [row(1)], keep=1, loggers={"Weights & Biases": make})  # the run goes on
    assert "warning" not in capsys.readouterr().err
    assert sum(path.stat().st_size > 0 for path in tmp_path.glob("wandb/offline-run-*/*.wandb")) == 2


def test_a_run_of_weights_and_biases_is_its_folders_wherever_that_lies(tmp_path):
    """Another run in a folder of the same place is another one."""
    first = _identity(tmp_path / "run")
    assert re.fullmatch("[0-9a-f]{16}", first) and _identity(tmp_path / "run") == first
    (tmp_path / "run").rename(tmp_path / "moved")
    assert _identity(tmp_path / "moved") == first != _identity(tmp_path / "run")
    (tmp_path / "old" / "wandb").mkdir(parents=True)  # of a version that named it by its place
    assert _identity(tmp_path / "old") == hashlib.sha256(str(tmp_path / "old").encode()).hexdigest()[:16]
    assert not (tmp_path / "old" / "wandb" / "id.txt").exists()


def test_of_a_role_without_a_turn_only_that_is_known():
    row = {"success": 1.0, "by_role/turns/a": 3.0, "by_role/turns/b": 0.0, "by_role/success/a": 0.0, "by_role/success/b": 0.0}
    assert {name: str(value) for name, value in unknown_by_role(row).items()} == {"by_role/success/b": "nan"}
    assert unknown_by_role({"success": 0.0}) == {}
