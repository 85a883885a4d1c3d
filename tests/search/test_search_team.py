"""Search for three: whose turn it is, what each role sees, what ends an episode, and that all roles learn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search_text import Shelf

from hgpo_jax.config import load
from hgpo_jax.config.choices import ROLES
from hgpo_jax.envs.search.scores import exact_match, f1
from hgpo_jax.envs.search.team import ANSWERER, ROUNDS, SEARCHER, VERIFIER, FileTeam, GeneratedTeam
from hgpo_jax.envs.search.world import Question
from hgpo_jax.policy.answers import split_thought
from hgpo_jax.rollout.backend import role_names
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import check_text
from hgpo_jax.setup.validate import check_together
from tests.helpers.refusals import refused
from tests.helpers.training import command, rows_of

YES, NO = "<verify>yes</verify>", "Hm. <verify> no </verify>"
RED, ANSWER = "<search>red</search>", "<answer>A colour.</answer>"


def begun(max_turns=9, answers=("a colour", "The Color")):
    env = FileTeam((Question("what is red?", answers),), Shelf(), 2, max_turns)
    assert env.reset(0) == ("You are the verifier.\nnothing searched yet.", [YES, "<verify>no</verify>"])
    return env


def test_a_worked_episode():
    env = begun()
    observation, commands, reward, done, info = env.step(NO)
    assert (observation, commands, env.role) == ("You are the searcher.\nnothing searched yet.", [], SEARCHER)
    assert (reward, done) == (0, False) and info == {
        "won": False, "admissible": True, "truncated": False, "score": 0,
        "signals": {"exact_match": 0, "f1": 0, "format": 0, "verdict": 0, "search": 0},
    }  # fmt: skip
    observation, commands, _, _, info = env.step("<search>wine</search>")
    assert observation == "You are the verifier.\n(1) Wine: It may be red." and len(commands) == 2
    assert info["signals"]["format"] == 1
    env.step(NO)
    observation, *_ = env.step(RED)
    assert observation == "You are the verifier.\n(1) Red is a colour.\n(2) Wine: It may be red."  # each once
    assert env.step(YES)[0].startswith("You are the answerer.\n(1) Red") and env.role == ANSWERER
    observation, commands, reward, done, info = env.step(ANSWER)
    assert observation.endswith("the answer is given.") and (commands, reward, done) == ([], 10, True)
    assert info["won"] and not info["truncated"] and info["score"] == info["signals"]["exact_match"] == 1


@pytest.mark.parametrize(("searched", "verdict", "signal"), [
    (False, YES, -1), (False, NO, 0), (True, YES, 0), (True, NO, -1),
])  # fmt: skip
def test_a_wrong_verdict_has_a_signal_and_is_followed(searched, verdict, signal):
    env = begun()
    for action in (NO, RED) if searched else ():
        env.step(action)
    assert env.step(verdict)[-1]["signals"]["verdict"] == signal
    assert env.role == (ANSWERER if verdict == YES else SEARCHER)


@pytest.mark.parametrize("answers", [("a col",), ("lour", "our is"), ("red are",)])
def test_passages_are_enough_if_they_have_an_answer_as_whole_words(answers):
    env = begun(answers=answers)
    env.step(NO)
    env.step(RED)
    assert env.step(YES)[-1]["signals"]["verdict"] == -1


def test_a_search_that_finds_nothing_new_has_a_signal_and_is_shown_first():
    env = begun()
    for query, signal, first in (("red", 0, "Red"), ("wine", -1, "Wine"), ("blue", -1, "Wine")):
        env.step(NO)
        observation, *_, info = env.step(f"<search>{query}</search>")
        assert info["signals"]["search"] == signal
        assert observation.splitlines()[1].startswith(f"(1) {first}")  # of the newest search


def test_rounds_and_turns_are_bounded():
    env = begun(99)
    for number in range(1, ROUNDS + 1):
        env.step(NO)
        env.step(RED)
        assert env.role == (ANSWERER if number == ROUNDS else VERIFIER)
    assert env.step(ANSWER)[2:4] == (10, True)
    env = begun(max_turns=2)
    env.step(NO)
    *_, reward, done, info = env.step(RED)
    assert (reward, done, info["won"], info["truncated"]) == (0, True, False, True)


@pytest.mark.parametrize(("before", "response", "said"), [
    ((), "<verify>perhaps</verify>", "<verify>yes</verify> or <verify>no</verify>"),
    ((), "<verify>YES</verify>", "<verify>yes</verify> or <verify>no</verify>"),
    ((), ANSWER, "<verify>yes</verify> or <verify>no</verify>"),
    ((NO,), YES, "one <search>query</search>"),
    ((NO,), "<search> </search>", "one <search>query</search>"),
    ((YES,), RED, "one <answer>text</answer>"),
    ((YES,), "<answer>" + "x" * 100_000 + "</answer>", "one <answer>text</answer>"),
])  # fmt: skip
def test_what_is_not_the_roles_action_leaves_it_the_turn(before, response, said):
    env = begun()
    for action in before:
        env.step(action)
    role = env.role
    observation, _, reward, done, info = env.step(response)
    assert observation.endswith(f"\nError: write {said}.") and env.role == role
    assert (reward, done, info["admissible"]) == (0, False, False) and info["signals"]["format"] == 0


KNOWN = st.sampled_from([
    YES, NO, RED, "<search>wine</search>", "<search>blue</search>", ANSWER, "<answer>red</answer>", "<answer></answer>", "",
])  # fmt: skip
RESPONSES = st.one_of(KNOWN, st.text("<>/verifysn o\n", max_size=40))


def replayed(responses, max_turns):
    """The roles, rewards and last turn of an episode, by the rules alone."""
    role, rounds, roles = "verifier", 0, []
    for turn, response in enumerate(responses, 1):
        said = response.split("<" + {"verifier": "verify", "searcher": "search", "answerer": "answer"}[role] + ">", 1)[1:]
        said = said[0].split("</", 1)[0].split() if said and "</" in said[0] else []
        if role == "answerer" and said:
            return [*roles, "end"], 10 * exact_match(" ".join(said), ["a colour"]), f1(" ".join(said), ["a colour"]), turn
        if role == "verifier" and said in (["yes"], ["no"]):
            role = "answerer" if said == ["yes"] else "searcher"
        elif role == "searcher" and said:
            rounds += 1
            role = "answerer" if rounds == 3 else "verifier"
        roles.append(role)
        if turn == max_turns:
            return [*roles[:-1], "end"], 0, 0, turn
    return roles, 0, 0, len(responses)


@given(st.lists(KNOWN, max_size=12))
def test_against_a_plain_replay(responses):
    env = begun(8, answers=("a colour",))
    roles, total, score = [], 0, 0
    expected = replayed(responses, 8)
    for response in responses[: expected[3]]:
        *_, reward, done, info = env.step(response)
        roles.append("end" if done else env.roles[env.role])
        total, score = total + reward, info["score"]
    assert (roles, total, score, len(roles)) == expected


@given(st.lists(RESPONSES, max_size=9))
def test_any_responses_are_turns_of_an_episode(responses):
    env = begun(9)
    for turn, response in enumerate(responses, 1):
        observation, _, reward, done, info = env.step(response)
        assert observation.startswith(f"You are the {env.roles[env.role]}.\n") and (reward > 0) == info["won"]
        assert set(info["signals"]) == set(env.signals) and (done or turn < 9)
        if done:
            break


@pytest.mark.parametrize("answers, signals", [(("yes",), (0, 0)), (("No", "no."), (0, 0)), (("no", "Rome"), (0, -1))])
def test_a_verdict_on_yes_or_no_is_neither_right_nor_wrong(answers, signals):
    """No passage says yes."""
    env = begun(answers=answers)
    for verdict, signal in zip((NO, YES), signals, strict=True):
        env.role = VERIFIER
        assert env.step(verdict)[-1]["signals"]["verdict"] == signal


def test_its_scripted_players_answer_all_and_mend_a_wrong_verdict(tmp_path):
    env = GeneratedTeam.open(tmp_path, 120)
    for task in range(40):
        env.reset(task)
        done, said = False, []
        while not done:
            said.append(env.expert(2))
            *_, reward, done, info = env.step(said[-1])
            assert info["admissible"] and not info["signals"]["verdict"] and not info["signals"]["search"]
        assert reward == 10 and said[-2] == YES and len(said) in (4, 4 + 2 * env.task_type)
    env.reset(0)
    env.step(YES)
    assert env.expert(2) == "<answer> unknown</answer>"  # it does not know more than was read
    env.reset(next(task for task in range(40) if env.reset(task) and env.task_type == 0))
    while env.expert(2) != YES:
        env.step(env.expert(2))
    env.step("<verify>no</verify>")
    *_, info = env.step(env.expert(2))
    assert info["admissible"] and info["signals"]["search"] == -1 and env.expert(2) == YES
    assert check_text(env)  # which lists verdicts


def test_its_roles_and_its_template():
    assert GeneratedTeam.roles == ROLES["search_team"]
    template = load_template("search_team")
    assert template.bare and template.parse("<think><verify>no</verify>?</think>\n" + YES, 30).action == YES
    assert split_thought("<think>a</think>" + YES)[1] == YES


@pytest.mark.parametrize(("overrides", "parts"), [
    (["env.passages=3"], ("env.passages=3",)),
    (["env.data=nowhere"], ("env.data=nowhere", "no folder")),
    (["env.size=8"], ("env.size=8", "does not read it")),
    (["roles.solver.policy=own"], ("roles.solver.policy=own", "no such role")),
])  # fmt: skip
def test_refused_before_a_run_begins(overrides, parts, tmp_path):
    with refused(parts[0]) as caught:
        config = load("search_small", ["env.name=search_team", *overrides, f"cache_dir={tmp_path}"])
        check_together(config)
        environment(config.env).text(config)
        role_names(config)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.slow
def test_all_roles_learn(tmp_path):
    """A small policy with the words of the world, by the method for teams, in which a role has weights of its own."""
    fields = ("policy.hidden_size=16", "policy.num_hidden_layers=1", "rollout.prompt_groups=4", "rollout.group_size=4",
              "learner.minibatch_size=16", "cloning.episodes=64", "cloning.max_steps=20", "cloning.check_every=20",
              "iterations=1", "evaluation.episodes=16", "method=dr_mas", "log.tensorboard=false", "env.max_turns=8",
              "env.name=search_team", "env.passages=240", "cache_dir=cache", "run_dir=run",
              "roles.verifier.policy=own")  # fmt: skip
    command("-m", "hgpo_jax.train", "--config", "search_small", *fields, cwd=tmp_path, devices=1)
    (row,) = rows_of(tmp_path / "run")
    assert {"signal/verdict", "signal/search", "signal/f1"} <= row.keys()
    assert {role for name in row for role in ROLES["search_team"] if role in name} == set(ROLES["search_team"])
