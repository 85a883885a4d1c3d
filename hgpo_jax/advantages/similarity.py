"""State ids of observations, equal ones or such as are alike: a host-side step before `estimate`.

GiGPO's similarity grouping: texts are taken in order, and each joins the first cluster of its prompt group whose
representative is similar enough, or starts a new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np


def canonical_key(observation: Any) -> Hashable:
    """Returns a key, equal exactly for equal observations: texts, numbers, None, bytes, arrays; dicts, lists, tuples of these.

    Dicts are equal in any order of their keys; arrays, NumPy's numbers among them, by dtype, shape and bytes; True, 1 and 1.0
    differ. Raises TypeError, in one line, for an observation without such a key.
    """
    if observation is None or type(observation) in (str, bytes, bool, int, float):
        return type(observation).__name__, repr(observation) if isinstance(observation, float) else observation
    if isinstance(observation, dict):
        items = [(canonical_key(name), canonical_key(value)) for name, value in observation.items()]
        return "dict", tuple(sorted(items, key=lambda item: repr(item[0])))
    if isinstance(observation, list | tuple):
        return "sequence", tuple(map(canonical_key, observation))
    if hasattr(observation, "__array__"):
        array = np.asarray(observation)
        if array.dtype != object:
            return "array", array.dtype.str, array.shape, array.tobytes()
    raise TypeError(f"{type(observation).__name__} is no key of a state; give texts, numbers, arrays, dicts or lists of them")


def similar_states(
    observations: Sequence[Sequence[Any]], mask: np.ndarray, groups: np.ndarray, threshold: float = 0.95
) -> np.ndarray:
    """State ids i32[B, T] of observations merged by similarity, 0 where no step happened.

    observations: per trajectory the text of each step; texts beyond its last step are ignored. With a threshold of 1 they may
        be anything that has a `canonical_key`.
    mask: bool[B, T], groups: i32[B], as in `estimate`.
    threshold: least `SequenceMatcher` ratio (2 * matching characters / all characters) to a cluster's representative,
        which is its first member. At 1 only equal ones share an id.
    Ids are unique across prompt groups. Raises ValueError where the threshold or the lengths do not fit, TypeError for what
    is no text, or has no key.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: give a ratio from 0 to 1")
    lengths = np.asarray(mask).sum(axis=1).tolist()
    if not len(observations) == len(groups) == len(lengths):
        counts = f"observations has {len(observations)} rows and groups {len(groups)}"
        raise ValueError(f"{counts}: give {len(lengths)} each, because mask has that many")
    clusters: dict[int, list[tuple[str, int]]] = {}
    cluster_of_key: dict[tuple[int, Hashable], int] = {}
    num_clusters = 0
    states = np.zeros(np.shape(mask), np.int32)
    for b, (group, texts, length) in enumerate(zip(np.asarray(groups).tolist(), observations, lengths, strict=True)):
        if len(texts) < length:
            raise ValueError(f"observations[{b}] has {len(texts)} texts: give {length}, one per step")
        for t, text in enumerate(texts[:length]):
            if threshold < 1 and not isinstance(text, str):
                raise TypeError(f"observations[{b}][{t}] is a {type(text).__name__}: give texts, or threshold=1")
            # An equal text meets the same representatives in the same order, so its id is already decided.
            key = group, canonical_key(text)
            if key not in cluster_of_key:
                alike = clusters.get(group, []) if threshold < 1 else []
                cluster = next((i for first, i in alike if _similar(first, text, threshold)), None)
                if cluster is None:
                    cluster, num_clusters = num_clusters, num_clusters + 1
                    clusters.setdefault(group, []).append((text, cluster))
                cluster_of_key[key] = cluster
            states[b, t] = cluster_of_key[key]
    return states


def _similar(first: str, second: str, threshold: float) -> bool:
    # Without autojunk=False, texts of 200 characters and more lose their common letters and never look alike.
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    # Two cheap upper bounds before the quadratic comparison.
    return matcher.real_quick_ratio() >= threshold and matcher.quick_ratio() >= threshold and matcher.ratio() >= threshold
