"""`train --rehearse`: what is smaller, what stays, and how a stage that fails is told."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hgpo_jax.config import CONFIGS, load, resolve
from hgpo_jax.policy import huggingface_folder, shardings
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.policy.presets import preset
from hgpo_jax.rollout.env_tokenizer import seeing_tokenizer
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import rehearsal
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.chat_tokenizers import byte_tokenizer

PUBLISHED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-VL-3B", "Qwen3-4B", "Llama-3.2-1B", "SmolLM2-135M")
AXES = st.fixed_dictionaries({axis: st.sampled_from((1, 2, 3, 4, 8)) for axis in ("data", "fsdp", "tensor")})


def divides(mesh, model) -> bool:
    try:
        shardings(model, mesh)
    except ValueError:
        return False
    return True


@settings(max_examples=20, deadline=None)
@given(AXES, st.sampled_from(PUBLISHED), st.integers(10, 200_000))
def test_the_mesh_divides_a_smaller_policy(axes, name, words):
    published, mesh = preset(name), abstract_mesh(",".join(f"{axis}={size}" for axis, size in axes.items()))
    assume(not published.vision or divides(mesh, published))  # a tower that it does not divide is refused by the run itself
    model = rehearsal.smaller_model(published, axes, words, sees=True)
    assert divides(mesh, model)
    assert model.vocab_size >= words and model.num_hidden_layers <= 2
    assert model.hidden_size == model.num_attention_heads * model.head_size
    ratio, before = (m.num_attention_heads // m.num_key_value_heads for m in (model, published))
    assert ratio % before == 0  # more where key-value heads are replicated
    assert (model.model_type, model.tie_word_embeddings) == (published.model_type, published.tie_word_embeddings)


def test_of_a_model_with_vision_the_language_model_is_rehearsed():
    seeing = huggingface_folder.read_config(Path(__file__).parents[1] / "policy" / "data" / "qwen2_5_vl_tiny")
    model = rehearsal.smaller_model(seeing, {"data": 1, "fsdp": 2, "tensor": 1}, 50)
    assert (model.model_type, model.vision, model.num_attention_heads) == ("qwen2", None, 3)


@pytest.mark.parametrize("axes", [{"data": 1, "fsdp": 2, "tensor": 1}, {"data": 2, "fsdp": 1, "tensor": 1}])
def test_where_there_are_pictures_it_keeps_its_eyes(axes):
    seeing = huggingface_folder.read_config(Path(__file__).parents[1] / "policy" / "data" / "qwen2_5_vl_tiny")
    deep = dataclasses.replace(seeing, vision=dataclasses.replace(seeing.vision, depth=9, fullatt_block_indexes=(4, 8)))
    model = rehearsal.smaller_model(deep, axes, 50, sees=True)
    assert (model.model_type, model.vision.depth, model.vision.fullatt_block_indexes) == ("qwen2_5_vl", 2, (1,))
    assert model.vision.image_token_id == seeing.vision.image_token_id
    assert (model.vision.hidden_size, model.vision.intermediate_size) == (8, 10)
    shardings(model, abstract_mesh(",".join(f"{axis}={size}" for axis, size in axes.items())))


def test_its_pictures_have_the_tokens_of_its_tokenizer():
    seeing, tokenizer = preset("Qwen2.5-VL-3B"), seeing_tokenizer("sokoban_pixels")
    vision = rehearsal.with_tokens_of(seeing, tokenizer).vision
    ids = [vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    assert rehearsal.with_tokens_of(seeing, byte_tokenizer()) == seeing
    assert rehearsal.with_tokens_of(preset("Qwen2.5-3B"), tokenizer) == preset("Qwen2.5-3B")


@settings(deadline=None)
@given(AXES, st.integers(1, 8), st.integers(1, 300), st.integers(1, 64))
def test_the_mesh_divides_what_is_counted(axes, group_size, minibatch, microbatch):
    sizes = [f"rollout.group_size={group_size}", f"learner.minibatch_size={minibatch}", f"learner.microbatch_size={microbatch}"]
    fields = rehearsal.smaller(load(None, sizes), axes)
    episodes = fields["rollout"]["prompt_groups"] * fields["rollout"]["group_size"]
    assert episodes % (axes["data"] * axes["fsdp"]) == 0
    assert fields["rollout"]["group_size"] == min(group_size, 2)  # a method may refuse a single one
    assert fields["learner"]["minibatch_size"] <= minibatch and fields["learner"]["microbatch_size"] <= microbatch


def test_what_is_not_counted_stays():
    config = load("alfworld_qwen2.5_1.5b", ["method=ppo", "learner.offload=true", "mesh=data=2,tensor=-1"])
    fields, before = rehearsal.smaller(config, rehearsal._axes(config.mesh)), config.model_dump(mode="json")
    counted = {*rehearsal.MOST, "rollout.prompt_groups", "rollout.decode_batch_size", "learner.minibatch_size", "log.wandb"}
    for section, values in before.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if f"{section}.{name}" not in counted:
                assert fields[section][name] == value, (section, name)
    assert (fields["method"], fields["mesh"]) == ("ppo", "data=2,fsdp=1,tensor=2")


@pytest.mark.parametrize("end, told", [("sys.exit('no such kernel')", "exit code 1"), ("os.abort()", "killed by SIGABRT")])
def test_a_stage_that_fails_is_named(end, told, tmp_path, monkeypatch, capfd):
    (tmp_path / "hgpo_jax.py").write_text(f"import os, sys\nprint('compiling the update', flush=True)\n{end}")
    monkeypatch.chdir(tmp_path)  # where `python -m hgpo_jax` is this program
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(RunError, match=f"resume for another.*{told}.*train --resume"):
        rehearsal._run("resume for another", ["train", "--resume", "R"], 2, tmp_path)
    assert "compiling the update" in capfd.readouterr().err


def test_stages_share_what_they_compile(tmp_path, monkeypatch):
    (tmp_path / "hgpo_jax.py").write_text("import os\nprint(os.environ['JAX_COMPILATION_CACHE_DIR'])")
    monkeypatch.chdir(tmp_path)  # where `python -m hgpo_jax` is this program
    monkeypatch.setenv("PYTHONPATH", "")
    for own, used in (("", tmp_path / "compiled"), (str(tmp_path / "own"), tmp_path / "own")):
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        if own:
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", own)
        rehearsal._run("report", ["report", "R"], 2, tmp_path)
        assert (tmp_path / "report.log").read_text().strip() == str(used)


def test_what_nothing_reads_stays():
    household = rehearsal.smaller(load("household"), rehearsal._axes("data=2"))["rollout"]
    assert (household["prompt_limit"], household["response_limit"]) == (4096, 512)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_what_a_run_is_allowed_its_rehearsal_is(name):
    for method in ("hgpo", "gspo" if load(name).env.name == "sokoban_pixels" else "ppo"):  # whose critic would be blind
        config = load(name, [f"method={method}", *(["policy=smollm2"] if name == "alfworld_agent" else [])])
        check_together(config)
        check_together(resolve(rehearsal.smaller(config, rehearsal._axes(config.mesh))))


def test_a_refused_rehearsal_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rehearsal, "fresh_tokenizer", lambda config: None)  # all texts of the household, which takes seconds
    (absent := tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="sizes are not known"):
        rehearsal.rehearse(load("household_smollm2", [f"policy={absent}"]))
    assert list(tmp_path.iterdir()) == [absent]


def test_a_rehearsal_that_fails_leaves_its_log(tmp_path, monkeypatch):
    def fail(title, command, devices, folder):
        (folder / "train.log").write_text("no such kernel")
        raise RunError(title)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rehearsal, "_run", fail)
    with pytest.raises(RunError, match="train one iteration"):
        rehearsal.rehearse(load("household", ["mesh=data=2"]))
    assert len(list(tmp_path.glob("*/train.log"))) == 1


def test_a_rehearsal_that_is_ended_leaves_nothing(tmp_path, monkeypatch):
    stage = "import os, time\nprint(os.getpid(), file=open('pid', 'w'))\nos.kill(os.getppid(), 15)\ntime.sleep(9)"
    (tmp_path / "hgpo_jax.py").write_text(stage)
    monkeypatch.chdir(tmp_path)  # where `python -m hgpo_jax` is this program
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            rehearsal.rehearse(load("household", ["mesh=data=2"]))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.glob("hgpo-rehearsal-*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_stages_of_a_run_without_weights(tmp_path):
    """tests/trainer/test_text_training.py goes through all of a run's with weights."""
    stages, unseen = rehearsal._prepare(load("household", ["mesh=data=2", f"cache_dir={tmp_path}"]), tmp_path)
    run = str(tmp_path / "run")
    assert [(title, *command[:2]) for title, command in stages] == [
        ("train one iteration", "train", "--config"), ("resume for another", "train", "--resume"),
        ("evaluate", "evaluate", run),
        ("report", "report", run),
    ]  # fmt: skip
    assert not unseen
    roles = ["env.name=household_team", "roles.searcher.policy=own", "roles.carrier.lr=1e-3", "mesh=data=2"]
    assert not rehearsal._prepare(load("household", [*roles, f"cache_dir={tmp_path}"]), tmp_path)[1]
