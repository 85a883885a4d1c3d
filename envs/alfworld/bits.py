"""Sets of small numbers as bits of 32-bit words: number n is bit n % 32 of word n // 32.

Fields of several bits are possible in such words, too: a field never crosses from one word to the next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BITS = 32


def test(words, numbers):
    """Marks the numbers i32[n] that are in the set u32[W], bool[n]."""
    word = jnp.zeros(numbers.shape, jnp.uint32)
    for w in range(words.shape[-1]):  # few words: comparing is quicker than gathering
        word = jnp.where(numbers // BITS == w, words[w], word)
    return (word >> (numbers % BITS).astype(jnp.uint32)) & 1 == 1


def tests(sets, number):
    """Marks the sets u32[S, W] that have this number i32[], bool[S]."""
    return jax.vmap(test, (0, None))(sets, number)


def columns(sets, numbers):
    """Returns a field u32[n] for each of the numbers i32[n]: its bit s is set if the number is in set s of u32[S, W]."""
    return sum(test(words, numbers).astype(jnp.uint32) << s for s, words in enumerate(sets))


def single(number, words: int):
    """Returns the set of this one number, u32[words]."""
    bit = jnp.uint32(1) << (number % BITS).astype(jnp.uint32)
    return jnp.where(jnp.arange(words) == number // BITS, bit, jnp.uint32(0))


def union(sets):
    """Returns the numbers that are in any of the sets u32[S, W], u32[W]."""
    return jax.lax.reduce(sets, jnp.uint32(0), jax.lax.bitwise_or, (0,))


def starts(count: int, width: int) -> list[int]:
    """Returns the positions where `pack_fields` puts this many fields."""
    per_word = BITS // width
    return [n // per_word * BITS + n % per_word * width for n in range(count)]


def pack_fields(fields, width: int):
    """Packs equally wide fields u32[n] one after the other, u32[W]."""
    per_word = BITS // width
    fields = jnp.pad(fields, (0, -fields.shape[0] % per_word)).reshape(-1, per_word)
    return (fields << (width * jnp.arange(per_word, dtype=jnp.uint32))).sum(1, dtype=jnp.uint32)


def pack(flags):
    """Returns the numbers whose flag in bool[n] is set, u32[ceil(n / 32)]."""
    return pack_fields(flags.astype(jnp.uint32), 1)


def select(words, slots: int):
    """Lists the numbers of a set u32[W] in order: (i32[slots], 0 or more if there are fewer; their number i32[])."""
    ends = jnp.cumsum(jax.lax.population_count(words).astype(jnp.int32))
    rank, at = jnp.arange(slots), jnp.zeros(slots, jnp.int32)
    word, before = jnp.broadcast_to(words[0], (slots,)), jnp.zeros(slots, jnp.int32)
    for w in range(words.shape[0] - 1):
        after = rank >= ends[w]
        at, before = at + after, jnp.where(after, ends[w], before)
        word = jnp.where(after, words[w + 1], word)
    rank, number = rank - before, at * BITS
    for half in (16, 8, 4, 2, 1):  # the half of the word that contains the bit with this rank
        low = jax.lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        upper = rank >= low
        rank = jnp.where(upper, rank - low, rank)
        word = jnp.where(upper, word >> half, word)
        number = number + half * upper
    return number, ends[-1]
