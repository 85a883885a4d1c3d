"""Tools to inspect a run: its episodes as text, the groups of every step, and the advantages of any estimator.

    from hgpo_jax.analysis import load, step_text
    dump = load("runs/NAME")                          # its last dump; iteration=24 for another
    hgpo, grpo = dump.estimate(), dump.estimate("grpo")
    print(step_text(dump, hgpo, episode=3, turn=5))   # its groups at every level, and how its advantage arises

Everything is NumPy on the host; a table is a dict of equally long columns. The report and the notebooks are built on this.
"""

from hgpo_jax.analysis.dumps import Dump, load, read_config
from hgpo_jax.analysis.steps import (
    compare,
    group_ids,
    oracle_errors,
    step_groups,
    step_text,
    step_value,
    step_weights,
    steps_table,
    transitions,
)

__all__ = [
    "Dump",
    "compare",
    "group_ids",
    "load",
    "oracle_errors",
    "read_config",
    "step_groups",
    "step_text",
    "step_value",
    "step_weights",
    "steps_table",
    "transitions",
]
