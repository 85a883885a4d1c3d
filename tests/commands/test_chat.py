"""`python -m hgpo_jax.chat`: answers are the sampler's, the conversation is kept, mistakes are one line."""

import io
import sys
from pathlib import Path

import jax
import pytest

from hgpo_jax import chat as chatting
from hgpo_jax.config import cli
from hgpo_jax.sampling import conversation as sampling_chat
from hgpo_jax.sampling.conversation import Chat
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.byte_policy import byte_policy, generated

NEW = 12
HOT = Decoding(temperature=1.0)
WITHOUT_TOKENIZER = Path(__file__).parents[1] / "policy" / "data" / "llama_tiny"


@pytest.fixture(scope="module")
def policy():
    return byte_policy()


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory):
    policy.save(folder := tmp_path_factory.mktemp("chat") / "policy")
    return folder


def test_answers_are_the_samplers_and_the_conversation_is_kept(policy):
    chat = Chat(policy, HOT, max_new=NEW, seed=5, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for number, question in enumerate(("Who?", "And è?")):
        messages.append({"role": "user", "content": question})
        text = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        key = jax.random.fold_in(jax.random.key(5), number)
        tokens, _ = generated(policy, policy.tokenizer(text).input_ids, key, NEW, HOT)
        expected = policy.tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join(chat.answer(question)) == expected != ""
        messages.append({"role": "assistant", "content": expected})
    assert chat.messages == messages[1:]
    chat.reset()
    pieces = chat.answer("Who?")
    said = next(pieces)
    pieces.close()  # what was said before it was stopped is kept
    assert messages[2]["content"].startswith(said)
    assert chat.messages == [messages[1], {"role": "assistant", "content": said}]


def test_a_character_is_told_once_it_is_whole(policy, monkeypatch):
    tokens = iter([*policy.tokenizer("è€ok").input_ids, policy.tokenizer.eos_token_id])
    monkeypatch.setattr(sampling_chat, "_advance", lambda *given: ([next(tokens)], *given[3:5]))
    assert list(filter(None, Chat(policy, HOT, max_new=NEW).answer("Who?"))) == ["è", "€", "o", "k"]


def test_what_does_not_fit_is_forgotten(policy):
    chat = Chat(policy, HOT, max_new=NEW)
    said = ("user", "a" * 200), ("assistant", "a"), ("user", "b" * 150), ("assistant", "b" * 100)
    chat.messages = [{"role": role, "content": content} for role, content in said]
    chat.prompt("c" * 50)  # all but the first message would fit, but an answer goes with its question
    assert [message["content"][0] for message in chat.messages] == ["b", "b", "c"]
    chat.messages.append({"role": "assistant", "content": "e"})
    with pytest.raises(ValueError, match=r"^\d+ tokens; beside a response 500 fit in the context"):
        chat.prompt("d" * 600)
    assert [message["content"][0] for message in chat.messages] == ["b", "b", "c", "e"]


def run(monkeypatch, capsys, *words, said="", code=0):
    monkeypatch.setattr(sys, "argv", ["chat", *map(str, words)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer := io.BytesIO(), write_through=True))
    try:
        cli.run(chatting.main)
    except SystemExit as ended:
        assert ended.code == code
    return buffer.getvalue().decode(), capsys.readouterr().err


def test_lines_that_are_piped_in_are_answered_one_by_one(policy, folder, monkeypatch, capsys):
    said = "Who?\n\n/help\n/reset\nWho?\n" + "long" * 200 + "\nWhy?"
    out, _ = run(monkeypatch, capsys, folder, "--temperature", "1", "--max-tokens", NEW, said=said)
    shown = cli.command_line.printable("".join(Chat(policy, HOT, max_new=NEW).answer("Who?")))
    assert out.startswith(f"{shown}\n/reset forgets the conversation") and f"\n{shown}\n" in out
    assert "tokens; beside a response 500 fit" in out and out.count(shown) == 2


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["FOLDER", "--max-tokens", "512"], "--max-tokens 512: the model's context is 512 tokens"),
        ([WITHOUT_TOKENIZER], "holds none"),
    ],
)
def test_mistakes_are_one_line(words, fragment, folder, monkeypatch, capsys):
    _, said = run(monkeypatch, capsys, *(folder if word == "FOLDER" else word for word in words), code=2)
    assert said.startswith("error: ") and said.count("\n") == 1
    assert fragment in said
