"""Every dialect asks for the same: equal conversations are equal prompts, wishes are honoured, named or refused."""

import dataclasses
import json
import re

import pytest
from openai.types.responses import response_create_params

from hgpo_jax.serving.anthropic_messages import Messages
from hgpo_jax.serving.openai_completions import ChatCompletions
from hgpo_jax.serving.openai_responses import STORED, Responses, ResponsesBody
from hgpo_jax.serving.requests import CHANGING, SILENT, ApiError, parse
from hgpo_jax.serving.sessions import Session, Sessions
from tests.helpers.serving import HELLO, Scripted, get, post, raw, served

SCHEMA = {"type": "object", "properties": {"thing": {"type": "string"}}}
LOOK, GO = ({"name": name, "description": f"To {name}."} for name in ("look", "go"))
TOOLS = {
    ChatCompletions: [{"type": "function", "function": tool | {"parameters": SCHEMA}} for tool in (LOOK, GO)],
    Responses: [{"type": "function", "parameters": SCHEMA, **tool} for tool in (LOOK, GO)],
    Messages: [{"input_schema": SCHEMA, **tool} for tool in (LOOK, GO)],
}
PATHS = {Responses: "/v1/responses", Messages: "/v1/messages"}
USUAL = {
    ChatCompletions: {"model": "tiny", "messages": HELLO, "max_tokens": 9},
    Responses: {"model": "tiny", "input": "Hello", "max_output_tokens": 9},
    Messages: {"model": "tiny", "messages": HELLO, "max_tokens": 9},
}
LONGEST = Scripted.response_limit
BOTH = [Responses, Messages]


def request(dialect, **fields):
    return dialect(json.dumps(USUAL[dialect] | fields).encode()).request


def asked(stage, dialect, **fields):
    """What is answered to a request: (status, headers, body)."""
    return raw(stage.port, post(json.dumps(USUAL[dialect] | fields), path_of(dialect)))


def path_of(dialect):
    return PATHS.get(dialect, "/v1/chat/completions")


def text(kind, *texts):
    return [{"type": kind, "text": one} for one in texts]


def of_chat(name, thing):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps({"thing": thing})}}


def of_responses(name, thing):
    return {"type": "function_call", "call_id": "call_1", "name": name, "arguments": json.dumps({"thing": thing})}


def of_messages(name, thing):
    return {"type": "tool_use", "id": "toolu_1", "name": name, "input": {"thing": thing}}


CONVERSATION = {
    ChatCompletions: {"messages": [
        {"role": "system", "content": text("text", "Be", "brief.")}, {"role": "user", "content": "A desk?"},
        {"role": "assistant", "content": text("text", "I ", "look."),
         "tool_calls": [of_chat("look", "desk"), of_chat("go", "désk")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "A desk."}, {"role": "tool", "content": "You are\nthere."},
        {"role": "user", "content": "And\nnow?"}, {"role": "assistant", "tool_calls": [of_chat("look", "bed")]},
        {"role": "tool", "content": ""}, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."},
    ]},
    Responses: {"instructions": "Be\nbrief.", "input": [
        {"role": "user", "content": "A desk?"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        of_responses("look", "desk") | {"id": "fc_1", "status": "completed"}, of_responses("go", "désk"),
        {"type": "function_call_output", "call_id": "call_1", "output": "A desk."},
        {"type": "function_call_output", "call_id": "call_2", "output": text("input_text", "You are", "there.")},
        {"type": "message", "role": "user", "content": text("input_text", "And", "now?")}, of_responses("look", "bed"),
        {"type": "function_call_output", "call_id": "call_1", "output": ""},
        {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."},
    ]},
    Messages: {"system": text("text", "Be", "brief."), "messages": [
        {"role": "user", "content": "A desk?"},
        {"role": "assistant",
         "content": [*text("text", "I ", "look."), of_messages("look", "desk"), of_messages("go", "désk")]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A desk."},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": text("text", "You are", "there.")},
            *text("text", "And", "now?"),
        ]},
        {"role": "assistant", "content": [of_messages("look", "bed")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
        {"role": "assistant", "content": text("text", "Done.")}, {"role": "user", "content": text("text", "Go on.")},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("dialect", BOTH)
def test_a_conversation_is_the_same_in_every_dialect(dialect):
    asked_for, chats = (request(kind, tools=TOOLS[kind], **CONVERSATION[kind]) for kind in (dialect, ChatCompletions))
    assert asked_for == chats and not asked_for.ignored
    assert len(asked_for.prompt.messages) == 10 and asked_for.prompt.messages[2]["tool_calls"][1]["function"]["name"] == "go"


@pytest.mark.parametrize(
    ("items", "told", "calls"),
    [
        ([of_responses("look", "desk"), "I look."], ["I look."], ["look"]),
        ([of_responses("look", "desk"), "I look.", of_responses("go", "desk")], ["I look."], ["look", "go"]),
        ([of_responses("look", "desk"), {"type": "reasoning"}, "I look."], ["I look."], ["look"]),
        (["I look.", of_responses("look", "desk"), "I go.", of_responses("go", "desk")], ["I look.\nI go."], ["look", "go"]),
        ([of_responses("look", "desk"), ""], [""], ["look"]),
        (["I look.", "So.", of_responses("look", "desk")], ["I look.", "So."], ["look"]),  # two messages, as in chats
    ],
)
def test_calls_and_texts_that_stand_together_are_one_message(items, told, calls):
    """Otherwise the results would follow the wrong one."""
    items = [{"role": "assistant", "content": item} if isinstance(item, str) else item for item in items]
    done = {"type": "function_call_output", "call_id": "call_1", "output": "A desk."}
    after = {"role": "assistant", "content": "Done."}
    first, *messages = request(Responses, input=[*HELLO, *items, done, after]).prompt.messages
    assert [first] == HELLO and [message["content"] for message in messages] == [*told, "A desk.", "Done."]
    assert [call["function"]["name"] for call in messages[len(told) - 1]["tool_calls"]] == calls
    assert [message["role"] for message in messages] == ["assistant"] * len(told) + ["tool", "assistant"]


def test_a_picture_beside_a_call_is_refused():
    picture = {"role": "assistant", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
    call, said = of_responses("look", "x"), {"role": "assistant", "content": "x"}
    for items in ([picture, call, said], [call, picture]):
        with pytest.raises(ApiError, match="a message of the assistant holds no picture"):
            request(Responses, input=[*HELLO, *items])


RESULTS = {
    ChatCompletions: lambda calls, results: {"messages": [
        *HELLO, {"role": "assistant", "tool_calls": [of_chat("look", one) | {"id": one} for one in calls]},
        *({"role": "tool", "tool_call_id": one, "content": f"A {one}."} for one in results),
    ]},
    Responses: lambda calls, results: {"input": [
        *HELLO, *(of_responses("look", one) | {"call_id": one} for one in calls),
        *({"type": "function_call_output", "call_id": one, "output": f"A {one}."} for one in results),
    ]},
    Messages: lambda calls, results: {"messages": [
        *HELLO, {"role": "assistant", "content": [of_messages("look", one) | {"id": one} for one in calls]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one, "content": f"A {one}."} for one in results]},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("dialect", RESULTS)
def test_results_are_read_in_the_order_of_their_calls(dialect):
    """Clients send those of parallel calls as they arrive; what names no call comes last."""
    read = lambda results: request(dialect, **RESULTS[dialect](["desk", "bed", "cup"], results)).prompt  # noqa: E731
    usual = read(["desk", "bed", "cup"])
    assert [message["content"] for message in usual.messages[2:]] == ["A desk.", "A bed.", "A cup."]
    assert read(["cup", "desk", "bed"]) == read(["bed", "cup", "desk"]) == usual
    assert read(["bed", "cup", "desk"]).state == usual.state
    assert [message["content"] for message in read(["lamp", "bed"]).messages[2:]] == ["A bed.", "A lamp."]
    assert read(["bed"]).state == 'look {"thing":"desk"}\n\nlook {"thing":"bed"}\nA bed.\nlook {"thing":"cup"}\n'
    assert not any("id" in call for call in usual.messages[1]["tool_calls"])
    assert all(message.keys() == {"role", "content"} for message in usual.messages[2:])


def test_calls_of_messages_that_follow_each_other_are_answered_together():
    calls = [{"role": "assistant", "tool_calls": [of_chat("look", one) | {"id": one}]} for one in "ab"]
    results = [{"role": "tool", "tool_call_id": one, "content": one} for one in "ab"]
    for some in (results, results[::-1]):
        messages = request(ChatCompletions, messages=[*HELLO, *calls, *some]).prompt.messages
        assert [message["content"] for message in messages[-2:]] == ["a", "b"]
        prompt = request(ChatCompletions, messages=[*HELLO, *calls, *some, results[0] | {"content": "c"}]).prompt
        assert prompt.state == 'look {"thing":"a"}\na\nlook {"thing":"b"}\nb\nc'


def test_results_without_ids_stay_as_they_are():
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}] * 2}
    results = [{"role": "tool", "content": text} for text in "ba"]
    messages = request(ChatCompletions, messages=[*HELLO, calls, *results, calls, *results[::-1]]).prompt.messages
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["b", "a", "a", "b"]


def test_claude_codes_number_of_a_request_is_left_out(stage):
    """Its first block differs from request to request; texts that only mention it stay."""
    head = "x-anthropic-billing-header: cc_version=2.1.36.%s; cc_entrypoint=cli; cch=%s;"
    told = [request(Messages, system=text("text", head % (n, n), "You are Claude Code.")).prompt.messages for n in "12"]
    assert told[0] == told[1] == [{"role": "system", "content": "You are Claude Code."}, *HELLO]
    assert request(Messages, system=f"{head % (1, 1)}\n\nBe brief.").prompt.messages[0]["content"] == "Be brief."
    assert request(Messages, system=head % (1, 1)).prompt.messages == HELLO
    assert request(Messages, system="").prompt.messages == [{"role": "system", "content": ""}, *HELLO]
    said = f"What is {head}?"
    assert request(Messages, system=said).prompt.messages[0]["content"] == said


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(stage):
    """By which its clients know that they should compact the conversation."""
    for length, unit in ((5_000, r"5\d\d\d tokens > 4000"), (200_000, r"200000 characters > \d{5,6}")):
        status, _, body = asked(stage, Messages, messages=[{"role": "user", "content": "x" * length}])
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert re.fullmatch(rf"prompt is too long: {unit} maximum", error["message"])


def test_a_base_url_needs_no_version(stage):
    for dialect in (Messages, Responses):
        status, _, body = raw(stage.port, post(json.dumps(USUAL[dialect]), PATHS[dialect].removeprefix("/v1")))
        assert status == 200, body
    for path in ("/messages", "/messages/count_tokens"):
        status, _, body = raw(stage.port, post("{}", path))
        assert status == 400 and json.loads(body)["type"] == "error"
    assert json.loads(raw(stage.port, get("/models"))[2])["data"]


@pytest.mark.parametrize(
    ("dialect", "fields", "chats"),
    [
        (Messages, {"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (Messages, {"tool_choice": {"type": "tool", "name": "go"}},
         {"tool_choice": {"type": "function", "function": {"name": "go"}}}),
        (Messages, {"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (Messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
        (Messages, {"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        (Messages, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (Messages, {"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (Responses, {"tool_choice": "required"}, {"tool_choice": "required"}),
        (Responses, {"tool_choice": {"type": "function", "name": "go"}},
         {"tool_choice": {"type": "function", "function": {"name": "go"}}}),
        (Responses, {"tool_choice": "none"}, {"tool_choice": "none"}),
        (Responses, {"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (Responses, {"stop": "a"}, {"stop": "a"}),
        (Responses, {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (Responses, {"max_output_tokens": None}, {"max_tokens": None}),
        *((Responses, {"text": {"format": {"type": "json_schema", **form}}},
           {"response_format": {"type": "json_schema", "json_schema": form}})
          for form in ({"schema": SCHEMA, "strict": False}, {"schema": SCHEMA, "strict": True}, {"schema": SCHEMA})),
        (Messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": False}}},
         {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}),
        (Responses, *[{"chat_template_kwargs": {"enable_thinking": False}}] * 2),
        *((dialect, fields, fields) for dialect in BOTH for fields in (
            {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}, {"stream": True}, {"metadata": {"user_id": "me"}},
            {"top_k": -1, "store": True, "user": "me"},
        )),
    ],
)  # fmt: skip
def test_a_wish_is_the_same_in_every_dialect(dialect, fields, chats):
    ours = request(dialect, tools=TOOLS[dialect], **fields)
    assert ours == request(ChatCompletions, tools=TOOLS[ChatCompletions], **chats)
    without = request(dialect, tools=TOOLS[dialect])
    assert dataclasses.astuple(ours) != dataclasses.astuple(without) or fields.keys() <= SILENT


@pytest.mark.parametrize(
    ("dialect", "wish", "ignored"),
    [
        (Messages, {"service_tier": "auto", "cache_control": {"type": "ephemeral"}}, "cache_control, service_tier"),
        (Messages, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (Messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
        (Messages, {"max_tokens": LONGEST + 1}, "max_tokens"),
        (Messages, {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}, *HELLO]},
         "messages.content.thinking"),
        (Messages, {"system": [{"type": "text", "text": "x", "cache_control": {}}]}, "system.cache_control"),
        (Messages, {"metadata": {"user_id": "me"}, "tools": [], "tool_choice": {"type": "auto"}}, None),
        (Responses, {"reasoning": {"effort": "low"}, "include": ["x"], "text": {"verbosity": "low"}},
         "include, reasoning, text.verbosity"),
        (Responses, {"max_output_tokens": LONGEST + 1}, "max_output_tokens"),
        (Responses, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (Responses, {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}, *HELLO]}, "input.summary"),
        (Responses, {"store": True, "background": False, "stream_options": {"include_obfuscation": False}}, None),
    ],
)  # fmt: skip
def test_wishes_that_cost_nothing(stage, dialect, wish, ignored):
    for stream in (False, True):
        status, headers, body = asked(stage, dialect, stream=stream, **wish)
        assert (status, headers.get("x-ignored")) == (200, ignored), body


def with_strict(dialect, name):
    """The tools of a dialect, one of which is strict."""
    strict = {"strict": True}
    return [
        tool | ({"function": tool["function"] | strict} if "function" in tool else strict)
        if name in (tool.get("name"), tool.get("function", {}).get("name")) else tool for tool in TOOLS[dialect]
    ]  # fmt: skip


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_strict_tool_that_no_answer_may_call_is_not_ignored(stage, dialect):
    none = {"type": "none"} if dialect is Messages else "none"
    for choice, ignored in (({}, dialect.strict_field), ({"tool_choice": none}, None)):
        status, headers, body = asked(stage, dialect, tools=with_strict(dialect, "look"), **choice)
        assert (status, headers.get("x-ignored")) == (200, ignored), body


@pytest.mark.parametrize("dialect", TOOLS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1.5E+400", "9" * 400 + ".0"])
def test_numbers_that_no_answer_could_tell_are_refused(stage, dialect, number):
    """Where a field may hold anything, too; a text that spells one is a text."""
    schema = {"type": "object", "properties": {"x": {"maximum": "HERE"}}}
    tool = {"name": "look", "parameters": schema, "input_schema": schema}
    tool = {"function": tool} if dialect is ChatCompletions else tool
    kind = "custom" if dialect is Messages else "function"
    for fields in ({"metadata": {"a": ["HERE"]}}, {"tools": [{"type": kind, **tool}]}, {"unknown": {"a": "HERE"}}):
        body = json.dumps(USUAL[dialect] | fields)
        for stream in (False, True):
            given = body[:-1] + f', "stream": {json.dumps(stream)}}}'
            status, _, told = raw(stage.port, post(given.replace('"HERE"', number), path_of(dialect)))
            message = json.loads(told)["error"]["message"]
            assert status == 400 and not stage.engine.prompts
            assert message == f"the body holds {number[:20]}, which is no finite number; write one, or null"
    body = json.dumps(USUAL[dialect] | {"metadata": {number: number, "large": int("9" * 400), "small": 0.5}})
    assert raw(stage.port, post(body, path_of(dialect)))[0] == 200


def test_no_official_field_is_dropped_silently():
    known = ResponsesBody.model_fields.keys() | CHANGING.keys() | SILENT | set(STORED)
    for name in response_create_params.ResponseCreateParamsBase.__annotations__.keys() - known:
        assert parse(ResponsesBody, {"model": "tiny", "input": "Hello", name: "x"}).ignored() == [name]


IMAGE = {"type": "image", "source": {"type": "url", "url": "data:"}}


@pytest.mark.parametrize(
    ("dialect", "wish", "message"),
    [
        (Messages, {"max_tokens": None}, "max_tokens: Field required"),
        (Messages, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image.source.type: Input should be 'base64'"),
        (Messages, {"messages": [{"role": "user", "content": []}]}, "messages.0: a message of the user needs"),
        (Messages, {"messages": [{"role": "user", "content": [of_messages("x", "y")]}]}, "user has no blocks of type tool_use"),
        (Messages, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: Input should be"),
        (Messages, {"tools": [{"type": "web_search_20250305", "name": "x"}]}, "not served here; give tools of type custom"),
        (Messages, {"tool_choice": {"type": "any"}}, "tool_choice: a call needs tools"),
        (Messages, {"tool_choice": {"type": "tool"}}, "tool_choice: a name goes with the type tool"),
        (Messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: needs the package"),
        (Messages, {"mcp_servers": [{}]}, "mcp_servers: this server cannot do that"),
        (Messages, {"container": "x"}, "container: this server cannot do that"),
        (Responses, {"previous_response_id": "resp_1"}, "previous_response_id: this server stores nothing; send the whole"),
        (Responses, {"conversation": "conv_1"}, "conversation: this server stores nothing"),
        (Responses, {"prompt": {"id": "x"}}, "prompt: this server stores nothing"),
        (Responses, {"background": True}, "background: this server cannot do that"),
        (Responses, {"input": [{"type": "item_reference", "id": "x"}]}, "stored; give the item itself"),
        (Responses, {"input": []}, "input: List should have at least 1 item"),
        (Responses, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input_image.image_url: 'data:' is no picture's data; give data:image/png;base64,"),
        (Responses, {"tools": [{"type": "web_search"}]}, "'web_search' is not served here; give tools of type"),
        (Responses, {"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice: allowed_tools is not served"),
        (Responses, {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format: needs the package"),
        (Responses, {"input": [of_responses("x", "y") | {"arguments": 5}]}, "arguments: Input should be an object"),
        (Messages, {"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "messages: the last one is the assistant's"),
        *((dialect, wish, message) for dialect in BOTH for wish, message in (
            ({"temperature": -1}, "temperature: "), ({"model": "gpt"}, "model: 'gpt' is not served here"),
            ({"presence_penalty": 1}, "presence_penalty: this server cannot"), ({"model": None}, "model: Field required"),
        )),
    ],
)  # fmt: skip
def test_what_would_give_a_wrong_answer_is_refused(stage, dialect, wish, message):
    status, _, body = asked(stage, dialect, stream=True, **wish)
    error = json.loads(body)["error"]
    assert status == (404 if wish.get("model") else 400) and message in error["message"] and "\n" not in error["message"]
    if dialect is Messages:
        assert json.loads(body).keys() == {"type", "error"} and json.loads(body)["type"] == "error"
        assert error["type"] == ("not_found_error" if wish.get("model") else "invalid_request_error")
    else:
        assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(408, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (503, "api_error"),
     (504, "timeout_error")],
)  # fmt: skip
def test_messages_have_anthropics_kinds_of_errors(status, kind):
    assert Messages.error(ApiError(status, "x"))["error"] == {"type": kind, "message": "x"}


CALL = '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>'


def put_together(stream):
    """The message that a stream's events tell, read by hand; the official client does it in test_messages.py."""
    lines = stream.splitlines()
    start, *events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in (start, *events)]
    message, blocks = start["message"], []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta" and "text" in event["delta"]:
            blocks[event["index"]]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["input"] |= json.loads(event["delta"]["partial_json"])
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "content": blocks}
    return message


@pytest.mark.parametrize(
    ("said", "stops", "content", "reason", "stop"),
    [
        (f"I look.{CALL}", [], [*text("text", "I look."), of_messages("look", None)], "tool_use", None),
        ("I look.", ["loo", "lo"], text("text", "I "), "stop_sequence", "lo"),
        ("I look.", ["look!"], text("text", "I look."), "end_turn", None), ("", [], [], "end_turn", None),
    ],
)  # fmt: skip
def test_a_message_is_what_its_events_say(stage, said, stops, content, reason, stop):
    stage.answer, fields = said, {"tools": TOOLS[Messages], "max_tokens": 300, "stop_sequences": stops}
    whole = json.loads(asked(stage, Messages, **fields)[2])
    body = json.dumps(USUAL[Messages] | fields | {"stream": True})
    streamed = put_together(raw(stage.port, post(body, PATHS[Messages]), whole=True)[2])
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_") and block.pop("input") == {"at": "\ufffd"}
    expected = [{name: block[name] for name in block if name not in ("id", "input")} for block in content]
    assert whole == streamed and whole["content"] == expected
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)


KEYS = (
    "X-Api-Key: {}\r\n", "Authorization: Bearer {}\r\n", "Authorization: Bearer x\r\nX-Api-Key: {}\r\n",
    "X-Api-Key: none\r\nauthorization: bearer {}\r\n", "api-key: {}\r\n", "Authorization: {}\r\n",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_either_header(stage, key):
    session = Session("sesame", 2)
    with served(stage.engine, stage, sessions=Sessions([session])) as port:
        for name in ("sesam", "sesame"):
            head, _, rest = post(json.dumps(USUAL[Messages]), PATHS[Messages]).partition(b"Content-Length")
            status, _, body = raw(port, head + key.format(name).encode() + b"Content-Length" + rest)
            assert status == (200 if name == "sesame" else 401), body
            assert status == 200 or json.loads(body)["error"]["type"] == "authentication_error"
    assert len(session.turns) == 1


def test_a_body_that_is_longer_than_any_prompt_has_exceeded_the_context(stage):
    session = Session("sesame", 2)
    with served(stage.engine, stage, sessions=Sessions([session])) as port:
        head, _, rest = post("x" * 10**6, PATHS[Messages]).partition(b"Content-Length")
        assert raw(port, head + KEYS[0].format("sesame").encode() + b"Content-Length" + rest)[0] == 413
    assert session.overflowed


@pytest.mark.parametrize(("dialect", "count", "without", "wrong", "more"), [
    (Messages, "count_tokens", "max_tokens", "messages", {}),
    (Responses, "input_tokens", "model", "input", {"object": "response.input_tokens"}),
])  # fmt: skip
def test_tokens_are_counted_without_an_answer(stage, dialect, count, without, wrong, more):
    """What is wrong is said as the API does."""
    path, body = f"/v1/{dialect.__name__.lower()}", USUAL[dialect] | {"tools": TOOLS[dialect]}
    counted = {name: value for name, value in body.items() if name != without}
    status, _, told = raw(stage.port, post(json.dumps(counted), f"{path}/{count}"))
    _, _, answer = raw(stage.port, post(json.dumps(body), path))
    assert status == 200 and json.loads(told) == more | {"input_tokens": json.loads(answer)["usage"]["input_tokens"]}
    assert len(stage.engine.prompts) == 1
    status, _, told = raw(stage.port, post(json.dumps(counted | {wrong: []}), f"{path}/{count}"))
    assert status == 400 and ("type" in json.loads(told)) == (dialect is Messages)
