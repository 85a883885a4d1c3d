"""The update: equal to plain optax on the plain loss, whatever the micro-batches, the padding and the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax import packing
from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner import MAX_LOGITS, lr_scale, make_optimizer, make_policy_loss, make_update, token_logprobs
from hgpo_jax.mesh import make_mesh
from hgpo_jax.methods import METHODS
from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.sampling import Decoding, generate
from hgpo_jax.training_batch import TrainingBatch

MODEL = ModelConfig(
    vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip
CONFIG = LearnerConfig(
    lr=3e-3, warmup_steps=2, kl_weight=0.1, entropy_weight=0.02, weight_decay=0.05, grad_clip=0.5, clip_low=0.2,
    clip_high=0.25,
)  # fmt: skip
TEMPERATURE, END, WIDTH, MAX_NEW = 0.8, 3, 5, 3
ROWS, COUNT, MINIBATCH = 30, 20, 8  # 20 of 30 decisions are learned from, in ceil(20 / 8) = 3 mini-batches
MINIBATCHES = [(0, 7), (7, 14), (14, 20)]  # of ceil(20 / 3) = 7 decisions, the last one of what is left
LR_SCALE = 0.6
# Adam divides by the gradient's own size, so that the rounding of an element that is nearly zero (the keys' bias has such)
# moves its parameter by a whole step. With this epsilon a rounding of 1e-7 moves it by 3e-3 * 1e-7 / 1e-4 = 3e-6 at most.
EPSILON = 1e-4


def mesh_of(spec):
    count = int(np.prod([int(part.split("=")[1]) for part in spec.split(",")]))
    return make_mesh(spec, jax.devices()[:count])


@functools.cache
def parameters(seed):
    return jax.device_get(initialize(MODEL, seed, mesh_of("data=1")))


@pytest.fixture(scope="module")
def batch():
    """Sampled decisions of all lengths, with old log-probabilities a little off so that ratios get clipped."""
    lengths = 1 + jnp.arange(ROWS) % WIDTH
    prompts = jax.random.randint(jax.random.key(0), (ROWS, WIDTH), 0, 8) * (jnp.arange(WIDTH) < lengths[:, None])
    keys = jax.random.split(jax.random.key(1), ROWS)

    @jax.jit
    def sample(params):
        model = nnx.merge(network(MODEL), params)
        how = {"max_new": MAX_NEW, "end_tokens": (END,), "decoding": Decoding(temperature=TEMPERATURE)}
        return generate(model, model.decode_blocks(), prompts, lengths, keys, **how)

    out = jax.device_get(sample(parameters(0)))
    assert len(set(out.lengths.tolist())) == MAX_NEW
    return TrainingBatch(
        prompts=np.asarray(prompts), prompt_lengths=np.asarray(lengths), responses=out.tokens,
        response_lengths=out.lengths, old_logp=out.logp,
        advantages=np.random.default_rng(2).normal(size=ROWS).astype(np.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def off_policy(batch):
    noise = np.random.default_rng(3).normal(size=batch.old_logp.shape).astype(np.float32)
    return batch.replace(old_logp=batch.old_logp + 0.4 * noise)


ORDER = np.random.default_rng(4).permutation(ROWS)


def adamw(lr, eps=EPSILON):
    """The configured optimizer as optax writes it."""
    return optax.chain(
        optax.clip_by_global_norm(CONFIG.grad_clip),
        optax.adamw(lr, CONFIG.beta1, CONFIG.beta2, eps, weight_decay=CONFIG.weight_decay),
    )


@functools.cache
def compiled(spec, microbatch):
    mesh, optimizer = mesh_of(spec), adamw(CONFIG.lr)
    loss = make_policy_loss(MODEL, CONFIG, METHODS["hgpo"], TEMPERATURE)
    update = make_update(loss, optimizer, mesh, minibatch_size=MINIBATCH, microbatch_size=microbatch)
    return mesh, jax.jit(optimizer.init), jax.jit(update)


def run(batch, order=ORDER, *, spec="data=1", microbatch=8):
    mesh, init, update = compiled(spec, microbatch)
    params, reference = (jax.device_put(parameters(seed), shardings(MODEL, mesh)) for seed in (0, 1))
    args = jax.device_put((batch, jnp.int32(order), COUNT, LR_SCALE), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):  # as a job does, so that activations are split too
        params, _, stats = jax.device_get(update(params, init(params), reference, *args))
    return params, stats


def plain_logp(params, batch):
    """Token log-probabilities [N, R] and entropies by one full forward pass over prompt and response."""
    slots = batch.prompt_lengths[:, None] + np.arange(MAX_NEW)
    text = jnp.pad(batch.prompts, ((0, 0), (0, MAX_NEW)))
    text = jnp.put_along_axis(text, slots, batch.responses, axis=1, inplace=False)
    model = nnx.merge(network(MODEL), params)
    logits = model.logits(model.hidden(text, np.broadcast_to(np.arange(text.shape[1]), text.shape))) / TEMPERATURE
    logp = jax.nn.log_softmax(jnp.take_along_axis(logits, slots[..., None] - 1, axis=1))
    return jnp.take_along_axis(logp, batch.responses[..., None], axis=2)[..., 0], -(jnp.exp(logp) * logp).sum(2)


def plain_loss(params, reference, batch):
    """PPO with a dual clip + KL (k3) - entropy, the mean over the tokens of the decisions, term by term."""
    c = CONFIG
    logp, entropy = plain_logp(params, batch)
    ratio, advantage = jnp.exp(logp - batch.old_logp), batch.advantages[:, None]
    clipped = jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)
    surrogate = -jnp.minimum(ratio * advantage, clipped * advantage)
    surrogate = jnp.where(advantage < 0, jnp.minimum(surrogate, -c.dual_clip * advantage), surrogate)
    d = plain_logp(reference, batch)[0] - logp
    kl = jnp.exp(d) - d - 1
    tokens = np.arange(MAX_NEW) < batch.response_lengths[:, None]
    mean = lambda values: (values * tokens).sum() / tokens.sum()  # noqa: E731
    total = mean(surrogate) + c.kl_weight * mean(kl) - c.entropy_weight * mean(entropy)
    return total, {"loss": surrogate, "kl": kl, "entropy": entropy, "ratio": ratio}


@pytest.fixture(scope="module")
def expected(off_policy):
    """(parameters, token means, mean gradient norm) of the plain reference."""
    params, reference = parameters(0), parameters(1)
    optimizer = adamw(CONFIG.lr)
    state, sums, norms = optimizer.init(params), {}, []
    grad = jax.jit(jax.grad(plain_loss, has_aux=True))
    for first, stop in MINIBATCHES:
        part = jax.tree.map(lambda a, at=ORDER[first:stop]: a[at], off_policy)
        gradient, values = grad(params, reference, part)
        norms.append(float(optax.tree.norm(gradient)))
        tokens = np.arange(MAX_NEW) < part.response_lengths[:, None]
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + float((value * tokens).sum())
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(lambda p, u: p + LR_SCALE * u, params, updates)
    tokens = off_policy.response_lengths[ORDER[:COUNT]].sum()
    return params, {name: total / tokens for name, total in sums.items()}, np.mean(norms)


def assert_same(got, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), got, wanted)


def test_equals_plain_optax_on_the_plain_loss(off_policy, expected):
    params, stats = run(off_policy)
    assert_same(params, expected[0])
    for name, value in expected[1].items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats["grad_norm"], expected[2], rtol=1e-4)
    assert stats["optimizer_steps"] == len(MINIBATCHES)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, parameters(0))
    assert min(jax.tree.leaves(moved)) > 1e-4  # far beyond the tolerance, in every array
    assert stats["clip_fraction_low"] > 0
    assert stats["clip_fraction_high"] > 0


@pytest.mark.parametrize("microbatch", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(64, marks=pytest.mark.slow)])
def test_micro_batches_change_nothing(off_policy, expected, microbatch):
    assert_same(run(off_policy, microbatch=microbatch)[0], expected[0])


SLOW_MESHES = ("data=2", "fsdp=2", "fsdp=8", "tensor=2", "fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2")


@pytest.mark.parametrize("spec", ["data=8", *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW_MESHES)])
def test_devices_change_nothing(off_policy, expected, spec):
    params, stats = run(off_policy, spec=spec, microbatch=3)
    assert_same(params, expected[0])
    np.testing.assert_allclose(stats["kl"], expected[1]["kl"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("max_segments", [1, 4])
@pytest.mark.parametrize("spec", ["data=2", "data=2,fsdp=2,tensor=2"])
def test_packing_changes_nothing(off_policy, expected, spec, max_segments, monkeypatch):
    """Decisions that share sequences, in micro-batches that predict as many tokens as one response has, or more."""
    predictions = MAX_NEW if max_segments == 1 else 2 * MAX_NEW
    shape = packing.SequenceShape(WIDTH + MAX_NEW - 1, predictions, max_segments)
    monkeypatch.setattr(packing, "sequence_shape", lambda P, R: shape)
    compiled.cache_clear()
    assert_same(run(off_policy, spec=spec, microbatch=2)[0], expected[0])
    compiled.cache_clear()


def test_padding_changes_nothing(off_policy, expected):
    """Decisions beyond `count` may hold anything, and need not be there."""
    assert_same(run(off_policy, ORDER[:COUNT])[0], expected[0])
    bad = off_policy.replace(advantages=np.where(np.isin(np.arange(ROWS), ORDER[COUNT:]), 1e6, off_policy.advantages))
    assert_same(run(bad)[0], expected[0])


def test_the_optimizer_is_adamw_with_a_clip_and_a_linear_warm_up():
    """Gradients far from zero, so that optax's own epsilon does not matter."""
    params = {"w": jnp.array([1.0, -2.0, 0.5])}
    optimizer = make_optimizer(CONFIG)
    mine, theirs = optimizer.init(params), adamw(0.0, 1e-8).init(params)
    for number, size in enumerate((3.0, 0.1, 5.0, 0.2)):
        gradient = {"w": size * jnp.array([0.5, -1.0, 0.7 + number])}
        # Over warmup_steps = 2 steps: half the rate, then all of it.
        expected, theirs = adamw(CONFIG.lr * min((number + 1) / 2, 1), 1e-8).update(gradient, theirs, params)
        got, mine = optimizer.update(gradient, mine, params)
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5)
        params = optax.apply_updates(params, got)


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("iterations", [2, 3, 80])
def test_the_rate_falls_evenly_from_all_of_it_to_final_lr(final, iterations):
    shares = [lr_scale(LearnerConfig(final_lr=final), i, iterations) for i in range(iterations)]
    np.testing.assert_allclose(shares, np.linspace(1, final, iterations), atol=1e-12)


def test_one_iteration_alone_has_the_full_rate():
    assert lr_scale(LearnerConfig(final_lr=0.1), 0, 1) == 1


def test_the_log_probability_difference_is_to_the_sampler_in_the_first_mini_batch(batch):
    params, stats = run(batch)
    assert stats["logp_difference"] < 1e-4
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, parameters(0))
    assert max(jax.tree.leaves(moved)) > 1e-3  # later mini-batches did see other parameters
    for at, in_first in ((ORDER[3], True), (ORDER[10], False)):
        shifted = batch.old_logp.copy()
        shifted[at, 0] -= 0.5
        difference = run(batch.replace(old_logp=shifted))[1]["logp_difference"]
        assert abs(difference - 0.5) < 1e-4 if in_first else difference < 1e-4


def linear_loss(params, _, batch):
    """One parameter per decision (its number stands in the prompt): the gradient counts how often it is used."""
    tokens = batch.response_lengths.astype(jnp.float32)
    total = (params[batch.prompts[:, 0]] * tokens).sum()
    stats = {"tokens": (tokens.sum(), jnp.float32(1)), "length": (tokens.sum(), (tokens > 0).sum().astype(jnp.float32))}
    return total, stats, jnp.float32(0)


@pytest.mark.parametrize("spec", ["data=1", "data=2", "data=8"])
@pytest.mark.parametrize("microbatch", [1, 3, 16])
def test_every_decision_is_used_exactly_once(spec, microbatch):
    mesh, N = mesh_of(spec), 24
    update = jax.jit(make_update(linear_loss, optax.sgd(1.0), mesh, minibatch_size=MINIBATCH, microbatch_size=microbatch))
    lengths = 1 + np.arange(N) % 3
    batch = TrainingBatch(
        prompts=np.arange(N)[:, None], prompt_lengths=np.ones(N, int), responses=np.zeros((N, 3), int),
        response_lengths=lengths, old_logp=np.zeros((N, 3)), advantages=np.zeros(N),
    )  # fmt: skip
    order = np.random.default_rng(5).permutation(N)
    for count in (1, 8, 9, 17, 23, 24):
        weights, _, stats = update(jnp.zeros(N), optax.sgd(1.0).init(jnp.zeros(N)), None, batch, order, count, 1.0)
        steps = -(-count // MINIBATCH)
        size = -(-count // steps)
        wanted = np.zeros(N)
        for first in range(0, count, size):
            used = order[first : min(first + size, count)]
            wanted[used] = -lengths[used] / lengths[used].sum()
        np.testing.assert_allclose(weights, wanted, atol=1e-6)
        assert stats["optimizer_steps"] == steps
        assert stats["length"] == pytest.approx(lengths[order[:count]].mean())
    assert update._cache_size() == 1  # one program for every number of decisions


def test_without_a_decision_nothing_moves(batch):
    """Neither momentum and weight decay the parameters, nor the warm-up, which counts the optimizer's steps."""
    mesh, init, update = compiled("data=1", 8)
    params, reference = (jax.device_put(parameters(seed), shardings(MODEL, mesh)) for seed in (0, 1))
    args = jax.device_put((batch, jnp.int32(ORDER)), NamedSharding(mesh, PartitionSpec()))
    before = update(params, init(params), reference, *args, COUNT, LR_SCALE)[:2]
    *after, stats = update(*before, reference, *args, 0, LR_SCALE)
    jax.tree.map(np.testing.assert_array_equal, after, list(before))
    assert not any(jax.tree.leaves(jax.device_get(stats)))


def test_losses_by_decision_divide_by_decisions():
    mesh, N = mesh_of("data=1"), 6
    loss = lambda w, _, batch: ((w[batch.prompts[:, 0]] * (batch.response_lengths > 0)).sum(), {}, jnp.float32(0))  # noqa: E731
    batch = TrainingBatch(
        prompts=np.arange(N)[:, None], prompt_lengths=np.ones(N, int), responses=np.zeros((N, 3), int),
        response_lengths=np.array([1, 2, 3, 1, 2, 3]), old_logp=np.zeros((N, 3)), advantages=np.zeros(N),
    )  # fmt: skip
    update = jax.jit(make_update(loss, optax.sgd(1.0), mesh, minibatch_size=8, microbatch_size=4, per_token=False))
    weights, _, _ = update(jnp.zeros(N), optax.sgd(1.0).init(jnp.zeros(N)), None, batch, np.arange(N), 5, 1.0)
    np.testing.assert_allclose(weights, [-0.2] * 5 + [0], atol=1e-6)


@pytest.mark.parametrize("max_logits", [1, 2 * ROWS * 8])  # one and two of three response tokens at a time
def test_logits_in_chunks_give_the_same_and_the_same_gradient(off_policy, max_logits):
    def total(params, limit):
        model = nnx.merge(network(MODEL), params)
        logp, entropy = token_logprobs(model, off_policy, temperature=TEMPERATURE, max_logits=limit)
        return (logp * jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)).sum() + 0.3 * (entropy**2).sum(), (logp, entropy)

    compute = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    assert_same(compute(parameters(0), max_logits), compute(parameters(0), MAX_LOGITS))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("mesh", ["data=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_a_mini_batch_that_is_not_finite_is_as_if_it_had_not_been(batch, value, mesh):
    """Only its optimizer step is missing: parameters and means are those of the other mini-batches."""
    bad = MINIBATCHES[1]
    advantages = np.array(batch.advantages)
    advantages[ORDER[bad[0]]] = value
    params, stats = run(batch.replace(advantages=advantages), spec=mesh)
    assert (stats["nonfinite_steps"], stats["optimizer_steps"]) == (1, 3)
    assert all(np.isfinite(stats[name]) for name in stats)
    others = np.delete(ORDER[:COUNT], slice(*bad))
    # The mini-batches of 13 decisions are of 7 and 6, as the two that are left.
    wanted, expected = run_of(batch, others)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), params, wanted)
    for name in ("loss", "kl", "entropy", "ratio", "grad_norm"):
        assert stats[name] == pytest.approx(expected[name], abs=1e-5), name
    _, usual = run(batch, spec=mesh)
    assert usual["nonfinite_steps"] == 0


def run_of(batch, order):
    """The update on these decisions alone."""
    mesh, init, update = compiled("data=1", 8)
    params, reference = (jax.device_put(parameters(seed), shardings(MODEL, mesh)) for seed in (0, 1))
    padded = jnp.int32(np.concatenate([order, np.setdiff1d(ORDER, order)]))
    args = jax.device_put((batch, padded, len(order), LR_SCALE), NamedSharding(mesh, PartitionSpec()))
    params, _, stats = jax.device_get(update(params, init(params), reference, *args))
    return params, stats
