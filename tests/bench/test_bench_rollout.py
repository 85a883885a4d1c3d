"""`bench rollout`: steps of all schedules against what can be counted by hand, and answers that end as they should."""

import jax
import numpy as np
import pytest

from hgpo_jax.bench import rollout
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, make_sampler

SMALL = [
    "--mesh", "data=1", "--repeats", "1", "--turns", "4", "--mean", "12", "--longest", "40", "--shortest-prompt", "10",
    "--longest-prompt", "30",
]  # fmt: skip


@pytest.mark.slow
def test_fewer_steps_than_lockstep(bench):
    rows = {row["name"]: row for row in bench("rollout", *SMALL, "--episodes", "24", "--slots", "8")}
    found = {name if name.startswith("in ") else name.partition(",")[0]: row for name, row in rows.items()}
    ours, theirs = found["decode steps over the fewest possible"], found["in lockstep, decode steps over the fewest possible"]
    assert 0.9 < ours["value"] < 1.7 < theirs["value"]
    assert 0.9 < found["in one compiled program, decode steps over the fewest possible"]["value"] < 1.7
    assert found["in one compiled program"]["ratio"] > 0
    assert found["tokens"]["ratio"] > 0 and found["tokens"]["limit_share"] == pytest.approx(1 / ours["value"])
    assert 8 < found["answer"]["value"] < 16  # 12, less what is cut


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_every_token_ends_an_answer_with_the_same_probability(tied):
    model = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    mesh, n, mean = make_mesh("data=1", jax.devices()[:1]), 2000, 10
    params = rollout._ends_at_random(initialize(model, 0, mesh), 1 / mean)
    prompts = np.random.default_rng(0).integers(1, 50, (n, 6)).astype(np.int32)
    sample, rows = make_sampler(network(model), mesh, 60, (rollout.END,)), np.arange(n, dtype=np.int32)
    keys = jax.random.split(jax.random.key(0), n)
    blocks = make_decode_blocks(network(model))(params)
    lengths = np.asarray(sample(params, blocks, prompts, np.full(n, 6, np.int32), keys, rows, np.int32(0), Decoding()).lengths)
    # Geometric: as many end at once after the first as after the tenth token.
    for at in (1, 10):
        alive = lengths >= at
        assert (lengths[alive] == at).mean() == pytest.approx(1 / mean, abs=4 * np.sqrt(0.09 / alive.sum()))
