"""`python -m hgpo_jax.report RUN [RUN ...]`: one HTML file with learning curves, groups and an episode browser.

The file holds everything it needs and opens from disk without a network. Runs are compared where several are given. To
keep the file small, the browser has some prompt groups of some dumped iterations: those whose episodes differ most in
success. --dumps and --groups ask for more.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import jinja2
import numpy as np

from hgpo_jax import cli, diagnostics
from hgpo_jax import config as configuration
from hgpo_jax.advantages import Estimate
from hgpo_jax.config import Config, ConfigError
from hgpo_jax.inspect import Dump, dumped, group_ids, load, read_config, step_value
from hgpo_jax.metrics import flatten, read_metrics

LAST = 10  # iterations that the table of runs averages over
POINTS = 400  # of a curve; longer runs are averaged over equal stretches of iterations

# Of the charts: title; metric, where one that ends in . / or _ stands for all that begin so; range, which is `share`
# (0 to 1), `zero` (from 0 to what there is) or `free`.
LEARNING = (
    ("Success", "success", "share"),
    ("Return", "return", "zero"),
    ("Episode length (turns)", "turns", "zero"),
    ("Valid actions (share)", "valid", "share"),
    ("KL to the reference policy", "kl", "zero"),
    ("Entropy (nats per token)", "entropy", "zero"),
    ("Gradient norm", "grad_norm", "zero"),
    ("Sampler and trainer: log-probabilities differ by", "logp_difference", "zero"),
    ("Clipped tokens (share)", "clip_fraction_", "zero"),
    ("Seconds per iteration", "seconds.", "zero"),
)
GROUPS = (
    ("Steps with company, by level (share)", "peers/", "share"),
    ("Steps with advantage 0 (share)", "advantage_zero", "share"),
    ("Mean size of an advantage", "advantage_abs", "zero"),
    ("Cosine to HGPO with K = 0", "cosine_to_level0", "free"),
    ("Variance between groups (tau²), by level", "hierarchy/tau2_", "zero"),
    ("Variance inside groups (s²), by level", "hierarchy/s2_", "zero"),
    ("What depth can add (rho)", "hierarchy/rho", "zero"),
)
LONE = re.compile("[\ud800-\udfff]")  # lone surrogates, which an environment's text may hold and a page may not
# What says where a run lives rather than what it did.
PLACES = ("name", "run_dir", "cache_dir", "method", "seed", "iterations", "env.data", "policy.tokenizer", "log.", "evaluation.")


class Lines:
    """Each distinct line of text once: prompts repeat most of theirs."""

    def __init__(self):
        self._ids: dict[str, int] = {}

    def add(self, text: str) -> list[int]:
        text = LONE.sub("\ufffd", text)
        return [self._ids.setdefault(line, len(self._ids)) for line in text.split("\n")]

    def all(self) -> list[str]:
        return list(self._ids)


def number(value) -> float | int | None:
    """A number in five digits; None for what is none."""
    value = float(value)
    if not math.isfinite(value):
        return None
    value = float(f"{value:.5g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def numbers(values) -> list:
    return [numbers(v) for v in values] if np.ndim(values) > 1 else [number(v) for v in values]


def read_rows(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl by dotted name. Raises ConfigError."""
    rows = [flatten(row) for row in read_metrics(folder)]
    for number, row in enumerate(rows, 1):
        if not all(isinstance(x, int | float | None) for x in row.values()):
            raise ConfigError(
                f"{folder / 'metrics.jsonl'}: line {number} is no row of metrics: something is no number; take it out"
            )
    return rows


def series(folder: Path) -> tuple[list[int], dict[str, list]]:
    """(iterations, metric -> values; None where an iteration lacks it) of a run, `POINTS` at most."""
    rows = read_rows(folder)
    for row in rows:
        if row.get("invalid") is not None:
            row["valid"] = 1 - row["invalid"]
    stretch = max(1, -(-len(rows) // POINTS))
    parts = [rows[begin : begin + stretch] for begin in range(0, len(rows), stretch)]
    names = dict.fromkeys(name for row in rows for name in row if name != "iteration")

    def mean(part, name):
        values = [row[name] for row in part if row.get(name) is not None]
        return number(np.mean(values)) if values else None

    return [part[-1]["iteration"] for part in parts], {name: [mean(part, name) for part in parts] for name in names}


def panels(charts, curves: list[dict[str, list]]) -> list[dict]:
    """The charts of all runs' curves; one without any curve is left out."""
    drawn = []
    for title, metric, extent in charts:
        group = metric[-1] in "./_"
        lines = [
            {"run": run, "label": label(name.removeprefix(metric)) if group else "", "values": values}
            for run, known in enumerate(curves)
            for name, values in known.items()
            if name == metric or (group and name.startswith(metric))
        ]
        if lines:
            drawn.append({"title": title, "range": extent, "lines": lines})
    return drawn


def label(part: str) -> str:
    """`level2` -> `level 2`, `level-1` -> `prompt group`."""
    return part.replace("level-1", "prompt group").replace("level", "level ").replace("_", " ")


def choose(dump: Dump, wanted: int) -> list[int]:
    """The prompt groups to show: those whose episodes differ most in success, of these the ones with the most steps."""
    e = dump.episodes
    found = []
    for group in np.unique(e.groups).tolist():
        rows = e.groups == group
        if e.mask[rows].any():
            share = e.success[rows].mean()
            found.append((-share * (1 - share), -int(e.mask[rows].sum()), group))
    return sorted(group for *_, group in sorted(found)[:wanted])


def group_data(dump: Dump, group: int, records: dict[str, Estimate], lines: Lines) -> dict:
    """A prompt group as the page reads it. Episodes without turns are left out."""
    e = dump.episodes
    rows = [b for b in np.flatnonzero(e.groups == group).tolist() if e.mask[b].any()]
    happened = {b: dump.turns(b) for b in rows}
    cut = lambda values: [numbers(values[b, : happened[b]]) for b in rows]  # noqa: E731
    scores = (dump.report or {}).get("scores")
    episodes = []
    for b in rows:
        turns = [
            {
                "observation": lines.add(dump.observation(b, t)),
                "prompt": lines.add(dump.prompt(b, t)),
                "response": lines.add(dump.response(b, t)),
                "reward": number(e.rewards[b, t]),
                "invalid": bool(e.invalid[b, t]),
            }
            for t in range(happened[b])
        ]
        note = f"The environment's own score: {scores[b]:.3g}" if scores and scores[b] not in (0, 1) else ""
        episodes.append({"index": b, "success": bool(e.success[b]), "note": note, "turns": turns})
    estimators, levels = {}, set()
    for name, record in records.items():
        estimators[name] = {"advantages": cut(record.advantages), "levels": list(record.levels)}
        if record.levels:
            # None where a step has no such level.
            absent = np.where(record.level_sizes > 0, 0.0, np.nan)
            total = (record.level_weights * record.level_advantages).sum(-1)
            estimators[name] |= {
                "level_advantages": cut(record.level_advantages + absent),
                "level_weights": cut(record.level_weights + absent),
                "returns": cut(record.returns),
                "compared": cut(step_value(dump, record, 0)),
                # What level -1 compares, where that is not the same.
                "scores": cut(step_value(dump, record, -1)) if -1 in record.levels and "rho" not in record.stats else None,
                "summed": bool(np.allclose(total, record.advantages, atol=1e-3)),
            }
            levels |= set(record.levels)
    ids = {}
    for level in sorted(levels):
        found = group_ids(e, level)
        ids[level] = [found[b, : happened[b]].tolist() for b in rows]
    return {"group": group, "goal": dump.goal(rows[0]), "episodes": episodes, "estimators": estimators, "ids": ids}


def dump_data(dump: Dump, groups: int, lines: Lines) -> dict:
    """A dump as the page reads it: group sizes of all its episodes, and some prompt groups whole."""
    records = {name: dump.estimate(name) for name in dump.estimators}
    hierarchy = records["hgpo"]
    sizes = diagnostics.group_sizes(hierarchy.level_sizes, dump.episodes.mask)
    return {
        "iteration": dump.iteration,
        "own": dump.estimator,
        "largest": {name: number(np.abs(record.advantages).max()) for name, record in records.items()},
        "sizes": [
            {"level": level, "counts": list(map(list, counts.items()))}
            for level, counts in zip(hierarchy.levels, sizes, strict=True)
        ],
        "groups": [group_data(dump, group, records, lines) for group in choose(dump, groups)],
    }


def changed_fields(config: Config) -> list[str]:
    """The settings that differ from the defaults, as overrides."""
    found, default = [], Config()
    for name in configuration.fields():
        value, usual = config, default
        for part in name.split("."):
            value, usual = getattr(value, part), getattr(usual, part)
        if value != usual and not name.startswith(PLACES):
            found.append(f"{name}={','.join(value) if isinstance(value, tuple) else value}")
    return found


def run_row(folder: Path, name: str, config: Config, curves: dict[str, list]) -> dict:
    """A run's row in the table."""
    recent = lambda metric: [v for v in curves.get(metric, [])[-LAST:] if v is not None]  # noqa: E731
    mean = lambda metric: float(np.mean(recent(metric))) if recent(metric) else None  # noqa: E731
    seconds = [mean(metric) for metric in curves if metric.startswith("seconds.")]
    file, held_out = folder / "evaluation.json", None
    if file.is_file():
        try:
            result = json.loads(file.read_text())
            held_out = {
                mode: {
                    "success": f"{result['success'][mode]:.1%}",
                    "interval": "{:.1%} to {:.1%}".format(*result["interval"][mode]),
                }
                for mode in ("sampled", "greedy")
            }
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ConfigError(f"{file}: not an evaluation: {error!r}; make it anew with hgpo_jax.evaluate") from None
    written = lambda value, form: "–" if value is None else format(value, form)  # noqa: E731
    return {
        "name": name,
        "method": config.method,
        "seed": config.seed,
        "done": len(read_rows(folder)),
        "success": written(mean("success"), ".1%"),
        "turns": written(mean("turns"), ".1f"),
        "seconds": written(sum(seconds) if seconds and None not in seconds else None, ".2f"),
        "held_out": held_out,
        "changed": changed_fields(config),
    }


def run_names(folders: list[Path]) -> list[str]:
    """The end of each folder's path, with as many folders above it as tell the runs apart: household/gigpo/s0."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def gather(folders: list[Path], dumps: int, groups: int) -> dict:
    """Everything the template takes. Raises ConfigError."""
    rows, runs, curves, lines = [], [], [], Lines()
    configs = [read_config(folder) for folder in folders]
    names = run_names(folders)
    for folder, name, config in zip(folders, names, configs, strict=True):
        x, known = series(folder)
        found = list(dumped(folder))
        if not x and not found:
            raise ConfigError(f"{folder}: nothing to show, the run has not finished an iteration")
        # Evenly, with the first and the last one; the last one alone if there is to be one.
        at = np.linspace(len(found) - 1, 0, min(dumps, len(found))).round().astype(int)[::-1]
        rows.append(run_row(folder, name, config, known))
        shown = []
        for i in at:
            dump = load(folder, found[i])
            try:
                shown.append(dump_data(dump, groups, lines))
            except (ValueError, IndexError, OverflowError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"{folder}: the dump of iteration {found[i]} is damaged: {reason}; remove it") from None
        runs.append({"name": name, "x": x, "dumps": [dump for dump in shown if dump["groups"]]})
        curves.append(known)
    charts = {"learning": panels(LEARNING, curves), "groups": panels(GROUPS, curves)}
    data = {"runs": runs, "panels": charts, "lines": lines.all()}
    title = " and ".join(names) if len(names) < 3 else f"{len(names)} runs compared"
    envs = " and ".join(dict.fromkeys(config.env.name for config in configs))
    methods = ", ".join(dict.fromkeys(config.method for config in configs))
    return {"title": title, "subtitle": f"{methods} on {envs}", "runs": rows, "last": LAST, "data": data}


def render(content: dict) -> str:
    """The page. Whatever stands in the runs is text: escaped in HTML, and in the embedded JSON free of <, > and &."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hgpo_jax"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates.get_template("report.html").render(content)


def main() -> None:
    p = cli.parser("report", __doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, also of one that has not ended")
    p.add_argument("--to", metavar="FILE", help="where to write; default: report.html in the first run's folder")
    p.add_argument("--dumps", type=int, default=3, metavar="N", help="dumped iterations of each run to browse; default 3")
    p.add_argument("--groups", type=int, default=4, metavar="N", help="prompt groups of each of them; default 4")
    args = p.parse_args()
    for name in ("dumps", "groups"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be 1 or more")
    folders = [Path(run) for run in args.runs]
    for folder in folders:
        read_config(folder)
    target = Path(args.to) if args.to else folders[0] / "report.html"
    if not target.parent.is_dir() or target.is_dir():
        raise ConfigError(f"--to {target}: cannot be written; give a file in a folder that exists")
    page = render(gather(folders, args.dumps, args.groups))
    partial = target.with_name(target.name + ".partial")
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(target)
    print(f"{target}: {len(page) / 1e6:.1f} MB, {len(folders)} run{'s' if len(folders) > 1 else ''}")


if __name__ == "__main__":
    cli.run(main)
