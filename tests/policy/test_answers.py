"""Parsing of answers: what people's models write is read, and pieces add up however they are cut."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hgpo_jax.policy.answers import AnswerParser, TextStream
from hgpo_jax.policy.call_formats import call_format
from hgpo_jax.policy.chat_template import ChatFrame
from tests.helpers.chat_tokenizers import byte_tokenizer


def block(*calls) -> str:
    return f"<tool_call>\n{chr(10).join(map(json.dumps, calls))}\n</tool_call>"


def read(text: str, inside_thought: bool = False) -> tuple[str, list[tuple[str, dict]]]:
    answer = AnswerParser(FORM, inside_thought).parse(text)
    return answer.content, list(map(tuple, answer.calls))


FORM = call_format("")


LOOK, GO = {"name": "look", "arguments": {"at": 1}}, {"name": "go", "arguments": {"to": "</tool_call>"}}
A_THOUGHT, OPEN = {"name": "say", "arguments": {"what": "</think>"}}, f"<tool_call>{json.dumps(LOOK)}"
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
    (f"I could {block(LOOK)}.</think>{block(GO)}", f"I could {block(LOOK)}.</think>", [A_GO]),
    (f"I could {block(LOOK)}.</think> No.", f"I could {block(LOOK)}.</think> No.", []),
    (f"{block(LOOK)}</think>{block(GO)}", "", [A_LOOK, A_GO]),  # but an answer that begins with a call begins no thought
    (f"<think>{block(A_THOUGHT)} So.</think>{block(GO)}", f"<think>{block(A_THOUGHT)} So.</think>", [A_GO]),
    # The tag of a thought in prose.
    (f"I never write <think>. {block(LOOK)}", "I never write <think>.", [A_LOOK]),
    (f"I never write <think>. {block(A_THOUGHT)}", "I never write <think>.", [("say", {"what": "</think>"})]),
    (f"<think>Hm.</think>No <think> now. {block(LOOK)}", "<think>Hm.</think>No <think> now.", [A_LOOK]),
    (f"<think>Hm.</think>\n<think>{block(LOOK)}", f"<think>Hm.</think>\n<think>{block(LOOK)}", []),
    (f"{block(LOOK)}<think>{block(GO)}", "", [A_LOOK]), (f"So <think>{block(LOOK)}</think>{block(GO)}",
     f"So <think>{block(LOOK)}</think>", [A_GO]),
    # The closing tag is missing at the end.
    (OPEN, "", [A_LOOK]), (f"Well. {OPEN} \n", "Well.", [A_LOOK]), (block(GO) + OPEN, "", [A_GO, A_LOOK]),
    (f"<tool_call>{json.dumps(LOOK)}{json.dumps(GO)}", "", [A_LOOK, A_GO]), (f"<tool_call>{json.dumps([LOOK])}", "", [A_LOOK]),
    (f"<think>{OPEN}</think>{OPEN}", f"<think>{OPEN}</think>", [A_LOOK]),
    # What cannot be read is text, as a whole.
    *((text, text, []) for text in [
        "no call", "<tool_call>", "<tool_call></tool_call>", f"{block(LOOK)}<tool_call></tool_call>",
        "<tool_call>look</tool_call>", f"{block(LOOK)}<tool_call>",
        f"{block(LOOK)}{block({'arguments': {}})}", block({"name": 1}), block({"name": "a", "arguments": [1]}),
        block({"name": "a", "arguments": "no JSON"}), block([]), block("look"), block(1), block(None),
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', *(OPEN[:-cut] for cut in (1, 2, 9)), f"{OPEN} so",
        f"{OPEN}</tool_call", f"<tool_call>[{json.dumps(LOOK)}", f"{OPEN}<tool_call>", f"{OPEN}{block(GO)}",
        f"<tool_call>{'[' * 100_000}</tool_call>", '<tool_call>{"name": "\\ud800"}</tool_call>',
    ]),
])  # fmt: skip
def test_what_is_read(text, content, calls):
    assert read(text) == (content, calls)
    assert not AnswerParser(FORM).parse(text, complete=False).calls


@pytest.mark.parametrize(("text", "content", "calls"), [
    (f"{block(LOOK)}</think>{block(GO)}", f"{block(LOOK)}</think>", [A_GO]),
    (f"Hm. {block(LOOK)}\n</think>\n\nNo.", f"Hm. {block(LOOK)}\n</think>\n\nNo.", []),
    (f"{block(A_THOUGHT)} so.</think>{OPEN}", f"{block(A_THOUGHT)} so.</think>", [A_LOOK]),
    (block(LOOK), block(LOOK), []), (OPEN, OPEN, []), (block(A_THOUGHT), block(A_THOUGHT), []),
    (f"<think>{block(LOOK)}</think>{block(GO)}", f"<think>{block(LOOK)}</think>", [A_GO]),  # begun again
    (f"Hm.</think> A <think>: {block(LOOK)}", "Hm.</think> A <think>:", [A_LOOK]),
    (f"Hm.</think><think>{block(LOOK)}", f"Hm.</think><think>{block(LOOK)}", []),
])  # fmt: skip
def test_what_is_read_behind_a_prompt_that_begins_a_thought(text, content, calls):
    assert read(text, inside_thought=True) == (content, calls)


PARTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', json.dumps(LOOK), json.dumps(GO), " ", ","]
PARTS += ["[", "]", "\n", "<tool_call>{", block(LOOK), block(A_THOUGHT), OPEN]


TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=12).map("".join)


@given(TEXTS, st.booleans())
def test_nothing_is_raised_and_nothing_invented(text, inside_thought):
    content, calls = read(text, inside_thought)
    assert text.strip().startswith(content.strip())
    assert len(calls) <= text.count('"name"')
    assert not calls or ("<tool_call>" in text[len(content) :] and not (inside_thought and "</think>" not in text))
    for name, _ in calls:
        assert json.dumps(name)[1:-1] in text


@example(f"Well. {block(LOOK)}", [6], False, True, None)
@given(TEXTS, st.lists(st.integers(1, 9), max_size=20), st.booleans(), st.booleans(), st.sampled_from([None, "", "look"]))
def test_pieces_add_up_to_the_whole(text, cuts, inside_thought, complete, called):
    """What is settled at any moment is the beginning of what is parsed at the end."""
    begun = "" if called is None else FORM.begin(called)
    parser, text = AnswerParser(FORM, inside_thought and not begun, lambda calls: "<" in calls), begun + text
    answer = parser.parse(text, complete)
    for end in itertools.accumulate(cuts):
        assert answer.content.startswith(text[: parser.settled(text[:end])])
    assert text.startswith(answer.content) and (answer.calls or answer.content == text)
    assert complete or not answer.calls
    assert begun or inside_thought or parser.settled(text) >= len(text.partition("<")[0].rstrip())


TOKENIZER = byte_tokenizer()
TOKEN_TEXT = ChatFrame(TOKENIZER).text


def encode(text: str) -> list[int]:
    return TOKEN_TEXT.encode([text])[0]


def told(ids, stops, cuts):
    """What a stream tells of ids that come in parts of these sizes: (text, tokens used, whether it stopped)."""
    stream, text, used, at = TextStream(TOKEN_TEXT.decode, stops), "", 0, 0
    sizes = iter([*cuts, len(ids)])
    while not stream.stopped:
        part = ids[at : at + next(sizes)]
        at += len(part)
        piece, count = stream.push(part, last=at == len(ids))
        text, used = text + piece, used + count
        if at == len(ids):
            break
    return text, used, bool(stream.stopped)


@example("ab", ["b", "ab"], [])
@given(
    st.text(alphabet="abè€🙂 \n", max_size=30),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 9), max_size=20),
)
def test_pieces_are_the_text_up_to_the_first_stop_string(text, stops, cuts):
    ids = encode(text)
    assert TOKEN_TEXT.decode(ids) == text
    said, used, stopped = told(ids, stops, cuts)
    # The plain rule: after each token, does the text so far hold a stop string?
    ends = [n for n in range(len(ids) + 1) if any(stop in TOKEN_TEXT.decode(ids[:n]) for stop in stops)]
    assert stopped == bool(ends)
    if not ends:
        assert (said, used) == (text, len(ids))
    else:
        so_far = TOKEN_TEXT.decode(ids[: ends[0]])
        assert said == so_far[: min(so_far.find(stop) for stop in stops if stop in so_far)]
        assert used == ends[0]


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40), st.lists(st.integers(1, 9), max_size=40))
def test_pieces_of_any_tokens_add_up(ids, cuts):
    said, used, _ = told(ids, [], cuts)
    assert (said, used) == (TOKEN_TEXT.decode(ids), len(ids))


def test_a_piece_is_told_as_soon_as_it_is_whole():
    stream = TextStream(TOKEN_TEXT.decode, ["END"])
    euro = encode("€")
    assert [stream.push([byte], last=False)[0] for byte in euro] == [""] * (len(euro) - 1) + ["€"]
    assert stream.push(encode("xE"), last=False)[0] == "x"
    assert stream.push(encode("N"), last=False)[0] == ""
    assert stream.push(encode("E"), last=False)[0] == "EN"
    assert stream.push([], last=True) == ("E", 0)


def test_a_piece_is_what_its_tokens_say_after_those_before_them():
    stream = TextStream(lambda ids: " ".join(map(str, ids)), [])  # as many tokenizers, which drop the first word's blank
    assert [stream.push([index], last=False)[0] for index in (1, 2, 3)] == ["1", " 2", " 3"]
