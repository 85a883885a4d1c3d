"""Scores of methods on snapshots: computed, compared with a reference in pairs, and written as Markdown and JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np

from hgpo_jax.credit.contenders import Contender
from hgpo_jax.credit.scores import score
from hgpo_jax.credit.snapshot import Snapshot
from hgpo_jax.evaluation.statistics import over_seeds
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write
from hgpo_jax.utils.markdown_table import table
from hgpo_jax.utils.progress import say

NOTE = """Means over snapshots. Cosine: to the true advantages; gradient: of the policy gradients with these and with true \
ones. Their differences to {reference}'s are paired by snapshot (95 % interval by Student's t; bold where that leaves out 0, \
else not decided; the levels of a run count as if they were runs, so that of few runs the intervals are too narrow). Squared \
bias and variance: after the best scale, as shares of the true advantages' mean square. Sign: the share of right ones where \
the true advantage is clear. No penalties. A dash: not defined."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """Scores of contenders on snapshots.

    scores: contender -> snapshot -> name -> number. left_out: contender -> the reason.
    """

    snapshots: dict[str, Snapshot]
    reference: str
    scores: dict[str, dict[str, dict[str, float]]]
    left_out: dict[str, str]

    def settings(self) -> dict[str, list[str]]:
        """Returns the names of the snapshots of each setting, by level and seed."""
        about = {name: snapshot.about for name, snapshot in self.snapshots.items()}
        order = sorted(about, key=lambda name: (about[name].setting, about[name].level, about[name].seed))
        return {setting: [n for n in order if about[n].setting == setting] for setting in {about[n].setting: 0 for n in order}}

    def mean(self, contender: str, number: str, names: list[str]) -> float:
        return float(np.mean([self.scores[contender][name][number] for name in names]))

    def difference(self, contender: str, number: str, names: list[str]) -> dict:
        """Returns `over_seeds` of a contender's number minus the reference's, paired by snapshot."""
        ours, theirs = self.scores[contender], self.scores[self.reference]
        return over_seeds([ours[name][number] - theirs[name][number] for name in names])


def compute(snapshots: dict[str, Snapshot], contenders: list[Contender], reference: Contender) -> Standing:
    """Scores every contender on every snapshot. Raises ConfigError if the reference cannot be scored."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    left_out: dict[str, str] = {}
    ordered = list(dict.fromkeys([reference, *contenders]))
    for number, contender in enumerate(ordered, 1):
        reason = contender.missing(list(snapshots.values()))
        try:
            if not reason:
                scores[contender.name] = {name: score(contender.advantages(s), s) for name, s in snapshots.items()}
        except ConfigError as error:
            reason = str(error).removeprefix(f"{contender.name}: ")
        if reason:
            left_out[contender.name] = reason
        if contender == reference:
            refuse_reference(contender.name, reason, scores)
        say(f"{number} of {len(ordered)}: {contender.name}{f', left out: {reason}' if reason else ''}")
    return Standing(snapshots, reference.name, scores, left_out)


def refuse_reference(name: str, reason: str, scores: dict[str, dict[str, dict[str, float]]]) -> None:
    """Raises ConfigError if a method was left out for a reason, or has no cosine on a snapshot."""
    without = [snapshot for snapshot, numbers in scores.get(name, {}).items() if math.isnan(numbers["cosine"])]
    if without:
        reason = f"has no cosine on {without[0]}: its advantages are all 0 there, or the true ones are below their noise"
    if reason:
        raise ConfigError(f"--against {name}: {reason}")


def markdown(standing: Standing) -> str:
    """Formats a table for each setting, the nearest estimators first, and what was left out."""
    text = [NOTE.format(reference=standing.reference)]
    for setting, names in standing.settings().items():
        about = [standing.snapshots[name].about for name in names]
        levels = sorted({one.level for one in about})
        by_level = {level: [n for n in names if standing.snapshots[n].about.level == level] for level in levels}
        successes = [f"{np.mean([one.success for one in about if one.level == level]):.0%}" for level in levels]
        recurs = standing.mean(standing.reference, "recurs", names)
        minus = f"minus {standing.reference}"
        heading = ["estimator", "cosine", minus, "gradient", minus, "bias²", "variance", "sign"]
        lines = []
        cosines = {contender: standing.mean(contender, "cosine", names) for contender in standing.scores}
        for contender in sorted(cosines, key=lambda c: (math.isnan(cosines[c]), -cosines[c])):
            line = []
            for number in ("cosine", "gradient"):
                difference = describe(standing.difference(contender, number, names))
                line += [
                    two_places(standing.mean(contender, number, names)),
                    difference if contender != standing.reference else "",
                ]
            line += [two_places(standing.mean(contender, number, names)) for number in ("bias2", "variance", "sign")]
            at_levels = [two_places(standing.mean(contender, "cosine", by_level[level])) for level in levels]
            lines.append([contender, *line, *at_levels])
        count = f"{len(names)} snapshot{'s' * (len(names) > 1)}"
        seeds = ", ".join(map(str, sorted({one.seed for one in about})))
        text += ["", f"### {setting}", ""]
        text += [f"{count}, seeds {seeds}; {recurs:.0%} of the steps count for bias and variance.", ""]
        text += table([*heading, *(f"cosine at {success}" for success in successes)], lines)
    if standing.left_out:
        text += ["", "Left out:", "", *(f"* {name}: {reason}" for name, reason in standing.left_out.items())]
    return "\n".join(text) + "\n"


def two_places(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.2f}"


def describe(difference: dict) -> str:
    """Formats a mean difference and its interval; bold if that leaves out 0. A difference of nan is "-"."""
    if math.isnan(difference["mean"]):
        return "-"
    if difference["interval"] is None:
        return f"{difference['mean']:+.3f}"
    low, high = difference["interval"]
    mean = f"{difference['mean']:+.3f}"
    return f"{f'**{mean}**' if low > 0 or high < 0 else mean} ({low:+.3f} to {high:+.3f})"


def json_numbers(scores: dict[str, dict[str, dict[str, float]]]) -> dict:
    """Returns the scores with None for nan, which JSON does not have."""
    finite = lambda numbers: {name: None if math.isnan(x) else x for name, x in numbers.items()}  # noqa: E731
    return {c: {name: finite(numbers) for name, numbers in of_one.items()} for c, of_one in scores.items()}


def write(standing: Standing, to: Path) -> str:
    """Writes scores.md and scores.json into a folder; returns the Markdown."""
    today = datetime.date.today().isoformat()
    text = f"hgpo_jax {version('hgpo_jax')}, {today}. {markdown(standing)}"
    with atomic_write(to / "scores.md") as file:
        file.write(text)
    content = {
        "date": today,
        "hgpo_jax": version("hgpo_jax"),
        "reference": standing.reference,
        "snapshots": {name: snapshot.about.model_dump() for name, snapshot in standing.snapshots.items()},
        "scores": json_numbers(standing.scores),
        "left_out": standing.left_out,
    }
    with atomic_write(to / "scores.json") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return text
