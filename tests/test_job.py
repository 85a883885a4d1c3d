"""What a job sets up for the whole process."""

import jax
import pytest

from hgpo_jax import config as configuration
from hgpo_jax.job import build
from tests.helpers.training import TINY


@pytest.mark.parametrize("told", ["", "elsewhere"])
def test_compiled_programs_go_to_cache_dir_unless_jax_was_told_where(told, tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", told)
    try:
        job = build(configuration.load(None, [*TINY, "mesh=data=8", f"cache_dir={tmp_path}"]))
        used = jax.config.jax_compilation_cache_dir
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert used == (before if told else str(tmp_path / "compiled"))
    assert jax.sharding.get_abstract_mesh().shape == job.mesh.shape
