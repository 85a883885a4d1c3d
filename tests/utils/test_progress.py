"""Progress without a terminal: plain lines, not more than one every five seconds; what compiles for long is said."""

import threading

import jax
import pytest

from hgpo_jax.utils import progress
from hgpo_jax.utils.progress import COMPILE, CompileWatch, Progress


def test_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    now = iter([100.0, 104.0, 105.5, 106.0, 106.1])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    with Progress("training", 9, "it", done=4, plain="iteration") as shown:
        for i in range(5):
            shown.update(1, {"success": f"0.{i}"}, seconds=2)
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        "iteration 5/9  success 0.0  left 8s", "iteration 7/9  success 0.2  left 4s", "iteration 9/9  success 0.4  left 0s",
    ]  # fmt: skip


def test_a_terminal_has_one_live_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress("warm start", 100, "step") as shown:
        shown.update(50, {"loss": "1.5"})
    said = capsys.readouterr()
    assert said.out == ""
    assert "warm start:" in said.err and "50/100" in said.err and "loss=1.5" in said.err


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as the watch sees them; its own thread does not look."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(CompileWatch, "_watch", lambda self: None)
    return seconds


def begin(name):
    jax.monitoring.record_scalar(COMPILE, 0.0, fun_name=f"jit({name})")


def end(name, seconds):
    jax.monitoring.record_event_duration_secs(COMPILE, seconds, fun_name=f"jit({name})")


def test_what_compiles_for_long_is_said_at_growing_intervals_and_at_its_end(clock, capsys):
    with CompileWatch() as watch:
        begin("train_step")
        for second in range(1, 45):
            clock[0] = second
            if second == 8:  # another thread compiles meanwhile
                thread = threading.Thread(target=begin, args=["_decode"])
                thread.start()
                thread.join()
            watch.show()
        end("train_step", 44.0)
        begin("quick")
        end("quick", 4.9)
        jax.monitoring.record_event_duration_secs("/another", 99.0)
    begin("train_step")
    assert [name for name, _ in watch._began.values()] == ["decoding"]  # nobody watches any more
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "compiling the update 5 s", "compiling the update 10 s", "compiling the update 20 s, decoding 12 s",
        "compiling the update 40 s, decoding 32 s", "compiled the update in 44 s",
    ]  # fmt: skip


def test_what_compiles_is_in_a_file_while_it_does(clock, tmp_path):
    with CompileWatch() as watch:
        watch.file = tmp_path / "compiling"
        begin("train_step")
        thread = threading.Thread(target=begin, args=["_decode"])
        thread.start()
        thread.join()
        assert watch.file.read_text() == "the update\ndecoding\n"
        end("train_step", 1.0)
        assert watch.file.read_text() == "decoding\n"
    assert not watch.file.exists()


def test_jax_tells_of_all_that_it_compiles(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SAY_AFTER", 0.0)
    with CompileWatch():
        jax.jit(lambda x: x + 1).lower(1.0).compile()

        def train_step(x):
            return x * 2

        jax.jit(train_step)(1.0)
    said = capsys.readouterr().out
    assert "compiled a program in 0 s" in said and "compiled the update in 0 s" in said
