"""Clocks of one module."""

import time
from types import SimpleNamespace


def set_clock(monkeypatch, module, **functions):
    """Gives `module` other functions of `time`. The module `time` itself stays: a server's event loop, on a thread of the same
    process, would take a clock that runs ahead for its own and sleep until the true one is there."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | functions))
