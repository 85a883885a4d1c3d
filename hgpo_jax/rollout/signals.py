"""Signals: named numbers beside the reward, of each turn, for estimators such as `gdpo`.

A text environment or a reward function declares their names before a run begins, in an attribute:

    signals = ("format", "cost")

The environment's info then has `signals={"format": 1.0, "cost": 0.2}` after every step. The function returns a pair, the reward
and such a dict, whose values are like rewards: a number for the last turn, or a list with one for each turn.

A compiled environment declares them, too, and computes them from the state after a turn, in `signal_values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def declared(source: Any) -> tuple[str, ...]:
    """Returns the names of the signals of an environment or a reward function."""
    return tuple(getattr(source, "signals", ()))


def declaration_fault(source: Any) -> str:
    """Describes a declaration that does not name signals; "" if there is none. The names are those of metrics, too."""
    names = getattr(source, "signals", ())
    if are_names(names):
        return ""
    return f'signals is {names!r:.100}; give different words, as in ("format", "cost")'


def are_names(names: Any) -> bool:
    """Whether this is a tuple or a list of different words."""
    return (
        isinstance(names, tuple | list)
        and all(isinstance(name, str) and name.isidentifier() for name in names)
        and len(set(names)) == len(names)
    )


def signal_faults(names: Sequence[str], values: Any) -> Iterator[str]:
    """Yields what is wrong with the names of signals that were returned."""
    if not isinstance(values, dict):
        yield f"signals is a {type(values).__name__}; give a dict with {', '.join(names)}"
        return
    yield from (f"signals lacks {name}; give a number for each of {', '.join(names)}" for name in names if name not in values)
    yield from (
        f"signals has {name!r:.80}, which is not declared; name it in the attribute signals, or leave it out"
        for name in values
        if name not in names
    )


def in_order(names: Sequence[str], values: Any) -> list[Any]:
    """Returns the values of signals in the order of their names. Raises ValueError for names that do not fit."""
    for fault in signal_faults(names, values):
        raise ValueError(fault)
    return [values[name] for name in names]
