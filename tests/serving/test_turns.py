"""Whose turn a request is: requests of a session wait for each other, and one that is asked again is the same turn."""

import json
import queue
import socket
import threading

import openai
import pytest

from hgpo_jax.serving.sessions import OpenSessions
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.serving import Scripted, client_of, in_thread, post, served, wait_until


class Slow(Scripted):
    """Each answer is the number of its request, and waits for `go`."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, lambda _: f"{len(self.prompts)}")
        self.asked, self.left = queue.Queue(), 0

    def submit(self, generations):
        self.asked.put(lambda: Scripted.submit(self, generations))

    def cancel(self, generations):
        self.left += 1

    def go(self):
        self.asked.get(timeout=30)()


@pytest.fixture
def slow():
    return Slow(byte_tokenizer())


@pytest.fixture
def ended():
    return []


@pytest.fixture
def sessions(ended):
    return OpenSessions(9, 9, ended.append)


@pytest.fixture
def port(slow, sessions, policy):
    with served(slow, policy, sessions=sessions, time_limit=20.0) as port:
        yield port


def body(text, stream=False) -> str:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream})


def ask(port, text, stream=False, **headers):
    """What is answered, by the official client, which tells how often it has tried."""
    create, headers = client_of(port).chat.completions.create, {"X-Session-Id": "a", **headers}
    answer = create(**json.loads(body(text, stream)), extra_headers=headers)
    return "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content


def test_requests_of_a_session_wait_for_each_other(port, slow, sessions, ended):
    waiting = lambda: len(sessions._by_name["a"]._in_line)  # noqa: E731
    results = []
    end = lambda: client_of(port).post("/sessions/a/reward", body={"reward": 1}, cast_to=object)["turns"]  # noqa: E731
    one, three, four = (lambda text=text: ask(port, text) for text in ("one", "three", "four"))
    for number, call in enumerate([one, lambda: ask(port, "two", stream=True), three, end, four]):
        results.append(in_thread(call))
        wait_until(lambda number=number: "a" in sessions._by_name and waiting() == number + 1)
    for number in range(3):
        assert slow.asked.qsize() <= 1  # of one session one at a time
        slow.go()
        assert results[number]() == f"{number + 1}"
    assert results[3]() == 3 and "session a has ended" in results[4]()
    assert all(text in prompt for text, prompt in zip(("one", "two", "three"), slow.prompts, strict=True))
    assert [turn.text for turn in ended[0].turns] == ["1", "2", "3"] and ended[0].reward == 1


def test_other_sessions_do_not_wait(port, slow):
    results = [in_thread(ask, port, "x", **{"X-Session-Id": name}) for name in "ab"]
    wait_until(lambda: slow.asked.qsize() == 2)
    slow.go(), slow.go()
    assert {result() for result in results} == {"1", "2"}


def test_who_waits_too_long_for_the_turn_is_told(slow, sessions, policy):
    with served(slow, policy, sessions=sessions, time_limit=0.3) as port:
        results = [in_thread(ask, port, text) for text in "xy"]
        assert all("0.3 seconds" in result() for result in results)
        wait_until(lambda: not sessions._by_name["a"]._in_line)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_end_has_had_no_turn(port, slow, sessions, stream):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(post(body("x", stream)).replace(b"Host:", b"X-Session-Id: a\r\nHost:", 1))
        wait_until(lambda: slow.asked.qsize() == 1)
    wait_until(lambda: slow.left == 1)
    slow.asked.get()
    answer = in_thread(ask, port, "x")
    slow.go()
    assert answer() == "1" and len(sessions._by_name["a"].turns) == 1


AGAIN, KEY, OTHER = {"X-Stainless-Retry-Count": "1"}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "l"}


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [
        (("x", {}), [("x", AGAIN)], True),
        (("x", {}), [("x", {})], False),  # its observation has not changed
        (("x", KEY), [("x", KEY)], True), (("x", KEY), [("x", OTHER)], False), (("x", KEY), [("y", KEY)], False),
        (("x", {}), [("y", AGAIN)], False),  # the first try did not arrive
        (("x", {}), [("y", {}), ("x", AGAIN)], False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_prompt_once_more(port, slow, sessions, first, then, same, stream):
    answers = []
    for text, headers in (first, *then):
        answer = in_thread(ask, port, text, stream=stream, **headers)
        if not (answers and same):
            slow.go()
        answers.append(answer())
    assert answers == (["1", "1"] if same else [f"{1 + i}" for i in range(1 + len(then))])
    assert [turn.text for turn in sessions._by_name["a"].turns] == answers[: 1 if same else None]


def test_a_key_names_its_turn_whatever_was_answered_since(port, slow, sessions):
    for text, headers in (("x", KEY), ("y", {})):
        answer = in_thread(ask, port, text, **headers)
        slow.go()
        answer()
    assert ask(port, "x", **KEY) == "1" and len(sessions._by_name["a"].turns) == 2


def test_an_answer_that_nobody_received_is_told_once_more(port, slow, sessions):
    answer = in_thread(ask, port, "x")
    slow.go()
    answer()
    (turn,) = sessions._by_name["a"].turns
    wait_until(lambda: turn.delivered)
    turn.delivered = False  # as where the client has left between the last token and the answer
    assert ask(port, "x") == "1" and len(sessions._by_name["a"].turns) == 1
    wait_until(lambda: turn.delivered)  # which the server notes when the client has its answer


def test_a_turn_whose_client_is_gone_at_its_end_is_not_delivered(port, slow, sessions):
    """It leaves while its answer is written."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(post(body("x")).replace(b"Host:", b"X-Session-Id: a\r\nHost:", 1))
        go, told = slow.asked.get(timeout=30), threading.Event()
        session = sessions._by_name["a"]
        add = session.add
        session.add = lambda turn: (add(turn), connection.close(), told.wait(0.3))  # its loop learns of it after this
        go()
        wait_until(lambda: not session._in_line)
    assert [turn.delivered for turn in session.turns] == [False]
    assert ask(port, "x") == "1" and len(session.turns) == 1


def test_what_was_refused_meanwhile_is_asked_anew(port, slow, sessions, monkeypatch):
    """The same again, which finds no room; its second try is no second try of the turn before."""
    first = in_thread(ask, port, "x")
    slow.go()
    first()
    submit = slow.submit
    monkeypatch.setattr(slow, "submit", lambda _: (_ for _ in ()).throw(RuntimeError("no room")))
    with pytest.raises(openai.InternalServerError, match="no room"):
        ask(port, "x")
    monkeypatch.setattr(slow, "submit", submit)
    again = in_thread(ask, port, "x", **AGAIN)
    slow.go()
    assert again() == "2" and len(sessions._by_name["a"].turns) == 2


def test_a_session_that_has_had_all_its_turns_tells_the_last_once_more(slow, policy):
    with served(slow, policy, sessions=OpenSessions(1, 9, print)) as port:
        first = in_thread(ask, port, "x")
        slow.go()
        assert first() == ask(port, "x", **AGAIN) == "1"
        for text in ("x", "x" * 5000):  # the second is longer than any prompt, too
            with pytest.raises(openai.BadRequestError, match="has had its 1 turns"):
                ask(port, text)
