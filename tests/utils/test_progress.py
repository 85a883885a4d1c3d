"""Progress without a terminal: plain lines, not more than one every five seconds."""

import errno
import io
import os

import pytest

from hgpo_jax.utils import progress
from hgpo_jax.utils.progress import Progress
from tests.helpers.clocks import set_clock


def test_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    now = iter([100.0, 104.0, 105.5, 106.0, 106.1])
    set_clock(monkeypatch, progress, perf_counter=lambda: next(now))
    with Progress("training", 9, "it", done=4, plain="iteration") as shown:
        for i in range(5):
            shown.update(1, {"success": f"0.{i}"}, seconds=2)
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        "iteration 5/9  success 0.0  left 8s", "iteration 7/9  success 0.2  left 4s", "iteration 9/9  success 0.4  left 0s",
    ]  # fmt: skip


def test_a_terminal_has_one_live_line(monkeypatch, capsys):
    heard = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "listeners", [heard.append])
    with Progress("warm start", 100, "step") as shown:
        shown.update(50, {"loss": "1.5"})
    said = capsys.readouterr()
    assert said.out == ""
    assert "warm start:" in said.err and "50/100" in said.err and "loss=1.5" in said.err
    assert heard == ["warm start 50/100  loss 1.5"]  # a log has no live line


def test_a_long_job_outlives_the_reader_of_its_lines(monkeypatch):
    """As in `train | head`, or once a terminal is closed."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        progress.say("read")
        os.close(reader)
        progress.say("lost")
        progress.warn("lost, too")


def test_a_full_disk_is_still_an_error(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="full"):
        progress.say("a line")
