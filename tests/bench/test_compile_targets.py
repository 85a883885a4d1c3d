"""Devices that `bench plan --compile` compiles for: what is refused, and that XLA's GPU compiler takes every description."""

import subprocess
import sys

import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from hgpo_jax.bench import __main__ as bench
from hgpo_jax.bench import plan
from hgpo_jax.bench.compile_targets import GPUS, TPUS, Target, target_of
from hgpo_jax.config import cli
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.setup import memory
from hgpo_jax.utils.errors import ConfigError


@pytest.mark.parametrize("name", ["h100", "h100:", "h100:0", "h100:x", "h100:2x4", "h100:999", "x:2", ""])
def test_other_names_are_refused(name):
    expected = "expected one of v4, .* as in v5e:2x4, or a100, .* as in h100:2"
    with pytest.raises(ConfigError, match=f"^--compile {name}: {expected}$"):
        target_of(name, "fsdp=2")


@pytest.mark.parametrize(("name", "extra"), [("h100:2", "gpu-compiler"), ("v5e:2x4", "tpu")])
def test_without_a_compiler_one_line_says_what_to_install(name, extra, monkeypatch, capsys):
    def none(**description):
        raise NotImplementedError("topology not\nimplemented")

    monkeypatch.setattr(topologies, "get_topology_desc", none)
    monkeypatch.setattr("sys.argv", ["bench", "plan", "--mesh", "fsdp=2", "--compile", name])
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.run(bench.main)
    reason = f"no compiler for it (pip install 'hgpo_jax[{extra}]'): topology not implemented"
    assert capsys.readouterr().err == f"error: --compile {name}: {reason}\n"


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ("RESOURCE_EXHAUSTED: 20G of 15.75G hbm.\nLargest:", ConfigError, "^--compile v5e:2x4: update does not fit: .*hbm.$"),
        ("INTERNAL: a fault of the compiler", JaxRuntimeError, "a fault of the compiler"),
    ],
)
def test_a_program_that_the_compiler_finds_too_large_is_refused(said, error, match, monkeypatch):
    def lower():
        raise JaxRuntimeError(said)

    monkeypatch.setattr(plan, "target_of", lambda name, spec: Target(abstract_mesh(spec), "tpu-v5e", {}))
    monkeypatch.setattr(plan, "Programs", lambda *_: [("update", lower, 0)])
    monkeypatch.setattr("sys.argv", ["bench", "plan", "--mesh", "fsdp=8", "--compile", "v5e:2x4"])
    with pytest.raises(error, match=match):
        bench.main()


def test_every_target_has_the_memory_of_its_chip():
    assert set(TPUS.values()) <= set(memory.CHIPS)
    for gpu in GPUS.values():  # a card's own count leaves out what its driver keeps
        assert 0.98 < gpu.device_memory_size / memory.CHIPS[gpu.chip] <= 1.001


PROGRAM = """
import sys, jax
from jax.sharding import NamedSharding, PartitionSpec
from hgpo_jax.bench.compile_targets import target_of
mesh, chip, options = target_of(sys.argv[1] + ":2", "fsdp=-1")
a = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
print(jax.jit(lambda a: jax.numpy.sort(a @ a)).lower(a).compile(compiler_options=options).as_text())
"""


@pytest.mark.slow
@pytest.mark.needs("gpu-compiler")
@pytest.mark.parametrize("name", GPUS)
def test_xla_compiles_for_every_card(name):
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "num_partitions=2" in done.stdout and "__cublas" in done.stdout and "sort" in done.stdout
