"""Results of tools: in the order of their calls; and the default state of an agent that has called tools.

That state is its last calls and what they returned, without what always differs.

A result often holds a time, a duration or a name that was drawn at random, so no two visits of a state would be equal. These
parts are replaced by what they are. In a call's arguments only the random names are: a date there is the policy's own choice.
Dates or clock times alone, and amounts of time, stay in results too, since they may be what a tool was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d?:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\b)?"
_AMOUNT = r"(?:\d{1,9}h ?)?(?:\d{1,9}m ?)?\d{1,9}(?:\.\d{0,9})? ?(?:ns|[uµ]s|ms|s|secs?|seconds?|mins?|minutes?|hours?)\b"
# What a part of a text is replaced by -> its patterns; a pattern's group stays. Results may be hostile, so every repetition is
# bounded: an unbounded one takes time that is quadratic in a text's length.
RANDOM_NAMES = {
    "<uuid>": (r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b",),
    "<temp>": (
        r"(?:/var)?/tmp/(?:tmp[\w.]{6,99}|pytest-of-\w{1,99}/pytest-\d{1,9})",
        r"/var/folders/[^\s/]{1,9}/[^\s/]{1,99}/T/[\w.]{1,99}",
    ),
    "<address>": (r"\b0x[0-9a-f]{6,16}\b",),
}
MEASUREMENTS = {
    "<time>": (
        rf"\b\d{{4}}-\d\d-\d\d[T ]{_CLOCK}{_ZONE}",  # ISO 8601, logs
        rf"\b(?:[A-Z][a-z]{{2}},? )?\d\d? {_MONTH} \d{{4}} {_CLOCK}{_ZONE}",  # HTTP, e-mail
        rf"\b(?:[A-Z][a-z]{{2}} )?{_MONTH} [ \d]\d {_CLOCK}(?: [A-Z]{{3,4}} \d{{4}}| \d{{4}}\b)?",  # date, ls -l
        # Seconds or milliseconds since 1970, from 2017 on; a whole number of seconds may be an amount.
        r"\b1[5-9]\d{8}\.\d{1,9}\b",
        r"((?:time|timestamp|at|epoch)[\"']?[ :=]{1,3})1[5-9]\d{11}\b",
    ),
    "<duration>": (
        rf"\b((?:in|took|elapsed|after|time ?[:=])[ :=]{{0,3}}){_AMOUNT}"
        r"(?: \(\d{1,3}:\d\d:\d\d\))?",  # which pytest adds to a long time
        r"\b((?:real|user|sys)\s{1,9})\d{1,9}m\d{1,9}\.\d{1,9}s\b",  # time
    ),
    "<count>": (
        r"(?<=\bIn \[)\d{1,9}(?=\])|(?<=\bOut\[)\d{1,9}(?=\])",  # cells of a notebook
        r"(?<=\bpid[ =:])\d{1,9}",
    ),
}


def without_random_names(text: str) -> str:
    """Replaces the names in a text that are drawn anew at each visit of a state (`RANDOM_NAMES`)."""
    return _replace(text, RANDOM_NAMES)


def without_varying_parts(text: str) -> str:
    """Replaces the parts of a result that differ between visits of one state (`RANDOM_NAMES`, `MEASUREMENTS`)."""
    return _replace(without_random_names(text), MEASUREMENTS)


def _replace(text: str, kinds: dict[str, tuple[str, ...]]) -> str:
    for name, patterns in kinds.items():
        for pattern in patterns:
            compiled = re.compile(pattern, re.IGNORECASE)
            text = compiled.sub(rf"\1{name}" if compiled.groups else name, text)
    return text


def tool_state(messages: Sequence[dict[str, Any]]) -> str | None:
    """Returns the state of a conversation in which results of tools follow the assistant's last message; None for another.

    It has every call and its result, matched by id or else by order, and then the texts that follow, as agents add reminders
    ("Continue.").
    """
    last = max((number for number, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    first = next((number for number, message in enumerate(messages) if number > last and message["role"] == "tool"), None)
    if first is None:
        return None
    since, begin = messages[first:], last
    while begin > 0 and messages[begin - 1]["role"] == "assistant":
        begin -= 1
    calls = [call for message in messages[max(begin, 0) : last + 1] for call in message.get("tool_calls", ())]
    texts = _by_call([message for message in since if message["role"] == "tool"], [call.get("id") for call in calls])
    texts += [message["content"] for message in since if message["role"] != "tool"]
    told = [f"{call['function']['name']} {_canonical(call['function']['arguments'])}\n" for call in calls]
    told = [*map(without_random_names, told), *[""] * len(texts)]
    return "\n".join(call + without_varying_parts(text) for call, text in zip(told, texts, strict=False))


def _by_call(results: Sequence[dict[str, Any]], calls: Sequence[Any]) -> list[str]:
    """Returns the text of each call's result, "" without one, and then those of no call; as they are where no id agrees."""
    left = list(results)
    if None in calls or not any(result.get("tool_call_id") in calls for result in left):
        return [result["content"] for result in left]
    texts = []
    for call in calls:
        own = next((result for result in left if result.get("tool_call_id") == call), None)
        left = [result for result in left if result is not own]
        texts.append(own["content"] if own else "")
    return texts + [result["content"] for result in left]


def in_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation in which the results of tools are in the order of the calls, without the calls' ids.

    Clients that call several tools at once send the results as they arrive. The templates that are supported show no ids, and
    so would show a result in another call's place. One whose call is not there comes last.

    messages: as a chat template takes them, calls with `id` and results with `tool_call_id` where the client gave them.
    """
    ordered, calls = [dict(message) for message in messages], list[Any]()
    places: list[int] = []  # of the results since the last calls
    for number, message in enumerate([*ordered, {"role": "assistant"}]):
        if message["role"] == "tool":
            places.append(number)
        elif message["role"] == "assistant":
            results = [ordered[place] for place in places]
            results.sort(key=lambda result: _place(result.get("tool_call_id"), calls))
            for place, result in zip(places, results, strict=True):
                ordered[place] = result
            calls = ([] if places else calls) + [call.get("id") for call in message.get("tool_calls", ())]
            places = []
    for message in ordered:
        message.pop("tool_call_id", None)
        if "tool_calls" in message:
            message["tool_calls"] = [{field: call[field] for field in call if field != "id"} for call in message["tool_calls"]]
    return ordered


def _place(identity: Any, calls: Sequence[Any]) -> int:
    return calls.index(identity) if identity in calls else len(calls)


def _canonical(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
