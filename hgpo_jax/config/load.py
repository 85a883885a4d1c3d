"""Conversion of a YAML file with overrides to a configuration, and back; each mistake is one line."""

from __future__ import annotations

from pathlib import Path
from typing import get_origin

import pydantic
import yaml

from hgpo_jax.config.earlier_fields import drop_removed, unknown_field
from hgpo_jax.config.overrides import apply_overrides
from hgpo_jax.config.schema import Config, fields, literals, role_fields
from hgpo_jax.config.yaml_text import read_yaml
from hgpo_jax.envs.command_line import nearest
from hgpo_jax.utils.errors import ConfigError, excerpt, one_line

CONFIGS = Path(__file__).parents[1] / "configs"
SECTIONS = {
    *(name.partition(".")[0] for name in fields() if "." in name),
    *(name for name, info in fields().items() if get_origin(info.annotation) is dict),  # such as env.options
}
RECORD = "config.yaml"  # the file of a run's folder that holds every field


def load(path: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Loads the configuration of a YAML file (a path, or a name in configs/), overridden by `field=value` arguments.

    Raises:
      ConfigError: one line that names the field, the value and the nearest right one.
    """
    return resolve(read_fields(path, overrides))


def read_fields(path: str | None, overrides: list[str] | tuple[str, ...]) -> dict:
    """Returns only the fields that a YAML file and overrides set, by section; values are not checked yet.

    Raises ConfigError for an unreadable file and for an override of an unknown field.
    """
    tree = {} if path is None else _read(path)
    for section in ("policy", "reward"):
        if isinstance(tree.get(section), str):
            tree[section] = {"source": tree[section]}
    apply_overrides(tree, overrides)
    return tree


def resolve(tree: dict, base: dict | None = None) -> Config:
    """Completes the fields of `read_fields` to a configuration, with the other fields from `base`, or else with their defaults.

    Raises ConfigError as `load` does.
    """
    merged = _merged(base or {}, tree)
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        all_fields, roles = fields(), merged.get("roles")
        for role in roles if isinstance(roles, dict) else ():
            all_fields |= role_fields(role)
        raise ConfigError(_one_line(error, all_fields)) from None


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
        names = named_files()
        raise ConfigError(f"--config {path}: no such file; {nearest(path, names, 'there are ' + ', '.join(names))}")
    try:
        tree = read_yaml(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(one_line(f"--config {path}: not a YAML file: {error}")) from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: expected fields with values, found {type(tree).__name__}")
    tree = _without_empty(tree or {})
    return drop_removed(tree) if file.name == RECORD else tree


def _without_empty(tree: dict, section: str = "") -> dict:
    """Leaves out the sections whose fields are all comments, which YAML reads as null."""
    fields_left = {}
    for name, value in tree.items():
        dotted = f"{section}.{name}" if section else str(name)
        if value is None and (dotted in SECTIONS or section == "roles"):
            continue
        fields_left[name] = _without_empty(value, dotted) if isinstance(value, dict) and dotted in SECTIONS else value
    return fields_left


def _one_line(error: pydantic.ValidationError, all_fields: dict) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    name = ".".join(part for part in location if not part.isdigit())
    if location[-1:] == ["[key]"]:  # the name of a role or an option
        return one_line(f"{'.'.join(location[:-2])}: {excerpt(first['input'])} is no name; names are text")
    if first["type"] == "extra_forbidden":
        section = name.rpartition(".")[0]
        value = "" if isinstance(first["input"], dict) else f"={excerpt(first['input'])}"
        section_of, dot, leaf = location[-1].partition(".")
        if dot and name in all_fields:
            return one_line(f"{name}{value}: in a file, write {section_of}: {{{leaf}: {excerpt(first['input'])}}}")
        siblings = [n for n in all_fields if n.startswith(f"{section}." if section else "")]
        return one_line(f"{name}{value}: {unknown_field(name, siblings)}")
    if first["type"] == "invalid_key":
        return one_line(f"{excerpt(first['input'])}: {unknown_field(str(first['input']), list(all_fields))}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("model_type", "dict_type"):
        message = f"is a section; its fields are written {name}.field=value, or in a file as a mapping"
    message = message.replace("Input should be", "must be").replace("Input", "the value")
    if first["type"] == "literal_error":
        text = first["input"] if isinstance(first["input"], str) else ""
        message += f"; {nearest(text, list(literals(all_fields[name].annotation)))}"
    return one_line(f"{name}={excerpt(first['input'])}: {message}" if name else message)


def dump(config: Config) -> str:
    """Writes the configuration as YAML, with every field."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
