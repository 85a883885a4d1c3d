"""Turns that belong to several roles: recorded, remembered by role, and sampled with each role's own weights."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from odd_env import Counting

from hgpo_jax.envs.protocol import Playable
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.compiled import Program, make_rollout, replay
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.requirements import check_compiled, check_text, roles_of
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.rollout.scripted_play import play as scripted
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.rollout.workers import LocalWorkers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.trainer.step import training_batch
from hgpo_jax.utils.errors import RunError
from tests.helpers.plain_rollout import check_against_plain_play
from tests.helpers.tiny import mesh_of
from tests.rollout.test_compiled import ACT, END, INDICES, MODEL, B, Ring

WEIGHTS = ("a", "b", "a")


class Relay(Ring):
    """The ring walked by three roles: the one that begins depends on the task, and the last one has two turns in a row."""

    roles = ("first", "second", "third")

    def role(self, state):
        return jnp.array([0, 1, 2, 2])[(state.turn + state.task) % 4]


@functools.cache
def relay():
    """A rollout in which the second role has weights of its own, and the weights."""
    mesh, graphdefs = mesh_of("data=1"), dict.fromkeys("ab", network(MODEL))
    options = {"history_length": 2, "decode_batch_size": 8, "end": END, "act": ACT, "policies": WEIGHTS}
    rollout = make_rollout(Relay(), functools.partial(Program, graphdefs=graphdefs, **options), mesh)
    return rollout, {"a": initialize(MODEL, 0, mesh), "b": initialize(MODEL, 1, mesh)}


OWN = jax.random.split(jax.random.key(5), B)


def played(first=OWN, numbers=INDICES) -> Episodes:
    """first: keys of the first turns."""
    rollout, params = relay()
    tasks, keys = task_keys("train", 3, jnp.int32(numbers)), jnp.stack([first, OWN], axis=1)
    return jax.device_get(rollout(params, tasks, keys, jnp.int32(INDICES), Decoding()))


@pytest.fixture(scope="module")
def episodes():
    return played()


def check_weights(e: Episodes, model: ModelConfig, params: dict, weights: tuple[str, ...]) -> None:
    """Every turn was sampled with the weights of its role, and hardly with others."""
    batch = training_batch(e)
    batch, mask = batch.replace(prompt_lengths=np.maximum(batch.prompt_lengths, 1)), e.mask.reshape(-1)
    logprobs = jax.jit(lambda params: token_logprobs(nnx.merge(network(model), params), batch)[0])
    for name, of in params.items():
        difference = np.abs(logprobs(of) - batch.old_logp).max(1)
        own = np.array([weights[role] == name for role in e.agents.reshape(-1)])
        assert difference[mask & own].max() < 1e-4 and np.median(difference[mask & ~own]) > 1e-2


def test_a_compiled_rollout_records_roles_and_shows_each_its_own_past(episodes):
    e = episodes
    assert set(e.agents[e.mask]) == {0, 1, 2} and len(set(e.agents[:, 0])) > 1
    check_against_plain_play(Relay(), e, task_keys("train", 3, INDICES), 2, END, ACT)


def test_roles_that_have_a_turn_together_sample_with_their_own_weights(episodes):
    e = episodes
    assert all(len(set(e.agents[:, t][e.mask[:, t]])) > 1 for t in range(2))
    check_weights(e, MODEL, relay()[1], WEIGHTS)


def test_members_that_share_a_plan_say_the_same_first_and_then_go_their_own_ways(episodes):
    """Keys [B, 2]: the first is for the first turn, as in an iteration in which executors learn."""
    e, free = (played(first, 0 * INDICES) for first in (jnp.broadcast_to(jax.random.key(6), (B,)), OWN))
    assert (e.actions[:, 0] == e.actions[0, 0]).all() and len(set(e.actions[:, 1])) > 1
    assert len(set(free.actions[:, 0])) > 1


def test_an_episode_played_again_remembers_by_role(episodes):
    e, env = episodes, Relay()
    b = max(range(B), key=lambda b: len(np.unique(e.observations[b], axis=0)))  # where much happens
    task = task_keys("train", 3, INDICES)[b]
    states = replay(env, 2, task, e.responses[b], e.response_lengths[b], e.mask[b], END)
    for t in range(int(e.mask[b].sum())):
        own = [s for s in range(t) if e.agents[b, s] == e.agents[b, t]][-2:]
        remembered = states.history.observations[t, e.agents[b, t]][2 - len(own) :]
        np.testing.assert_array_equal(remembered, e.observations[b, own])


def test_a_dump_from_before_there_were_roles_and_actions_has_them(episodes, tmp_path):
    e, file = episodes, tmp_path / "dump.npz"
    arrays = {name: value for name, value in e.arrays().items() if name != "agents"}
    np.savez(file, **{name: value for name, value in arrays.items() if name != "actions"})
    old = Episodes.load(file)
    np.testing.assert_array_equal(old.actions, e.actions)  # of a compiled rollout the numbers of its responses
    assert old.agents.shape == e.mask.shape and old.agents.dtype == np.int32 and not old.agents.any()
    np.savez(file, **arrays, agents=e.agents[:, :-1])
    with pytest.raises(ValueError, match="agents is int32"):
        Episodes.load(file)


class Pair(Counting):
    """Counts in pairs: after an even number the other one says what comes next."""

    roles = ("even", "odd")

    @property
    def role(self):
        return self.number % 2

    def expert(self, history_length):
        return "add 1" if self.turns % 3 else "add 5"


class Marked:
    """Prompts that depend on what they show; actions that depend on how long a response is. Ids begin with that of the end."""

    prompt_limit = 8

    def __init__(self, end=0):
        self.inputs, self.end_tokens = [], (end,)

    def build(self, inputs):
        self.inputs += inputs
        end = self.end_tokens[0]
        return [Prompt([end + 1 + len(each.observation) % 7, end + 1 + len(each.history)]) for each in inputs]

    def parse(self, ids):
        return ParsedResponse("said", f"add {len(ids)}", True)


def test_a_host_rollout_tells_each_role_in_the_format_of_its_own_weights():
    """One of two vocabularies is larger, ends answers otherwise, and its prompts lie beyond the smaller one."""
    sizes = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.3,
    )  # fmt: skip
    models = {"x": ModelConfig(vocab_size=8, **sizes), "y": ModelConfig(vocab_size=16, **sizes)}
    mesh, formats = mesh_of("data=1"), {"x": Marked(), "y": Marked(8)}
    rollout = HostRollout(
        Pair, formats, {name: network(model) for name, model in models.items()}, mesh,
        TextSettings(batch=6, history_length=2, response_limit=3, decode_batch_size=2), policies=("x", "y"),
    )  # fmt: skip
    params = {name: initialize(model, 0, mesh) for name, model in models.items()}
    e, _ = rollout(params, np.arange(6), jax.random.split(jax.random.key(1), 6), np.arange(6), Decoding())
    for role, end in enumerate((0, 8)):
        own = e.mask & (e.agents == role)
        assert ((e.prompts[own][:, :2] // 8) == role).all() and own.any()
        length = e.response_lengths[own]
        last = e.responses[own][np.arange(own.sum()), length - 1]
        assert (last[length < 3] == end).all() and (length < 3).any() and (e.responses[own].max() < 8 * (1 + role))


def test_a_host_rollout_asks_each_role_of_its_own_weights_and_shows_it_its_own_past():
    model = ModelConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.3,
    )  # fmt: skip
    mesh, format = mesh_of("data=1"), Marked()
    rollout = HostRollout(
        Pair, format, dict.fromkeys("xy", network(model)), mesh,
        TextSettings(batch=6, history_length=2, response_limit=3, decode_batch_size=2), policies=("x", "y"),
    )  # fmt: skip
    assert rollout.roles == ("even", "odd")
    params = {"x": initialize(model, 0, mesh), "y": initialize(model, 1, mesh)}
    keys = jax.random.split(jax.random.key(1), 6)
    e, report = rollout(params, np.arange(6), keys, np.arange(6), Decoding())
    assert len({*e.agents[:, 0]}) == 2  # both have a turn at the same time
    assert {0, 1} == set(e.agents[e.mask]) and not e.agents[~e.mask].any()
    told = {}
    for each in format.inputs:
        told.setdefault((each.goal, each.observation), []).append((each.history, each.turn))
    for b in range(6):
        seen = [report.texts[state] for state in e.states[b]]
        pasts = {0: [], 1: []}
        for t in range(int(e.mask[b].sum())):
            role = int(seen[t].split()[1]) % 2
            assert e.agents[b, t] == role
            assert report.actions[b][t] == f"add {e.response_lengths[b, t]}"
            assert (pasts[role][-2:], len(pasts[role])) in told[report.goals[b], seen[t]]
            pasts[role].append((seen[t], report.actions[b][t]))
        lines = report.story(e, b, rollout.roles).text().splitlines()
        assert [line.split()[0] for line in lines[2::2]] == [rollout.roles[role] for role in e.agents[b][e.mask[b]]]
    assert e.mask.sum(1).max() > 3 and not report.failures
    assert report.counts["decode_steps"] > 0 and 0 < report.counts["slot_use"] <= 1
    check_weights(e, model, params, ("x", "y"))


def test_scripted_play_shows_each_role_its_own_past():
    (episode,) = scripted(Pair, [0], noise=0.0, history_length=2, seed=0)
    assert episode.commands == ["add 5", "add 1", "add 1", "add 5", "add 1", "add 1"]
    assert [turn.observation for turn in episode.inputs] == ["at 0", "at 5", "at 6", "at 7", "at 12", "at 13"]
    first, second = ("at 0", "add 5"), ("at 6", "add 1")
    assert [turn.history for turn in episode.inputs] == [
        [], [], [first], [("at 5", "add 1")], [first, second], [("at 5", "add 1"), ("at 7", "add 5")]
    ]  # fmt: skip
    assert [turn.turn for turn in episode.inputs] == [0, 0, 1, 1, 2, 2]


def mine(base, **members):
    return type("Mine", (base,), members)


@pytest.mark.parametrize("roles", ["searcher", (), ("a", "a"), ("a", 3), ("a b",), 2])
def test_roles_are_different_words(roles):
    message = r"^Mine: roles is [^\n]*; give different words, as in \(\"searcher\", \"carrier\"\)$"
    with pytest.raises(ValueError, match=message):
        check_compiled(mine(Relay, roles=roles)(), Playable)
    with pytest.raises(ValueError, match=message):
        check_text(mine(Pair, roles=roles)())
    assert roles_of(Ring()) == roles_of(Counting()) == ("agent",)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, r"Mine lacks role: role\(state\) -> whose turn"),
        ({"role": 0}, r"Mine: role\(state\): cannot be compiled: TypeError: Expected a callable value, got 0"),
        ({"role": lambda self, state: jnp.zeros(2)}, r"Mine: role\(state\): role is f32\[2\]; make it i32\[\]"),
    ],
)
def test_a_team_says_whose_turn_it_is(members, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_compiled(mine(Ring, roles=("a", "b"), **members)(), Playable)
    with pytest.raises(ValueError, match=r"^Mine after reset\(task\) lacks role: whose turn"):
        check_text(mine(Counting, roles=("a", "b"))())


def test_parts_of_an_answer_make_up_its_words():
    given = {"action_length": 4, "switches": lambda self, answer: answer[0] == 1}
    for parts in ((1, 1), (1, 1, 1), (1, 0, 3), 4, (2, 1, 1.0)):
        with pytest.raises(ValueError, match=r"^Mine: answer_parts is [^\n]*; give three numbers, 4 together$"):
            check_compiled(mine(Ring, answer_parts=parts, **given)(), Playable)
    check_compiled(mine(Ring, answer_parts=(1, 1, 2), **given)(), Playable)
    with pytest.raises(ValueError, match=r"^Mine lacks switches: "):
        check_compiled(mine(Ring, answer_parts=(1, 1, 2), action_length=4)(), Playable)


def answer_of(actions=(), **members):
    """What workers that expected a Pair answer for another team."""
    workers = LocalWorkers(Pair)
    workers._make_env = mine(Pair, **members)
    workers.send([(0, 1, actions)])
    ((_, answer),) = workers.receive(1)
    return answer


def test_a_text_team_has_the_roles_that_it_began_with_and_none_after_the_end():
    for role, reason in ((2, "role is 2, there are 2"), (-1, "role is -1"), ("odd", "role is a str")):
        assert reason in answer_of(role=role).reason
    more = answer_of(roles=("a", "b", "c"), role=2)
    assert "role is 2, there were 2 before the first reset" in more.reason
    output = answer_of(("add 1",) * Pair.max_turns, role=property(lambda self: 1 if self.turns < self.max_turns else None))
    assert output.done and output.role == 0


@pytest.mark.parametrize(("shift", "found"), [(1, 3), (-1, -1)])
def test_a_role_that_a_compiled_team_does_not_have_ends_the_run(episodes, shift, found):
    runner, e = object.__new__(CompiledRunner), episodes
    runner.env, runner.roles, runner._tables = Relay(), Relay.roles, None
    for moved in (0, shift):
        runner.program = lambda *_, moved=moved: e.replace(agents=np.where(e.mask, e.agents + moved, 0))
        with contextlib.nullcontext() if not moved else pytest.raises(RunError, match=rf"^Relay: role\(state\) is {found}, an"):
            runner.rollout(None, None, None, None, Decoding())
