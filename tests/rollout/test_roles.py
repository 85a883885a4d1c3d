"""Turns that belong to several roles: recorded, remembered by role, and nothing else in a rollout is changed by them."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from odd_env import Counting

from hgpo_jax.envs.household import HouseholdTeam
from hgpo_jax.envs.words import Words
from hgpo_jax.errors import RunError
from hgpo_jax.learner import token_logprobs
from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.tokenizer import vocabulary_size
from hgpo_jax.rollout.chat_format import ParsedResponse, Prompt
from hgpo_jax.rollout.compiled import make_rollout, replay
from hgpo_jax.rollout.episodes import KINDS, Episodes
from hgpo_jax.rollout.host import HostRollout, Speaker
from hgpo_jax.rollout.requirements import check_compiled, check_text, roles_of
from hgpo_jax.rollout.scripted_play import play as scripted
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.words import WordFormat
from hgpo_jax.rollout.workers import LocalWorkers
from hgpo_jax.runners import CompiledRunner
from hgpo_jax.sampling import Decoding
from hgpo_jax.training_batch import TrainingBatch
from tests.helpers.agreement import assert_same
from tests.helpers.plain_rollout import check_against_plain_play
from tests.test_rollout import ACT, END, INDICES, MODEL, B, Ring


class Relay(Ring):
    """The ring walked by three roles: the one that begins depends on the task, and the last one has two turns in a row."""

    roles = ("first", "second", "third")

    def role(self, state):
        return jnp.array([0, 1, 2, 2])[(state.turn + state.task) % 4]


@functools.cache
def played(env_type, history) -> Episodes:
    mesh = make_mesh("data=1", jax.devices()[:1])
    rollout = make_rollout(env_type(), network(MODEL), mesh, history_length=history, decode_batch_size=8, end=END, act=ACT)
    keys, tasks = jax.random.split(jax.random.key(5), B), task_keys("train", 3, INDICES)
    return jax.device_get(rollout(initialize(MODEL, 0, mesh), tasks, keys, jnp.int32(INDICES), Decoding()))


@pytest.mark.parametrize("history", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_compiled_rollout_records_roles_and_shows_each_its_own_past(history):
    e = played(Relay, history)
    assert set(e.agents[e.mask]) == {0, 1, 2} and len(set(e.agents[:, 0])) > 1
    check_against_plain_play(Relay(), e, task_keys("train", 3, INDICES), history, END, ACT)


def test_without_a_past_to_show_roles_change_nothing_but_agents():
    team, alone = played(Relay, 0), played(Ring, 0)
    assert team.agents.any() and not alone.agents.any()
    for name in set(KINDS) - {"agents"}:
        np.testing.assert_array_equal(getattr(team, name), getattr(alone, name), err_msg=name)


def test_an_episode_played_again_remembers_by_role():
    e, env = played(Relay, 2), Relay()
    b = int(e.mask.sum(1).argmax())
    task = task_keys("train", 3, INDICES)[b]
    states = replay(env, 2, task, e.responses[b], e.response_lengths[b], e.mask[b], END)
    for t in range(int(e.mask[b].sum())):
        own = [s for s in range(t) if e.agents[b, s] == e.agents[b, t]][-2:]
        remembered = states.history.observations[t, e.agents[b, t]][2 - len(own) :]
        np.testing.assert_array_equal(remembered, e.observations[b, own])


def check_weights(e: Episodes, model: ModelConfig, params: dict, weights: tuple[str, ...]) -> None:
    """Every turn was sampled with the weights of its role, and hardly with others."""
    flat = lambda a: np.asarray(a).reshape(-1, *a.shape[2:])  # noqa: E731
    batch = TrainingBatch(
        prompts=flat(e.prompts), prompt_lengths=np.maximum(flat(e.prompt_lengths), 1), responses=flat(e.responses),
        response_lengths=flat(e.response_lengths), old_logp=flat(e.logp), advantages=None,
    )  # fmt: skip
    for name, of in params.items():
        logp, _ = token_logprobs(nnx.merge(network(model), of), batch)
        difference = np.abs(logp - batch.old_logp).max(1)
        own = np.array([weights[role] == name for role in flat(e.agents)])
        assert difference[flat(e.mask) & own].max() < 1e-4 and np.median(difference[flat(e.mask) & ~own]) > 1e-2


@pytest.mark.parametrize("equal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_roles_that_have_a_turn_together_sample_with_their_own_weights(equal):
    mesh, weights = make_mesh("data=1", jax.devices()[:1]), ("a", "b", "a")
    graphdefs = {"a": network(MODEL), "b": network(MODEL)}
    rollout = make_rollout(
        Relay(), graphdefs, mesh, history_length=2, decode_batch_size=8, end=END, act=ACT, weights=weights
    )  # fmt: skip
    keys, tasks = jax.random.split(jax.random.key(5), B), task_keys("train", 3, INDICES)
    params = {"a": initialize(MODEL, 0, mesh), "b": initialize(MODEL, 0 if equal else 1, mesh)}
    e = jax.device_get(rollout(params, tasks, keys, jnp.int32(INDICES), Decoding()))
    assert all(len(set(e.agents[:, t][e.mask[:, t]])) > 1 for t in range(2))
    if equal:
        jax.tree.map(np.testing.assert_array_equal, e, played(Relay, 2))
    else:
        check_weights(e, MODEL, params, weights)


@pytest.mark.slow  # one more program to compile
def test_members_that_share_a_plan_say_the_same_first_and_then_go_their_own_ways():
    """Keys [B, 2]: the first is for the first turn, as in an iteration in which executors learn."""
    mesh, env, groups = make_mesh("data=1", jax.devices()[:1]), Relay(), jnp.int32(INDICES)
    rollout = make_rollout(env, network(MODEL), mesh, history_length=0, decode_batch_size=8, end=END, act=ACT)
    own, shared = jax.random.split(jax.random.key(5), B), jnp.broadcast_to(jax.random.key(6), (B,))
    play = lambda first, tasks: jax.device_get(  # noqa: E731
        rollout(initialize(MODEL, 0, mesh), tasks, jnp.stack([first, own], axis=1), groups, Decoding())
    )
    jax.tree.map(np.testing.assert_array_equal, play(own, task_keys("train", 3, INDICES)), played(Relay, 0))
    one_task = task_keys("train", 3, jnp.zeros(B, jnp.int32))
    e, free = play(shared, one_task), play(own, one_task)
    assert (e.actions[:, 0] == e.actions[0, 0]).all() and len(set(e.actions[:, 1])) > 1
    assert len(set(free.actions[:, 0])) > 1


def test_a_dump_from_before_there_were_roles_and_actions_has_them(tmp_path):
    e = played(Relay, 0)
    file = tmp_path / "dump.npz"
    arrays = {name: value for name, value in vars(e).items() if name != "agents"}
    np.savez(file, **{name: value for name, value in arrays.items() if name != "actions"})
    old = Episodes.load(file)
    np.testing.assert_array_equal(old.actions, e.actions)  # of a compiled rollout the numbers of its responses
    assert old.agents.shape == e.mask.shape and old.agents.dtype == np.int32 and not old.agents.any()
    e.save(file)
    np.testing.assert_array_equal(Episodes.load(file).agents, e.agents)
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


class Format:
    """Actions that depend on how long a response is."""

    end_tokens, prompt_limit = (0,), 8

    def __init__(self):
        self.inputs = []

    def build(self, inputs):
        self.inputs += inputs
        return [Prompt([1 + len(each.observation) % 7, 1 + len(each.history)]) for each in inputs]

    def parse(self, ids):
        return ParsedResponse("said", f"add {len(ids)}", True)


def test_a_host_rollout_records_roles_and_shows_each_its_own_past():
    model = ModelConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.3,
    )  # fmt: skip
    mesh, shown, tasks = make_mesh("data=1", jax.devices()[:1]), Format(), np.array([0, 1, 2, 3, 4, 5])
    rollout = HostRollout(Pair, shown, network(model), mesh, batch=6, history_length=2, response_limit=3, decode_batch_size=6)
    assert rollout.roles == ("even", "odd")
    keys = jax.random.split(jax.random.key(1), 6)
    e, report = rollout(initialize(model, 0, mesh), tasks, keys, np.arange(6), Decoding())
    told = {}
    for each in shown.inputs:
        told.setdefault((each.goal, each.observation), []).append(each)
    assert {0, 1} == set(e.agents[e.mask]) and not e.agents[~e.mask].any()
    for b in range(6):
        seen = [report.texts[state] for state in e.states[b]]
        pasts = {0: [], 1: []}
        for t in range(int(e.mask[b].sum())):
            role = int(seen[t].split()[1]) % 2
            assert e.agents[b, t] == role
            assert (pasts[role][-2:], len(pasts[role])) in [(p.history, p.turn) for p in told[report.goals[b], seen[t]]]
            pasts[role].append((seen[t], report.actions[b][t]))
        lines = report.story(e, b, rollout.roles).text().splitlines()
        assert [line.split()[0] for line in lines[2::2]] == [rollout.roles[role] for role in e.agents[b][e.mask[b]]]


class Marked(Format):
    """Prompts that begin with a mark."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def build(self, inputs):
        return [Prompt([self.mark, *prompt.ids]) for prompt in super().build(inputs)]

    def parse(self, ids):
        return ParsedResponse("said", f"add {2 * len(ids) + self.mark}", True)


def test_a_host_rollout_asks_each_role_in_its_own_way():
    model = ModelConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.3,
    )  # fmt: skip
    mesh, even, odd = make_mesh("data=1", jax.devices()[:1]), Marked(6), Marked(7)
    graphdefs = {"x": network(model), "y": network(model)}
    rollout = HostRollout(
        Pair, even, graphdefs, mesh, batch=6, history_length=2, response_limit=3, decode_batch_size=2,
        speakers=[Speaker(even, 3, "x"), Speaker(odd, 2, "y")],
    )  # fmt: skip
    params = {"x": initialize(model, 0, mesh), "y": initialize(model, 1, mesh)}
    keys = jax.random.split(jax.random.key(1), 6)
    e, report = rollout(params, np.arange(6), keys, np.arange(6), Decoding())
    assert len({*e.agents[:, 0]}) == 2  # both have a turn at the same time
    for role, (mark, limit) in enumerate([(6, 3), (7, 2)]):
        own = e.mask & (e.agents == role)
        assert set(e.prompts[own][:, 0]) == {mark} and e.response_lengths[own].max() == limit
    for b in range(6):
        said = zip(e.response_lengths[b], e.agents[b], strict=True)
        assert report.actions[b] == [f"add {2 * n + 6 + role}" for (n, role), t in zip(said, e.mask[b], strict=True) if t]
    assert not report.failures and report.counts["decode_steps"] > 0 and 0 < report.counts["slot_use"] <= 1
    check_weights(e, model, params, ("x", "y"))


def test_scripted_play_shows_each_role_its_own_past():
    (episode,) = scripted(Pair, [0], noise=0.0, history_length=2, seed=0)
    assert episode.commands == ["add 5", "add 1", "add 1", "add 5", "add 1", "add 1"]
    assert [known.observation for known in episode.known] == ["at 0", "at 5", "at 6", "at 7", "at 12", "at 13"]
    first, second = ("at 0", "add 5"), ("at 6", "add 1")
    assert [known.history for known in episode.known] == [
        [], [], [first], [("at 5", "add 1")], [first, second], [("at 5", "add 1"), ("at 7", "add 5")]
    ]  # fmt: skip
    assert [known.turn for known in episode.known] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("roles", ["searcher", (), ("a", "a"), ("a", 3), ("a b",), ("",), 2])
def test_roles_are_different_words(roles):
    team, pair = type("Mine", (Relay,), {"roles": roles})(), type("Mine", (Pair,), {"roles": roles})
    message = r"^Mine: roles is [^\n]*; give different words, as in \(\"searcher\", \"carrier\"\)$"
    with pytest.raises(ValueError, match=message):
        check_compiled(team, {})
    with pytest.raises(ValueError, match=message):
        check_text(pair())


def test_a_team_says_whose_turn_it_is():
    with pytest.raises(ValueError, match=r"^Mine lacks role: role\(state\) -> whose turn"):
        check_compiled(type("Mine", (Ring,), {"roles": ("a", "b")})(), {})
    with pytest.raises(ValueError, match=r"^Mine: role\(state\) fails with TypeError: Expected a callable value, got 0"):
        check_compiled(type("Mine", (Ring,), {"roles": ("a", "b"), "role": 0})(), {})
    with pytest.raises(ValueError, match=r"^Mine: role\(state\) has shape \[2\]; give a single index"):
        check_compiled(type("Mine", (Ring,), {"roles": ("a", "b"), "role": lambda self, state: jnp.zeros(2)})(), {})
    with pytest.raises(ValueError, match=r"^Mine after reset\(task\) lacks role: whose turn"):
        check_text(type("Mine", (Counting,), {"roles": ("a", "b")})())
    assert roles_of(Ring()) == roles_of(Counting()) == ("agent",)


@pytest.mark.parametrize("parts", [(1, 1), (1, 1, 1), (1, 0, 3), 4, (2, 1, 1.0)])
def test_parts_of_an_answer_make_up_its_words(parts):
    given = {"answer_parts": parts, "action_length": 4, "switches": lambda self, answer: answer[0] == 1}
    with pytest.raises(ValueError, match=r"^Mine: answer_parts is [^\n]*; give three numbers, 4 together$"):
        check_compiled(type("Mine", (Ring,), given)(), {})
    check_compiled(type("Mine", (Ring,), given | {"answer_parts": (1, 1, 2)})(), {})
    with pytest.raises(ValueError, match=r"^Mine lacks switches: "):
        check_compiled(type("Mine", (Ring,), {"answer_parts": (1, 1, 2), "action_length": 4})(), {})


@pytest.mark.parametrize(("role", "reason"), [(2, "role is 2, there are 2"), (-1, "role is -1"), ("odd", "role is a str")])
def test_a_role_that_is_none_costs_its_episode(role, reason):
    workers = LocalWorkers(Pair)
    workers._make_env = type("Mine", (Pair,), {"role": role})
    workers.send([(0, 1, ())])
    ((_, failure),) = workers.receive(1)
    assert reason in failure.reason


@pytest.mark.parametrize(("shift", "found"), [(1, 3), (-1, -1)])
def test_a_role_that_a_compiled_team_does_not_have_ends_the_run(shift, found):
    runner, e = object.__new__(CompiledRunner), played(Relay, 0)
    runner.env, runner.roles, runner._tables = Relay(), Relay.roles, None
    for moved in (0, shift):
        runner.program = lambda *_, moved=moved: e.replace(agents=np.where(e.mask, e.agents + moved, 0))
        with contextlib.nullcontext() if not moved else pytest.raises(RunError, match=rf"^Relay: role\(state\) is {found}, an"):
            runner.rollout(None, None, None, None, Decoding())


def test_a_text_team_has_the_roles_that_it_began_with_and_none_after_the_end():
    workers = LocalWorkers(Pair)
    workers._make_env = type("Mine", (Pair,), {"roles": ("a", "b", "c"), "role": 2})
    workers.send([(0, 1, ())])
    ((_, failure),) = workers.receive(1)
    assert "role is 2, there were 2 before the first reset" in failure.reason
    workers._make_env = type("Mine", (Pair,), {"role": property(lambda self: 1 if self.turns < self.max_turns else None)})
    workers.send([(0, 1, ("add 1",) * Pair.max_turns)])
    ((_, output),) = workers.receive(1)
    assert output.done and output.role == 0


@pytest.mark.slow  # compiles both faces
def test_host_and_compiled_rollouts_of_a_team_agree():
    env, size = HouseholdTeam(max_turns=12), {"history_length": 2}
    end, act = len(env.words) + 1, len(env.words) + 2
    model = dataclasses.replace(MODEL, vocab_size=vocabulary_size(env.words))
    mesh, groups = make_mesh("data=1", jax.devices()[:1]), np.arange(8)
    keys = jnp.stack([jax.random.split(jax.random.key(n), 8) for n in (6, 5)], axis=1)  # the first turn has its own
    params = initialize(model, 0, mesh)
    rollout = make_rollout(env, network(model), mesh, **size, decode_batch_size=8, end=end, act=act)
    e = jax.device_get(rollout(params, task_keys("train", 3, groups), keys, jnp.int32(groups), Decoding()))
    host = HostRollout(
        functools.partial(Words, env), WordFormat(env, 2, end, act), network(model), mesh, batch=8, **size,
        response_limit=env.action_length + 1, strict=True, decode_batch_size=8,
    )  # fmt: skip
    assert host.roles == env.roles
    played, _ = host(params, task_numbers("train", 3, groups, None), keys, groups, Decoding())
    assert_same(played, e)
    np.testing.assert_array_equal(played.agents, e.agents)
    assert (e.agents[e.mask] == np.broadcast_to(np.arange(12) % 5 > 0, e.mask.shape)[e.mask]).all()
