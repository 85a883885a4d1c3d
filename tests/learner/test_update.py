"""The update: equal to plain optax on the plain loss, whatever the micro-batches, the padding and the devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner import packing
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.logprobs import MAX_LOGITS, token_logprobs
from hgpo_jax.learner.methods import METHODS
from hgpo_jax.learner.objective import make_policy_loss
from hgpo_jax.learner.optimizer import BETA1, BETA2, lr_scale, make_optimizer
from hgpo_jax.learner.update import make_update
from hgpo_jax.policy import network, shardings
from tests.helpers.tiny import MODEL, WORDS, mesh_of, parameters

CONFIG = LearnerConfig(
    lr=3e-3, warmup_steps=2, kl_weight=0.1, entropy_weight=0.02, weight_decay=0.05, grad_clip=0.5, clip_low=0.2,
    clip_high=0.25,
)  # fmt: skip
TEMPERATURE, WIDTH, MAX_NEW = 0.8, 5, 3
ROWS, COUNT, MINIBATCH = 30, 20, 8  # 20 of 30 decisions are learned from, in ceil(20 / 8) = 3 mini-batches
MINIBATCHES = [(0, 7), (7, 14), (14, 20)]  # of ceil(20 / 3) = 7 decisions, the last one of what is left
ORDER = np.random.default_rng(4).permutation(ROWS)
LR_SCALE = 0.6
# Adam divides by the gradient's own size, so that the rounding of an element that is nearly zero (the keys' bias has such)
# moves its parameter by a whole step. With this epsilon a rounding of 1e-7 moves it by 3e-3 * 1e-7 / 1e-4 = 3e-6 at most.
EPSILON = 1e-4


@pytest.fixture(scope="module")
def batch():
    """Decisions of all lengths, with the log-probabilities of `parameters(0)`."""
    rng = np.random.default_rng(2)
    lengths = 1 + np.arange(ROWS) % WIDTH
    batch = TrainingBatch(
        prompts=np.int32(rng.integers(0, WORDS, (ROWS, WIDTH)) * (np.arange(WIDTH) < lengths[:, None])),
        prompt_lengths=np.int32(lengths), responses=np.int32(rng.integers(0, WORDS, (ROWS, MAX_NEW))),
        response_lengths=np.int32(rng.integers(1, MAX_NEW + 1, ROWS)), old_logp=None,
        advantages=np.float32(rng.normal(size=ROWS)),
    )  # fmt: skip
    return batch.replace(old_logp=np.asarray(plain_logp(parameters(0), batch)[0]))


@pytest.fixture(scope="module")
def off_policy(batch):
    """The same a little off, so that ratios get clipped."""
    noise = np.random.default_rng(3).normal(size=batch.old_logp.shape).astype(np.float32)
    return batch.replace(old_logp=batch.old_logp + 0.4 * noise)


def adamw(lr, eps=EPSILON):
    """The configured optimizer as optax writes it."""
    return optax.chain(
        optax.clip_by_global_norm(CONFIG.grad_clip),
        optax.adamw(lr, BETA1, BETA2, eps, weight_decay=CONFIG.weight_decay),
    )


@functools.cache
def compiled(spec, microbatch, shape):
    """(the optimizer's `init`, the update). shape: `sequence_shape` under which it is traced, of which this is a key."""
    mesh, optimizer = mesh_of(spec), adamw(CONFIG.lr)
    loss = make_policy_loss(MODEL, CONFIG, METHODS["hgpo"], TEMPERATURE)
    update = make_update(loss, optimizer, mesh, minibatch_size=MINIBATCH, microbatch_size=microbatch)
    return jax.jit(optimizer.init), jax.jit(update)


def run(batch, order=ORDER, count=COUNT, *, spec="data=1", microbatch=3, state=None):
    """(parameters, the optimizer's state, statistics). state: parameters and optimizer's state to begin with."""
    mesh, (init, update) = mesh_of(spec), compiled(spec, microbatch, packing.sequence_shape(WIDTH, MAX_NEW))
    params, reference = (jax.device_put(parameters(seed), shardings(MODEL, mesh)) for seed in (0, 1))
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.device_put((batch, jnp.int32(order), jnp.int32(count), jnp.float32(LR_SCALE)), whole)
    with jax.set_mesh(mesh):  # as a job does, so that activations are split too
        return jax.device_get(update(*(jax.device_put(state, whole) if state else (params, init(params))), reference, *args))


@jax.jit
def plain_logp(params, batch):
    """Token log-probabilities [N, R] and entropies by one full forward pass over prompt and response."""
    slots = batch.prompt_lengths[:, None] + np.arange(MAX_NEW)
    text = jnp.pad(batch.prompts, ((0, 0), (0, MAX_NEW)))
    text = jnp.put_along_axis(text, slots, batch.responses, axis=1, inplace=False)
    model = nnx.merge(network(MODEL), params)
    logits = model.logits(model.hidden(text, np.broadcast_to(np.arange(text.shape[1]), text.shape))) / TEMPERATURE
    logp = jax.nn.log_softmax(jnp.take_along_axis(logits, slots[..., None] - 1, axis=1))
    return jnp.take_along_axis(logp, batch.responses[..., None], axis=2)[..., 0], -(jnp.exp(logp) * logp).sum(2)


def plain_loss(params, reference, batch, counts):
    """PPO with a dual clip + KL (k3, at most 10) - entropy, term by term: the mean over tokens of the decisions that count."""
    c = CONFIG
    logp, entropy = plain_logp(params, batch)
    ratio, advantage = jnp.exp(logp - batch.old_logp), batch.advantages[:, None]
    clipped = jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)
    surrogate = -jnp.minimum(ratio * advantage, clipped * advantage)
    surrogate = jnp.where(advantage < 0, jnp.minimum(surrogate, -3.0 * advantage), surrogate)
    d = plain_logp(reference, batch)[0] - logp
    kl = jnp.minimum(jnp.exp(d) - d - 1, 10)
    tokens = (np.arange(MAX_NEW) < batch.response_lengths[:, None]) & counts[:, None]
    sums = {name: (values * tokens).sum() for name, values in
            {"loss": surrogate, "kl": kl, "entropy": entropy, "ratio": ratio}.items()}  # fmt: skip
    total = sums["loss"] + c.kl_weight * sums["kl"] - c.entropy_weight * sums["entropy"]
    return total / tokens.sum(), sums


@pytest.fixture(scope="module")
def expected(off_policy):
    """(parameters, token means, mean gradient norm) of the plain reference."""
    params, reference = parameters(0), parameters(1)
    optimizer = adamw(CONFIG.lr)
    state, sums, norms = optimizer.init(params), [], []
    grad = jax.jit(jax.grad(plain_loss, has_aux=True))
    for first, stop in MINIBATCHES:
        gradient, of_one = grad(params, reference, off_policy, np.isin(np.arange(ROWS), ORDER[first:stop]))
        norms.append(float(optax.tree.norm(gradient)))
        sums.append(of_one)
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = jax.tree.map(lambda p, u: p + LR_SCALE * u, params, updates)
    tokens = off_policy.response_lengths[ORDER[:COUNT]].sum()
    return params, jax.tree.map(lambda *parts: sum(parts) / tokens, *sums), np.mean(norms)


def assert_same(got, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), got, wanted)


def moved(params) -> list:
    """How far each array is from `parameters(0)` at most."""
    return jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), params, parameters(0)))


@pytest.mark.slow  # one more update to compile
def test_words_of_others_mean_nothing_even_those_beyond_the_vocabulary(batch):
    """As those of a role whose policy has another tokenizer: they stand in unused entries of micro-batches."""
    count = COUNT - 1  # the last of 3 mini-batches has 5 decisions, and its second micro-batch of 3 an unused entry
    others = np.isin(np.arange(ROWS), ORDER[count:])[:, None]
    foreign = batch.replace(prompts=np.where(others, 10**6, batch.prompts), responses=np.where(others, 10**6, batch.responses))
    expected, actual = run(batch, count=count), run(foreign, count=count)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert actual[2]["nonfinite_steps"] == 0


def test_equals_plain_optax_on_the_plain_loss(off_policy, expected):
    params, _, stats = run(off_policy)
    assert_same(params, expected[0])
    for name, value in expected[1].items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats["grad_norm"], expected[2], rtol=1e-4)
    assert (stats["optimizer_steps"], stats["nonfinite_steps"]) == (len(MINIBATCHES), 0)
    assert min(moved(params)) > 1e-4  # far beyond the tolerance, in every array
    assert stats["clip_fraction_low"] > 0 and stats["clip_fraction_high"] > 0
    # Decisions beyond `count` may hold anything.
    bad = np.where(np.isin(np.arange(ROWS), ORDER[COUNT:]), np.float32(1e6), off_policy.advantages)
    jax.tree.map(np.testing.assert_array_equal, run(off_policy.replace(advantages=bad))[0], params)


SLOW = [("data=1", 64), ("fsdp=8", 3), ("data=2,fsdp=2,tensor=2", 3)]


@pytest.mark.parametrize(
    ("spec", "microbatch"), [("data=8", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_micro_batches_and_devices_change_nothing(off_policy, expected, spec, microbatch):
    params, _, stats = run(off_policy, spec=spec, microbatch=microbatch)
    assert_same(params, expected[0])
    np.testing.assert_allclose(stats["kl"], expected[1]["kl"], rtol=1e-4)


def test_the_optimizer_is_adamw_with_a_clip_and_a_linear_warm_up():
    """Gradients far from zero, so that optax's own epsilon does not matter."""
    params = {"w": jnp.array([1.0, -2.0, 0.5])}
    optimizer = make_optimizer(CONFIG.lr, CONFIG.warmup_steps, CONFIG.grad_clip, weight_decay=CONFIG.weight_decay)
    mine, theirs = optimizer.init(params), adamw(0.0, 1e-8).init(params)
    for number, size in enumerate((3.0, 0.1, 5.0, 0.2)):
        gradient = {"w": size * jnp.array([0.5, -1.0, 0.7 + number])}
        # Over warmup_steps = 2 steps: half the rate, then all of it.
        expected, theirs = adamw(CONFIG.lr * min((number + 1) / 2, 1), 1e-8).update(gradient, theirs, params)
        got, mine = optimizer.update(gradient, mine, params)
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5)
        params = optax.apply_updates(params, got)


@pytest.mark.parametrize(("final", "iterations"), [(0.0, 2), (0.1, 3), (1.0, 80)])
def test_the_rate_falls_evenly_from_all_of_it_to_final_lr(final, iterations):
    shares = [lr_scale(LearnerConfig(final_lr=final), i, iterations) for i in range(iterations)]
    np.testing.assert_allclose(shares, np.linspace(1, final, iterations), atol=1e-12)
    assert lr_scale(LearnerConfig(final_lr=final), 0, 1) == 1  # one iteration alone has the full rate


def test_the_log_probability_difference_is_to_the_sampler_in_the_first_mini_batch(batch):
    params, _, stats = run(batch)
    assert stats["logp_difference"] < 1e-4
    assert max(moved(params)) > 1e-3  # later mini-batches did see other parameters
    for at, in_first in ((ORDER[3], True), (ORDER[10], False)):
        shifted = batch.old_logp.copy()
        shifted[at, 0] -= 0.5
        difference = run(batch.replace(old_logp=shifted))[2]["logp_difference"]
        assert abs(difference - 0.5) < 1e-4 if in_first else difference < 1e-4


def linear_loss(params, _, batch, by_token=True):
    """One parameter per decision (its number stands in the prompt): the gradient counts how often it is used."""
    tokens = (batch.response_lengths if by_token else batch.response_lengths > 0).astype(jnp.float32)
    total = (params[batch.prompts[:, 0]] * tokens).sum()
    return total, {"length": (tokens.sum(), (tokens > 0).sum().astype(jnp.float32))}, jnp.float32(0)


@pytest.mark.parametrize(
    ("spec", "microbatch", "by_token"), [("data=1", 3, True), ("data=1", 16, False), ("data=2", 16, True), ("data=8", 1, True)]
)
def test_every_decision_is_used_exactly_once(spec, microbatch, by_token):
    """And divided by the tokens of its mini-batch, or by the decisions."""
    N, sizes = 24, {"minibatch_size": MINIBATCH, "microbatch_size": microbatch, "per_token": by_token}
    loss = functools.partial(linear_loss, by_token=by_token)
    update = jax.jit(make_update(loss, optax.sgd(1.0), mesh_of(spec), **sizes))
    lengths = 1 + np.arange(N) % 3
    weights = lengths if by_token else np.ones(N)
    batch = TrainingBatch(
        prompts=np.arange(N)[:, None], prompt_lengths=np.ones(N, int), responses=np.zeros((N, 3), int),
        response_lengths=lengths, old_logp=np.zeros((N, 3)), advantages=np.zeros(N),
    )  # fmt: skip
    order = np.random.default_rng(5).permutation(N)
    for count in (1, 8, 9, 17, 23, 24):
        moves, _, stats = update(np.zeros(N, np.float32), optax.sgd(1.0).init(0), None, batch, order, count, 1.0)
        steps = -(-count // MINIBATCH)
        size = -(-count // steps)
        wanted = np.zeros(N)
        for first in range(0, count, size):
            used = order[first : min(first + size, count)]
            wanted[used] = -weights[used] / weights[used].sum()
        np.testing.assert_allclose(moves, wanted, atol=1e-6)
        assert stats["optimizer_steps"] == steps
        assert stats["length"] == pytest.approx(weights[order[:count]].mean())
    assert update._cache_size() == 1  # one program for every number of decisions
    fewer, *_ = update(np.zeros(N, np.float32), optax.sgd(1.0).init(0), None, batch, order[:23], 23, 1.0)
    jax.tree.map(np.testing.assert_array_equal, fewer == 0, np.arange(N) == order[23])  # what is not needed need not be there


def test_gradients_of_bfloat16_are_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256; over devices, XLA's CPU compiler ends the process for it."""
    N = 600
    batch = TrainingBatch(
        prompts=np.zeros((N, 1), int), prompt_lengths=np.ones(N, int), responses=np.zeros((N, 3), int),
        response_lengths=np.full(N, 3), old_logp=np.zeros((N, 3)), advantages=np.zeros(N),
    )  # fmt: skip
    loss, sgd = functools.partial(linear_loss, by_token=False), optax.sgd(1.0)
    sizes = {"minibatch_size": N, "microbatch_size": 1, "per_token": False, "compute_dtype": "bfloat16"}
    update = make_update(loss, sgd, mesh_of("data=2"), **sizes)
    traced = jax.jit(update).trace(jnp.zeros(1, jnp.bfloat16), sgd.init(0), None, batch, np.arange(N), N, 1.0)
    assert not re.search(r":bf16\[.* = psum", str(traced.jaxpr))
    moved, *_ = traced.lower().compile()(jnp.zeros(1, jnp.bfloat16), sgd.init(0), None, batch, np.arange(N), N, 1.0)
    assert (moved.dtype, float(moved[0])) == (jnp.bfloat16, -1.0)


def test_without_a_decision_nothing_moves(batch):
    """Neither momentum and weight decay the parameters, nor the warm-up, which counts the optimizer's steps."""
    before = run(batch)[:2]
    *after, stats = run(batch, count=0, state=before)
    jax.tree.map(np.testing.assert_array_equal, after, list(before))
    assert not any(jax.tree.leaves(stats))


@pytest.mark.parametrize("max_logits", [1, 2 * ROWS * WORDS])  # one and two of three response tokens at a time
def test_logits_in_chunks_give_the_same_and_the_same_gradient(off_policy, max_logits):
    def total(params, limit):
        model = nnx.merge(network(MODEL), params)
        logp, entropy = token_logprobs(model, off_policy, temperature=TEMPERATURE, max_logits=limit)
        return (logp * jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)).sum() + 0.3 * (entropy**2).sum(), (logp, entropy)

    compute = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    assert_same(compute(parameters(0), max_logits), compute(parameters(0), MAX_LOGITS))


@pytest.mark.parametrize("spec", ["data=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_a_mini_batch_that_is_not_finite_is_as_if_it_had_not_been(batch, spec):
    """Only its optimizer step is missing: parameters and means are those of the other mini-batches."""
    first, stop = MINIBATCHES[1]
    # The mini-batches of 13 decisions are of 7 and 6, as the two that are left.
    others = np.delete(ORDER[:COUNT], slice(first, stop))
    wanted, _, expected = run(batch, np.concatenate([others, np.setdiff1d(ORDER, others)]), len(others), spec=spec)
    for value in (np.nan, np.inf):
        advantages = batch.advantages.copy()
        advantages[ORDER[first]] = value
        params, _, stats = run(batch.replace(advantages=advantages), spec=spec)
        assert (stats["nonfinite_steps"], stats["optimizer_steps"]) == (1, 3)
        assert all(np.isfinite(stats[name]) for name in stats)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), params, wanted)
        for name in ("loss", "kl", "entropy", "ratio", "grad_norm"):
            assert stats[name] == pytest.approx(expected[name], abs=1e-5), name
