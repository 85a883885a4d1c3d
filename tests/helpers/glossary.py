"""The metrics that the running room's README explains."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from hgpo_jax import trainer

GLOSSARY = Path(trainer.__file__).with_name("README.md").read_text().partition("## Glossary")[2]
PATTERNS = [
    name.replace("levelK", "level*")
    for cell in re.findall(r"^\| (`.*?) \|", GLOSSARY, re.MULTILINE)
    for name in re.findall("`(.*?)`", cell)
]


def unexplained(row: dict) -> list[str]:
    """Names of a row of metrics.jsonl that stand nowhere in the glossary."""
    names = [f"{name}.{part}" for name, parts in row.items() if isinstance(parts, dict) for part in parts]
    names += [name for name, value in row.items() if not isinstance(value, dict)]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in PATTERNS)]
