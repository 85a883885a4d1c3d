"""Compiled rollouts: what they record is what a plain loop over turns gives, on every mesh and for every decode batch size."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.rollout.compiled import Program, make_continuations, make_rollout, replay
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.trainer.step import training_batch
from tests.helpers.plain_rollout import check_against_plain_play
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

CELLS, END, ACT, VOCABULARY = 5, 6, 7, 8


class Place(struct.PyTreeNode):
    cell: jax.Array
    goal: jax.Array
    task: jax.Array
    turn: jax.Array


class Ring:
    """A ring of cells 1..5 and a cell to reach, small enough that an untrained policy reaches it now and then.

    Words 1 to 4 move by -1, 1, -2 and 2; an action is the sum of two words, and invalid where these move nothing.
    No word at all is a valid action: a response without an end is invalid for that alone.
    """

    observation_length, goal_length, action_length, max_turns = 2, 2, 2, 10
    signals = ("cell", "turns")

    def reset(self, key):
        cell, away = jax.random.randint(key, (2,), 0, jnp.array([CELLS, CELLS - 1]))
        state = Place(cell=cell, goal=(cell + 1 + away) % CELLS, task=away, turn=jnp.int32(0))
        return state, self._observe(state, jnp.int32(0))

    def goal(self, state):
        return jnp.stack([state.goal + 1, state.task])

    def step(self, state, action):
        move = jnp.array([0, -1, 1, -2, 2, 0, 0, 0])[action].sum()
        after = state.replace(cell=(state.cell + move) % CELLS, turn=state.turn + 1)
        won = self.won(after)
        done, invalid = won | (after.turn >= self.max_turns), (move == 0) & action.any()
        return after, self._observe(after, abs(move)), 10.0 * won, done, invalid

    def won(self, state):
        return state.cell == state.goal

    def signal_values(self, state):
        return jnp.stack([state.cell, state.turn])  # i32, of which the rollout makes f32

    def _observe(self, state, moved):
        return jnp.stack([state.cell + 1, moved])


ENV = Ring()
MODEL = ModelConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, rope_theta=100.0, initializer_range=0.5,
)  # fmt: skip
K, GROUPS, MEMBERS = 2, 8, 4
DECODE_BATCH = 7  # rounded down to 4
B, T, A = GROUPS * MEMBERS, ENV.max_turns, ENV.action_length
INDICES = np.arange(B) // MEMBERS


@functools.cache
def parameters():
    return jax.device_get(initialize(MODEL, 1, mesh_of("data=1")))


def program(decode_batch_size, history):
    sizes = {"history_length": history, "decode_batch_size": decode_batch_size}
    return functools.partial(Program, graphdefs={SHARED: network(MODEL)}, **sizes, end=END, act=ACT)


@functools.cache
def compiled(spec, decode_batch_size, history):
    mesh = mesh_of(spec)
    return mesh, make_rollout(ENV, program(decode_batch_size, history), mesh)


def play(*, spec="data=1", decode_batch_size=DECODE_BATCH, history=K, temperature=1.0) -> Episodes:
    mesh, rollout = compiled(spec, decode_batch_size, history)
    keys = jax.random.split(jax.random.key(5), B)
    with jax.set_mesh(mesh):  # as a job does, so that activations are split too
        placed = jax.device_put(parameters(), shardings(MODEL, mesh))
        inputs = task_keys("train", 3, INDICES), keys, jnp.int32(INDICES), Decoding(temperature=temperature)
        return jax.device_get(rollout({SHARED: placed}, *inputs))


@pytest.fixture(scope="module")
def episodes():
    return play()


def check(e: Episodes, history: int):
    check_against_plain_play(ENV, e, task_keys("train", 3, INDICES), history, END, ACT)


def test_replaying_the_responses_gives_the_same_episodes(episodes):
    e = episodes
    check(e, K)
    assert 0 < e.success.sum() < B
    assert len(np.unique(e.mask.sum(1))) > 3  # episodes of different lengths
    assert 0.05 < e.invalid[e.mask].mean() < 0.95
    assert len(np.unique(e.responses[e.mask], axis=0)) > 20
    assert len(np.unique(e.response_lengths[e.mask])) == A + 1


def test_signals_are_those_of_the_state_after_each_turn(episodes):
    e = episodes
    later = e.mask[:, 1:]
    np.testing.assert_array_equal(e.signals[:, :-1, 0][later], e.observations[:, 1:, 0][later] - 1)
    assert e.signals.dtype == np.float32
    np.testing.assert_array_equal(e.signals[..., 1], np.where(e.mask, np.arange(1, T + 1), 0))


def test_an_episode_goes_on_as_it_went(episodes):
    """From each recorded state, with the keys that the rollout had: what came later comes again."""
    e = episodes
    replayed = jax.jit(jax.vmap(lambda *one: replay(ENV, K, *one[:4], END)))(
        task_keys("train", 3, INDICES), e.responses, e.response_lengths, e.mask
    )
    states = jax.device_get(replayed)
    seen = np.asarray(states.observation)
    np.testing.assert_array_equal(seen[:, :-1][e.mask], e.observations[e.mask])
    np.testing.assert_array_equal(np.asarray(states.done), np.pad(np.cumsum(e.rewards, 1) > 0, ((0, 0), (1, 0))) | (
        np.pad(e.mask.cumsum(1), ((0, 0), (1, 0))) == T
    ))  # fmt: skip
    mesh = mesh_of("data=1")
    go_on = make_continuations(ENV, program(DECODE_BATCH, K), mesh)
    with jax.set_mesh(mesh):
        placed, keys = jax.device_put(parameters(), shardings(MODEL, mesh)), jax.random.split(jax.random.key(5), B)
        decoding = Decoding(temperature=1.0)
        first = go_on({SHARED: placed}, jax.tree.map(lambda a: a[:, 0], states), keys, decoding)
        ended = go_on({SHARED: placed}, jax.tree.map(lambda a: a[:, T], states), keys, decoding)
        middle = go_on({SHARED: placed}, jax.tree.map(lambda a: a[:, 3], states), keys, decoding)
    np.testing.assert_array_equal(first, e.rewards)
    assert not np.asarray(ended).any()
    won = np.asarray(middle).sum(1)
    assert not won[~e.mask[:, 3]].any() and won[e.mask[:, 3]].any()
    assert not np.asarray(middle)[:, T - 3 :].any()  # the turns that were taken count


def test_every_turn_draws_anew():
    """Without history an episode meets the same prompt again, and does not always give the same answer."""
    e, equal = play(history=0), []
    check(e, 0)
    for prompts, responses, mask in zip(e.prompts, e.responses, e.mask, strict=True):
        pairs = itertools.combinations(range(mask.sum()), 2)
        equal += [(responses[t] == responses[u]).all() for t, u in pairs if (prompts[t] == prompts[u]).all()]
    assert len(equal) > 20
    assert np.mean(equal) < 0.5


def test_greedy_members_of_a_prompt_group_act_alike():
    e = play(temperature=0.0)
    check(e, K)
    np.testing.assert_array_equal(e.responses, e.responses[INDICES * MEMBERS])
    np.testing.assert_array_equal(e.mask, e.mask[INDICES * MEMBERS])


def test_members_of_a_prompt_group_start_alike_and_act_differently(episodes):
    e, first = episodes, INDICES * MEMBERS
    np.testing.assert_array_equal(e.groups, INDICES)
    np.testing.assert_array_equal(e.task, e.task[first])
    np.testing.assert_array_equal(e.prompts[:, 0], e.prompts[first, 0])
    np.testing.assert_array_equal(e.observations[:, 0], e.observations[first, 0])
    assert len(np.unique(e.prompts[first, 0], axis=0)) > GROUPS / 2  # groups differ, as far as so small a ring can
    same = (e.responses == e.responses[first]).all((1, 2))
    assert same.sum() == GROUPS  # each group's first member only


def test_turns_that_did_not_happen_are_zero(episodes):
    e = episodes
    np.testing.assert_array_equal(e.mask, np.arange(T) < e.mask.sum(1)[:, None])
    for name, value in e.arrays().items():
        if value.ndim > 1 and name not in ("mask", "final_prompts"):
            assert not value[~e.mask].any(), name
    tail = np.arange(A + 1) >= e.response_lengths[..., None]
    assert not e.responses[tail].any()
    assert not e.logp[tail].any()
    assert (e.logp[~tail] < 0).all()


def test_the_trainer_sees_the_samplers_log_probabilities(episodes):
    model = nnx.merge(network(MODEL), parameters())
    logprobs = jax.jit(lambda batch, temperature: token_logprobs(model, batch, temperature=temperature)[0])
    for temperature, e in ((1.0, episodes), (0.7, play(temperature=0.7))):
        batch = training_batch(e)
        real = np.arange(A + 1) < batch.response_lengths[:, None]
        np.testing.assert_allclose(np.asarray(logprobs(batch, temperature))[real], batch.old_logp[real], atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "decode_batch_size"), [("data=2", 1000), pytest.param("data=2,fsdp=2,tensor=2", 1, marks=pytest.mark.slow)]
)
def test_devices_and_decode_batches_change_nothing(episodes, spec, decode_batch_size):
    e = play(spec=spec, decode_batch_size=decode_batch_size)
    for name, value in episodes.arrays().items():
        if name == "logp":
            np.testing.assert_allclose(e.logp, value, atol=1e-4)
        else:
            np.testing.assert_array_equal(getattr(e, name), value, err_msg=name)


def test_streams_of_tasks_never_meet():
    streams = [(stream, seed) for stream in ("train", "held_out", "warm_start") for seed in (0, 1)]
    keys = [jax.random.key_data(task_keys(*stream, np.arange(100))) for stream in streams]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 600
    np.testing.assert_array_equal(keys[0], jax.random.key_data(task_keys("train", 0, np.arange(100))))


def test_episodes_on_disk(episodes, tmp_path, monkeypatch):
    """They survive it, and a dump that cannot be finished leaves the one before."""
    path = tmp_path / "iteration-00000.npz"
    episodes.save(path)
    back, before = Episodes.load(path), path.read_bytes()
    for name, value in episodes.arrays().items():
        np.testing.assert_array_equal(getattr(back, name), value)
        assert getattr(back, name).dtype == value.dtype
    assert list(tmp_path.iterdir()) == [path]

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        episodes.replace(rewards=episodes.rewards + 1).save(path)
    assert path.read_bytes() == before


def changed(e, name, index, value):
    """The fields of an Episodes with one entry changed."""
    array = getattr(e, name).copy()
    array[index] = value
    return e.arrays() | {name: array}


OTHER_FILES = {
    "missing": lambda path, e: None,
    "empty": lambda path, e: path.write_bytes(b""),
    "text": lambda path, e: path.write_text("not a zip"),
    "cut off": lambda path, e: (e.save(path), path.write_bytes(path.read_bytes()[:-200])),
    "a single array": lambda path, e: (np.save(path.with_suffix(".npy"), e.mask), path.with_suffix(".npy").rename(path)),
    "fields missing": lambda path, e: np.savez(path, rewards=e.rewards, mask=e.mask),
    "a field too many": lambda path, e: np.savez(path, other=e.mask, **e.arrays()),
    "a hole": lambda path, e: np.savez(path, **changed(e, "mask", (0, 0), False)),
    "a state below 0": lambda path, e: np.savez(path, **changed(e, "states", (0, 0), -1)),
    "a prompt that is longer than its slots": lambda path, e: np.savez(path, **changed(e, "prompt_lengths", (0, 0), 999)),
    "a response that is longer than its slots": lambda path, e: np.savez(path, **changed(e, "response_lengths", (0, 0), A + 2)),
    "whole rewards": lambda path, e: np.savez(path, **e.arrays() | {"rewards": e.rewards.astype(int)}),
    "another number of groups": lambda path, e: np.savez(path, **e.arrays() | {"groups": e.groups[:-1]}),
    "pickled": lambda path, e: np.savez(path, **(e.arrays() | {"mask": np.array([{}], object)})),
}


@pytest.mark.parametrize("write", OTHER_FILES.values(), ids=OTHER_FILES)
def test_another_file_is_refused_in_one_line(episodes, tmp_path, write):
    path = tmp_path / "iteration-00000.npz"
    write(path, episodes)
    with refused("iteration-00000.npz: not a dump of Episodes"):
        Episodes.load(path)
