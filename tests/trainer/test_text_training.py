"""Text environments in training: a small random Qwen2.5 with the real tokenizer on real games and shops, end to end."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hgpo_jax.config import load, read_fields
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.build import build
from hgpo_jax.trainer.main import dry_run
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.glossary import unexplained
from tests.helpers.needs import DATA
from tests.helpers.tiny import mesh_of
from tests.helpers.training import command, rows_of

SMALL = (
    "iterations=2", "rollout.prompt_groups=2", "rollout.group_size=2", "cloning.episodes=8", "cloning.max_steps=20",
    "evaluation.episodes=4", "log.dump_every=1",
    "rollout.prompt_limit=254", "rollout.decode_batch_size=1",  # one program for prompts, one for responses
)  # fmt: skip
FOLDERS = {"alfworld": DATA / "alfworld" / "sample", "webshop": DATA / "webshop"}
REAL = pytest.mark.needs("data")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with Qwen2.5's tokenizer, as the hub has it."""
    source, folder = DATA / "qwen2.5", tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer_config.json", "vocab.json", "merges.txt"):
        shutil.copy(source / name, folder / name)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    return folder


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("environment", FOLDERS)
def test_trains_end_to_end(environment, tokenizer, tmp_path):
    folder = tmp_path / "run"
    command(
        "-m", "hgpo_jax.train", "--config", f"{environment}_tiny", f"data={FOLDERS[environment]}",
        "rollout.response_limit=4", f"policy.tokenizer={tokenizer}", "env.max_turns=2", "log.tensorboard=false",
        f"run_dir={folder}", f"cache_dir={tmp_path / 'cache'}", cwd=tmp_path,
    )  # fmt: skip
    rows = rows_of(folder)
    assert len(rows) == 2
    for row in rows:
        assert row["logp_difference"] < 1e-4
        assert row["excluded"] == 0
        assert row["tokens"] == row["prompt_tokens"] + row["response_tokens"]
    episodes = Episodes.load(folder / "episodes" / "iteration-00001.npz")
    report = json.loads((folder / "episodes" / "iteration-00001.json").read_text())
    assert episodes.mask.sum() == rows[1]["steps"]
    assert len(report["texts"]) > episodes.states.max()
    assert ("score" in json.loads((folder / "evaluation.json").read_text())) or environment != "webshop"


@pytest.mark.slow
@REAL
def test_the_papers_settings_are_rehearsed(tokenizer, tmp_path):
    """In bfloat16 on two devices of fsdp; Qwen2.5's words and template, random weights."""
    place = [f"data={FOLDERS['alfworld']}", f"policy.tokenizer={tokenizer}", f"cache_dir={tmp_path / 'cache'}"]
    fields = ["--config", "alfworld_qwen2.5_1.5b", "env.split=valid_train", *place]
    out = command("-m", "hgpo_jax.train", "--rehearse", *fields, cwd=tmp_path)
    assert "[5/5] export" in out.stderr and "not shown: the weights of Qwen/Qwen2.5-1.5B-Instruct" in out.stdout
    assert "tokenizer" not in out.stdout.split("not shown")[1]
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


@pytest.mark.slow
def test_a_sampler_that_differs_from_the_trainer_is_corrected_for(tmp_path):
    """In bfloat16, sums in another order give other log-probabilities."""
    folder = tmp_path / "run"
    common = [*SMALL, "env.max_turns=4", "log.tensorboard=false", f"cache_dir={tmp_path / 'cache'}", f"run_dir={folder}"]
    corrected = ["policy.compute_dtype=bfloat16", "learner.rollout_correction=token"]
    command("-m", "hgpo_jax.train", "--config", "text_small", *common, *corrected, cwd=tmp_path)
    for row in rows_of(folder):
        assert not unexplained(row)
        assert 1e-5 < row["logp_difference"] < 0.5
        assert 0 < row["correction/kl"] < 1e-3 and row["correction/truncated"] == 0
        assert row["correction/weight"] == pytest.approx(1, abs=0.02)
        assert 0.99 < row["correction/effective"] < 1 + 1e-5


@pytest.mark.slow
def test_given_weights_are_cloned_into_adapters(tmp_path):
    fields = ("--config", "text_small", *SMALL, "rollout.response_limit=16", "env.max_turns=3", "log.tensorboard=false",
              f"cache_dir={tmp_path / 'cache'}", "iterations=1")  # fmt: skip
    given = tmp_path / "given"
    build(load("text_small", fields[2:]), mesh_of()).policy.initial.save(given)
    more = (f"policy={given}", "lora.rank=2", "lora.targets=q_proj,down_proj", "cloning.lr=1e-2", "cloning.check_every=10")
    said = command(
        "-m", "hgpo_jax.train", *fields, *more, "cloning.stop_at=1", f"run_dir={tmp_path / 'run'}", cwd=tmp_path
    ).stdout  # fmt: skip
    losses = [tuple(map(float, found)) for found in re.findall(r"  loss ([\d.]+)  held-out loss ([\d.]+)", said)]
    assert len(losses) == 2 and losses[1][0] < losses[0][0] and losses[1][1] < losses[0][1]
    folders = given, tmp_path / "run" / "start", tmp_path / "run" / "policy"
    before, start, trained = (load_file(folder / "model.safetensors") for folder in folders)
    changed = {name for name in before if (before[name] != start[name]).any()}
    assert changed and all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in changed)
    assert {name for name in start if (start[name] != trained[name]).any()} <= changed
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "run" / "start")
    end = ("cloning.stop_at=0", "iterations=0", f"run_dir={tmp_path / 'fine'}")
    fine = command("-m", "hgpo_jax.train", *fields, *more, *end, cwd=tmp_path).stdout
    assert "warm start: not needed, the pretrained weights reach success " in fine
    alien = f"env.name={Path(__file__).parents[1] / 'rollout' / 'odd_env.py'}:Counting"
    other = [field for field in fields[2:] if not field.startswith("env.max_turns")]
    with pytest.raises(ConfigError, match=r"has no expert\(history_length\)"):
        build(load("text_small", [*other, *more, alien]), mesh_of())
    with pytest.raises(ConfigError, match=r"has no expert\(history_length\)"):
        dry_run(read_fields("text_small", [*other, *more, alien]), "never", ())


@pytest.mark.slow
@REAL
@pytest.mark.parametrize(("environment", "size"), [("alfworld", "7b"), ("webshop", "1.5b")])
def test_the_papers_settings_pass_the_dry_run(environment, size, tokenizer, tmp_path):
    split = ["env.split=valid_train"] if environment == "alfworld" else []
    config = ["--config", f"{environment}_qwen2.5_{size}", f"data={FOLDERS[environment]}", f"policy.tokenizer={tokenizer}"]
    out = command("-m", "hgpo_jax.train", *config, *split, "--dry-run", cwd=tmp_path).stdout
    assert "tasks to train on" in out
    peak = float(out.split("peak on each device")[1].split()[0])
    assert 10 < peak < 0.92 * 80  # of 80 GB
    assert list(tmp_path.iterdir()) == []
