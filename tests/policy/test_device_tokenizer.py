"""The tokenizer inside compiled programs gives the tokenizer's own ids, or says that it cannot."""

import json
import random

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hgpo_jax.policy.device_tokenizer import MAX_PIECE, DeviceTokenizer, spell, spelling
from hgpo_jax.policy.tokenizer import text_tokenizer
from tests.helpers.chat_tokenizers import byte_tokenizer, qwen_tokenizer

SLOTS, BATCH = 160, 512
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


MAKERS = {
    "qwen2.5's pattern": lambda: text_tokenizer([*SENTENCES, "  \n\n"]),
    "gpt2": lambda: gpt2_like(False), "smollm2": lambda: gpt2_like(True),
}  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    part = lambda: rng.choice(PARTS) if rng.random() < 0.7 else rng.choice(LETTERS)  # noqa: E731
    letters = lambda: rng.choice(LETTERS)  # noqa: E731
    drawn = [(part, 30) if n % 2 else (letters, 60) for n in range(count)]
    return ["".join(one() for _ in range(rng.randrange(most)))[:SLOTS] for one, most in drawn]


def as_bytes(some: list[str]):
    raw = [text.encode() for text in some]
    return np.array([list(text.ljust(SLOTS, b"~")[:SLOTS]) for text in raw], np.uint8), np.array(list(map(len, raw)), np.int32)


def encoder(tokenizer, slots: int = SLOTS):
    device = DeviceTokenizer(tokenizer)
    encode = jax.jit(jax.vmap(lambda tables, text, n, skip: device.encode(tables, text, n, slots, skip), (None, 0, 0, None)))
    return lambda some, skip=0: jax.device_get(encode(device.tables, *as_bytes(some), skip))


def check(tokenizer, count: int) -> None:
    encode, added = encoder(tokenizer), tokenizer.get_added_vocab()
    exact_ones = 0
    for at in range(0, count, BATCH):
        some = texts(BATCH, at)
        ids, lengths, exact = encode(some)
        for text, row, length, whole in zip(some, ids, lengths, exact, strict=True):
            if whole and not any(marker in text for marker in added):
                assert row[:length].tolist() == tokenizer(text, add_special_tokens=False).input_ids, text
                assert not row[length:].any()
        exact_ones += exact.sum()
    assert exact_ones > 0.98 * count


@pytest.mark.parametrize("kind", ["qwen2.5's pattern", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "smollm2"))])
def test_random_texts(kind):
    check(MAKERS[kind](), 2 * BATCH)


@pytest.mark.slow
def test_qwens_own_tokenizer():
    check(qwen_tokenizer(), 16 * BATCH)


@pytest.mark.slow
def test_what_is_left_out_at_the_beginning_and_does_not_fit():
    tokenizer = text_tokenizer(SENTENCES)
    some = (texts(BATCH, 1) * 2)[:BATCH]
    whole, lengths, _ = encoder(tokenizer)(some)
    part, same, _ = encoder(tokenizer, 9)(some, 5)
    np.testing.assert_array_equal(same, lengths)
    for row, shorter, length in zip(whole, part, lengths, strict=True):
        expected = row[5 : min(length, 14)].tolist()
        assert shorter.tolist() == expected + [0] * (9 - len(expected))


def test_what_is_not_exact_is_said():
    encode = encoder(text_tokenizer(["x"]))
    fits, long = "x" * MAX_PIECE, "x" * (MAX_PIECE + 1)
    _, _, exact = encode(["plain", fits, long, "caf\u00e9", "a\x00b", "a\x1fb", "a\x7fb", "y" * (SLOTS + 1), "tab\tand\r\n"])
    assert exact.tolist() == [True, True, False, False, False, False, False, False, True]


def test_spelling():
    words = [b"", b"ab", b"c", b"", b"def"]
    text, size = spell(spelling(words), np.array([1, 0, 3, 4, 2]), 8)
    assert bytes(text.tolist()) == b"abdefc\0\0" and size == 6
    text, size = spell(spelling(words), np.array([4, 4, 4]), 4)
    assert bytes(text.tolist()) == b"defd" and size == 9
    assert spell(spelling(words), np.array([0, 3]), 4)[1] == 0


def changed(**fields):
    """A tokenizer whose description has other fields."""

    class Backend:
        def to_str(self):
            given = json.loads(text_tokenizer(["x"]).backend_tokenizer.to_str())
            for place, value in fields.items():
                *path, last = place.split("__")
                inner = given
                for name in path:
                    inner = inner[name]
                inner[last] = value
            return json.dumps(given)

    class Changed:
        backend_tokenizer, added_tokens_decoder = Backend(), {}

    return Changed()


@pytest.mark.parametrize(("fields", "message"), [
    ({"normalizer": {"type": "Lowercase"}}, "normalizes by Lowercase"),
    ({"pre_tokenizer": None}, "cuts text in a way that is unknown"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "cuts text in a way that is unknown"),
    ({"model__ignore_merges": True}, "ignore_merges"),
    ({"model__byte_fallback": True}, "byte_fallback"),
    ({"model": {"type": "WordLevel", "vocab": {}}}, "WordLevel"),
])  # fmt: skip
def test_tokenizers_that_it_cannot_reproduce_are_refused(fields, message):
    DeviceTokenizer(changed())
    with pytest.raises(ValueError, match=message):
        DeviceTokenizer(changed(**fields))
    with pytest.raises(ValueError, match="cuts text"):
        DeviceTokenizer(byte_tokenizer())  # does not cut at all
