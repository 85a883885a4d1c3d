"""Programs of a configuration, compiled in a process of its own for devices that are not there, and what is in them."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.needs import DATA

ROOT = Path(__file__).parents[2]
GAMES = ROOT / "tests" / "alfworld" / "data"
# Caches whose last or second last dimension in memory is the heads, which are few: tiles of a TPU pad them.
HEADS_LAST = re.compile(r"bf16\[(?:\d+,){3}\d+\]\{(?:\d,)?1,")


def compiled(config: str, devices: str, mesh: str, programs: str, layers: int) -> dict[str, dict]:
    """`look` at programs of `bench plan`, named between commas: each one's findings, with so many layers, its bytes on each
    device, and those planned for its phase."""
    command = [sys.executable, "-m", "tests.helpers.for_devices", config, devices, mesh, programs, str(layers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    if devices.startswith("v") and int(layers) == 2:
        # Half the time (3:01 instead of 6:03 for the update), the same kernels and gathers, 6 % fewer bytes. All layers, by
        # hand, are compiled as for a run.
        environment["JAX_EXEC_TIME_OPTIMIZATION_EFFORT"] = "-1.0"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def look(text: str, layers: int, vocabulary: int, parts: int, width: int, tokens: int) -> dict:
    """What must not be in a compiled program: gathers of all layers' weights, an array of all tokens by the vocabulary, a table
    in float32; and the kernels that must."""
    gathered, held, widened = set(), set(), set()
    for shape in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        for sizes in re.findall(r"\w+\[([\d,]+)\]", shape):
            dims = [int(n) for n in sizes.split(",")]
            if dims[0] in (layers, layers - 1) and math.prod(dims) >= layers * width * width // 8:
                gathered.add(sizes)
    for dtype, sizes in re.findall(r"(f32|bf16)\[([\d,]+)\]", text):
        dims = [int(n) for n in sizes.split(",")]
        of = next((n for n in dims if n in (vocabulary, vocabulary // parts)), None)
        if of and not {width, width // parts} & set(dims) and math.prod(dims) // of >= tokens:
            held.add(sizes)
        if of and width in dims and dtype == "f32":
            widened.add(sizes)
    loops = re.findall(r"= \((.*?)\) while\(", text)
    return {
        "stacks gathered": sorted(gathered), "vocabularies held": sorted(held), "tables widened": sorted(widened),
        "splash": text.count("tpu_custom_call"),
        "cudnn": len(re.findall(r'custom_call_target="__cudnn\$fmha', text)),
        "calls of the host": re.findall(r"callback|infeed|outfeed|send\(|recv\(", text),
        "padded": sorted({shape for carried in loops for shape in HEADS_LAST.findall(carried)}),
    }  # fmt: skip


def main(name: str, devices: str, spec: str, programs: str, layers: str) -> None:
    from hgpo_jax import config
    from hgpo_jax.bench import limits, plan
    from hgpo_jax.bench.compile_targets import target_of
    from hgpo_jax.setup import memory

    played = [f"data={GAMES}", "env.split=valid_train", "env.compiled=true", f"policy.tokenizer={DATA / 'qwen2.5'}"]
    fields = played if programs == "rollout" else []
    settings = config.load(name, [f"mesh={spec}", *fields])
    mesh, _, options = target_of(devices, spec)
    workload = memory.workload_of(settings, mesh)
    model = dataclasses.replace(workload.model, num_hidden_layers=int(layers))
    workload = dataclasses.replace(workload, model=model)
    phases = memory.bytes_by_phase(settings, mesh, workload)
    always = sum(phases["always"].values())
    rows, found = max(settings.learner.microbatch_size, mesh.shape["fsdp"]), {}
    for program, lower, beside in plan.Programs(settings, mesh, workload, always):
        if program not in programs.split(","):
            continue
        done = lower().compile(compiler_options=options)
        planned = always + sum(phases["update" if program == "update" else "sampling"].values())
        found[program] = {"bytes": limits.compiled_bytes(done) + beside, "planned": planned} | look(
            done.as_text(), model.num_hidden_layers, model.vocab_size, mesh.shape["fsdp"] * mesh.shape["tensor"],
            model.hidden_size, rows * workload.response,
        )  # fmt: skip
    assert found.keys() == set(programs.split(","))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
