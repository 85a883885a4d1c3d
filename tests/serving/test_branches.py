"""The branches of a session: which turn a request goes on from, what runs at the same time, and whose reward is whose."""

import json
import secrets

import openai
import pytest

from hgpo_jax import analysis
from hgpo_jax import config as configuration
from hgpo_jax.rollout.result import RolloutReport
from hgpo_jax.serving.branches import parent_of, path, prompt_ids
from hgpo_jax.serving.recording import Recording
from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.sessions import OpenSessions, RewardRequest, Session, Turn
from hgpo_jax.serving.text import ServedText
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.chat_tokenizers import calling_tokenizer, tool_tokenizer
from tests.helpers.serving import Scripted, client_of, in_thread, served, wait_until


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


MAIN = [system("You plan."), user("Tidy up.")]
SUB = [system("You search."), user("Where is the cup?")]
LOOK = [*MAIN, answer("Look."), user("A room.")]
GO = [*LOOK, answer("Go."), user("A wall.")]


class Numbered(Scripted):
    """Notes the number that each prompt's samples depend on. With `hold`, a prompt is answered when `go` says its text."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, lambda _: "Look.")
        self.numbers, self.hold, self.held = {}, False, {}

    def submit(self, generations):
        (generation,) = generations
        prompt = self.tokenizer.decode(generation.ids)
        self.numbers[prompt] = generation.number
        if self.hold:
            self.held[prompt] = lambda: Scripted.submit(self, generations)
        else:
            super().submit(generations)

    def go(self, text):
        wait_until(lambda: any(text in prompt for prompt in self.held))
        self.held.pop(next(prompt for prompt in self.held if text in prompt))()


class Played:
    """The session `name` of a server; `turns` shows (branch, parent) of each. ended: of all tests, those that have ended."""

    def __init__(self, server, engine, name):
        self.client, self.sessions, self.ended, self.engine, self.name = *server, engine, name

    def ask(self, messages, text="Look.", branch=None, **more):
        self.engine.write = lambda _: text
        headers = {"X-Session-Id": self.name} | ({"X-Branch-Id": branch} if branch else {})
        asked = {"model": "tiny", "messages": messages, "extra_headers": headers} | more
        return self.client.chat.completions.create(**asked).choices[0].message.content

    def reward(self, **body):
        return self.client.post(f"/sessions/{self.name}/reward", body=body, cast_to=object)

    @property
    def session(self):
        return self.sessions._by_name[self.name]

    @property
    def turns(self):
        return [(turn.branch, turn.parent) for turn in self.session.turns]


@pytest.fixture(scope="module")
def server(policy):
    """A client, the sessions and those that have ended, of a server, after its engine."""
    tokenizer, ended = tool_tokenizer(), []
    engine, sessions = Numbered(tokenizer), OpenSessions(6, 99, ended.append)
    with served(engine, type(policy)(policy.config, policy.params, tokenizer), sessions=sessions) as port:
        yield engine, (client_of(port), sessions, ended)


@pytest.fixture
def play(server, monkeypatch):
    engine, rest = server
    engine.numbers, engine.hold, engine.held = {}, False, {}
    monkeypatch.setattr(engine, "submit", engine.submit)
    return Played(rest, engine, secrets.token_hex(4))


@pytest.mark.parametrize(
    ("asked", "turns"),
    [
        ([MAIN, LOOK, GO], [(0, None), (0, 0), (0, 1)]),
        ([MAIN, SUB, LOOK], [(0, None), (1, None), (0, 0)]),  # another agent in between
        ([MAIN, LOOK, GO, LOOK], [(0, None), (0, 0), (0, 1), (1, 0)]),  # once more from an earlier point
        ([MAIN, LOOK, [*MAIN, user("So far: a room.")]], [(0, None), (0, 0), (1, None)]),  # a compacted history
        ([MAIN, [*MAIN, answer("Look!"), user("A room.")]], [(0, None), (1, None)]),  # another answer than was sampled
        ([MAIN, [*MAIN, answer("\nLook. "), user("A room.")]], [(0, None), (0, 0)]),
        ([MAIN, MAIN, LOOK], [(0, None), (0, 0), (0, 1)]),  # equal ones: the later
        ([[user("A room.")], [user("A wall; before: a room.")], SUB], [(0, None), (0, 0), (1, None)]),  # history in a message
        ([MAIN, SUB, [*MAIN[:1], user("Tidy up; seen: a room.")]], [(0, None), (1, None), (0, 0)]),
    ],
)  # fmt: skip
def test_a_request_continues_a_conversation_or_opens_a_branch(play, asked, turns):
    for messages in asked:
        play.ask(messages, "Go." if messages == LOOK else "Look.")
    assert play.turns == turns


def test_a_named_branch_is_one_whatever_its_requests_hold(play):
    for messages, branch in ((MAIN, None), (LOOK, "b"), (SUB, "b"), (LOOK, None), (SUB, "c")):
        play.ask(messages, branch=branch)
    assert play.turns == [(0, None), (1, 0), (1, 1), (0, 0), (2, None)]
    play.ask(SUB, extra_headers={}, metadata={"session_id": play.name, "branch_id": "c"})
    assert play.turns[-1] == (2, 4)


def test_named_branches_are_answered_at_the_same_time_with_the_same_samples(play):
    """Whichever is answered first; requests of one name wait for each other."""
    numbers = []
    for order in (("one", "other", "more"), ("other", "one", "more"), ("one", "more", "other")):
        play.name = secrets.token_hex(4)
        play.ask(MAIN)
        play.engine.hold, answers = True, {}
        for text, branch in (("one", "b"), ("other", "c"), ("more", "b")):
            answers[text] = in_thread(lambda text=text, branch=branch: play.ask([user(text)], branch=branch))
            wait_until(lambda: len(play.session._in_line) == len(answers))  # noqa: B023
        wait_until(lambda: len(play.engine.held) == 2)
        for text in order:
            play.engine.go(text)
            assert answers[text]() == "Look."
        play.engine.hold = False
        play.ask(LOOK)
        assert play.turns[0] == (0, None) and play.turns[-1] == (0, 0)
        numbers.append(play.engine.numbers.copy())
        play.reward(reward=1)
    assert numbers[0] == numbers[1] == numbers[2] and len(set(numbers[0].values())) == 5
    assert [number for prompt, number in numbers[0].items() if "You plan." in prompt] == [0, 1]  # as without them
    assert max(numbers[0].values()) < 2**31


def test_the_end_waits_for_every_branch(play):
    play.engine.hold = True
    calls = [lambda name=name: play.ask([user(name)], branch=name) for name in "bcd"]
    calls.insert(2, lambda: play.reward(reward=1)["turns"])
    results = []
    for call in calls:
        results.append(in_thread(call))
        wait_until(lambda: play.name in play.sessions._by_name and len(play.session._in_line) == len(results))
    for name in "cb":
        play.engine.go(name)
    assert [result() for result in results[:3]] == ["Look.", "Look.", 2]
    assert f"session {play.name} has ended" in results[3]() and len(play.ended[-1].turns) == 2


def test_a_reward_by_number_waits_for_its_own_branch(play):
    play.ask(MAIN)
    play.ask([user("b")], branch="b")
    play.engine.hold = True
    answers = in_thread(lambda: play.ask([user("b")], branch="b"))
    wait_until(lambda: play.engine.held)
    assert in_thread(lambda: play.reward(reward=1, turn=0)["turns"])() == 2
    assert in_thread(lambda: play.reward(reward=2, branch=0)["turns"])() == 2
    places = {"turn": 1}, {"branch": 1}, {"turn": -1}
    waiting = [in_thread(lambda place=place: play.reward(reward=0, **place)["turns"]) for place in places]
    wait_until(lambda: len(play.session._in_line) == 4)
    play.engine.go("b")
    assert answers() == "Look." and [result() for result in waiting] == [3, 3, 3]
    assert [turn.reward for turn in play.session.turns] == [3, 0, 0]


def test_branches_together_have_no_more_turns_than_a_session_may(play):
    for _ in range(5):
        play.ask(MAIN)
    play.engine.hold = True
    last = in_thread(lambda: play.ask([user("b")], branch="b"))
    wait_until(lambda: play.engine.held)
    assert "has had its 6 turns" in in_thread(lambda: play.ask([user("c")], branch="c"))()
    play.engine.go("b")
    assert last() == "Look." and len(play.session.turns) == 6


def test_a_branch_that_was_left_has_had_no_turn(play):
    with pytest.raises(openai.BadRequestError):
        play.ask(MAIN, branch="b", n=2)
    play.engine.submit = lambda _: (_ for _ in ()).throw(RuntimeError("no room"))
    with pytest.raises(openai.InternalServerError):
        play.ask(MAIN, branch="b")
    assert play.session.sampling == 0 and not play.session.branches


def test_a_reward_goes_to_the_end_of_a_branch(play):
    for messages, branch in ((MAIN, None), (SUB, "search"), (SUB, "search"), (LOOK, None)):
        play.ask(messages, branch=branch)
    play.reward(reward=1, branch="search")
    assert play.reward(reward=2, branch=1, admissible=False)["branches"] == 2
    play.reward(reward=4, branch=0)
    assert play.reward(reward=8)["ended"]
    session = play.ended[-1]
    assert [turn.reward for turn in session.turns] == [0, 0, 3, 12]
    assert [turn.admissible for turn in session.turns] == [True, True, False, True]


def test_a_second_try_belongs_to_its_branch(play):
    for branch in ("b", "c"):
        play.ask(SUB, f"I am {branch}.", branch=branch)
    again = {"X-Stainless-Retry-Count": "1"}
    for branch in ("b", "c"):
        headers = {"X-Session-Id": play.name, "X-Branch-Id": branch} | again
        assert play.ask(SUB, "another", extra_headers=headers) == f"I am {branch}."
    assert len(play.turns) == 2


def a_turn(messages, text, parent=None, ids=(1,), **more):
    return Turn([1], "state", list(ids), [-1.0] * len(ids), text, messages=messages, parent=parent, **more)


def test_an_answer_without_its_thought_and_a_call_are_that_turns():
    texts = ServedText(calling_tokenizer("hermes"))
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    called = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    other = {"type": "function", "function": {"name": "look", "arguments": {"at": 2}}}
    for said, message, same in (
        ("<think>So.</think>\n\nLook.", answer("Look."), True),
        ("<think>So.</think>\n\nLook.", answer("Go."), False),
        (f"Look.\n{call}", answer("Look.") | {"tool_calls": [called]}, True),
        (f"Look.\n{call}\n{call}", answer("Look.") | {"tool_calls": [called]}, True),  # with parallel_tool_calls=false
        (f"Look.\n{call}", answer("Look.") | {"tool_calls": [other]}, False),
        (f"Look.\n{call}", answer("Look."), False),
        ("Look.", answer("Look.") | {"tool_calls": [called]}, False),
    ):
        conversation = Conversation([*MAIN, message, user("A room.")], [look])
        turn = a_turn(MAIN, said, parser=texts.parser([look], "", None))
        assert parent_of(conversation, [turn], "") == (0 if same else None), (said, message)


def test_a_turn_without_tools_goes_on_from_one_that_called_some(play):
    """As agents end: with `tool_choice: none`, or without the tools; and as one agent hands over to another with its own."""
    look, go = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "go"))
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    after = [*MAIN, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "1", "content": "A cup."}]
    for more in ({"tools": [look], "tool_choice": "none"}, {}, {"tools": [go]}):
        play.name = secrets.token_hex(4)
        play.ask(MAIN, call, tools=[look])
        play.ask(after, "Done.", **more)
        assert play.turns == [(0, None), (0, 0)]


def test_what_two_agents_say_alike_keeps_the_ids_of_its_own_branch():
    """One began before the other, which does not go on from it."""
    texts, said = ServedText(tool_tokenizer()), "Take <tool> and go."
    one, other = texts.tags(said), texts.prompt(said)
    turns = [a_turn(MAIN, said, ids=one), a_turn(SUB, said, ids=other)]
    after = Conversation([*SUB, answer(said), user("And?")])
    parent = parent_of(after, turns, "")
    assert parent == 1
    assert prompt_ids(texts, after, "", path(turns, parent)) == texts.conversation(after.messages, sampled={2: other})


def test_system_messages_are_joined_where_the_template_takes_one():
    """DeepSeek-R1's shows the last one alone, Qwen3.5's refuses a second; OpenAI's clients send two."""
    tokenizer = tool_tokenizer()
    shown = tokenizer.chat_template
    messages = [system("Be brief."), system("You plan."), user("Tidy up.")]
    joined, said = [system("Be brief.\n\nYou plan."), user("Tidy up.")], [answer("Take <tool>."), user("And?")]
    assert ServedText(tokenizer).conversation(messages) != ServedText(tokenizer).conversation(joined)
    each = "{% for m in messages %}{% if m.role == 'system' CONDITION %}DO{% endif %}{% endfor %}"
    refuses = each.replace("CONDITION", "and not loop.first").replace("DO", "{{ raise_exception('one') }}")
    last = each.replace("CONDITION", "").replace("DO", "{% set n.s = m.content %}")
    last = "{% set n = namespace(s='') %}" + last + "{{ n.s }}"
    without = shown.replace("in messages", "in messages if m.role != 'system'")
    for template in (refuses + shown, last + without):
        tokenizer.chat_template = template
        texts = ServedText(tokenizer)
        ids = texts.tags("Take <tool>.")
        for more, at in (([], None), (said, 3)):
            sampled = {at: ids} if at else {}
            expected = texts.conversation([*joined, *more], sampled={place - 1: ids for place in sampled})
            assert texts.conversation([*messages, *more], sampled=sampled) == expected
        with pytest.raises(ValueError, match="chat template"):
            texts.conversation([system("Be brief."), user("Tidy up."), system("You plan."), user("Go.")])


def test_an_answer_keeps_the_ids_of_its_own_path():
    """Two branches say the same in different ids; without a parent an answer of any turn does."""
    texts = ServedText(tool_tokenizer())
    said = "Take <tool> and go."
    one, other = texts.tags(said), texts.prompt(said)
    turns = [a_turn(MAIN, "Look.", ids=[]), a_turn(SUB, said, ids=one), a_turn(LOOK, said, 0, ids=other)]
    after = Conversation([*LOOK, answer(said), user("And?")])
    parent = parent_of(after, turns, "")
    assert parent == 2 and path(turns, parent) == [turns[0], turns[2]]
    for seen, ids in ((path(turns, parent), other), (turns[:2], one)):
        assert prompt_ids(texts, after, "", seen) == texts.conversation(after.messages, sampled={4: ids})


def test_an_answer_keeps_its_ids_where_a_branch_with_another_system_prompt_shows_it():
    """The second prompt begins anew and shows the first one's answer; the third extends it."""
    texts, said = ServedText(tool_tokenizer()), "Take <tool> and go."
    first, ids = [system("You plan."), user("Tidy up.")], texts.tags(said)
    second = [system("You go on."), *first[1:], answer(said), user("And?")]
    third = [*second, answer("Look."), user("A room.")]
    turns, prompts = [], []
    for messages, text in ((first, said), (second, "Look."), (third, "")):
        parent = parent_of(Conversation(messages), turns, "")
        seen = turns if parent is None else path(turns, parent)
        prompts.append(prompt_ids(texts, Conversation(messages), "", seen))
        turns.append(a_turn(messages, text, parent, texts.tags(text)))
    assert [turn.parent for turn in turns] == [None, None, 1]
    begin = prompts[1] + texts.tags("Look.")
    assert prompts[2][: len(begin)] == begin and ids != texts.prompt(said)


def test_a_recording_shows_the_tree(policy, tmp_path):
    config = configuration.load(None, ["env.name=agent", "env.max_turns=5", "warm_start=none", f"policy={tmp_path / 'policy'}"])
    tree, line = Session("tree", 9), Session("line", 9)
    for parent in (None, 0, 0, None, 1):
        tree.add(a_turn(MAIN, "Look.", parent))
    line.add(a_turn(MAIN, "Look."))
    with Recording(tmp_path, config, policy.tokenizer) as recording:
        for session in (tree, line):
            session.post(RewardRequest(reward=1))
            recording.add(session)
    dump = analysis.load(tmp_path)
    assert dump.report["branches"] == [[0, 0, 1, 2, 0], [0]] and dump.report["parents"] == [[None, 0, 0, None, 1], [None]]
    assert dump.report["counts"]["branches"] == 2
    marks = ["branch 0", "branch 0", "branch 1 from turn 0", "branch 2", "branch 0"]
    assert [dump.mark(0, turn) for turn in range(5)] == marks and dump.mark(1, 0) == ""
    assert [line.strip() for line in dump.transcript(0).splitlines() if " > " in line] == [f"{mark} > Look." for mark in marks]
    file = tmp_path / "episodes" / "iteration-00000.json"
    report = RolloutReport(**json.loads(file.read_text()))
    assert "    branch 1 from turn 0 > Look." in report.story(dump.episodes, 0, ("agent",)).text()
    table = analysis.steps_table(dump, dump.estimate("grpo"))
    assert table["branch"].tolist() == [0, 0, 1, 2, 0, 0] and table["parent"].tolist() == [-1, 0, 0, -1, 1, -1]
    content = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in content.items() if name not in ("branches", "parents")}))
    before = analysis.load(tmp_path)  # as it was written before there were branches
    assert before.mark(0, 2) == "" and "branch" not in analysis.steps_table(before, before.estimate("grpo"))
    file.write_text(json.dumps(content | {"branches": [[0], [0]]}))
    with pytest.raises(ConfigError, match="do not fit"):
        analysis.load(tmp_path)
