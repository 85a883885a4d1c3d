"""Evaluation on held-out tasks, with 95 % intervals: the final one of a run, and evaluations with several seeds."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config import EvaluationConfig
from hgpo_jax.evaluation.files import OWN, write
from hgpo_jax.evaluation.passes import NONE_KEPT, Passes
from hgpo_jax.evaluation.statistics import over_seeds, wilson
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import stream_key
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import Job
from hgpo_jax.utils.errors import RunError
from hgpo_jax.utils.heartbeat import phase

SHOWN = 3  # episodes written as transcripts; more, one of each, if there are more task types


def sampled_decoding(settings: EvaluationConfig) -> Decoding:
    """Returns the decoding of a sampled evaluation."""
    return Decoding(temperature=settings.temperature)


def num_evaluated(job: Job) -> int:
    """Returns the episodes of the final evaluation: `evaluation.episodes`, or as many as there are held-out tasks."""
    return min(job.config.evaluation.episodes, job.runner.num_held_out_tasks or job.config.evaluation.episodes)


def validates_apart(job: Job) -> bool:
    """Whether there are enough held-out tasks for validations on others than those of the final evaluation."""
    return (job.runner.num_held_out_tasks or math.inf) >= 2 * num_evaluated(job)


def validation_tasks(job: Job, indices):
    """Returns the validation tasks with these numbers, apart from the final evaluation's, so that selection by them is fair.

    Generated tasks come from a separate stream; listed ones are the last in the evaluation's order or, if there are too few
    (`validates_apart`), those of the evaluation itself.
    """
    if job.runner.num_held_out_tasks is None:
        return job.runner.select_tasks("validation", 0, indices)
    first = job.runner.num_held_out_tasks - num_evaluated(job) if validates_apart(job) else 0
    return job.runner.select_tasks("held_out", 0, first + indices)


def play_held_out(
    job: Job,
    params,
    decoding: Decoding,
    seed: int | None = None,
    in_order: bool = False,
    validation: bool = False,
    sample: int = 0,
) -> tuple[Episodes, np.ndarray | None, list[str]]:
    """Plays one episode on each of the first `evaluation.episodes` held-out tasks, or on all if there are fewer.

    params: those of a rollout.
    seed: draws other tasks and other samples; tasks are then repeated if there are fewer than `evaluation.episodes`.
    in_order: the environment's tasks in their own order; a seed only draws the samples.
    validation: `validation_tasks`, with samples of their own.
    sample: plays the same tasks with other samples, if it is not 0.
    Returns: (Episodes of NumPy arrays, the environment's own scores f32[B] if it has any, transcripts: with a seed all of
      them, else the first of each task type and, if there are few types, the next ones).
    """
    with job.on_rollout_mesh():
        return _play_held_out(job, params, decoding, seed, in_order, validation, sample)


def _play_held_out(job: Job, params, decoding: Decoding, seed: int | None, in_order: bool, validation: bool, sample: int):
    runner = job.runner
    count = num_evaluated(job) if seed is None else job.config.evaluation.episodes
    key = stream_key("validation_samples", 0) if validation else jax.random.key(seed or 0)
    key = stream_key("more_samples", sample) if sample else key
    parts, scores = [], []
    transcripts: list[str] = []
    by_type: dict[int, list[str]] = {}
    for first in range(0, count, job.batch):
        index = first + jnp.arange(job.batch, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
        of_seed = None if in_order else seed or 0
        tasks = validation_tasks(job, index) if validation else runner.select_tasks("held_out", of_seed, index)
        result = jax.device_get(runner.rollout(params, tasks, keys, index, decoding, held_out=True))
        # The largest arrays are not needed again; those of a whole evaluation could fill the memory.
        parts.append(result.episodes.replace(prompts=None, logp=None, allowed=None))
        scores.append(result.report and result.report.scores)
        for i in range(min(count - first, job.batch)):
            if seed is not None:
                transcripts.append(runner.story(result, i).text())
            elif len(same := by_type.setdefault(int(result.episodes.task[i]), [])) < SHOWN:
                same.append(runner.story(result, i).text())
    if seed is None:
        in_turn = [text for texts in zip_longest(*by_type.values()) for text in texts if text is not None]
        transcripts = in_turn[: max(SHOWN, len(by_type))]
    episodes = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:count], *parts)
    return episodes, None if scores[0] is None else np.concatenate(scores)[:count], transcripts


def summarize(episodes: Episodes, task_types: Sequence[str], scores: np.ndarray | None = None) -> dict:
    """Summarizes one evaluation as plain numbers. Episodes whose environment failed have no turns and do not count, except that
    they count as lost in `success_at_least`. Success is NaN if the environment does not report it.
    """
    played, judged = episodes.mask[:, 0], episodes.judged
    n, num_judged, wins, steps = (int(a.sum()) for a in (played, judged, episodes.success, episodes.mask))
    if not n:
        raise RunError("evaluation: the environment failed in every episode")
    if (wrong := episodes.task[judged & ~np.isin(episodes.task, range(len(task_types)))]).size:
        raise RunError(
            f"evaluation: an episode's task is {wrong[0]}; give the index of one of the {len(task_types)} task_types"
        )
    by_task = {
        task_types[task]: float(episodes.success[judged & (episodes.task == task)].mean())
        for task in np.unique(episodes.task[judged]).tolist()
    }
    return {
        "played": n,
        "success": wins / num_judged if num_judged else math.nan,
        "interval": list(wilson(wins, num_judged)) if num_judged else [math.nan, math.nan],
        "success_at_least": wins / (len(played) - n + num_judged) if num_judged else math.nan,
        "by_task": by_task,
        "turns": steps / n,
        "invalid": float((episodes.invalid & episodes.mask).sum() / steps),
    } | ({} if scores is None or np.isnan(scores[played]).any() else {"score": float(scores[played].mean())})


def evaluate(job: Job, params, folder: Path) -> tuple[dict, list[str]]:
    """Runs `play_both` and writes the result to folder/evaluation.json."""
    result, transcripts = play_both(job, params)
    if jax.process_index() == 0:
        write(folder / OWN, result)
    return result, transcripts


@phase("evaluation")
def play_both(job: Job, params, passes: Passes = NONE_KEPT) -> tuple[dict, list[str]]:
    """Runs the sampled and the greedy evaluation of rollout parameters: (the result, some sampled transcripts)."""
    settings, modes = job.config.evaluation, {}
    first_transcripts: list[str] = []
    sampled = sampled_decoding(settings)
    for mode, decoding in (("sampled", sampled), ("greedy", sampled.replace(temperature=0.0))):
        episodes, scores, transcripts = passes(mode, functools.partial(play_held_out, job, params, decoding))
        modes[mode] = summarize(episodes, job.runner.task_types, scores)
        first_transcripts = first_transcripts or transcripts
    result = {
        "episodes": len(episodes.success),
        "temperature": settings.temperature,
        # A score may be known in one of the two alone.
        **{name: {mode: x[name] for mode, x in modes.items()} for name in modes["sampled"] if name in modes["greedy"]},
    }
    return result, first_transcripts


def describe_evaluation(result: dict) -> str:
    """Describes an evaluation in two lines for the terminal."""
    lines = []
    for mode in ("sampled", "greedy"):
        low, high = result["interval"][mode]
        tasks = ""
        if len(result["by_task"][mode]) > 1:
            tasks = "; " + ", ".join(f"{name} {share:.0%}" for name, share in result["by_task"][mode].items())
        played, count, success = result["played"][mode], result["episodes"], result["success"][mode]
        failed = ""
        if played < count:
            failed = f"; in {count - played} of {count} tasks the environment failed, which are left out"
            if not math.isnan(success):
                failed += f": {result['success_at_least'][mode]:.1%} if they count as lost"
        text = f"{success:6.1%} of {played} tasks (95 % interval {low:.1%} to {high:.1%})"
        if math.isnan(success):
            text = f"success unknown in {played} tasks, whose environment does not say it"
        lines.append(f"held-out {mode:7s} {text}, {result['turns'][mode]:.1f} turns{tasks}{failed}")
    return "\n".join(lines)


def measures(episodes: Episodes, task_types: Sequence[str], scores: np.ndarray | None) -> dict[str, float]:
    """Returns the numbers of one seed's evaluation, by name; `success/TYPE` for each task type that occurs."""
    summary = summarize(episodes, task_types, scores)
    steps = episodes.mask.sum()
    numbers = {
        **({} if math.isnan(summary["success"]) else {name: summary[name] for name in ("success", "success_at_least")}),
        **{f"success/{name}": share for name, share in summary["by_task"].items()},
        "turns": summary["turns"],
        "valid_actions": 1 - summary["invalid"],
        "prompt_tokens_per_step": float(episodes.prompt_lengths.sum(where=episodes.mask) / steps),
        "response_tokens_per_step": float(episodes.response_lengths.sum(where=episodes.mask) / steps),
    }
    return numbers | ({"score": summary["score"]} if "score" in summary else {})


def share_sizes(episodes: Episodes, task_types: Sequence[str], scores: np.ndarray | None) -> dict[str, int]:
    """Returns the number of episodes or steps behind each of the `measures` that is a mean of values in [0, 1].

    A score can be any number; it is included if the scores of all episodes are in [0, 1].
    """
    played, judged = episodes.mask[:, 0], episodes.judged
    types, counts = np.unique(episodes.task[judged], return_counts=True)
    by_type = {f"success/{task_types[t]}": int(n) for t, n in zip(types, counts, strict=True)}
    sizes = {
        "success": int(judged.sum()),
        "success_at_least": int(judged.sum() + (~played).sum()),
        **by_type,
        "valid_actions": int(episodes.mask.sum()),
    }
    if scores is not None and scores[played].min() >= 0 and scores[played].max() <= 1:
        sizes["score"] = int(played.sum())
    return sizes


def pooled(plays: list[Episodes], task_types: Sequence[str]) -> dict[str, dict]:
    """Pools success over the episodes of all seeds, in total and by task type: episodes, successes, share, 95 % interval.

    Episodes count as independent, even if they repeat a task: the interval says nothing about tasks that were not played.
    """
    judged = np.concatenate([e.judged for e in plays])
    success = np.concatenate([e.success for e in plays])
    task = np.concatenate([e.task for e in plays])
    parts = {"success": judged} if judged.any() else {}
    parts |= {f"success/{task_types[t]}": judged & (task == t) for t in np.unique(task[judged]).tolist()}
    result = {}
    for name, part in parts.items():
        n, wins = int(part.sum()), int(success[part].sum())
        result[name] = {"episodes": n, "successes": wins, "share": wins / n, "interval": list(wilson(wins, n))}
    return result


@phase("evaluation")
def evaluate_seeds(job: Job, params, seeds: list[int], passes: Passes = NONE_KEPT) -> tuple[dict, list[dict]]:
    """Evaluates rollout parameters with several seeds: (the result, every episode with its transcript)."""
    settings, by_seed, sizes, plays, episodes = job.config.evaluation, {}, {}, [], []
    for seed in seeds:
        play = functools.partial(play_held_out, job, params, sampled_decoding(settings), seed)
        e, scores, transcripts = passes(f"seed-{seed}", play)
        plays.append(e)
        by_seed[seed] = measures(e, job.runner.task_types, scores)
        sizes[seed] = share_sizes(e, job.runner.task_types, scores)
        for i, transcript in enumerate(transcripts):
            played = bool(e.mask[i, 0])  # otherwise the type is unknown
            outcome = {
                "task": job.runner.task_types[int(e.task[i])] if played else None,
                "success": bool(e.success[i]) if e.judged[i] else None,
            } | ({} if scores is None else {"score": float(scores[i]) if played else None})
            turns = int(e.mask[i].sum())
            episodes.append({"seed": seed, "episode": i} | outcome | {"turns": turns, "transcript": transcript})

    def number(name: str) -> dict:
        have = [seed for seed in seeds if name in by_seed[seed]]  # a task type may be missing for a seed
        shares = all(name in sizes[seed] for seed in have)
        return over_seeds([by_seed[seed][name] for seed in have], [sizes[seed][name] for seed in have] if shares else None)

    names = dict.fromkeys(name for numbers in by_seed.values() for name in numbers)
    result = {
        "seeds": seeds,
        "episodes_per_seed": settings.episodes,
        "temperature": settings.temperature,
        "over_seeds": {name: number(name) for name in names},
        "over_episodes": pooled(plays, job.runner.task_types),
        "by_seed": by_seed,
    }
    return result, episodes


def describe_seeds(result: dict) -> str:
    """Describes the result with one line per number, for the terminal."""

    def text_of(name, value):
        share = name.startswith(("success", "valid"))
        return "-" if value is None else f"{value:.1%}" if share else f"{value:.2f}"

    lines = [f"{'':32s}{'mean':>9s}{'std':>9s}   {'95 % over seeds':20s}95 % over all episodes"]
    for name, x in result["over_seeds"].items():
        seeds = " to ".join(text_of(name, end) for end in x["interval"] or [None])
        pool = result["over_episodes"].get(name)
        episodes = "{} to {} of {}".format(*(text_of(name, end) for end in pool["interval"]), pool["episodes"]) if pool else ""
        line = f"{name:32s}{text_of(name, x['mean']):>9s}{text_of(name, x['std']):>9s}   {seeds:20s}{episodes}"
        lines.append(line.rstrip())
    return "\n".join(lines)
