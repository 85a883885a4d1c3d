"""Continuous batching gives each request what `generate` gives its prompt alone, whoever is in the other slots."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.rollout.slots import MIN_STEPS, SlotPrograms, SlotRequest, SlotSampler
from hgpo_jax.sampling import Decoding, generate

MODEL = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
END, OTHER_END, MAX_NEW, EPISODES, LIMIT, WIDTHS = 5, 9, 40, 24, 600, (150, 300, 600)
KEYS = jax.random.split(jax.random.key(3), EPISODES)


@pytest.fixture(scope="module")
def params():
    return initialize(MODEL, 1, make_mesh("data=1", jax.devices()[:1]))


def random_requests(seed: int, longest: int) -> list[SlotRequest]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, EPISODES)
    return [
        SlotRequest(episode, int(random.integers(4)), random.integers(0, MODEL.vocab_size, length).tolist())
        for episode, length in enumerate(lengths)
    ]


def alone(params, request: SlotRequest, decoding: Decoding, max_new: int = MAX_NEW, model: ModelConfig = MODEL):
    """Tokens and log-probabilities of a response, by `generate`."""
    width = next(width for width in WIDTHS if width >= len(request.ids))
    prompt = np.zeros((1, width), np.int32)
    prompt[0, : len(request.ids)] = request.ids
    key = jax.random.fold_in(KEYS[request.episode], request.turn)[None]
    out = _generate(model, params, prompt, np.array([len(request.ids)]), key, decoding)
    n = min(int(out.lengths[0]), max_new)
    return np.asarray(out.tokens[0, :n]), np.asarray(out.logp[0, :n])


@functools.partial(jax.jit, static_argnums=0)
def _generate(config, params, prompt, length, key, decoding):
    model = nnx.merge(network(config), params)
    return generate(
        model, model.decode_blocks(), prompt, length, key, max_new=MAX_NEW, end_tokens=(END, OTHER_END), decoding=decoding
    )


def make_sampler(
    params, spec: str, slots: int, decoding: Decoding, max_new: int = MAX_NEW, model: ModelConfig = MODEL
):
    devices = int(np.prod([int(part.partition("=")[2]) for part in spec.split(",")]))
    mesh = make_mesh(spec, jax.devices()[:devices])
    programs = SlotPrograms(network(model), mesh, max_new=max_new, end_tokens=(END, OTHER_END))
    placed = jax.device_put(params, shardings(MODEL, mesh))
    return programs, SlotSampler(programs, placed, KEYS, decoding, slots=slots, prompt_limit=LIMIT), mesh


def play(sampler: SlotSampler, mesh, requests: list[SlotRequest], rng, shrink: bool = True):
    """Adds requests as slots become free, a few at a time; {episode: response}."""
    waiting, responses = list(requests), {}
    with jax.set_mesh(mesh):
        while waiting or sampler.active:
            if shrink:
                sampler.shrink(len(waiting) + sampler.active)
            count = min(len(waiting), sampler.free, int(rng.integers(1, 9)))
            sampler.add(waiting[:count])
            waiting = waiting[count:]
            for response in sampler.step():
                assert response.episode not in responses
                responses[response.episode] = response
    return responses


def check(params, responses, requests, decoding, max_new=MAX_NEW, model=MODEL):
    assert responses.keys() == {request.episode for request in requests}
    for request in requests:
        tokens, logp = alone(params, request, decoding, max_new, model)
        np.testing.assert_array_equal(responses[request.episode].tokens, tokens)
        np.testing.assert_allclose(responses[request.episode].logp, logp, atol=1e-5, rtol=1e-5)


MESHES = ["data=1", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("data=2", "data=2,fsdp=2,tensor=2", "fsdp=4"))]


@pytest.mark.parametrize("spec", MESHES)
def test_responses_are_those_of_each_prompt_alone(params, spec):
    decoding = Decoding(temperature=0.9, top_k=20, min_new=3)
    programs, sampler, mesh = make_sampler(params, spec, 9, decoding)
    requests = random_requests(0, 140)[:12] + random_requests(0, LIMIT)[12:]  # the caches grow
    responses = play(sampler, mesh, requests, np.random.default_rng(1))
    check(params, responses, requests, decoding)
    lengths = [len(response.tokens) for response in responses.values()]
    assert min(lengths) < MIN_STEPS and max(lengths) == MAX_NEW
    names = [name for name, _ in programs.called]
    assert names.count("empty") == 1 and names.count("resize") >= 2  # longer caches, and fewer slots in the end
    assert sampler.active == 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["data=1", "data=2"])
def test_responses_in_8_bits_are_those_of_each_prompt_alone(params, spec):
    """Also where caches grow and slots become fewer; and they are others than those of the weights themselves."""
    model, decoding = dataclasses.replace(MODEL, sample_dtype="int8"), Decoding()
    requests = random_requests(5, 140)[:12] + random_requests(5, LIMIT)[12:]
    programs, sampler, mesh = make_sampler(params, spec, 9, decoding, model=model)
    responses = play(sampler, mesh, requests, np.random.default_rng(1))
    check(params, responses, requests, decoding, model=model)
    assert "resize" in [name for name, _ in programs.called]
    exact = [alone(params, request, decoding)[1] for request in requests]
    difference = [np.abs(responses[r.episode].logp[1:2] - logp[1:2]).sum() for r, logp in zip(requests, exact, strict=True)]
    assert 1e-4 < np.median(difference) < 0.1


def test_equal_prompts_are_read_once(params):
    decoding = Decoding()
    programs, sampler, mesh = make_sampler(params, "data=1", EPISODES, decoding)
    first = random_requests(2, 140)[:4]
    requests = [SlotRequest(episode, 0, first[episode // 6].ids) for episode in range(EPISODES)]
    with jax.set_mesh(mesh):
        sampler.add(requests)
        assert sampler.free == 0 and sampler.active == EPISODES
        responses = {}
        while sampler.active:
            responses |= {response.episode: response for response in sampler.step()}
    (prefill,) = [shape for name, shape in programs.called if name == "prefill"]
    assert prefill.startswith(f"6 prompts of 150 tokens, {EPISODES} responses in")  # 4 prompts in a shape for 6
    check(params, responses, requests, decoding)
    assert len({tuple(response.tokens) for response in responses.values()}) > EPISODES // 2  # each with its own key


@pytest.mark.slow
def test_equal_prompts_are_read_once_by_every_shard(params):
    decoding = Decoding()
    _, sampler, mesh = make_sampler(params, "data=2,fsdp=2", EPISODES, decoding)
    first = random_requests(2, 140)[:4]
    requests = [SlotRequest(episode, 0, first[episode // 6].ids) for episode in range(EPISODES)]
    check(params, play(sampler, mesh, requests, np.random.default_rng(0)), requests, decoding)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [65, 300])
def test_more_slots_than_the_smallest_batch_of_prompts(params, slots):
    _, sampler, mesh = make_sampler(params, "data=1", slots, Decoding())
    requests = random_requests(6, 100)[:5]
    with jax.set_mesh(mesh):
        responses = {}
        for request in requests:  # one at a time
            sampler.add([request])
            responses |= {response.episode: response for response in sampler.step()}
        while sampler.active:
            responses |= {response.episode: response for response in sampler.step()}
    check(params, responses, requests, Decoding())


@pytest.mark.slow
def test_responses_of_one_token(params):
    _, sampler, mesh = make_sampler(params, "data=1", 5, Decoding(), max_new=1)
    requests = random_requests(4, 100)
    check(params, play(sampler, mesh, requests, np.random.default_rng(0)), requests, Decoding(), max_new=1)
    assert sampler.steps == 0


def test_slots_are_taken_again_within_a_step(params):
    _, sampler, mesh = make_sampler(params, "data=1", 6, Decoding())
    requests = random_requests(5, 100)
    with jax.set_mesh(mesh):
        waiting, lengths = list(requests), []
        while waiting or sampler.active:
            count = sampler.free
            sampler.add(waiting[:count])
            waiting = waiting[count:]
            lengths += [len(response.tokens) for response in sampler.step()]
    # A first token comes with the prompt; every other one is decoded once, in one of six slots.
    assert sum(lengths) - EPISODES == pytest.approx(6 * sampler.busy)
    assert sampler.steps < sum(lengths) / 6 + MAX_NEW + MIN_STEPS * EPISODES / 6


@pytest.mark.parametrize("spec", ["data=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_every_request_with_its_own_distribution_and_limit(params, spec):
    _, sampler, mesh = make_sampler(params, spec, 9, None)
    kinds = [Decoding(temperature=0.0), Decoding(temperature=0.7, top_p=0.8), Decoding(top_k=4, min_new=9), Decoding(1.3)]
    limits = [None, 1, 2, 25, MAX_NEW]
    requests = [
        request._replace(decoding=kinds[i % len(kinds)], limit=limits[i % len(limits)])
        for i, request in enumerate(random_requests(5, 140))
    ]
    responses = play(sampler, mesh, requests, np.random.default_rng(2))
    assert responses.keys() == set(range(EPISODES))
    for request in requests:
        check(params, {request.episode: responses[request.episode]}, [request], request.decoding, request.limit or MAX_NEW)
    lengths = [len(responses[request.episode].tokens) for request in requests if request.limit in (1, 2)]
    assert lengths.count(1) >= len(requests) // 5 and 2 in lengths


def test_a_cancelled_response_frees_its_slot_and_changes_no_other(params):
    _, sampler, mesh = make_sampler(params, "data=1", 4, Decoding(min_new=30))
    requests = random_requests(8, 140)[:6]
    with jax.set_mesh(mesh):
        sampler.add(requests[:4])
        assert sampler.step(MIN_STEPS) == []
        tokens, logp = sampler.so_far(2)
        assert len(tokens) == len(logp) == 1 + MIN_STEPS
        np.testing.assert_array_equal(tokens, alone(params, requests[2], Decoding(min_new=30))[0][: len(tokens)])
        sampler.cancel(2)
        assert (sampler.free, sampler.active) == (1, 3)
        sampler.add(requests[4:5])  # into its slot
        sampler.cancel(4)  # before anything is decoded
        sampler.add(requests[5:])
        responses = {}
        while sampler.active:
            responses |= {response.episode: response for response in sampler.step()}
    kept = [request for request in requests if request.episode not in (2, 4)]
    check(params, responses, kept, Decoding(min_new=30))


def test_a_step_ends_once_nobody_waits(params):
    _, sampler, mesh = make_sampler(params, "data=1", 4, Decoding(min_new=30))
    with jax.set_mesh(mesh):
        sampler.add(random_requests(8, 140)[:2])
        sampler.cancel(0)
        sampler.cancel(1)
        assert sampler.step() == [] and sampler.steps == 0
        sampler.add([SlotRequest(3, 0, [1, 2], limit=3)])
        assert [len(response.tokens) for response in sampler.step()] == [3]
        assert sampler.steps == 2  # the first token was sampled as the prompt was read
