"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table, line by line."""
    return ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading), *("| " + " | ".join(line) + " |" for line in lines)]
