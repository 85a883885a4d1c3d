"""An agent of pydantic-ai, in one of three dialects: `chat`, `responses` or `messages`, whole or `streamed`."""

import asyncio
import sys

from game import QUESTION, end, guess
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


async def main(dialect: str, *how: str) -> None:
    agent = Agent(MODELS[dialect]("policy"), instructions="You find numbers.", tools=[guess])
    if how:
        async with agent.run_stream(QUESTION) as result:
            print(await result.get_output())
    else:
        print((await agent.run(QUESTION)).output)
    end()


asyncio.run(main(*sys.argv[1:]))
