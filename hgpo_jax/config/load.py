"""Conversion of a YAML file and overrides to a configuration, and back; each mistake is one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_origin

import pydantic
import yaml

from hgpo_jax.config.schema import Config, fields, literals, role_fields
from hgpo_jax.envs.cli import nearest
from hgpo_jax.utils.errors import ConfigError, one_line

CONFIGS = Path(__file__).parents[1] / "configs"

SHORT = {"policy": "policy.source", "reward": "reward.source", "data": "env.data"}  # short names of fields in overrides
RENAMED = {"rollout.chunk": "rollout.decode_batch_size", "rollout.ready_share": "rollout.ready_fraction"}  # old name -> new


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
    return tree or {}


def shown(value) -> str:
    """Returns a value for a message, shortened."""
    return f"{value!r:.200}"


def _unknown(name: str, names: list[str]) -> str:
    """Explains that there is no field of this name, and suggests another one."""
    if name in RENAMED:
        return f"is now called {RENAMED[name]}"
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
