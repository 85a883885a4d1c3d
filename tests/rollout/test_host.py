"""The host rollout against a plain loop over its own responses: records, groups of states, mishaps, shapes, report."""

import dataclasses
import functools
import random
import re

import jax
import numpy as np
import pytest
from odd_env import ODD, Counting, Restless

from hgpo_jax.analysis.dumps import read_report
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import KINDS, Episodes
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, LocalWorkers
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.sampling.generate import Decoding, buckets
from hgpo_jax.sampling.slot_programs import SlotPrograms
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.tiny import mesh_of

MODEL = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, rope_theta=100.0, initializer_range=0.5,
)  # fmt: skip
END, R, MEMBERS, K, SLOTS = 0, 3, 4, 2, 4
TASKS = np.repeat([4, 15, 8, 19, 4], MEMBERS)
GROUPS = np.arange(len(TASKS)) // MEMBERS
B, T = len(TASKS), Counting.max_turns
HARMLESS = ["add 1", "add 5", "dance", "add 2", "numpy"]


class Script:
    """Prompts of one token per character, of many lengths; the sum of a response's tokens chooses the action."""

    end_tokens, prompt_limit = (END,), 260

    def __init__(self, actions):
        self.actions, self.inputs = actions, []

    def build(self, inputs):
        self.inputs += inputs
        return [Prompt(self.prompt(each), pairs_dropped=each.turn % 2, tokens_cut=each.turn // 4) for each in inputs]

    @staticmethod
    def prompt(each):
        text = f"{each.goal} {each.history} {each.turn} {each.observation} {each.commands}"
        long = 130 if each.turn == 3 else 0
        return [1 + ord(character) % 15 for character in text][: 260 - long] + [5] * long

    def parse(self, ids):
        return ParsedResponse("-".join(map(str, ids)), self.actions[sum(ids) % len(self.actions)], ids[0] % 3 > 0)

    def turns(self):
        return [each.turn for each in self.inputs]


@functools.cache
def programs(spec, response_limit):
    """What is compiled for all tests."""
    return SlotPrograms(network(MODEL), mesh_of(spec), max_new=response_limit, end_tokens=(END,))


def play(actions=HARMLESS, *, make_env=Counting, workers_type=None, spec="data=1", tasks=TASKS, **options):
    script, mesh = Script(actions), mesh_of(spec)
    options = {"decode_batch_size": SLOTS, "response_limit": R} | options
    rollout = HostRollout(make_env, script, {SHARED: network(MODEL)}, mesh, TextSettings(batch=B, history_length=K, **options))
    rollout._programs = {SHARED: programs(spec, options["response_limit"])}
    if workers_type:
        rollout._workers = workers_type(make_env)
    keys = jax.random.split(jax.random.key(1), B)
    try:
        return *rollout({SHARED: initialize(MODEL, 0, mesh)}, tasks, keys, GROUPS, Decoding()), rollout, script
    finally:
        rollout.close()


@pytest.fixture(scope="module")
def played():
    return play()


def check(episodes: Episodes, report, *, actions=HARMLESS, tasks=TASKS, strict=False, limit=R):
    """Compares every field with what a fresh environment says to the recorded responses."""
    ids: dict[str, int] = {}
    for b in range(B):
        if b in report.failures:
            for name in set(KINDS) - {"groups"}:
                assert not getattr(episodes, name)[b].any(), name
            continue
        env, script = Counting(), Script(actions)
        observation, commands = env.reset(int(tasks[b]))
        history, done, info = [], False, {"won": False}
        for t in range(T):
            assert episodes.mask[b, t] == (not done)
            if done:
                for name in [name for name, (_, dimensions) in KINDS.items() if "T" in dimensions]:
                    assert not getattr(episodes, name)[b, t].any(), name
                continue
            each = type("PromptInput", (), {"goal": env.goal, "history": history[-K:], "turn": t, "observation": observation,
                                     "commands": commands})  # fmt: skip
            prompt, n = script.prompt(each), episodes.prompt_lengths[b, t]
            assert episodes.prompts[b, t, :n].tolist() == prompt and not episodes.prompts[b, t, n:].any()
            length = episodes.response_lengths[b, t]
            response = episodes.responses[b, t, :length].tolist()
            assert END not in response[:-1] and (response[-1] == END or length == limit)
            assert (episodes.logp[b, t, :length] < 0).all() and not episodes.logp[b, t, length:].any()
            text, action, well_formed = script.parse(response)
            before = observation
            observation, commands, reward, done, info = env.step(action)
            told = (report.responses[b][t], report.actions[b][t], report.admissible[b][t])
            assert told == (text, action, info["admissible"])
            assert episodes.rewards[b, t] == reward
            assert episodes.invalid[b, t] == (not well_formed or (strict and not info["admissible"]))
            for text, state in ((before, episodes.states[b, t]), (observation, episodes.next_states[b, t])):
                assert report.texts[state] == text
                assert ids.setdefault(text, int(state)) == state
            assert episodes.observations[b, t] == episodes.states[b, t]
            history.append((before, action))
        assert episodes.truncated[b] == (not info["won"])
        each = type("PromptInput", (), {"goal": env.goal, "history": history[-K:], "turn": T, "observation": observation,
                                 "commands": commands})  # fmt: skip
        n = episodes.final_prompt_lengths[b]
        assert episodes.final_prompts[b, :n].tolist() == (script.prompt(each) if episodes.truncated[b] else [])
        assert episodes.success[b] == info["won"] and episodes.task[b] == tasks[b] % 2
        assert report.goals[b] == f"from {tasks[b]}" and report.scores[b] == info["won"]
    assert len(set(ids.values())) == len(ids)
    np.testing.assert_array_equal(episodes.groups, GROUPS)


def assert_same(episodes, reference):
    for name in reference.arrays():  # another shape, such as a cache that was longer by then, may round otherwise
        tolerance = 1e-5 if name == "logp" else 0
        np.testing.assert_allclose(getattr(episodes, name), getattr(reference, name), rtol=0, atol=tolerance, err_msg=name)


def test_every_field_is_what_a_plain_loop_says(played):
    episodes, report, _, script = played
    check(episodes, report)
    assert 0 < episodes.success.sum() < B and 0 < episodes.invalid.sum() < episodes.mask.sum()
    assert len(script.inputs) == episodes.mask.sum() + episodes.truncated.sum()  # nothing is generated after an end
    counts, turns = report.counts, script.turns()
    assert turns == sorted(turns)
    responses, lengths = episodes.responses[episodes.mask], episodes.response_lengths[episodes.mask]
    assert counts == {
        "malformed": sum(int(ids[0]) % 3 == 0 for ids in responses),
        "unfinished": sum(END not in ids[:n] for ids, n in zip(responses, lengths, strict=True)),
        "pairs_dropped": sum(turn % 2 for turn in turns),
        "prompts_cut": sum(4 <= turn < T for turn in turns),
        "excluded": 0,
        "inadmissible": sum(not each for episode in report.admissible for each in episode),
        "decode_steps": counts["decode_steps"],
        "slot_use": counts["slot_use"],
        "prompt_tokens": episodes.prompt_lengths.sum(),
        "response_tokens": episodes.response_lengths.sum(),
        "longest_prompt": episodes.prompt_lengths.max(),
    }
    # A response's first token comes with its prompt. The slots are never enough for all 20 episodes.
    decoded = counts["response_tokens"] - episodes.mask.sum()
    assert decoded == pytest.approx(SLOTS * counts["decode_steps"] * counts["slot_use"], rel=0.5)
    assert 0.5 < counts["slot_use"] <= 1
    assert 0 < counts["unfinished"] < episodes.mask.sum() and counts["inadmissible"] > 0


def test_inadmissible_actions_are_invalid_where_that_is_asked_for(played):
    episodes, report, *_ = play(strict=True)
    check(episodes, report, strict=True)
    np.testing.assert_array_equal(episodes.rewards, played[0].rewards)
    assert episodes.invalid.sum() > played[0].invalid.sum()


class Endless(Counting):
    """Never says that an episode is over."""

    def step(self, action):
        observation, commands, reward, _, info = super().step(action)
        return observation, commands, reward, False, info


def test_an_episode_ends_after_the_most_turns_whatever_its_environment_says():
    episodes, report, _, script = play(make_env=Endless)
    assert episodes.mask.all() and not report.failures
    assert len(script.inputs) == B * (T + 1) and episodes.truncated.all()


class Unpunctual(LocalWorkers):
    """Lets random answers come, and others wait; that of episode 5 as long as it can."""

    random = random.Random(0)

    def receive(self, minimum):
        self.random.shuffle(self._answers)
        self._answers.sort(key=lambda answer: answer[0] == 5)
        count = max(minimum, self.random.randint(0, sum(episode != 5 for episode, _ in self._answers)))
        answers, self._answers = self._answers[:count], self._answers[count:]
        return answers


def test_an_asynchronous_rollout_gives_the_same_episodes(played):
    reference, expected, *_ = played
    episodes, report, rollout, script = play(workers_type=Unpunctual, ready_fraction=0.35)  # of 20 episodes 7 are ready
    assert script.turns() != sorted(script.turns()), "all waited for the last of each turn"
    assert_same(episodes, reference)
    for name in ("texts", "goals", "responses", "failures"):
        assert getattr(report, name) == getattr(expected, name), name
    schedule = {"decode_steps", "slot_use"}
    ours, theirs = ({name: r.counts[name] for name in r.counts.keys() - schedule} for r in (report, expected))
    assert ours == theirs
    prefills = [map(int, re.findall(r"\d+", shape)) for name, shape in rollout._programs[SHARED].called if name == "prefill"]
    counts, widths, *_ = map(set, zip(*prefills, strict=True))
    assert widths <= set(buckets(Script.prompt_limit, factor=2, smallest=128))
    assert counts <= set(buckets(SLOTS, factor=4, smallest=1))


def test_environments_in_this_process_cannot_step_while_others_wait():
    config = load(None, ["env.name=household_text", "warm_start=none", "rollout.ready_fraction=0.5"])
    with pytest.raises(ConfigError, match=r"^rollout.ready_fraction=0.5: needs env.workers"):
        check_together(config)


def test_a_store_is_for_prompts_that_go_on_from_earlier_ones():
    fields = ["env.name=household_text", "warm_start=none", "rollout.store=64"]
    check_together(load(None, [*fields, "env.template=conversation"]))
    with pytest.raises(ConfigError, match=r"^rollout.store=64: no prompt of env.name=household_text goes on from an earlier"):
        check_together(load(None, fields))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_failed_episodes_are_empty_and_counted_and_the_run_goes_on(workers):
    actions = [*HARMLESS * 6, "raise alarm", "bytes", *["die"] * (workers > 0)]
    tasks = TASKS.copy()
    tasks[-1] = 13  # cannot even begin
    options = {"make_env": Restless, "workers": 2, "time_limit": 30, "ready_fraction": 0.35} if workers else {}
    episodes, report, *_ = play(actions, tasks=tasks, **options)
    assert 1 < len(report.failures) < B and report.failures[B - 1] == "ValueError: unlucky"
    assert report.counts["excluded"] == len(report.failures)
    check(episodes, report, actions=actions, tasks=tasks)


def test_a_report_of_odd_texts_can_be_read_again_and_shown(played, tmp_path, monkeypatch):
    episodes, report, *_ = played
    odd = [text for name, text in ODD.items() if name != "long"]
    report = dataclasses.replace(report, texts=[f"{text} {odd[i % len(odd)]}" for i, text in enumerate(report.texts)])
    path = tmp_path / "texts.json"
    report.save(path)
    told = read_report(path, episodes)
    assert told["texts"] == report.texts and told["counts"] == report.counts
    assert list(tmp_path.iterdir()) == [path]
    for b in range(B):
        transcript = report.story(episodes, b, ("agent",)).text()
        assert all(letter.isprintable() or letter in "\n\t\u00a0" for letter in transcript)

    def fail(*_):
        raise OSError("no space left")

    path.write_text("before")
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        report.save(path)
    assert path.read_text() == "before"


def test_a_transcript(played):
    episodes, report, _, script = played
    for b in (0, 5):
        lines = report.story(episodes, b, ("agent",)).text().splitlines()
        turns = int(episodes.mask[b].sum())
        assert lines[0] == f"task: from {TASKS[b]} ({'success' if episodes.success[b] else 'failure'})"
        assert lines[1] == f"  at {TASKS[b]}" and len(lines) == 1 + 2 * turns
        for t in range(turns):
            ids = episodes.responses[b, t, : episodes.response_lengths[b, t]].tolist()
            assert lines[2 + 2 * t] == f"    > {script.parse(ids).text}{'   (invalid)' if episodes.invalid[b, t] else ''}"


class Shorter(Counting):
    max_turns = 2


def test_another_environment_shares_what_is_compiled(played):
    first, report, rollout, _ = played
    other = rollout.with_environment(Shorter)
    keys = jax.random.split(jax.random.key(1), B)
    episodes, other_report = other({SHARED: initialize(MODEL, 0, mesh_of("data=1"))}, TASKS, keys, GROUPS, Decoding())
    assert episodes.mask.shape == (B, 2) and rollout.max_turns == T
    for name in ("prompts", "responses", "logp", "rewards"):
        np.testing.assert_allclose(getattr(episodes, name), getattr(first, name)[:, :2], atol=1e-5)
    assert other._programs is rollout._programs
    assert other_report.texts != report.texts
    with pytest.raises(ValueError, match=r"tasks: has 3 episodes.*batch=20"):
        rollout(None, [1, 2, 3], keys, GROUPS, Decoding())


def test_buckets():
    assert buckets(4096, factor=2, smallest=256) == [512, 1024, 2048, 4096]
    assert buckets(27, factor=2, smallest=256) == [27]
    assert buckets(64, factor=4, smallest=1) == [1, 4, 16, 64]
    assert buckets(3, factor=4, smallest=1) == [1, 3]


def test_task_numbers_go_through_all_tasks_again_and_again():
    numbers = task_numbers("train", 3, np.arange(50), 20)
    assert sorted(numbers[:20]) == sorted(numbers[20:40]) == list(range(20))
    assert numbers[:20] != numbers[20:40]
    assert task_numbers("train", 3, [41, 7, 7], 20) == [numbers[41], numbers[7], numbers[7]]
    assert task_numbers("held_out", 3, np.arange(50), 20) != numbers
    assert task_numbers("train", 4, np.arange(50), 20) != numbers
    assert task_numbers("train", None, [3, 21], 20) == [3, 1]


def test_generated_tasks_are_the_bits_of_their_keys():
    """Those that `jax.random` calls a key's data, the high word first, as the compiled environments' text faces read them."""
    (number,) = task_numbers("train", 3, [7], None)
    key = jax.random.key_data(task_keys("train", 3, np.array([7])))[0]
    assert number.to_bytes(8, "big") == np.asarray(key).astype(">u4").tobytes()
    assert task_numbers("train", None, [7], None) == task_numbers("train", 0, [7], None) != [number]


def test_actions_are_numbered_by_what_was_found_in_the_responses():
    buffer = EpisodeBuffer(Episodes.zeros(3, 2, 4, 3), [0, 0, 0], history_length=0, strict=False)
    said = [["go", "look"], ["look", "go"], ["go", "go"]]
    for episode, actions in enumerate(said):
        buffer.add_output(episode, EnvOutput("room", [], "goal", 0))
        for turn, action in enumerate(actions):
            assert buffer.prompt_input(episode)[1:3] == ([], turn)  # no history is shown
            tokens = np.array([episode, turn, 9], np.int32)  # thought about differently each time
            response = SlotResponse(episode, tokens, np.zeros(3, np.float32))
            buffer.add_response(Prompt([1]), response, ParsedResponse(f"{tokens} {action}", action, True), True)
            buffer.add_output(episode, EnvOutput("room", [], "goal", 0, done=turn == 1, won=True))
    buffer.add_output(2, EnvFailure("lost"))
    found, _ = buffer.result()
    np.testing.assert_array_equal(found.actions, [[0, 1], [1, 0], [0, 0]])  # nothing of the episode that failed
    assert found.success.tolist() == [True, True, False]
