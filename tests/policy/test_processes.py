"""Two processes on one machine: each reads its own part of the weights, one writes them whole."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax.policy import ModelConfig, Policy, shapes
from tests.helpers.processes import together

PROGRAM = """
    import jax
    from hgpo_jax.utils import distributed
    distributed.join()
    from hgpo_jax.policy.mesh import make_mesh
    from hgpo_jax.policy import load_policy, safetensors_files as weights

    read, bytes_read = weights.Weights.read, []

    def counted(self, name, index=None):
        value = read(self, name, index)
        bytes_read.append(value.nbytes)
        return value

    weights.Weights.read = counted
    policy = load_policy("in", make_mesh("fsdp=2"))
    assert len(jax.devices()) == 2 and not policy.params["lm_head"]["kernel"].is_fully_addressable
    policy.save("out")
    print(sum(bytes_read))
"""


@pytest.mark.slow
def test_two_processes_read_their_parts_and_one_writes(tmp_path):
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), "float32"), shapes(config))
    Policy(config, params, None).save(tmp_path / "in")
    said, _ = together(tmp_path, program=("-c", textwrap.dedent(PROGRAM)))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], name)
    whole = sum(value.nbytes for value in before.values())
    replicated = sum(value.nbytes for name, value in before.items() if value.ndim == 1)
    for text in said:  # half of each matrix, biases and norms in full
        assert (whole - replicated) / 2 <= int(text) <= (whole - replicated) / 2 + replicated
