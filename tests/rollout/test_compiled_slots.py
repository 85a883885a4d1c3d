"""Slots inside a compiled rollout: on every mesh and for every number of slots the episodes of turns in lockstep, sooner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy import network, shardings
from hgpo_jax.rollout.compiled import Program, on_shards, start_episode
from hgpo_jax.rollout.compiled_slots import SlotProgram
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.tiny import mesh_of
from tests.rollout.test_compiled import ACT, END, INDICES, MODEL, B, Ring, parameters

R = 24


class Words:
    """What both programs have in common: responses of up to R tokens, of which the first ones are the action."""

    response_slots = R

    def played(self, params, tasks, keys, decoding):
        states = jax.vmap(start_episode, (None, None, 0, 0))(self.env, self.history_length, tasks, keys)
        if isinstance(self, SlotProgram):
            played = self.play_slots(params, states, decoding)
            return played.record, played.states.done, played.steps[None], played.busy[None]
        states, record = self.play_all(params, states, decoding)
        return record, states.done, jnp.zeros(1), jnp.zeros(1)


class InLockstep(Words, Program):
    pass


class InSlots(Words, SlotProgram):
    pass


@functools.cache
def played(kind, spec, slots, model=MODEL):
    mesh = mesh_of(spec)
    graphdefs = {SHARED: network(model)}
    program = functools.partial(kind, graphdefs=graphdefs, history_length=2, decode_batch_size=slots, end=END, act=ACT)
    run = jax.jit(on_shards(kind.played, program, Ring(), mesh))
    keys, tasks = jax.random.split(jax.random.key(5), B), task_keys("train", 3, INDICES)
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), shardings(MODEL, mesh))
        return jax.device_get(run(None, {SHARED: params}, tasks, keys, Decoding()))


@pytest.mark.parametrize(
    ("spec", "slots"), [("data=1", 16), *(pytest.param(*given, marks=pytest.mark.slow) for given in (
        ("data=1", 7), ("data=2,fsdp=2,tensor=2", 5),
    ))],
)  # fmt: skip
def test_the_episodes_are_those_of_turns_in_lockstep(spec, slots):
    expected, ended, *_ = played(InLockstep, "data=1", 8)
    lengths = expected["response_lengths"][expected["mask"]]
    assert ended.all() and lengths.min() == 1 and lengths.max() == R and len(set(expected["mask"].sum(1))) > 3
    record, done, steps, busy = played(InSlots, spec, slots)
    assert done.all()
    for name, values in expected.items():
        if name == "logp":
            np.testing.assert_allclose(record[name], values, atol=1e-5)
        else:
            np.testing.assert_array_equal(record[name], values, err_msg=name)
    decoded = np.where(record["mask"], record["response_lengths"] - 1, 0).reshape(len(steps), -1).sum(1)
    fsdp = mesh_of(spec).shape["fsdp"]
    S = min(slots, B // len(steps)) // fsdp * fsdp
    np.testing.assert_allclose(busy * S, decoded, rtol=1e-5)
    assert (steps >= busy).all()


def test_no_episode_waits_for_the_longest_response_of_a_turn():
    record, _, steps, _ = played(InSlots, "data=1", 16)
    lengths = np.where(record["mask"], record["response_lengths"] - 1, 0)
    in_lockstep = sum(lengths[i : i + 16].max(0).sum() for i in range(0, B, 16))
    assert steps[0] < 0.6 * in_lockstep
