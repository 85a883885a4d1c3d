"""The fields that name code, ours or a user's, and the options that such code takes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from hgpo_jax.config.choices import ENVIRONMENTS, LOSSES, METHODS
from hgpo_jax.config.section import CONTROL
from hgpo_jax.envs import user_code
from hgpo_jax.envs.command_line import nearest

_SURROGATE = re.compile(r"[\ud800-\udfff]")  # not allowed in the text of an option

# Fields that take one of these names, a name from an installed package, or a place outside (`envs/user_code.py`).
OPEN: dict[str, tuple[Collection[str], str]] = {
    "env.name": (ENVIRONMENTS, user_code.ENVIRONMENTS),
    "learner.loss": (LOSSES, user_code.LOSSES),
    "method": (METHODS, user_code.ESTIMATORS),
    "reward.source": ((), user_code.REWARDS),
}


def choices(name: str) -> tuple[str, ...]:
    """Lists the names that an open field takes; it also takes whatever `envs/user_code.py` finds."""
    ours, group = OPEN[name]
    return *ours, *user_code.installed(group)


def is_choice(name: str, value: str) -> str:
    place, colon, attribute = value.rpartition(":")
    if value not in choices(name) and not (colon and place and attribute):
        also = [f"{user_code.GYMNASIUM}ID"] if name == "env.name" else []
        options = ", ".join((*choices(name), *also, "package.module:NAME or path/to/file.py:NAME"))
        raise ValueError(f"must be one of {options}; {nearest(value, list(choices(name)))}")
    return value


def _is_option(value) -> bool:
    """Whether YAML can store this value and restore it."""
    if isinstance(value, list | tuple):
        return all(map(_is_option, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return value.bit_length() < 64
    return isinstance(value, str) and not CONTROL.search(value) and not _SURROGATE.search(value)


def are_options(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the options if YAML can store them and restore them. Raises ValueError."""
    for name, option in value.items():
        if not name.isidentifier() or not _is_option(option):
            raise ValueError(f"{name!r:.50} must be text, a number, true, false or a list of these")
    return value
