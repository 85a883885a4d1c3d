"""Earlier answers in a conversation, as the ids that were sampled.

A policy's response may be encoded in ids other than the sampled ones. If a client sends an answer back unchanged, the session's
next prompt therefore contains the policy's own ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hgpo_jax.serving.answers import tool_calls
from hgpo_jax.serving.sessions import Turn
from hgpo_jax.serving.text import ServedText

Message = dict[str, Any]


def prompt_ids(
    texts: ServedText,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    begun: str,
    turns: Sequence[Turn],
    thinking: bool | None = None,
) -> list[int]:
    """Builds a prompt as `ServedText.conversation` does; messages that are answers of these turns, in order, keep their ids.

    An answer that called tools becomes a text again, if the template would show exactly this text for it.
    """
    given, sampled, at = list(messages), dict[int, list[int]](), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for later, turn in enumerate(turns[at:], at):
            text = turn.begun + turn.text
            inside = not turn.begun and texts.inside_thought(thinking)
            if not _is_answer(message, text, inside) or (ids := texts.sampled(turn.tokens, turn.text)) is None:
                continue
            written = {"role": "assistant", "content": text}
            if not message.get("tool_calls") or texts.show_the_same(message, written, tools):
                given[number], sampled[number], at = written, texts.tags(turn.begun) + ids, later + 1
                break
    return texts.conversation(given, tools, begun, sampled, thinking)


def _is_answer(message: Message, text: str, inside_thought: bool) -> bool:
    """Whether a message equals the client's view of an answer with this text (`tool_calls`)."""
    if not message.get("tool_calls"):
        return message["content"] == text
    content, calls = tool_calls(text, inside_thought)
    told = [{"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
    return message["content"] == content and [call["function"] for call in message["tool_calls"]] == told
