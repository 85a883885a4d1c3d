"""Partial rollouts: the same episodes as whole ones under the same weights, tokens of one version after the other, resumed."""

import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from odd_env import Counting, Restless
from test_host import HARMLESS, MODEL, Script, programs

from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy import initialize, network
from hgpo_jax.rollout.host import Carried, HostRollout, TextSettings
from hgpo_jax.rollout.partial_rollout import PartialRollout
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

MEMBERS, B, KEEP, R = 2, 6, 2, 12
SAME = ("prompts", "prompt_lengths", "responses", "response_lengths", "rewards", "mask", "invalid", "success", "judged", "task",
        "truncated", "final_prompts", "final_prompt_lengths")  # fmt: skip


def inputs(n):
    """Tasks 1, 2, ... of which 20 needs one turn and 1 many; each prompt group has its own."""
    tasks = np.repeat([(7 * (3 * n + group)) % 20 + 1 for group in range(B // MEMBERS)], MEMBERS)
    return tasks, jax.random.split(jax.random.key(n), B), np.arange(B) // MEMBERS, Decoding()


def host_of(make_env=Counting, actions=HARMLESS, **options):
    settings = TextSettings(B, 2, **{"response_limit": R, "decode_batch_size": 4, "keep": KEEP} | options)
    host = HostRollout(make_env, Script(actions), {SHARED: network(MODEL)}, mesh_of(), settings)
    host._programs = {SHARED: programs("data=1", settings.response_limit)}
    return host


@functools.cache
def params(version):
    return {SHARED: initialize(MODEL, version, mesh_of())}


def play(iterations, host=None, rollout=None, version=lambda iteration: 0):
    """The results of partial rollouts, and what made them."""
    rollout = rollout or PartialRollout(host or host_of(), KEEP, inputs, MEMBERS)
    return [rollout(params(version(iteration)), iteration) for iteration in iterations], rollout


@pytest.fixture(scope="module")
def whole():
    """The prompt groups of the first batches, as whole rollouts play them: (episodes, report, rows) of each."""
    host, by_number = host_of(keep=1), []
    for n in range(5):
        episodes, report = host(params(0), *inputs(n))
        for group in range(B // MEMBERS):
            rows = slice(group * MEMBERS, (group + 1) * MEMBERS)
            by_number.append((episodes, report, rows))
    return by_number


def numbers_of(episodes, report, whole) -> list[int]:
    """The number of each prompt group, which is the only one that was played so in whole rollouts."""
    np.testing.assert_array_equal(episodes.groups, inputs(0)[2])
    found = []
    for group in range(B // MEMBERS):
        rows = slice(group * MEMBERS, (group + 1) * MEMBERS)

        def same(other, rows=rows):
            return all(np.array_equal(getattr(episodes, name)[rows], getattr(other[0], name)[other[2]]) for name in SAME)

        (number,) = (n for n, other in enumerate(whole) if same(other))
        theirs, their_report, their_rows = whole[number]
        np.testing.assert_allclose(episodes.logp[rows], theirs.logp[their_rows], atol=1e-5)
        for ours, others in zip(range(*rows.indices(B)), range(*their_rows.indices(B)), strict=True):
            assert report.actions[ours] == their_report.actions[others]
            assert report.responses[ours] == their_report.responses[others]
            texts = [[r.texts[i] for i in e.states[b, e.mask[b]]] for r, e, b in
                     ((report, episodes, ours), (their_report, theirs, others))]  # fmt: skip
            assert texts[0] == texts[1]
        found.append(number)
    return found


@pytest.mark.parametrize("reread", [True, False])
def test_all_prompt_groups_are_played_as_in_whole_rollouts_each_once(whole, reread):
    results, rollout = play(range(3), host_of(reread=reread))
    found = [number for result in results for number in numbers_of(*result, whole)]
    assert len(set(found)) == len(found) == 9
    assert found != sorted(found)  # the shorter ones came first
    assert rollout._buffer.begun  # some answers went on, too
    assert set(rollout.snapshot()["started"].tolist()) - {-1} == set(range(12)) - set(found)


def test_a_rollout_does_not_wait_for_its_longest_episodes(whole):
    host = host_of(keep=1)
    apart = [host(params(0), *inputs(n))[1].counts for n in range(3)]
    together = [report.counts for _, report in play(range(6))[0][3:]]  # once the start is over
    steps, use = ([sum(counts[name] for counts in some) for some in (together, apart)] for name in ("decode_steps", "slot_use"))
    assert steps[0] < steps[1] and use[0] > use[1]


@pytest.mark.slow  # one more network to compile
def test_every_token_has_the_probability_of_one_version_after_the_other():
    results, _ = play(range(5), version=lambda iteration: iteration)
    model, changed = network(MODEL), {"between turns": 0, "in an answer": 0}
    for iteration, (episodes, report) in enumerate(results):
        assert list(map(len, report.versions)) == episodes.mask.sum(1).tolist()
        for b, versions in enumerate(report.versions):
            version = 0
            for t, first in enumerate(versions):
                assert version <= first <= iteration
                changed["between turns"] += t > 0 and version < first
                prompt, n = episodes.prompts[b, t, : episodes.prompt_lengths[b, t]], episodes.response_lengths[b, t]
                ids = np.concatenate([prompt, episodes.responses[b, t, :n]])
                expected = np.array([logprobs_of(model, params(v)[SHARED], ids)[-n:] for v in range(iteration + 1)])
                same = np.abs(expected - episodes.logp[b, t, :n]) < 1e-5
                version = first
                for token in range(n):
                    version += int(np.argmax(same[version:, token]))  # the next one that says so
                    assert same[version, token]
                changed["in an answer"] += version > first
    assert min(changed.values()) > 0


def test_answers_go_on_in_their_slots_from_what_earlier_weights_computed():
    """Not read again: keys and values of the prompt and of all tokens but the last are the earlier weights'."""
    host, ended = host_of(reread=False), []
    (tasks, keys, groups, decoding), (more, more_keys, *_) = inputs(0), inputs(1)
    buffer, tasks = host.new_buffer(np.tile(groups, KEEP), KEEP), [*tasks, *more]
    given = tasks, jax.random.wrap_key_data(np.concatenate([*map(jax.random.key_data, (keys, more_keys))])), decoding
    buffer.version = 0
    host.play(buffer, range(KEEP * B), params(0), *given, Carried(enough=lambda some: (ended.extend(some), len(ended) > 2)[1]))
    begun = {row: (buffer.turn(row), len(said.tokens)) for row, (_, said) in buffer.begun.items()}
    assert len(begun) > 1
    assert buffer.begun.keys() == host._kept[SHARED]._sampled.keys()
    buffer.version = 1
    host.play(buffer, (), params(1), *given, Carried([row for row in range(KEEP * B) if row not in ended]))
    assert not buffer.begun and not host._kept
    e, read_again = buffer.episodes, []
    for row, (turn, before) in begun.items():
        assert buffer.versions[row][turn] == 0
        n, length = e.prompt_lengths[row, turn], e.response_lengths[row, turn]
        ids = np.concatenate([e.prompts[row, turn, :n], e.responses[row, turn, :length]])
        expected = logprobs_by_both(ids, n, before)
        np.testing.assert_allclose(e.logp[row, turn, :length], expected, atol=1e-5)
        read_again.append(logprobs_of(network(MODEL), params(1)[SHARED], ids)[n - 1 + before :])
    others = [e.logp[row, turn, before : e.response_lengths[row, turn]] for row, (turn, before) in begun.items()]
    assert np.abs(np.concatenate(read_again) - np.concatenate(others)).max() > 1e-3  # otherwise nothing was tested


def logprobs_by_both(ids, prompt, before):
    """Log-probabilities of a response of which version 0 sampled `before` tokens, and version 1, with its cache, the others."""
    old, new = (nnx.merge(network(MODEL), params(version)[SHARED]) for version in range(2))
    held = prompt + before - 1  # the last token has been sampled, not read
    _, cache = old.prefill(ids[None, :held], np.array([held - 1]), len(ids))
    logp = [*logprobs_of(network(MODEL), params(0)[SHARED], ids[: held + 1])[prompt - 1 :]]
    for at in range(held, len(ids) - 1):
        hidden, cache = new.decode(ids[at : at + 1], np.array([at]), cache, new.decode_blocks())
        logp.append(log_softmax(new.logits(hidden))[ids[at + 1]])
    return np.array(logp)


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(logits[0]))


def logprobs_of(model, params, ids):
    """The log-probabilities of all tokens but the first, f32[n - 1]."""
    logits = logits_of(model, params, np.pad(ids, (0, 280 - len(ids)))[None])
    logp = np.asarray(jax.nn.log_softmax(logits[0, : len(ids) - 1]))
    return np.take_along_axis(logp, ids[1:, None], 1)[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, ids):
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(ids, jax.numpy.arange(ids.shape[1])[None]))


def test_a_snapshot_goes_on_to_the_bit():
    version = lambda iteration: iteration  # noqa: E731
    _, rollout = play(range(3), version=version)
    saved = rollout.snapshot()
    resumed = PartialRollout(host_of(), KEEP, inputs, MEMBERS)
    resumed.resume(saved)
    jax.tree.map(np.testing.assert_array_equal, resumed.snapshot(), saved)
    ours, theirs = (play(range(3, 6), rollout=each, version=version)[0] for each in (resumed, rollout))
    for (episodes, report), (others, other_report) in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, episodes, others)
        assert (report.versions, report.texts, report.responses) == tuple(
            getattr(other_report, name) for name in ("versions", "texts", "responses")
        )


def test_an_answer_that_is_read_again_and_then_stays_in_its_slot_is_whole():
    """As in a resumed run, whose sampler is given what the answer began with, and later returns only the rest."""
    (tasks, keys, groups, _), ended, decoding = inputs(1), [], Decoding(min_new=4)
    expected, _ = host_of(keep=1, response_limit=40)(params(0), tasks, keys, groups, decoding)
    host = host_of(reread=False, response_limit=40)
    buffer = host.new_buffer(np.tile(groups, KEEP), KEEP)
    buffer.version = 0

    def play_on(new, most):
        steps = itertools.count()
        enough = lambda some: (ended.extend(some), next(steps) >= most)[1]  # noqa: E731
        host.play(buffer, new, params(0), tasks, keys, decoding, Carried(set(range(B)) - {*new, *ended}, enough=enough))
        return {(row, buffer.turn(row)): len(said.tokens) for row, (_, said) in buffer.begun.items()}

    first = play_on(range(B), 2)
    host.forget()
    second = play_on((), 1)
    assert any(first[answer] < length for answer, length in second.items() if answer in first)
    assert play_on((), 1000) == {} and len(ended) == B
    episodes, _ = buffer.take(range(B), groups).result()
    for name in SAME:
        np.testing.assert_array_equal(getattr(episodes, name), getattr(expected, name))
    np.testing.assert_allclose(episodes.logp, expected.logp, atol=1e-5)


def test_the_clock_does_not_decide_which_groups_are_complete():
    slow = host_of(Restless, workers=2)
    try:
        ours = play(range(3), slow)[0]
    finally:
        slow.close()
    for (episodes, _), (others, _) in zip(ours, play(range(3))[0], strict=True):
        for name in SAME:
            np.testing.assert_array_equal(getattr(episodes, name), getattr(others, name))


def test_failed_episodes_do_not_keep_their_group():
    host = host_of(actions=[*HARMLESS, "raise up"])
    results, _ = play(range(4), host)
    failures = [len(report.failures) for _, report in results]
    assert sum(failures) > 0 and [report.counts["excluded"] for _, report in results] == failures
    for episodes, report in results:
        for row in report.failures:
            assert not episodes.mask[row].any() and report.versions[row] == []


class Forgiving(Counting):
    """Nothing that went wrong in `Counting` goes wrong here."""

    def step(self, action):
        return super().step(action.replace("raise", "dance"))


class Unwilling(Counting):
    """Has forgotten every other task."""

    def reset(self, task):
        if task % 2:
            raise KeyError(task)
        return super().reset(task)


@pytest.mark.parametrize("later", [Forgiving, Unwilling])
def test_episodes_that_fail_otherwise_when_a_run_goes_on_are_learned_once_and_whole_or_not_at_all(later):
    _, rollout = play(range(3), host_of(actions=[*HARMLESS, "raise up"]))
    saved = rollout.snapshot()
    assert saved["failed"].any()
    resumed = PartialRollout(host_of(later, actions=[*HARMLESS, "raise up"]), KEEP, inputs, MEMBERS)
    resumed.resume(saved)
    in_place, learned = set(saved["started"].tolist()) - {-1}, []
    for iteration in range(3, 8):
        before = set(resumed.snapshot()["started"].tolist()) | set(range(3 * (iteration + 1), 3 * (iteration + 2)))
        episodes, _ = resumed(params(0), iteration)
        learned += before - set(resumed.snapshot()["started"].tolist()) - {-1}
        begun = episodes.mask[:, 0]
        assert (episodes.success | episodes.truncated)[begun].all()  # whole
    assert len(learned) == len(set(learned)) == 5 * B // MEMBERS
    assert in_place <= set(learned)  # none is forgotten


def test_what_cannot_go_on_is_refused():
    for fields, message in (
        (["env.name=household"], "env.name=household is not played as text on the host; leave it out"),
        (["method=dapo"], "method=dapo samples until it has enough; leave one of the two out"),
        (["method=dr_mas", "env.name=household_team"], "env.name=household_team is not played as text on the host"),
        (["method=gspo"], "method=gspo clips ratios that one update already exceeds; give"),
    ):
        with refused(f"rollout.keep=2: {message}", ConfigError):
            check_together(load(None, ["env.name=household_text", "rollout.keep=2", *fields]))
    for fields, message in (
        (["env.name=household_text"], "no answer is interrupted with rollout.keep=1"),
        (["env.name=household_text", "rollout.keep=2", "env.template=conversation"], "whole chats of env.template=conv"),
        (["env.name=household_text", "rollout.keep=2", "env.template=plain", "rollout.constrain=admissible"],
         "with rollout.constrain=admissible an interrupted answer begins anew"),
    ):  # fmt: skip
        with refused(f"rollout.reread=false: {message}", ConfigError):
            check_together(load(None, [*fields, "rollout.reread=false"]))
    with refused("rollout.keep=9: must be less than or equal to 8", ConfigError):
        load(None, ["rollout.keep=9"])
