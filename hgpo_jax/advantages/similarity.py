"""State ids for observations that are alike but not equal: a host-side step before `estimate`.

GiGPO's similarity grouping: texts are taken in order, and each joins the first cluster of its prompt group whose
representative is similar enough, or founds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np


def similar_states(
    observations: Sequence[Sequence[str]], groups: Sequence[int], threshold: float = 0.95
) -> list[list[int]]:
    """Ids of observations merged by similarity, one row per trajectory, in the shape of `observations`.

    observations: per trajectory its observations, one per step. groups: the prompt group of each trajectory.
    threshold: least `SequenceMatcher` ratio (2 * matching characters / all characters) to a cluster's representative,
        which is its first member. At 1 only equal texts share an id.
    Ids are unique across prompt groups. Raises ValueError where the threshold or the lengths do not fit.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: give a ratio from 0 to 1")
    if len(observations) != len(groups):
        raise ValueError(f"groups has {len(groups)} entries: give {len(observations)}, one per trajectory")
    clusters: dict[int, list[tuple[str, int]]] = {}
    known: dict[tuple[int, str], int] = {}
    founded = 0
    states = []
    for group, texts in zip(np.asarray(groups).tolist(), observations, strict=True):
        row = []
        for text in texts:
            # An equal text meets the same representatives in the same order, so its id is already decided.
            if (group, text) not in known:
                found = next((i for first, i in clusters.get(group, []) if _similar(first, text, threshold)), None)
                if found is None:
                    found, founded = founded, founded + 1
                    clusters.setdefault(group, []).append((text, found))
                known[group, text] = found
            row.append(known[group, text])
        states.append(row)
    return states


def _similar(first: str, second: str, threshold: float) -> bool:
    # Without autojunk=False, texts of 200 characters and more lose their common letters and never look alike.
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    # Two cheap upper bounds before the quadratic comparison.
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )
