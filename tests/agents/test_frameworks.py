"""Agents of public frameworks play whole episodes, each in the dialect that its framework speaks."""

import secrets
import sys
from pathlib import Path

import pytest

from hgpo_jax.serving.commands import Commands, Launcher, variables_of
from hgpo_jax.serving.sessions import Session, Sessions
from hgpo_jax.serving.uvicorn_server import served
from hgpo_jax.serving.web_app import Api
from tests.helpers.chat_tokenizers import tool_tokenizer
from tests.helpers.serving import Scripted

PROGRAMS = Path(__file__).parent / "frameworks"
FAR = 258  # a task, whose number is 59
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


class Halving:
    """In the place of a policy: its next guess halves what is left, and at last it says that it is done."""

    def __init__(self):
        self.low, self.high, self.last = 0, 101, None

    def __call__(self, prompt: str) -> str:
        before, _, begun = prompt.rpartition("<|im_start|>assistant\n")
        seen = before.rpartition("<|im_start|>")[2]
        if "too small" in seen and self.last:
            self.low = self.last
        if "too large" in seen and self.last:
            self.high = self.last
        self.last = (self.low + self.high) // 2
        found = "found" in seen
        if "<code>" in prompt:
            line = "final_answer('done')" if found else f"print(guess({self.last}))"
            return f"Thought: I go on.\n<code>\n{line}\n</code>"
        answer = CALL.format("guess", f'{{"number": {self.last}}}')
        if found:
            answer = CALL.format("final_answer", '{"answer": "done"}') if "final_answer" in prompt else "It is found."
        assert answer.startswith(begun)
        return answer[len(begun) :]


@pytest.mark.needs("agents", "anthropic")
@pytest.mark.parametrize(
    "command",
    [
        "with_openai_agents.py responses", "with_openai_agents.py responses streamed", "with_openai_agents.py chat_completions",
        "with_smolagents.py", "with_smolagents.py code",
        "with_pydantic_ai.py messages", "with_pydantic_ai.py messages streamed", "with_pydantic_ai.py responses",
    ],
)  # fmt: skip
def test_an_agent_of_a_framework_plays_an_episode(command):
    engine = Scripted(tool_tokenizer(), Halving())
    engine.prompt_limit = 50_000  # a byte is a token here, and the frameworks' own prompts are long
    session = Session(secrets.token_hex(8), 12)
    api = Api(engine, engine.tokenizer, "", key="", time_limit=60.0, sessions=Sessions([session]))
    program, *how = command.split()
    with served(api) as url, Commands(Launcher([sys.executable, str(PROGRAMS / program), *how]), 60.0) as commands:
        assert commands.run(session, variables_of(url, session, FAR, "train")) is None
    assert session.ended and session.success and session.reward == 1
    assert len(session.turns) == 6  # 50, 75, 62, 56, 59, and that it is found
