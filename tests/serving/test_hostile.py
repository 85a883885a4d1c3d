"""Nonsense in great numbers: every request is answered in the API's form, and others get what they would have got."""

import json
import resource
import socket

import pytest

from hgpo_jax.serving.sessions import OpenSessions
from tests.fuzz.mutations import inputs
from tests.helpers.serving import HELLO, client_of, ends, hello, idle, post, raw, served, started

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}
KINDS = {"anyOf": [{"type": "array", "items": {"enum": [1, "a", None]}}]}
PARAMETERS = {"type": "object", "properties": {"x": KINDS}, "required": ["x"]}
NESTED = {"type": "function", "function": {"name": "y", "description": "Does y.", "strict": False, "parameters": PARAMETERS}}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
SAID = {"role": "tool", "content": PARTS, "tool_call_id": "z"}
LONG = [CALL | {"content": PARTS}, SAID, {"role": "user", "content": "x", "name": "y"}]
BODIES = {
    "/v1/chat/completions": [
        {"model": "tiny", "messages": HELLO, "max_tokens": 2, "seed": 1, "n": 2, "stop": ["x"], "stream": False},
        {"model": "tiny", "messages": [*HELLO, CALL, {"role": "tool", "content": "x"}], "max_tokens": 2, "tools": [TOOL]},
        {"model": "tiny", "messages": HELLO, "max_tokens": 2, "metadata": {"session_id": "a", "state_key": "b"}},
        {"model": "tiny", "messages": [*HELLO, *LONG * 3], "max_tokens": 2, "tools": [TOOL, NESTED], "tool_choice": "auto"},
    ],
    "/v1/completions": [{"model": "tiny", "prompt": given, "max_tokens": 2} for given in ([3, 4], "x")],
    "/v1/sessions/a/reward": [{"reward": 1, "turn": 0}, {"reward": 0.5, "success": True, "state": "x"}],
}


def nonsense(path):
    """Bodies that are changed in bytes, words and parts."""
    return inputs([json.dumps(body).encode() for body in BODIES[path]], 200, 0, (lambda given: [given], lambda parts: parts[0]))


def test_nonsense_is_answered_and_changes_nothing(engine, policy):
    seen = {path: set() for path in BODIES}
    with served(engine, policy, sessions=OpenSessions(3, 50, lambda session: None)) as port:
        ask = lambda: client_of(port).chat.completions.create(model="tiny", messages=HELLO, seed=5).choices[0].message  # noqa: E731
        before = ask().content
        for path, given in [(place, body) for place in BODIES for body in nonsense(place)]:
            status, headers, answer = raw(port, post(given, path))
            seen[path].add(status)
            assert status in (200, 400, 404, 409, 413, 429), (given, status, answer)
            if headers["content-type"].startswith("text/event-stream"):  # of which nothing need have come yet
                assert status == 200
                continue
            content = json.loads(answer)
            assert ("error" in content) == (status != 200)
            if status != 200:
                assert len(answer) < 700 and "\\n" not in content["error"]["message"], (given, answer)
        idle(engine)
        assert ask().content == before
        good = hello(max_tokens=1)
        names = b"Host: localhost\r\nX-Session-Id: a.b\r\nX-State-Key: hall\r\nAuthorization: Bearer key\r\nOrigin: http://localhost"
        for given in inputs([good, good.replace(b"Host: localhost", names)], 200, 1):  # lines that are no HTTP
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(given)
                connection.shutdown(socket.SHUT_WR)
                ends(connection, 60)
        idle(engine)
        assert raw(port, good)[0] == 200
    assert all({200, 400} <= statuses for statuses in seen.values()), seen


def test_more_connections_than_are_taken(tmp_path, policy):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    policy.save(tmp_path / "tiny")
    good = hello(max_tokens=3, seed=1)
    with started(tmp_path / "tiny", "--response-limit", 40, "--slots", 2) as (process, url):
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        status, _, before = raw(port, good)
        assert status == 200
        held = []
        for number in range(1500):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            if number % 3 == 0:
                held[-1].sendall(good[: number % len(good)])
            if number == 700:  # many, but not too many
                assert raw(port, good)[0] == 200
        assert raw(port, good)[0] == 503
        for connection in held:
            connection.close()
        while (answer := raw(port, good))[0] == 503:
            pass
        assert json.loads(answer[2])["choices"] == json.loads(before)["choices"]
        assert process.poll() is None
