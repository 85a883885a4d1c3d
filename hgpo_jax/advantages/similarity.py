"""State ids for observations that are alike but not equal: a host-side step before `estimate`.

GiGPO's similarity grouping: texts are taken in order, and each joins the first cluster of its prompt group whose
representative is similar enough, or starts a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np


def similar_states(
    observations: Sequence[Sequence[str]], mask: np.ndarray, groups: np.ndarray, threshold: float = 0.95
) -> np.ndarray:
    """State ids i32[B, T] of observations merged by similarity, 0 where no step happened.

    observations: per trajectory the text of each step; texts beyond its last step are ignored.
    mask: bool[B, T], groups: i32[B], as in `estimate`.
    threshold: least `SequenceMatcher` ratio (2 * matching characters / all characters) to a cluster's representative,
        which is its first member. At 1 only equal texts share an id.
    Ids are unique across prompt groups. Raises ValueError where the threshold or the lengths do not fit.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: give a ratio from 0 to 1")
    lengths = np.asarray(mask).sum(axis=1).tolist()
    if not len(observations) == len(groups) == len(lengths):
        given = f"observations has {len(observations)} rows and groups {len(groups)}"
        raise ValueError(f"{given}: give {len(lengths)} each, because mask has that many")
    clusters: dict[int, list[tuple[str, int]]] = {}
    known: dict[tuple[int, str], int] = {}
    founded = 0
    states = np.zeros(np.shape(mask), np.int32)
    for b, (group, texts, length) in enumerate(zip(np.asarray(groups).tolist(), observations, lengths, strict=True)):
        if len(texts) < length:
            raise ValueError(f"observations[{b}] has {len(texts)} texts: give {length}, one per step")
        for t, text in enumerate(texts[:length]):
            # An equal text meets the same representatives in the same order, so its id is already decided.
            if (group, text) not in known:
                found = next((i for first, i in clusters.get(group, []) if _similar(first, text, threshold)), None)
                if found is None:
                    found, founded = founded, founded + 1
                    clusters.setdefault(group, []).append((text, found))
                known[group, text] = found
            states[b, t] = known[group, text]
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
