"""Two processes on one machine: each reads its own part of the weights, one writes them whole."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax.policy import ModelConfig, Policy, shapes
from tests.helpers.xla import xla_flags

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import sys
    import jax
    rank, port, folder, out = int(sys.argv[1]), *sys.argv[2:]
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    from hgpo_jax.mesh import make_mesh
    from hgpo_jax.policy import load_policy, weights

    read, bytes_read = weights.Weights.read, []

    def counted(self, name, index=None):
        value = read(self, name, index)
        bytes_read.append(value.nbytes)
        return value

    weights.Weights.read = counted
    policy = load_policy(folder, make_mesh("fsdp=2,tensor=2"))
    assert len(jax.devices()) == 4 and not policy.params["lm_head"]["kernel"].is_fully_addressable
    policy.save(out)
    print("read", sum(bytes_read))
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
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "XLA_FLAGS": xla_flags(2, optimized=False), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    running = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path / "in"), str(tmp_path / "out")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], name)
    whole = sum(value.nbytes for value in before.values())
    replicated = sum(value.nbytes for name, value in before.items() if value.ndim == 1)
    for text in said:
        mine = int(text.rsplit("read", 1)[1])
        # fsdp=2 lies across the processes, tensor=2 within: half of each matrix, biases and norms in full.
        assert mine <= (whole - replicated) / 2 + replicated
        assert mine >= (whole - replicated) / 2
