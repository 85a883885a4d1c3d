"""Packing: every segment is in one sequence once, within its bounds, and computes there what it computes unpacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hgpo_jax.learner import packing
from hgpo_jax.learner.batch import TrainingBatch, assign_to_sequences, gather_microbatch
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.learner.packing import SequenceShape
from hgpo_jax.policy import network
from tests.helpers.tiny import MODEL, parameters

SHAPE = SequenceShape(slots=12, predictions=5, max_decisions=3)


def plain_first_fit(lengths, predictions):
    """The same in plain Python: [(sequence, slot, offset)], None for a segment that is left out."""
    sequences, out = [], [None] * len(lengths)
    for segment in sorted(range(len(lengths)), key=lambda segment: -lengths[segment]):
        if lengths[segment] == 0:
            continue
        for number in range(len(sequences) + 1):
            if number == len(sequences):
                sequences.append([0, 0, 0])
            slots, predicted, segments = sequences[number]
            after = slots + lengths[segment], predicted + predictions[segment], segments + 1
            if all(used <= limit for used, limit in zip(after, SHAPE, strict=True)):
                out[segment] = (number, slots, predicted)
                sequences[number] = after
                break
    return out


@given(st.lists(st.tuples(st.integers(0, SHAPE.slots), st.integers(1, SHAPE.predictions)), min_size=1, max_size=24))
@example([(1, 1)] * 24)  # the number of segments is the bound
@example([(SHAPE.slots // 2, 1)] * 24)  # the slots are
@example([(1, SHAPE.predictions)] * 24)  # the predictions are
@settings(deadline=None, max_examples=60)
def test_segments_are_assigned_first_fit(segments):
    lengths, predictions = np.array(segments).T
    padded = np.zeros((2, 24), int)
    padded[:, : len(segments)] = lengths, predictions
    assigned = [np.asarray(a)[: len(segments)] for a in FIRST_FIT(*padded)]
    for got, plain in zip(zip(*assigned, strict=True), plain_first_fit(lengths, predictions), strict=True):
        assert tuple(map(int, got)) == plain if plain else got[0] == 24


FIRST_FIT = jax.jit(lambda lengths, predictions: packing.first_fit(lengths, predictions, SHAPE))


def test_unpacked_every_segment_has_the_next_sequence():
    lengths, predictions = jnp.array([3, 0, 5, 0, 1]), jnp.array([1, 1, 2, 1, 1])
    sequence, slot, offset = packing.first_fit(lengths, predictions, SHAPE._replace(max_decisions=1))
    assert sequence.tolist() == [0, 5, 1, 5, 2]
    assert not slot.any() and not offset.any()


N, P, R = 23, 7, 4


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    batch = TrainingBatch(
        prompts=rng.integers(1, 11, (N, P)), prompt_lengths=rng.integers(1, P + 1, N),
        responses=rng.integers(1, 11, (N, R)), response_lengths=rng.integers(0, R + 1, N),
        old_logp=np.zeros((N, R)), advantages=np.zeros(N),
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
    ("M", "max_decisions"), [(2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 1), (1, 3)))]
)
def test_micro_batches_hold_each_decision_once_and_compute_what_it_computes_unpacked(batch, M, max_decisions, monkeypatch):
    shape = SequenceShape(P + R - 1, 2 * R if max_decisions > 1 else R, max_decisions)
    monkeypatch.setattr(packing, "sequence_shape", lambda P, R: shape)
    model = nnx.merge(network(MODEL), parameters(0))
    compute = jax.jit(lambda batch: token_logprobs(model, batch))
    unpacked = [np.asarray(a) for a in compute(batch)]
    order, begin, stop = np.random.default_rng(1).permutation(N), 2, 19
    assignment, sequences = assign_to_sequences(batch, jnp.asarray(order), begin, stop, stop - begin)
    gather = jax.jit(lambda first: gather_microbatch(batch, assignment, first, M))
    gathered = []
    for first in range(0, int(sequences), M):
        index, microbatch = gather(first)
        real = np.asarray(microbatch.response_lengths) > 0
        gathered += np.asarray(index)[real].tolist()
        logp, entropy = compute(microbatch)
        np.testing.assert_allclose(logp[real], unpacked[0][index[real]], atol=1e-5)
        np.testing.assert_allclose(entropy[real], unpacked[1][index[real]], atol=1e-5)
        assert not microbatch.response_lengths[~real].any()
    expected = np.array([decision for decision in order[begin:stop] if batch.response_lengths[decision]])
    assert sorted(gathered) == sorted(expected.tolist())
    least = -(-int((batch.prompt_lengths + batch.response_lengths - 1)[expected].sum()) // (P + R - 1))
    assert sequences == len(expected) if max_decisions == 1 else least <= sequences < len(expected)
