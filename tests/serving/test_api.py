"""What the official client gets, and what is refused."""

import json

import numpy as np
import openai
import pytest

from hgpo_jax.sampling.generate import Decoding
from tests.helpers import serving as helpers
from tests.helpers.serving import HELLO, PROMPT, SLOTS, WAITING, expected, get, hello, post, raw, served

IDS = {"extra_body": {"return_token_ids": True}}


def test_answers_are_the_samplers(client, policy):
    text = policy.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    ids = policy.tokenizer(text).input_ids
    asked = {"seed": 7, "n": 3, "logprobs": True, "temperature": 0.9, "extra_body": {"return_token_ids": True, "top_k": 50}}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, **asked)
    assert answer.prompt_token_ids == ids
    total = 0
    for number, choice in enumerate(answer.choices):
        tokens, logp = expected(policy, ids, 7, number, decoding=Decoding(temperature=0.9, top_k=50))
        assert choice.token_ids == tokens
        content = choice.logprobs.content
        np.testing.assert_allclose([one.logprob for one in content], logp, rtol=1e-4, atol=1e-4)
        assert choice.message.content == policy.tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if tokens[-1] == policy.tokenizer.eos_token_id else "length")
        # A token may be a part of a character; together the bytes are the text.
        assert any("\ufffd" in one.token for one in content)
        assert all(bytes(one.bytes).decode(errors="replace") == one.token for one in content)
        told = b"".join(bytes(one.bytes) for one in content).decode(errors="replace")
        assert told == policy.tokenizer.decode(tokens)
        total += len(tokens)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), total, len(ids) + total)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3


def test_the_end_token_ends_an_answer(client, policy):
    ids, end = policy.tokenizer("Once").input_ids, policy.tokenizer.eos_token_id
    seed = next(seed for seed in range(200) if expected(policy, ids, seed)[0][-1] == end)
    (choice,) = client.completions.create(model="tiny", prompt="Once", seed=seed, **IDS).choices
    assert (choice.finish_reason, choice.token_ids[-1]) == ("stop", end)


def test_a_stream_is_the_same_answer(client):
    asked = {"model": "tiny", "messages": HELLO, "seed": 7, "n": 2, "logprobs": True, "max_tokens": 30} | IDS
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts, ids, logp, reasons, usage, pieces = ["", ""], [[], []], [[], []], [None, None], None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += 1
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            logp[choice.index] += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert logp == [[one.logprob for one in choice.logprobs.content] for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert pieces > 4


def test_a_streamed_text_completion_is_read_by_its_first_choice(client):
    asked = {"model": "tiny", "prompt": "Once", "seed": 3, "max_tokens": 9}
    whole = client.completions.create(**asked).choices[0].text
    for ids in ({}, IDS):
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True, **ids)) == whole
    greedy, likeliest = (client.completions.create(**asked | wish) for wish in ({"temperature": 0}, {"top_p": 0}))
    assert greedy.choices[0].text == likeliest.choices[0].text


@pytest.mark.parametrize("prompt", [["Once"], "ids"])
def test_one_prompt_in_a_list_is_that_prompt(client, policy, prompt):
    prompt = [policy.tokenizer("Once").input_ids] if prompt == "ids" else prompt
    asked = {"model": "tiny", "seed": 3, "max_tokens": 9}
    assert client.completions.create(**asked, prompt=prompt).choices[0].text == (
        client.completions.create(**asked, prompt="Once").choices[0].text
    )
    with pytest.raises(openai.BadRequestError, match="prompt: 2 prompts were sent; send one a request"):
        client.completions.create(**asked, prompt=prompt * 2)


def test_an_applications_own_metadata_is_not_read_where_nothing_is_recorded(client):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "seed": 7}
    plain = client.chat.completions.create(**asked)
    more = client.chat.completions.create(**asked, metadata={"session_id": "user:1", "task_id": "x" * 20_000})
    assert more.choices[0].message.content == plain.choices[0].message.content


def test_text_completions_and_stop_strings(client, policy):
    asked = {"model": "tiny", "seed": 3, "max_tokens": 40}
    ids = policy.tokenizer("Once").input_ids
    by_ids = client.completions.create(**asked, prompt=ids, logprobs=0)
    by_text = client.completions.create(**asked, prompt="Once", logprobs=1)
    tokens, logp = expected(policy, ids, 3, limit=40)
    text = policy.tokenizer.decode(tokens, skip_special_tokens=True)
    assert by_ids.choices[0].text == by_text.choices[0].text == text
    np.testing.assert_allclose(by_text.choices[0].logprobs.token_logprobs, logp, rtol=1e-4, atol=1e-4)
    stop = next(text[at : at + 2] for at in range(9, 30) if text[at : at + 2].isascii() and text.find(text[at : at + 2]) == at)
    stopped = client.completions.create(**asked, prompt="Once", stop=["nothing of this kind", stop], **IDS)
    choice = stopped.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.find(stop)], "stop")
    assert policy.tokenizer.decode(choice.token_ids).endswith(stop)
    assert tokens[: len(choice.token_ids)] == choice.token_ids
    assert stopped.usage.completion_tokens == len(choice.token_ids) < len(tokens)


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 2}, {"best_of": 1}, {"best_of": 1, "n": 2}])
def test_the_best_of_as_many_as_are_returned_are_all_of_them(client, fields):
    choices = client.completions.create(model="tiny", prompt="Once", max_tokens=2, **fields).choices
    assert len(choices) == fields.get("n", 1)
    with pytest.raises(openai.BadRequestError, match="best_of: 3 is not n, 2, and all answers are returned; leave it out"):
        client.completions.create(model="tiny", prompt="Once", max_tokens=2, n=2, best_of=3)


def test_without_a_seed_answers_differ(client):
    ask = lambda **more: client.chat.completions.create(model="tiny", messages=HELLO, **more).choices[0].message.content  # noqa: E731
    assert len({ask() for _ in range(3)}) > 1
    assert len({ask(temperature=0) for _ in range(2)}) == 1


def test_models_and_health(client, port, engine):
    helpers.idle(engine)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    assert raw(port, get("/v1/models/")) == raw(port, get("/v1/models"))
    status, _, body = raw(port, get("/health"))
    load = json.loads(body)
    assert status == 200 and 0 <= load.pop("reused_share") < 1 and load == {"status": "ok", "active": 0, "waiting": 0}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)


@pytest.mark.parametrize(
    ("change", "status", "fragment"),
    [
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "root", "content": "x"}]}, 400, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, 400, "context length is 200 tokens, and the prompt has "),
        ({"messages": [{"role": "user", "content": "x" * 2000}] * 2}, 400, "characters, and the prompt has 4000"),
        ({"n": SLOTS + WAITING + 1}, 400, "n: 8 answers are more than this server's 7 places"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stream": "abc"}, 400, "stream: "),
        ({"stream_options": {"include_usage": "x"}}, 400, "stream_options.include_usage: "),
        ({"temperature": -1, "stream": False}, 400, "temperature: "),
        ({"top_p": -1e-50}, 400, "top_p: "),
        ({"messages": [{"role": "user"}]}, 400, "messages.0: a message of the user needs content"),
        ({"messages": [{"role": "function", "content": "x", "name": "1"}]}, 400, "messages.0.role: "),
        ({"model": "gpt" * 999}, 404, "is not served here"),
        ({"model": "gpt"}, 404, "model: 'gpt' is not served here, 'tiny' is"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 413, "the body has more than 281,344 bytes"),
    ],
)
def test_refusals_have_the_apis_form(port, change, status, fragment):
    got, _, answer = raw(port, hello(**{"stream": True} | change))
    error = json.loads(answer)["error"]
    assert got == status and fragment in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
    assert error.keys() == {"message", "type", "param", "code"}


def test_token_ids_and_the_longest_prompt(client, engine):
    create = lambda prompt: client.completions.create(model="tiny", prompt=prompt, max_tokens=1)  # noqa: E731
    assert create([engine.vocabulary - 1] * PROMPT).choices
    with pytest.raises(openai.BadRequestError, match=f"prompt: {engine.vocabulary} is no token id of this model"):
        create([3, engine.vocabulary])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens, and the prompt has 201"):
        create([3] * (PROMPT + 1))


def test_harmless_fields_are_taken(client):
    said = client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HELLO], user="me",
        metadata={"a": "b"}, store=False, max_completion_tokens=2, temperature=None, n=None, stop=None, tools=None, seed=1,
        stream_options={"include_usage": None}, extra_body={"top_k": None, "return_token_ids": None},
    )  # fmt: skip
    assert said.usage.completion_tokens <= 2
    silent = {"role": "assistant", "content": None}
    messages = [*HELLO, said.choices[0].message.model_dump(), *HELLO, silent, *HELLO]  # as clients echo
    client.chat.completions.create(model="tiny", max_tokens=2, messages=messages)


def test_an_event_is_a_line(port):
    """Whatever a client takes for the end of one."""
    _, _, events = raw(port, hello(seed=3, stream=True, n=4), whole=True)
    data = [line for line in events.splitlines() if line.startswith("data: ")]
    assert len(data) > 10 and data[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in data[:-1])
    assert max(map(ord, events)) < 128 and any("\\u" in line for line in data)


def test_a_page_in_a_browser_is_not_answered(port):
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": "["}, {"Host": "x:y"}):
        status, _, body = raw(port, get("/v1/models", **headers))
        assert status == 403 and "only this machine's own programs" in body
    for host in ("localhost", "localhost:80", "127.0.0.1:9", "[::1]:9", "[::1]"):
        assert raw(port, get("/health", Host=host, Origin=f"http://{host}"))[0] == 200


def test_broken_bodies_other_paths_and_methods(port):
    for body in (
        b"", b"{", b"null", b"[]", b'{"model": "tiny"', b"\xff\xfe", b"[" * 9000, b'{"model": "tiny", "messages": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}}', b'{"model": 1e999, "messages": []}',
    ):  # fmt: skip
        status, _, answer = raw(port, post(body))
        assert status == 400 and "error" in json.loads(answer), body
    for request, status in (("GET /v1/chat/completions", 405), ("POST /v1/models", 405), ("GET /../etc/passwd", 404)):
        got, _, body = raw(port, f"{request} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert got == status and json.loads(body)["error"]["message"]


def test_half_a_character_is_text(port):
    """As a client sends it that has cut a text inside an emoji."""
    body = b'{"model": "tiny", "seed": 3, "messages": [{"role": "user", "content": "%s"}]}'
    answers = [raw(port, post(body % text)) for text in (b"\\ud83d\\ude00 \\uD83D", "😀 \ufffd".encode())]
    assert [status for status, *_ in answers] == [200, 200]
    texts = [json.loads(body)["choices"][0]["message"]["content"] for *_, body in answers]
    assert texts[0] == texts[1]


def test_a_key(engine, policy):
    with served(engine, policy, key="sesame") as port:
        assert helpers.client_of(port, "sesame").chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices
        for key in ("sesam", "sesame1", "sésame", "x"):
            status, _, body = raw(port, post("{}", key=key))
            assert status == 401 and "sesame" not in body
        status, headers, _ = raw(port, get("/v1/models", Host="a.name"))
        assert status == 401 and headers["connection"] == "close"
        assert raw(port, get("/health"))[0] == 200
