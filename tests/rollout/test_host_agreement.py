"""A host rollout and a compiled rollout are the same, from prompts to advantages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_policy import ACT, END, ENV, MODEL, K, cloned

from hgpo_jax.advantages import estimate
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.compiled_as_text import Words
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.policy import network, shardings
from hgpo_jax.rollout.chat_prompts import PromptInput
from hgpo_jax.rollout.compiled import Program, make_rollout
from hgpo_jax.rollout.compiled_prompts import build_prompt
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.agreement import assert_same
from tests.helpers.tiny import mesh_of
from tests.helpers.word_prompts import WordFormat

GROUPS, MEMBERS = 8, 4
B = GROUPS * MEMBERS
INDICES = np.arange(B) // MEMBERS
TASKS = task_numbers("train", 3, INDICES, None)
KEYS = jax.random.split(jax.random.key(5), B)


def test_words_are_written_and_read_as_the_compiled_rollout_does():
    format = WordFormat(ENV, 2, END, ACT)
    goal, first, now = ((ids + 1) % len(ENV.words) for ids in map(np.arange, (ENV.goal_length, ENV.observation_length, 2)))
    text = lambda ids: " ".join(ENV.words[i] for i in ids)  # noqa: E731
    pad = lambda ids, slots: np.pad(ids, (0, slots - len(ids)))  # noqa: E731
    done = np.array([5, 6])[: ENV.action_length]
    (prompt,) = format.build([PromptInput(text(goal), [(text(first), text(done))], 1, text(now), [])])
    observations = np.stack([0 * first, first])
    actions = np.stack([np.zeros(ENV.action_length, int), pad(done, ENV.action_length)])
    assert prompt.ids == build_prompt(goal, observations, actions, pad(now, ENV.observation_length), ACT).tolist()
    assert len(prompt.ids) == format.prompt_limit
    said = f"{ENV.words[5]} #{ACT} {ENV.words[6]}"
    assert format.parse([5, ACT, 6, END]) == (said, " ".join(said.split()[: ENV.action_length]), True)
    assert format.parse([5, 6]) == (text([5, 6]), "", False)


def compiled(env, model, params, history=K, temperature=1.0):
    end, mesh = len(env.words) + 1, mesh_of("data=1")
    options = {"history_length": history, "decode_batch_size": 8, "end": end, "act": end + 1}
    rollout = make_rollout(env, functools.partial(Program, graphdefs={SHARED: network(model)}, **options), mesh)
    inputs = task_keys("train", 3, jnp.asarray(INDICES)), KEYS, jnp.asarray(INDICES), Decoding(temperature=temperature)
    return jax.device_get(rollout({SHARED: params}, *inputs))


def host(env, model, params, spec="data=1", history=K, temperature=1.0, decode_batch_size=8):
    end, mesh = len(env.words) + 1, mesh_of(spec)
    rollout = HostRollout(
        functools.partial(Words, env), WordFormat(env, history, end, end + 1), {SHARED: network(model)}, mesh,
        TextSettings(B, history, env.action_length + 1, decode_batch_size, strict=True),
    )  # fmt: skip
    assert rollout.num_tasks is None
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(model, mesh))
        episodes, report = rollout({SHARED: placed}, TASKS, KEYS, INDICES, Decoding(temperature=temperature))
    expected = rollout.abstract_episodes()
    for name, value in episodes.arrays().items():
        assert (getattr(expected, name).shape, getattr(expected, name).dtype) == (value.shape, value.dtype), name
    called = [name for name, _ in rollout._programs[SHARED].called]
    assert called.count("prefill") <= 4 and called.count("decode") <= 2  # the shapes are few
    return episodes, report


def check_worth_comparing(e):
    assert 0 < e.success.sum() < B and 0 < e.invalid.sum() < e.mask.sum()
    assert e.mask.sum(1).min() < e.mask.shape[1] == e.mask.sum(1).max()


def check_advantages(ours, theirs):
    for name in ("hgpo", "gigpo", "grpo"):
        options = {"history_length": K} if name == "hgpo" else {}
        records = [
            estimate(name, rewards=e.rewards, mask=e.mask, states=e.states, groups=e.groups, invalid=e.invalid, **options)
            for e in (ours, theirs)
        ]
        np.testing.assert_allclose(records[0].advantages, records[1].advantages, atol=1e-6)
        assert np.abs(records[0].advantages).max() > 0.1


@pytest.mark.slow  # compiles both faces
def test_the_household():
    reference = compiled(ENV, MODEL, cloned())
    check_worth_comparing(reference)
    episodes, report = host(ENV, MODEL, cloned())
    assert_same(episodes, reference)
    check_advantages(episodes, reference)
    for b, t in np.argwhere(reference.mask):
        words = [ENV.words[i] or "_" for i in reference.observations[b, t]]
        assert report.texts[episodes.observations[b, t, 0]] == " ".join(words).rstrip(" _")
    for b in range(0, B, 3):  # ALFWorld's wording groups the states alike
        words, sentences = Words(ENV), HouseholdText(ENV)
        shown, told = words.reset(TASKS[b]), sentences.reset(TASKS[b])
        seen = [(shown[0], told[0])]
        for t in range(int(reference.mask[b].sum())):
            action = WordFormat(ENV, K, END, ACT).parse(reference.responses[b, t].tolist()).action
            spoken = told[1][shown[1].index(action)] if action in shown[1] else "do a dance"
            shown, told = words.step(action), sentences.step(spoken)
            assert shown[2:] == told[2:]
            assert len(shown[1]) == len(told[1])
            seen.append((shown[0], told[0]))
        assert len(set(seen)) == len({a for a, _ in seen}) == len({b for _, b in seen})
