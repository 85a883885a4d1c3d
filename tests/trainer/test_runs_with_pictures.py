"""Whole runs of a policy that sees."""

import jax
import numpy as np
import pytest

from hgpo_jax.policy import load_policy
from hgpo_jax.rollout.episodes import Episodes, dumped
from tests.helpers.training import TINY, command, rows_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_learns_from_pictures_and_goes_on_after_a_stop(frozen, tmp_path):
    fields = (*TINY, "iterations=2", f"policy.vision_frozen={str(frozen).lower()}", "learner.weight_decay=0.5", "run_dir=run")
    command("-m", "hgpo_jax.train", "--config", "sokoban_pixels", *fields, "cache_dir=cache", cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and max(row["logp_difference"] for row in rows) < 1e-5
    pictures = Episodes.load(next(iter(dumped(tmp_path / "run").values()))).pictures
    assert pictures.dtype == np.uint8 and pictures.shape[2:] == (24, 24, 3) and pictures.max() > 0
    command("-m", "hgpo_jax.train", "--resume", "run", "iterations=3", cwd=tmp_path)
    assert len(rows_of(tmp_path / "run")) == 3
    before, after = (load_policy(tmp_path / "run" / name) for name in ("start", "policy"))
    assert before.config == after.config and before.config.vision.patch_size == 4
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before.params, after.params)
    towers, rest = moved.pop("visual"), moved
    assert not any(jax.tree.leaves(towers)) if frozen else all(jax.tree.leaves(towers))
    assert all(jax.tree.leaves(rest))
