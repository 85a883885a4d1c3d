"""Many clients, hostile ones and such that leave; a server that fails or ends."""

import asyncio
import contextlib
import json
import queue
import socket
import struct
import threading
import time

import openai
import pytest

from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving import engine as engines
from hgpo_jax.serving import web_app as serving
from hgpo_jax.serving.engine import STEPS, Busy, Generation, Progress, _Anything
from hgpo_jax.serving.sessions import OpenSessions
from hgpo_jax.serving.uvicorn_server import listen
from tests.fuzz.mutations import inputs
from tests.helpers import serving as helpers
from tests.helpers.serving import HELLO, RESPONSE, SLOTS, WAITING, ends, engine_of, get, hello, idle, raw, served, wait_until

CLOSING = "the server is shutting down"


def test_a_body_that_never_ends_is_cut_off(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # refused while we write
            for _ in range(100):
                connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        answer = ends(connection)  # which is lost where the connection is reset before we read it
        assert not answer or b" 413 " in answer[:20]


def test_a_slow_body_is_not_waited_for(port, monkeypatch):
    monkeypatch.setattr(serving, "GRACE", 0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        assert b" 408 " in ends(slow)[:20]


def test_a_reader_that_stops_reading_is_left(engine, policy, monkeypatch):
    left = []
    monkeypatch.setattr(serving, "GRACE", 0.1)

    async def stuck(self, scope, receive, send):
        try:
            await asyncio.sleep(60)  # as a write to a full buffer
        except asyncio.CancelledError:
            left.append(time.monotonic())
            raise

    monkeypatch.setattr(serving.StreamingResponse, "__call__", stuck)
    with served(engine, policy, time_limit=0.1) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(hello(stream=True))
        ends(connection)
    assert len(left) == 1
    idle(engine)


def test_no_piece_waits_for_the_one_before_it():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Held:
    """Responses that have every slot until they are let go."""

    def __init__(self, engine):
        self.engine, self.go, self.errors = engine, threading.Event(), set()
        self.ended = threading.Semaphore(0)
        self.generations = [Generation([1, 2], RESPONSE, Decoding(), 0, i, self.told) for i in range(SLOTS)]

    def told(self, progress):
        self.go.wait(60)
        if progress.ended:
            self.errors.add(progress.error)
            self.ended.release()

    def __enter__(self):
        idle(self.engine)
        self.engine.submit(self.generations)
        wait_until(lambda: self.engine.active == SLOTS)
        return self

    def __exit__(self, *_):
        self.go.set()
        for _ in self.generations:
            assert self.ended.acquire(timeout=60)


def together(*calls):
    """Each on a thread of its own, to their ends."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def test_a_full_queue_is_told_to_come_back(client, port, engine):
    answers = []
    ask = lambda: answers.append(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3))  # noqa: E731
    with Held(engine):
        waiting = threading.Thread(target=together, args=[ask] * WAITING)
        waiting.start()
        wait_until(lambda: engine.waiting == WAITING, 10)
        for stream in (False, True):
            status, headers, body = raw(port, hello(stream=stream))
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    waiting.join(60)
    assert len(answers) == WAITING and all(answer.choices for answer in answers)


def test_all_choices_wait_or_none(engine, cancelled):
    told = []
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


def test_a_stop_string_ends_the_response(client, engine, cancelled, policy):
    idle(engine)
    tokens, _ = helpers.expected(policy, policy.tokenizer("Once").input_ids, 3)
    assert len(tokens) > 2 * STEPS
    first = policy.tokenizer.decode(tokens[:8], skip_special_tokens=True)
    stop = next(character for character in first if character.isascii())
    answer = client.completions.create(model="tiny", prompt="Once", seed=3, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    idle(engine)
    assert len(cancelled) == 1


def test_who_asks_again_at_once_waits_for_no_step(policy, programs, monkeypatch):
    monkeypatch.setattr(engines, "GATHER", 1e9)
    monkeypatch.setattr(engines, "MAX_GATHER", 300.0)
    events, over = [], queue.Queue()
    with engine_of(policy, programs=programs) as engine:
        add, step = engine._sampler.add, engine._sampler.step
        monkeypatch.setattr(engine._sampler, "add", lambda asked: events.append(f"add {len(asked)}") or add(asked))
        monkeypatch.setattr(engine._sampler, "step", lambda most: events.append("step") or step(most))
        last = Generation([5], 1, Decoding(), 0, 2, over.put)

        def told(progress):
            if progress.ended:
                events.append("ended")
                threading.Timer(0.1, engine.submit, [[last]]).start()

        engine.submit([Generation([3], 1, Decoding(), 0, 0, told), Generation([4], 40, Decoding(), 0, 1, lambda _: None)])
        assert over.get(timeout=30).ended
        began = time.monotonic()
    assert time.monotonic() - began < 60  # closing waits for nobody
    assert events[:5] == ["add 2", "step", "ended", "add 1", "step"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_slots_back(port, engine, stream, cancelled, monkeypatch):
    idle(engine)
    go, cancel, given_up = threading.Event(), engine.cancel, threading.Event()
    monkeypatch.setattr(engine, "cancel", lambda generations: [cancel(generations), given_up.set()])
    # It samples nothing, so that neither choice can end before it is cancelled.
    monkeypatch.setattr(engine._sampler, "step", lambda most: [] if go.wait(60) else pytest.fail("the client never left"))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(hello(n=2, stream=stream))
        wait_until(lambda: engine.active == 2)
    try:
        assert given_up.wait(10)
    finally:
        go.set()
    idle(engine)
    assert len(cancelled) == 2


def test_a_request_that_takes_too_long_is_given_up(engine, policy):
    with served(engine, policy, time_limit=0.2) as port, Held(engine):
        status, _, body = raw(port, hello())
        assert status == 504 and json.loads(body)["error"]["code"] == "timeout"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(hello(stream=True))
            data = b""
            while b"timeout" not in data:
                data += connection.recv(65536)
        assert b"200 OK" in data and b"[DONE]" not in data
    idle(engine)


def asking(client, answers):
    """A function that asks with a seed, again and again while the server is busy."""
    patient = openai.OpenAI(base_url=client.base_url, api_key="any", max_retries=30, timeout=60)

    def ask(seed):
        answers[seed] = patient.completions.create(model="tiny", prompt="Once", seed=seed).choices[0].text

    return ask


def test_each_client_gets_its_own_answer_whoever_is_killed_beside_it(client, port, cancelled):
    alone, answers, over = {}, {}, threading.Event()
    for seed in range(10):
        asking(client, alone)(seed)

    def die():
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
                connection.sendall(hello(stream=True))
                connection.recv(1)

    dying = threading.Thread(target=die)
    dying.start()
    ask = asking(client, answers)
    together(*(lambda seed=seed: ask(seed) for seed in alone))
    over.set()
    dying.join(120)
    assert answers == alone and len(set(alone.values())) > 7 and cancelled


def test_what_fails_inside_is_told_to_all_and_ends_the_server(policy, programs, monkeypatch, caplog):
    failed = threading.Event()
    with engine_of(policy, programs=programs) as engine, served(engine, policy) as port:
        monkeypatch.setattr(engine, "failed", failed.set)

        def fail(*_):
            raise MemoryError("no room\nat all")

        monkeypatch.setattr(engine._sampler, "step", fail)
        status, _, body = raw(port, hello(n=2))
        assert status == 503
        assert json.loads(body)["error"]["message"] == "the sampler has failed; the server's log says why"
        assert failed.wait(10)
        assert raw(port, hello())[0] == 503
        status, _, body = raw(port, get("/health"))
        assert status == 503 and "MemoryError" not in body
    assert "MemoryError: no room" in caplog.text


@pytest.mark.slow
def test_what_is_compiled_at_the_start_is_all(policy):
    with engine_of(policy, prompt_limit=300, response_limit=20, store=2**22, constrains=True) as engine:
        for shape in engine.shapes():
            engine.warm_up(*shape)
        assert engine._sampler._store
        compiled = set(engine._sampler._programs.called)
        assert engine.counts["reused_share"] == 0
        for length in (1, 100, 250):  # of requests that come together, some of them with equal prompts
            for count, distinct in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4)):
                told = queue.Queue()
                engine.submit([
                    Generation([3 + i % distinct] * length, 9, Decoding(), 0, i, told.put) for i in range(count)
                ])  # fmt: skip
                for _ in range(count):
                    while not told.get(timeout=60).ended:
                        pass
        engine.submit([Generation([3] * 100, 9, Decoding(), 0, 0, told.put, _Anything(engine._words))])
        while not told.get(timeout=60).ended:
            pass
        assert set(engine._sampler._programs.called) == compiled
        assert {shape for _, shape in compiled if shape.endswith("constrained")}


def test_those_who_wait_are_told_when_it_closes(policy, programs):
    told = []
    with engine_of(policy, programs=programs) as engine, Held(engine) as held:
        engine.submit([Generation([1], RESPONSE, Decoding(), 0, i, told.append) for i in range(WAITING)])
        engine.close()
    assert told == [Progress([], [], True, CLOSING)] * WAITING
    assert CLOSING in held.errors
    with pytest.raises(RuntimeError, match="shutting down"):
        engine.submit([])


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}
TOOL = {"type": "function", "function": {"name": "x", "description": "Does x.", "parameters": {"type": "object"}}}
SAID = [*HELLO, CALL, {"role": "tool", "content": [{"type": "text", "text": "one"}], "tool_call_id": "z"}]
BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": SAID, "tools": [TOOL], "max_tokens": 2, "stop": ["x"], "n": 2},
    "/v1/completions": {"model": "tiny", "prompt": [3, 4], "max_tokens": 2, "metadata": {"session_id": "a"}},
    "/v1/responses": {
        "model": "tiny", "max_output_tokens": 2, "tools": [{"type": "function", "name": "x"}],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                  {"type": "function_call", "name": "x", "arguments": "{}"}, {"type": "function_call_output", "output": "y"}],
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 2, "system": "Hello", "tools": [{"name": "x", "input_schema": {}}],
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "y"}, {"type": "text", "text": "z"}]},
                     {"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": {"a": 1}}]}],
    },
    "/v1/sessions/a/reward": {"reward": 1, "turn": 0},
}  # fmt: skip


def test_nonsense_is_answered_and_changes_nothing(engine, policy):
    with served(engine, policy, sessions=OpenSessions(99, 50, lambda session: None)) as port:
        before = raw(port, hello(seed=5))[2]
        seen = set()
        for path, body in BODIES.items():
            for given in inputs([json.dumps(body).encode()], 20, 0, (lambda given: [given], lambda parts: parts[0])):
                status, _, answer = raw(port, helpers.post(given, path))
                seen.add(status)
                assert status in (200, 400, 404), (given, status, answer)
                if status != 200:
                    assert json.loads(answer)["error"]["message"].count("\n") == 0 and len(answer) < 700, (given, answer)
        idle(engine)
        assert json.loads(raw(port, hello(seed=5))[2])["choices"] == json.loads(before)["choices"]
        assert {200, 400} <= seen
