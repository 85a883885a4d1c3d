"""Every kind of rollout trains in bfloat16 on several devices.

XLA ends the process for some programs that it cannot compile, so each run is a process of its own.
"""

import json
from pathlib import Path

import pytest

from hgpo_jax.config import load
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.policy import ModelConfig, Policy, initialize
from hgpo_jax.policy.tokenizer import embedding_rows, text_tokenizer
from hgpo_jax.setup.build import build
from tests.helpers.tiny import mesh_of
from tests.helpers.training import command, rows_of

SIZES = ("policy.hidden_size=32", "policy.intermediate_size=48", "policy.num_attention_heads=4", "policy.num_key_value_heads=2")
GAMES = Path(__file__).parents[1] / "alfworld" / "data"
PLAYED = {
    "household": ("--config", "household"),
    "text": ("--config", "text_small", "rollout.prompt_limit=254", "rollout.response_limit=16"),
    "device text": (
        "--config",
        "alfworld_tiny",
        f"data={GAMES}",
        "env.split=valid_train",
        "rollout.prompt_limit=512",
        "rollout.prompt_widths=2",
        "rollout.response_limit=16",
    ),
}
SMALL = (
    "iterations=1",
    "policy.compute_dtype=bfloat16",
    "env.max_turns=3",
    "rollout.prompt_groups=4",
    "rollout.group_size=2",
    "rollout.decode_batch_size=2",
    "learner.minibatch_size=16",
    "learner.microbatch_size=4",
    "cloning.max_steps=4",
    "cloning.check_every=2",
    "cloning.episodes=16",
    "cloning.batch_size=8",
    "evaluation.episodes=8",
    "log.tensorboard=false",
)
MESHES = ("data=2", "fsdp=2", "tensor=2", "data=2,fsdp=2,tensor=2")
# Every kind of rollout on every mesh, with the rank of its adapters; 0: none.
CASES = [(spec, played, 2 * ((i + j) % 2)) for i, played in enumerate(PLAYED) for j, spec in enumerate(MESHES)]
IN_CI = ("fsdp=2-household", "tensor=2-device text", "data=2,fsdp=2,tensor=2-text")  # .ci/by-hand.txt names the others


def name_of(spec: str, played: str, rank: int) -> str:
    name = f"{spec}-{played}"
    return f"{name}-{rank}" if name in IN_CI else f"by_hand-{name}-{rank}"


def save_policy(played: str, folder: Path) -> None:
    """Saves random weights that the rollout can read."""
    if played != "device text":
        _, name, *fields = PLAYED[played]
        return build(load(name, [*fields, *SIZES]), mesh_of()).policy.initial.save(folder)
    host = AlfworldText(sorted(GAMES.glob("json_*/*/*/*/game.tw-pddl")))
    begun = [host.reset(game) for game in range(3)]
    tokenizer = text_tokenizer(text for observation, commands in begun for text in (observation, *commands))
    model = ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Policy(model, initialize(model, 0, mesh_of()), tokenizer).save(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "played", "rank"), CASES, ids=[name_of(*case) for case in CASES])
def test_trains_evaluates_and_exports(spec, played, rank, tmp_path):
    given, run = tmp_path / "given", tmp_path / "run"
    save_policy(played, given)
    start = "warm_start=none" if played == "device text" else "warm_start=cloning"
    adapters = (f"lora.rank={rank}",) if rank else ()
    fields = (*SMALL, start, *adapters, f"policy={given}", f"mesh={spec}", f"cache_dir={tmp_path / 'cache'}")
    command("-m", "hgpo_jax.train", *PLAYED[played], *fields, f"run_dir={run}", cwd=tmp_path, devices=8)
    (row,) = rows_of(run)
    assert row["logp_difference"] < 0.5 and row["nonfinite_steps"] == 0
    if played != "text":
        return  # what they compile is what the run has compiled, for its own evaluation
    command("-m", "hgpo_jax.evaluate", run, "evaluation.temperature=0.5", cwd=tmp_path, devices=8)
    command("-m", "hgpo_jax.export", run, "--to", tmp_path / "out", "--dtype", "bfloat16", cwd=tmp_path, devices=8)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
