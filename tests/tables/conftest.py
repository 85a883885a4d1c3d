"""The small plan, read."""


import pytest
from small_plan import write_plan

from hgpo_jax.tables import plan as planning


@pytest.fixture
def small(tmp_path):
    return planning.read(write_plan(tmp_path))
