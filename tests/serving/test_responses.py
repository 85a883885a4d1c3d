"""What the official client gets of OpenAI's responses, whole and streamed."""

import dataclasses
import itertools
import json

import openai
import pytest

from hgpo_jax.serving.engine import Progress
from tests.helpers.serving import HELLO

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALLED = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a désk"}}\n</tool_call>'
EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.output_item.done",
    "response.completed",
]  # fmt: skip


def streamed(client, **asked):
    """A streamed answer, and the kinds of its events; several equal ones in a row are one."""
    kinds, numbers, response = [], [], None
    with client.responses.create(**asked, stream=True) as stream:
        for event in stream:
            kinds += [event.type] if kinds[-1:] != [event.type] else []
            numbers.append(event.sequence_number)
            response = getattr(event, "response", response)
    assert numbers == list(range(len(numbers)))
    return response, kinds


def told(response):
    """What is in an answer that does not differ between two of them."""
    items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments", "content"}) for item in response.output]
    return response.model_dump(exclude={"id", "created_at", "output"}), items, response.output_text


@pytest.mark.slow
def test_answers_are_those_of_chat_completions(client):
    asked = {"model": "tiny", "temperature": 0.9}
    more = {"seed": 7, "top_k": 50}
    messages = [{"role": "system", "content": "Hi"}, *HELLO]
    chat = client.chat.completions.create(**asked, messages=messages, max_tokens=30, extra_body=more)
    asked |= {"input": "Hello", "instructions": "Hi", "max_output_tokens": 30, "extra_body": more}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    usage = chat.usage
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert whole.usage.total_tokens == usage.total_tokens
    last, kinds = streamed(client, **asked)
    assert told(last) == told(whole) and kinds[:-1] == EVENTS[:-1]
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text and len(texts) > 2


@pytest.mark.parametrize(
    ("said", "text", "num_calls"),
    [
        (CALLED, "I look.", 1), (CALLED.replace("I look.\n", "") * 2, "", 2), ("Nothing to do.", "Nothing to do.", 0),
        ("", "", 0), (CALLED.replace("a désk", "\\ud800"), "I look.", 1), (CALLED[:-20], CALLED[:-20], 0),
    ],
)  # fmt: skip
def test_calls_reach_the_client(stage, said, text, num_calls):
    stage.answer, client, asked = said, stage.client, {"model": "tiny", "input": HELLO, "tools": [LOOK]}
    whole, (last, kinds) = client.responses.create(**asked), streamed(client, **asked)
    with client.responses.stream(**asked) as stream:
        accumulated = stream.get_final_response()
    for response in (whole, last, accumulated):
        assert told(response) == told(whole) and response.status == "completed" and response.output_text == text
        calls = [item for item in response.output if item.type == "function_call"]
        thing = "\ufffd" if "ud800" in said else "a désk"
        assert [tool.name for tool in response.tools] == ["look"] and response.tool_choice == "auto"
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look", {"at": thing})] * num_calls
        assert len({call.call_id for call in calls}) == num_calls
        assert len(response.output) == num_calls + bool(text or not num_calls)
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
    assert kinds.count("response.function_call_arguments.done") == num_calls


@pytest.mark.parametrize("said", [CALLED, "Déjà vu, and more of it.", ""])
def test_log_probabilities_are_those_of_chat_completions(stage, said):
    stage.answer, client, include = said, stage.client, ["message.output_text.logprobs", "other"]
    submit = stage.engine.submit
    stage.engine.submit = lambda all_: submit([dataclasses.replace(one, tell=numbered(one.tell)) for one in all_])
    asked = {"model": "tiny", "input": HELLO, "tools": [LOOK], "include": include}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chat = client.chat.completions.create(model="tiny", messages=HELLO, tools=[tool], logprobs=True)
    wanted = [one.model_dump() | {"bytes": one.bytes or []} for one in chat.choices[0].logprobs.content]
    assert [one["logprob"] for one in wanted] == [-float(at) for at in range(len(wanted))] and len(wanted) > 0
    raw = client.responses.with_raw_response.create(**asked)
    deltas, done = [], []
    with client.responses.create(**asked, stream=True) as stream:
        for event in stream:
            deltas += [one.to_dict() for one in event.logprobs] if event.type == "response.output_text.delta" else []
            done += [one.to_dict() for one in event.logprobs] if event.type == "response.output_text.done" else []
    last = event.response
    for response in (raw.parse(), last):
        assert [one.model_dump() for one in response.output[0].content[0].logprobs] == wanted
    assert done == wanted and deltas == wanted[: len(deltas)] and bool(deltas) == bool(said)
    assert raw.headers["X-Ignored"] == "include"
    without = client.responses.create(**asked | {"include": ["other"]})
    assert without.output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="top_logprobs: "):
        client.responses.create(**asked, top_logprobs=3)


def numbered(tell):
    """Tells an answer's tokens with log-probabilities that count them."""
    counted = itertools.count()
    return lambda told: tell(told._replace(logp=[-float(next(counted)) for _ in told.tokens]))


@pytest.mark.parametrize("order", [1, -1])
def test_a_conversation_goes_on_with_the_answers_items(stage, order):
    """The client sends back what it was given, whichever item comes first, and in a session the sampled ids stay."""
    stage.answer, client, name = CALLED, stage.client, f"responses{order}"
    asked = {"model": "tiny", "tools": [LOOK], "extra_headers": {"X-Session-Id": name}}
    with client.responses.stream(input=HELLO, **asked) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "A desk."}
    stage.answer = "Good."
    second = client.responses.create(input=[*HELLO, *(item.to_dict() for item in first.output[::order]), done], **asked)
    assert second.output_text == "Good."
    before, after = stage.sessions._by_name[name].turns
    sampled = before.ids + before.tokens
    assert after.ids[: len(sampled)] == sampled and "<|im_start|>tool\nA desk." in stage.engine.prompts[1]
    assert (before.parent, after.parent, after.branch) == (None, 0, 0)
    assert client.post(f"/sessions/{name}/reward", body={"reward": 1}, cast_to=object)["turns"] == 2


def test_an_answer_that_is_cut_is_incomplete(stage):
    stage.answer, stage.engine.end_tokens, client = CALLED, (), stage.client
    asked = {"model": "tiny", "input": "Hello", "tools": [LOOK]}
    for response in (client.responses.create(**asked), streamed(client, **asked)[0]):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        (item,) = response.output
        assert (item.status, response.output_text) == ("incomplete", CALLED)


def test_what_an_answer_does_not_do_is_said(stage):
    stage.answer, client = "No.", stage.client
    for wish in ({"tools": [LOOK], "tool_choice": "required"}, {"text": {"format": {"type": "json_object"}}}):
        asked = {"model": "tiny", "input": "Hello"} | wish
        for response in (client.responses.create(**asked), streamed(client, **asked)[0]):
            assert "the answer is no" in response.model_extra["warning"]


def test_an_error_in_a_stream_is_a_failed_response(stage):
    client = stage.client
    stage.engine.submit = lambda all_: [one.tell(Progress([], [], True, "it is broken")) for one in all_]
    response, kinds = streamed(client, model="tiny", input="Hello")
    assert (response.status, response.error.message, kinds[-1]) == ("failed", "it is broken", "response.failed")
    with pytest.raises(openai.InternalServerError, match="it is broken"):
        client.responses.create(model="tiny", input="Hello")
