"""An agent of smolagents, which speaks OpenAI's chat completions; an argument has it write Python instead of calling tools."""

import os
import sys

from game import QUESTION, TURNS, end, guess
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[1:] else ToolCallingAgent
print(kind(tools=[tool(guess)], model=model, max_steps=TURNS).run(QUESTION))
end()
