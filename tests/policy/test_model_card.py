"""The card of a saved policy: hubs read its front matter, people the rest."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from hgpo_jax.config import load
from hgpo_jax.policy import model_card

RESULT = {
    "episodes": 140, "temperature": 0.4, "success": {"sampled": 0.75, "greedy": 0.625},
    "interval": {"sampled": [0.671, 0.815], "greedy": [0.54, 0.7]}, "turns": {"sampled": 21.25, "greedy": 24.0},
    "invalid": {"sampled": 0.1, "greedy": 0.2},
    "by_task": {"sampled": {"pick": 0.9, "clean": 0.6}, "greedy": {"pick": 0.8}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy").mkdir()
    return tmp_path / "policy"


def test_a_hub_and_a_reader_find_what_they_look_for(folder):
    config = load(None, ["method=gigpo", "iterations=7"])
    model_card.write(folder, config, 98_368, RESULT)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert {"reinforcement-learning", "gigpo", "household"} <= set(card.data.tags)
    assert card.data.base_model is None and card.data.license is None
    for words in (
        "98,368 parameters", "7 iterations of", "after behaviour cloning",
        "| sampled at temperature 0.4 | 75.0% | 67.1% to 81.5% |",
        "| greedy | 62.5% |", "| pick | 90.0% | 80.0% |", "| clean | 60.0% |  |", "AutoModelForCausalLM",
    ):  # fmt: skip
        assert words in card.text, words
    assert "\n\n\n" not in card.text
    shown = card.text.partition("```yaml\n")[2].removesuffix("```")
    assert yaml.safe_load(shown) == config.model_dump(mode="json")


def test_what_is_known_of_the_weights_that_training_began_with_is_handed_on(folder, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    written = "---\nbase_model: Somebody/Model\nlicense: apache-2.0\ntags: [x]\n---\nA model, by hgpo_jax\n"
    (base / "README.md").write_text(written)
    (folder / "adapter_config.json").write_text(json.dumps({}))
    config = load(None, [f"policy={base}", "lora.rank=4", "method=./mine.py:plain", "warm_start=none"])
    model_card.write(folder, config, 1, RESULT)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license, card.data.library_name) == ("Somebody/Model", "apache-2.0", "peft")
    assert "A LoRA adapter of rank 4 for `Somebody/Model`" in card.text and "trained with plain" in card.text
    assert "AutoPeftModelForCausalLM" in card.text and str(tmp_path) not in card.text.partition("## Configuration")[0]


def test_a_copy_of_anothers_policy_is_not_what_that_was_trained_from(tmp_path):
    copied, cached = tmp_path / "Model-Instruct", tmp_path / "models--Somebody--Model-Instruct" / "snapshots" / "1f"
    for place in (copied, cached):
        place.mkdir(parents=True)
        (place / "README.md").write_text("---\nbase_model: Somebody/Model\nlicense: apache-2.0\n---\n# A model\n")
    assert model_card.base_of(str(copied), "cache") == {"license": "apache-2.0"}
    assert model_card.base_of(str(cached), "cache") == {"license": "apache-2.0", "base_model": "Somebody/Model-Instruct"}


def test_a_policy_that_sees_is_loaded_as_one(folder):
    model_card.write(folder, load(None), 1, RESULT, sees=True)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text" and "AutoModelForImageTextToText" in card.text
    assert "CausalLM" not in card.text.partition("## Configuration")[0]
    (folder / "adapter_config.json").write_text("{}")
    model_card.write(folder, load(None), 1, RESULT, sees=True)
    assert "PeftModel.from_pretrained(AutoModelForImageTextToText" in ModelCard.load(folder / "README.md").text


@pytest.mark.parametrize(("thinking", "words"), [
    ("null", "the chat template as on 2023-03-05;"), ("false", "with `enable_thinking=False` as on 2023-03-05;")
])  # fmt: skip
def test_a_reader_learns_how_the_chat_template_was_shown(thinking, words, folder):
    (folder / "generation_config.json").write_text(f'{{"hgpo_jax": {{"date": "2023-03-05", "thinking": {thinking}}}}}')
    model_card.write(folder, load(None), 1, RESULT)
    text = ModelCard.load(folder / "README.md").text
    assert words in text and "\n\n\n" not in text


@pytest.mark.parametrize("text", ["", "# no front matter", "---\n: [\n---\n", "---\n- a list\n---\n", b"---\n\xff\n---\n"])
def test_a_base_with_another_readme_has_no_facts(text, tmp_path):
    (tmp_path / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert model_card.front_matter(tmp_path) == {}


def test_a_base_that_is_gone_costs_no_run_its_card(folder, tmp_path, monkeypatch):
    def gone(*_):
        raise ValueError("no such folder")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_card, "find", gone)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    assert model_card.base_of("Qwen/Qwen2.5-1.5B-Instruct", "cache") == {"base_model": "Qwen/Qwen2.5-1.5B-Instruct"}
    assert model_card.base_of("./folder/x", "cache") == model_card.base_of("runs/base", "cache") == {}
