"""Calls of tools in an answer's text: what people's models write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.serving.answers import tool_calls


def block(*calls) -> str:
    return f"<tool_call>\n{chr(10).join(map(json.dumps, calls))}\n</tool_call>"


def read(text: str) -> tuple[str, list[tuple[str, dict]]]:
    content, calls = tool_calls(text)
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


LOOK, GO = {"name": "look", "arguments": {"at": 1}}, {"name": "go", "arguments": {"to": "</tool_call>"}}
A_LOOK, A_GO = ("look", {"at": 1}), ("go", {"to": "</tool_call>"})


@pytest.mark.parametrize(("text", "content", "calls"), [
    (f"Well. {block(LOOK)}", "Well.", [A_LOOK]),
    # The closing tag stands in a string of the arguments.
    (block(GO), "", [A_GO]), (block(GO) + block(LOOK), "", [A_GO, A_LOOK]),
    # Several calls between two tags.
    (block(LOOK, GO), "", [A_LOOK, A_GO]), (block([LOOK, GO]), "", [A_LOOK, A_GO]),
    # Arguments that are a string of JSON, null or absent.
    (block({"name": "look", "arguments": '{"at": 1}'}), "", [A_LOOK]),
    (block({"name": "look", "arguments": None}), "", [("look", {})]), (block({"name": "look"}), "", [("look", {})]),
    (block({"name": "look", "arguments": ""}), "", [("look", {})]),
    (block({"name": "look", "parameters": {"at": 1}}), "", [A_LOOK]),
    # A thought is no call, whoever began it.
    (f"<think>{block(LOOK)}</think>{block(GO)}", f"<think>{block(LOOK)}</think>", [A_GO]),
    (f"<think>{block(LOOK)}</think>No.", f"<think>{block(LOOK)}</think>No.", []),
    (f"I could.\n</think>\n{block(LOOK)}", "I could.\n</think>", [A_LOOK]),
    (f"<think>{block(LOOK)}", f"<think>{block(LOOK)}", []),
    (f"{block(LOOK)}<think>{block(GO)}</think>{block(LOOK)}", "", [A_LOOK, A_LOOK]),
    # What cannot be read is text, as a whole.
    *((text, text, []) for text in [
        "no call", "<tool_call>", "<tool_call></tool_call>", "<tool_call>look</tool_call>", f"{block(LOOK)}<tool_call>",
        f"{block(LOOK)}{block({'arguments': {}})}", block({"name": 1}), block({"name": "a", "arguments": [1]}),
        block({"name": "a", "arguments": "no JSON"}), block([]), block("look"), block(1), block(None),
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', block(LOOK)[: -len("</tool_call>")],
        f"<tool_call>{'[' * 10_000}</tool_call>",
    ]),
])  # fmt: skip
def test_what_is_read(text, content, calls):
    assert read(text) == (content, calls)


PARTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', json.dumps(LOOK), json.dumps(GO), " ", ","]


@given(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=12).map("".join))
def test_nothing_is_raised_and_nothing_invented(text):
    content, calls = read(text)
    assert content in text
    assert len(calls) <= text.count('"name"')
    for name, _ in calls:
        assert json.dumps(name)[1:-1] in text
