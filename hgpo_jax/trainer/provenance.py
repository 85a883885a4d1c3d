"""A record of the outside code and templates that a run was made with: `provenance.json` in its folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hgpo_jax.config import OPEN, Config
from hgpo_jax.envs import user_code
from hgpo_jax.rollout.chat_prompts import TEMPLATES, template_file
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

FILE = "provenance.json"


def outside_code(config: Config) -> dict[str, dict]:
    """Describes the code and templates from outside that a configuration names, as they are now.

    Returns by field (`env.name`, `method`, `learner.loss`, `reward.source`, `env.state_key`, an option of the environment,
    `env.template`): `name`, the place as the user wrote it, `file`, `sha256` of that file alone, and `version` of the module or
    its distribution. Raises ConfigError for a file that this process read before it changed, as a notebook's may.
    """
    sources = {"env.name": config.env.name, "method": config.method}
    sources |= {"learner.loss": config.learner.loss, "reward.source": config.reward.source}
    places = {f: user_code.locate(name, OPEN[f][1]) for f, name in sources.items() if name and name not in OPEN[f][0]}
    if config.env.state_key:
        sources["env.state_key"] = config.env.state_key
        places["env.state_key"] = user_code.locate(config.env.state_key, user_code.STATE_KEYS)
    options = config.env.options | user_code.implied(config.env.name)
    for option, place in user_code.code_in(options).items():
        sources[f"env.options.{option}"], places[f"env.options.{option}"] = options[option], place
    for field, place in places.items():
        if user_code.is_stale(place):
            raise ConfigError(f"{field}={sources[field]}: has changed since this process read it; begin a new process")
    now = {field: {"name": sources[field], **user_code.version(place)} for field, place in places.items()}
    template = config.env.template
    if template and not (path := template_file(template)).is_relative_to(TEMPLATES):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        now["env.template"] = {"name": template, "file": str(path.resolve()), "sha256": digest, "version": None}
    return now


def record(config: Config, folder: Path, done: int) -> list[str]:
    """Adds the outside code of the run from iteration `done` on to the file, if it differs from the last record.

    A record is `outside_code` and `from_iteration`. If nothing comes from outside, nothing is written.

    Returns: a line for each of these that changed. Raises ConfigError for a damaged file.
    """
    now = outside_code(config)
    file = folder / FILE
    try:
        records = json.loads(file.read_text()) if file.is_file() else []
        before = {field: value for field, value in records[-1].items() if field != "from_iteration"} if records else {}
        changed = [
            f"{field}={about['name']}: it has changed since iteration {records[-1]['from_iteration']}, see {file}"
            for field, about in now.items()
            if field in before and any(about[part] != before[field][part] for part in ("sha256", "version"))
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: is damaged: {' '.join(str(error).split())}; remove it, and a new one begins") from None
    if now != before:
        with atomic_write(file) as target:
            json.dump([*records, {"from_iteration": done, **now}], target, indent=1)
            target.write("\n")
    return changed
