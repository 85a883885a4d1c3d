"""`python -m hgpo_jax.export`: what transformers and we read back is what was there, tokenizer included."""

import dataclasses
import gzip
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax import export
from hgpo_jax.policy import huggingface_folder, load_policy
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import read_tokenizer
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.byte_policy import byte_policy
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


def test_a_run_is_exported_from_its_policy_and_converted(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    shutil.copytree(DATA / "qwen2_tiny", tmp_path / "run" / "policy")
    run(monkeypatch, tmp_path / "run", "--to", tmp_path / "half", "--dtype", "bfloat16")
    params = (load_policy(folder, dtype="bfloat16").params for folder in (tmp_path / "half", DATA / "qwen2_tiny"))
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert {value.dtype.name for value in tensors(tmp_path / "half").values()} == {"bfloat16"}
    raw = json.loads((tmp_path / "half" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"


@pytest.mark.needs("data")
def test_qwens_tokenizer_and_chat_template_survive(tmp_path, monkeypatch):
    """The tiny model with Qwen2.5's own tokenizer files, exported and saved."""
    given = tmp_path / "in"
    shutil.copytree(DATA / "qwen2_tiny", given)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(QWEN / name, given / name)
    (given / "tokenizer.json").write_bytes(gzip.decompress((QWEN / "tokenizer.json.gz").read_bytes()))
    run(monkeypatch, given, "--to", tmp_path / "exported")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (given / name).read_bytes()
    tiny = load_policy(DATA / "qwen2_tiny")  # whose embedding has no rows for these tokens
    dataclasses.replace(tiny, tokenizer=read_tokenizer(str(given))).save(tmp_path / "saved")
    before, after = (read_tokenizer(str(folder)) for folder in (given, tmp_path / "saved"))
    chat = [{"role": "system", "content": "You tidy up."}, {"role": "user", "content": "Über 3 °C · 茶 🍵 \t  done"}]
    expected = "".join(f"<|im_start|>{said['role']}\n{said['content']}<|im_end|>\n" for said in chat)
    for tokenizer in (before, after):
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token) == (151645, 151643, None)
        assert tokenizer("Hello world")["input_ids"] == [9707, 1879]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
        ids = tokenizer(expected)["input_ids"]
        assert (ids.count(151644), ids.count(151645)) == (2, 2)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == expected
    assert before(expected)["input_ids"] == ids
    assert before.chat_template == after.chat_template


def test_several_chat_templates_are_kept(tmp_path):
    """As Hermes 2 and 3 have one for tools; a second save replaces the first."""
    policy = byte_policy()
    policy.tokenizer.chat_template = {"default": policy.tokenizer.chat_template, "tool_use": "{{ messages[0]['content'] }}!"}
    for _ in range(2):
        policy.save(tmp_path / "saved")
    export.export(tmp_path / "saved", tmp_path / "exported")
    assert load_policy(tmp_path / "exported").tokenizer.chat_template == policy.tokenizer.chat_template
    place = str(tmp_path / "exported")
    digest, tokenizer = huggingface_folder.digest(tmp_path / "exported"), load_tokenizer(place, "cache")
    tool = tmp_path / "exported" / "additional_chat_templates" / "tool_use.jinja"
    tool.write_text("other")
    assert huggingface_folder.digest(tmp_path / "exported") != digest
    assert load_tokenizer(place, "cache").chat_template == tokenizer.chat_template | {"tool_use": "other"}
    tool.with_name("notes.txt").write_text("a user's")
    with pytest.raises(ValueError, match="holds additional_chat_templates, which a save would not put there"):
        policy.save(tmp_path / "exported")
    with pytest.raises(ValueError, match=r"notes\.txt: is a file; choose a folder"):
        policy.save(tool.with_name("notes.txt"))


@pytest.mark.parametrize("source", ["saved by a run", "saved by transformers 5"])
def test_transformers_4_can_read_the_tokenizers_settings(source, tmp_path):
    """transformers 5 writes a class that 4 has not, and a list where 4 looks for a mapping."""
    policy = byte_policy()
    policy.save(tmp_path / "saved")
    folder = tmp_path / "exported"
    if source == "saved by transformers 5":
        file = tmp_path / "saved" / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        special = settings.pop("additional_special_tokens", [])
        file.write_text(json.dumps(settings | {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": special}))
    export.export(tmp_path / "saved", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in settings
    again = read_tokenizer(str(folder))
    assert again.all_special_tokens == policy.tokenizer.all_special_tokens
    text = "<|im_start|>user\nHow?<|im_end|>"
    assert again(text).input_ids == policy.tokenizer(text).input_ids


def test_of_a_run_whose_roles_have_policies_one_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for role in ("carrier", "searcher"):
        shutil.copytree(DATA / "qwen2_tiny", f"run/policy/{role}")
    Path("run/config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match="policies of their own; give one of run/policy/carrier, run/policy/searcher"):
        run(monkeypatch, "run", "--to", "out")
    run(monkeypatch, "run/policy/searcher", "--to", "out")
    assert tensors(Path("out")).keys() == tensors(DATA / "qwen2_tiny").keys()
