"""Tool calls of each family: what its chat template shows is read back, whatever stands in it, and nothing else is a call.

The templates are stand-ins of ours for the published ones, of the same form; published ones come with trl.
"""

import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hgpo_jax.policy.answers import AnswerParser
from hgpo_jax.policy.call_formats import HermesCalls, LlamaCalls, QwenCoderCalls, call_format
from hgpo_jax.policy.chat_template import ChatFrame
from tests.helpers.chat_tokenizers import TEMPLATE, calling_tokenizer, family_tokenizer

FORMS = {"hermes": HermesCalls, "llama": LlamaCalls, "qwen-coder": QwenCoderCalls}
TOKENIZERS = {name: calling_tokenizer(name) for name in FORMS}
HI = {"role": "user", "content": "Hi"}
ASKED = {name: of.apply_chat_template([HI], tokenize=False, add_generation_prompt=True) for name, of in TOKENIZERS.items()}
TYPES = {"at": "string", "times": "integer", "far": "number", "loud": "boolean", "way": "object", "all": "array", "no": "null"}
PROPERTIES = {key: {"type": name} for key, name in TYPES.items()} | {
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "one": {"enum": [1, 2]},
    "other": {"$ref": "#/$defs/Other"},
}


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}


TOOLS = [tool("look"), tool("go")]


def read(form: str, text: str, inside_thought: bool = False) -> tuple[str, list]:
    answer = AnswerParser(FORMS[form](TOOLS), inside_thought).parse(text)
    assert answer.calls or answer.content == text
    return answer.content, list(map(tuple, answer.calls))


def rendered(form: str, name: str, arguments: dict) -> str:
    """A call as the history shows it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = TOKENIZERS[form].apply_chat_template(messages, tokenize=False)
    assert text.startswith(ASKED[form])
    return text[len(ASKED[form]) :].rstrip("\n").removesuffix(TOKENIZERS[form].eos_token)


def test_the_template_chooses():
    for name, form in FORMS.items():
        assert type(ChatFrame(TOKENIZERS[name]).call_format(TOOLS)) is form
    assert type(call_format(TEMPLATE)) is type(call_format("")) is HermesCalls
    # JSON with "parameters", or results of ipython, are not Llama's alone.
    assert type(call_format('{"tool_name": "x", "parameters": {}}')) is type(call_format("ipython")) is HermesCalls


@pytest.mark.needs("trl")
@pytest.mark.parametrize(("name", "family", "form"), [
    ("llama3_1", "llama3.2", "llama"), ("llama3_2", "llama3.2", "llama"),
    ("qwen3_5_nothink", "qwen3", "qwen-coder"), ("qwen3_6", "qwen3", "qwen-coder"),
    ("qwen2_5", "qwen2.5", "hermes"), ("qwen3_instruct_2507", "qwen2.5", "hermes"),
])  # fmt: skip
def test_what_published_templates_show_is_read(name, family, form):
    (folder,) = find_spec("trl").submodule_search_locations
    tokenizer = family_tokenizer(family)
    tokenizer.chat_template = (Path(folder) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    frame = ChatFrame(tokenizer)
    arguments = {"at": 'a\n"é"</b>', "times": 3, "loud": True, "no": None, "far": 1.5, "way": {"a": [None]}, "all": ["b", 2]}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "A desk."}]
    asked, text = (tokenizer.decode(frame.conversation(some, TOOLS)) for some in (messages[:1], messages))
    assert text.startswith(asked)
    answer = text[len(asked) :].split(tokenizer.decode(frame.end_tokens[0]))[0]
    assert frame.parser(TOOLS).parse(answer).calls == [("look", arguments)]
    assert type(frame.call_format(TOOLS)) is FORMS[form] and frame.most_calls == (1 if form == "llama" else None)
    assert all(FORMS[form]().begin(called) in answer for called in ("", "look"))


NAMES = st.from_regex(r"[\w.-]{1,12}", fullmatch=True)
TAGS = ["</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=go>", "<parameter=at>", "</think>", "<think>"]
GO = '{"name": "go", "parameters": {}}'
PIECES = st.one_of(st.sampled_from([*TAGS, "\n", '"', "{", "}", "\\", ";", GO]), st.text(max_size=4))
STRINGS = st.lists(PIECES, max_size=6).map("".join)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "at": STRINGS, "times": st.integers(), "far": NUMBERS, "loud": st.booleans(), "no": st.none(),
    "way": st.dictionaries(STRINGS, ANY, max_size=3), "all": st.lists(ANY, max_size=3), "maybe": st.none() | st.just("x"),
})  # fmt: skip
# What the form of Qwen3-Coder, which quotes nothing, cannot tell from the end of a value.
AN_END = re.compile(r"</parameter>\s*(<parameter=[^<>\n]+>|</function>\s*(</?tool_call>|<function=[^<>\n]+>))")


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(NAMES, ARGUMENTS)
@example("look", {"at": "\n", "way": {"a": ["</tool_call>"]}})
@example("look", {"at": 'print("</parameter>")\n</parameter>\nno\n</function>\n', "loud": True, "no": None})
@example("look", {"at": "5", "maybe": None, "far": 1e300, "times": 10**30})
def test_what_the_history_shows_is_read(form, name, arguments):
    text = rendered(form, name, arguments)
    if form == "qwen-coder":
        values = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in arguments.values()]
        assume(not any(map(AN_END.search, values)))
    parser = AnswerParser(FORMS[form]([tool(name)]))
    answer = parser.parse(text)
    assert (answer.content, [tuple(call) for call in answer.calls]) == ("", [(name, arguments)])
    assert json.dumps(answer.calls[0].arguments) == json.dumps(arguments)  # True is no 1
    assert not parser.parse(text, complete=False).calls
    assert all(parser.settled(text[:end]) == 0 for end in range(len(text) + 1))
    # A call that an answer must begin with, and one in a thought.
    assert text.startswith(FORMS[form]().begin("")) and text.startswith(FORMS[form]().begin(name))
    thought = f"<think>{text}</think>"
    assert parser.parse(thought) == (thought, "", ())
    assert parser.parse(f"{thought}{text}") == (thought, "", answer.calls)


def test_a_call_that_the_template_cannot_show_is_dropped():
    """Llama 3's template refuses an answer with two calls, so the next prompt could not be built."""
    two = f"{GO};{GO}"
    assert len(read("llama", two)[1]) == 2
    for form, number in (("llama", 1), ("hermes", 2), ("qwen-coder", 2)):
        frame = ChatFrame(TOKENIZERS[form])
        text = two if form == "llama" else rendered(form, "go", {}) * 2
        calls = [{"type": "function", "function": call._asdict()} for call in frame.parser(TOOLS).parse(text).calls]
        assert len(calls) == number
        assert frame.conversation([HI, {"role": "assistant", "content": "", "tool_calls": calls}, HI], TOOLS)


LLAMA = '{"name": "look", "parameters": {"at": "a; b"}}'
A_LOOK, A_GO = ("look", {"at": "a; b"}), ("go", {})


@pytest.mark.parametrize(("text", "content", "calls"), [
    (f" {LLAMA}\n", "", [A_LOOK]), (f"<|python_tag|>{LLAMA}", "", [A_LOOK]), (f"\n<|python_tag|> {LLAMA}", "", [A_LOOK]),
    *((LLAMA + between + GO, "", [A_LOOK, A_GO]) for between in ("", ";", "; ", "\n", " ;\n")),
    ('{"type": "function", "name": "go", "parameters": {}}', "", [A_GO]), ('{"parameters": {}, "name": "go"}', "", [A_GO]),
    ('{"name": "go", "arguments": {}}', "", [A_GO]), ('{"name": "go", "parameters": null}', "", [A_GO]),
    (f"<think>I could {LLAMA}.</think>\n{GO}", "<think>I could " + LLAMA + ".</think>", [A_GO]),
    (f"I could {LLAMA}.</think>{GO}", f"I could {LLAMA}.</think>", [A_GO]),
    # Anything else makes all of it text: prose, another field, another name, a part that is missing.
    *((text, text, []) for text in [
        "", "<|python_tag|>", "<|python_tag|>print(1)", f"I look. {LLAMA}", f"{LLAMA} I look.", f"{LLAMA};{LLAMA[:-1]}",
        f"I look.<|python_tag|>{LLAMA}", f"```json\n{LLAMA}\n```", f"[{LLAMA}]", f"{LLAMA};;{GO}", f"<think>{LLAMA}",
        '{"name": "fly", "parameters": {}}', f'{LLAMA};{{"name": "fly", "parameters": {{}}}}', '{"name": "go"}',
        '{"name": "go", "parameters": {}, "at": 1}', '{"name": "go", "parameters": {}, "arguments": {}}',
        '{"name": "go", "parameters": []}', '{"name": ["go"], "parameters": {}}', '{"name": "go", "parameters": {"a": NaN}}',
        '{"type": "object", "name": "go", "parameters": {}}', '{"n\\u0061me": "go", "parameters": {}}', '{"parameters": 1}',
        '{"name": "go", "parameters": ' + '{"a":' * 100_000, f"<tool_call>{LLAMA}</tool_call>", f"{LLAMA}</think>{GO}",
    ]),
])  # fmt: skip
def test_what_is_read_of_llama(text, content, calls):
    assert read("llama", text) == (content, calls)


def block(*lines: str, name: str = "look") -> str:
    return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


LOOK = block(parameter("at", "a\n b"))
OPEN = LOOK.removesuffix("\n</tool_call>")
CODER_LOOK = ("look", {"at": "a\n b"})
A_THOUGHT = block(parameter("at", "</think>"))


@pytest.mark.parametrize(("text", "content", "calls"), [
    (f"Well.\n\n{LOOK}", "Well.", [CODER_LOOK]), (LOOK + "\n" + block(name="go"), "", [CODER_LOOK, A_GO]),
    (LOOK.replace("\n</tool_call>", "\n<function=go>\n</function>\n</tool_call>"), "", [CODER_LOOK, A_GO]),
    (OPEN, "", [CODER_LOOK]), (f"{OPEN}\n", "", [CODER_LOOK]),
    ("<tool_call><function=look><parameter=at>a</parameter></function></tool_call>", "", [("look", {"at": "a"})]),
    (block("<parameter=at>", "</parameter>"), "", [("look", {"at": ""})]),
    (block(parameter("at", "a</parameter>\n</function> b")), "", [("look", {"at": "a</parameter>\n</function> b"})]),
    (block(name="fly"), "", [("fly", {})]),  # as with Hermes the client hears of it
    # Thoughts.
    (f"<think>{LOOK}</think>{block(name='go')}", f"<think>{LOOK}</think>", [A_GO]),
    (f"<think>{A_THOUGHT} So.</think>{LOOK}", f"<think>{A_THOUGHT} So.</think>", [CODER_LOOK]),
    (A_THOUGHT, "", [("look", {"at": "</think>"})]), (f"{LOOK}<think>{A_THOUGHT}</think>", "", [CODER_LOOK]),
    # What cannot be read is text, as a whole.
    *((text, text, []) for text in [
        "", "<tool_call>", "<tool_call></tool_call>", f"{OPEN} so", f"{LOOK}<tool_call>", *(OPEN[:-cut] for cut in (1, 9, 20)),
        f"<think>{LOOK}", LOOK.removeprefix("<tool_call>"), block("at the desk"), block(name=""), block(name="\u200b"),
        block("<parameter=at>", "a"), f"{LOOK}{block(parameter('at', 'a'), 'b')}", f"{OPEN}{LOOK}",
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>', block(parameter("far", "1e999")),
        block(parameter("all", "[NaN]")),
    ]),
])  # fmt: skip
def test_what_is_read_of_qwen_coder(text, content, calls):
    assert read("qwen-coder", text) == (content, calls)


@pytest.mark.parametrize(("key", "text", "value"), [
    ("at", "5", "5"), ("at", "null", "null"), ("at", '"a"', '"a"'), ("at", " a\n", " a\n"), ("at", "True", "True"),
    ("times", "5", 5), ("far", "5", 5), ("far", "-1.5", -1.5), ("loud", "true", True), ("loud", "False", False),
    ("no", "null", None), ("no", "None", None), ("way", '{"a": [1]}', {"a": [1]}), ("all", '[1, "b"]', [1, "b"]),
    # Several types: what is of one of them, or else a string.
    ("maybe", "null", None), ("maybe", "5", "5"), ("either", "5", 5), ("either", "5.5", "5.5"), ("either", "a", "a"),
    ("one", "2", 2), ("other", '{"a": 1}', {"a": 1}), ("other", "5", "5"), ("unheard-of", "5", "5"),
    # What is not of the type stays as it was written: the client sees it.
    ("times", "five", "five"), ("loud", "yes", "yes"), ("way", "{", "{"), ("all", "[" * 100_000, "[" * 100_000),
])  # fmt: skip
def test_the_schema_types_the_values_of_qwen_coder(key, text, value):
    ((_, arguments),) = read("qwen-coder", block(parameter(key, text)))[1]
    assert json.dumps(arguments) == json.dumps({key: value})


@pytest.mark.parametrize("parameters", [
    None, [], {"properties": None}, {"properties": []}, {"properties": {"at": None}}, {"properties": {"at": {"type": [[]]}}},
    {"properties": {"at": {"anyOf": 1}}}, {"properties": {"at": {"enum": 1}}}, {"properties": {"at": {"type": {}}}},
    {"properties": [1]}, {"properties": "at"}, [1], "at", 1, {"properties": {"at": [1]}}, {"properties": {"at": {"type": 1}}},
    *({"properties": {"at": {"type": "string", name: None}}} for name in ("anyOf", "oneOf", "enum")),
    *({"properties": {"at": {name: some}}} for name in ("type", "anyOf", "oneOf", "enum")
      for some in (None, [None], [[1]], [{}])),
])  # fmt: skip
def test_a_schema_that_is_none_does_not_decide_what_is_a_call(parameters):
    answer = AnswerParser(QwenCoderCalls([{"function": {"name": "look", "parameters": parameters}}])).parse(LOOK)
    assert (answer.content, list(map(tuple, answer.calls))) == ("", [CODER_LOOK])


def test_a_keyword_that_is_none_does_not_hide_the_others():
    null = {"type": ["integer", None], "anyOf": None, "oneOf": None, "enum": None}
    tools = [{"function": {"name": "look", "parameters": {"properties": {"at": null, "to": null | {"type": "string"}}}}}]
    answer = AnswerParser(QwenCoderCalls(tools)).parse(block(parameter("at", "5"), parameter("to", "5")))
    assert answer.calls[0].arguments == {"at": 5, "to": "5"}


MARKS = [*TAGS, "<|python_tag|>", "{", "}", '"name"', "\n", " ", ";", ">", LLAMA, GO, LOOK, OPEN, A_THOUGHT]
MARKS += [LLAMA.replace("a;", "</think>"), '{"name": "go", "parameters"', '{"type"', "<parameter="]
MARKS += ["<function=", parameter("at", "b")]
TEXTS = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=10).map("".join)


@pytest.mark.parametrize("form", ["llama", "qwen-coder"])
@given(TEXTS, st.lists(st.integers(1, 9), max_size=20), st.booleans(), st.booleans(), st.sampled_from([None, "", "look"]))
@example(f"Hm.{LLAMA.replace('a;', '</think>')} so</think>{GO}", [70, 9, 9, 9, 9], False, True, None)
def test_nothing_is_raised_or_invented_and_pieces_add_up(form, text, cuts, inside_thought, complete, called):
    """What is settled at any moment is the beginning of what is parsed at the end."""
    form = FORMS[form](TOOLS)
    begun = "" if called is None else form.begin(called)
    parser, text = AnswerParser(form, inside_thought and not begun, lambda calls: "<" in calls), begun + text
    answer = parser.parse(text, complete)
    assert text.startswith(answer.content) and (answer.calls or answer.content == text)
    for end in itertools.accumulate(cuts):
        assert answer.content.startswith(text[: parser.settled(text[:end])])
    rest = text[len(answer.content) :]
    assert len(answer.calls) <= rest.count('"name"') + rest.count("<function=")
    assert complete or not answer.calls
    for name, _ in answer.calls:
        assert name in rest and (isinstance(form, QwenCoderCalls) or name in form.parameters)


@pytest.mark.parametrize(("text", "settled"), [
    ("", 0), ("I", 1), ("{", 0), ('{"na', 0), ('{"answer', 8), ("{}", 2), ("<", 0), ("<b", 2), ("<|python_tag|>", 0),
    ("<|python_tag|>p", 15), ("I look. {", 9), ('<think>{"a', 10),
    ("<think>Hm.</think>", 18), ("<think>Hm.</think>\n{", 18), ("<think>Hm.</think>No.", 21),
])  # fmt: skip
def test_llama_waits_no_longer_than_a_call_may_begin(text, settled):
    assert AnswerParser(LlamaCalls(TOOLS)).settled(text) == settled
