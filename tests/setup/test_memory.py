"""The memory plan against XLA's own analysis of the compiled programs, on small models."""

import dataclasses
import os
import re
from types import SimpleNamespace

import jax
import pytest

from hgpo_jax.bench import __main__ as bench
from hgpo_jax.bench import limits, plan
from hgpo_jax.config import cli, load
from hgpo_jax.policy import ModelConfig, shapes
from hgpo_jax.policy.mesh import abstract_mesh, make_mesh
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.setup import build, devices, memory
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.byte_policy import byte_policy
from tests.helpers.refusals import refused
from tests.helpers.serving import engine_of

SIZES = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
UNTIED = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "tie_word_embeddings": False}


def test_a_critic_beside_adapters_is_a_whole_network():
    mesh, whole = make_mesh("data=1", jax.devices()[:1]), sum(a.size for a in jax.tree.leaves(shapes(ModelConfig(**SIZES))))
    config = load(None, ["method=ppo", "lora.rank=2", "mesh=data=1", "policy.compute_dtype=bfloat16"])
    phases = memory.bytes_by_phase(config, mesh, memory.Workload(ModelConfig(**SIZES), 192, 64, steps=64, decode_batch=16))
    assert phases["always"]["critic"] == 4 * whole
    assert phases["always"]["optimizer"] > 2 * 4 * whole
    assert phases["update"]["gradients"] >= 2 * 4 * whole and phases["update"]["compute copy"] == 2 * whole


CHAT = "household_text env.template=conversation"
# environment (text: continuous batching), mesh, devices, micro-batch, decode batch, prompt, response, remat, changed sizes
CASES = [
    ("household", "data=1", 1, 8, 32, 448, 64, "none", {}),
    ("household", "data=2", 2, 2, 16, 100, 28, "dots", UNTIED),
    ("household", "fsdp=2", 2, 4, 16, 192, 64, "full", {"model_type": "llama"}),
    ("household_text", "fsdp=4,tensor=2", 8, 4, 16, 192, 64, "full", {}),
    (CHAT, "data=1", 1, 4, 16, 448, 32, "none", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("env", "spec", "devices", "micro", "decode_batch", "prompt", "response", "remat", "changes"), CASES)
def test_the_plan_is_within_15_percent_of_xla(env, spec, devices, micro, decode_batch, prompt, response, remat, changes):
    mesh = make_mesh(spec, jax.devices()[:devices])
    fields = {"learner.microbatch_size": micro, "learner.remat": remat, "mesh": spec, "env.name": env}
    config = load(None, " ".join(f"{name}={value}" for name, value in fields.items()).split())
    workload = memory.Workload(ModelConfig(**SIZES | changes), prompt, response, steps=64, decode_batch=decode_batch)
    phases = memory.bytes_by_phase(config, mesh, workload)
    always = sum(phases["always"].values())
    largest = {"sampling": 0, "update": 0}
    for name, lower, beside in plan.Programs(config, mesh, workload, always):
        if env == CHAT and name != "update":
            continue  # as in the first case
        phase = "update" if name == "update" else "sampling"
        largest[phase] = max(largest[phase], limits.compiled_bytes(lower().compile()) + beside)
    for phase, measured in largest.items():
        if not measured:
            continue
        expected = always + sum(phases[phase].values())
        assert abs(expected / measured - 1) < 0.15, (phase, expected, measured)


VISION = VisionConfig(
    depth=3, hidden_size=128, intermediate_size=256, num_heads=4, out_hidden_size=256, fullatt_block_indexes=(),
    mrope_section=(8, 12, 12), window_size=96, patch_size=4, spatial_merge_size=2, image_token_id=7, min_pixels=1,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "remat"), [(8, "none"), (16, "full")])
def test_the_plan_of_an_update_with_pictures_is_within_15_percent_of_xla(micro, remat):
    mesh = make_mesh("data=1", jax.devices()[:1])
    config = load("sokoban_pixels", [f"learner.microbatch_size={micro}", f"learner.remat={remat}", "mesh=data=1"])
    model = ModelConfig(**SIZES, model_type="qwen2_5_vl", vision=VISION)
    workload = memory.Workload(model, 100, 2, steps=64, decode_batch=16, picture=(96, 96))
    phases = memory.bytes_by_phase(config, mesh, workload)
    always = sum(phases["always"].values())
    lower = next(lower for name, lower, _ in plan.Programs(config, mesh, workload, always) if name == "update")
    measured, expected = limits.compiled_bytes(lower().compile()), always + sum(phases["update"].values())
    assert phases["update"]["pictures"] > 0.2 * expected  # the comparison is about them
    assert abs(expected / measured - 1) < 0.15, (expected, measured)


def test_adapters_need_their_weights_in_float32_before_and_after_a_run():
    """8 billion parameters in float32 beside their copy in bfloat16 take 6 bytes each, more than any step of a small batch."""
    fields = ["policy=Qwen/Qwen2.5-7B-Instruct", "lora.rank=8", "policy.compute_dtype=bfloat16", "env.name=household_text"]
    few = ["learner.microbatch_size=1", "learner.remat=full", "rollout.decode_batch_size=1", "rollout.prompt_limit=512"]
    mesh = abstract_mesh("data=1")
    for start, copies in (("none", 1), ("cloning", 2)):
        config = load(None, [*fields, *few, f"warm_start={start}"])
        workload = memory.workload_of(config, mesh)
        count = sum(a.size for a in jax.tree.leaves(shapes(workload.model)))
        phases = memory.bytes_by_phase(config, mesh, workload)
        assert phases["always"]["reference policy"] == 2 * count
        assert phases["loading"] == {"weights in float32": 4 * copies * count}
        assert memory.peak(phases) == sum(phases["always"].values()) + 4 * copies * count
    whole = load(None, [*fields, *few, "warm_start=none", "lora.rank=0"])
    assert memory.bytes_by_phase(whole, mesh, workload)["loading"] == {}


def test_cores_that_no_mesh_takes_leave_their_memory_to_the_others():
    one, two = (memory.device_limit(jax.devices()[:count]) for count in (1, 2))
    assert one and one // 2 == two


def test_a_gpu_s_limit_is_what_jax_has_reserved(monkeypatch):
    for name in memory.MEMORY_SHARES:
        monkeypatch.setenv(name, "")  # what is set is put back
        monkeypatch.delenv(name)
    devices.open_devices()
    (share,) = [os.environ.get(name) for name in memory.MEMORY_SHARES if name in os.environ]
    assert float(share) == memory.USABLE
    card = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 920})
    assert memory.device_limit([card]) == 1000
    memory.refuse_too_large("mesh=auto", {}, 920, 1000)
    with refused("mesh=auto: needs ", ConfigError):
        memory.refuse_too_large("mesh=auto", {"always": {}, "sampling": {}, "update": {}}, 921, 1000)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")  # a user's own stays
    devices.open_devices()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"


def test_what_is_offloaded_is_there_in_the_update_only():
    mesh = make_mesh("data=1", jax.devices()[:1])
    workload = memory.Workload(ModelConfig(**SIZES), 192, 64, steps=64, decode_batch=16)
    for method in ("hgpo", "ppo"):
        configs = [load(None, [f"method={method}", f"learner.offload={offload}"]) for offload in ("false", "true")]
        here, off = (memory.bytes_by_phase(config, mesh, workload) for config in configs)
        sums = lambda phases: {phase: sum(parts.values()) for phase, parts in phases.items()}  # noqa: E731
        moved = sums(here)["always"] - sums(off)["always"]
        assert moved == sum(here["always"].get(name, 0) for name in ("optimizer", "reference policy", "critic"))
        assert sums(off)["update"] == sums(here)["update"] + moved
        assert ("critic" in here["always"]) == (method == "ppo")


def test_a_store_has_its_bytes_and_holds_a_prompt_and_its_response():
    fields = ["env.name=agent", "env.command=true", "policy.tokenizer=any", "rollout.prompt_limit=200", "mesh=data=1"]
    policy, mesh = byte_policy(), make_mesh("data=1", jax.devices()[:1])
    workload = memory.Workload(policy.config, 200, 48, steps=64, decode_batch=4)
    smallest = -(-engine_of(policy).smallest_store // 2**20)
    none, some = (memory.bytes_by_phase(load(None, [*fields, f"rollout.store={n}"]), mesh, workload) for n in (0, smallest))
    assert sum(some["sampling"].values()) - sum(none["sampling"].values()) == smallest * 2**20
    large = dataclasses.replace(workload, prompt=2**20)
    with pytest.raises(ValueError, match=r"^rollout.store=1: the smallest that holds a prompt and its response is 257$"):
        memory.bytes_by_phase(load(None, [*fields, "rollout.store=1"]), mesh, large)


def test_the_command_prints_the_plan_and_refuses_what_does_not_fit(monkeypatch, capsys):
    def planned(*arguments):
        monkeypatch.setattr("sys.argv", ["bench", "plan", *arguments])
        cli.run(bench.main)
        return capsys.readouterr().out

    big = ["policy=Qwen/Qwen2.5-7B-Instruct", "policy.compute_dtype=bfloat16", "learner.remat=full", "warm_start=none"]
    fits = planned(*big, "--mesh", "fsdp=8", "--chip", "h100-80g", "learner.microbatch_size=8")
    assert re.search(r"peak on each device, planned \| [\d.]+ \| GiB \| \d+% \|", fits)
    with pytest.raises(SystemExit, match=r"^2$"):
        planned(*big, "--mesh", "fsdp=1", "--chip", "tpu-v5e")
    said = capsys.readouterr()
    assert re.fullmatch(r"error: mesh=fsdp=1: needs [\d.]+ GiB on each device, which has 16\.0; [^\n]*\n", said.err)
    assert "parameters" in said.out  # the plan that says why


def test_the_peak_is_that_of_the_larger_phase_and_a_part_of_the_memory_stays_free(capsys):
    phases = {"always": {"a": 2}, "sampling": {"b": 3, "c": 1}, "update": {"d": 1}}
    assert memory.peak(phases) == 6
    memory.refuse_too_large("mesh=auto", phases, 92, 100)
    with pytest.raises(ConfigError, match=r"^mesh=auto: needs "):
        memory.refuse_too_large("mesh=auto", phases, 93, 100)
    assert "peak on each device" in capsys.readouterr().out


@pytest.mark.parametrize("offload", ["false", "true"])
def test_processors_hold_the_state_again_while_a_checkpoint_is_written(offload, monkeypatch):
    """An update beside the writer needs parameters, moments and critic once more."""
    config, mesh = load(None, ["method=ppo", f"learner.offload={offload}"]), make_mesh("data=1", jax.devices()[:1])
    before, planned = memory.bytes_of_run(config, mesh), []
    monkeypatch.setattr(memory, "refuse_too_large", lambda mesh, phases, needed, limit: planned.append(phases))
    model = build.check_memory(config, mesh)
    weights = 4 * sum(a.size for a in jax.tree.leaves(shapes(model)))
    more = sum(planned[0]["update"].values()) - sum(before["update"].values())
    assert more == 2 * 3 * weights  # policy and critic, each with two moments
    assert (planned[0]["always"], planned[0]["sampling"]) == (before["always"], before["sampling"])


def test_an_evaluation_needs_no_room_for_learning(monkeypatch):
    """Of adapters, a run's policy is played with its whole weights, which could not be trained there."""
    config, mesh = load(None, ["method=ppo"]), make_mesh("data=1", jax.devices()[:1])
    plays = memory.of_playing(memory.bytes_of_run(config, mesh))
    assert plays["always"].keys() == {"parameters", "episodes"} and plays.keys() == {"always", "sampling"}
    monkeypatch.setattr(memory, "device_limit", lambda devices: 1.2 * memory.peak(plays))
    build.check_memory(config, mesh, trains=False)
    with refused("mesh=auto: needs ", ConfigError):
        build.check_memory(config, mesh)


@pytest.mark.parametrize(("dtype", "masks"), [("bfloat16", True), ("float32", False)])
def test_long_sequences_have_a_mask_for_cudnn_in_the_plan(dtype, masks):
    config, mesh = load(None, [f"policy.compute_dtype={dtype}"]), make_mesh("data=1", jax.devices()[:1])
    eight, sixteen = (
        memory.bytes_by_phase(
            config.model_copy(update={"learner": config.learner.model_copy(update={"microbatch_size": rows})}), mesh,
            memory.Workload(ModelConfig(**SIZES), 20_000, 480, steps=64, decode_batch=16),
        )["update"]["activations"]
        for rows in (8, 16)
    )  # fmt: skip
    assert ((sixteen - eight) / 8 > 4 * 20_480**2) == masks  # of which the mask is 3


PUBLISHED = ("env.name=household_text", "policy=Qwen/Qwen2.5-0.5B-Instruct")


def test_partial_rollouts_fill_more_slots_and_read_what_answers_began_with():
    mesh = make_mesh("data=1", jax.devices()[:1])
    fields = (*PUBLISHED, "rollout.decode_batch_size=400")
    whole, partial = (memory.workload_of(load(None, [*fields, f"rollout.keep={keep}"]), mesh) for keep in (1, 2))
    assert (whole.read, partial.read) == (whole.prompt, whole.prompt + whole.response)
    assert (whole.decode_batch, partial.decode_batch) == (256, 400)


def test_caches_in_which_answers_go_on_stay_beside_the_update():
    mesh = make_mesh("data=1", jax.devices()[:1])
    fields = (*PUBLISHED, "rollout.keep=2")
    for others, phase in (([], "update"), (["evaluation.every=1"], "always"), (["rollout.overlap=1"], None)):
        again, kept = (
            memory.bytes_of_run(load(None, [*fields, *others, f"rollout.reread={value}"]), mesh) for value in ("true", "false")
        )
        if phase:  # beside a rollout whose slots are the same ones, nothing more
            again[phase][memory.GOING_ON] = again["sampling"]["key-value cache"]
        assert kept == again
        apart = memory.bytes_apart(load(None, [*fields, *others, "rollout.reread=false", "rollout.overlap=1"]), mesh, mesh)
        counted = [[name for name, of_phase in phases.items() if memory.GOING_ON in of_phase] for phases in apart]
        assert counted == [[], ["always"] if phase == "always" else []]
