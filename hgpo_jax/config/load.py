"""Conversion of a YAML file and overrides to a configuration, and back; each mistake is one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_origin

import pydantic
import yaml

from hgpo_jax.config.schema import Config, fields, literals, role_fields
from hgpo_jax.envs.command_line import nearest
from hgpo_jax.utils.errors import ConfigError, one_line

CONFIGS = Path(__file__).parents[1] / "configs"

SHORT = {"policy": "policy.source", "reward": "reward.source", "data": "env.data"}  # short names of fields in overrides
RENAMED = {"rollout.chunk": "rollout.decode_batch_size", "rollout.ready_share": "rollout.ready_fraction"}  # old name -> new
# Fields that there were until 0.2.0, those of a role as roles.NAME.FIELD -> the value that holds now.
REMOVED: dict[str, Any] = {
    "env.things": 4,
    "env.boxes": 1,
    "env.reward": "success",
    "env.reachable_only": False,
    "env.num_tasks": 0,
    "policy.dtype": "float32",
    "policy.sample_dtype": "compute_dtype",
    "policy.tie_word_embeddings": True,
    "policy.initializer_range": 0.1,
    "rollout.max_tries": 4,
    "rollout.date": None,
    "reward.mode": "add",
    "reward.workers": 1,
    "reward.time_limit": 60.0,
    "reward.overlong_penalty": 1.0,
    "cloning.noise": 0.3,
    "cloning.thought": "",
    "advantage.weight_offset": 2.0,
    "advantage.base_group": False,
    "advantage.statistics": "per_step",
    "advantage.step_weight": 1.0,
    "advantage.prior_count": 2.0,
    "advantage.gate_count": 4.0,
    "learner.beta1": 0.9,
    "learner.beta2": 0.999,
    "learner.dual_clip": 3.0,
    "learner.process_noise": 1e-6,
    "learner.kl_kind": "k3",
    "learner.rollout_correction_cap": 2.0,
    "learner.alternate": None,
    "learner.max_nonfinite": 3,
    "critic.weight_decay": 0.01,
    "critic.beta1": 0.9,
    "critic.beta2": 0.999,
    "log.keep_every": 0,
    "log.sample_every": 0,
    "log.wandb_project": "hgpo_jax",
    "log.max_ratio": 1.2,
    "log.max_approx_kl": 0.1,
    "log.max_logp_difference": None,
    "evaluation.top_k": 0,
    "evaluation.top_p": 1.0,
    "evaluation.min_response": 0,
    "roles.NAME.template": "",
    "roles.NAME.response_limit": None,
    "roles.NAME.warmup_steps": None,
    "roles.NAME.weight_decay": None,
    "roles.NAME.beta1": None,
    "roles.NAME.beta2": None,
    "roles.NAME.grad_clip": None,
}
INSTEAD = {  # removed fields of which a constant does not say all
    "rollout.date": "is the day that policy.source was trained with, or else 2024-07-26",
    "cloning.thought": "is empty: answers are cloned without a thought",
    "learner.alternate": "is the method's own: 1 for himac, else 0",
    "log.wandb_project": "is WANDB_PROJECT, a variable of the environment",
    "log.max_logp_difference": "is fixed at 0.001, for policy.compute_dtype=bfloat16 at 0.5",
    "roles.NAME.template": "is env.template for every role",
    "roles.NAME.response_limit": "is rollout.response_limit for every role",
    **{f"roles.NAME.{name}": f"is learner.{name} for every role" for name in ("warmup_steps", "weight_decay", "grad_clip")},
    "roles.NAME.beta1": "is fixed at 0.9",
    "roles.NAME.beta2": "is fixed at 0.999",
}
RECORD = "config.yaml"  # the file of a run's folder that holds every field


def read_yaml(text: str):
    """Parses a YAML text. Raises YAMLError."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML raises other errors, too, as for 2024-99-99
        raise yaml.YAMLError(str(error)) from None


def parse_value(text: str):
    """Parses an override's text as YAML would; `a,b` and `[a, b]` are lists."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return text
    return value if value is not None else text


def load(path: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Loads the configuration of a YAML file (a path, or a name in configs/), overridden by `field=value` arguments.

    Raises:
      ConfigError: one line that names the field, the value and the nearest right one.
    """
    return resolve(given(path, overrides))


def given(path: str | None, overrides: list[str] | tuple[str, ...]) -> dict:
    """Returns only the fields that a YAML file and overrides set, by section; values are not checked yet.

    Raises ConfigError for an unreadable file and for an override of an unknown field.
    """
    tree = {} if path is None else _read(path)
    for section in ("policy", "reward"):
        if isinstance(tree.get(section), str):
            tree[section] = {"source": tree[section]}
    known = fields()
    for override in overrides:
        name, equals, text = override.partition("=")
        name = SHORT.get(name, name)
        if not equals:
            raise ConfigError(f"{override!r}: an override is written field=value, as in learner.lr=3e-4")
        section, _, option = name.rpartition(".")
        if (role := re.fullmatch(r"roles\.(\w+)", section)) and role[1].isidentifier():
            known |= role_fields(role[1])
        free = section in known and get_origin(known[section].annotation) is dict and option.isidentifier()
        if name not in known and not free:
            raise ConfigError(one_line(f"{name:.200}={text:.200}: {_unknown(name, list(known))}"))
        *heads, leaf = name.split(".")
        node = tree
        for head in heads:
            node = node.setdefault(head, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{head}={shown(node)}: is a section; its fields are written {head}.field=value")
        value = parse_value(text)
        if free:  # a type that only its constructor knows: text that YAML would change, such as 007, stays text
            node[leaf] = value if isinstance(value, bool | list) or str(value) == text else text
            continue
        if get_origin(known[name].annotation) is tuple and not isinstance(value, list):
            value = [part.strip() for part in text.split(",")]
        node[leaf] = text if known[name].annotation is str else value
    return tree


def resolve(tree: dict, base: dict | None = None) -> Config:
    """Completes `given` fields to a configuration, with the other fields from `base`, or else with their defaults.

    Raises ConfigError as `load` does.
    """
    merged = _merged(base or {}, tree)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        known, roles = fields(), merged.get("roles")
        for role in roles if isinstance(roles, dict) else ():
            known |= role_fields(role)
        raise ConfigError(_one_line(error, known)) from None


def _merged(base: dict, tree: dict) -> dict:
    merged = dict(base)
    for name, value in tree.items():
        section = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if section else value
    return merged


def named_files() -> list[str]:
    """Lists the values of --config other than paths."""
    return sorted(p.stem for p in CONFIGS.glob("*.yaml"))


def _read(path: str) -> dict:
    file = Path(path)
    if not file.is_file():
        file = CONFIGS / f"{path}.yaml"
    if not file.is_file():
        raise ConfigError(f"--config {path}: no such file; {nearest(path, named_files())}")
    try:
        tree = read_yaml(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(one_line(f"--config {path}: not a YAML file: {error}")) from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: expected fields with values, found {type(tree).__name__}")
    return current(tree or {}) if file.name == RECORD else tree or {}


def shown(value) -> str:
    """Returns a value for a message, shortened."""
    return f"{value!r:.200}"


def current(recorded: dict) -> dict:
    """Returns the fields that an older run recorded without those that were removed, and nulls, which stand for defaults.

    Raises ConfigError for a removed field whose value was another than what holds now.
    """
    kept: dict = {}

    def keep(node: dict, into: dict, *heads: str) -> None:
        for name, value in node.items():
            field = ".".join((*heads, str(name)))
            removed = _removed_name(field)
            if isinstance(value, dict) and len(heads) < 2:  # a role is a section of a section
                keep(value, into.setdefault(name, {}), *heads, str(name))
            elif removed in REMOVED:
                if value not in (None, REMOVED[removed]):
                    said = f"{field}={shown(value)}: {_now(removed)}"
                    raise ConfigError(one_line(f"{said}; hgpo_jax 0.2.0 reads and continues this run"))
            elif value is not None:
                into[name] = value

    keep(recorded, kept)
    return kept


def _removed_name(name: str) -> str:
    """Returns the name that a field has in REMOVED."""
    return re.sub(r"^roles\.\w+\.", "roles.NAME.", name)


def _now(name: str) -> str:
    """Says what holds now in place of a field in REMOVED."""
    value = REMOVED[name]
    return INSTEAD.get(name, f"is fixed at {str(value).lower() if isinstance(value, bool) else value}")


def _unknown(name: str, names: list[str]) -> str:
    """Explains that there is no field of this name, and says what holds in its place or suggests another one."""
    if name in RENAMED:
        return f"is now called {RENAMED[name]}"
    if (removed := _removed_name(name)) in REMOVED:
        return _now(removed)
    return f"no such field; {nearest(name, names, '--help-all lists them all')}"


def _one_line(error: pydantic.ValidationError, known: dict) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    name = ".".join(part for part in location if not part.isdigit())
    if first["type"] == "extra_forbidden":
        section = name.rpartition(".")[0]
        value = "" if isinstance(first["input"], dict) else f"={shown(first['input'])}"
        siblings = [n for n in known if n.startswith(f"{section}." if section else "")]
        return one_line(f"{name}{value}: {_unknown(name, siblings)}")
    if first["type"] == "invalid_key":
        return one_line(f"{shown(first['input'])}: no such field; {nearest(str(first['input']), list(known))}")
    message = first["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("Input", "the value")
    if first["type"] == "literal_error":
        given = first["input"] if isinstance(first["input"], str) else ""
        message += f"; {nearest(given, list(literals(known[name].annotation)))}"
    return one_line(f"{name}={shown(first['input'])}: {message}" if name else message)


def dump(config: Config) -> str:
    """Writes the configuration as YAML, with every field."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
