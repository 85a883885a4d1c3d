"""Input checks, before anything is traced: each error is one line that names the field, the value and the fix.

Shapes, dtypes and options are checked always; values only on concrete arrays, because a tracer has none.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.advantages.grouping import PADDING_KEY

# Array arguments: dtype and number of leading axes of [B, T, S]; there are S signals.
ARRAYS = {
    "rewards": (jnp.float32, 2),
    "mask": (jnp.bool_, 2),
    "states": (jnp.int32, 2),
    "groups": (jnp.int32, 1),
    "invalid": (jnp.bool_, 2),
    "by_role": (jnp.int32, 2),
    "values": (jnp.float32, 2),
    "final_values": (jnp.float32, 1),
    "next_states": (jnp.int32, 2),
    "agents": (jnp.int32, 2),
    "actions": (jnp.int32, 2),
    "success": (jnp.bool_, 1),
    "task": (jnp.int32, 1),
    "lengths": (jnp.int32, 2),
    "signals": (jnp.float32, 3),
    "switches": (jnp.bool_, 2),
    "high_values": (jnp.float32, 2),
    "low_values": (jnp.float32, 2),
    "term_values": (jnp.float32, 2),
}


# Squares of a batch of larger numbers leave float32.
LARGEST = 1e15


def _number(low: float, high: float) -> Callable[[object], bool]:
    return lambda x: isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool) and bool(low <= x <= high)


def _one_of(*names: str) -> Callable[[object], bool]:
    return lambda x: x in names


# Options share their names, and so their meaning, among all estimators.
OPTIONS: dict[str, tuple[Callable[[object], bool], str]] = {
    "history_length": (
        lambda x: isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= 0),
        "an integer of 0 or more",
    ),
    "length_limit": (
        lambda x: x is None or (isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= 1)),
        "an integer of 1 or more, or None",
    ),
    "gamma": (_number(0, 1), "a number from 0 to 1"),
    "lam": (_number(0, 1), "a number from 0 to 1"),
    # Their bounds keep (k + weight_offset)^alpha inside float32.
    "alpha": (_number(0, 10), "a number from 0 to 10"),
    "weight_offset": (_number(1, 1e3), "a number from 1 to 1000"),
    "step_weight": (_number(0, 1e6), "a number of 0 or more"),
    "invalid_penalty": (_number(0, 1e6), "a number of 0 or more"),
    "prior_count": (_number(0, 1e6), "a number of 0 or more"),
    "gate_count": (_number(0.1, 1e6), "a number of 0.1 or more"),
    "residual": (_number(0, 1), "a number from 0 to 1"),
    "coverage": (_number(0, 1e6), "a number of 0 or more"),
    "shrink": (_number(0, 1), "a number from 0 to 1"),
    "branch_alone": (lambda x: isinstance(x, bool), "True or False"),
    "base_group": (lambda x: isinstance(x, bool), "True or False"),
    "whiten": (lambda x: isinstance(x, bool), "True or False"),
    "normalize": (_one_of("mean", "mean_std"), "'mean' or 'mean_std'"),
    "signal_weights": (
        lambda x: isinstance(x, tuple) and all(map(_number(-1e6, 1e6), x)),
        "a tuple of numbers from -1e6 to 1e6",
    ),
    "keep": (_one_of("all", "informative", "valid"), "'all', 'informative' or 'valid'"),
    "statistics": (_one_of("per_step", "per_trajectory"), "'per_step' or 'per_trajectory'"),
}


def unknown_name(kind: str, name: str, names: Iterable[str]) -> str:
    """Returns the text of an error about an unknown name."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown {kind} '{name}': {guess}Known: {', '.join(names)}"


def check_option(name: str, value: object) -> None:
    """Refuse an option's value outside its range; options without an entry in `OPTIONS` are taken as they are."""
    accepts, domain = OPTIONS.get(name, (lambda x: True, ""))
    if not accepts(value):
        raise ValueError(f"{name}={value!r}: give {domain}")


def describe(name: str) -> str:
    """Returns the dtype and axes of an array argument, such as `int32[B, T]`."""
    dtype, axes = ARRAYS[name]
    return f"{jnp.dtype(dtype).name}[{', '.join('BTS'[:axes])}]"


def mask_shape(mask: jax.Array | np.ndarray) -> tuple[int, int]:
    """Returns the shape [B, T] that every other argument follows."""
    shape = np.shape(mask)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"mask has shape {shape}: give [trajectories, steps] with at least one of each")
    return shape


def check_array(name: str, value: object, shape: tuple[int, int]) -> jax.Array | np.ndarray:
    """Returns the argument as an array, after checking its kind of dtype and its shape [B, T], [B] or [B, T, S]."""
    dtype, axes = ARRAYS[name]
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    kinds = {jnp.float32: (np.floating, np.integer), jnp.int32: (np.integer,), jnp.bool_: (np.bool_,)}[dtype]
    if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} has dtype {value.dtype}: give {jnp.dtype(dtype).name}")
    if value.ndim != axes or value.shape[:2] != shape[:axes]:
        further = " and an axis of signals" if axes == 3 else ""
        raise ValueError(f"{name} has shape {value.shape}: give {shape[:axes]}{further}, because mask has shape {shape}")
    return value


def is_concrete(value: object) -> bool:
    """Whether this process can read the array's values."""
    return not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)


def check_mask(mask: np.ndarray) -> None:
    """Refuse a trajectory whose steps are not a prefix of its row."""
    holes = mask[:, 1:] & ~mask[:, :-1]
    if holes.any():
        row, step = (int(i) for i in np.argwhere(holes)[0])
        raise ValueError(f"mask[{row}] has a hole before step {step + 1}: steps must fill a row from its left")


def check_values(name: str, value: np.ndarray, mask: np.ndarray) -> None:
    """Refuse numbers that are not finite and ids that cannot be sorted, on steps that happened."""
    dtype, axes = ARRAYS[name]
    happened = mask if axes == 2 else mask[..., None] if axes == 3 else mask.any(axis=1)
    if dtype == jnp.float32:
        bad, fix = happened & ~np.isfinite(value), "give finite numbers where mask is True"
        if not bad.any():
            bad, fix = happened & (np.abs(value) > LARGEST), f"scale it to {LARGEST:.0e} or less: its square leaves float32"
    elif dtype == jnp.int32:
        bad, fix = happened & ((value < 0) | (value >= PADDING_KEY)), f"ids must be from 0 to {PADDING_KEY - 1}"
    else:
        return
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}{list(where)} is {value[where]}: {fix}")
