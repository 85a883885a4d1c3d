"""Signals: at once where nothing is lost by it, after what must not be cut in two."""

import os
import signal
import subprocess
import sys

import pytest

from hgpo_jax.trainer.interruption import SIGNALS, Interrupted, Interruption

HANDLERS = [signal.getsignal(number) for number in SIGNALS]


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_is_raised_where_nothing_is_held(number, monkeypatch):
    monkeypatch.setattr(Interruption, "_is_ignored", lambda self, number: False)  # SIGHUP may be where tests run under nohup
    with pytest.raises(Interrupted, match=number.name) as caught, Interruption():
        send(number)
    assert caught.value.number == number
    assert not isinstance(caught.value, Exception)  # what catches an environment's fault does not catch it
    assert [signal.getsignal(number) for number in SIGNALS] == HANDLERS


def test_a_job_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption():
            send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_held_ends_first():
    steps = []
    with Interruption() as stop:
        with pytest.raises(Interrupted), stop.defer_signals():
            with stop.defer_signals():
                send(signal.SIGTERM)
            steps.append("after what was held inside of it")
        send(signal.SIGTERM)  # while it saves; a further one changes nothing
        with pytest.raises(Interrupted), stop.defer_signals():  # it stays asked for
            steps.append("held again")
    assert steps == ["after what was held inside of it", "held again"]


def test_an_error_in_what_is_held_is_not_hidden():
    with Interruption() as stop, pytest.raises(ValueError, match="mine"), stop.defer_signals():
        send(signal.SIGTERM)
        raise ValueError("mine")


def test_a_second_sigint_of_a_program_of_ones_own_does_not_wait():
    with Interruption(exits=False) as stop, pytest.raises(KeyboardInterrupt) as caught, stop.defer_signals():
        send(signal.SIGTERM)
        send(signal.SIGINT)
        raise AssertionError("waited")
    assert not isinstance(caught.value, Interrupted)


LEAVES = """
import os, signal, time
from hgpo_jax.trainer.interruption import Interruption
with Interruption() as stop, stop.defer_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""


@pytest.mark.slow
def test_a_second_sigint_leaves_at_once():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "exiting at once; what was not saved is lost\n"
