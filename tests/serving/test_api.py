"""The server, spoken to by the official client and by hostile ones."""

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pydantic
import pytest
import uvicorn
from flax import nnx

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, initialize
from hgpo_jax.policy.tokenizer import embedding_rows
from hgpo_jax.sampling import Decoding, generate
from hgpo_jax.serving import api as serving
from hgpo_jax.serving.api import Api, Connection
from hgpo_jax.serving.engine import STEPS, Busy, Engine, Generation
from hgpo_jax.serving.requests import ApiError, ChatRequest, TextRequest, parse
from tests.helpers.chat_tokenizers import byte_tokenizer

SLOTS, WAITING, PROMPT, RESPONSE, BODY = 4, 3, 200, 48, 200_000
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def policy():
    tokenizer = byte_tokenizer()
    model = ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    return Policy(model, initialize(model, 3, make_mesh("data=1", jax.devices()[:1])), tokenizer)


@pytest.fixture(scope="module")
def engine(policy):
    mesh = make_mesh("data=1", jax.devices()[:1])
    limits = {"slots": SLOTS, "prompt_limit": PROMPT, "response_limit": RESPONSE, "waiting_limit": WAITING}
    with Engine(policy, mesh, **limits) as engine:
        yield engine


@contextlib.contextmanager
def served(engine, policy, **options):
    """A server in a thread; gives its port."""
    api = Api(engine, policy.tokenizer, "tiny", **{"key": "", "body_limit": BODY, "time_limit": 60.0} | options)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(api, http=Connection, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def port(engine, policy):
    with served(engine, policy) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    return client_of(port)


def client_of(port, key="any"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _generate(graphdef, params, ids, key, decoding, limit, end):
    model = nnx.merge(graphdef, params)
    length = jnp.array([ids.shape[1]])
    return generate(
        model, model.decode_blocks(), ids, length, key[None], max_new=limit, end_tokens=(end,), decoding=decoding
    )  # fmt: skip


def expected(policy, ids, seed, number=0, limit=RESPONSE, decoding=None):
    """Tokens and log-probabilities by the rollout's sampler."""
    key = jax.random.fold_in(jax.random.key(np.uint32(seed)), number)
    end = policy.tokenizer.eos_token_id
    out = _generate(policy.graphdef, policy.params, jnp.asarray([ids]), key, decoding or Decoding(), limit, end)
    n = int(out.lengths[0])
    return np.asarray(out.tokens[0, :n]).tolist(), np.asarray(out.logp[0, :n])


def idle(engine):
    """Waits until nobody has a slot."""
    until = time.monotonic() + 30
    while engine.active or engine.waiting:
        assert time.monotonic() < until, (engine.active, engine.waiting)
        time.sleep(0.01)


def test_answers_are_the_samplers(client, policy):
    text = policy.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    ids = policy.tokenizer(text).input_ids
    asked = {"seed": 7, "n": 3, "logprobs": True, "temperature": 0.9, "extra_body": {"return_token_ids": True, "top_k": 50}}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, **asked)
    assert answer.prompt_token_ids == ids
    assert answer.usage.prompt_tokens == len(ids)
    total = 0
    for number, choice in enumerate(answer.choices):
        tokens, logp = expected(policy, ids, 7, number, decoding=Decoding(temperature=0.9, top_k=50))
        assert choice.token_ids == tokens
        np.testing.assert_allclose([one.logprob for one in choice.logprobs.content], logp, rtol=1e-4, atol=1e-4)
        assert choice.message.content == policy.tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if tokens[-1] == policy.tokenizer.eos_token_id else "length")
        total += len(tokens)
    assert answer.usage.completion_tokens == total
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3


def test_a_stream_is_the_same_answer(client):
    asked = {"model": "tiny", "messages": HELLO, "seed": 7, "n": 2, "logprobs": True, "max_tokens": 30}
    whole = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
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


def test_text_completions_and_stop_strings(client, policy):
    ids = policy.tokenizer("Once").input_ids
    by_ids = client.completions.create(model="tiny", prompt=ids, seed=3, logprobs=0, max_tokens=40)
    by_text = client.completions.create(model="tiny", prompt="Once", seed=3, logprobs=1, max_tokens=40)
    tokens, logp = expected(policy, ids, 3, limit=40)
    text = policy.tokenizer.decode(tokens, skip_special_tokens=True)
    assert by_ids.choices[0].text == by_text.choices[0].text == text
    np.testing.assert_allclose(by_text.choices[0].logprobs.token_logprobs, logp, rtol=1e-4, atol=1e-4)
    stop = next(text[at : at + 2] for at in range(9, 30) if text[at : at + 2].isascii() and text.find(text[at : at + 2]) == at)
    stopped = client.completions.create(
        model="tiny", prompt="Once", seed=3, max_tokens=40, stop=["nothing of this kind", stop],
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = stopped.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.find(stop)], "stop")
    assert policy.tokenizer.decode(choice.token_ids).endswith(stop)
    assert tokens[: len(choice.token_ids)] == choice.token_ids
    assert stopped.usage.completion_tokens == len(choice.token_ids) < len(tokens)


def test_without_a_seed_answers_differ(client):
    answers = {client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content for _ in range(3)}
    assert len(answers) > 1
    greedy = {
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=0).choices[0].message.content
        for _ in range(2)
    }
    assert len(greedy) == 1


def test_models_health_and_metrics(client, port, engine):
    idle(engine)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    status, _, body = raw(port, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200 and json.loads(body) == {"status": "ok", "active": 0, "waiting": 0}
    before = metrics(port)
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, temperature=0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    after = metrics(port)
    grown = {name for name in after if after[name] != before.get(name, 0.0)}
    assert {
        'hgpo_requests_total{path="/v1/chat/completions",status="200"}',
        'hgpo_requests_total{path="/v1/chat/completions",status="404"}', 'hgpo_tokens_total{kind="sampled"}',
        "hgpo_first_token_seconds_count", "hgpo_request_seconds_count",
    } <= grown  # fmt: skip
    assert after["hgpo_slots"] == SLOTS


def metrics(port) -> dict[str, float]:
    _, _, body = raw(port, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    lines = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize(
    ("change", "status", "fragment"),
    [
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "root", "content": "x"}]}, 400, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, 400, "tokens, this server reads 200"),
        ({"messages": [{"role": "user", "content": "x" * 2000}] * 2}, 400, "4,000 characters, this server reads 200 tokens"),
        ({"temperature": -1}, 400, "temperature: "),
        ({"top_p": 0}, 400, "top_p: "),
        ({"n": SLOTS + 1}, 400, "n: 5 is more than this server's 4 slots"),
        ({"max_tokens": RESPONSE + 1}, 400, "max_tokens: 49 is more than this server samples, 48"),
        ({"tools": []}, 400, "tools: this server has no such field; leave it out"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty: "),
        ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs: "),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stream": "abc"}, 400, "stream: "),
        ({"stream_options": {"include_usage": "x"}}, 400, "stream_options.include_usage: "),
        ({"top_p": 1e-50}, 400, "top_p: "),
        ({"messages": [{"role": "user"}]}, 400, "messages.0: Value error, a message of the user needs content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "messages.0.role: "),
        ({"messages": HELLO * 4097}, 400, "messages: "),
        ({"a\nb" * 99: 1}, 400, "a b"),
        ({"model": "gpt" * 999}, 404, "is not served here"),
        ({"model": "gpt"}, 404, "model: 'gpt' is not served here, 'tiny' is"),
        ({"messages": [{"role": "user", "content": "x" * BODY}]}, 413, "the body has more than 200,000 bytes"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_the_apis_form(port, change, status, fragment, stream):
    body = {"model": "tiny", "messages": HELLO, "stream": stream} | change
    got, _, answer = raw(port, post(json.dumps(body)))
    error = json.loads(answer)["error"]
    assert got == status and fragment in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
    assert error.keys() == {"message", "type", "param", "code"}


def test_harmless_fields_are_taken(client):
    asked = {"model": "tiny", "max_tokens": 2}
    client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HELLO], user="me",
        metadata={"a": "b"}, store=False, presence_penalty=0, frequency_penalty=0.0, max_completion_tokens=2,
        response_format={"type": "text"}, temperature=None, n=None, stop=None, logit_bias={}, tools=None,
        stream_options={"include_usage": None}, extra_body={"top_k": None, "return_token_ids": None},
    )  # fmt: skip
    said = client.chat.completions.create(**asked, messages=HELLO).choices[0].message
    silent = {"role": "assistant", "content": None}
    client.chat.completions.create(**asked, messages=[*HELLO, said.model_dump(), *HELLO, silent, *HELLO])  # as clients echo
    for prompt in (["Once"], [[3, 4]]):
        alike = [client.completions.create(**asked, prompt=given, seed=1).choices[0].text for given in (prompt, prompt[0])]
        assert alike[0] == alike[1]
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(**asked, prompt=["a", "b"])


def test_of_many_errors_one_is_looked_for():
    for model, body in (
        (ChatRequest, {"messages": [0] * 4000}), (ChatRequest, {"messages": [{"role": "user", "content": [0] * 200}]}),
        (TextRequest, {"prompt": [-1] * 4000}), (TextRequest, {"prompt": "x", "stop": [0] * 16}),
    ):  # fmt: skip
        with pytest.raises(pydantic.ValidationError) as caught:
            model.model_validate(body | {"model": "m"})
        assert caught.value.error_count() <= 6  # one of each member of a union
        with pytest.raises(ApiError):
            parse(model, json.dumps(body | {"model": "m"}).encode())


def test_a_part_of_a_character_has_no_bytes(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, seed=7, logprobs=True, max_tokens=40)
    content = answer.choices[0].logprobs.content
    assert any(one.bytes is None for one in content) and any(one.bytes for one in content)
    assert all(one.bytes is None or bytes(one.bytes).decode() == one.token for one in content)


def test_an_event_is_a_line(port):
    """Whatever a client takes for the end of one."""
    body = {"model": "tiny", "messages": HELLO, "seed": 3, "stream": True, "n": 4}
    _, _, events = raw(port, post(json.dumps(body)), whole=True)
    data = [line for line in events.splitlines() if line.startswith("data: ")]
    assert len(data) > 10 and data[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in data[:-1])
    assert max(map(ord, events)) < 128 and any("\\u" in line for line in data)


@pytest.mark.parametrize(
    "header", ["Host: evil.example", "Host: localhost\r\nOrigin: http://evil.example", "Host: [", "Host: x:y"]
)
def test_a_page_in_a_browser_is_not_answered(port, header):
    status, _, body = raw(port, f"GET /v1/models HTTP/1.1\r\n{header}\r\n\r\n")
    assert status == 403 and "only this machine's own programs" in body


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:9", "[::1]:9", "[::1]"])
def test_this_machines_programs_are(port, host):
    assert raw(port, f"GET /health HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\r\n")[0] == 200


def post(body: str | bytes, path="/v1/chat/completions", key="") -> bytes:
    body = body.encode() if isinstance(body, str) else body
    key = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {len(body)}\r\n\r\n".encode() + body


def raw(port, request: str | bytes, whole: bool = False) -> tuple[int, dict[str, str], str]:
    """Sends bytes and reads one answer, or `whole`, all until the end of a stream: (status, headers, body)."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        status, headers, body = read(connection)
        while whole and not body.endswith("0\r\n\r\n"):
            body += connection.recv(65536).decode()
        return status, headers, body


def read(connection) -> tuple[int, dict[str, str], str]:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            break
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, body.decode()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'{"model": "tiny"', b"\xff\xfe", b"[" * 9000, b'{"model": "tiny", "messages": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', b'{"model": 1e999, "messages": []}',
    ],
)  # fmt: skip
def test_broken_bodies_are_refused(port, body):
    status, _, answer = raw(port, post(body))
    assert status == 400 and "error" in json.loads(answer)


def test_other_paths_and_methods(port):
    for request, status in (("GET /v1/chat/completions", 405), ("POST /v1/models", 405), ("GET /../etc/passwd", 404)):
        got, _, body = raw(port, f"{request} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert got == status and json.loads(body)["error"]["message"]


def ends(connection, seconds: float = 10) -> bytes:
    """What comes until the server closes the connection, which it must."""
    connection.settimeout(seconds)
    data = b""
    with contextlib.suppress(ConnectionResetError):  # with something of ours unread
        while more := connection.recv(65536):
            data += more
    return data


def test_a_body_that_never_ends_is_cut_off(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # refused while we write
            for _ in range(100):
                connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        connection.sendall(b"")
        assert b" 413 " in ends(connection)[:20]


def test_slow_and_silent_clients_are_left(port, monkeypatch):
    monkeypatch.setattr(serving, "GRACE", 0.3)
    connect = lambda: socket.create_connection(("127.0.0.1", port), timeout=10)  # noqa: E731
    with connect() as slow, connect() as silent, connect() as dribbling:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        dribbling.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HT")  # and another that never comes
        assert b" 408 " in ends(slow)[:20]
        assert ends(silent) == b""
        assert ends(dribbling).count(b" 200 ") == 1


def test_a_reader_that_stops_reading_is_left(engine, policy, monkeypatch):
    left = []
    monkeypatch.setattr(serving, "GRACE", 0.3)

    async def stuck(self, scope, receive, send):
        try:
            await asyncio.sleep(60)  # as a write to a full buffer
        except asyncio.CancelledError:
            left.append(time.monotonic())
            raise

    monkeypatch.setattr(serving.StreamingResponse, "__call__", stuck)
    with served(engine, policy, time_limit=0.2) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(post(json.dumps({"model": "tiny", "messages": HELLO, "stream": True})))
        ends(connection)
    assert len(left) == 1
    idle(engine)


def test_a_key(engine, policy):
    with served(engine, policy, key="sesame") as port:
        assert client_of(port, "sesame").chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices
        for key in ("sesam", "sesame1", "sésame", "x"):
            status, _, body = raw(port, post("{}", key=key))
            assert status == 401 and "sesame" not in body
        status, headers, _ = raw(port, "GET /metrics HTTP/1.1\r\nHost: a.name\r\n\r\n")
        assert status == 401 and headers["connection"] == "close"
        assert raw(port, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200


class Held:
    """Responses that have every slot until they are let go."""

    def __init__(self, engine, count=SLOTS):
        self.engine, self.go = engine, threading.Event()
        self.ended = threading.Semaphore(0)
        self.generations = [Generation([1, 2], RESPONSE, Decoding(), 0, i, self.told) for i in range(count)]

    def told(self, progress):
        self.go.wait(60)
        if progress.ended:
            self.ended.release()

    def __enter__(self):
        self.engine.submit(self.generations)
        until = time.monotonic() + 30
        while self.engine.active < min(SLOTS, len(self.generations)):
            assert time.monotonic() < until
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.go.set()
        for _ in self.generations:
            assert self.ended.acquire(timeout=60)


def test_a_full_queue_is_told_to_come_back(client, port, engine):
    idle(engine)
    answers = []
    with Held(engine):
        waiting = [threading.Thread(target=lambda: answers.append(
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
        )) for _ in range(WAITING)]  # fmt: skip
        for thread in waiting:
            thread.start()
        until = time.monotonic() + 30
        while engine.waiting < WAITING:
            assert time.monotonic() < until
            time.sleep(0.01)
        for stream in (False, True):
            status, headers, body = raw(port, post(json.dumps({"model": "tiny", "messages": HELLO, "stream": stream})))
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    for thread in waiting:
        thread.join(60)
    assert len(answers) == WAITING and all(answer.choices for answer in answers)


@pytest.fixture
def cancelled(engine, monkeypatch):
    """Seats whose response was ended before its time."""
    seats, cancel = [], engine._sampler.cancel
    monkeypatch.setattr(engine._sampler, "cancel", lambda seat: [seats.append(seat), cancel(seat)])
    return seats


def test_a_stop_string_ends_the_response(client, engine, cancelled, policy):
    idle(engine)
    tokens, _ = expected(policy, policy.tokenizer("Once").input_ids, 3, limit=RESPONSE)
    assert len(tokens) > 2 * STEPS
    first = policy.tokenizer.decode(tokens[:8], skip_special_tokens=True)
    stop = next(character for character in first if character.isascii())
    answer = client.completions.create(model="tiny", prompt="Once", seed=3, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    idle(engine)
    assert len(cancelled) == 1


def test_all_choices_wait_or_none(engine, cancelled):
    told = []
    idle(engine)
    with Held(engine):
        more = [Generation([1], 1, Decoding(), 0, i, told.append) for i in range(WAITING + 1)]
        with pytest.raises(Busy):
            engine.submit(more)
        assert engine.waiting == 0
        engine.submit(more[:-1])
        assert engine.waiting == WAITING
        engine.cancel(more)
    idle(engine)
    assert not told and not cancelled  # they never had a slot


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_slots_back(port, engine, stream, cancelled, monkeypatch):
    idle(engine)
    before, go, step = metrics(port).get("hgpo_cancelled_total", 0.0), threading.Event(), engine._sampler.step
    monkeypatch.setattr(engine._sampler, "step", lambda most: go.wait(60) and step(most))
    until = time.monotonic() + 30
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(post(json.dumps({"model": "tiny", "messages": HELLO, "n": 2, "stream": stream})))
        while engine.active < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    while metrics(port).get("hgpo_cancelled_total", 0.0) == before:
        assert time.monotonic() < until
        time.sleep(0.01)
    go.set()
    idle(engine)
    assert metrics(port)["hgpo_cancelled_total"] == before + 1
    assert len(cancelled) == 2


def test_a_request_that_takes_too_long_is_given_up(engine, policy):
    idle(engine)
    with served(engine, policy, time_limit=0.3) as port, Held(engine):
        status, _, body = raw(port, post(json.dumps({"model": "tiny", "messages": HELLO})))
        assert status == 504 and json.loads(body)["error"]["code"] == "timeout"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(post(json.dumps({"model": "tiny", "messages": HELLO, "stream": True})))
            data = b""
            while b"timeout" not in data:
                data += connection.recv(65536)
        assert b"200 OK" in data and b"[DONE]" not in data
    idle(engine)


def test_many_clients_at_once_each_get_their_own_answer(client, policy):
    alone = {
        seed: client.completions.create(model="tiny", prompt="Once", seed=seed).choices[0].text for seed in range(12)
    }
    answers = {}

    def ask(seed):
        patient = openai.OpenAI(base_url=client.base_url, api_key="any", max_retries=20, timeout=60)
        answers[seed] = patient.completions.create(model="tiny", prompt="Once", seed=seed).choices[0].text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == alone


def test_what_fails_inside_is_told_to_all_and_ends_the_server(policy, monkeypatch, caplog):
    mesh = make_mesh("data=1", jax.devices()[:1])
    limits = {"slots": 2, "prompt_limit": PROMPT, "response_limit": RESPONSE, "waiting_limit": WAITING}
    failed = threading.Event()
    with Engine(policy, mesh, **limits, failed=failed.set) as engine, served(engine, policy) as port:

        def fail(*_):
            raise MemoryError("no room\nat all")

        monkeypatch.setattr(engine._sampler, "step", fail)
        status, _, body = raw(port, post(json.dumps({"model": "tiny", "messages": HELLO, "n": 2})))
        assert status == 503
        assert json.loads(body)["error"]["message"] == "the sampler has failed; the server's log says why"
        assert failed.wait(10)
        assert raw(port, post(json.dumps({"model": "tiny", "messages": HELLO})))[0] == 503
        status, _, body = raw(port, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 503 and "MemoryError" not in body
    assert "MemoryError: no room" in caplog.text


@pytest.mark.slow
def test_what_is_compiled_at_the_start_is_all(policy):
    mesh = make_mesh("data=1", jax.devices()[:1])
    limits = {"slots": 4, "prompt_limit": 300, "response_limit": 20, "waiting_limit": 20}
    with Engine(policy, mesh, **limits) as engine:
        for length, choices in engine.shapes():
            engine.warm_up(length, choices)
        compiled = set(engine._sampler._programs.seconds)
        with served(engine, policy) as port:
            client = client_of(port)
            for size in (1, 100, 250):
                for n in (1, 3):
                    client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "x" * size}], n=n, max_tokens=9, seed=1
                    )
        assert set(engine._sampler._programs.seconds) == compiled


def test_those_who_wait_are_told_when_it_closes(policy):
    mesh = make_mesh("data=1", jax.devices()[:1])
    with Engine(policy, mesh, slots=1, prompt_limit=PROMPT, response_limit=RESPONSE, waiting_limit=5) as engine:
        told = []
        engine.submit([Generation([1], RESPONSE, Decoding(), 0, i, lambda p: told.append(p.error)) for i in range(3)])
        engine.close()
    assert told[-3:] and set(filter(None, told)) == {"the server is shutting down"}
    with pytest.raises(RuntimeError, match="shutting down"):
        engine.submit([])
