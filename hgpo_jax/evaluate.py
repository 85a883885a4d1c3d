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

from hgpo_jax import cli
from hgpo_jax import config as configuration
from hgpo_jax.config import ConfigError
from hgpo_jax.job import Job, build, prepare_devices
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.sampling import Decoding


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a success probability (Wilson, 1927)."""
    z = 1.959964
    p, spread = successes / n, z * z / n
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(p * (1 - p) / n + spread / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


SHOWN = 3  # episodes written out as transcripts


def play_held_out(job: Job, params, decoding: Decoding) -> tuple[Episodes, np.ndarray | None, list[str]]:
    """One episode on each of the first `evaluation.episodes` held-out tasks, or on all where there are fewer.

    Returns: (Episodes of NumPy arrays, the environment's own scores f32[B] if it has any, the first transcripts).
    """
    stage, params = job.stage, job.plain(params)
    wanted = min(job.config.evaluation.episodes, stage.held_out_tasks or job.config.evaluation.episodes)
    parts, scores, shown = [], [], []
    for first in range(0, wanted, job.batch):
        index = first + jnp.arange(job.batch, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), index)
        part = jax.device_get(stage.held_out(params, stage.tasks("held_out", 0, index), keys, index, decoding))
        # The longest dimensions are not looked at again, and a whole evaluation's would fill the memory of a large one.
        parts.append(part.replace(prompts=None, logp=None))
        scores.append(stage.scores(held_out=True))
        if not shown:
            shown = [stage.transcript(part, i) for i in range(min(SHOWN, wanted))]
    episodes = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:wanted], *parts)
    return episodes, None if scores[0] is None else np.concatenate(scores)[:wanted], shown


def summarize(episodes: Episodes, task_types: tuple[str, ...], scores: np.ndarray | None = None) -> dict:
    """What one evaluation says, as plain numbers. Episodes that their environment failed have no turns and do not count."""
    played = episodes.mask[:, 0]
    n, wins, steps = int(played.sum()), int(episodes.success.sum()), int(episodes.mask.sum())
    if not n:
        raise RuntimeError("evaluation: the environment failed in every episode")
    by_task = {
        task_types[task]: float(episodes.success[played & (episodes.task == task)].mean())
        for task in np.unique(episodes.task[played]).tolist()
    }
    return {
        "success": wins / n,
        "interval": list(wilson(wins, n)),
        "by_task": by_task,
        "turns": steps / n,
        "invalid": float((episodes.invalid & episodes.mask).sum() / steps),
    } | ({} if scores is None else {"score": float(scores[played].mean())})


def evaluate(job: Job, params, folder: Path) -> tuple[dict, list[str]]:
    """Evaluates and writes folder/evaluation.json; returns its content and the first sampled transcripts."""
    settings, modes, shown = job.config.evaluation, {}, []
    sampled = Decoding(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_new=settings.min_response
    )
    for mode, decoding in (("sampled", sampled), ("greedy", sampled.replace(temperature=0.0))):
        episodes, scores, transcripts = play_held_out(job, params, decoding)
        modes[mode] = summarize(episodes, job.stage.task_types, scores)
        shown = shown or transcripts
    result = {
        "episodes": len(episodes.success),
        "temperature": settings.temperature,
        **{name: {mode: modes[mode][name] for mode in modes} for name in modes["sampled"]},
    }
    if jax.process_index() == 0:
        partial = folder / "evaluation.partial"
        partial.write_text(json.dumps(result, indent=2) + "\n")
        partial.replace(folder / "evaluation.json")
    return result, shown


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


def main() -> None:
    p = cli.parser("evaluate", __doc__)
    p.add_argument("run", metavar="RUN", help="a run's folder")
    p.add_argument(
        "overrides", nargs="*", metavar="field=value", help="fields to change, as in evaluation.episodes=2048"
    )
    cli.add_distributed(p)
    args = p.parse_args()
    folder = Path(args.run)
    if not (folder / "config.yaml").is_file() or not (folder / "policy").is_dir():
        raise ConfigError(f"{folder}: not the folder of a run that has ended; it needs config.yaml and policy/")
    # The saved policy has its adapters merged.
    saved = [f"policy={folder / 'policy'}", "warm_start=none", "lora.rank=0"]
    config = configuration.load(str(folder / "config.yaml"), [*args.overrides, *saved])
    job = build(config, prepare_devices(config, args.distributed))
    result, _ = evaluate(job, job.policy.params, folder)
    print(report(result))


if __name__ == "__main__":
    cli.run(main)
