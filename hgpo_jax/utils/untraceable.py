"""Explains why jax could not trace a user's function, in one line that names a line of the function.

jax's own explanations of untraceable code are pages long.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import jax

REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jax.errors.TracerArrayConversionError, "NumPy cannot be compiled; use jax.numpy in its place"),
    (jax.errors.NonConcreteBooleanIndexError, "compiled arrays have fixed shapes; use jnp.where in place of a boolean index"),
    (jax.errors.ConcretizationTypeError, "values are not known while it is compiled; use jnp.where for if, int or float"),
)


def untraceable(function: Callable, error: BaseException) -> str:
    """Tells what to change in a function that raised `error` while it was traced."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"line {lines[-1].lineno}, `{lines[-1].line}`: " if lines else ""
    for kind, reason in REASONS:
        if isinstance(error, kind):
            return place + reason
    return f"{place}fails with {type(error).__name__}: {error}"
