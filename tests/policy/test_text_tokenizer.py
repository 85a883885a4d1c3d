"""The tokenizer that is made of an environment's texts."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hgpo_jax.policy.tokenizer import MAX_WORDS, text_tokenizer

TEXTS = (
    "You arrive at cabinet 12. The cabinet 12 is closed.\n", "go to cabinet 3", "'open drawer 1',\n", "####\n", "#.$@\n",
    "SFFH\n", "Größe, ärger 中文 don't\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return text_tokenizer(TEXTS)


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False).input_ids]


def test_words_are_tokens_drawings_are_read_cell_by_cell_and_the_rest_is_spelled(tokenizer):
    assert pieces(tokenizer, "go to cabinet 12") == ["go", " to", " cabinet", " ", "1", "2"]
    assert pieces(tokenizer, "'open drawer 1',\n") == ["'", "open", " drawer", " ", "1", "'", ",", "\n"]
    assert pieces(tokenizer, "#.$@\nSFFH") == list("#.$@\nSFFH")
    assert pieces(tokenizer, "Größe, ärger") == ["Größe", ",", " ärger"]

    assert pieces(tokenizer, " quux") == [" ", "q", "u", "u", "x"]


@settings(deadline=None)
@given(st.text())
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_transformers_reads_the_same_tokens_from_a_folder(tokenizer, tmp_path):
    """transformers 5 gives a folder of this model type Qwen2's own splitting rules."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer) and loaded.chat_template == tokenizer.chat_template
    for text in (*TEXTS, "".join(TEXTS), "I don't know, Let's  go\n\n", " LOUD 007"):
        assert loaded(text).input_ids == tokenizer(text).input_ids
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    # Equal texts make equal tokens in any order.
    assert text_tokenizer(TEXTS[::-1]).get_vocab() == tokenizer.get_vocab()


def test_of_many_words_the_most_frequent_are_tokens():
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"{a}{b}{c}" for a in letters for b in letters[:12] for c in letters[:12]]
    tokenizer = text_tokenizer([*(f"{word}\n" for word in words), *("often\n" for _ in range(9))])
    assert len(tokenizer) == MAX_WORDS
    assert pieces(tokenizer, "often") == ["often"]
