"""Continuous batching gives each request what `generate` gives its prompt alone, whoever is in the other slots."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.constraint import padded
from hgpo_jax.sampling.continuous_batching import SlotSampler
from hgpo_jax.sampling.generate import Decoding, generate, well_filled
from hgpo_jax.sampling.held_prefixes import HeldPrefixes, Match
from hgpo_jax.sampling.slot_plan import SlotRequest
from hgpo_jax.sampling.slot_programs import MIN_STEPS, SlotPrograms

MODEL = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
ENDS, MAX_NEW, EPISODES, SLOTS, SHORT, LONG = (5, 9), 40, 24, 6, 130, 520
MESH = "data=2,fsdp=2,tensor=2"
KEYS = jax.random.split(jax.random.key(3), EPISODES)


def in_float32(decoding: Decoding) -> Decoding:
    """The same values in one type, so that the same programs serve all of them."""
    return jax.tree.map(np.float32, decoding)


PLAIN = in_float32(Decoding())


@functools.cache
def parameters():
    return jax.device_get(initialize(MODEL, 1, make_mesh("data=1", jax.devices()[:1])))


@functools.cache
def programs(spec: str):
    """The mesh and the programs, which all tests share."""
    mesh = make_mesh(spec, jax.devices()[: int(np.prod([int(part.partition("=")[2]) for part in spec.split(",")]))])
    return mesh, SlotPrograms(network(MODEL), mesh, max_new=MAX_NEW, end_tokens=ENDS)


def make_sampler(decoding: Decoding | None, spec="data=1", slots=SLOTS, **options) -> SlotSampler:
    mesh, compiled = programs(spec)
    placed = jax.device_put(parameters(), shardings(MODEL, mesh))
    return SlotSampler(compiled, placed, KEYS, decoding and in_float32(decoding), slots=slots, prompt_limit=LONG, **options)


def random_requests(seed: int, count: int = EPISODES, longest: int = SHORT) -> list[SlotRequest]:
    random = np.random.default_rng(seed)
    return [
        SlotRequest(episode, int(random.integers(4)), random.integers(0, MODEL.vocab_size, length).tolist())
        for episode, length in enumerate(random.integers(1, longest, count))
    ]


def play(sampler: SlotSampler, waiting: list[SlotRequest], spec: str = "data=1", more: int = 0) -> dict:
    """Adds requests as slots become free, and leaves out slots that nobody wants; {episode: response}.

    more: slots that will be wanted later; SLOTS leaves out none, and so compiles less.
    """
    responses = {}
    with jax.set_mesh(programs(spec)[0]):
        while waiting or sampler.active:
            sampler.shrink(len(waiting) + sampler.active + more)
            count = sampler.free
            sampler.add(waiting[:count])
            waiting = waiting[count:]
            for response in sampler.step():
                assert response.episode not in responses
                responses[response.episode] = response
    return responses


@functools.partial(jax.jit, static_argnums=0)
def _generate(config, params, prompt, length, key, decoding):
    model = nnx.merge(network(config), params)
    return generate(
        model, model.decode_blocks(), prompt, length, key, max_new=MAX_NEW, end_tokens=ENDS, decoding=decoding
    )  # fmt: skip


def alone(request: SlotRequest, decoding: Decoding):
    """Tokens and log-probabilities of a response, by `generate`."""
    prompt = np.zeros((1, LONG), np.int32)
    prompt[0, : len(request.ids)] = request.ids
    key = jax.random.fold_in(KEYS[request.episode], request.turn)[None]
    decoding = in_float32(decoding)
    if request.answers:
        decoding = decoding.replace(answers=padded([request.answers], MAX_NEW, 1))
    out = _generate(MODEL, parameters(), prompt, np.array([len(request.ids)]), key, decoding)
    n = min(int(out.lengths[0]), request.limit or MAX_NEW)
    return np.asarray(out.tokens[0, :n]), np.asarray(out.logp[0, :n])


def check(responses, requests, decoding=PLAIN):
    assert responses.keys() == {request.episode for request in requests}
    for request in requests:
        tokens, logp = alone(request, request.decoding or decoding)
        np.testing.assert_array_equal(responses[request.episode].tokens, tokens)
        np.testing.assert_allclose(responses[request.episode].logp, logp, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "options"), [("data=1", {}), ("data=1", {"reuse": True}), (MESH, {"reuse": True})])
def test_a_response_goes_on_after_what_has_been_said_of_it(spec, options):
    decoding = Decoding(min_new=7)
    requests = mixed(4)
    whole = play(make_sampler(decoding, spec), requests, spec, more=SLOTS)
    cut = np.random.default_rng(0).integers(1, MAX_NEW, EPISODES)
    cut = [min(k, len(whole[request.episode].tokens) - 1) for k, request in zip(cut, requests, strict=True)]
    cut[0] = len(whole[0].tokens) - 1  # the last token is left
    goes_on = [
        request._replace(ids=[*request.ids, *whole[request.episode].tokens[:k].tolist()], said=int(k))
        for k, request in zip(cut, requests, strict=True)
    ]
    sampler = make_sampler(decoding, spec, read_limit=LONG + MAX_NEW, **options)
    rest = play(sampler, goes_on, spec, more=SLOTS)
    for k, request in zip(cut, requests, strict=True):
        np.testing.assert_array_equal(rest[request.episode].tokens, whole[request.episode].tokens[k:])
        np.testing.assert_allclose(rest[request.episode].logp, whole[request.episode].logp[k:], atol=1e-5, rtol=1e-5)


def mixed(seed: int) -> list[SlotRequest]:
    """Short prompts, then some for which the caches grow."""
    return random_requests(seed)[:16] + random_requests(seed, longest=LONG)[16:]


def test_responses_are_those_of_each_prompt_alone():
    decoding = Decoding(temperature=0.9, top_k=20, min_new=3)
    sampler = make_sampler(decoding)
    sampler._programs.called.clear()  # of other tests
    requests = mixed(0)
    responses = play(sampler, requests)
    check(responses, requests, decoding)
    lengths = [len(response.tokens) for response in responses.values()]
    assert min(lengths) < MIN_STEPS and max(lengths) == MAX_NEW and sampler.active == 0
    names = [name for name, _ in sampler._programs.called]
    assert names.count("empty") == 1 and names.count("resize") >= 2  # longer caches, and fewer slots in the end
    # A first token comes with the prompt; every other one is decoded once, in one of the slots.
    assert SLOTS * sampler.busy >= sum(lengths) - EPISODES > SLOTS * sampler.busy / 2
    assert sampler.steps < sum(lengths) / SLOTS + MAX_NEW + MIN_STEPS * EPISODES / SLOTS


@pytest.mark.slow
def test_on_a_mesh():
    spec, requests = MESH, mixed(5)
    shared = [request._replace(turn=0, ids=requests[number // 6].ids) for number, request in enumerate(requests)]
    for some in (requests, shared):
        sampler = make_sampler(PLAIN, spec)
        check(play(sampler, some, spec), some)
    assert "resize" in [name for name, _ in sampler._programs.called]


def test_equal_prompts_are_read_once():
    sampler = make_sampler(PLAIN)
    before = set(sampler._programs.called)
    requests = [request._replace(turn=0) for request in random_requests(2, SLOTS)]
    requests = [request._replace(ids=requests[number // 3].ids) for number, request in enumerate(requests)]
    with jax.set_mesh(programs("data=1")[0]):
        sampler.add(requests)
        assert sampler.free == 0 and sampler.active == SLOTS
    (prefill,) = [shape for name, shape in sampler._programs.called - before if name == "prefill"]
    assert prefill.startswith(f"2 prompts of {SHORT} tokens, {SLOTS} responses in")
    responses = play(sampler, [], more=SLOTS)
    check(responses, requests)
    assert len({tuple(response.tokens) for response in responses.values()}) > SLOTS // 2  # each with its own key


def test_few_prompts_are_read_by_the_smallest_program_also_where_it_takes_several():
    sampler = make_sampler(PLAIN, slots=65)
    assert sampler.prompt_counts == [5, 17, 65]
    assert [well_filled(sampler.shapes.counts, count) for count in (1, 5, 6, 8, 9, 17, 33, 65)] == [5, 5, 5, 5, 17, 17, 65, 65]


def test_every_request_with_its_own_distribution_and_limit():
    kinds = [Decoding(temperature=0.0), Decoding(temperature=0.7, top_p=0.8), Decoding(top_k=4, min_new=9), Decoding(1.3)]
    limits = [None, 1, 2, 25, MAX_NEW]
    requests = [
        request._replace(decoding=kinds[i % len(kinds)], limit=limits[i % len(limits)])
        for i, request in enumerate(random_requests(5))
    ]
    sampler = make_sampler(None)
    responses = play(sampler, requests, more=SLOTS)
    check(responses, requests)
    lengths = [len(responses[request.episode].tokens) for request in requests if request.limit in (1, 2)]
    assert lengths.count(1) >= len(requests) // 5 and 2 in lengths


def test_a_cancelled_response_frees_its_slot_and_changes_no_other():
    decoding = Decoding(min_new=30)
    sampler, requests = make_sampler(decoding), random_requests(8, SLOTS + 2)
    wanted, _ = alone(requests[2], decoding)
    with jax.set_mesh(programs("data=1")[0]):
        sampler.add(requests[:SLOTS])
        assert sampler.step(MIN_STEPS) == []
        tokens, logp = sampler.so_far(2)
        assert len(tokens) == len(logp) == 1 + MIN_STEPS
        np.testing.assert_array_equal(tokens, wanted[: len(tokens)])
        sampler.cancel(2)
        assert (sampler.free, sampler.active) == (1, SLOTS - 1)
        sampler.add(requests[SLOTS:-1])  # into its slot
        sampler.cancel(SLOTS)  # before anything is decoded
        sampler.add(requests[-1:])
        responses = {}
        while sampler.active:
            responses |= {response.episode: response for response in sampler.step()}
    check(responses, [request for request in requests if request.episode not in (2, SLOTS)], decoding)


def test_a_step_ends_once_nobody_waits():
    sampler, requests = make_sampler(Decoding(min_new=30)), random_requests(8, 2)
    with jax.set_mesh(programs("data=1")[0]):
        sampler.add(requests)
        sampler.cancel(0)
        sampler.cancel(1)
        assert sampler.step() == [] and sampler.steps == 0
        for limit, steps in ((1, 0), (3, 2)):  # the first token is sampled as the prompt is read
            sampler.add([SlotRequest(3, 0, [1, 2], limit=limit)])
            assert [len(response.tokens) for response in sampler.step()] == [limit]
            assert sampler.steps == steps


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, count).tolist()


def conversations(seed: int, turns: int) -> list[list[SlotRequest]]:
    """For each turn, requests of all episodes, without the answers that they begin with from the second turn on."""
    random = np.random.default_rng(seed)
    head = random.integers(0, MODEL.vocab_size, 40).tolist()
    new = lambda: random.integers(0, MODEL.vocab_size, int(random.integers(1, 20))).tolist()  # noqa: E731
    return [[SlotRequest(episode, turn, (head if turn == 0 else []) + new()) for episode in range(6)] for turn in range(turns)]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["data=1", MESH])
def test_a_conversation_goes_on_from_what_a_slot_holds(spec):
    """Some are cut or begin anew, and in the end they lose their places to each other."""
    sampler, mesh = continuing_sampler(spec), programs(spec)[0]
    random, texts = np.random.default_rng(1), {episode: [] for episode in range(6)}
    for turn, requests in enumerate(conversations(4, 5)):
        requests = [request._replace(ids=texts[request.episode] + list(request.ids)) for request in requests]
        random.shuffle(requests)
        responses = play(sampler, requests, spec, more=0 if turn == 3 else SLOTS)
        check(responses, requests)
        for request in requests:
            keep = len(request.ids) if random.random() < 0.8 else int(random.integers(len(request.ids)))
            texts[request.episode] = list(request.ids)[:keep] + responses[request.episode].tokens.tolist()
        if turn == 2:  # a response that nobody wants leaves its prompt
            with jax.set_mesh(mesh):
                sampler.add([SlotRequest(20, 0, list(requests[0].ids))])
                sampler.step(MIN_STEPS)
                if sampler.active:
                    sampler.cancel(20)
    assert sampler.counts["reused_share"] > 0.5


def continuing_sampler(spec="data=1", slots=SLOTS, rows=0, prompt_limit=LONG) -> SlotSampler:
    """rows: of the store, at the greatest length of the caches."""
    mesh, compiled = programs(spec)
    placed = jax.device_put(parameters(), shardings(MODEL, mesh))
    return SlotSampler(
        compiled, placed, KEYS, PLAIN, slots=slots, prompt_limit=prompt_limit, reuse=True, store=rows * row_bytes(prompt_limit)
    )


def row_bytes(prompt_limit: int) -> int:
    """Bytes of a row in float32: keys and values of two layers, of two heads of 8."""
    return 2 * 2 * 2 * 8 * 4 * (prompt_limit + MAX_NEW)


@pytest.mark.parametrize("new", [1, 33, 100, 140])
def test_only_what_a_turn_adds_is_computed(new):
    """Whatever its length: it is computed in pieces."""
    sampler, random, ids = continuing_sampler(), np.random.default_rng(new), []
    for turn in range(3):
        before, held = sampler.reused_tokens, len(ids)
        ids += random.integers(0, MODEL.vocab_size, 150 if turn == 0 else new).tolist()
        request = SlotRequest(0, turn, list(ids))
        responses = play(sampler, [request], more=SLOTS)
        check(responses, [request])
        # The last token of a response was not decoded.
        assert sampler.reused_tokens - before == max(0, held - 1)
        ids += responses[0].tokens.tolist()


def test_the_slots_that_were_taken_last_are_kept():
    sampler, random = continuing_sampler(), np.random.default_rng(0)
    prompts = [random.integers(0, MODEL.vocab_size, 60).tolist() for _ in range(SLOTS)]
    for number in (*range(SLOTS), 2, 3):
        play(sampler, [SlotRequest(number, 0, prompts[number], limit=1)], more=SLOTS)
    with jax.set_mesh(programs("data=1")[0]):
        sampler.shrink(1)
    sampler.reused_tokens = 0
    requests = [SlotRequest(number, 1, [*prompts[number], 3]) for number in (2, 3)]
    check(play(sampler, requests), requests)
    assert sampler.reused_tokens == 2 * 60


@pytest.mark.parametrize("spec", ["data=1", pytest.param(MESH, marks=pytest.mark.slow)])
def test_what_new_prompts_begin_with_is_read_once(spec):
    sampler, head = continuing_sampler(spec), random_ids(0, 100)
    requests = [SlotRequest(number, 0, head + random_ids(number, 5 + number)) for number in range(1, SLOTS)]
    check(play(sampler, requests, spec), requests)
    assert sampler.reused_tokens == 100 * {"data=1": 4}.get(spec, 1)  # elsewhere each of four shards reads it


def test_other_weights_read_what_earlier_ones_have_read():
    """Also the prompt of a response that was under way; it goes on itself from what they computed."""
    sampler = continuing_sampler("data=1")
    first, second = random_ids(1, 60), random_ids(2, 70)
    check(play(sampler, [SlotRequest(0, 0, first)]), [SlotRequest(0, 0, first)])
    other = jax.tree.map(lambda a: 1.5 * a, parameters())
    with jax.set_mesh(programs("data=1")[0]):
        sampler.add([SlotRequest(1, 0, second)])
        sampler.pause()
        sampler.use(parameters(), KEYS, PLAIN)
        sampler.pause()
        sampler.use(other, KEYS, PLAIN)
    responses = play(sampler, [])
    assert responses.keys() == {1}
    for ids in (first, [*second, *responses[1].tokens.tolist()]):
        play(sampler, [SlotRequest(2, 0, ids)])
    assert sampler.reused_tokens == 0
    play(sampler, [SlotRequest(2, 0, ids)])
    assert sampler.reused_tokens == len(ids) - 1


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["data=1", MESH])
def test_a_store_keeps_what_loses_its_slot(spec):
    """More conversations than slots, in trees: each turn goes on from any earlier text, or from a part of it."""
    random, texts, read, requests = np.random.default_rng(7), [random_ids(7, 50)], {}, []
    slots = programs(spec)[1].shards
    for number in range(4 * EPISODES // 5):
        ids = texts[int(random.integers(len(texts)))]
        keep = len(ids) if random.random() < 0.7 else int(random.integers(30, len(ids) + 1))
        requests.append(SlotRequest(number, 0, ids[:keep] + random_ids(number, int(random.integers(1, 9))), limit=8))
        texts.append([*requests[-1].ids, *alone(requests[-1], PLAIN)[0].tolist()])
    for rows in (0, 1, 2, 20) if spec == "data=1" else (0, 20):
        sampler = continuing_sampler(spec, slots, rows * slots, prompt_limit=200)
        for request in requests:
            check(play(sampler, [request], spec, more=slots), [request])
            with jax.set_mesh(programs(spec)[0]):
                sampler.add([SlotRequest(20, 0, [*request.ids, 1, 2], limit=8)])
                sampler.cancel(20)
        read[rows] = sampler.prompt_tokens - sampler.reused_tokens
        assert sampler.bytes == (1 + rows) * slots * row_bytes(200)
    assert sorted(read, key=read.get, reverse=True) == list(read) and len(set(read.values())) == len(read)


def test_a_row_counts_on_every_device_that_has_a_copy():
    params, (mesh, compiled) = parameters(), programs("tensor=4")  # more devices than key-value heads
    with jax.set_mesh(mesh):
        cache = compiled("empty", "2 slots of 100 tokens", params, 2, 100).cache
    held = sum(part.data.nbytes for a in jax.tree.leaves(cache) for part in a.addressable_shards)
    assert 2 * compiled.row_bytes(params, 100) == held == 2 * 4 * row_bytes(100 - MAX_NEW)


def test_what_loses_its_slot_goes_to_the_row_of_the_oldest():
    held, free, rows = HeldPrefixes(1, 2, shortest=4), [[0, 1]], []
    held.make_store(2)
    texts = [[number] * 6 for number in range(5)]
    for text in texts:
        slot = held.last_first(0, free[0])[-1]
        rows.append(held.store(0, slot, text, None))
        held.hold(0, slot, text)
    assert rows == [None, None, 3, 2, 3]  # at first the slots are empty
    longer = [[*text, 9] for text in texts]
    assert held.match(longer[0], free) is None
    assert held.match(longer[1], free) == Match(0, 2, 0, 6)
    assert held.store(0, 0, longer[3], None) is None  # goes on in its slot
    assert held.store(0, 0, longer[1], source=2) == 3
    held.hold(0, 0, longer[1])
    assert held.store(0, 1, longer[0], None) == 2  # whose text the slot holds now
    assert held.store(0, 1, longer[0], None) is None  # held twice
    held.hold(0, 1, longer[0][3:])
    assert held.store(0, 1, longer[2], None) == 3
    held.hold(0, 1, longer[0][4:])
    assert held.store(0, 1, longer[2], None) is None  # too short
    held.take([[1]])
    assert held.match(longer[4], [[0]]) == Match(0, 1, 0, 6)
    held.make_store(1)
    assert held.match(longer[4], [[0]]) is None


@pytest.mark.parametrize("spec", ["data=1", pytest.param(MESH, marks=pytest.mark.slow)])
def test_responses_are_one_of_their_requests_answers(spec):
    """As `generate` samples them; some requests have none and are free."""
    random = np.random.default_rng(2)
    words = [token for token in range(6) if token not in ENDS]  # few, so that answers begin alike
    answer = lambda: [*random.choice(words, random.integers(1, 12)).tolist(), ENDS[0]]  # noqa: E731
    requests = [
        request._replace(answers=[answer() for _ in range(random.integers(1, 16) if request.episode % 4 else 0)])
        for request in random_requests(5)
    ]
    responses = play(make_sampler(PLAIN, spec, words=1), requests, spec, more=SLOTS)
    check(responses, requests)
    for request in requests:
        assert not request.answers or responses[request.episode].tokens.tolist() in request.answers
