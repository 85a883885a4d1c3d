"""The tokenizer inside compiled programs gives the tokenizer's own ids, or says that it cannot."""

import json
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hgpo_jax.policy.device_tokenizer import MAX_PIECE, DeviceTokenizer, spell, spelling
from hgpo_jax.policy.tokenizer import text_tokenizer
from tests.helpers.chat_tokenizers import qwen_tokenizer

LENGTH, SLOTS, BATCH = 160, 40, 256
PARTS = [
    "'take", " pen 2", "desk 1", "',\n", "You", '"-=', " receptacle", "'s", "'ll", "'RE", " 's", "''s", "\n \n", "  ", "   x",
    " \t", "\t'", '\t"', "alarmclock", " handtowelholder", "123", "\n'", "]\n\n", ". ", "...", ".\n", "\r\n", " 7", "  9",
    "it'd", "a'veb",
]  # fmt: skip
LETTERS = "".join(map(chr, range(32, 127))) + "\n\n\t\r    abcdestlmrv''"
SENTENCES = [
    "You arrive at desk 1. On the desk 1, you see a pen 2, and a cd 1.", "'take pen 2 from desk 1',\n'go to bed 1']\n\nDecide",
    "it's theirs, they'll say; we've seen 123 of 4567 things", "look  look\n\n  look\tlook ... (!!) ->>", "a aa aaa aaaa aaaaa",
]  # fmt: skip


def gpt2_like(digits: bool):
    """Byte-level BPE that cuts text as GPT-2 does, as SmolLM2's at single digits first, learned from a few sentences."""
    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [pre_tokenizers.Digits(individual_digits=True), level] if digits else [level]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, min_frequency=1, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    part = lambda: rng.choice(PARTS) if rng.random() < 0.7 else rng.choice(LETTERS)  # noqa: E731
    letters = lambda: rng.choice(LETTERS)  # noqa: E731
    drawn = [(part, 30) if n % 2 else (letters, 60) for n in range(BATCH)]
    return ["".join(one() for _ in range(rng.randrange(most)))[:LENGTH] for one, most in drawn]


def as_bytes(some: list[str]):
    raw = [text.encode() for text in some]
    padded = [list(text.ljust(LENGTH, b"~")[:LENGTH]) for text in raw]
    return np.array(padded, np.uint8), np.array(list(map(len, raw)), np.int32)


def encoder(tokenizer):
    device = DeviceTokenizer(tokenizer)
    encode = jax.jit(jax.vmap(lambda tables, text, n: device.encode(tables, text, n, SLOTS), (None, 0, 0)))
    return lambda some: jax.device_get(encode(device.tables, *as_bytes(some)))


def check(tokenizer, encode, batches: int) -> None:
    """Their tokens are the tokenizer's own, as many as fit."""
    added, exact_ones = tokenizer.get_added_vocab(), 0
    for seed in range(batches):
        some = texts(seed)
        ids, lengths, exact = encode(some)
        for text, row, length, whole in zip(some, ids, lengths, exact, strict=True):
            if whole and not any(marker in text for marker in added):
                expected = tokenizer(text, add_special_tokens=False).input_ids
                assert length == len(expected), text
                fitting = expected[:SLOTS]
                assert row.tolist() == fitting + [0] * (SLOTS - len(fitting)), text
        exact_ones += exact.sum()
    assert exact_ones > 0.98 * batches * BATCH


@pytest.fixture(scope="module")
def words():
    """A tokenizer that cuts as Qwen2.5's, and its encoder."""
    tokenizer = text_tokenizer([*SENTENCES, "  \n\n"])
    return tokenizer, encoder(tokenizer)


def test_random_texts(words):
    check(*words, 2)


@pytest.mark.slow
@pytest.mark.parametrize("digits", [False, True], ids=["gpt2", "smollm2"])
def test_random_texts_of_other_patterns(digits):
    tokenizer = gpt2_like(digits)
    check(tokenizer, encoder(tokenizer), 2)


@pytest.mark.slow
@pytest.mark.needs("data")
def test_qwens_own_tokenizer():
    tokenizer = qwen_tokenizer()
    check(tokenizer, encoder(tokenizer), 3)


def test_what_is_not_exact_is_said(words):
    fits, long = "x" * MAX_PIECE, "x" * (MAX_PIECE + 1)
    some = ["plain", fits, long, "caf\u00e9", "a\x00b", "a\x1fb", "a\x7fb", "y " * LENGTH, "tab\tand\r\n"]
    _, _, exact = words[1](some + [""] * (BATCH - len(some)))
    assert exact[: len(some)].tolist() == [True, True, False, False, False, False, False, False, True]


def test_spelling():
    words = [b"", b"ab", b"c", b"", b"def"]
    write = jax.jit(lambda some: spell(spelling(words), some, 8))
    text, size = write(np.array([1, 0, 3, 4, 2]))
    assert bytes(text.tolist()) == b"abdefc\0\0" and size == 6
    text, size = write(np.array([4, 4, 4, 0, 4]))
    assert bytes(text.tolist()) == b"defdefde" and size == 12
    assert write(np.array([0, 3, 0, 0, 3]))[1] == 0


def changed(**fields):
    """A tokenizer whose description has other fields."""
    given = json.loads(text_tokenizer(["x"]).backend_tokenizer.to_str())
    text = json.dumps(given | fields | {"model": given["model"] | fields.get("model", {})})
    return SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: text), added_tokens_decoder={})


@pytest.mark.parametrize(("fields", "message"), [
    ({"normalizer": {"type": "Lowercase"}}, "normalizes by Lowercase"),
    ({"pre_tokenizer": None}, "cuts text in a way that is unknown"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "cuts text in a way that is unknown"),
    ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "cuts text in a way that is unknown"),
    ({"model": {"ignore_merges": True}}, "ignore_merges"), ({"model": {"byte_fallback": True}}, "byte_fallback"),
    ({"model": {"type": "WordLevel"}}, "WordLevel"),
])  # fmt: skip
def test_tokenizers_that_it_cannot_reproduce_are_refused(fields, message):
    DeviceTokenizer(changed())
    with pytest.raises(ValueError, match=message):
        DeviceTokenizer(changed(**fields))
