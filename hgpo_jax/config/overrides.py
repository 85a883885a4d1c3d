"""Overrides of a configuration's fields, `field=value`, as the command line takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args, get_origin

import yaml

from hgpo_jax.config.earlier_fields import unknown_field
from hgpo_jax.config.schema import fields, role_fields
from hgpo_jax.config.yaml_text import read_yaml
from hgpo_jax.utils.errors import ConfigError, excerpt, one_line

SHORT = {"policy": "policy.source", "reward": "reward.source", "data": "env.data"}  # short names of fields


def apply_overrides(tree: dict, overrides: Sequence[str]) -> None:
    """Sets the fields of `field=value` overrides in `tree`, a dict by section. Raises ConfigError for an unknown field."""
    all_fields = fields()
    for override in overrides:
        name, equals, text = override.partition("=")
        name = SHORT.get(name, name)
        if not equals:
            raise ConfigError(f"{override!r}: an override is written field=value, as in learner.lr=3e-4")
        section, _, option = name.rpartition(".")
        if (role := re.fullmatch(r"roles\.(\w+)", section)) and role[1].isidentifier():
            all_fields |= role_fields(role[1])
        free = section in all_fields and get_origin(all_fields[section].annotation) is dict and option.isidentifier()
        if name not in all_fields and not free:
            raise ConfigError(one_line(f"{name:.200}={text:.200}: {unknown_field(name, list(all_fields))}"))
        value = _free_value(text) if free else _value_of_type(all_fields[name].annotation, text)
        *sections, leaf = name.split(".")
        node = tree
        for depth, head in enumerate(sections, 1):
            node = node.setdefault(head, {})
            if not isinstance(node, dict):
                dotted = ".".join(sections[:depth])
                raise ConfigError(f"{dotted}={excerpt(node)}: is a section; its fields are written {dotted}.field=value")
        node[leaf] = value


def _value_of_type(annotation, text: str):
    if annotation is str:
        return text
    if text in ("null", "~") and type(None) in get_args(annotation):
        return None
    value = _parse(text)
    if get_origin(annotation) is tuple and not isinstance(value, list):
        return [part.strip() for part in text.split(",")]
    return value


def _free_value(text: str):
    """Parses a value whose type only its constructor knows: text that YAML would change, such as 007, stays text."""
    value = _parse(text)
    return value if isinstance(value, bool | list) or str(value) == text else text


def _parse(text: str):
    """Parses text as YAML would; what is no YAML, or null, stays text."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return text
    if re.fullmatch(r"[-+]?\d+[eE]\+?\d", text):  # which it takes for text without a point
        return float(text)
    return text if value is None else value
