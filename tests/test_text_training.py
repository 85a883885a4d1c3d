"""Text environments in training: a small random Qwen2.5 with the real tokenizer on real games and shops, end to end."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from hgpo_jax.rollout.episodes import Episodes
from tests.helpers.training import command, rows_of

SHARED = Path(__file__).parents[2] / "shared" / "data"
SMALL = (
    "iterations=2", "rollout.prompt_groups=2", "rollout.group_size=2", "cloning.episodes=8", "cloning.max_steps=20",
    "evaluation.episodes=4", "log.dump_every=1",
)  # fmt: skip
DATA = {"alfworld": SHARED / "alfworld" / "sample", "webshop": SHARED / "webshop"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with Qwen2.5's tokenizer, as the hub has it."""
    source, folder = SHARED / "qwen2.5", tmp_path_factory.mktemp("tokenizer")
    if not source.is_dir():
        pytest.skip("needs shared/data/qwen2.5")
    for name in ("tokenizer_config.json", "vocab.json", "merges.txt"):
        shutil.copy(source / name, folder / name)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    return folder


def data_of(environment):
    if not DATA[environment].is_dir():
        pytest.skip(f"needs shared/data/{environment}")
    if environment == "webshop":
        pytest.importorskip("regex")
    return DATA[environment]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["alfworld", "webshop", "household_text", "gymnasium:BabyAI-GoToObj-v0"])
def test_trains_end_to_end(environment, tokenizer, tmp_path):
    small = environment not in DATA
    if small:  # a policy with the environment's own words, cloned from its expert
        start = ["--config", "text_small", f"env.name={environment}", *SMALL, "rollout.response_limit=16"]
    else:
        start = ["--config", f"{environment}_tiny", f"data={data_of(environment)}", f"policy.tokenizer={tokenizer}"]
        start += ["rollout.response_limit=4"]
    folder = tmp_path / "run"
    start.append("env.options.max_turns=2" if ":" in environment else "env.max_turns=2")
    arguments = [*start, "log.tensorboard=false", f"run_dir={folder}", f"cache_dir={tmp_path / 'cache'}"]
    trained = command("-m", "hgpo_jax.train", *arguments, cwd=tmp_path).stdout
    assert "task: " in trained
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
    before = (folder / "evaluation.json").read_text()
    command("-m", "hgpo_jax.evaluate", folder, cwd=tmp_path)
    assert (folder / "evaluation.json").read_text() == before
    if small:
        assert "behaviour cloning" in trained
        shown = command("-m", "hgpo_jax.watch", folder, "--greedy", cwd=tmp_path).stdout
        assert shown.startswith("task: ") and shown.count("      probability ") == 2
    if environment == "alfworld":  # tests/run stops and continues runs of all kinds
        command("-m", "hgpo_jax.train", *arguments, "iterations=3", "--resume", "auto", cwd=tmp_path)
        assert [row["iteration"] for row in rows_of(folder)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ("alfworld", "1.5b"), ("alfworld", "7b"), ("webshop", "1.5b"), ("webshop", "7b"),
    ],
)
def test_the_papers_settings_pass_the_dry_run(environment, size, tokenizer, tmp_path):
    split = ["env.split=valid_train"] if environment == "alfworld" else []
    config = ["--config", f"{environment}_qwen2.5_{size}", f"data={data_of(environment)}", f"policy.tokenizer={tokenizer}"]
    out = command("-m", "hgpo_jax.train", *config, *split, "--dry-run", cwd=tmp_path).stdout
    assert "tasks to train on" in out
    peak = float(out.split("peak on each device")[1].split()[0])
    assert 10 < peak < 0.92 * 80  # of 80 GB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["env.name=alfworld", "warm_start=none", "policy.tokenizer=x", "data="], "env.data="),
        (["env.name=household_text", "policy.tokenizer=x"], "policy.tokenizer=x: warm_start=cloning is for a small policy"),
        (["env.name=alfworld", "policy=x"], "warm_start=cloning"),
        (["lora.rank=4"], "lora.rank=4"),
    ],
)
def test_refusals_write_nothing(arguments, fragment, tmp_path):
    failed = command("-m", "hgpo_jax.train", *arguments, cwd=tmp_path, code=2)
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1
    assert fragment in failed.stderr
    assert list(tmp_path.iterdir()) == []
