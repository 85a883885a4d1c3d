"""The tokenizer that is made of an environment's texts."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import MAX_WORDS, read_tokenizer, text_tokenizer

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


def test_a_folders_own_way_of_cutting_texts_holds(tokenizer, tmp_path, monkeypatch):
    """As in DeepSeek's distilled Qwen2.5, whose tokenizer.json isolates runs of digits; transformers 5 alone would not."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / name.partition("/")[2]))
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    other = Tokenizer(models.BPE())
    other.pre_tokenizer, other.decoder = cut, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"])
    other.train_from_iterator(["look for 137\n"], trainer)
    for name, made in (("own", PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<end>")), ("qwen", tokenizer)):
        made.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen2"}')
        read = read_tokenizer(str(tmp_path / name))
        for text in ("look for 137\n", "go to cabinet 12"):
            assert read(text).input_ids == made(text).input_ids == load_tokenizer(f"hub/{name}", "cache")(text).input_ids
    assert len(other.encode("look for 137\n").ids) == 3
    assert type(read).__name__ == "Qwen2Tokenizer"  # the class that was declared, where both agree
