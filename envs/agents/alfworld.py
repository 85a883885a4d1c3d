"""Plays a game of ALFWorld with whatever answers behind OpenAI's API.

    export ALFWORLD_DATA=FOLDER
    python -m hgpo_jax.train --config alfworld_agent policy=Qwen/Qwen2.5-1.5B-Instruct

An optional argument names the split to train on. Of the trainer it needs some environment variables and the reward's URL.
"""

import os
import sys

from openai import OpenAI

from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.dataset import game_from

QUESTION = """You play a text game of household chores. {task}

{past}You see: {observation}

What can be done: {commands}.
Answer with one of these commands and nothing else."""

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
split = (sys.argv[1:] or ["train"])[0] if os.environ["HGPO_SPLIT"] == "train" else "valid_seen"
game = load_game(game_from(int(os.environ["HGPO_TASK"]), split).path)  # a list of all games would take seconds
observation, commands = game.reset()
past: list[tuple[str, str]] = []
won, turns = False, int(os.environ["HGPO_TURNS"])
while not won and len(past) < turns:
    recently = "".join(f"You saw: {before}\nYou did: {action}\n\n" for before, action in past[-2:])
    question = QUESTION.format(task=game.task, past=recently, observation=observation, commands=", ".join(commands))
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], metadata={"state_key": observation}
    )
    command = (answer.choices[0].message.content or "").strip()
    past.append((observation, command))
    observation, commands, won = game.step(command)
reward = {"reward": 10.0 * won, "success": won, "state": observation}
client.post(f"/sessions/{os.environ['HGPO_SESSION']}/reward", body=reward, cast_to=object)
