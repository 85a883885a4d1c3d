"""What the official client gets of Anthropic's messages, whole and streamed."""

import pytest

from hgpo_jax.serving.anthropic_messages import MessagesBody
from hgpo_jax.serving.engine import Busy, Progress
from hgpo_jax.serving.requests import CHANGING, SILENT, parse
from tests.helpers.serving import HELLO, served

pytestmark = pytest.mark.needs("anthropic")

LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALLED = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a désk"}}\n</tool_call>'


def client_of(port, key="any"):
    import anthropic

    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=60)


def streamed(client, **asked):
    """A streamed answer as the client's helper puts it together, and the kinds of its events, a row of equal ones as one."""
    kinds = []
    with client.messages.stream(**asked) as stream:
        for event in stream:
            kinds += [event.type] if kinds[-1:] != [event.type] else []
        return stream.get_final_message(), kinds


def told(message):
    """What is in an answer that does not differ between two of them."""
    blocks = [(block.type, block.text if block.type == "text" else (block.name, block.input)) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence, message.usage.input_tokens, message.usage.output_tokens


def test_answers_are_those_of_chat_completions(client, port):
    more = {"seed": 7, "top_k": 50, "temperature": 0.9}
    messages = [{"role": "system", "content": "Hi"}, *HELLO]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, extra_body=more)
    text, usage = chat.choices[0].message.content, chat.usage
    asked = {"model": "tiny", "system": "Hi", "messages": HELLO, "max_tokens": 30, "extra_body": more}
    whole = client_of(port).messages.create(**asked)
    assert told(whole) == ([("text", text)], "max_tokens", None, usage.prompt_tokens, usage.completion_tokens)
    again, kinds = streamed(client_of(port), **asked)
    assert told(again) == told(whole)
    assert [kind for kind in kinds if "_" in kind] == [
        "message_start", "content_block_start", *["content_block_delta"] * kinds.count("content_block_delta"),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert kinds.count("content_block_delta") > 2


def test_a_stop_string_is_named(stage):
    stage.answer, client = "One, two, three.", client_of(stage.port)
    for stops, text, reason in ((["three", ", t"], "One", "stop_sequence"), (["four"], "One, two, three.", "end_turn")):
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 99, "stop_sequences": stops}
        for message in (client.messages.create(**asked), streamed(client, **asked)[0]):
            blocks, why, stop, _, count = told(message)
            assert (blocks, why, stop) == ([("text", text)], reason, ", t" if reason == "stop_sequence" else None)
            assert count == len(text) + (3 if stop else 1)  # a token is a byte, or the end


@pytest.mark.parametrize(
    ("said", "text", "num_calls"),
    [
        (CALLED, "I look.", 1), (CALLED.replace("I look.\n", "") * 2, "", 2), ("Nothing to do.", "Nothing to do.", 0),
        ("", "", 0),
    ],
)  # fmt: skip
def test_calls_reach_the_client(stage, said, text, num_calls):
    stage.answer, client = said, client_of(stage.port)
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "tools": [LOOK]}
    whole, (again, kinds) = client.messages.create(**asked), streamed(client, **asked)
    call = "tool_use", ("look", {"at": "a désk"})
    assert told(whole)[0] == [("text", text)] * bool(text) + [call] * num_calls
    assert told(again)[:3] == told(whole)[:3] and whole.stop_reason == ("tool_use" if num_calls else "end_turn")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    assert len({block.id for block in whole.content if block.type == "tool_use"}) == num_calls


def test_a_call_may_hold_what_is_no_text(stage):
    stage.answer, client = CALLED.replace("a désk", "\\ud800"), client_of(stage.port)
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "tools": [LOOK]}
    for message in (client.messages.create(**asked), streamed(client, **asked)[0]):
        assert message.content[1].input == {"at": "\ufffd"}


def test_a_conversation_goes_on_with_the_answers_blocks(stage):
    """The client sends back what it was given, and in a session the sampled ids stay."""
    stage.answer, client = CALLED, client_of(stage.port)
    asked = {"model": "tiny", "max_tokens": 300, "tools": [LOOK], "extra_headers": {"X-Session-Id": "messages"}}
    first, _ = streamed(client, messages=HELLO, **asked)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "A desk."}
    after = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    stage.answer = "Good."
    second = client.messages.with_raw_response.create(messages=after, **asked)
    assert second.parse().content[0].text == "Good." and "x-ignored" not in second.headers
    before, after = stage.sessions._by_name["messages"].turns
    sampled = before.ids + before.tokens
    assert after.ids[: len(sampled)] == sampled and after.state == 'look {"at":"a désk"}\nA desk.'
    assert client.post("/v1/sessions/messages/reward", body={"reward": 1}, cast_to=object)["turns"] == 2


def test_a_prompt_is_counted_as_it_is_read(stage):
    """No answer is sampled for it, and it may be longer than the server reads."""
    import anthropic

    client = client_of(stage.port)
    asked = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": [LOOK], "tool_choice": {"type": "any"}}
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == client.messages.create(**asked, max_tokens=9).usage.input_tokens
    assert len(stage.engine.prompts) == 1
    long = [{"role": "user", "content": "x" * (stage.engine.prompt_limit + 1)}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > stage.engine.prompt_limit
    with pytest.raises(anthropic.NotFoundError, match="'tiny' is"):
        client.messages.count_tokens(**asked | {"model": "gpt"})


def test_a_conversation_that_ends_with_an_answer_is_counted(stage):
    answered = [*HELLO, {"role": "assistant", "content": "Hello."}]
    client = client_of(stage.port)
    first = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert client.messages.count_tokens(model="tiny", messages=answered).input_tokens > first


def test_a_tool_runner_sends_the_whole_conversation(stage):
    """The server stores no threads; the client then goes on without them, if it is told in Anthropic's words."""
    from anthropic import beta_tool

    @beta_tool
    def look(at: str) -> str:
        """Look at something.

        Args:
            at: what.
        """
        return "A desk."

    stage.answer = CALLED
    asked = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Find it."}], "tools": [look]}
    answers = []
    for message in client_of(stage.port).beta.messages.tool_runner(**asked):
        answers.append(message.content[0].text)
        stage.answer = "Good."
    assert answers == ["I look.", "Good."]
    first, second = stage.engine.prompts
    assert second.startswith(first) and "Find it." in first and "A desk." in second


def test_an_error_without_a_text_is_told_from_an_empty_result(stage):
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1"}
    for more in ({}, {"is_error": True}, {"is_error": True, "content": "No desk."}):
        messages = [*HELLO, called, {"role": "user", "content": [result | more]}]
        client_of(stage.port).messages.create(model="tiny", max_tokens=9, messages=messages)
    empty, failed, said = stage.engine.prompts
    assert "Error" not in empty + said and "Error" in failed and "No desk." in said


def test_an_answer_that_is_cut_or_no_call_says_so(stage):
    stage.answer, client = CALLED, client_of(stage.port)
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "tools": [LOOK]}
    stage.engine.end_tokens = ()
    for message in (client.messages.create(**asked), streamed(client, **asked)[0]):
        assert told(message)[:2] == ([("text", CALLED)], "max_tokens")
    message = client.messages.create(**asked, tool_choice={"type": "any"})
    assert message.model_extra["warning"] == "tool_choice: the answer is no call that can be read"


def test_errors_are_the_clients_own(stage):
    import anthropic

    asked, client = {"model": "tiny", "messages": HELLO, "max_tokens": 9}, client_of(stage.port)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: Input should be greater"):
        client.messages.create(**asked | {"max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError, match="'tiny' is"):
        client.messages.create(**asked | {"model": "gpt"})
    with served(stage.engine, stage, key="sesame") as port:
        assert client_of(port, "sesame").messages.create(**asked).type == "message"
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client_of(port, "sesam").messages.create(**asked)
        assert raised.value.body["error"]["type"] == "authentication_error"

    def full(all_):
        raise Busy

    stage.engine.submit = full
    with pytest.raises(anthropic.RateLimitError, match="try again"):
        client.messages.create(**asked)
    stage.engine.submit = lambda all_: [one.tell(Progress([], [], True, "it is broken")) for one in all_]
    with pytest.raises(anthropic.InternalServerError, match="it is broken"):
        client.messages.create(**asked)
    with pytest.raises(anthropic.APIStatusError, match="it is broken") as raised:
        streamed(client, **asked)
    assert raised.value.body["error"]["type"] == "api_error"


def test_no_official_field_is_dropped_silently():
    from anthropic.types import message_create_params
    from anthropic.types.beta import message_create_params as beta

    names = message_create_params.MessageCreateParamsBase.__annotations__ | beta.MessageCreateParamsBase.__annotations__
    names = names.keys() - {"betas"}  # a header
    assert {"messages", "tool_choice", "service_tier", "thread"} <= names
    assert {"thread", "compaction", "container"} <= CHANGING.keys()  # they name what Anthropic's server has stored, or its work
    for name in names - MessagesBody.model_fields.keys() - CHANGING.keys() - SILENT:
        assert parse(MessagesBody, {"model": "tiny", "messages": HELLO, "max_tokens": 1, name: "x"}).ignored() == [name]


def test_models_are_listed(stage):
    assert [model.id for model in client_of(stage.port).models.list()] == ["tiny"]
