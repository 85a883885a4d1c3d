"""notebooks/number_tools_start.py: its rows are what the gateway shows and samples, and its policy loads and calls the tool."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from hgpo_jax.envs.agents.number_tools import TOOL
from hgpo_jax.policy import load_policy
from tests.helpers.tiny import mesh_of

FILE = Path(__file__).parents[2] / "notebooks" / "number_tools_start.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("number_tools_start", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_the_prompts_and_answers_of_a_chat(script):
    chance = random.Random(1)
    played = [script.conversation(chance) for _ in range(64)]
    nothing = script.Tokenizer(script.models.BPE())
    plain = script.PreTrainedTokenizerFast(tokenizer_object=nothing, chat_template=script.TEMPLATE)
    render = {"tools": [TOOL], "tokenize": False}
    tokenizer = script.make_tokenizer([plain.apply_chat_template(messages, **render) for messages in played])
    ids, wrote = script.rows(tokenizer, played)
    for row, marks, messages in zip(ids, wrote, played, strict=True):
        expected = np.zeros(len(row), bool)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer(tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, **render)).input_ids
                whole = tokenizer(tokenizer.apply_chat_template(messages[: at + 1], **render)).input_ids
                assert row[: len(prompt)].tolist() == prompt
                end = whole.index(tokenizer.eos_token_id, len(prompt))
                expected[len(prompt) : end + 1] = True
        np.testing.assert_array_equal(marks, expected)


@pytest.mark.slow
def test_the_policy_loads(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "STEPS", 60)
    monkeypatch.setattr(script, "BATCH", 2)
    script.main(str(tmp_path / "start"))
    assert "tokens" in capsys.readouterr().out
    policy = load_policy(tmp_path / "start", mesh_of())
    assert policy.frame.call_format([TOOL]).begin("guess") == '<tool_call>\n{"name": "guess", "arguments":'
