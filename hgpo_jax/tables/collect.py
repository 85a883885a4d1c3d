"""Fills a plan's tables with the results of runs, beside published numbers: Markdown, CSV, LaTeX, JSON and pictures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from hgpo_jax.tables.compare import table_rows
from hgpo_jax.tables.documents import latex, markdown, table_csv
from hgpo_jax.tables.figures import draw
from hgpo_jax.tables.plan import Plan
from hgpo_jax.tables.plan_results import lost_results, merge, read_record, read_runs, record_text
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write


def collect(plan: Plan, name: str, runs: Path, to: Path, records: Sequence[Path] = ()) -> str:
    """Reads RUNS and writes NAME.md, .csv, .tex, .json and the pictures; returns the Markdown.

    records: a NAME.json each of runs that may be gone, such as those of another machine; it fills gaps in RUNS.

    Raises:
      ConfigError: damaged files; or overwriting a NAME.json would lose results.
    """
    results = functools.reduce(merge, (read_record(plan, file) for file in records), read_runs(plan, runs))
    rows = table_rows(plan, results.cells)
    text, record, old = markdown(plan, results, rows), record_text(plan, results, rows), to / f"{name}.json"
    if old.is_file() and (missing := lost_results(old.read_text(), record)):
        mend = f"add --record {old} to keep what the plan has, or move the file away"
        raise ConfigError(f"{old}: {len(missing)} results would be lost, as {missing[0]}; {mend}")
    to.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".md", text), (".csv", table_csv(rows)), (".tex", latex(plan, rows)), (".json", record)):
        with atomic_write(to / f"{name}{suffix}") as file:
            file.write(content)
    draw(plan, results, rows, name, to)
    return text
