"""The YAML that files and overrides are written in: PyYAML's, without two traps of YAML 1.1."""

from __future__ import annotations

import re

import yaml

OCTAL_OR_BASE_60 = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
TEXT, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"  # MERGE: `<<`, which loses nothing where it is repeated


class _Loader(yaml.SafeLoader):
    """Leaves 010 and 1:30 text, which YAML 1.1 takes for 8 and 90, and refuses a name that a mapping holds twice."""

    def resolve(self, kind, value, implicit):
        if kind is yaml.ScalarNode and implicit[0] and OCTAL_OR_BASE_60.fullmatch(value):
            return TEXT
        return super().resolve(kind, value, implicit)

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                line, first = key.start_mark.line + 1, lines.get((key.tag, key.value))
                if first is not None:
                    raise yaml.YAMLError(f"{key.value}: stands in line {first} and again in line {line}; leave one of them out")
                lines[key.tag, key.value] = line
        return node


def read_yaml(text: str):
    """Parses a YAML text. Raises YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises other errors, too, as for 2024-99-99
        raise yaml.YAMLError(str(error)) from None
