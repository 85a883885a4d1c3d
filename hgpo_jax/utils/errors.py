"""Errors that end a command: a user's mistake or a run that cannot continue; and messages in one line."""

from __future__ import annotations

# The environments are also used without hgpo_jax, so these functions are defined there.
from hgpo_jax.envs.command_line import one_line, printable

__all__ = ["ConfigError", "RunError", "excerpt", "one_line", "printable"]


class ConfigError(ValueError):
    """A user's mistake, in one line: the field, its value, and what to do. Commands end with exit code 2."""


class RunError(RuntimeError):
    """An error that ends a run despite a valid configuration, in one line. Commands end with exit code 1."""


def excerpt(value: object) -> str:
    """Returns how a value is written, shortened, for a message."""
    return f"{value!r:.200}"
