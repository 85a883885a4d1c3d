"""What runs for long is said while it runs, beside its duration of last time, and at its end; what is short is not."""

import json
import re
import threading

import jax
import pytest

from hgpo_jax.utils import heartbeat
from hgpo_jax.utils.heartbeat import COMPILE, COMPILING, DURATIONS, LOG, Heartbeat, phase
from hgpo_jax.utils.progress import quiet, say
from tests.helpers.clocks import set_clock


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as a heartbeat sees them; its own thread does not look."""
    seconds = [0.0]
    set_clock(monkeypatch, heartbeat, perf_counter=lambda: seconds[0])
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)
    return seconds


def passes(clock, beat, seconds):
    for _ in range(seconds):
        clock[0] += 1
        beat.report()


def begin(name):
    jax.monitoring.record_scalar(COMPILE, 0.0, fun_name=f"jit({name})")


def end(name):
    jax.monitoring.record_event_duration_secs(COMPILE, 0.0, fun_name=f"jit({name})")


def in_a_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_a_long_phase_is_said_at_intervals_and_at_its_end_and_a_short_one_is_not(clock, capsys):
    with Heartbeat("work") as beat:
        with phase("loading"):
            passes(clock, beat, 64)
        with phase("counting"):
            passes(clock, beat, 4)
        for _ in range(2):  # the second time is no news
            with phase("iterating", says_end=False):
                passes(clock, beat, 12)
    with phase("nothing"):  # nobody listens any more
        clock[0] += 100
    said = capsys.readouterr().out.splitlines()
    assert said == ["loading: 0:05", "loading: 0:30", "loading: 0:55", "loading took 1:04", "iterating: 0:06"]


@pytest.mark.parametrize("lines", [True, False])
def test_there_is_never_half_a_minute_of_silence_whatever_runs(lines, clock, capsys):
    """Also where no phase has a name, where phases follow one another, and after lines that others print."""
    with Heartbeat("work") as beat:
        silent, longest = 0, 0
        for second in range(300):
            with phase(f"part {second}") if second % 60 > 40 else phase("all"):
                if lines and second % 7 == 0:
                    say("a line")
                passes(clock, beat, 1)
            silent = 0 if capsys.readouterr().out else silent + 1
            longest = max(longest, silent)
    assert longest < 30


def test_a_command_says_within_seconds_what_it_is(clock, capsys):
    with Heartbeat("work") as beat:
        passes(clock, beat, 9)
    assert capsys.readouterr().out == "work: 0:05\n"


def test_the_innermost_phase_of_every_thread_is_shown_once(clock, capsys):
    with Heartbeat("work") as beat, phase("cloning", says_end=False), phase("playing", says_end=False):
        say("begins")
        passes(clock, beat, 1)
        begin("train_step")
        in_a_thread(begin, "_decode")
        in_a_thread(begin, "_decode")
        passes(clock, beat, 10)
    assert capsys.readouterr().out == "begins\ncompiling the update: 0:09, compiling decoding: 0:09\n"


def test_what_fails_is_not_said_to_have_ended(clock, capsys, tmp_path):
    with pytest.raises(ValueError, match="broken"), Heartbeat("work") as beat:
        beat.remember(str(tmp_path), "")
        beat.write_to(tmp_path)
        with phase("loading"):
            clock[0] += 60
            raise ValueError("broken")
    assert capsys.readouterr().out == ""
    assert (tmp_path / LOG).read_text().endswith("  error: broken\n")
    assert not (tmp_path / DURATIONS).exists()


def test_durations_of_last_time_are_shown_for_equal_work(clock, capsys, tmp_path):
    def run(work, seconds):
        with Heartbeat("work") as beat:
            beat.remember(str(tmp_path), work)
            with phase("loading"):
                passes(clock, beat, 5)
                clock[0] += seconds - 5
        return capsys.readouterr().out.splitlines()[0]

    assert run("small", 70) == "loading: 0:05"
    assert run("large", 3700) == "loading: 0:05"
    assert run("small", 5) == "loading: 0:05 (last time 1:10)"
    assert run("small", 9) == "loading: 0:05 (last time 0:05)"
    assert run("large", 9) == "loading: 0:05 (last time 1:01:40)"


def test_what_is_quick_out_of_a_cache_does_not_count_as_last_time(clock, capsys, tmp_path):
    with Heartbeat("work") as beat:
        beat.remember(str(tmp_path), "")
        for seconds in (60, 2):
            with phase("compiling"):
                clock[0] += seconds
        with phase("compiling"):
            passes(clock, beat, 10)
    assert "compiling: 0:08 (last time 1:00)" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 3}', "[" * 10**5, "NaN", None])
def test_a_damaged_file_of_durations_is_replaced(content, clock, tmp_path):
    file = tmp_path / "cache" / DURATIONS
    if content is not None:
        file.parent.mkdir()
        file.write_text(content)
    with Heartbeat("work") as beat:
        beat.remember(str(file.parent), "")
        with phase("loading"):
            clock[0] += 60
    assert list(json.loads(file.read_text()).values()) == [{"loading": 60.0}]


def test_the_file_of_durations_stays_small(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(heartbeat, "MAX_WORKS", 2)
    for work in "abca":
        with Heartbeat("work") as beat:
            beat.remember(str(tmp_path), work)
            with phase(work):
                clock[0] += 60
    assert list(json.loads((tmp_path / DURATIONS).read_text()).values()) == [{"c": 60.0}, {"a": 60.0}]


def test_the_log_holds_the_lines_with_their_times_and_is_continued(clock, capsys, tmp_path):
    def run():
        with Heartbeat("work") as beat:
            say("early")
            beat.write_to(tmp_path)
            with quiet(), phase("loading"):  # as in a program that trains through the API
                passes(clock, beat, 11)
            say("two\nlines")

    run()
    run()
    lines = (tmp_path / LOG).read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    assert [line[21:] for line in lines] == 2 * ["early", "loading: 0:10", "loading took 0:11", "two", "lines"]
    assert capsys.readouterr().out == 2 * "early\ntwo\nlines\n"


def test_a_terminal_has_a_live_line_and_only_ends_below_one_another(clock, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Heartbeat("work") as beat:
        beat.write_to(tmp_path)
        with phase("loading"):
            passes(clock, beat, 40)
    said = capsys.readouterr()
    assert said.out == "loading took 0:40\n"
    assert "loading: 0:17" in said.err and said.err.endswith("\r")
    assert [line[21:] for line in (tmp_path / LOG).read_text().splitlines()] == [
        "loading: 0:05", "loading: 0:30", "loading took 0:40",
    ]  # fmt: skip


def test_what_compiles_is_in_a_file_while_it_does(clock, tmp_path):
    with Heartbeat("work") as beat:
        beat.write_to(tmp_path)
        begin("train_step")
        in_a_thread(begin, "_decode")
        assert (tmp_path / COMPILING).read_text() == "the update\ndecoding\n"
        end("train_step")
        assert (tmp_path / COMPILING).read_text() == "decoding\n"
    assert not (tmp_path / COMPILING).exists()


def test_jax_tells_of_all_that_it_compiles(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat, "FIRST", 0.0)
    with Heartbeat("work"):
        jax.jit(lambda x: x + 1).lower(1.0).compile()

        def train_step(x):
            return x * 2

        jax.jit(train_step)(1.0)
    said = capsys.readouterr().out
    assert "compiling a program took 0:00" in said and "compiling the update took 0:00" in said


def test_the_thread_reports_by_itself_and_ends(monkeypatch, capsys):
    reported = threading.Event()
    monkeypatch.setattr(heartbeat, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(heartbeat, "FIRST", 0.0)
    monkeypatch.setattr(Heartbeat, "report", lambda self: reported.set())
    before = threading.active_count()
    with Heartbeat("work"):
        assert threading.active_count() == before + 1
        assert reported.wait(60)
    assert threading.active_count() == before
