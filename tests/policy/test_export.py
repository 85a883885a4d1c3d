"""`python -m hgpo_jax.export`: what transformers and we read back is what was there, tokenizer included."""

import gzip
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax import cli, export
from hgpo_jax.errors import ConfigError
from hgpo_jax.policy import load_policy
from tests.helpers.needs import DATA as SHARED

DATA = Path(__file__).parent / "data"
QWEN = SHARED / "qwen2.5"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    export.main()


def tensors(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_a_folder_is_copied_in_shards(tmp_path, monkeypatch, capsys):
    source = DATA / "qwen2_tiny"
    run(monkeypatch, source, "--to", tmp_path / "out", "--shard-size", "20KB")
    assert "MB of weights" in capsys.readouterr().out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == sizes.keys()
    assert len(sizes) > 1
    assert max(sizes.values()) < 20_000 + 5_000  # the header comes on top
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    for key, value in before.items():
        assert value.tobytes() == after[key].tobytes()
    raw = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"torch_dtype": "float32"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_conversion(tmp_path, monkeypatch):
    run(monkeypatch, DATA / "qwen2_tiny", "--to", tmp_path / "half", "--dtype", "bfloat16")
    params = (load_policy(folder, dtype="bfloat16").params for folder in (tmp_path / "half", DATA / "qwen2_tiny"))
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert {value.dtype.name for value in tensors(tmp_path / "half").values()} == {"bfloat16"}
    raw = json.loads((tmp_path / "half" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "dtype"), [("qwen2_tiny", "float32"), ("qwen3_tiny", "bfloat16"), ("llama_tiny", "bfloat16")])
def test_transformers_loads_what_was_exported(name, dtype, tmp_path):
    import torch
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


@pytest.mark.needs("data")
def test_tokenizer_and_chat_template_survive(tmp_path, monkeypatch):
    """The tiny model with Qwen2.5's own tokenizer files, exported and saved."""
    given = tmp_path / "in"
    shutil.copytree(DATA / "qwen2_tiny", given)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(QWEN / name, given / name)
    (given / "tokenizer.json").write_bytes(gzip.decompress((QWEN / "tokenizer.json.gz").read_bytes()))
    run(monkeypatch, given, "--to", tmp_path / "exported")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (given / name).read_bytes()
    load_policy(given).save(tmp_path / "saved")
    templates = set()
    for folder in (given, tmp_path / "exported", tmp_path / "saved"):
        tokenizer = load_policy(folder).tokenizer
        templates.add(tokenizer.chat_template)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token) == (151645, 151643, None)
        assert tokenizer("Hello world")["input_ids"] == [9707, 1879]
        for text in ("take mug 1 from drawer 1", " two  blanks\n\n", "12345", "naïve 茶 🍵", "def f(x):\n\treturn x"):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
            assert max(ids) < 151643  # nothing special in plain text, and nothing put before or after it
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHAT_TEXT
        ids = tokenizer(CHAT_TEXT)["input_ids"]
        assert (ids.count(151644), ids.count(151645)) == (5, 4)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == CHAT_TEXT
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert len(templates) == 1
