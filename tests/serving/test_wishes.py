"""What frameworks ask for beside the answer: it is honoured, ignored, which is said, or refused."""

import json

import numpy as np
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.openai_completions import ChatBody, TextBody
from hgpo_jax.serving.requests import CHANGING, SILENT, parse
from hgpo_jax.serving.sessions import Session, Sessions
from tests.helpers.chat_tokenizers import qwen_tokenizer, tool_tokenizer
from tests.helpers.serving import HELLO, RESPONSE, Scripted, client_of, hello, post, raw, served

LOOK, GO = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "go"))
A_GO = {"type": "function", "function": {"name": "go"}}
LIMITED = {"max_tokens": 2}
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("wish", "ignored"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"service_tier": "auto", "verbosity": "low", "prompt_cache_key": "a", "safety_identifier": "b"},
         "prompt_cache_key, safety_identifier, service_tier, verbosity"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}, *HELLO]}, "messages.reasoning_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
         "messages.content.cache_control"),
        ({"tools": [LOOK | {"function": LOOK["function"] | {"strict": True, "mine": 1}}], "tool_choice": "none"},
         "tools.function.mine"),
        ({"max_tokens": 10**6}, "max_tokens"), ({"max_completion_tokens": RESPONSE + 1}, "max_tokens"),
        ({"é\n" * 200: 1}, "?" * 60), ({f"x{number:02}": 0 for number in range(64)}, ", ".join(f"x{n:02}" for n in range(16))),
        # With what changes nothing nothing is ignored.
        ({"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {}}, None),
        ({"top_logprobs": 0, "modalities": ["text"], "parallel_tool_calls": False, "user": "u", "metadata": {}}, None),
        ({"response_format": {"type": "text"}, "tool_choice": "auto", "reasoning_effort": None}, None),
    ],
)  # fmt: skip
def test_wishes_that_cost_nothing(port, wish, ignored):
    for stream in (False, True):
        status, headers, body = raw(port, hello(**{"stream": stream, **LIMITED} | wish))
        assert (status, headers.get("x-ignored")) == (200, ignored), body


OFFICIAL = [params.CompletionCreateParamsBase.__annotations__ for params in (chat_params, text_params)]


def test_fields_of_other_apis_are_ignored_by_name():
    """Those of the client, and any that a server of another kind takes."""
    given = {ChatBody: {"messages": HELLO}, TextBody: {"prompt": "Hello"}}
    ours = {name for model in given for name in model.model_fields}
    others = {"best_of", "cache_prompt", "guided_choice", "lora_path", "provider", "return_hidden_states", "search_parameters"}
    for name in others.union(*OFFICIAL) - ours - CHANGING.keys() - SILENT:
        for model, needed in given.items():
            body = json.dumps({"model": "tiny", name: "x"} | needed).encode()
            assert parse(model, body).ignored() == [name]


@pytest.mark.parametrize(("asked", "sampled"), [(10**6, RESPONSE), (RESPONSE, RESPONSE), (5, 5), (None, RESPONSE)])
def test_no_answer_is_longer_than_the_server_samples(client, engine, monkeypatch, asked, sampled):
    limits, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda all_: limits.extend(one.limit for one in all_) or submit(all_))
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=asked)
    assert limits == [sampled]


def test_a_log_says_it_once(port, caplog):
    for _ in range(2):
        raw(port, hello(seldom=1, **LIMITED))
    assert [record.message for record in caplog.records if "seldom" in record.message] == ["a request's seldom: it is ignored"]


def test_in_training_the_run_says_how_turns_are_sampled(engine, policy):
    session = Session("key", 2, Decoding(), np.zeros(2, np.uint32))
    with served(engine, policy, sessions=Sessions([session])) as port:
        body = json.dumps({"model": "tiny", "messages": HELLO, "temperature": 0.5, "seed": 3, "max_tokens": 10**6})
        assert raw(port, post(body, key="key"))[1]["x-ignored"] == "max_tokens, seed, temperature"


def part(kind, **more):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, **more}]}]}


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty: this server cannot do that, leave it out"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: "), ({"logit_bias": {"5": -100}}, "logit_bias: "),
        ({"min_p": 0.1}, "min_p: "), ({"repetition_penalty": 1.1}, "repetition_penalty: "),
        ({"functions": [{}]}, "functions: "), ({"guided_json": {}}, "guided_json: "),
        ({"modalities": ["text", "audio"]}, "modalities: "),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "x"}}, *HELLO]}, "function_call: "),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format: needs the package llguidance"),
        ({"tool_choice": "some"}, "tool_choice: Input should be 'auto', "),
        (part("image_url", image_url={"url": "data:"}), "content.1.image_url.image_url.url: 'data:' is no picture's data"),
        (part("image_url", image_url={"url": "data:;base64,"}), "messages: this policy sees no pictures; send texts alone"),
        (part("input_audio", input_audio={}), "messages.0.content.1: Input tag 'input_audio' found"),
        (part("text"), "messages.0.content.1.text.text: Field required"),
    ],
)  # fmt: skip
def test_what_would_give_a_wrong_answer_is_refused(port, wish, message):
    status, _, body = raw(port, hello(**wish))
    assert status == 400 and message in json.loads(body)["error"]["message"]


@pytest.fixture
def scripted(policy, request):
    """A client, and the list of prompts that it causes; an answer is what `says` has at its place 0. A parameter is what the
    chat template ends with."""
    says, tokenizer = [""], tool_tokenizer()
    tokenizer.chat_template += getattr(request, "param", "")
    engine = Scripted(tokenizer, lambda _: says[0])
    with served(engine, type(policy)(policy.config, policy.params, engine.tokenizer)) as port:
        yield client_of(port).chat.completions.create, engine, says


NAMED, ANY = '<tool_call>\n{"name": "go", "arguments":', '<tool_call>\n{"name": "'


@pytest.mark.parametrize(
    ("choice", "begun", "said", "calls"),
    [
        (A_GO, NAMED, ' {"to": 1}}\n</tool_call>', [("go", {"to": 1})]),
        ("required", ANY, 'look", "arguments": {}}\n</tool_call>', [("look", {})]),
        ("required", ANY, 'look"}</tool_call> <tool_call>{"name": "go"}</tool_call>', [("look", {})]),  # and no other one
        (A_GO, NAMED, ' {"to": 1}}', [("go", {"to": 1})]),  # the end token came before the closing tag
        (A_GO, NAMED, " no", []),
    ],
)
def test_an_answer_that_must_call_a_tool_begins_with_the_call(scripted, choice, begun, said, calls):
    create, engine, says = scripted
    says[0], asked = said, {"model": "tiny", "messages": HELLO, "tools": [LOOK, GO], "parallel_tool_calls": False}
    (one,) = create(**asked, tool_choice=choice, extra_body={"return_token_ids": True}).choices
    assert engine.prompts[0].endswith("<|im_start|>assistant\n" + begun)
    found = [(call.function.name, json.loads(call.function.arguments)) for call in one.message.tool_calls or []]
    assert (found, one.finish_reason) == (calls, "tool_calls" if calls else "stop")
    assert one.message.content == (None if calls else begun + said) and ("warning" in one.model_extra) == (not calls)
    assert engine.tokenizer.decode(one.token_ids).removesuffix("<|im_end|>") == said
    streamed = [chunk.choices[0].delta for chunk in create(**asked, tool_choice=choice, stream=True)]
    assert "".join(delta.content or "" for delta in streamed) == (one.message.content or "")
    assert [call.function.name for delta in streamed for call in delta.tool_calls or []] == [name for name, _ in calls]


THINKS = (
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize("scripted", [THINKS], indirect=True)
@pytest.mark.parametrize(("wish", "tail", "said", "called"), [
    ({"tool_choice": A_GO}, "<think>\n\n</think>\n\n" + NAMED, " {}}</tool_call>", True),
    ({}, "<think>\n", '<tool_call>{"name": "go"}</tool_call>', False),  # the thought has not ended
    ({}, "<think>\n", 'Go?</think><tool_call>{"name": "go"}</tool_call>', True),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, EMPTY, '<tool_call>{"name": "go"}</tool_call>', 1),
])  # fmt: skip
def test_no_call_begins_in_a_thought(scripted, wish, tail, said, called):
    create, engine, says = scripted
    says[0] = said
    (choice,) = create(model="tiny", messages=HELLO, tools=[GO], **wish).choices
    assert bool(choice.message.tool_calls) == called and engine.prompts[0].endswith(f"assistant\n{tail}")


@pytest.mark.parametrize("scripted", [THINKS], indirect=True)
@pytest.mark.parametrize(("wish", "said", "content"), [
    ({}, "Hm.</think>Go.", "<think>\nHm.</think>Go."), ({}, "Hm.", "<think>\nHm."), ({}, "", "<think>\n"),
    ({"tools": [GO]}, 'Hm.</think><tool_call>{"name": "go"}</tool_call>', "<think>\nHm.</think>"),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "Go.", "Go."),
])  # fmt: skip
def test_a_thought_that_the_prompt_has_begun_is_in_the_message(scripted, wish, said, content):
    create, _, says = scripted
    says[0] = said
    (choice,) = create(model="tiny", messages=HELLO, **wish).choices
    deltas = [chunk.choices[0].delta.content or "" for chunk in create(model="tiny", messages=HELLO, stream=True, **wish)]
    assert (choice.message.content or "") == "".join(deltas) == content


@pytest.mark.needs("data")
def test_a_call_is_begun_with_the_models_own_tokens():
    tokenizer = qwen_tokenizer()
    for begun, rest in ((NAMED, ' {"to": 1}}'), (ANY, 'look", "arguments": {}}')):
        apart = tokenizer(begun).input_ids + tokenizer(rest).input_ids
        assert apart == tokenizer(begun + rest).input_ids


@pytest.mark.parametrize(("said", "warned"), [('<think>{</think> {"a": 1}', False), ("[1]", True), ('{"a": 1} x', True)])
def test_an_answer_that_is_no_json_object_says_so(scripted, said, warned):
    create, _, says = scripted
    says[0], asked = said, {"model": "tiny", "messages": HELLO, "response_format": {"type": "json_object"}}
    (choice,) = create(**asked).choices
    *_, last = create(**asked, stream=True)
    for one in (choice, last.choices[0]):
        assert (one.model_extra.get("warning") == "the answer is no JSON object") == warned
