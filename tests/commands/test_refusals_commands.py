"""Every command refuses a user's mistakes: exit code 2, one line that names what is wrong, nothing written."""

import contextlib
import importlib
import io
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from hgpo_jax.config import cli
from tests.helpers.inspected import EXAMPLE

HF = Path(__file__).parents[1] / "policy" / "data" / "qwen2_tiny"
LONG, NUL, DIGITS = "x" * 300, "a\0b", "9" * 5000
TEXT = ("env.name=household_text", "warm_start=none", "policy.tokenizer=run/policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs, policies and files of all kinds, most of them damaged."""
    folder = tmp_path_factory.mktemp("here")
    with contextlib.chdir(folder):
        fill()
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """The working folder; what a command sets for its whole process stays as it is, and nothing is reached that computes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jax, "set_mesh", lambda mesh: None)
    monkeypatch.setattr(type(jax.config), "update", lambda *_: None)
    monkeypatch.setattr("hgpo_jax.trainer.main.Training", lambda *_: pytest.fail("was not refused"))
    return folder


def fill():
    for name in ("run", "no_policy", "odd_config", "odd_evaluation"):
        shutil.copytree(EXAMPLE, name)
    shutil.rmtree("no_policy/policy")
    Path("odd_evaluation/evaluation.json").write_text('{"success": 1}')
    Path("bare").mkdir()
    Path("bare/config.yaml").write_text("seed: 1")
    Path("odd_config/config.yaml").write_text("a: [")
    for name in ("hf", "pickled", "garbage"):
        shutil.copytree(HF, name)
    Path("pickled/model.safetensors").rename("pickled/pytorch_model.bin")
    Path("garbage/model.safetensors").write_bytes(b"\xff" * 100)
    for name, content in {
        "file": b"", "broken.yaml": b"learner: {lr: 1", "list.yaml": b"- 1", "bytes.yaml": b"\xff\xfe\x00",
        "tag.yaml": b"seed: !!python/object/apply:os.system [ls]",
        "date.yaml": b"name: 2024-99-99", "nul.yaml": b'run_dir: "a\\0b"', "two.yaml": b"---\na: 1\n---\nb: 2\n",
        "twice.yaml": b"learner: {lr: 1}\nseed: 1\nlearner:\n  kl_weight: 1\n",
        "break.yaml": b'"a\\nb": 1', "number.yaml": b"1: 2",
    }.items():  # fmt: skip
        Path(name).write_bytes(content)
    Path("empty").mkdir()
    for split in ("train", "valid_seen"):
        Path("games", split, "a").mkdir(parents=True)
        Path("games", split, "a", "traj_data.json").write_text('{"task_type": "pick_and_place_simple"}')
        Path("games", split, "a", "game.tw-pddl").write_text('{"solvable": true}')
    Path("shop").mkdir()
    Path("shop/items_shuffle_1.json").write_text("[{}]")
    Path("shop/items_ins_1.json").write_text("{}")


def refused(monkeypatch, capsys, command: str, *arguments: str) -> str:
    """What a command says that ends with exit code 2."""
    name, *more = command.split()
    module = importlib.import_module(
        {"bench": "hgpo_jax.bench.__main__", "credit": "hgpo_jax.credit.__main__", "play": "hgpo_jax.envs.play",
         "oracle": "hgpo_jax.envs.webshop.oracle", "catalogue": "hgpo_jax.envs.webshop.catalogue"}.get(name, f"hgpo_jax.{name}")
    )  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("sys.argv", [name, *more, *arguments])
    with pytest.raises(SystemExit) as stop:
        if module.__name__.startswith("hgpo_jax.envs"):
            cli.command_line.run(module.main, (ValueError, ImportError))
        else:
            cli.run(module.main)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and said.err.startswith("error: "), said.err
    assert len(said.err) < 1500 and "\x1b" not in said.err
    return said.err


CONFIG = [
    ("none", "none: no such file"), ("", "--config : no such file"), (LONG, "too long"), (NUL, "no such file"),
    ("empty", "no such file"), ("broken.yaml", "not a YAML file"), ("list.yaml", "expected fields"),
    ("bytes.yaml", "not a YAML file"), ("tag.yaml", "python/object"),
    ("date.yaml", "month"), ("nul.yaml", "control character"), ("two.yaml", "single document"),
    ("break.yaml", "no such field"), ("number.yaml", "1: no such field"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "part"), CONFIG, ids=[file[:12] or "empty name" for file, _ in CONFIG])
def test_configurations(file, part, here, monkeypatch, capsys):
    for command in ("train --dry-run", "bench plan", "bench train", "evaluate hf --seeds 1")[: 4 if file == "none" else 1]:
        assert part in refused(monkeypatch, capsys, command, "--config", file)


@pytest.mark.parametrize("command", ["train", "evaluate", "export", "report", "bench", *(
    f"bench {name}" for name in ("advantages", "envs", "plan", "sample", "train", "update")
), "play", *(f"play {name}" for name in ("household", "sokoban", "alfworld", "webshop")), "oracle", "catalogue"])  # fmt: skip
def test_unknown_options(command, here, monkeypatch, capsys):
    assert "--help explains" in refused(monkeypatch, capsys, command, "--bogus", "x\ny\x1b[2J")


CASES = [
    ("train", ["--mesh", "data=16"], "mesh='data=16': needs 16 devices, 8 are available"),
    ("train", ["rollout.prompt_groups=3", "rollout.group_size=3", "--mesh", "data=8"], "does not divide the 9 episodes"),
    ("train", ["--mesh", "tensor=8"], "which tensor = 8 does not divide"),
    ("train", [f"seed={DIGITS}"], "seed="),
    ("train", ["policy.dtype=bfloat16"], "policy.dtype=bfloat16: is fixed at float32"),
    ("train", ["learner.lr=1e400"], "learner.lr='1e400'"),
    ("train", ["name=a\nb"], "name='a\\nb'"),
    ("train", ["run_dir=file"], "run_dir=file: is a file"),
    ("train", ["run_dir=nothing://x"], "run_dir='nothing://x': nothing:// is not known; give a folder of this machine, gs://"),
    ("train", ["--resume", "memory://no/run"], "memory://no/run: not the folder of a run"),
    ("train --distributed", ["run_dir=memory://bucket/run"], "mount the bucket, and give its path"),
    ("report", ["run", "--to", "gs://bucket/report.html"], "gs://bucket/report.html: must be a place of this machine"),
    ("train", ["cache_dir=s3://bucket"], "cache_dir='s3://bucket': must be a folder of this machine"),
    ("train", ["cache_dir=file"], "cache_dir=file: part of the path is a file"),
    ("train", ["seed=true"], "seed=True: true and false are not values"),
    ("train", ["run_dir=run"], "--resume run"),
    ("train", [f"run_dir={NUL}"], "run_dir="),
    ("train", ["--resume", "nowhere"], "--resume nowhere"),
    ("train", ["--resume", "run", "learner.lr=9"], "--allow-change learner.lr"),
    ("train", ["--resume", "run", "--allow-change", "learner.lrr"], "--allow-change learner.lrr: no such field"),
    ("train", ["--resume"], "--resume"),
    ("train", ["--resume", "auto", "critic.lr=1"], "critic.lr=1: method=hgpo has no critic; leave it out"),
    ("train --distributed", ["--resume", "auto", "run_dir=new", "lora.alpha=8"], "lora.alpha=8: there are no adapters"),
    ("train", ["--resume", "auto", "run_dir=run", "critic.lr=1"], "give what the run in run began with"),
    ("train", ["--allow-change", "seed"], "--allow-change seed: no run is resumed; leave it out, or give --resume"),
    ("train", ["--resume", "auto", "--allow-change", "learner.lrr"], "--allow-change learner.lrr: no such field; did you mean"),
    ("train", ["--rehearse", "--dry-run"], "--rehearse: --dry-run stops before anything is played; leave out one of the two"),
    ("train", ["--rehearse", "--distributed"], "--distributed: --rehearse is of one process; leave out one of the two"),
    ("train", ["--dry-run", "--distributed"], "--distributed: --dry-run is of one process; leave out one of the two"),
    ("train", ["--rehearse", "--resume", "auto"], "--resume auto: a rehearsal begins anew; leave it out"),
    ("train", ["--config", "twice.yaml"], "learner: stands in line 1 and again in line 3; leave one of them out"),
    ("train", ["env.size=99"], "env.size=99"),
    ("train", ["env.tasks=[]"], "env.tasks"),
    ("train", ["env.rooms=bedroom", "env.tasks=heat"], "rooms"),
    ("train", ["run_dir=games"], "not empty"),
    ("train", ["policy.hidden_size=7"], "policy.hidden_size=7"),
    ("train", ["policy.num_hidden_layers=100000"], "GiB on each device"),
    ("train", ["rollout.prompt_groups=100000000"], "GiB on each device"),
    ("train", ["warm_start=none", "policy=nowhere"], "policy nowhere: no such folder"),
    ("train", ["warm_start=none", "policy=pickled"], "pytorch_model.bin is a pickle"),
    ("train", ["warm_start=none", "policy=garbage"], "model.safetensors is damaged"),
    ("train", ["warm_start=none", "policy=hf"], "does not hold the words"),
    ("train", ["lora.rank=4"], "lora.rank=4"),
    ("train", ["env.name=household_text", "warm_start=none", "policy.tokenizer=nowhere"], "policy.tokenizer=nowhere"),
    ("train", ["env.name=household_text", "policy.tokenizer=tok"], "warm_start=cloning is for a small policy"),
    ("train", [*TEXT, "--dry-run", "rollout.stop=[x]"], "no chat template"),
    ("train", [*TEXT, "--dry-run", "rollout.prompt_limit=32768"], "response_limit=512 more than the 32768 tokens"),
    ("train", ["--dry-run", "mesh=data=7"], "mesh=data=7: data x fsdp = 7 does not divide the 256 episodes"),
    ("train", ["--dry-run", "method=gdpo"], "method=gdpo: needs signals, and neither env.name=household nor"),
    ("train", [*TEXT, "env.name=alfworld"], "env.data"),
    ("train", [*TEXT, "env.name=alfworld", "data=nowhere"], "env.data=nowhere"),
    ("train", [*TEXT, "env.name=alfworld", "data=empty"], "env.data=empty"),
    ("train", [*TEXT, "env.name=webshop", "data=empty"], "items_shuffle"),
    ("evaluate", [], "RUN"),
    ("evaluate", ["nowhere"], "nowhere: not the folder of a run"),
    ("evaluate", ["file", "--config", "household", "--panel", "household"], "file: is a file, which has no folder for its"),
    ("evaluate", ["no_policy"], "no_policy: this run has not ended; continue it with "),
    ("evaluate", ["odd_config"], "odd_config/config.yaml: not a YAML file"),
    ("evaluate", ["run", "--seeds", "²"], "--seeds"),
    ("evaluate", ["run", "evaluation.episodes=9999999999"], "must be less than or equal to 1000000"),
    ("evaluate", ["run"], "policy run/policy: holds no config.json"),
    ("export", ["hf"], "--to"),
    ("export", ["nowhere", "--to", "out"], "nowhere: no such folder"),
    ("export", [LONG, "--to", "out"], "file name too long"),
    ("export", ["no_policy", "--to", "out"], "has no policy/ yet"),
    ("export", ["empty", "--to", "out"], "holds no config.json"),
    ("export", ["garbage", "--to", "out"], "is damaged"),
    ("export", ["hf", "--to", "run"], "--to run: already exists"),
    ("export", ["hf", "--to", "file/x"], "file/x: cannot be written: not a directory"),
    ("export", ["hf", "--to", "out", "--dtype", "int8"], "--dtype"),
    ("export", ["hf", "--to", "out", "--shard-size", "5"], "--shard-size 5"),
    ("export", ["hf", "--to", "out", "--shard-size", "0GB"], "--shard-size 0GB"),
    ("report", [], "RUN"),
    ("report", ["empty"], "holds no config.yaml"),
    ("report", ["run", "--dumps", "x"], "--dumps"),
    ("report", ["run", "--groups", "-1"], "--groups"),
    ("report", ["run", "--to", "file/x"], "--to file/x"),
    ("report", ["run", "--to", "empty"], "--to empty"),
    ("report", ["run", "--to", "no/such/folder.html"], "--to no/such/folder.html"),
    ("report", ["bare"], "bare: nothing to show"),
    ("report", ["odd_evaluation"], "not an evaluation"),
    ("watch", ["nowhere"], "nowhere: not the folder of a run that has ended"),
    ("watch", ["run", "policy=hf"], "policy=hf: the policy is that of run; leave it out"),
    ("watch", ["nowhere", "--task", "-1"], "--task -1: must be from 0 to"),
    ("chat", ["nowhere"], "nowhere: no such folder"),
    ("chat", ["hf", "--temperature", "-1"], "--temperature -1.0: must be from 0 to 10"),
    ("chat", ["hf", "--top-p", "0"], "--top-p 0.0"),
    ("chat", ["hf", "--max-tokens", "0"], "--max-tokens 0"),
    ("credit", ["bogus"], "bogus"),
    ("credit", ["score", "empty"], "empty: holds no snapshots"),
    ("credit", ["score", "empty", "--method", "hgpo gamma=1"], "gamma=1: is the snapshots' own"),
    ("credit", ["snapshot", "out", "--levels", "20,200"], "20,200: give percents"),
    ("credit", ["snapshot", "out", "--batches", "1"], "--batches: 1: must be a whole number from 2"),
    ("credit", ["snapshot", "out", "--run", "empty"], "holds no config.yaml"),
    ("credit", ["snapshot", "out", "--run", "run", "iterations=3"], "--run: has its own configuration"),
    ("credit", ["snapshot", "out", "--run", "run"], "run: "),
    ("bench", ["bogus"], "bogus"),
    ("bench advantages", ["--repeats", "0"], "--repeats"),
    ("bench advantages", ["--json", "no/such.json"], "--json no/such.json"),
    ("bench advantages", ["--json", "/dev/null"], "--json /dev/null: cannot be written; give a file"),
    ("bench envs", ["--products", "1"], "--products"),
    ("bench plan", [], "give all sizes"),
    ("bench plan", ["--mesh", "data=0"], "must be positive"),
    ("bench plan", ["--mesh", "data=99999999"], "the largest mesh"),
    ("bench plan", ["--mesh", "data=1", "--compile", "x"], "--compile x"),
    ("bench plan", ["--mesh", "fsdp=7", "policy=Qwen/Qwen2.5-7B-Instruct"], "does not divide"),
    ("bench sample", ["--batch", DIGITS], "--batch"),
    ("bench sample", ["--mesh", "data=x"], "--mesh data=x"),
    ("play", [], "ENVIRONMENT"),
    ("play", ["chess"], "chess"),
    ("play sokoban", ["--boxes", "5"], "boxes=5"),
    ("play household", ["--tasks", "cook"], "cook"),
    ("play household", ["--turns", "0"], "--turns: 0: must be a whole number"),
    ("play household", ["--seed", DIGITS], "--seed"),
    ("play alfworld", ["no/such/game"], "no such file"),
    ("play alfworld", ["broken.yaml"], "JSON"),
    ("play alfworld", ["empty"], "no game.tw-pddl"),
    ("play alfworld", ["games/train/a/game.tw-pddl"], "'pddl_domain' is missing"),
    ("play alfworld", [LONG], "check the path"),
    ("play webshop", ["shop/items_shuffle_1.json", "shop/items_ins_1.json"], "product 0, field 'asin'"),
    ("play webshop", ["empty"], "no built catalogue"),
    ("oracle", [], "ITEMS"),
    ("oracle", ["file"], "attributes is missing"),
    ("oracle", ["broken.yaml", "broken.yaml"], "not readable as JSON"),
    ("catalogue", ["nowhere", "nowhere", "out"], "nowhere: no such file"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "arguments", "part"), CASES, ids=[f"{c} {' '.join(a)[:40]!r}" for c, a, _ in CASES])
def test_mistakes(command, arguments, part, here, monkeypatch, capsys):
    before = sorted(path for path in here.rglob("*") if "cache" not in path.name)
    assert part in refused(monkeypatch, capsys, command, *arguments)
    assert sorted(path for path in here.rglob("*") if "cache" not in path.name) == before


@pytest.fixture
def run(tmp_path):
    """A run of one's own."""
    return shutil.copytree(EXAMPLE, tmp_path / "run")


DUMPS = {
    "pickled": lambda e: e | {"rewards": np.array([object()], object)},
    "a shape": lambda e: e | {"rewards": e["rewards"][:1]},
    "a number below 0": lambda e: e | {"groups": e["groups"] - 100},
    "no number": lambda e: e | {"rewards": e["rewards"] * np.nan},
}


@pytest.mark.parametrize("name", DUMPS)
def test_damaged_dumps(name, run, monkeypatch, capsys):
    file = run / "episodes" / "iteration-00009.npz"
    with np.load(file) as arrays:
        changed = DUMPS[name](dict(arrays))
    np.savez(file, **changed)
    said = refused(monkeypatch, capsys, "report", str(run))
    assert "iteration-00009.npz: not a dump of Episodes" in said or "the dump of iteration 9 is damaged" in said


ROWS = [
    b'{"iteration": 0, "success": 1' + b"0" * 400 + b"}\n",
    b"\xff\n",
    b"[1]\n",
    b'{"success": 1}\n',
    b'{"iteration": 0, "success": "x"}\n',
]


@pytest.mark.parametrize("content", ROWS)
def test_damaged_metrics(content, run, monkeypatch, capsys):
    (run / "metrics.jsonl").write_bytes(content)
    assert "run/metrics.jsonl: line 1 is not a row" in refused(monkeypatch, capsys, "report", str(run))


@pytest.mark.parametrize("content", ["{}", '{"texts": [1]}', "[" * 9999])
def test_a_damaged_report_beside_a_dump(content, run, monkeypatch, capsys):
    (run / "episodes" / "iteration-00009.json").write_text(content)
    assert "iteration-00009.json: not the report" in refused(monkeypatch, capsys, "report", str(run))
