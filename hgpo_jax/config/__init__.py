"""The configuration of a run: one typed tree, filled from a YAML file and `field=value` overrides.

Every field has a description (`--help` prints it), its valid values, and a default that fits the household, so that
`python -m hgpo_jax.train` needs no file. `load` rejects unknown fields and values before anything else happens.
"""

from hgpo_jax.config.describe import COMMON, completions, describe
from hgpo_jax.config.earlier_fields import REMOVED, drop_removed
from hgpo_jax.config.learning import LearnerConfig
from hgpo_jax.config.load import CONFIGS, dump, load, named_files, read_fields, read_yaml, resolve
from hgpo_jax.config.open_fields import OPEN
from hgpo_jax.config.overrides import SHORT
from hgpo_jax.config.roles import RoleConfig
from hgpo_jax.config.schema import (
    Config,
    EnvConfig,
    EvaluationConfig,
    LogConfig,
    PolicyConfig,
    Positive,
    Section,
    fields,
    role_fields,
)

__all__ = [
    "COMMON",
    "CONFIGS",
    "OPEN",
    "REMOVED",
    "SHORT",
    "Config",
    "EnvConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "LogConfig",
    "PolicyConfig",
    "Positive",
    "RoleConfig",
    "Section",
    "completions",
    "describe",
    "drop_removed",
    "dump",
    "fields",
    "load",
    "named_files",
    "read_fields",
    "read_yaml",
    "resolve",
    "role_fields",
]
