"""Files of evaluations: distinct names for them, and a check that none overwrites another evaluation."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.files import atomic_write

OWN = "evaluation.json"  # a run's, with its own settings
# Fields that affect the result of an evaluation, unlike those of paths, speed or training.
MATTER = (
    "env.",
    "evaluation.",
    "policy.compute_dtype",
    "rollout.constrain",
    "rollout.history_length",
    "rollout.prompt_limit",
    "rollout.response_limit",
    "rollout.stop",
    "rollout.thinking",
)
DO_NOT = ("env.data", "env.split", "env.workers", "env.preload", "env.time_limit", "evaluation.every")


def write(path: Path, result: dict, episodes: Sequence[dict] = ()) -> None:
    """Writes an evaluation as JSON. Its episodes, if any, are written first, one per line in the file .jsonl beside it.

    Unknown values (NaN) become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if episodes:
        with atomic_write(path.with_name(path.name + "l")) as lines:
            lines.writelines(json.dumps(_as_json(episode)) + "\n" for episode in episodes)
    with atomic_write(path) as file:
        file.write(json.dumps(_as_json(result), indent=2) + "\n")


def _as_json(value):
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def settings_of(config: Config) -> dict[str, object]:
    """Returns name -> value, as in JSON, for every field that affects the result of an evaluation."""
    tree, settings = config.model_dump(mode="json"), {}
    for name in configuration.fields():
        if name.startswith(MATTER) and name not in DO_NOT:
            section, _, leaf = name.partition(".")
            settings[name] = tree[section][leaf]
    return settings


def file_name(
    split: str, temperature: float, episodes: int, seeds: list[int] | tuple[int, ...] = (), samples: int | None = None
) -> str:
    """Names the file of an evaluation, with or without seeds or samples; another number of episodes is another evaluation."""
    listed = "-".join(map(str, seeds))
    if len(listed) > 180:  # characters; file names have 255
        listed = f"{seeds[0]}-to-{seeds[-1]}-{len(seeds)}of-{hashlib.sha256(listed.encode()).hexdigest()[:8]}"
    under = f"-s{listed}" if seeds else f"-samples{samples}" if samples else ""
    return f"{split}-t{temperature:g}-n{episodes}{under}.json"


def data_of(config: Config) -> str:
    """Returns where the tasks of an evaluation are read from. It is no setting, so that evaluations on two machines compare."""
    return str(Path(config.env.data).absolute()) if config.env.data else ""


def refuse_another(file: Path, settings: dict[str, object], policy: str | None = None, data: str = "") -> None:
    """Raises ConfigError if `file` holds an intact evaluation with other settings or data, or of another policy.

    policy: None if the folder holds evaluations of one policy only.
    """
    settings = settings | {"env.data": data}
    try:
        old = json.loads(file.read_text())
        before = {"policy": old["policy"], "env.data": old.get("data", data)} | old["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    now = settings | ({"policy": policy} if policy else {})
    other = [f"{name}={value}" for name, value in before.items() if now.get(name, value) != value]
    if other:
        raise ConfigError(one_line(f"{file}: holds an evaluation with {', '.join(other)}; choose another folder with --to"))
