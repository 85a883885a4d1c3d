"""Constrained decoding: sets of tokens against Python's sets, and probabilities among the allowed tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.sampling.constraint import Sequences, restrict, words_of

END, VOCABULARY = 39, 70  # sets of two words of 32 bits, beside tokens beyond them
ACTIONS, SLOTS = 5, 2
WORDS = words_of(END + 1)
action = st.lists(st.integers(0, 38), min_size=SLOTS, max_size=SLOTS)


def members(bits) -> set[int]:
    """The tokens of a set u32[W]."""
    return {token for token in range(WORDS * 32) if int(bits[token // 32]) >> (token % 32) & 1}


def answer(words) -> list[int]:
    """The tokens of an action, whose words end at the first 0."""
    return [*words[: words.index(0) if 0 in words else None], END]


@jax.jit
def following(actions, flags, sampled, i):
    """The tokens u32[B, W] that may come after the first i sampled ones."""
    return Sequences.of_actions(actions, flags, END, WORDS).next_tokens(sampled, i)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(action, st.booleans()), min_size=ACTIONS, max_size=ACTIONS), st.integers(0, ACTIONS - 1))
def test_what_may_follow_is_what_some_action_goes_on_with(listed, which):
    actions, flags = ([part[index] for part in listed] for index in (0, 1))
    possible = [answer(words) for words, flag in listed if flag]
    sampled = answer(actions[which])
    for i in range(len(sampled)):
        padded = np.array([sampled[:i] + [0] * (SLOTS + 1 - i)])
        expected = {tokens[i] for tokens in possible if tokens[:i] == sampled[:i]}
        assert members(following(np.array([actions]), np.array([flags]), padded, i)[0]) == expected


def test_logits_outside_have_no_probability_and_finite_gradients():
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    allowed = np.array([[1 << 4 | 1 << 31, 1 << 1], [0, 1 << 7], [0, 0]], np.uint32)
    inside = [[4, 31, 33], [39], range(VOCABULARY)]
    expected = np.zeros((3, VOCABULARY))
    for row, tokens in enumerate(inside):
        weights = np.exp(np.float64(logits[row, list(tokens)]))
        expected[row, list(tokens)] = weights / weights.sum()
    np.testing.assert_allclose(jax.jit(lambda logits: jax.nn.softmax(restrict(logits, allowed)))(logits), expected, atol=1e-6)

    def entropy(logits):
        logps = jax.nn.log_softmax(restrict(logits, allowed))
        return -(jnp.exp(logps) * logps).sum()

    slope = np.asarray(jax.jit(jax.grad(entropy))(logits))
    assert np.isfinite(slope).all() and slope.any()
    assert not slope[expected == 0].any()
    np.testing.assert_array_equal(restrict(logits, None), logits)


@pytest.mark.parametrize("tokens", [1, 32, 33])
def test_words_hold_a_bit_for_every_token(tokens):
    assert (words_of(tokens) - 1) * 32 < tokens <= words_of(tokens) * 32
