"""Sampling: the right distribution, rows that do not know each other, and the trainer's log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from scipy.special import log_softmax

from hgpo_jax.learner import Rows, token_logprobs
from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, initialize, network
from hgpo_jax.sampling import generate, sample_token

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], np.float32)
DRAWS = 20_000
MODEL = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
END, MAX_NEW, ROWS, WIDTH = 5, 6, 48, 7


def pearson(counts, temperature):
    """Pearson's statistic of the counts against softmax(LOGITS / temperature)."""
    expected = DRAWS * np.exp(log_softmax(LOGITS.astype(np.float64) / temperature))
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(("temperature", "other"), [(1.0, 1.1), (0.5, 0.55)])
def test_frequencies_are_the_softmax_at_the_temperature(temperature, other):
    keys = jax.random.split(jax.random.key(7), DRAWS)
    tokens, _ = jax.jit(sample_token)(jnp.broadcast_to(LOGITS, (DRAWS, 8)), keys, temperature)
    counts = np.bincount(np.asarray(tokens), minlength=8)
    limit = stats.chi2.ppf(1 - 1e-4, df=len(LOGITS) - 1)
    assert pearson(counts, temperature) < limit
    assert pearson(counts, other) > limit  # the bound would notice a temperature that is 10 % off


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probability_is_that_of_the_sampled_distribution(temperature):
    logits = 3 * jax.random.normal(jax.random.key(0), (64, 11))
    tokens, logp = sample_token(logits, jax.random.split(jax.random.key(1), 64), temperature)
    expected = log_softmax(np.asarray(logits, np.float64) / temperature, axis=1)[np.arange(64), tokens]
    np.testing.assert_allclose(logp, expected, atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token_and_reports_temperature_one():
    logits = 3 * jax.random.normal(jax.random.key(0), (64, 11))
    tokens, logp = sample_token(logits, jax.random.split(jax.random.key(1), 64), 0.0)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_allclose(logp, log_softmax(np.asarray(logits, np.float64), axis=1).max(axis=1), atol=1e-5)


@pytest.fixture(scope="module")
def batch():
    """A model and prompts of every length up to WIDTH."""
    params = initialize(MODEL, 0, make_mesh("data=1", jax.devices()[:1]))
    lengths = 1 + jnp.arange(ROWS) % WIDTH
    words = jax.random.randint(jax.random.key(2), (ROWS, WIDTH), 0, MODEL.vocab_size)
    prompts = jnp.where(jnp.arange(WIDTH) < lengths[:, None], words, 0)
    return params, prompts, lengths, jax.random.split(jax.random.key(3), ROWS)


@jax.jit
def sample(params, prompts, lengths, keys, temperature):
    model = nnx.merge(network(MODEL), params)
    return generate(model, prompts, lengths, keys, max_new=MAX_NEW, end=END, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_responses_end_at_the_end_token_and_hold_zeros_after_it(batch, temperature):
    out = sample(*batch, temperature)
    tokens, logp, lengths = np.asarray(out.tokens), np.asarray(out.logp), np.asarray(out.lengths)
    assert len(set(lengths.tolist())) >= 4  # early, late and unfinished ones
    assert (tokens != END).all(axis=1).any()
    for row in range(ROWS):
        ends = np.flatnonzero(tokens[row] == END)
        assert lengths[row] == (ends[0] + 1 if len(ends) else MAX_NEW)
        assert not tokens[row, lengths[row] :].any()
        assert not logp[row, lengths[row] :].any()
        assert (logp[row, : lengths[row]] < 0).all()


def test_a_row_does_not_depend_on_its_batch_mates_or_their_order(batch):
    params, prompts, lengths, keys = batch
    whole = sample(params, prompts, lengths, keys, 1.0)
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = sample(params, prompts[order], lengths[order], keys[order], 1.0)
    np.testing.assert_array_equal(shuffled.tokens, whole.tokens[order])
    np.testing.assert_allclose(shuffled.logp, whole.logp[order], atol=1e-5)
    # Other mates altogether, among them ones that end at other times.
    mates = sample(params, prompts.at[1::2].set(0), lengths, keys.at[1::2].set(jax.random.key(99)), 1.0)
    assert (np.asarray(mates.tokens[1::2]) != np.asarray(whole.tokens[1::2])).any()
    np.testing.assert_array_equal(mates.tokens[::2], whole.tokens[::2])
    alone = sample(params, prompts[10:11], lengths[10:11], keys[10:11], 1.0)
    np.testing.assert_array_equal(alone.tokens, whole.tokens[10:11])
    np.testing.assert_allclose(alone.logp, whole.logp[10:11], atol=1e-5)


def test_what_stands_in_the_padding_of_a_prompt_does_not_matter(batch):
    params, prompts, lengths, keys = batch
    other = jnp.where(jnp.arange(WIDTH) < lengths[:, None], prompts, 9)
    np.testing.assert_array_equal(sample(params, other, lengths, keys, 1.0).tokens, sample(*batch, 1.0).tokens)


def test_greedy_responses_follow_the_full_forward_pass(batch):
    params, prompts, lengths, _ = batch
    out = sample(*batch, 0.0)
    policy = Policy(MODEL, params, None)
    rows = np.arange(ROWS)
    text = np.pad(prompts, ((0, 0), (0, MAX_NEW)))
    for i in range(MAX_NEW):
        best = np.argmax(policy.logits(text, lengths + i)[rows, lengths + i - 1], axis=1)
        going = i < np.asarray(out.lengths)
        np.testing.assert_array_equal(np.asarray(out.tokens)[going, i], best[going])
        text[rows, np.asarray(lengths) + i] = np.asarray(out.tokens)[:, i]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_sees_the_same_log_probabilities(batch, temperature):
    params, prompts, lengths, _ = batch
    out = sample(*batch, temperature)
    rows = Rows(
        prompts=prompts, prompt_lengths=lengths, responses=out.tokens, response_lengths=out.lengths,
        old_logp=out.logp, advantages=jnp.zeros(ROWS),
    )  # fmt: skip
    logp, entropy = token_logprobs(nnx.merge(network(MODEL), params), rows, temperature=temperature)
    real = np.arange(MAX_NEW) < np.asarray(out.lengths)[:, None]
    np.testing.assert_allclose(np.asarray(logp)[real], np.asarray(out.logp)[real], atol=1e-4)
    assert np.asarray(entropy)[real].min() >= 0
    assert np.asarray(entropy)[real].max() <= np.log(MODEL.vocab_size) + 1e-5
