"""The main job as the README promises it: from nothing to an agent that solves nine of ten held-out tasks."""

import json
import os

import pytest

from tests.helpers import fork_server


@pytest.mark.slow
@pytest.mark.optimized
def test_the_default_run_teaches_the_agent(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    folders = [f"run_dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}"]
    done = fork_server.run(["-m", "hgpo_jax.train", *folders, "seed=5"], tmp_path, environment, timeout=1500)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert result["episodes"] == 512
    assert result["success"]["sampled"] >= 0.9
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["success"] < 0.8  # the warm start alone does not do it
    # The sampler's log-probabilities are the trainer's, on every token of every iteration.
    assert max(row["logp_difference"] for row in rows) < 1e-4
