"""Several plays of each held-out task: pass@k, the chance that one of k plays succeeds, and avg@n, the mean success of n.

python -m hgpo_jax.evaluate RUN --samples 16
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hgpo_jax.evaluation.held_out import play_held_out, sampled_decoding
from hgpo_jax.evaluation.passes import NONE_KEPT, Passes
from hgpo_jax.evaluation.statistics import korn_graubard
from hgpo_jax.setup.job import Job
from hgpo_jax.utils.errors import RunError
from hgpo_jax.utils.heartbeat import phase

SEEN = 0.05  # pass@k from which on, and below 1 less which, the spread between tasks is seen


def pass_at_k(successes: np.ndarray, plays: np.ndarray, k: int) -> np.ndarray:
    """Estimates each task's chance that at least one of k independent plays succeeds, without bias (Chen et al., 2021).

    It is 1 - C(n - c, k) / C(n, k), the share of the k-subsets of a task's plays with a success in them.

    successes, plays: i64[tasks], c and n of each; n is at least k.
    """
    drawn = np.arange(k)
    failures = (plays - successes)[:, None] - drawn  # of the plays that are left before each draw
    return 1 - np.prod(np.maximum(failures, 0) / (plays[:, None] - drawn), axis=1)


def estimates(successes: np.ndarray, plays: np.ndarray, ks: Sequence[int]) -> dict[str, dict]:
    """Returns pass@k for each k as numbers: `mean` over tasks, its 95 % `interval` and the number of `tasks`.

    Tasks of which fewer than k plays finished are left out. The interval is `korn_graubard`: tasks differ, and n plays of a
    task hold n / k independent trials; near 0 and 1, where hardly any difference is seen, a task counts as one.
    """
    result = {}
    for k in ks:
        enough = plays >= k
        values, trials = pass_at_k(successes[enough], plays[enough], k), plays[enough] / k
        mean = float(values.mean()) if len(values) else None
        if mean is not None and not SEEN < mean < 1 - SEEN:
            trials = np.ones(len(values))
        interval = list(korn_graubard(values.tolist(), trials.tolist())) if len(values) > 1 else None
        result[f"pass@{k}"] = {"mean": mean, "interval": interval, "tasks": len(values)}
    return result


@phase("evaluation")
def evaluate_samples(job: Job, params, samples: int, passes: Passes = NONE_KEPT) -> dict:
    """Plays each held-out task of the sampled evaluation several times, the first time as there. Raises RunError."""
    settings, types = job.config.evaluation, job.runner.task_types
    play = functools.partial(play_held_out, job, params, sampled_decoding(settings))
    each = [passes(f"sample-{sample}", functools.partial(play, sample=sample))[0] for sample in range(samples)]
    judged, success = np.array([e.judged for e in each]), np.array([e.success for e in each])
    plays, successes = judged.sum(0), (success & judged).sum(0)
    kind = np.max([np.where(e.judged, e.task, -1) for e in each], axis=0)  # the same in every play
    if not plays.any():
        raise RunError("evaluation: no play of any task has a known outcome")
    ks = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    return {
        "samples": samples,
        "episodes": len(plays),
        "temperature": settings.temperature,
        f"avg@{samples}": estimates(successes, plays, [1])["pass@1"],  # one play's chance is the mean
        **estimates(successes, plays, ks),
        "by_task": {
            types[t]: estimates(successes[kind == t], plays[kind == t], ks) for t in np.unique(kind[kind >= 0]).tolist()
        },
        "successes": successes.tolist(),
        "plays": plays.tolist(),
    }


def describe_samples(result: dict) -> str:
    """Describes the result with one line per number, for the terminal."""
    lines = []
    for name, x in result.items():
        if "@" in name and x["mean"] is not None:
            spread = " (95 % interval {:.1%} to {:.1%})".format(*x["interval"]) if x["interval"] else ""
            lines.append(f"{name:8s}{x['mean']:7.1%} of {x['tasks']} task{'s' * (x['tasks'] > 1)}{spread}")
    return "\n".join(lines)
