"""An agent with tool calls: it looks for a number from 1 to 100 with a tool that says whether a guess is too small.

    python -m hgpo_jax.train env.name=agent env.command="python -m hgpo_jax.envs.agents.number_tools" env.max_turns=8 \\
        warm_start=none policy=Qwen/Qwen2.5-0.5B-Instruct

The policy's chat template must show tools, as Qwen2.5's does.
"""

import json
import os
from typing import Any

from openai import BadRequestError, OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether a number is the one that is looked for, or too small, or too large.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def guess(wanted: int, arguments: str) -> str:
    """What the tool answers."""
    number = json.loads(arguments).get("number")
    if not isinstance(number, int):
        return "number must be a whole number"
    return "found" if number == wanted else "too small" if number < wanted else "too large"


def main() -> None:
    client, session = OpenAI(), f"/sessions/{os.environ['HGPO_SESSION']}/reward"
    wanted = 1 + int(os.environ["HGPO_TASK"]) % 100
    messages: list[Any] = [{"role": "user", "content": "Find my number, from 1 to 100. Use the tool; you have few guesses."}]
    for _ in range(int(os.environ["HGPO_TURNS"])):
        try:
            message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        except BadRequestError:  # the conversation has become too long
            break
        messages.append(message)
        for call in message.tool_calls or []:
            if call.type == "function" and call.function.name == "guess":
                said = guess(wanted, call.function.arguments)
            else:
                said = "there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if said == "found":
                client.post(session, body={"reward": 1.0}, cast_to=object)
                return
        if not message.tool_calls:
            client.post(session, body={"reward": 0.0, "turn": -1, "admissible": False}, cast_to=object)
            messages.append({"role": "user", "content": "Use the tool."})
    client.post(session, body={"reward": 0.0}, cast_to=object)


if __name__ == "__main__":
    main()
