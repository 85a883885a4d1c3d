"""An agent with tool calls: it looks for a number from 1 to 100, or to its argument, with a tool that compares guesses to it.

    python -m hgpo_jax.train env.name=agent env.command="python -m hgpo_jax.envs.agents.number_tools" env.max_turns=8 \\
        env.preload=[hgpo_jax.envs.agents.number_tools] warm_start=none policy=Qwen/Qwen2.5-0.5B-Instruct learner.lr=1e-6

The policy's chat template must show tools, as Qwen2.5's does.
"""

import json
import os
import sys
from typing import Any

from openai import BadRequestError, OpenAI

TASK = "Find my number, from 1 to {largest}. Use the tool; you have few guesses."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether a number is the one that is looked for, or too small, or too large.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
_ = OpenAI(base_url="http://localhost", api_key="none").chat.completions  # imports what a client needs; env.preload shares it


def guess(secret: int, name: str, arguments: str) -> tuple[str, bool]:
    """Returns the answer to a call, and whether it was a guess."""
    if name != "guess":
        return "there is no such tool", False
    number = json.loads(arguments).get("number")
    if type(number) is not int:  # isinstance would let True pass
        return "number must be a whole number", False
    return "found" if number == secret else "too small" if number < secret else "too large", True


def main() -> None:
    client, session = OpenAI(), f"/sessions/{os.environ['HGPO_SESSION']}/reward"
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    secret = 1 + int(os.environ["HGPO_TASK"]) % largest
    messages: list[Any] = [{"role": "user", "content": TASK.format(largest=largest)}]
    for _ in range(int(os.environ["HGPO_TURNS"])):
        try:
            message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        except BadRequestError:  # the conversation has become too long
            break
        messages.append(message)
        guesses = []
        for call in message.tool_calls or []:
            assert call.type == "function"
            answer, is_guess = guess(secret, call.function.name, call.function.arguments)
            guesses.append(is_guess)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            if answer == "found":
                client.post(session, body={"reward": 1.0, "success": True}, cast_to=object)
                return
        if not guesses:
            messages.append({"role": "user", "content": "Use the tool."})
        if not (guesses and all(guesses)):
            client.post(session, body={"reward": 0.0, "turn": -1, "admissible": False}, cast_to=object)
    client.post(session, body={"reward": 0.0, "success": False}, cast_to=object)


if __name__ == "__main__":
    main()
