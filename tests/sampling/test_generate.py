"""Sampling: the right distribution, and rows that do not know each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from scipy.special import log_softmax

from hgpo_jax.policy import ModelConfig, Policy, initialize, network, shardings
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import (
    COMPACT_FROM,
    Decoding,
    argmax,
    generate,
    make_decode_blocks,
    make_sampler,
    sample_token,
    top_k_top_p,
    turn_keys,
)

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], np.float32)
DRAWS = 20_000
MODEL = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
ENDS, MAX_NEW, ROWS, WIDTH = (5, 7), 7, 48, 7


draw = jax.jit(sample_token)


@jax.jit
def draw_often(logits, keys, decoding):
    return jax.vmap(lambda key: sample_token(logits, jax.random.split(key, len(logits)), decoding))(keys)


def pearson(counts, temperature):
    """Pearson's statistic of the counts against softmax(LOGITS / temperature)."""
    expected = DRAWS * np.exp(log_softmax(LOGITS.astype(np.float64) / temperature))
    return ((counts - expected) ** 2 / expected).sum()


def test_the_most_likely_token_has_its_probability_whoever_is_beside_it():
    """Also where other rows are drawn from a few tokens, and its own decoding names some."""
    logits, keys = jnp.array([[2.0, 1.0, 0.5, 0.0]] * 2), jax.random.split(jax.random.key(0), 2)
    for top_k, top_p in ((0, 1.0), (1, 1.0), (0, 0.5)):
        decoding = Decoding(temperature=jnp.array([0.0, 1.0]), top_k=jnp.array([top_k] * 2), top_p=jnp.array([top_p] * 2))
        tokens, logp = draw(logits, keys, decoding)
        assert tokens[0] == 0
        np.testing.assert_allclose(logp[0], log_softmax(np.array([2.0, 1.0, 0.5, 0.0]))[0], atol=1e-6)


@pytest.mark.parametrize(("temperature", "other"), [(1.0, 1.1), (0.5, 0.55)])
def test_frequencies_are_the_softmax_at_the_temperature(temperature, other):
    keys, logits = jax.random.split(jax.random.key(7), DRAWS), jnp.broadcast_to(LOGITS, (DRAWS, 8))
    tokens, logp = draw(logits, keys, Decoding(temperature=temperature))
    counts = np.bincount(np.asarray(tokens), minlength=8)
    limit = stats.chi2.ppf(1 - 1e-4, df=len(LOGITS) - 1)
    assert pearson(counts, temperature) < limit
    assert pearson(counts, other) > limit  # the bound would notice a temperature that is 10 % off
    np.testing.assert_allclose(logp, log_softmax(LOGITS.astype(np.float64) / temperature)[tokens], atol=1e-5)
    if temperature == 1:
        np.testing.assert_array_equal(tokens, jax.vmap(jax.random.categorical)(keys, logits))  # the draws are those of jax


def test_temperature_zero_takes_the_most_likely_token_and_reports_temperature_one():
    logits, keys = 3 * jax.random.normal(jax.random.key(0), (64, 11)), jax.random.split(jax.random.key(1), 64)
    for restriction in ({}, {"top_k": 2}, {"top_p": 0.1}):  # it needs none
        tokens, logp = draw(logits, keys, Decoding(temperature=0.0, **restriction))
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
        np.testing.assert_allclose(logp, log_softmax(np.asarray(logits, np.float64), axis=1).max(axis=1), atol=1e-5)


def restricted(logits, top_k, top_p):
    """Log-probabilities of the distribution that is left, one row of float64 logits at a time."""
    out = np.full(logits.shape, -np.inf)
    for row, values in enumerate(logits):
        best = np.argsort(-values)[: top_k or None]
        shares = np.exp(log_softmax(values[best]))
        best = best[: 1 + int((np.cumsum(shares) < top_p).sum())]
        out[row, best] = log_softmax(values[best])
    return out


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.7), (5, 0.8), (0, 1e-6), (400, 0.9)])
def test_only_the_most_likely_tokens_are_drawn(top_k, top_p):
    logits = 2 * jax.random.normal(jax.random.key(0), (6, 40))
    expected = restricted(np.asarray(logits, np.float64) / 0.8, top_k, top_p)
    decoding = Decoding(temperature=0.8, top_k=top_k, top_p=top_p)
    tokens, logp = (np.asarray(a) for a in draw_often(logits, jax.random.split(jax.random.key(1), 2000), decoding))
    np.testing.assert_allclose(logp, expected[np.arange(6), tokens], atol=1e-4)
    for row in range(6):
        likely = np.flatnonzero(expected[row] > np.log(0.01))
        assert set(likely) <= set(tokens[:, row].tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "stay"),
    [
        (2, 1.0, [0.0, -0.0, 3.0]),  # equal values stay together, and both zeros are equal
        (0, 0.9, [3.0]),
        (0, 0.95, [0.0, -0.0, 3.0]),
        (0, 1.0, [0.0, -0.0, 3.0, -2.0, -20.0]),
        (5, 0.9999, [0.0, -0.0, 3.0, -2.0]),
        (1, 0.5, [3.0]),
    ],
)
def test_what_stays_of_equal_and_impossible_tokens(top_k, top_p, stay):
    logits = jnp.array([[0.0, -jnp.inf, -0.0, 3.0, -2.0, -20.0]])
    assert top_k_top_p(logits, jnp.array([[top_k]]), jnp.array([[top_p]])).tolist() == [
        [value if value in stay else -np.inf for value in logits[0].tolist()]
    ]


def test_argmax_is_the_first_of_the_largest():
    values = np.array([[1, 3, 3, 0], [-np.inf] * 4, [np.inf, 0, np.inf, 1], [0, 0, 0, 1]], np.float32)
    np.testing.assert_array_equal(argmax(values), np.argmax(values, axis=1))
    assert 0 <= int(argmax(np.array([[0, np.nan, 1]], np.float32))[0]) < 3


@pytest.fixture(scope="module")
def batch():
    """A model and prompts of every length up to WIDTH."""
    params = initialize(MODEL, 0, make_mesh("data=1", jax.devices()[:1]))
    lengths = 1 + np.arange(ROWS, dtype=np.int32) % WIDTH
    words = jax.device_get(jax.random.randint(jax.random.key(2), (ROWS, WIDTH), 0, MODEL.vocab_size))
    prompts = np.where(np.arange(WIDTH) < lengths[:, None], words, 0)
    return params, prompts, lengths, jax.random.split(jax.random.key(3), ROWS)


def sample(params, prompts, lengths, keys, decoding=Decoding(), **how):  # noqa: B008
    return _sample(params, prompts, lengths, keys, decoding, **{"max_new": MAX_NEW, "end_tokens": ENDS} | how)


@functools.partial(jax.jit, static_argnames=("max_new", "end_tokens"))  # an argument left out would compile another program
def _sample(params, prompts, lengths, keys, decoding, max_new, end_tokens):
    model, how = nnx.merge(network(MODEL), params), {"max_new": max_new, "end_tokens": end_tokens}
    return generate(model, model.decode_blocks(), prompts, lengths, keys, **how, decoding=decoding)


@pytest.fixture(scope="module")
def sampled(batch):
    """What they are answered at temperature 0.7."""
    return jax.device_get(sample(*batch, Decoding(temperature=0.7)))


def test_responses_end_at_an_end_token_and_hold_zeros_after_it(sampled):
    tokens, logp, lengths = sampled.tokens, sampled.logp, sampled.lengths
    assert len(set(lengths.tolist())) >= 4  # early, late and unfinished ones
    assert (~np.isin(tokens, ENDS)).all(axis=1).any()
    assert set(ENDS) <= set(tokens.ravel().tolist())
    for row in range(ROWS):
        ends = np.flatnonzero(np.isin(tokens[row], ENDS))
        assert lengths[row] == (ends[0] + 1 if len(ends) else MAX_NEW)
        assert not tokens[row, lengths[row] :].any()
        assert not logp[row, lengths[row] :].any()
        assert (logp[row, : lengths[row]] < 0).all()


def test_a_row_does_not_depend_on_its_batch_mates_or_their_order(batch):
    params, prompts, lengths, keys = batch
    whole = jax.device_get(sample(params, prompts, lengths, keys))
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = sample(params, prompts[order], lengths[order], keys[order])
    np.testing.assert_array_equal(shuffled.tokens, whole.tokens[order])
    np.testing.assert_allclose(shuffled.logp, whole.logp[order], atol=1e-5)
    # Other mates altogether, among them ones that end at other times.
    others = prompts * (np.arange(ROWS) % 2 == 0)[:, None]
    mates = sample(params, others, lengths, keys.at[1::2].set(jax.random.key(99)))
    assert (np.asarray(mates.tokens[1::2]) != np.asarray(whole.tokens[1::2])).any()
    np.testing.assert_array_equal(mates.tokens[::2], whole.tokens[::2])
    # So is what stands in the padding of a prompt.
    padded = sample(params, np.where(np.arange(WIDTH) < lengths[:, None], prompts, np.int32(9)), lengths, keys)
    np.testing.assert_array_equal(padded.tokens, whole.tokens)
    alone = sample(params, prompts[10:11], lengths[10:11], keys[10:11])
    np.testing.assert_array_equal(alone.tokens, whole.tokens[10:11])
    np.testing.assert_allclose(alone.logp, whole.logp[10:11], atol=1e-5)


def test_greedy_responses_follow_the_full_forward_pass(batch):
    params, prompts, lengths, _ = batch
    out = sample(*batch, Decoding(temperature=0.0))
    policy = Policy(MODEL, params, None)
    rows = np.arange(ROWS)
    text = np.pad(prompts, ((0, 0), (0, MAX_NEW)))
    for i in range(MAX_NEW):
        best = np.argmax(policy.logits(text, lengths + i)[rows, lengths + i - 1], axis=1)
        going = i < np.asarray(out.lengths)
        np.testing.assert_array_equal(np.asarray(out.tokens)[going, i], best[going])
        text[rows, np.asarray(lengths) + i] = np.asarray(out.tokens)[:, i]


def test_no_response_ends_early(batch):
    """What could not end is drawn from the others: a response is what another one is up to its first end, or longer."""
    free, bound = (jax.device_get(sample(*batch, Decoding(min_new=least))) for least in (0, 4))
    assert (free.lengths < 4).any()
    assert not np.isin(bound.tokens[:, :4], ENDS).any()
    assert bound.lengths.min() == 5  # the fifth token may end it
    late = free.lengths > 4
    np.testing.assert_array_equal(free.tokens[late, 0], bound.tokens[late, 0])


def test_the_first_turn_may_have_a_key_of_its_own():
    keys, firsts = jax.random.split(jax.random.key(0), 4), jax.random.split(jax.random.key(1), 4)
    data = lambda keys: np.asarray(jax.random.key_data(keys))  # noqa: E731
    turns = jnp.array([0, 1, 0, 5])
    alone = data(jax.vmap(jax.random.fold_in)(keys, turns))
    np.testing.assert_array_equal(data(turn_keys(keys, turns)), alone)
    both = data(turn_keys(jnp.stack([firsts, keys], axis=1), turns))
    np.testing.assert_array_equal(both[[1, 3]], alone[[1, 3]])
    np.testing.assert_array_equal(both[[0, 2]], data(jax.vmap(jax.random.fold_in, (0, None))(firsts, 0))[[0, 2]])
    np.testing.assert_array_equal(data(turn_keys(keys, 2)), data(jax.vmap(jax.random.fold_in, (0, None))(keys, 2)))


@pytest.mark.parametrize("spec", ["data=1", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.slow)])
def test_rows_that_outlast_the_others_go_on_in_a_smaller_batch(batch, spec):
    params, prompts, lengths, keys = batch
    mesh = make_mesh(spec, jax.devices()[: 1 if spec == "data=1" else 8])
    placed = jax.device_put(params, shardings(MODEL, mesh))
    rows = np.arange(ROWS, dtype=np.int32)
    long = {"max_new": COMPACT_FROM + 6, "end_tokens": ENDS[:1]}
    with jax.set_mesh(mesh):
        sampler, blocks = make_sampler(network(MODEL), mesh, *long.values()), make_decode_blocks(network(MODEL))(placed)
        out = sampler(placed, blocks, prompts, lengths, keys, rows, np.int32(3), Decoding())
    out, lasting = jax.device_get(out), np.asarray(out.lengths) > 40
    assert 0 < lasting.sum() < ROWS // 4  # which a quarter of the batch holds
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 3)
    for row in [*np.flatnonzero(lasting)[:3], 0, 1]:  # one row cannot shrink
        expected = sample(params, *(a[row : row + 1] for a in (prompts, lengths, folded)), **long)
        np.testing.assert_array_equal(out.tokens[row], expected.tokens[0])
        np.testing.assert_allclose(out.logp[row], expected.logp[0], atol=1e-4)
        assert out.lengths[row] == expected.lengths[0]
