"""Panels: fixed, ordered lists of tasks for comparing policies, wherever and by whomever they were trained.

    python -m hgpo_jax.evaluate RUN --panel alfworld-valid_seen         every task, sampled and greedy
    python -m hgpo_jax.evaluate --compare A.json B.json                 paired by task, with intervals

A panel is the same on every machine, for every seed and with any number of workers. Its digest covers the content of each task,
in order: for ALFWorld the game's file, for WebShop the goal and the catalogue, for generated tasks the whole first state. It
does not cover the code that plays them, which is this version's.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config import REMOVED, Config, EvaluationConfig
from hgpo_jax.envs.alfworld.dataset import list_games
from hgpo_jax.envs.protocol import CompiledEnv
from hgpo_jax.evaluation.held_out import play_held_out, sampled_decoding, summarize
from hgpo_jax.evaluation.passes import NONE_KEPT, Passes
from hgpo_jax.evaluation.statistics import mcnemar, over_seeds, paired_difference, wilson
from hgpo_jax.rollout import environments
from hgpo_jax.rollout.alfworld_games import alfworld_data
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import Job
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.heartbeat import phase


@dataclasses.dataclass(frozen=True)
class Panel:
    """A list of tasks.

    environments: names of those that have these tasks, in different representations.
    fields: fields of the configuration that decide the tasks and their length.
    count: number of tasks.
    contents: describes each task under a configuration with these fields in a line that differs if the task does.
    """

    environments: tuple[str, ...]
    fields: dict[str, str]
    count: int
    contents: Callable[[Config, int], list[str]]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _games(config: Config, count: int) -> list[str]:
    """Describes ALFWorld's games: the trial and the game's file."""
    try:
        games = list_games(config.env.held_out, alfworld_data(config))
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={config.env.data}: {one_line(str(error))}") from None
    return [f"{game.trial} {_short(game.path.read_bytes())}" for game in games]


def _goals(config: Config, count: int) -> list[str]:
    """Describes WebShop's goals: the instruction; the first line also names the catalogue's files."""
    try:
        env, lines = environments.webshop_text(config)[1](), []
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={config.env.data}: {one_line(str(error))}") from None
    for task in range(len(env)):
        env.reset(task)
        lines.append(env.goal)
    files = environments.webshop_files(config.env.data)
    if len(files) == 1:
        raise ConfigError(f"env.data={config.env.data}: --panel webshop is of WebShop's own files, not of a built catalogue")
    lines[0] += "".join(f" {file.name} {_short(file.read_bytes())}" for file in files)
    return lines


def _first_states(make: Callable[[Config], CompiledEnv], config: Config, count: int) -> list[str]:
    """Describes the generated tasks of a compiled environment: every array of the state after reset."""
    states, _ = jax.jit(jax.vmap(make(config).reset))(task_keys("held_out", 0, jnp.arange(count)))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(states)]
    return [f"{i:03d} {_short(b''.join(leaf[i].tobytes() for leaf in leaves))}" for i in range(count)]


def _household(**fields: str) -> Panel:
    default = {"env.tasks": "place", "env.rooms": "kitchen", "env.places": "6", "env.things": "4", "env.max_turns": "20"}
    contents = functools.partial(_first_states, environments.household)
    return Panel(("household", "household_text"), default | fields, 512, contents)


PANELS = {
    "alfworld-valid_seen": Panel(("alfworld",), {"env.held_out": "valid_seen", "env.max_turns": "50"}, 140, _games),
    "alfworld-valid_unseen": Panel(("alfworld",), {"env.held_out": "valid_unseen", "env.max_turns": "50"}, 134, _games),
    # In this order the first 500 goals are held out from training.
    "webshop": Panel(
        ("webshop",), {"env.goal_order": "original", "env.reachable_only": "false", "env.max_turns": "30"}, 500, _goals
    ),
    "household": _household(),
    "household-two": _household(**{"env.tasks": "two"}),
    "household-six": _household(
        **{
            "env.tasks": "[place, two, look, clean, heat, cool]",
            "env.rooms": "[kitchen, bathroom, bedroom, livingroom]",
            "env.max_turns": "30",
        }
    ),
    "sokoban": Panel(
        ("sokoban", "sokoban_pixels", "sokoban_text"),
        {"env.size": "6", "env.boxes": "1", "env.reward": "success", "env.max_turns": "20"},
        512,
        functools.partial(_first_states, environments.sokoban),
    ),
}


def panel_fields(name: str, overrides: list[str]) -> list[str]:
    """Returns a panel's overrides. Raises ConfigError for an unknown panel, or for overrides of fields that the panel sets."""
    if name not in PANELS:
        raise ConfigError(f"--panel {name:.100}: there is none of this name; give one of {', '.join(PANELS)}")
    fields = PANELS[name].fields | {"evaluation.episodes": str(PANELS[name].count)}
    for override in overrides:
        if (field := override.partition("=")[0]) in fields:
            raise ConfigError(f"{override:.100}: --panel {name} decides {field}; leave it out")
    # Removed fields stay in a panel's digest, and so in its fields, at the value that holds for all.
    return [f"{field}={value}" for field, value in fields.items() if field not in REMOVED]


def refuse_trained_on(name: str, trained: Config) -> None:
    """Raises ConfigError if a run with this configuration was trained on tasks of a panel."""
    env = trained.env
    # That order shuffles the goals before 500 of them are held out.
    if env.name in PANELS[name].environments and env.name == "webshop" and env.goal_order != "original":
        raise ConfigError(
            f"--panel {name}: this run was trained on some of its tasks, by env.goal_order={env.goal_order}; train with "
            "env.goal_order=original"
        )


def panel_tasks(name: str, config: Config) -> list[str]:
    """Describes the tasks of a panel, in order, under a configuration with its fields. Raises ConfigError."""
    panel = PANELS[name]
    if config.env.name not in panel.environments:
        raise ConfigError(f"env.name={config.env.name}: --panel {name} is played in {' or '.join(panel.environments)}")
    tasks = panel.contents(config, panel.count)
    if len(tasks) != panel.count:
        raise ConfigError(f"env.data={config.env.data}: --panel {name} has {panel.count} tasks, here are {len(tasks)}")
    return tasks


def digest(name: str, tasks: list[str]) -> str:
    """Returns a panel's digest: SHA-256 of its name, its fields and its tasks in order."""
    return hashlib.sha256(json.dumps([name, PANELS[name].fields, tasks]).encode()).hexdigest()


Play = Callable[[Decoding, int], tuple[Episodes, np.ndarray | None, list[str]]]


def player(job: Job, params) -> Play:
    """Returns a function that plays a job's held-out tasks in their own order, with a decoding and a seed for the samples."""
    params = job.base_rollout_params(params)
    return lambda decoding, seed: play_held_out(job, params, decoding, seed, in_order=True)


@phase("evaluation")
def evaluate_panel(
    play: Play,
    types: Sequence[str],
    settings: EvaluationConfig,
    name: str,
    tasks: list[str],
    seeds: list[int],
    passes: Passes = NONE_KEPT,
) -> tuple[dict, list[dict]]:
    """Plays every task once greedily, and once sampled for each seed: (the result, every episode with its transcript).

    Seeds decide samples only. An episode whose environment failed counts nowhere; its outcome is None.

    Args:
      play: returns the episodes of all tasks in order, their scores if they have any, and their transcripts.
      types: types of tasks; `Episodes.task` is an index into them.
      name, tasks: the panel's name, and its `panel_tasks`.
    """
    records: list[dict] = []
    outcomes: list[dict] = [{"task": task} for task in tasks]
    sampled = sampled_decoding(settings)
    shares: dict[str, list[dict]] = {"greedy": [], "sampled": []}
    for mode, seed in [("greedy", 0), *(("sampled", seed) for seed in seeds)]:
        decoding = sampled.replace(temperature=0.0) if mode == "greedy" else sampled
        episodes, scores, transcripts = passes(f"{mode}-{seed}", functools.partial(play, decoding, seed))
        shares[mode].append(summarize(episodes, types, scores))
        for i, transcript in enumerate(transcripts):
            played = bool(episodes.mask[i, 0])
            success = bool(episodes.success[i]) if episodes.judged[i] else None
            record = {"task": i, "mode": mode, "seed": seed, "success": success}
            score = {} if scores is None else {"score": float(scores[i]) if played else None}
            records.append(record | score | {"turns": int(episodes.mask[i].sum()), "transcript": transcript})
            if played:  # only then is the type known
                outcomes[i]["type"] = types[int(episodes.task[i])]
            for measure, value in ({"success": record["success"]} | score).items():
                outcomes[i].setdefault(measure, {}).setdefault(mode, []).append(value)
    result = {
        "panel": {"name": name, "digest": digest(name, tasks), "fields": PANELS[name].fields},
        "temperature": settings.temperature,
        "seeds": seeds,
        "greedy": shares["greedy"][0],
        "sampled": dict(zip(map(str, seeds), shares["sampled"], strict=True)),
        "tasks": outcomes,
    }
    return result, records


def describe(result: dict) -> str:
    """Describes a panel's result in a few lines for the terminal."""
    panel, count = result["panel"], len(result["tasks"])
    played = {
        mode: sum(any(outcome is not None for outcome in task["success"][mode]) for task in result["tasks"])
        for mode in ("greedy", "sampled")
    }
    low, high = result["greedy"]["interval"]
    lines = [
        f"panel {panel['name']}, {count} tasks, digest {panel['digest'][:16]}",
        f"greedy   {result['greedy']['success']:6.1%} (95 % interval {low:.1%} to {high:.1%})",
    ]
    shares = [one["success"] for one in result["sampled"].values()]
    spread = f" mean of {len(shares)} seeds, standard deviation {np.std(shares, ddof=1):.1%}" if len(shares) > 1 else ""
    # All seeds play the same tasks, so the interval is at most that of one play of each task.
    low, high = wilson(float(np.mean(shares)) * played["sampled"], played["sampled"])
    lines.append(f"sampled  {np.mean(shares):6.1%}{spread} (95 % interval {low:.1%} to {high:.1%})")
    success = {"greedy": result["greedy"]["success"], "sampled": float(np.mean(shares))}
    for mode, n in played.items():
        if n < count:
            rate = success[mode] * n / count
            lines.append(f"{mode}: only {n} of {count} tasks were played, the others failed; {rate:.1%} if these count as lost")
    return "\n".join(lines)


def read(path: str) -> dict:
    """Reads the result of a panel from its file. Raises ConfigError."""
    try:
        result = json.loads(Path(path).read_text())
        whole = [result["panel"][what] for what in ("name", "digest")] + [result["policy"], result["settings"].items()]
        whole += [len(task["success"][mode]) for task in result["tasks"] for mode in ("greedy", "sampled")]
        if not result["tasks"] or None in whole:
            raise ValueError("something is missing")
        for task in result["tasks"]:
            plays = [*task["success"].values(), *task.get("score", {}).values()]
            numbers = all(play is None or math.isfinite(play) for play in itertools.chain(*plays))
            if not numbers or not isinstance(task.get("type", ""), str):
                raise ValueError("an outcome is not a number")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(f"{path}: not the result of a panel; make one with --panel NAME") from None
    return result


DECODING = {  # settings that make plays of two policies incomparable
    "greedy": {"evaluation.min_response"},
    "sampled": {f"evaluation.{name}" for name in ("temperature", "top_k", "top_p", "min_response")},
}


def _different(a: dict, b: dict) -> dict[str, tuple]:
    """Returns the settings of two results that differ, including the seeds of their samples and the versions of the code."""
    # A version that has no field any more holds it at the value in REMOVED.
    value = lambda of, name: of["settings"].get(name, REMOVED.get(name))  # noqa: E731
    names = a["settings"].keys() | b["settings"].keys()
    both = {name: (value(a, name), value(b, name)) for name in sorted(names)}
    both |= {name: (a.get(name), b.get(name)) for name in ("seeds", "hgpo_jax")}
    return {name: (one, other) for name, (one, other) in both.items() if one != other}


def compare(a: dict, b: dict) -> dict[str, dict[str, dict]]:
    """Computes B - A, paired by task: measure, as in "success, greedy" -> type of task, "all" first -> numbers.

    Plays with different decoding are left out (`DECODING`).

    Numbers: `tasks` (number that both finished), `a` and `b` (means), `difference`, `interval` (95 %; None for one task with
    scores outside [0, 1]), `shares` (whether all values are in [0, 1]), and for single plays `only_a`, `only_b` (tasks that
    only one of them solved) and `p` (McNemar's exact test).

    Raises:
      ConfigError: the results are of different panels.
    """
    for what, one, other in (
        *((what, a["panel"][what], b["panel"][what]) for what in ("name", "digest")),
        ("length", len(a["tasks"]), len(b["tasks"])),
    ):
        if one != other:
            raise ConfigError(f"--compare: panels of different {what}, {one!s:.60} and {other!s:.60}; compare equal ones")
    different = _different(a, b)
    comparison: dict[str, dict[str, dict]] = {}
    for measure, mode in itertools.product(("success", "score"), ("greedy", "sampled")):
        if different.keys() & DECODING[mode]:
            continue
        pairs: dict[str, list[tuple[list, list]]] = {"all": []}
        for ours, theirs in zip(a["tasks"], b["tasks"], strict=True):
            one, other = ([v for v in task.get(measure, {}).get(mode, []) if v is not None] for task in (ours, theirs))
            if one and other:
                for part in ("all", ours.get("type", "unknown")):
                    pairs.setdefault(part, []).append((one, other))
        if pairs["all"]:
            shares = all(0 <= value <= 1 for pair in pairs["all"] for plays in pair for value in plays)
            comparison[f"{measure}, {mode}"] = {
                part: _compare_pairs(some, measure == "success", shares) for part, some in pairs.items()
            }
    return comparison


def _compare_pairs(pairs: list[tuple[list, list]], of_outcomes: bool, shares: bool) -> dict:
    one, other = (np.array([np.mean(pair[i]) for pair in pairs]) for i in (0, 1))
    if shares:
        difference, interval = paired_difference(other - one)
    else:
        found = over_seeds((other - one).tolist())  # one number per task
        difference, interval = found["mean"], found["interval"]
    numbers = {
        "tasks": len(pairs),
        "a": float(one.mean()),
        "b": float(other.mean()),
        "difference": difference,
        "interval": interval,
        "shares": shares,
    }
    if of_outcomes and all(len(a) == len(b) == 1 for a, b in pairs):
        only_a, only_b = int((one > other).sum()), int((other > one).sum())
        numbers |= {"only_a": only_a, "only_b": only_b, "p": mcnemar(only_a, only_b)}
    return numbers


def describe_comparison(a: dict, b: dict, comparison: dict[str, dict[str, dict]]) -> str:
    """Formats a comparison as a table for the terminal."""
    panel = a["panel"]
    lines = [f"panel {panel['name']}, digest {panel['digest'][:16]}", f"A: {a['policy']}", f"B: {b['policy']}"]
    for name, parts in comparison.items():
        lines += ["", f"{name:32s}{'tasks':>6s}{'A':>9s}{'B':>9s}{'B - A':>9s}   {'95 %':18s}  only A  only B  p (McNemar)"]
        for part, x in parts.items():
            if len(parts) == 2 and part != "all":
                continue  # there is only one type of task
            as_text = ".1%" if x["shares"] else ".2f"
            interval = " to ".join(f"{end:+{as_text}}" for end in x["interval"]) if x["interval"] else "-"
            means = "".join(f"{x[number]:9{as_text}}" for number in ("a", "b"))
            line = f"{part:32s}{x['tasks']:6d}{means}{x['difference']:+9{as_text}}   {interval:18s}"
            lines.append(line + (f"  {x['only_a']:6d}  {x['only_b']:6d}  {x['p']:.2g}" if "p" in x else ""))
    for side, one in (("A", a), ("B", b)):
        for mode in ("greedy", "sampled"):
            failed = sum(all(outcome is None for outcome in task["success"][mode]) for task in one["tasks"])
            if failed:
                lines.append(f"{side}, {mode}: {failed} of {len(one['tasks'])} tasks failed and are left out of both")
    if different := _different(a, b):
        lines += ["", f"different: {', '.join(f'{name}={one} and {other}' for name, (one, other) in different.items())}"]
        missing = [mode for mode, names in DECODING.items() if different.keys() & names]
        lines += [f"therefore not compared: {' and '.join(missing)} plays"] if missing else []
    return "\n".join(line.rstrip() for line in lines)
