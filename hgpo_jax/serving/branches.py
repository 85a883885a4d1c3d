"""Earlier answers in a conversation: the turn that it goes on from, and the ids that were sampled.

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


def parent_of(conversation: Conversation, turns: Sequence[Turn], branch: str) -> int | None:
    """Returns the number of the turn that a request continues or branches off from; None if it begins anew.

    That is the turn of the longest prompt whose messages and answer the conversation extends. A request that names a branch
    goes on from the branch's last turn whatever it holds. One of a program that writes the history into one message goes on
    from the last turn with the same system's messages: neither shows an answer.

    branch: the name of the branch in the request, "" without one.
    """
    messages = conversation.messages
    same = [number for number, turn in enumerate(turns) if turn.name == branch]
    if branch and same:
        return same[-1]
    extended = [number for number, turn in enumerate(turns) if _extends(messages, turn)]
    if extended:
        return max(extended, key=lambda number: (len(turns[number].messages), number))
    alike = [number for number in same if _of("system", turns[number].messages) == _of("system", messages)]
    return alike[-1] if alike and not _of("assistant", [*messages, *turns[alike[-1]].messages]) else None


def path(turns: Sequence[Turn], number: int | None) -> list[Turn]:
    """Returns the turns whose answers a prompt that goes on from this one may show, the earliest first.

    These are the turn, all that it goes on from, and all before the one that begins anew: that one may show any of them.
    """
    backwards = []
    while number is not None:
        backwards.append(turns[number])
        root, number = number, turns[number].parent
    return [*turns[:root], *backwards[::-1]] if backwards else []


def prompt_ids(texts: ServedText, conversation: Conversation, beginning: str, turns: Sequence[Turn]) -> list[int]:
    """Builds a prompt as `ServedText.conversation` does; messages that are answers of these turns, in order, keep their ids.

    The last messages are those of the last turns. So they are found first: another branch may have said the same before.
    An answer that called tools becomes a text again, if the template would show exactly this text for it.
    """
    messages, sampled, left = list(conversation.messages), dict[int, list[int]](), len(turns)
    for number in reversed(range(len(messages))):
        message = messages[number]
        if message["role"] != "assistant":
            continue
        for earlier in reversed(range(left)):
            turn = turns[earlier]
            text = turn.beginning + turn.text
            if not _is_answer(message, text, turn.parser) or (ids := texts.sampled(turn.tokens, turn.text)) is None:
                continue
            written = {"role": "assistant", "content": text}
            if not message.get("tool_calls") or texts.show_the_same(message, written, conversation.tools):
                messages[number], sampled[number], left = written, texts.tags(turn.beginning) + ids, earlier
                break
    return texts.conversation(messages, conversation.tools, beginning, sampled, conversation.thinking)


def _of(role: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] == role]


def _extends(messages: Sequence[dict[str, Any]], turn: Turn) -> bool:
    """Whether a conversation of these messages is a turn's prompt, its answer and more, with whatever tools.

    The answer may lack its thought, spaces around it, and calls that the client was not told.
    """
    length = len(turn.messages)
    if not 0 < length < len(messages) or messages[length]["role"] != "assistant" or messages[:length] != turn.messages:
        return False
    text, said = turn.beginning + turn.text, messages[length]["content"].strip()
    answer = turn.parser.parse(text)
    told = [call["function"] for call in messages[length].get("tool_calls", ())]
    calls = [call._asdict() for call in answer.calls]
    if not told and said == text.strip():
        return True
    same_calls = bool(told) == bool(calls) and told == calls[: len(told)]
    return same_calls and said in (answer.content.strip(), answer.text.strip())


def _is_answer(message: dict[str, Any], text: str, parser: AnswerParser) -> bool:
    """Whether a message equals the client's view of an answer with this text."""
    if not message.get("tool_calls"):
        return message["content"] == text
    answer = parser.parse(text)
    functions = [call["function"] for call in message["tool_calls"]]
    return message["content"] == answer.content and functions == [call._asdict() for call in answer.calls]
