"""`python -m hgpo_jax.export`: what transformers and we read back is what was there, tokenizer included."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax import cli, export
from hgpo_jax.errors import ConfigError
from hgpo_jax.policy import load_policy

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]
QWEN = ROOT.parent / "shared" / "data" / "qwen2.5"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    export.main()


def tensors(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny", "llama_tiny"])
def test_a_folder_is_copied_in_shards(name, tmp_path, monkeypatch, capsys):
    run(monkeypatch, DATA / name, "--to", tmp_path / "out", "--shard-size", "20KB")
    assert "MB of weights" in capsys.readouterr().out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == sizes.keys()
    assert len(sizes) > 1
    assert max(sizes.values()) < 20_000 + 5_000  # the header comes on top
    before, after = tensors(DATA / name), tensors(tmp_path / "out")
    assert before.keys() == after.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    for key, value in before.items():
        assert value.tobytes() == after[key].tobytes()
    raw = json.loads((DATA / name / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"torch_dtype": "float32"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_conversion(tmp_path, monkeypatch):
    run(monkeypatch, DATA / "qwen2_tiny", "--to", tmp_path / "half", "--dtype", "bfloat16")
    half = load_policy(tmp_path / "half", dtype="bfloat16").params
    direct = load_policy(DATA / "qwen2_tiny", dtype="bfloat16").params
    for path in (("embed_tokens", "embedding"), ("layers", "mlp", "up_proj", "kernel")):
        a, b = half, direct
        for key in path:
            a, b = a[key], b[key]
        np.testing.assert_array_equal(a, b)
    assert {value.dtype.name for value in tensors(tmp_path / "half").values()} == {"bfloat16"}
    raw = json.loads((tmp_path / "half" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny", "llama_tiny"])
def test_transformers_loads_what_was_exported(name, dtype, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    export.export(DATA / name, tmp_path / "out", dtype, 20_000)
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder).to(getattr(torch, dtype))  # noqa: E731
    theirs, ours = load(DATA / name), load(tmp_path / "out")
    ids = torch.tensor(np.load(DATA / name / "expected.npz")["ids"]).long()
    assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_a_run_is_exported_from_its_policy(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match=r"has no policy/ yet.*hgpo_jax\.train --resume") as caught:
        run(monkeypatch, folder, "--to", tmp_path / "out")
    assert "\n" not in str(caught.value)
    shutil.copytree(DATA / "qwen2_tiny", folder / "policy")
    run(monkeypatch, folder, "--to", tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(DATA / "qwen2_tiny").keys()


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["FOLDER", "--to", "full"], "not empty"),
        (["FOLDER", "--to", "full/file"], "not empty"),
        (["EMPTY", "--to", "out"], "holds no config.json"),
        (["no-such-folder", "--to", "out"], "no such folder"),
        (["FOLDER", "--to", "full/file/out"], "full/file"),
        (["FOLDER", "--to", "out", "--shard-size", "5"], "--shard-size 5"),
        (["FOLDER", "--to", "out", "--shard-size", "0GB"], "--shard-size 0GB"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, fragment, tmp_path, monkeypatch, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    names = {"FOLDER": str(DATA / "qwen2_tiny"), "EMPTY": "empty"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["export", *(names.get(word, word) for word in words)])
    with pytest.raises(SystemExit) as caught:
        cli.run(export.main)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert fragment in said
    assert said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_broken_tensor_leaves_nothing(tmp_path):
    shutil.copytree(DATA / "qwen2_tiny", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="damaged"):
        export.export(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "hgpo_jax.export", str(DATA / "qwen2_tiny"), "--to", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, (tmp_path / "out" / "model.safetensors").is_file()) == (0, True), done.stderr
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1


# ---- the tokenizer of Qwen2.5 -------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "You tidy up."},
    {"role": "user", "content": "Where is the mug?\nLook."},
    {"role": "assistant", "content": "<think>drawer</think><action>open drawer 1</action>"},
    {"role": "user", "content": "Über 3 °C · 茶 🍵 \t  done"},
]
CHAT_TEXT = (
    "<|im_start|>system\nYou tidy up.<|im_end|>\n"
    "<|im_start|>user\nWhere is the mug?\nLook.<|im_end|>\n"
    "<|im_start|>assistant\n<think>drawer</think><action>open drawer 1</action><|im_end|>\n"
    "<|im_start|>user\nÜber 3 °C · 茶 🍵 \t  done<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """The tiny model with Qwen2.5's own tokenizer files."""
    if not (QWEN / "tokenizer_config.json").is_file():
        pytest.skip("needs shared/data/qwen2.5")
    folder = tmp_path_factory.mktemp("qwen") / "in"
    shutil.copytree(DATA / "qwen2_tiny", folder)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(QWEN / name, folder / name)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((QWEN / "tokenizer.json.gz").read_bytes()))
    return folder


def test_the_tokenizer_reads_and_writes_every_text(qwen_folder):
    tokenizer = load_policy(qwen_folder).tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 151645)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 151643)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == 151644
    assert tokenizer.bos_token is None
    for text in ("take mug 1 from drawer 1", " two  blanks\n\n", "12345", "naïve 茶 🍵", "def f(x):\n\treturn x"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
        assert max(ids) < 151643  # nothing special in plain text, and nothing put before or after it
    assert tokenizer("<|im_end|>")["input_ids"] == [151645]
    assert tokenizer("Hello world")["input_ids"] == [9707, 1879]


@pytest.mark.parametrize("way", ["export", "save"])
def test_tokenizer_and_chat_template_survive(way, qwen_folder, tmp_path):
    pytest.importorskip("jinja2", reason="chat templates need it")
    if way == "export":
        export.export(qwen_folder, tmp_path / "out")
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (qwen_folder / name).read_bytes()
    else:
        load_policy(qwen_folder).save(tmp_path / "out")
    before, after = load_policy(qwen_folder).tokenizer, load_policy(tmp_path / "out").tokenizer
    assert before.chat_template == after.chat_template
    for tokenizer in (before, after):
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHAT_TEXT
        ids = tokenizer(CHAT_TEXT)["input_ids"]
        assert ids.count(151644) == 5
        assert ids.count(151645) == 4
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == CHAT_TEXT
    assert before(CHAT_TEXT)["input_ids"] == after(CHAT_TEXT)["input_ids"]
    assert (before.eos_token_id, before.pad_token_id) == (after.eos_token_id, after.pad_token_id)


def test_the_default_system_prompt_is_the_templates(qwen_folder):
    pytest.importorskip("jinja2", reason="chat templates need it")
    text = load_policy(qwen_folder).tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")
