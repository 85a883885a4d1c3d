"""A byte-level BPE tokenizer that runs inside compiled programs, on ASCII text.

    device = DeviceTokenizer(tokenizer)                       # a transformers tokenizer such as Qwen2.5's
    ids, count, exact = device.encode(device.tables, text, length, slots=512)

Its ids equal the tokenizer's own. The tokenizer's pattern cuts text into pieces, and in every piece the neighbouring tokens
with the earliest learned merge are merged until none is left (Sennrich et al., arXiv 1508.07909). For ASCII the patterns need
no search: the kinds of a few characters around a position decide whether a piece begins there. Text that is not ASCII, a
piece of more than MAX_PIECE bytes and too many tokens are reported instead of encoded wrongly.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.policy.tokenizer import QWEN2

MAX_PIECE = 32  # bytes
CHUNK = 256  # pieces that are merged at a time
_EMPTY = -1  # key of an unused entry of the table of merges
_NEVER = np.iinfo(np.int32).max  # rank of a pair that is not merged


class Merges(NamedTuple):
    """All merges as a cuckoo hash table: a pair is in one of two entries."""

    entries: Any  # i32[2^n, 4]: left token, right token, rank, merged token
    factors: Any  # u32[2, 2], parameters of the two hash functions


class Tables(NamedTuple):
    """The tables that programs take as an argument."""

    byte_token: Any  # i32[256], the token of each byte
    first_rank: Any  # i32[256, 256], rank of the merge of two bytes
    merges: Merges


class Spelling(NamedTuple):
    """The bytes of V words, one after the other."""

    text: Any  # u8[.]
    begin: Any  # i32[V + 1], the beginning of each word


def spelling(words: list[bytes]) -> Spelling:
    """Returns the bytes of words as NumPy arrays."""
    begin = np.cumsum([0, *map(len, words)]).astype(np.int32)
    return Spelling(np.frombuffer(b"".join(words) or b"\0", np.uint8), begin)


def spell(table: Spelling, words, slots: int) -> tuple[jax.Array, jax.Array]:
    """Writes words i32[W] one after another: (their bytes u8[slots], the number of bytes i32[], maybe more than `slots`)."""
    begin = jnp.asarray(table.begin)
    lengths = begin[words + 1] - begin[words]
    ends = jnp.cumsum(lengths)
    at = jnp.arange(slots)
    word = jnp.cumsum(jnp.zeros(slots, jnp.int32).at[ends].add(1, mode="drop"))  # words that have ended
    word = jnp.minimum(word, words.shape[0] - 1)
    text = jnp.asarray(table.text)[begin[words[word]] + at - (ends[word] - lengths[word])]
    return jnp.where(at < ends[-1], text, 0).astype(jnp.uint8), ends[-1]


class DeviceTokenizer:
    """The tokenizer as tables and functions of one text; `jax.vmap` maps them over a batch.

    tokenizer: a transformers tokenizer. tables: NumPy arrays for `encode`. words: the bytes of each token.

    Raises ValueError for a tokenizer that cannot be reproduced.
    """

    def __init__(self, tokenizer):
        fields = json.loads(tokenizer.backend_tokenizer.to_str())
        self._like_gpt2, self._single_digits = _cuts(fields.get("normalizer"), fields.get("pre_tokenizer"))
        model = fields["model"]
        odd = [
            name
            for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
            if model.get(name)
        ]
        if model["type"] != "BPE" or odd:
            raise ValueError(f"tokenizer: {', '.join(odd) or model['type']} is not byte-level BPE as Qwen2.5's")
        vocabulary, byte_of = model["vocab"], _byte_of()
        letter = {byte: char for char, byte in byte_of.items()}
        if lacking := [byte for byte in (*b"\t\n\r", *range(32, 127)) if letter[byte] not in vocabulary]:
            raise ValueError(f"tokenizer: has no token for {chr(lacking[0])!r}")
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        rows = np.array(
            [(vocabulary[a], vocabulary[b], rank, vocabulary[a + b]) for rank, (a, b) in enumerate(pairs)], np.int32
        ).reshape(-1, 4)
        byte_token = np.array([vocabulary.get(letter[byte], 0) for byte in range(256)], np.int32)
        rank = {(a, b): n for n, (a, b) in reversed(list(enumerate(pairs))) if len(a) == len(b) == 1}
        first_rank = np.full((256, 256), _NEVER, np.int32)
        for (a, b), number in rank.items():
            first_rank[byte_of[a], byte_of[b]] = number
        size = 1 + max(max(vocabulary.values()), *tokenizer.added_tokens_decoder, 0)
        words = [b""] * size
        for token, number in vocabulary.items():
            words[number] = bytes(byte_of[char] for char in token) if set(token) <= set(byte_of) else token.encode()
        for number, added in tokenizer.added_tokens_decoder.items():
            words[number] = added.content.encode()
        self.words = words
        self.tables = Tables(byte_token, first_rank, _hash_table(rows))

    # -- text to tokens -------------------------------------------------------------------------------------------

    def begins(self, text, length):
        """Marks the beginnings of the pieces, bool[L], in the first i32[] bytes of the ASCII text u8[L]."""
        at = jnp.arange(text.shape[0])
        inside = at < length
        text = jnp.where(inside, text, 0)
        upper = (text >= 65) & (text <= 90)
        letter = inside & (upper | (text >= 97) & (text <= 122))
        digit = inside & (text >= 48) & (text <= 57)
        newline = inside & ((text == 10) | (text == 13))
        blank = newline | inside & ((text == 32) | (text == 9))
        mark = inside & ~letter & ~digit & ~blank
        before = lambda flags, n=1: jnp.pad(flags, (n, 0))[: flags.shape[0]]  # noqa: E731
        after = lambda flags, n=1: jnp.pad(flags, (0, n))[n:]  # noqa: E731
        space, quote = text == 32, mark & (text == 39)
        lower = text if self._like_gpt2 else jnp.where(upper, text + 32, text)

        first = lambda flags: flags & ~before(flags)  # noqa: E731
        contracts = quote & ~before(mark) & ~before(space)  # only at the beginning of a piece
        one = contracts & jnp.isin(after(lower), jnp.frombuffer(b"stmd", np.uint8)) & after(letter)
        two = (
            contracts
            & ~one
            & after(letter)
            & after(letter, 2)
            & functools.reduce(jnp.logical_or, [(after(lower) == a) & (after(lower, 2) == b) for a, b in (b"re", b"ve", b"ll")])
        )
        contracted = before(one, 2) | before(two, 3)  # the character behind a contraction
        digits = digit if self._single_digits else first(digit)

        if self._like_gpt2:
            # A space belongs to the text after it. The last of several other blanks is a piece if it is followed; digits do
            # not count where the text is cut at digits first.
            followed = (at + 1 < length) & ~(after(digit) & self._single_digits)
            joined = space & ~after(blank) & followed
            last = blank & ~after(blank) & followed
            runs = (first(letter) & ~before(one | two) | first(mark) | digits) & ~before(joined)
            return inside & (runs | contracted | first(blank) | last)
        # Newlines right after marks belong to these.
        other = jax.lax.cummax(jnp.where(newline, -1, at))
        behind = newline & (other >= 0) & mark[jnp.maximum(other, 0)]
        gap = blank & ~behind
        # Blanks up to the last newline among them are a piece.
        far = text.shape[0]
        next_newline = jax.lax.cummin(jnp.where(newline & gap, at, far), reverse=True)
        next_other = jax.lax.cummin(jnp.where(gap, far, at), reverse=True)
        lines = gap & (next_newline < next_other)
        rest = gap & ~lines
        last = rest & ~after(rest) & (at + 1 < length)
        to_letter, to_mark = last & after(letter), last & space & after(mark)
        alone = first(mark) & ~after(mark) & after(letter) & ~before(to_mark)  # a mark that belongs to a word
        starts = first(letter) & ~before(to_letter) & ~before(alone)
        return inside & (starts | contracted | digits | first(mark) & ~before(to_mark) | first(lines) | first(rest) | last)

    def encode(self, tables: Tables, text, length, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Encodes a text.

        Args:
          tables: `self.tables`, traced inside a program.
          text: u8[L].
          length: i32[], the number of bytes to read; more than L is not exact.
          slots: S.

        Returns: (i32[S], the number of tokens i32[], exact bool[]: whether these are exactly the tokenizer's own).
        """
        L = text.shape[0]
        begins = self.begins(text, length)
        rank = jnp.cumsum(begins)
        count = rank[-1]
        pieces = -(-L // CHUNK) * CHUNK
        begin = (
            jnp.full(pieces + 1, length, jnp.int32)
            .at[jnp.where(begins, rank - 1, pieces + 1)]
            .set(jnp.arange(L, dtype=jnp.int32), mode="drop")
        )
        sizes = begin[1:] - begin[:-1]
        exact = (length <= L) & (sizes.max(initial=0) <= MAX_PIECE) & (plain(text) | (jnp.arange(L) >= length)).all()
        padded = jnp.pad(text, (0, MAX_PIECE))
        column = jnp.arange(MAX_PIECE)
        width = CHUNK * MAX_PIECE

        def chunk(carry):
            number, tokens, filled = carry
            at = jax.lax.dynamic_slice(begin, (number * CHUNK,), (CHUNK,))
            size = jax.lax.dynamic_slice(sizes, (number * CHUNK,), (CHUNK,))
            letters = jnp.where(column < size[:, None], padded[at[:, None] + column], 0)
            ids, sizes_now = _merge(tables, letters, size)
            ends = jnp.cumsum(sizes_now)
            slot = jnp.arange(width)
            row = jnp.minimum(jnp.searchsorted(ends, slot, side="right", method="scan_unrolled"), CHUNK - 1)
            flat = ids[row, jnp.minimum(slot - (ends[row] - sizes_now[row]), MAX_PIECE - 1)]
            # Omitted tokens go into a margin.
            tokens = jax.lax.dynamic_update_slice(tokens, flat, (jnp.clip(width + filled, 0, width + slots),))
            return number + 1, tokens, filled + ends[-1]

        start = jnp.int32(0), jnp.zeros(slots + 2 * width, jnp.int32), jnp.int32(0)
        _, tokens, filled = jax.lax.while_loop(lambda carry: carry[0] * CHUNK < count, chunk, start)
        return jnp.where(jnp.arange(slots) < filled, tokens[width : width + slots], 0), filled, exact


def plain(text):
    """Marks the bytes that are ASCII characters which text consists of, bool[...]."""
    return (text >= 32) & (text < 127) | (text == 9) | (text == 10) | (text == 13)


def _merge(tables: Tables, letters, size):
    """Tokenizes pieces: u8[N, MAX_PIECE] bytes of lengths i32[N] -> (i32[N, MAX_PIECE], number of tokens i32[N])."""
    column = jnp.arange(MAX_PIECE)
    ids = jnp.asarray(tables.byte_token)[letters]
    following = jnp.pad(letters, ((0, 0), (0, 1)))[:, 1:]
    paired = column + 1 < size[:, None]
    ranks = jnp.where(paired, jnp.asarray(tables.first_rank)[letters, following], _NEVER)

    def step(carry):
        ids, ranks, size, _ = carry
        best = jnp.argmin(ranks, axis=1)
        pick = lambda a, at: jnp.take_along_axis(a, jnp.clip(at, 0, MAX_PIECE - 1)[:, None], 1)[:, 0]  # noqa: E731
        merges = pick(ranks, best) < _NEVER
        _, merged = lookup(tables.merges, pick(ids, best), pick(ids, best + 1))
        here, behind = column == best[:, None], column > best[:, None]
        moved = lambda a, fill: jnp.pad(a, ((0, 0), (0, 1)), constant_values=fill)[:, 1:]  # noqa: E731
        new_ids = jnp.where(here, merged[:, None], jnp.where(behind, moved(ids, 0), ids))
        new_ranks = jnp.where(behind, moved(ranks, _NEVER), ranks)
        new_size = size - 1
        left, _ = lookup(tables.merges, pick(new_ids, best - 1), merged)
        right, _ = lookup(tables.merges, merged, pick(new_ids, best + 1))
        right = jnp.where(best + 1 < new_size, right, _NEVER)
        new_ranks = jnp.where(column == best[:, None] - 1, left[:, None], jnp.where(here, right[:, None], new_ranks))
        keep = merges[:, None]
        ids, ranks = jnp.where(keep, new_ids, ids), jnp.where(keep, new_ranks, ranks)
        return ids, ranks, size - merges, (ranks < _NEVER).any()

    ids, _, size, _ = jax.lax.while_loop(lambda carry: carry[-1], step, (ids, ranks, size, (ranks < _NEVER).any()))
    return ids, size


# -- the table of merges --------------------------------------------------------------------------------------------------


def lookup(merges: Merges, left, right):
    """Looks up pairs of tokens i32[N]: (rank, merged token), with rank _NEVER if they are not merged."""
    entries = jnp.asarray(merges.entries)
    rank, merged = jnp.full(left.shape, _NEVER), jnp.zeros(left.shape, jnp.int32)
    for slot in _slots(jnp.asarray(merges.factors), left, right, entries.shape[0]):
        rows = entries[slot]
        hit = (rows[:, 0] == left) & (rows[:, 1] == right)
        rank, merged = jnp.where(hit, rows[:, 2], rank), jnp.where(hit, rows[:, 3], merged)
    return rank, merged


def _slots(factors, left, right, size: int):
    """Returns both places of pairs i32[N] in a table, in NumPy or jax."""
    shift = 32 - (size.bit_length() - 1)
    for factor in factors:
        mixed = left.astype(np.uint32) * factor[0] + right.astype(np.uint32) * factor[1]
        mixed = (mixed ^ (mixed >> 15)) * factor[0]
        yield (mixed >> shift).astype(np.int32)


def _hash_table(rows: np.ndarray) -> Merges:
    """Builds the table of merges i32[M, 4]; a pair that occurs twice has its first rank."""
    _, first = np.unique(rows[:, :2], axis=0, return_index=True)
    rows, rng = rows[np.sort(first)], np.random.default_rng(0)
    size = 1 << max(4, (3 * len(rows)).bit_length())
    while True:
        factors = rng.integers(1, 2**32, (2, 2), np.uint32) | np.uint32(1)
        entries = np.full((size, 4), _EMPTY, np.int32)
        places = np.stack(list(_slots(factors, rows[:, 0], rows[:, 1], size)), 1).tolist() if len(rows) else []
        owner: dict[int, int] = {}
        if all(_place(owner, places, number) for number in range(len(rows))):
            for slot, number in owner.items():
                entries[slot] = rows[number]
            return Merges(entries, factors)


def _place(owner: dict[int, int], places: list[list[int]], number: int) -> bool:
    """Puts a pair into one of its places, whose owner moves to its other one; returns whether this terminated."""
    slot = places[number][0]
    for _ in range(100):
        other = owner.get(slot)
        owner[slot] = number
        if other is None:
            return True
        number = other
        slot = places[number][places[number][0] == slot]
    return False


def _byte_of() -> dict[str, int]:
    """Maps the characters of a byte-level vocabulary to bytes (the inverse of GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def _cuts(normalizer, pre_tokenizer) -> tuple[bool, bool]:
    """Returns (whether text is cut as in GPT-2, not Qwen2; whether every digit is a piece). Raises ValueError."""
    if normalizer not in (None, {"type": "NFC"}):  # NFC does not change ASCII
        raise ValueError(f"tokenizer: normalizes by {normalizer.get('type')}")
    steps = pre_tokenizer["pretokenizers"] if (pre_tokenizer or {}).get("type") == "Sequence" else [pre_tokenizer or {}]
    kinds = [step.get("type") for step in steps]
    level = steps[-1]
    if kinds[-1] == "ByteLevel" and not level.get("add_prefix_space"):
        if kinds == ["Split", "ByteLevel"] and not level.get("use_regex"):
            split = steps[0]
            if split["pattern"] == {"Regex": QWEN2} and split["behavior"] == "Isolated" and not split["invert"]:
                return False, True
        elif level.get("use_regex"):
            digits = [step for step in steps[:-1] if step == {"type": "Digits", "individual_digits": True}]
            if len(digits) == len(steps) - 1:
                return True, bool(digits)
    raise ValueError("tokenizer: cuts text in a way that is unknown here; Qwen2.5's and GPT-2's patterns are known")
