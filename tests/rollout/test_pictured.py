"""Rollouts and updates with pictures: against plain play, and against the policy's way from pixels to logits on the host."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.sokoban import SokobanPixels, expert
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.learner.objective import make_cloning_loss
from hgpo_jax.policy import Policy, initialize, network, shardings
from hgpo_jax.policy.pictures import see
from hgpo_jax.policy.tokenizer import vocabulary_size
from hgpo_jax.rollout.compiled import Program, make_rollout
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding, generate, sample_next
from hgpo_jax.setup.sight import small_model
from hgpo_jax.trainer.behavior_cloning import generate_play
from hgpo_jax.trainer.step import training_batch
from tests.helpers.plain_rollout import action_of
from tests.helpers.tiny import mesh_of

ENV = SokobanPixels(size=6, max_turns=3, tile=2)
END, ACT = len(ENV.words) + 1, len(ENV.words) + 2
IMAGE = ENV.picture_words[1]
SIZES = (
    "policy.hidden_size=24", "policy.intermediate_size=32", "policy.num_hidden_layers=2", "policy.vision_hidden_size=8",
    "policy.vision_intermediate_size=12",
)  # fmt: skip
MODEL = small_model(load(None, SIZES).policy, vocabulary_size(ENV.words), ENV)
GROUPS, MEMBERS, TEMPERATURE = 4, 2, 0.8
B = GROUPS * MEMBERS
INDICES = np.arange(B) // MEMBERS


@functools.cache
def parameters():
    """With scales that make what is seen matter."""
    params = jax.device_get(initialize(MODEL, 1, mesh_of()))
    params["visual"] = jax.tree.map(lambda a: a * 3, params["visual"])
    return params


@functools.cache
def play(spec="data=1", constrained=False):
    sizes = {"history_length": 0, "decode_batch_size": 4, "constrained": constrained}
    program = functools.partial(Program, graphdefs={SHARED: network(MODEL)}, **sizes, end=END, act=ACT)
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        placed = jax.device_put(parameters(), shardings(MODEL, mesh))
        inputs = task_keys("train", 3, INDICES), jax.random.split(jax.random.key(5), B), jnp.int32(INDICES)
        rollout = make_rollout(ENV, program, mesh)
        return jax.device_get(rollout({SHARED: placed}, *inputs, Decoding(temperature=TEMPERATURE)))


def masked_logps(logits):
    """Log-probabilities of what may be written, in NumPy."""
    logits = np.array(logits, np.float64) / TEMPERATURE
    logits[..., IMAGE] = -np.inf
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logps_by_hand(prompts, lengths, responses, pixels):
    """f32[N, R] by the policy's own way for pictures on the host, one forward pass over prompt and response."""
    policy = Policy(MODEL, parameters(), None)
    pictures, _ = policy.see([[one] for one in np.asarray(pixels)])
    R = responses.shape[1]
    text = np.pad(np.asarray(prompts), ((0, 0), (0, R)))
    slots = np.asarray(lengths)[:, None] + np.arange(R)
    np.put_along_axis(text, slots, responses, 1)
    logps = masked_logps(policy.logits(text, lengths + R, pictures))
    return np.take_along_axis(np.take_along_axis(logps, slots[..., None] - 1, 1), responses[..., None], 2)[..., 0]


def test_episodes_are_what_plain_play_and_the_host_say():
    e = play()
    step, reset, render, compared = *map(jax.jit, (ENV.step, ENV.reset, lambda state: ENV.render(state, 2))), 0
    goal = ENV.word_id["push_every_box_onto_a_target"]
    before, feature, after = ENV.picture_words
    prompt, keys = [goal, before, *[feature] * 36, after, ACT], task_keys("train", 3, INDICES)
    for b in range(B):
        state, _ = reset(keys[b])
        for t in range(int(e.mask[b].sum())):
            np.testing.assert_array_equal(e.pictures[b, t], render(state))
            assert e.prompts[b, t].tolist() == prompt and e.prompt_lengths[b, t] == len(prompt)
            action, _ = action_of(e.responses[b, t, : e.response_lengths[b, t]].tolist(), END, 1)
            state, *_ = step(state, action)
            compared += 1
    assert compared > B and e.pictures.dtype == np.uint8 and len(np.unique(e.states[e.mask])) > GROUPS - 1
    happened = e.mask.reshape(-1)
    flat = lambda a: a.reshape(-1, *a.shape[2:])[happened]  # noqa: E731
    logps = logps_by_hand(*map(flat, (e.prompts, e.prompt_lengths, e.responses, e.pictures)))
    written = np.arange(2) < flat(e.response_lengths)[:, None]
    assert written[:, 1].sum() > 5  # decoded after the prompt, at positions that the picture shifts
    np.testing.assert_allclose(flat(e.logp)[written], logps[written], atol=1e-5)


@pytest.mark.parametrize("constrained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_learner_reads_what_the_sampler_saw(constrained):
    e = play(constrained=constrained)
    batch = jax.tree.map(jnp.asarray, training_batch(e))
    model = nnx.merge(network(MODEL), parameters())
    logp, entropy = jax.jit(lambda batch: token_logprobs(model, batch, temperature=TEMPERATURE))(batch)
    mask = np.asarray(batch.response_mask()) & e.mask.reshape(-1, 1)
    np.testing.assert_allclose(np.where(mask, logp, 0), np.where(mask, batch.old_logp, 0), atol=1e-5)
    assert np.isfinite(entropy).all()
    other = batch.replace(pictures=batch.pictures[::-1])
    seen, _ = jax.jit(lambda batch: token_logprobs(model, batch, temperature=TEMPERATURE))(other)
    assert np.abs(np.where(mask, seen - logp, 0)).max() > 1e-3  # it matters which picture it is


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["data=2", "data=1,fsdp=2", "data=1,tensor=2"])
def test_meshes_change_nothing(spec):
    e, other = play(), play(spec)
    for name, value in e.arrays().items():
        if name == "logp":
            np.testing.assert_allclose(value, other.logp, atol=1e-5)
        else:
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


def test_saved_episodes_keep_their_pictures(tmp_path):
    e = play()
    e.save(tmp_path / "e.npz")
    loaded = type(e).load(tmp_path / "e.npz")
    np.testing.assert_array_equal(loaded.pictures, e.pictures)
    e.replace(pictures=e.pictures.astype(np.float32)).save(tmp_path / "wrong.npz")
    with pytest.raises(ValueError, match="pictures is float32"):
        type(e).load(tmp_path / "wrong.npz")


def test_an_image_token_is_never_sampled():
    """However likely the network says it is."""
    model = SimpleNamespace(c=MODEL, logits=lambda hidden: hidden)
    logits = np.random.default_rng(0).standard_normal((64, MODEL.vocab_size)).astype(np.float32)
    logits[:, IMAGE] = 50
    keys = jax.random.split(jax.random.key(0), 64)
    for temperature in (0.0, 1.0):
        decoding = Decoding(temperature=temperature, top_p=0.9 if temperature else 1.0)
        token, logp = sample_next(model, jnp.asarray(logits), keys, 0, end_tokens=(END,), decoding=decoding)
        assert IMAGE not in token.tolist() and (logp > -10).all()


def test_long_answers_of_rows_that_are_compacted():
    """Every row of a batch keeps its own offset of rotary positions."""
    e = play()
    prompts, lengths, pixels = (jnp.asarray(a[:, 0]) for a in (e.prompts, e.prompt_lengths, e.pictures))

    @jax.jit
    def sample(params):
        model = nnx.merge(network(MODEL), params)
        options = {"max_new": 64, "end_tokens": tuple(range(20, 30)), "decoding": Decoding(temperature=TEMPERATURE)}
        keys = jax.random.split(jax.random.key(2), B)
        return generate(model, model.decode_blocks(), prompts, lengths, keys, **options, pictures=see(model, pixels))

    out = jax.device_get(sample(parameters()))
    assert out.lengths.max() > 4 * np.median(out.lengths) / 3 and len(set(out.lengths.tolist())) > 3
    written = np.arange(64) < out.lengths[:, None]
    logps = logps_by_hand(prompts, lengths, out.tokens, pixels)
    np.testing.assert_allclose(out.logp[written], logps[written], atol=1e-5)


@pytest.mark.slow
def test_cloning_sees_the_rooms_of_the_play():
    tasks = task_keys("warm_start", 0, jnp.arange(6))
    options = {"noise": 0.0, "history_length": 0, "end": END, "act": ACT}
    decisions, _ = generate_play(ENV, expert, jax.random.key(0), tasks, **options)
    rows = jax.device_get(jax.tree.map(lambda a: a.reshape(6, 3, *a.shape[1:]), decisions))
    step = jax.jit(ENV.step)
    for b in range(6):
        state, _ = ENV.reset(tasks[b])
        for t in range(3):
            if rows.response_lengths[b, t]:
                np.testing.assert_array_equal(rows.pictures[b, t], ENV.render(state, 2))
                state, *_ = step(state, jnp.asarray(rows.responses[b, t, :1]))
    loss = make_cloning_loss(MODEL)
    gradient = jax.jit(jax.grad(lambda params: loss(params, None, decisions)[0]))(parameters())
    assert all(np.abs(a).max() > 0 for a in jax.tree.leaves(gradient["visual"]))
