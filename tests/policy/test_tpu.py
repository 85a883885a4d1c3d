"""The paper's settings through the real TPU compiler, without a TPU: they fit, and nothing large is gathered or held."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.needs import DATA

ROOT = Path(__file__).parents[2]
GAMES = ROOT / "tests" / "alfworld" / "data"
# The smallest settings that the README gives. Two layers show what all do, in minutes of a core;
# .ci/by-hand.txt names the cases that CI leaves out.
CASES = [
    ("1.5b", "v5e:2x4", "fsdp=8", "prefill", 2), ("1.5b", "v5e:2x4", "fsdp=8", "decode", 2),
    ("1.5b", "v5e:2x4", "fsdp=8", "update", 2), ("1.5b", "v5e:2x4", "fsdp=8", "update", 28),
    ("7b", "v5e:4x4", "fsdp=8,tensor=2", "update", 28),
    pytest.param("1.5b", "v5e:2x4", "fsdp=8", "rollout", 28, marks=pytest.mark.needs("data")),
]  # fmt: skip
CHIP = {"v5e": 16, "v5p": 95, "v6e": 32}  # GiB


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(("size", "topology", "mesh", "program", "layers"), CASES)
def test_the_papers_settings_compile_and_fit(size, topology, mesh, program, layers):
    command = [sys.executable, __file__, f"alfworld_qwen2.5_{size}", topology, mesh, program, str(layers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] < 0.92 * CHIP[topology.partition(":")[0]] * 2**30
    assert found["stacks gathered"] == []
    assert found["vocabularies held"] == []
    assert (found["kernels"] > 0) == (program != "decode")  # splash attention
    assert found["padded"] == [] or program != "decode"
    assert not found["calls of the host"]


HEADS_LAST = re.compile(r"bf16\[(?:\d+,){3}\d+\]\{(?:\d,)?1,")


def look(text: str, layers: int, vocabulary: int, parts: int, width: int, tokens: int) -> dict:
    """What must not be in a compiled program: gathers of all layers' weights, an array of all tokens by the vocabulary."""
    gathered, held = set(), set()
    for shape in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        for sizes in re.findall(r"\w+\[([\d,]+)\]", shape):
            dims = [int(n) for n in sizes.split(",")]
            if dims[0] in (layers, layers - 1) and math.prod(dims) >= layers * width * width // 8:
                gathered.add(sizes)
    for sizes in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text):
        dims = [int(n) for n in sizes.split(",")]
        of = next((n for n in dims if n in (vocabulary, vocabulary // parts)), None)
        if of and not {width, width // parts} & set(dims) and math.prod(dims) // of >= tokens:
            held.add(sizes)
    loops = re.findall(r"= \((.*?)\) while\(", text)
    return {
        "stacks gathered": sorted(gathered), "vocabularies held": sorted(held), "kernels": text.count("tpu_custom_call"),
        "calls of the host": re.findall(r"callback|infeed|outfeed|send\(|recv\(", text),
        # Caches whose last or second last dimension in memory is the heads, which are few: tiles pad them.
        "padded": sorted({shape for carried in loops for shape in HEADS_LAST.findall(carried)}),
    }


def test_what_must_not_be_there_is_seen():
    sizes = {"layers": 28, "vocabulary": 1024, "parts": 8, "width": 64, "tokens": 4096}
    found = look("%a = bf16[27,64,512] all-gather(%b)\n%c = f32[4096,128] dot(%d)\n%e = bf16[64,1024] f(%g)", **sizes)
    assert found.pop("calls of the host") == found.pop("padded") == []
    assert found == {"stacks gathered": ["27,64,512"], "vocabularies held": ["4096,128"], "kernels": 0}
    cache = "%%a = (bf16[16,2,64,1536]{%s:T(8,128)(2,1)}) while(%%b)"
    assert look(cache % "2,1,3,0", **sizes)["padded"] == ["bf16[16,2,64,1536]{2,1,"]  # if not written head by head
    assert look(cache % "2,3,1,0", **sizes)["padded"] == []
    assert look("%a = bf16[64,512] all-gather(%b)\n%c = f32[440,128] dot(%d)", **sizes)["vocabularies held"] == []


def main(name: str, topology: str, spec: str, program: str, layers: str) -> None:
    from hgpo_jax import config
    from hgpo_jax.bench import limits, plan
    from hgpo_jax.setup import memory

    played = [f"data={GAMES}", "env.split=valid_train", "env.compiled=true", f"policy.tokenizer={DATA / 'qwen2.5'}"]
    fields = played if program == "rollout" else []
    settings = config.load(name, [f"mesh={spec}", *fields])
    mesh, _ = plan._tpu_mesh(topology, spec)
    workload = memory.workload_of(settings, mesh)
    model = dataclasses.replace(workload.model, num_hidden_layers=int(layers))
    workload = dataclasses.replace(workload, model=model)
    always = sum(memory.bytes_by_phase(settings, mesh, workload)["always"].values())
    lower, beside = {name: rest for name, *rest in plan.Programs(settings, mesh, workload, always)}[program.split()[0]]
    compiled = lower().compile()
    rows = max(settings.learner.microbatch_size, mesh.shape["fsdp"])
    found = {"bytes": limits.compiled_bytes(compiled) + beside} | look(
        compiled.as_text(), model.num_hidden_layers, model.vocab_size, mesh.shape["fsdp"] * mesh.shape["tensor"],
        model.hidden_size, rows * workload.response,
    )  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
