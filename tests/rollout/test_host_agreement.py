"""A host rollout and a compiled rollout of the household are the same, from prompts to advantages."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_policy import ACT, END, ENV, MODEL, K, cloned, mesh_of

from hgpo_jax.advantages import estimate
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.envs.words import Words
from hgpo_jax.policy import network, shardings
from hgpo_jax.rollout.compiled import make_rollout
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.words import WordFormat
from hgpo_jax.sampling import Decoding
from tests.helpers.agreement import assert_same

pytestmark = pytest.mark.slow  # compiles both faces several times

GROUPS, MEMBERS = 6, 4
B = GROUPS * MEMBERS
TASKS = np.arange(B) // MEMBERS + 5
KEYS = jax.random.split(jax.random.key(5), B)


@pytest.fixture(scope="module")
def params():
    return cloned()


def compiled(params, spec="data=1", history_length=K, temperature=1.0):
    mesh = mesh_of(spec)
    rollout = make_rollout(ENV, network(MODEL), mesh, history_length=history_length, decode_batch_size=8, end=END, act=ACT)
    placed = jax.device_put(params, shardings(MODEL, mesh))
    groups = jnp.arange(B, dtype=jnp.int32) // MEMBERS
    tasks = task_keys("train", 3, jnp.asarray(TASKS))
    return jax.device_get(rollout(placed, tasks, KEYS, groups, Decoding(temperature=temperature)))


def household():
    """At module level, so that worker processes can be given it."""
    return Words(ENV)


def make_host(mesh, history_length=K, **options):
    return HostRollout(
        household, WordFormat(ENV, history_length, END, ACT), network(MODEL), mesh, batch=B,
        history_length=history_length, response_limit=ENV.action_length + 1, strict=True,
        **({"decode_batch_size": 8} | options),
    )  # fmt: skip


def host(params, spec="data=1", history_length=K, temperature=1.0, **options):
    mesh = mesh_of(spec)
    rollout = make_host(mesh, history_length, **options)
    placed = jax.device_put(params, shardings(MODEL, mesh))
    assert rollout.num_tasks is None
    tasks, decoding = task_numbers("train", 3, TASKS, None), Decoding(temperature=temperature)
    result = rollout(placed, tasks, KEYS, np.arange(B) // MEMBERS, decoding)
    rollout.close()
    return result


@pytest.fixture(scope="module")
def reference(params):
    return compiled(params)


def test_the_episodes_are_worth_comparing(reference):
    assert 0 < reference.success.sum() < B
    assert 0 < reference.invalid.sum() < reference.mask.sum()
    assert reference.mask.sum(1).min() < ENV.max_turns == reference.mask.sum(1).max()


def test_host_and_compiled_agree(params, reference):
    episodes, report = host(params)
    assert_same(episodes, reference)
    for b, t in np.argwhere(reference.mask):
        text = report.texts[episodes.observations[b, t, 0]]
        words = [ENV.words[i] or "_" for i in reference.observations[b, t]]
        assert text == " ".join(words).rstrip(" _")
    for name in ("hgpo", "gigpo", "grpo"):
        options = {"history_length": K} if name == "hgpo" else {}
        ours, theirs = (
            estimate(name, rewards=e.rewards, mask=e.mask, states=e.states, groups=e.groups, invalid=e.invalid, **options)
            for e in (episodes, reference)
        )
        np.testing.assert_allclose(ours.advantages, theirs.advantages, atol=1e-6)
        assert np.abs(theirs.advantages).max() > 0.1


@pytest.mark.parametrize(
    ("spec", "changes", "options"),
    [
        pytest.param("data=1", {"history_length": 0}, {}, marks=pytest.mark.slow),
        pytest.param("data=1", {"temperature": 0.0}, {"decode_batch_size": 5}, marks=pytest.mark.slow),
        pytest.param("data=1", {"temperature": 3.0}, {}, marks=pytest.mark.slow),  # words that are no words
        pytest.param("data=2,fsdp=2,tensor=2", {}, {"decode_batch_size": 3}, marks=pytest.mark.slow),
    ],
)
def test_they_agree_on_other_histories_temperatures_meshes_and_chunks(params, spec, changes, options):
    reference = compiled(params, **changes)
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        episodes, _ = host(params, spec, **changes, **options)
    assert_same(episodes, reference)
    if changes.get("temperature", 0) > 1:
        assert ((reference.responses >= ACT) | (reference.responses == END - 1)).any(), "no odd word was sampled"


def test_the_shapes_are_told_beforehand_and_few(params):
    mesh = mesh_of("data=1")
    rollout, placed = make_host(mesh), jax.device_put(params, shardings(MODEL, mesh))
    episodes, _ = rollout(placed, task_numbers("train", 3, TASKS, None), KEYS, np.arange(B) // MEMBERS, Decoding())
    expected = rollout.abstract_episodes()
    for name, value in vars(episodes).items():
        like = getattr(expected, name)
        assert (like.shape, like.dtype) == (value.shape, value.dtype), name
    called = [name for name, _ in rollout._programs.called]
    assert called.count("prefill") <= 3 and called.count("decode") == 1


def test_alfworlds_wording_groups_the_states_alike(reference):
    tasks = task_numbers("train", 3, TASKS, None)
    for b in range(0, B, 3):
        words, sentences = household(), HouseholdText(ENV)
        shown, told = words.reset(tasks[b]), sentences.reset(tasks[b])
        seen = [(shown[0], told[0])]
        for t in range(int(reference.mask[b].sum())):
            action = WordFormat(ENV, K, END, ACT).parse(reference.responses[b, t].tolist()).action
            spoken = told[1][shown[1].index(action)] if action in shown[1] else "do a dance"
            shown, told = words.step(action), sentences.step(spoken)
            assert shown[2:] == told[2:]
            assert len(shown[1]) == len(told[1])
            seen.append((shown[0], told[0]))
        assert len(set(seen)) == len({a for a, _ in seen}) == len({b for _, b in seen})
