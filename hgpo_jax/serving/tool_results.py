"""The default state of an agent that has called tools: its last calls and what they returned, without what always differs.

A result often holds a time, a duration or a name that was drawn at random, so no two visits of a state would be equal. These
parts are replaced by what they are; the same words apply to the calls' arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d?:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\b)?"
# What a part of a text is replaced by -> its patterns, applied in this order.
VARYING = {
    "<uuid>": (r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b",),
    "<temp>": (r"(?:/var)?/tmp/(?:tmp[\w.]{6,}|pytest-of-\w+/pytest-\d+)", r"/var/folders/\S+?/T/[\w.]+"),
    "<time>": (
        rf"\b\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?{_ZONE})?",  # ISO 8601, logs
        rf"\b(?:[A-Z][a-z]{{2}},? )?\d\d? {_MONTH} \d{{4}}(?: {_CLOCK})?{_ZONE}",  # HTTP, e-mail
        rf"\b(?:[A-Z][a-z]{{2}} )?{_MONTH} [ \d]\d (?:{_CLOCK}(?: [A-Z]{{3,4}})?(?: \d{{4}})?|\d\d:\d\d\b)",  # date, ls -l
        rf"\b{_CLOCK}{_ZONE}",
        r"\b1[5-9]\d{8}(?:\d{3}|\.\d+)?\b",  # seconds or milliseconds since 1970, from 2017 on
    ),
    "<duration>": (
        r"\b(?:\d+h ?)?(?:\d+m ?)?\d+\.?\d* ?(?:ns|[uµ]s|ms|s|secs?|seconds?|mins?|minutes?|hours?)\b",
        r"\b\d+m\d+\.\d+s\b",  # time
    ),
    "<address>": (r"\b0x[0-9a-f]{6,16}\b",),
    "<count>": (
        r"(?<=\bIn \[)\d+(?=\])|(?<=\bOut\[)\d+(?=\])",  # cells of a notebook
        r"(?<=\bpid[ =:])\d+",
        r"(?:(?<=\bstep )|(?<=\bturn )|(?<=\battempt ))\d+(?: ?(?:/|of) ?\d+)?",
    ),
}
_PATTERNS = [(re.compile("|".join(patterns), re.IGNORECASE), name) for name, patterns in VARYING.items()]


def without_varying_parts(text: str) -> str:
    """Replaces the parts of a text that differ between visits of one state (`VARYING`)."""
    for pattern, name in _PATTERNS:
        text = pattern.sub(name, text)
    return text


def tool_state(messages: Sequence[dict[str, Any]]) -> str | None:
    """Returns the state of a conversation that ends with results of tools; None for another.

    It has every result since the assistant's last message, each after its call: results are in the order of the calls.
    """
    if not messages or messages[-1]["role"] != "tool":
        return None
    last = max((number for number, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    calls = [call["function"] for call in messages[last].get("tool_calls", ())] if last >= 0 else []
    results = [message["content"] for message in messages[last + 1 :] if message["role"] == "tool"]
    named = [f"{call['name']} {_canonical(call['arguments'])}\n" for call in calls] + [""] * len(results)
    return without_varying_parts("\n".join(call + result for call, result in zip(named, results, strict=False)))


def _canonical(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
