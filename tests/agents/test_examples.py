"""The worked agents of envs/agents, and training with an agent, end to end."""

import dataclasses
import json
import re
import secrets
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hgpo_jax import config as configuration
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.serving.commands import Commands, Launcher, variables_of
from hgpo_jax.serving.sessions import Session, Sessions
from hgpo_jax.serving.uvicorn_server import served
from hgpo_jax.serving.web_app import Api
from tests.helpers.byte_policy import byte_policy
from tests.helpers.chat_tokenizers import byte_tokenizer, tool_tokenizer
from tests.helpers.serving import Scripted
from tests.helpers.training import command, rows_of

HERE = Path(__file__).parent
GAMES = HERE.parent / "alfworld" / "data"
FAR = 258  # a task, whose number is 59


@pytest.mark.slow
def test_the_agent_of_alfworld_plays_its_games(monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(GAMES))
    policy, mesh = byte_policy(), make_mesh("data=1", jax.devices()[:1])
    fields = [
        "env.name=agent", "env.command=python -m hgpo_jax.envs.agents.alfworld valid_train", "env.max_turns=3",
        "policy.tokenizer=any", "rollout.prompt_groups=2", "rollout.group_size=2", "rollout.prompt_limit=4096",
        "rollout.response_limit=12",
    ]  # fmt: skip
    model = dataclasses.replace(policy.config, max_position_embeddings=8192)
    runner = AgentRunner(configuration.load(None, fields), {SHARED: model}, policy.tokenizer, mesh)
    keys = jax.random.split(jax.random.key(0), 4)
    episodes, report = runner.rollout({SHARED: policy.params}, [0, 0, 1, 1], keys, [0, 0, 1, 1], Decoding())
    assert not report.failures and episodes.mask.all() and not episodes.success.any()
    games = sorted(GAMES.glob("json_2.1.1/valid_train/*/*/game.tw-pddl"))
    for episode, path in enumerate([games[0], games[0], games[1], games[1]]):
        game = load_game(path)
        seen, commands = game.reset()
        for turn, said in enumerate(report.responses[episode]):
            assert report.texts[episodes.states[episode, turn]] == seen
            prompt = policy.tokenizer.decode(episodes.prompts[episode, turn])
            assert game.task in prompt and commands[0] in prompt and seen in prompt
            seen, commands, _ = game.step(said.strip())
        assert report.texts[episodes.next_states[episode, 2]] == seen


def test_the_agent_with_tools_finds_its_number():
    def guess(prompt: str) -> str:
        """Halves what is left; first it does not use the tool, then one that there is not."""
        said = re.findall(r'"number": (\d+).*?(too small|too large)', prompt, re.DOTALL)
        low = max([0, *(int(number) for number, answer in said if answer == "too small")])
        high = min([101, *(int(number) for number, answer in said if answer == "too large")])
        if "Use the tool." not in prompt.partition("few guesses.")[2]:
            return "50?"
        name = "guess" if "no such tool" in prompt else "gues"
        return f'<tool_call>{{"name": "{name}", "arguments": {{"number": {(low + high) // 2}}}}}</tool_call>'

    engine = Scripted(tool_tokenizer(), guess)
    session = Session(secrets.token_hex(8), 12)
    api = Api(engine, engine.tokenizer, "", key="", time_limit=60.0, sessions=Sessions([session]))
    run = [sys.executable, "-m", "hgpo_jax.envs.agents.number_tools"]
    with served(api) as url, Commands(Launcher(run), 60.0) as commands:
        assert commands.run(session, variables_of(url, session, FAR, "train")) is None
    assert session.ended and session.success and session.reward == 1
    assert len(session.turns) == 1 + 1 + 5  # without the tool, with one that there is not, 50, 75, 62, 56, 59
    assert [turn.admissible for turn in session.turns[:3]] == [False, False, True]
    assert "there is no such tool" in engine.prompts[2] and "too small" in engine.prompts[3]
    assert session.turns[3].state == 'guess {"number":50}\ntoo small'


SMALL = [
    "policy.tokenizer=tokenizer", "warm_start=none", "policy.hidden_size=16", "policy.intermediate_size=16",
    "policy.num_hidden_layers=1", "rollout.response_limit=9", "rollout.history_length=0",
    "learner.final_lr=1", "evaluation.episodes=4", "log.tensorboard=false", "mesh=data=2",
]  # fmt: skip


@pytest.mark.slow
def test_training_with_an_agent_is_training_with_its_environment(tmp_path):
    """Resumed, and with rollouts that overlap: all but the first sample with the policy before the one that learns."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "bare.txt").write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action\n")
    for name in ("guess.py", "player.py"):
        shutil.copy(HERE / name, tmp_path / name)
    fields = [
        *SMALL, "rollout.prompt_groups=2", "rollout.group_size=4", "rollout.prompt_limit=128", "learner.minibatch_size=8",
        "log.checkpoint_every=1", "log.dump_every=1", "rollout.overlap=1",
    ]  # fmt: skip
    own = ["env.name=./guess.py:Guess", "env.template=bare.txt", "env.strict=true"]
    agent = ["env.name=agent", "env.command=python player.py", "env.max_turns=3"]
    agent += ["env.preload=[concurrent.futures,urllib.request]"]  # forked episodes begin at once
    command("-m", "hgpo_jax.train", *fields, *own, "iterations=3", "run_dir=own", cwd=tmp_path)
    command("-m", "hgpo_jax.train", *fields, *agent, "iterations=2", "run_dir=agent", cwd=tmp_path)
    command("-m", "hgpo_jax.train", "--resume", "agent", "iterations=3", cwd=tmp_path)
    ours, theirs = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("own", "agent"))
    for tensor, values in ours.items():  # which requests meet in the sampler changes the last bits of log-probabilities
        np.testing.assert_allclose(theirs[tensor], values, atol=1e-5)  # a step's length is 2e-3
    for one, other in zip(rows_of(tmp_path / "own"), rows_of(tmp_path / "agent"), strict=True):
        assert other["excluded"] == 0
        for measure in ("return", "success", "invalid", "prompt_tokens", "peers/level0"):
            assert one[measure] == other[measure], measure
    evaluated = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "agent")]
    assert evaluated[0]["success"] == evaluated[1]["success"]
