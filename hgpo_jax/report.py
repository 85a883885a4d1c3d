"""`python -m hgpo_jax.report RUN [RUN ...]`: one HTML file with learning curves, groups and an episode browser.

The file holds everything it needs and opens from disk without a network. Runs are compared where several are given. To
keep the file small, the browser has some prompt groups of some dumped iterations: those whose episodes differ most in
success. --dumps and --groups ask for more.
"""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from hgpo_jax import config as configuration
from hgpo_jax.advantages import Estimate
from hgpo_jax.analysis import Dump, diagnostics, group_ids, load, read_config, step_value, step_weights
from hgpo_jax.config import Config, cli
from hgpo_jax.learner.methods import METHODS
from hgpo_jax.rollout.episodes import dumped
from hgpo_jax.rollout.result import outcome_of
from hgpo_jax.trainer.curves import AGENTS, GROUPS, LEARNING, ROLES, Panel, read_held_out, read_rows
from hgpo_jax.utils import remote
from hgpo_jax.utils.compiled_programs import keep_compiled
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.figures import smoothing_window
from hgpo_jax.utils.files import atomic_write

LAST = 10  # iterations that the table of runs averages over
LONE = re.compile("[\ud800-\udfff]")  # lone surrogates, which an environment's text may contain and a page may not
# Fields about the places of a run's files, not its behaviour.
PLACES = ("name", "run_dir", "cache_dir", "method", "seed", "iterations", "env.data", "policy.tokenizer", "log.", "evaluation.")


class Lines:
    """A list of distinct lines of text: prompts repeat most of theirs."""

    def __init__(self):
        self._ids: dict[str, int] = {}

    def add(self, text: str) -> list[int]:
        text = LONE.sub("\ufffd", text)
        return [self._ids.setdefault(line, len(self._ids)) for line in text.split("\n")]

    def all(self) -> list[str]:
        return list(self._ids)


def number(value, digits: int = 5) -> float | int | None:
    """Rounds a number to significant digits; None for NaN and infinities."""
    value = float(value)
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def numbers(values) -> list:
    return [numbers(v) for v in values] if np.ndim(values) > 1 else [number(v) for v in values]


def series(folder: Path) -> tuple[list[int], dict[str, list]]:
    """Returns (iterations, metric -> values, None where missing) of a run, to float32's seven digits. Raises ConfigError."""
    rows = read_rows(folder)
    names = dict.fromkeys(name for row in rows for name in row if name != "iteration")
    value = lambda row, name: None if row.get(name) is None else number(row[name], 7)  # noqa: E731
    return [row["iteration"] for row in rows], {name: [value(row, name) for row in rows] for name in names}


def charts(panels: tuple[Panel, ...], curves: list[dict[str, list]]) -> list[dict]:
    """Returns the charts of all runs: which metrics of which run each one draws; a chart without any is left out."""
    drawn = []
    for panel in panels:
        lines = []
        for run, metrics in enumerate(curves):
            names = panel.names(metrics)
            lines += [{"run": run, "metric": n, "label": panel.label(n), "held_out": False} for n in names]
            if (validation := f"validation/{panel.metric}") in metrics:
                lines.append({"run": run, "metric": validation, "label": "held-out", "held_out": True})
        if lines:
            fields = {"title": panel.title, "metric": panel.metric, "unit": panel.unit, "range": panel.extent}
            drawn.append(fields | {"lines": lines})
    return drawn


def choose(dump: Dump, count: int) -> list[int]:
    """Chooses the prompt groups to show: those whose episodes differ most in success, of these the ones with the most steps."""
    e = dump.episodes
    candidates = []
    for group in np.unique(e.groups).tolist():
        rows = e.groups == group
        if e.mask[rows].any():
            share = e.success[rows].mean()
            candidates.append((-share * (1 - share), -int(e.mask[rows].sum()), group))
    return sorted(group for *_, group in sorted(candidates)[:count])


def data_url(picture: np.ndarray) -> str:
    """Returns a picture, uint8[H, W, 3], as the address of an image in the page."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def group_data(dump: Dump, group: int, records: dict[str, Estimate], lines: Lines) -> dict:
    """Returns a prompt group in the page's format. Episodes without turns are left out."""
    e = dump.episodes
    rows = [b for b in np.flatnonzero(e.groups == group).tolist() if e.mask[b].any()]
    happened = {b: dump.turns(b) for b in rows}
    cut = lambda values: [numbers(values[b, : happened[b]]) for b in rows]  # noqa: E731
    scores: Any = (dump.report or {}).get("scores")
    readable = dump.compiled or dump.tokenizer is not None  # otherwise the page leaves out the prompts
    episodes = []
    for b in rows:
        turns = [
            {
                "observation": lines.add(dump.observation(b, t)),
                "picture": [] if e.pictures is None else lines.add(data_url(np.asarray(e.pictures[b, t]))),
                "prompt": lines.add(dump.prompt(b, t)) if readable else [],
                "response": lines.add(dump.response(b, t)),
                "reward": number(e.rewards[b, t]),
                "invalid": bool(e.invalid[b, t]),
                "role": dump.mark(b, t),
            }
            for t in range(happened[b])
        ]
        tells = scores is not None and scores[b] not in (0, 1) and not np.isnan(scores[b])
        note = f"The environment's own score: {scores[b]:.3g}" if tells else ""
        episodes.append({"index": b, "outcome": outcome_of(e, b), "note": note, "turns": turns})
    estimators, ids = {}, []
    for name, record in records.items():
        estimators[name] = {"advantages": cut(record.advantages), "levels": list(record.levels)}
        if record.levels:
            # None if a step has no such level.
            advantages, sizes, weights = record.by_level()
            absent = np.where(sizes > 0, 0.0, np.nan)
            total = (weights * advantages).sum(-1)
            grouped = {level: group_ids(e, record, level, rows) for level in record.levels}
            shown = {
                level: [ids_of[: happened[b]].tolist() for b, ids_of in zip(rows, each, strict=True)]
                for level, each in grouped.items()
            }
            ids += [each for each in shown.values() if each not in ids]
            estimators[name] |= {
                "level_advantages": cut(advantages + absent),
                "level_weights": cut(weights + absent),
                "returns": cut(record.returns),
                "compared": cut(step_value(dump, record, 0)),
                # The quantity that level -1 compares, if it differs.
                "scores": cut(step_value(dump, record, -1)) if -1 in record.levels and "rho" not in record.stats else None,
                "summed": bool(np.allclose(total, record.advantages, atol=1e-3)),
                # Which of the group's `ids` hold at each level.
                "ids": {level: ids.index(each) for level, each in shown.items()},
                # Whether the steps of an episode share the weight of one; whether level 0 compares milestones.
                "shares": bool(-1 in grouped and (step_weights(record, -1, grouped[-1], rows) < 1).any()),
                "milestones": record.states is not None,
            }
    return {"group": group, "goal": dump.goal(rows[0]), "episodes": episodes, "estimators": estimators, "ids": ids}


def estimates(dump: Dump) -> dict[str, Estimate]:
    """Returns the record of every estimator that a dump is enough for. Raises ConfigError where one's own fails."""
    records = {}
    for name in dump.estimators:
        try:
            records[name] = dump.estimate(name)
        except Exception as error:
            if name in METHODS:
                raise
            why = f"fails on the episodes of iteration {dump.iteration}: {type(error).__name__}: {error}"
            raise ConfigError(one_line(f"method={name}: {why}")) from None
    return records


def dump_data(dump: Dump, groups: int, lines: Lines) -> dict:
    """Returns a dump in the page's format: group sizes of all its episodes, and some whole prompt groups."""
    records = estimates(dump)
    hierarchy = records["hgpo"]
    sizes = diagnostics.group_sizes(hierarchy.by_level()[1], dump.episodes.mask)
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
    """Returns the settings that differ from the defaults, as overrides."""
    changes, default = [], Config()
    text = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value  # noqa: E731
    for name in configuration.fields():
        value, usual = config, default
        for part in name.split("."):
            value, usual = getattr(value, part), getattr(usual, part)
        if name == "roles":
            roles = {role: settings.model_dump(exclude_defaults=True) for role, settings in config.roles.items()}
            changes += [
                f"roles.{role}.{field}={text(setting)}" for role, fields in roles.items() for field, setting in fields.items()
            ]
        elif value != usual and not name.startswith(PLACES):
            changes.append(f"{name}={text(value)}")
    return changes


def run_row(name: str, config: Config, done: int, curves: dict[str, list], held_out: dict | None) -> dict:
    """Returns a run's row in the table."""
    recent = lambda metric: [v for v in curves.get(metric, [])[-LAST:] if v is not None]  # noqa: E731
    mean = lambda metric: float(np.mean(recent(metric))) if recent(metric) else None  # noqa: E731
    # Not every iteration validates, so None counts as 0 in the mean.
    parts = [values[-LAST:] for metric, values in curves.items() if metric.startswith("seconds.") and any(values[-LAST:])]
    written = lambda value, form: "–" if value is None else format(value, form)  # noqa: E731
    return {
        "name": name,
        "method": config.method,
        "seed": config.seed,
        "done": done,
        "success": written(mean("success"), ".1%"),
        "turns": written(mean("turns"), ".1f"),
        "seconds": written(sum(sum(filter(None, part)) / len(part) for part in parts) if parts else None, ".2f"),
        "held_out": held_out
        and {
            mode: {"success": f"{x['success']:.1%}", "interval": "{:.1%} to {:.1%}".format(*x["interval"])}
            for mode, x in held_out.items()
            if "success" in x
        },
        "changed": changed_fields(config),
    }


def run_names(folders: list[Path]) -> list[str]:
    """Returns the end of each folder's path, long enough to distinguish the runs: household/gigpo/s0."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def gather(folders: list[Path], dumps: int, groups: int) -> dict:
    """Collects the input of the template. Raises ConfigError."""
    rows, curves, lines = [], [], Lines()
    runs: list[dict[str, Any]] = []
    configs = [read_config(folder) for folder in folders]
    names = run_names(folders)
    for folder, name, config in zip(folders, names, configs, strict=True):
        x, metrics = series(folder)
        iterations = list(dumped(folder))
        if not x and not iterations:
            raise ConfigError(f"{folder}: nothing to show, the run has not finished an iteration")
        # Evenly spaced, with the first and the last one; a single one is the last.
        at = np.linspace(len(iterations) - 1, 0, min(dumps, len(iterations))).round().astype(int)[::-1]
        held_out = read_held_out(folder)
        rows.append(run_row(name, config, len(x), metrics, held_out))
        all_dumps = []
        for i in at:
            dump = load(folder, iterations[i])
            try:
                all_dumps.append(dump_data(dump, groups, lines))
            except ConfigError:  # as of an estimator whose file is not there
                raise
            except (ValueError, IndexError, OverflowError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"{folder}: the dump of iteration {iterations[i]} is damaged: {reason}; remove it") from None
        dumps_shown = [dump for dump in all_dumps if dump["groups"]]
        runs.append({"name": name, "x": x, "metrics": metrics, "held_out": held_out, "dumps": dumps_shown})
        curves.append(metrics)
    panels = {
        "learning": charts((*LEARNING, *AGENTS), curves),
        "groups": charts(GROUPS, curves),
        "roles": charts(ROLES, curves),
    }
    longest = max(len(run["x"]) for run in runs)
    data = {"runs": runs, "panels": panels, "window": smoothing_window(longest), "lines": lines.all()}
    title = " and ".join(names) if len(names) < 3 else f"{len(names)} runs compared"
    envs = " and ".join(dict.fromkeys(config.env.name for config in configs))
    methods = ", ".join(dict.fromkeys(config.method for config in configs))
    return {"title": title, "subtitle": f"{methods} on {envs}", "runs": rows, "last": LAST, "data": data}


def render(content: dict) -> str:
    """Renders the page. All content of the runs is text: escaped in HTML, and in the embedded JSON free of <, > and &."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hgpo_jax"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates.get_template("report.html").render(content)


def main() -> None:
    p = cli.parser("report", __doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, also of one that has not ended")
    p.add_argument(
        "--to",
        metavar="FILE",
        type=cli.local_path,
        help="where to write; default: report.html in the first run's folder",
    )
    p.add_argument("--dumps", type=int, default=3, metavar="N", help="dumped iterations of each run to browse; default 3")
    p.add_argument("--groups", type=int, default=4, metavar="N", help="prompt groups of each of them; default 4")
    args = p.parse_args()
    for name in ("dumps", "groups"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be 1 or more")
    folders = [Path(remote.local(run)) for run in args.runs]
    target = Path(args.to) if args.to else folders[0] / "report.html"
    if target.is_dir() or (args.to and not target.parent.is_dir()):  # without --to, `gather` reports a bad folder
        raise ConfigError(f"--to {target}: cannot be written; give a file in a folder that exists")
    if Path(cache_dir := read_config(folders[0]).cache_dir).is_dir():
        keep_compiled(cache_dir)  # estimators take seconds each
    page = render(gather(folders, args.dumps, args.groups))
    with atomic_write(target, errors="replace") as file:
        file.write(page)
    remote.send(target)
    print(f"{target}: {len(page) / 1e6:.1f} MB, {len(folders)} run{'s' if len(folders) > 1 else ''}")


if __name__ == "__main__":
    cli.run(main)
