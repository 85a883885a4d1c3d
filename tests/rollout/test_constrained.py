"""Rollouts that sample admissible actions only: what they may choose, and the probabilities that the trainer sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.household import Household, HouseholdPlan
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import initialize, network, shardings
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.compiled import Program, make_rollout
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.build import build
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer.step import training_batch
from tests.helpers.plain_rollout import action_of, check_against_plain_play
from tests.helpers.refusals import refused
from tests.helpers.tiny import MODEL as TINY_MODEL
from tests.helpers.tiny import mesh_of
from tests.rollout.household_policy import ACT, END, ENV, MODEL, K, cloned

B, TEMPERATURE = 12, 1.5
COMMANDS = [f"command {n}" for n in range(25)]
TEXT_MODEL = dataclasses.replace(TINY_MODEL, vocab_size=11)
TASKS = np.arange(B) // 2


@functools.cache
def compiled(spec):
    options = {"history_length": K, "decode_batch_size": 6, "end": END, "act": ACT, "constrained": True}
    return make_rollout(ENV, functools.partial(Program, graphdefs={SHARED: network(MODEL)}, **options), mesh_of(spec))


@functools.cache
def play(spec="data=1", temperature=TEMPERATURE):
    mesh, rollout = mesh_of(spec), compiled(spec)
    keys = jax.random.split(jax.random.key(5), B)
    with jax.set_mesh(mesh):
        placed = jax.device_put(cloned(), shardings(MODEL, mesh))
        inputs = task_keys("train", 3, TASKS), keys, jnp.int32(TASKS), Decoding(temperature=temperature)
        return jax.device_get(rollout({SHARED: placed}, *inputs))


def test_every_action_is_admissible_and_the_record_says_what_else_could_have_been():
    e, listed, reset, step = play(), *map(jax.jit, (ENV.admissible, ENV.reset, ENV.step))
    check_against_plain_play(ENV, e, task_keys("train", 3, TASKS), K, END, ACT)
    assert not e.invalid.any()
    assert len(np.unique(e.actions[e.mask])) > 10
    for b in range(B):
        state, _ = reset(task_keys("train", 3, TASKS)[b])
        for t in range(e.mask[b].sum()):
            flags, words = jax.device_get(listed(state))
            answers = [[word for word in row if word] + [END] for row in words[flags].tolist()]
            response = e.responses[b, t, : e.response_lengths[b, t]].tolist()
            assert response in answers
            for i in range(e.responses.shape[-1]):
                bits = int.from_bytes(e.allowed[b, t, i].tobytes(), "little")
                going_on = {a[i] for a in answers if a[:i] == response[:i]} if i < len(response) else set()
                assert {token for token in range(bits.bit_length()) if bits >> token & 1} == going_on
            state, *_ = step(state, action_of(response, END, ENV.action_length)[0])


def test_the_trainer_sees_the_samplers_log_probabilities():
    model = nnx.merge(network(MODEL), cloned())
    logprobs = jax.jit(lambda batch, temperature: token_logprobs(model, batch, temperature=temperature))
    for temperature in (TEMPERATURE, 0.7, 0.0):
        batch = training_batch(play(temperature=temperature))
        logp, entropy = logprobs(batch, temperature or 1.0)
        np.testing.assert_allclose(logp, batch.old_logp, atol=1e-5)
        assert np.asarray(logp).max() < 1e-6 and (np.asarray(entropy) >= 0).all()  # which no NaN is
    free, _ = logprobs(batch.replace(allowed=None), 1.0)
    assert (logp - free).max() > 0.1  # the tokens left out had probability
    in_chunks, _ = jax.jit(functools.partial(token_logprobs, model, max_logits=1))(batch)
    np.testing.assert_allclose(in_chunks, logp, atol=1e-5)


class Spelled:
    """Prompts and answers of two tokens and an end: a command's place in COMMANDS in base 5. The last is longer than R."""

    end_tokens, prompt_limit = (TEXT_MODEL.vocab_size - 1,), 8

    def build(self, inputs):
        return [Prompt([1 + each.turn, 1 + len(each.observation) % 9]) for each in inputs]

    def answers(self, commands):
        codes = map(COMMANDS.index, commands)
        return [[1 + code // 5, 1 + code % 5, *[1] * (2 * (code == 24)), *self.end_tokens] for code in codes]

    def parse(self, ids):
        return ParsedResponse(str(ids), "what the text would say", False)


class Choosy:
    """Offers some of COMMANDS, others each turn."""

    max_turns, task_types, task_type, goal = 5, ("any",), 0, "any"

    def reset(self, task):
        self.random, self.turn = np.random.default_rng(task), 0
        return self._offer()

    def _offer(self):
        self.commands = self.random.choice(COMMANDS, self.random.integers(2, 20), replace=False).tolist()
        return " ".join(self.commands), self.commands

    def step(self, action):
        admissible, self.turn = action in self.commands, self.turn + 1
        return *self._offer(), 1.0, self.turn == self.max_turns, {"won": True, "admissible": admissible}


def test_a_host_rollout_samples_the_listed_commands():
    mesh, form = mesh_of(), Spelled()
    settings = TextSettings(batch=B, history_length=0, response_limit=4, decode_batch_size=5, words=1)
    rollout = HostRollout(Choosy, form, {SHARED: network(TEXT_MODEL)}, mesh, settings)
    params, keys = initialize(TEXT_MODEL, 0, mesh), jax.random.split(jax.random.key(1), B)
    e, report = rollout({SHARED: params}, TASKS, keys, TASKS, Decoding(temperature=TEMPERATURE))
    assert e.mask.all() and report.counts["inadmissible"] == report.counts["malformed"] == 0 and not e.invalid.any()
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), (e, rollout.abstract_episodes()))
    assert shapes[0] == shapes[1]
    for b in range(B):
        env = Choosy()
        _, commands = env.reset(TASKS[b])
        for t in range(e.mask.shape[1]):
            answers = [answer for answer in form.answers(commands) if len(answer) <= 4]
            response = e.responses[b, t, : e.response_lengths[b, t]].tolist()
            for i in range(e.responses.shape[-1]):
                going_on = {a[i] for a in answers if a[:i] == response[:i]} if i < len(response) else set()
                assert {token for token in range(32) if int(e.allowed[b, t, i, 0]) >> token & 1} == going_on
            _, commands, *_ = env.step(COMMANDS[5 * (response[0] - 1) + response[1] - 1])
    batch = training_batch(e)
    model = nnx.merge(network(TEXT_MODEL), params)
    logp, _ = jax.jit(lambda batch: token_logprobs(model, batch, temperature=TEMPERATURE))(batch)
    np.testing.assert_allclose(logp, batch.old_logp, atol=1e-5)


@pytest.mark.slow
def test_devices_change_nothing():
    for name, value in play().arrays().items():
        compare = functools.partial(np.testing.assert_allclose, atol=1e-5) if name == "logp" else np.testing.assert_array_equal
        compare(getattr(play("data=2,fsdp=2,tensor=2"), name), value, err_msg=name)


def test_what_lists_no_actions_is_refused():
    config = load(None, ["rollout.constrain=admissible"])
    for name in ("agent", "webshop", "search", "search_team", "math"):
        with refused(f"rollout.constrain=admissible: env.name={name} does not list all that may be said"):
            check_together(load(None, ["rollout.constrain=admissible", f"env.name={name}"]))
    with refused("rollout.constrain=admissible: env.name=alfworld is played as text on the device"):
        check_together(load(None, ["rollout.constrain=admissible", "env.name=alfworld", "policy=a", "warm_start=none"]))
    with refused("rollout.constrain=admissible: method=hapo compares how uncertain tokens are"):
        check_together(load(None, ["rollout.constrain=admissible", "method=hapo"]))
    with refused("rollout.constrain=admissible: HouseholdPlan does not list its actions"):
        CompiledRunner(config, HouseholdPlan(), {}, None, mesh_of("data=1"))
    for wrong, found in (
        (lambda state: (jnp.ones(3, bool), jnp.ones((3, 9), int)), "words is i32[3, 9]; make it i32[3, "),
        (lambda state: jnp.ones(3), "does not return 2 values; return (rows, words)"),
        (lambda state: state.nothing, "cannot be compiled: AttributeError"),
    ):
        env = Household()
        env.step, env.admissible = Household().step, wrong  # which the household's step asks, too
        with refused(f"Household: admissible(state): {found}"):
            CompiledRunner(config, env, {}, None, mesh_of("data=1"))


class Guided(Choosy):
    """Has an expert, so that its texts are known."""

    def expert(self, history_length):
        return "anything"


class Silent(Guided):
    """Lists nothing."""

    def _offer(self):
        super()._offer()
        return "anything", []


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("Guided", "text", "the template asks for a thought, which is free; give env.template=plain"),
        ("Silent", "plain", "Silent does not list all that may be said; leave it out"),
    ],
)
def test_text_whose_answers_are_free_is_refused(name, template, message):
    fields = ["rollout.constrain=admissible", f"env.name={__file__}:{name}", f"env.template={template}", "warm_start=none",
              "policy.num_hidden_layers=1"]  # fmt: skip
    with refused(message):
        build(load("text_small", fields), mesh_of())
