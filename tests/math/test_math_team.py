"""Mathematics for two: whose turn it is, what each role sees, and what ends an episode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.config import load
from hgpo_jax.config.choices import ROLES
from hgpo_jax.envs.math.problems import Problem, Problems
from hgpo_jax.envs.math.team import ROUNDS, SOLVER, VERIFIER, GeneratedTeam, ListedTeam
from hgpo_jax.rollout.backend import role_names
from hgpo_jax.rollout.requirements import check_text

PROBLEM = Problem("Lena has 12 pens, finds 7 and triples them.", "57", 0, ("12+7", "19*3"))
ACCEPT, REJECT = "<verdict>accept</verdict>", "Hm. <verdict> reject </verdict>"


def begun(max_turns=9):
    env = ListedTeam([PROBLEM], ("problem",), max_turns)
    env.reset(0)
    return env


def answer(text):
    return f"<answer>{text}</answer>"


def test_a_worked_episode():
    env = ListedTeam([PROBLEM], ("problem",), 9)
    observation, commands = env.reset(0)
    assert observation == "You are the solver.\nNothing is calculated yet." and answer("12") in commands
    assert env.step("<calculate>12+7</calculate>")[0] == "You are the solver.\n12+7=19" and env.role == SOLVER
    observation, commands, reward, done, _ = env.step(answer("19"))
    assert observation == "You are the verifier.\n12+7=19\nThe solver answers 19." and env.role == VERIFIER
    assert (commands, reward, done) == ([ACCEPT, "<verdict>reject</verdict>"], 0.0, False)
    observation, _, _, _, info = env.step(answer("57"))  # is no verdict
    assert observation.endswith("Error: write <verdict>accept</verdict> or <verdict>reject</verdict>.") and env.role == VERIFIER
    assert not info["admissible"] and info["signals"] == {"format": -1, "calculation": 0, "verdict": 0}
    observation, _, _, done, info = env.step(REJECT)
    assert observation == "You are the solver.\n12+7=19\nThe verifier sends back 19." and not done and env.role == SOLVER
    assert info["admissible"] and info["signals"]["verdict"] == 0
    env.step(answer("57"))
    _, _, reward, done, info = env.step(ACCEPT)
    assert (reward, done, info["won"], info["signals"]["verdict"]) == (10.0, True, True, 0)


@pytest.mark.parametrize(("proposal", "verdict", "signal", "won"), [
    ("57", ACCEPT, 0, True), ("56", ACCEPT, -1, False), ("57", REJECT, -1, None), ("56", REJECT, 0, None),
])  # fmt: skip
def test_wrong_verdicts_have_a_signal(proposal, verdict, signal, won):
    env = begun()
    env.step(answer(proposal))
    *_, done, info = env.step(verdict)
    assert info["signals"]["verdict"] == signal and done is (won is not None) and info["won"] is bool(won)


def test_rounds_and_turns_are_bounded_and_the_last_proposal_counts():
    env = begun(99)
    for proposal in ["1"] * (ROUNDS - 1) + ["57"]:
        assert not env.step(answer(proposal))[3]
        *_, reward, done, info = env.step(REJECT)
    assert done and info["won"] and reward == 10
    env = begun(max_turns=2)
    env.step(answer("1"))
    assert env.step("I wonder.")[2:4] == (0.0, True)
    env = begun(max_turns=1)
    assert env.step(answer("57"))[2:4] == (10.0, True)


@pytest.mark.parametrize("text", ["", " ", "9" * 201, "7" * 10**5])
def test_answers_that_are_no_proposals(text):
    env = begun()
    observation, _, _, done, info = env.step(answer(text))
    assert env.role == SOLVER and observation.endswith("Error: an answer has 1 to 200 characters.")
    assert not done and not info["admissible"]


RESPONSES = st.one_of(st.sampled_from([ACCEPT, REJECT, answer("1")]), st.text("<>/verdictanswer 1\n", max_size=40))


@given(st.lists(RESPONSES, max_size=9))
def test_any_responses_are_turns_of_an_episode(responses):
    env = begun(9)
    for turn, response in enumerate(responses, 1):
        observation, _, reward, done, info = env.step(response)
        assert observation.startswith(f"You are the {env.roles[env.role]}.\n") and (reward > 0) == info["won"]
        assert done or turn < 9
        if done:
            break


def test_its_scripted_players_solve_all_and_send_back_what_is_wrong():
    for task in range(40):
        env = GeneratedTeam(Problems(), held_out=task % 2 == 0)
        env.reset(task)
        env.step(answer("0.5"))
        done, said = False, []
        while not done:
            said.append(env.expert(2))
            *_, reward, done, info = env.step(said[-1])
            assert info["admissible"] and not any(info["signals"].values())
        assert reward == 10 and said[0] == "<verdict>reject</verdict>" and said[-1] == ACCEPT
    assert check_text(env)  # which lists verdicts
    assert role_names(load(None, ["env.name=math_team"])) == env.roles == ROLES["math_team"]
