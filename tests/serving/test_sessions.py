"""Sessions: what is recorded of requests, and what a client may do with them."""

import asyncio
import contextlib
import json

import numpy as np
import openai
import pytest

from hgpo_jax import analysis
from hgpo_jax import config as configuration
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.openai_completions import ChatCompletions
from hgpo_jax.serving.recording import EVERY, Recording
from hgpo_jax.serving.requests import ApiError, parse
from hgpo_jax.serving.sessions import SILENT, OpenSessions, Place, RewardRequest, Session, Turn, episodes_of, place_of
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.serving import RESPONSE, client_of, expected, post, raw, served

MOST, TURNS = 3, 2
END = byte_tokenizer().eos_token_id
HUGE = ((3e38, 0), (-3e38, 1), (3e38, 0))  # rewards and their turns


@pytest.fixture
def ended():
    return []


@pytest.fixture
def recorded(engine, policy, ended):
    with served(engine, policy, sessions=OpenSessions(TURNS, MOST, ended.append)) as port:
        yield client_of(port)


def ask(client, session="a", text="Hello", **more):
    more = {"extra_headers": {"X-Session-Id": session}} | more
    said = (("user", "Hi"), ("assistant", "Yes?"), ("user", text))
    messages = [{"role": role, "content": content} for role, content in said]
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"return_token_ids": True}, **{"seed": 7} | more
    )


def reward(client, session="a", **body):
    return client.post(f"/sessions/{session}/reward", body=body, cast_to=object)


def test_only_what_was_posted_at_a_sessions_end_is_its_success():
    session = Session("one", 2)
    session.add(Turn([1], "", [2], [0.0], "yes"))
    assert session.success is False  # it goes on
    session.post(RewardRequest(reward=1.0, success=True))
    assert session.success is True
    session.lost = True
    assert session.success is False


def test_a_session_is_what_was_sampled(recorded, policy, ended):
    first = ask(recorded)
    second = ask(recorded, extra_headers={}, metadata={"session_id": "a", "state_key": "elsewhere"}, temperature=0.7)
    other = ask(recorded, extra_headers={})  # of no session
    counts = {"turns": 2, "branches": 2}  # the same conversation once more
    assert reward(recorded, reward=0.5, turn=0) == {"id": "a", "object": "session", **counts, "reward": 0.5, "ended": False}
    reward(recorded, reward=0, turn=-1, admissible=False)
    assert reward(recorded, reward=2, success=False, state="the end")["reward"] == 2.5
    (session,) = ended
    assert [turn.state for turn in session.turns] == ["Hello", "elsewhere"] and session.state == "the end"
    assert [turn.reward for turn in session.turns] == [0.5, 2] and not session.success
    assert [turn.admissible for turn in session.turns] == [True, False]
    for number, (turn, answer) in enumerate(zip(session.turns, (first, second), strict=True)):
        assert turn.ids == answer.prompt_token_ids
        assert (turn.text, turn.tokens) == (answer.choices[0].message.content, answer.choices[0].token_ids)
        decoding = None if number == 0 else Decoding(temperature=0.7)
        tokens, logp = expected(policy, turn.ids, 7, number, decoding=decoding)  # each turn draws anew
        assert turn.tokens == tokens
        np.testing.assert_allclose(turn.logp, logp, rtol=1e-4, atol=1e-4)
    assert first.choices[0].message.content == other.choices[0].message.content != second.choices[0].message.content


def test_only_a_request_without_a_state_key_has_its_results_searched(recorded, monkeypatch):
    monkeypatch.setattr("hgpo_jax.serving.requests.tool_state", lambda messages: 1 / 0)
    ask(recorded, metadata={"state_key": "here"})


def test_a_place_may_stand_beside_metadata():
    messages = [{"role": "user", "content": "Hi"}]
    fields = {"model": "m", "messages": messages, "state_key": "here", "metadata": {"task_id": "one"}}
    request = ChatCompletions(json.dumps(fields).encode()).request
    assert request.metadata == {"state_key": "here", "task_id": "one"} and not request.ignored


def test_a_stop_string_ends_what_is_recorded(recorded, ended):
    text = ask(recorded, "b").choices[0].message.content
    stop = next(text[at : at + 2] for at in range(9, 30) if text[at : at + 2].isascii())
    reward(recorded, "b", reward=1)
    answer = ask(recorded, "c", stop=stop)
    reward(recorded, "c", reward=1)
    whole, stopped = (session.turns[0].tokens for session in ended)
    assert stopped == answer.choices[0].token_ids == whole[: len(stopped)] != whole


@pytest.mark.parametrize(
    ("ask_for", "message"),
    [
        (lambda c: ask(c, "no space"), "session_id: String should match pattern"),
        (lambda c: ask(c, extra_headers={}, metadata={"session_id": "x" * 101}), "session_id: String should match"),
        (lambda c: ask(c, n=2), "n: 2 answers are no turn of a session"),
        (lambda c: reward(c, "nobody", reward=1), "there is no session 'nobody'"),
        (lambda c: [ask(c), reward(c, reward=1, turn=1)], "turn: session a has 1 turns, counted from 0"),
        (lambda c: [ask(c), reward(c, reward=1, turn=-2)], "turn: session a has 1 turns"),
        (lambda c: [ask(c), reward(c, reward=1, branch=1)], "branch: session a has no branch 1"),
        (lambda c: [ask(c), reward(c, reward=1, branch="0")], "branch: session a has no branch '0'"),
        (lambda c: [ask(c), reward(c, reward=1, branch=0, turn=0)], "a reward goes to a turn or to a branch"),
        (lambda c: [ask(c), reward(c, reward=1, branch=0, success=True)], "success and state go with the session's end"),
        (lambda c: ask(c, metadata={"branch_id": "a b"}), "branch_id: String should match pattern"),
        (lambda c: [ask(c), reward(c, reward=1e39)], "is too large"),
        (lambda c: [ask(c), reward(c, reward=1, turn=0, success=True)], "success and state go with the session's end"),
        (lambda c: [ask(c), reward(c, reward=1, score=1)], "score: this server has no such field"),
        (lambda c: [ask(c), reward(c, reward="x")], "reward"),
        (lambda c: [ask(c), reward(c, reward=1), reward(c, reward=1)], "session a has ended: its last reward has been posted"),
        (lambda c: [ask(c) for _ in range(TURNS + 1)], "session a has had its 2 turns"),
        (lambda c: [ask(c), ask(c), *(reward(c, reward=r, turn=t) for r, t in HUGE)], "is too large"),
        (lambda c: [ask(c), reward(c, reward=1), ask(c)], "session a has ended: its last reward has been posted"),
        (lambda c: ask(c, metadata={"state_key": ["x"]}), "state_key: Input should be a valid string"),
        (lambda c: [ask(c, name) for name in "abcd"], "3 sessions have not ended; post their rewards"),
    ],
)
def test_what_is_refused(recorded, ask_for, message):
    with pytest.raises(openai.APIStatusError) as raised:
        ask_for(recorded)
    assert message in raised.value.message and raised.value.status_code in (400, 404, 429)


def test_numbers_in_metadata_are_texts():
    place = place_of({"x-branch-id": "one"}, {"branch_id": 3, "state_key": 7, "task_id": True, "other": [3]}, opens=False)
    assert place == Place(branch_id="one", state_key="7")


AGAIN = {"X-Stainless-Retry-Count": "1"}


def test_a_reward_that_is_sent_again_counts_once(recorded, ended):
    def post(body, **headers):
        return recorded.post("/sessions/a/reward", body=body, cast_to=object, options={"headers": headers})

    ask(recorded)
    first, key = {"reward": 1, "turn": 0}, {"Idempotency-Key": "k"}
    for headers in ({}, AGAIN, {}, key, key, key | AGAIN):  # three that count
        posted = post(first, **headers)
    assert posted["reward"] == 3 and post({"reward": 2, "turn": 0}, **AGAIN)["reward"] == 5
    ask(recorded)
    assert post({"reward": 2, "turn": 0}, **AGAIN)["reward"] == 5  # that turn is the same for ever
    assert post({"reward": 2, "turn": -1}, **AGAIN)["reward"] == 7  # the last one is another
    last = {"reward": 4, "success": True}
    told = post(last, **{"Idempotency-Key": "z"})
    assert told["ended"] and told == post(last, **{"Idempotency-Key": "z"}) and len(ended) == 1
    with pytest.raises(openai.BadRequestError, match="session a has ended"):
        post(last, **AGAIN, **{"Idempotency-Key": "y"})
    assert sum(turn.reward for turn in ended[0].turns) == told["reward"] == 11


def test_a_reward_that_is_sent_again_is_known_whatever_other_branches_do():
    session = Session("a", 9)
    for name in ("b", "c"):
        session.add(Turn([1], "", [2], [0.0], "x", name=name))
    of_b = RewardRequest(reward=1, branch="b")
    session.post(of_b)
    session.add(Turn([1], "", [2], [0.0], "x", name="c"))
    session.post(RewardRequest(reward=5, branch="c"))
    assert session.has_been_given(of_b, None, True) and not session.has_been_given(of_b, None, False)
    session.add(Turn([1], "", [2], [0.0], "x", name="b"))
    assert not session.has_been_given(of_b, None, True)
    numbered, turn = RewardRequest(reward=1, branch=0), RewardRequest(reward=1, turn=0)  # branches that no request names
    session = Session("a", 9)
    for _ in range(2):
        session.add(Turn([1], "", [2], [0.0], "x"))
    session.post(numbered), session.post(turn)
    session.add(Turn([1], "", [2], [0.0], "x", parent=1))
    assert session.has_been_given(numbered, None, True) and session.has_been_given(turn, None, True)
    session.add(Turn([1], "", [2], [0.0], "x", parent=0))
    assert not session.has_been_given(numbered, None, True) and session.has_been_given(turn, None, True)


def test_the_names_of_so_many_ended_sessions_are_remembered(recorded):
    for name in "abcd":
        ask(recorded, name)
        reward(recorded, name, reward=1)
    with pytest.raises(openai.BadRequestError, match="session b has ended"):
        ask(recorded, "b")
    ask(recorded, "a")  # the fourth last


def test_who_has_read_a_stream_can_ask_again(recorded, ended):
    for session in ("a", "b"):
        for _ in range(TURNS):
            for _chunk in ask(recorded, session, stream=True, max_tokens=2):
                pass
        reward(recorded, session, reward=1)
    assert [len(session.turns) for session in ended] == [TURNS, TURNS]


def test_sessions_without_a_turn_take_no_room(recorded, ended):
    for name in ("a", "b", "c", "d"):
        with pytest.raises(openai.BadRequestError):
            ask(recorded, name, n=2)
    assert reward(recorded, "d", reward=1)["ended"] and not ended[0].turns
    for name in ("e", "f"):
        ask(recorded, name)
    assert len(ask(recorded, "long", max_tokens=RESPONSE).choices[0].token_ids) <= RESPONSE  # the longest answer has room


def test_who_waits_for_an_answer_or_has_played_lately_is_not_forgotten():
    sessions = OpenSessions(TURNS, 1, lambda session: None)
    asked = lambda name: sessions.of("", Place(session_id=name))  # noqa: E731
    full = lambda: pytest.raises(ApiError, match="1 sessions have not ended")  # noqa: E731
    first = asked("a")

    async def waits():
        async with first.in_line(9):
            with full():
                asked("b")

    asyncio.run(waits())
    second = asked("b")
    second.add(Turn([1], "", [2], [-1.0], "text"))
    with full():
        asked("c")
    second._heard -= SILENT
    assert asked("c").name == "c" and len(sessions) == 1 and sessions.abandoned == 1


def test_without_recording_there_are_no_sessions(port, client):
    ask(client)
    status, _, body = raw(port, post(json.dumps({"reward": 1}), "/v1/sessions/a/reward"))
    assert status == 404 and "start it with --record FOLDER" in body


def test_a_session_plays_the_task_that_its_first_request_names(recorded, ended):
    for name, more in {
        "a": {"metadata": {"task_id": "one"}}, "b": {"extra_headers": {"X-Session-Id": "b", "X-Task-Id": "one"}}, "c": {},
    }.items():  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            ask(recorded, name, n=2, metadata={"task_id": "of no turn"})
        ask(recorded, name, text=name, max_tokens=1, **more)
        ask(recorded, name, max_tokens=1, metadata={"task_id": "too late"})
        reward(recorded, name, reward=1)
    assert [session.task for session in ended] == ["one", "one", None]


def test_a_request_without_a_task_leaves_that_of_one_which_is_being_answered():
    sessions = OpenSessions(9, 9, print)

    async def both():
        async with sessions.of("", Place(session_id="a", task_id="one")).in_line(1):
            return sessions.of("", Place(session_id="a")).task

    assert asyncio.run(both()) == "one"


def recording_config(folder):
    fields = ["env.name=agent", "env.max_turns=5", "warm_start=none", f"policy={folder / 'policy'}"]
    return configuration.load(None, fields)


def test_a_state_of_any_length_is_told_from_others():
    """A terminal's output or a page, which had cost the episode its reward."""
    texts = ["x" * 10_000, "x" * 10_001, "x" * 10_001 + "y"]
    posted = [parse(RewardRequest, {"reward": 1, "state": text}).state for text in texts]
    named = [place_of({}, {"state_key": text}, opens=False).state_key for text in texts]
    assert posted == named and len(set(posted)) == 3 and posted[0] == texts[0] and max(map(len, posted)) <= 10_000


def test_who_is_answered_after_a_refusal_is_not_silent():
    async def asks() -> float:
        session = Session("one", 2)
        session._heard -= 1000
        session.overflowed = True
        async with session.in_line(9.0, ""):
            session.overflowed = False  # it has dropped a part of its history
        return session.silent

    assert asyncio.run(asks()) < 500


@pytest.mark.parametrize("error", [None, ApiError(400, "too long"), asyncio.CancelledError()])
def test_a_session_is_silent_from_the_end_of_its_last_request_on(error):
    """Whatever became of that: its program may be about to ask again."""

    async def asks() -> float:
        session = Session("one", 2)
        session._heard -= 1000
        with contextlib.suppress(ApiError, asyncio.CancelledError):
            async with session.in_line(9.0, ""):
                assert session.silent == 0
                if error:
                    raise error
        return session.silent

    assert asyncio.run(asks()) < 500


@pytest.mark.parametrize("what", ["spent", "ended", "overflowed", "refused"])
def test_a_program_that_asks_on_after_a_refusal_is_silent(what):
    """Else one that does so for ever would never be ended."""

    async def asks() -> float:
        session = Session("one", 2)
        session._heard -= 1000
        setattr(session, what, "again" if what == "refused" else True)
        with contextlib.suppress(ApiError):
            async with session.in_line(9.0, ""):
                raise ApiError(400, "no")
        return session.silent

    assert asyncio.run(asks()) > 500


def test_an_answer_at_a_stop_string_is_finished(recorded, policy, ended):
    """Only what its limit has cut is not."""
    text = ask(recorded, session="b").choices[0].message.content
    stop = next(part for part in (text[1:3], text[2:4]) if part.strip() == part and part)
    ask(recorded, stop=[stop])
    ask(recorded, text="More", max_tokens=1)
    for session in ("a", "b"):
        reward(recorded, session=session, reward=0, success=False)
    (session,) = [each for each in ended if each.name == "a"]
    assert [turn.finished for turn in session.turns] == [True, session.turns[1].tokens[-1] in policy.end_tokens]
    empty = Episodes.zeros(1, TURNS, 99, 99, finished=True)
    episodes, report = episodes_of([session], ["g"], np.zeros(1, np.int32), empty, {}, {})
    assert episodes.finished[0, :2].tolist() == [turn.finished for turn in session.turns] and not episodes.finished[0, 2:].any()
    assert report.counts["unfinished"] == 2 - episodes.finished.sum()


def test_prompt_groups_are_those_of_the_recording(policy, tmp_path):
    kept, config = tmp_path / "kept", recording_config(tmp_path)
    for sessions in ([("x", 1), ("y", 1), (None, 1), (None, 2)], [("y", 3), (None, 2), ("z", 1), (None, 1), ("x", 9)]):
        # The second time in another process, as it were.
        with Recording(kept, config, policy.tokenizer) as recording:
            for number, (task, first) in enumerate(sessions):
                recording.add(a_session(f"s{number}", first, task=task))
    first, second = (analysis.load(kept, number) for number in range(2))
    assert first.episodes.groups.tolist() == [0, 1, 2, 3] and second.episodes.groups.tolist() == [1, 3, 4, 2, 0]
    assert np.isfinite(second.estimate("hgpo").advantages).all()


def a_session(name, first, turns=2, task=None):
    """Its first answer ends with the end token, its second could not be used."""
    session = Session(name, 5, task=task)
    for number, (ids, last) in enumerate([([first, 2, 3], END), ([first, 2], 6)][:turns]):
        logp = [-1.0, -2.0, -0.5]
        turn = Turn(ids, f"state {number}", [4, 5, last], logp, "text", reward=float(number), admissible=not number)
        turn.finished = last == END
        session.add(turn)
    if turns == 2:
        session.post(RewardRequest(reward=0, success=True))
    return session


def test_a_recording_is_read_like_a_run(policy, tmp_path):
    kept, config = tmp_path / "kept", recording_config(tmp_path)
    for _ in range(2):  # the second time it goes on, beside a report and what a killed process leaves
        with Recording(kept, config, policy.tokenizer) as recording:
            (kept / "report.html").touch()
            (kept / "config.yaml.partial").touch()
            for number in range(EVERY + 3):
                recording.add(a_session(f"s{number}", number % 3, turns=1 + number % 2))
            recording.add(a_session("empty", 1, turns=0))
    assert [analysis.load(kept, number).episodes.mask.shape[0] for number in range(4)] == [EVERY, 3, EVERY, 3]
    dump = analysis.load(kept, 0)
    e = dump.episodes
    assert e.mask.sum(1).tolist() == [1 + number % 2 for number in range(EVERY)]
    assert (e.groups == np.arange(EVERY) % 3).all()
    assert e.prompts[1, 0].tolist() == [1, 2, 3] and e.prompts[1, 1].tolist() == [1, 2, 0]
    assert e.rewards[1].tolist() == [0, 1] and e.success.tolist() == [bool(number % 2) for number in range(EVERY)]
    assert not e.truncated.any()  # none has asked for more turns than it has
    assert e.invalid[1].tolist() == [False, True]
    assert json.loads((kept / "episodes" / "iteration-00000.json").read_text())["counts"]["unfinished"] == EVERY // 2
    assert dump.observation(1, 1) == "state 1" and dump.goal(1) == "s1"
    assert np.isfinite(dump.estimate("hgpo").advantages).all()
    refused = pytest.raises(ConfigError, match="another server records in it")
    with Recording(kept, config, policy.tokenizer), refused:
        Recording(kept, config, policy.tokenizer)
    other = config.model_copy(update={"seed": 1})
    with pytest.raises(ConfigError, match="was recorded with another policy"):
        Recording(kept, other, policy.tokenizer)
