"""A snapshot of the compiled games for the referee: tasks are numbers of games, and a state holds one of them."""

import json

import numpy as np
import pytest
from alfworld_places import DATA

from hgpo_jax.analysis import true_advantages
from hgpo_jax.config import dump, load
from hgpo_jax.credit import __main__ as credit
from hgpo_jax.credit import snapshot

FIELDS = (
    f"data={DATA}", "env.split=valid_train", "env.max_turns=3", "warm_start=none", "rollout.group_size=4",
    "rollout.decode_batch_size=8", "policy.hidden_size=16", "policy.intermediate_size=16", "policy.num_hidden_layers=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_snapshot_of_the_compiled_games(tmp_path, monkeypatch):
    monkeypatch.setattr(true_advantages, "ROWS", 64)
    run, made = tmp_path / "run", tmp_path / "made"
    run.mkdir()
    (run / "config.yaml").write_text(dump(load("alfworld_small", [*FIELDS, f"cache_dir={tmp_path / 'cache'}"])))
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "success": 0.0}) + "\n")
    sizes = ("--groups", "2", "--batches", "2", "--continuations", "2", "--directions", "4")
    credit.main(["snapshot", str(made), "--run", str(run), "--levels", "0", "--setting", "games", *sizes])
    one = snapshot.load(made / "games-s0-0.npz")
    assert one.about.environment == "alfworld" and one["mask"].shape == (16, 3) and one["mask"].all()
    first, game = one["states"][:, 0], one["groups"] % 2
    for batch in range(2):
        rows = one["batch"] == batch
        ids = [set(first[rows & (game == number)]) for number in range(2)]
        assert [len(one) for one in ids] == [1, 1]  # the episodes of a game begin alike
    for situation in np.unique(one["situations"]):
        rows, turns = np.nonzero(one["situations"] == situation)
        assert len(set(game[rows])) == len(set(turns)) == 1
    # Nobody wins in three turns, so that all values are 0.
    assert not one["rewards"].any() and not one["true_advantages"].any() and not one["standard_error"].any()
    assert one["gradients"].any(-1).all() and "their licence is MIT" in (made / "DATA_CARD.md").read_text()
