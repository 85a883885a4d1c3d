"""The number game of `envs/agents/number_tools.py`, for agents that frameworks run: what their tool does, and the reward."""

import json
import os

from openai import OpenAI

from hgpo_jax.envs.agents import number_tools

QUESTION = "Find my number, from 1 to 100. Use the tool; you have few guesses."
TURNS = int(os.environ["HGPO_TURNS"])
answers: list[str] = []


def guess(number: int) -> str:
    """Says whether a number is the one that is looked for, or too small, or too large.

    Args:
        number: The number.
    """
    secret = 1 + int(os.environ["HGPO_TASK"]) % 100
    answers.append(number_tools.guess(secret, "guess", json.dumps({"number": number}))[0])
    return answers[-1]


def end() -> None:
    """Posts the episode's reward."""
    won = "found" in answers
    reward = {"reward": float(won), "success": won}
    OpenAI().post(f"/sessions/{os.environ['HGPO_SESSION']}/reward", body=reward, cast_to=object)
