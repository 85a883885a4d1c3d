"""`python -m hgpo_jax.evaluate RUN`: success of a run's policy on held-out tasks, sampled and greedy.

The held-out tasks are the same for every run, so results compare. Writes RUN/evaluation.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from envs.household import TASKS
from hgpo_jax import cli
from hgpo_jax import config as configuration
from hgpo_jax.config import ConfigError
from hgpo_jax.job import Job, build
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import task_keys


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a success probability (Wilson, 1927)."""
    z = 1.959964
    p, spread = successes / n, z * z / n
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(p * (1 - p) / n + spread / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def play_held_out(job: Job, params, temperature: float) -> Episodes:
    """Episodes on the first `evaluation.episodes` held-out tasks, one each, as NumPy arrays."""
    wanted, parts, params = job.config.evaluation.episodes, [], job.plain(params)
    for first in range(0, wanted, job.batch):
        index = first + jnp.arange(job.batch, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), index)
        parts.append(job.rollout(params, task_keys("held_out", 0, index), keys, index, temperature))
    parts = jax.device_get(parts)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[:wanted], *parts)


def summarize(episodes: Episodes) -> dict:
    """What one evaluation says, as plain numbers."""
    n, wins = len(episodes.success), int(episodes.success.sum())
    steps = int(episodes.mask.sum())
    names = list(TASKS)
    by_task = {
        names[task]: float(episodes.success[episodes.task == task].mean()) for task in np.unique(episodes.task).tolist()
    }
    return {
        "success": wins / n,
        "interval": list(wilson(wins, n)),
        "by_task": by_task,
        "turns": steps / n,
        "invalid": float((episodes.invalid & episodes.mask).sum() / steps),
    }


def evaluate(job: Job, params, folder: Path) -> tuple[dict, Episodes]:
    """Evaluates and writes folder/evaluation.json; returns its content and the sampled episodes."""
    sampled = play_held_out(job, params, job.config.evaluation.temperature)
    modes = {"sampled": summarize(sampled), "greedy": summarize(play_held_out(job, params, 0.0))}
    result = {
        "episodes": job.config.evaluation.episodes,
        "temperature": job.config.evaluation.temperature,
        **{name: {mode: modes[mode][name] for mode in modes} for name in modes["sampled"]},
    }
    partial = folder / "evaluation.partial"
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(folder / "evaluation.json")
    return result, sampled


def report(result: dict) -> str:
    """An evaluation in two lines for the terminal."""
    lines = []
    for mode in ("sampled", "greedy"):
        low, high = result["interval"][mode]
        tasks = ""
        if len(result["by_task"][mode]) > 1:
            tasks = "; " + ", ".join(f"{name} {share:.0%}" for name, share in result["by_task"][mode].items())
        lines.append(
            f"held-out {mode:7s} {result['success'][mode]:6.1%} of {result['episodes']} tasks "
            f"(95 % interval {low:.1%} to {high:.1%}), {result['turns'][mode]:.1f} turns{tasks}"
        )
    return "\n".join(lines)


def transcript(job: Job, episodes: Episodes, index: int) -> str:
    """One episode as a person would read it."""
    text = lambda ids: job.env.decode([i for i in np.asarray(ids) if i < len(job.env.words)])  # noqa: E731
    outcome = "success" if episodes.success[index] else "failure"
    lines = [f"task: {text(episodes.prompts[index, 0][: job.env.goal_length])} ({outcome})"]
    for t in range(int(episodes.mask[index].sum())):
        invalid = "   (invalid)" if episodes.invalid[index, t] else ""
        lines.append(f"  {text(episodes.observations[index, t])}\n    > {text(episodes.responses[index, t])}{invalid}")
    return "\n".join(lines)


def main() -> None:
    p = cli.parser("evaluate", __doc__)
    p.add_argument("run", metavar="RUN", help="a run's folder")
    p.add_argument(
        "overrides", nargs="*", metavar="field=value", help="fields to change, as in evaluation.episodes=2048"
    )
    args = p.parse_args()
    folder = Path(args.run)
    if not (folder / "config.yaml").is_file() or not (folder / "policy").is_dir():
        raise ConfigError(f"{folder}: not the folder of a run that has ended; it needs config.yaml and policy/")
    # The saved policy has its adapters merged.
    saved = [f"policy={folder / 'policy'}", "warm_start=none", "lora.rank=0"]
    job = build(configuration.load(str(folder / "config.yaml"), [*args.overrides, *saved]))
    result, _ = evaluate(job, job.policy.params, folder)
    print(report(result))


if __name__ == "__main__":
    cli.run(main)
