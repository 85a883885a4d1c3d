"""An agent of openai-agents, by one of OpenAI's two dialects: `responses` or `chat_completions`, whole or `streamed`."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from game import QUESTION, TURNS, end, guess


async def main(dialect: str, *how: str) -> None:
    set_tracing_disabled(True)
    set_default_openai_api(dialect)
    agent = Agent(name="finder", instructions="You find numbers.", model="policy", tools=[function_tool(guess)])
    if how:
        result = Runner.run_streamed(agent, QUESTION, max_turns=TURNS)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, QUESTION, max_turns=TURNS)
    print(result.final_output)
    end()


asyncio.run(main(*sys.argv[1:]))
