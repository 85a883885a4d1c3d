"""Earlier answers in a conversation, as the ids that were sampled.

A policy's response may be encoded in ids other than the sampled ones. If a client sends an answer back unchanged, the session's
next prompt therefore contains the policy's own ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hgpo_jax.policy.answers import AnswerParser
from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.sessions import Turn
from hgpo_jax.serving.text import ServedText


def prompt_ids(texts: ServedText, conversation: Conversation, beginning: str, turns: Sequence[Turn]) -> list[int]:
    """Builds a prompt as `ServedText.conversation` does; messages that are answers of these turns, in order, keep their ids.

    An answer that called tools becomes a text again, if the template would show exactly this text for it.
    """
    messages, sampled, at = list(conversation.messages), dict[int, list[int]](), 0
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        for later, turn in enumerate(turns[at:], at):
            text = turn.beginning + turn.text
            parser = texts.parser(conversation.tools, turn.beginning, conversation.thinking)
            if not _is_answer(message, text, parser) or (ids := texts.sampled(turn.tokens, turn.text)) is None:
                continue
            written = {"role": "assistant", "content": text}
            if not message.get("tool_calls") or texts.show_the_same(message, written, conversation.tools):
                messages[number], sampled[number], at = written, texts.tags(turn.beginning) + ids, later + 1
                break
    return texts.conversation(messages, conversation.tools, beginning, sampled, conversation.thinking)


def _is_answer(message: dict[str, Any], text: str, parser: AnswerParser) -> bool:
    """Whether a message equals the client's view of an answer with this text."""
    if not message.get("tool_calls"):
        return message["content"] == text
    answer = parser.parse(text)
    functions = [call["function"] for call in message["tool_calls"]]
    return message["content"] == answer.content and functions == [call._asdict() for call in answer.calls]
