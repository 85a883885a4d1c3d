"""Panels: equal tasks for everybody, digests that notice every change, comparisons against plain counts."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax import evaluate, evaluation_files, panels
from hgpo_jax.errors import ConfigError
from hgpo_jax.intervals import mcnemar, paired_difference
from hgpo_jax.rollout.tasks import task_numbers
from tests.helpers.training import TINY, command

# Whoever sees another digest has other tasks: results from before are then not comparable, which has to be a decision.
DIGESTS = {}


def tasks_of(name: str, *overrides: str) -> list[str]:
    fields = panels.panel_fields(name, list(overrides))
    env = panels.PANELS[name].environments[0]
    return panels.panel_tasks(name, configuration.load(None, [f"env.name={env}", "warm_start=none", *overrides, *fields]))


@pytest.mark.parametrize("name", [name for name in panels.PANELS if name.startswith(("household", "sokoban"))])
def test_generated_tasks_stay_what_they_are(name):
    tasks = tasks_of(name)
    assert len(tasks) == len(set(tasks)) == 512
    assert panels.digest(name, tasks)[:16] == DIGESTS[name]
    text = panels.PANELS[name].environments[1]
    told = configuration.load(None, [f"env.name={text}", "warm_start=none", *panels.panel_fields(name, [])])
    assert panels.panel_tasks(name, told) == tasks
