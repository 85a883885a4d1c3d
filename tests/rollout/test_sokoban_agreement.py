"""A host rollout and a compiled rollout of Sokoban are the same, from prompts to advantages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_policy import MODEL, K, clone, mesh_of

from hgpo_jax.advantages import estimate
from hgpo_jax.envs.sokoban import Sokoban
from hgpo_jax.envs.sokoban import expert as sokoban_expert
from hgpo_jax.envs.sokoban.text import SokobanText
from hgpo_jax.envs.words import Words
from hgpo_jax.policy import network
from hgpo_jax.policy.tokenizer import vocabulary_size
from hgpo_jax.rollout.compiled import make_rollout
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.words import WordFormat
from hgpo_jax.sampling import Decoding
from tests.helpers.agreement import assert_same

pytestmark = pytest.mark.slow  # clones a policy and compiles both faces

GROUPS, MEMBERS = 12, 4
B = GROUPS * MEMBERS
NUMBERS = np.arange(B) // MEMBERS


WORDS = len(Sokoban().words)
SIZES = dataclasses.replace(MODEL, vocab_size=vocabulary_size(Sokoban().words))


@pytest.fixture(scope="module")
def params():
    return clone(Sokoban(max_turns=12), sokoban_expert, SIZES, steps=500)


@pytest.mark.parametrize("reward", ["success", "gym"])
def test_host_and_compiled_agree(params, reward):
    env, model, end, act = Sokoban(reward=reward, max_turns=12), SIZES, WORDS + 1, WORDS + 2
    mesh, keys = mesh_of("data=1"), jax.random.split(jax.random.key(5), B)
    rollout = make_rollout(env, network(model), mesh, history_length=K, decode_batch_size=8, end=end, act=act)
    inputs = task_keys("train", 3, jnp.asarray(NUMBERS)), keys, jnp.asarray(NUMBERS), Decoding()
    compiled = jax.device_get(rollout(params, *inputs))
    assert 0 < compiled.success.sum() < B and 0 < compiled.invalid.sum() < compiled.mask.sum()
    host = HostRollout(
        lambda: Words(env), WordFormat(env, K, end, act), network(model), mesh, batch=B, history_length=K,
        response_limit=env.action_length + 1, strict=True, decode_batch_size=8,
    )  # fmt: skip
    tasks = task_numbers("train", 3, NUMBERS, None)
    episodes, _ = host(params, tasks, keys, NUMBERS, Decoding())
    assert_same(episodes, compiled)
    ours, theirs = (
        estimate("hgpo", rewards=e.rewards, mask=e.mask, states=e.states, groups=e.groups, invalid=e.invalid, history_length=K)
        for e in (episodes, compiled)
    )
    np.testing.assert_allclose(ours.advantages, theirs.advantages, atol=1e-6)
    for b in range(0, B, 5):  # the drawn room goes the same way
        drawn = SokobanText(env)
        told = [drawn.reset(tasks[b])[0]]
        for t in range(int(compiled.mask[b].sum())):
            answer = WordFormat(env, K, end, act).parse(compiled.responses[b, t].tolist())
            observation, _, reward_, done, info = drawn.step(answer.action)
            assert reward_ == pytest.approx(float(compiled.rewards[b, t]), abs=1e-6)
            assert compiled.invalid[b, t] == (not answer.well_formed or not info["admissible"])
            told.append(observation)
        assert done and info["won"] == compiled.success[b]
        states = [*compiled.states[b][compiled.mask[b]].tolist(), int(compiled.next_states[b][len(told) - 2])]
        assert len(set(zip(told, states, strict=True))) == len(set(told)) == len(set(states))
