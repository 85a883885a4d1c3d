"""A tiny policy that is served: one server for all files of tests."""

import types

import pytest

from hgpo_jax.serving.sessions import OpenSessions
from tests.helpers.byte_policy import byte_policy
from tests.helpers.chat_tokenizers import tool_tokenizer
from tests.helpers.serving import Scripted, client_of, engine_of, served


@pytest.fixture(scope="package")
def policy():
    return byte_policy()


@pytest.fixture(scope="package")
def engine(policy):
    with engine_of(policy) as engine:
        yield engine


@pytest.fixture(scope="package")
def programs(engine):
    """For engines of a test's own, so that nothing is compiled again."""
    return engine._sampler._programs


@pytest.fixture(scope="package")
def port(engine, policy):
    with served(engine, policy) as port:
        yield port


@pytest.fixture(scope="package")
def client(port):
    return client_of(port)


@pytest.fixture
def cancelled(engine, monkeypatch):
    """Seats whose response was ended before its time."""
    seats, cancel = [], engine._sampler.cancel
    monkeypatch.setattr(engine._sampler, "cancel", lambda seat: [seats.append(seat), cancel(seat)])
    return seats


@pytest.fixture(scope="package")
def tool_server():
    """A server of what `stage` says; it keeps sessions, and its template shows calls as Qwen2.5's does."""
    tokenizer = tool_tokenizer()
    shown = "(c.function | tojson)"
    between = ("'<tool_call>' + ", " + '</tool_call>'"), ("'\\n<tool_call>\\n' + ", " + '\\n</tool_call>'")
    before, after = (f"{opening}{shown}{closing}" for opening, closing in between)
    assert before in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(before, after)
    server = types.SimpleNamespace(tokenizer=tokenizer, sessions=OpenSessions(9, 9, print))
    server.engine = Scripted(tokenizer, lambda _: server.answer)
    with served(server.engine, server, sessions=server.sessions) as server.port:
        server.client = client_of(server.port)
        yield server


@pytest.fixture
def stage(tool_server, monkeypatch):
    """The tool server; a test sets what it answers, `stage.answer`, and may change its engine."""
    tool_server.answer = ""
    tool_server.engine.prompts.clear()
    for name in ("submit", "end_tokens"):
        monkeypatch.setattr(tool_server.engine, name, getattr(tool_server.engine, name))
    return tool_server
