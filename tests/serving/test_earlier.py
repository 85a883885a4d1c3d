"""Earlier answers in a session's prompts: the ids that were sampled, where the client sends the text back unchanged."""

import re

import pytest
from tokenizers import AddedToken

from hgpo_jax.serving.branches import parent_of, prompt_ids
from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.sessions import OpenSessions, Turn
from hgpo_jax.serving.text import ServedText
from tests.helpers.chat_tokenizers import calling_tokenizer, tool_tokenizer
from tests.helpers.serving import HELLO, Scripted, client_of, served

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MARKED = "Take <tool> and go."  # sampled as one token, and read as what it spells
CALLED = f'{MARKED}\n<tool_call>\n{{"name": "look", "arguments": {{"at": 1}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture
def asking(policy):
    """A function: the answer to these messages in a session, or in none, after what is given to `say`."""
    tokenizer = calling_tokenizer("hermes")
    engine = Scripted(tokenizer, lambda _: said[0])
    said = [""]

    def ask(text, messages, session="a", **more):
        said[0] = text
        headers = {"X-Session-Id": session} if session else {}
        asked = {"model": "tiny", "messages": messages, "tools": [LOOK], "extra_headers": headers}
        return client.chat.completions.create(**asked, extra_body={"return_token_ids": True}, **more)

    ask.tokenizer = tokenizer
    with served(engine, type(policy)(policy.config, policy.params, tokenizer), sessions=OpenSessions(9, 9, print)) as port:
        client = client_of(port)
        yield ask


@pytest.mark.parametrize(
    ("said", "more", "change", "kept"),
    [
        (MARKED, {}, {}, True), ("plain", {}, {}, True), ("", {}, {}, True),
        (MARKED, {}, {"content": MARKED + " "}, False),
        (MARKED, {"stop": "go"}, {}, False),  # what was sampled goes on behind the text
        (MARKED + "<|im_start|>", {}, {}, False),  # a special token, which the text does not show
        (CALLED, {}, {}, True), (CALLED.replace('": 1', '":1'), {}, {}, False),  # which the template would write otherwise
        (CALLED, {}, {"content": "Go."}, False), (CALLED, {}, {"tool_calls": None}, False),
        (CALLED.removesuffix("\n</tool_call>"), {}, {}, False),  # the template closes it
        (' {"at": "b"}}\n</tool_call>', {"tool_choice": NAMED}, {}, True),
    ],
)  # fmt: skip
def test_a_prompt_goes_on_from_what_was_sampled(asking, said, more, change, kept):
    first = asking(said, HELLO, **more)
    message = first.choices[0].message.model_dump() | change
    after = [*HELLO, message, {"role": "user", "content": "And?"}]
    second, without = asking("x", after), asking("x", after, session=None)
    sampled = first.prompt_token_ids + first.choices[0].token_ids
    assert (second.prompt_token_ids[: len(sampled)] == sampled) == kept
    assert kept or second.prompt_token_ids == without.prompt_token_ids
    if kept:  # and the text is the same
        assert asking.tokenizer.decode(second.prompt_token_ids) == asking.tokenizer.decode(without.prompt_token_ids)


def test_each_answer_keeps_its_own_ids():
    """Equal texts that were sampled in different ids, and an answer that the client has left out."""
    texts = ServedText(tool_tokenizer())
    ways = texts.tags(MARKED), texts.prompt(MARKED)
    said = [{"role": "assistant", "content": MARKED}, {"role": "user", "content": "And?"}]
    for first, second in (ways, ways[::-1]):
        turns = [Turn([], "", ids, [], text) for ids, text in ((first, MARKED), (texts.prompt("no"), "no"), (second, MARKED))]
        ids = prompt_ids(texts, Conversation([*HELLO, *said, *said]), "", turns)
        assert ids == texts.conversation([*HELLO, *said, *said], sampled={1: first, 3: second})
        assert len(ids) == len(prompt_ids(texts, Conversation([*HELLO, *said, *said]), "", [])) + len(ways[0]) - len(ways[1])


def test_a_thought_that_the_prompt_has_begun_keeps_its_ids():
    """Where the template shows earlier thoughts; the client sends back what it was told."""
    tokenizer = calling_tokenizer("hermes")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    texts = ServedText(tokenizer)
    ids, opened = texts.tags(f"Hm.</think>{MARKED}"), texts.opened_thought(None)
    turn = Turn([], "", ids, [], texts.decode(ids), beginning=opened, messages=HELLO, parser=texts.parser([], "", None))
    said = {"role": "assistant", "content": f"<think>\nHm.</think>{MARKED}"}
    conversation = Conversation([*HELLO, said, {"role": "user", "content": "And?"}], [])
    assert parent_of(conversation, [turn], "") == 0
    first = texts.conversation(HELLO) + ids
    assert prompt_ids(texts, conversation, "", [turn])[: len(first)] == first
    assert prompt_ids(texts, conversation, "", [])[: len(first)] != first


JSON, XML = '{"name": "look", "%s": {"at": "a  b"}}', "\n<parameter=at>\na  b\n</parameter>\n</function>\n</tool_call>"
HERMES, LLAMA = f"<tool_call>\n{JSON % 'arguments'}\n</tool_call>", JSON % "parameters"
CODER = f"<tool_call>\n<function=look>{XML}"


@pytest.mark.parametrize(
    ("form", "said", "call", "kept"),
    [
        ("hermes", HERMES, None, True), ("hermes", f"So:\n{HERMES}\n{HERMES}", None, True),
        ("llama", LLAMA, None, True), ("llama", ' {"at": "a  b"}}', "look", True),
        ("llama", 'look", "parameters": {"at": "a  b"}}', "", True),
        ("llama", LLAMA.replace(": ", ":"), None, False), ("llama", f"<|python_tag|>{LLAMA}", None, False),
        ("qwen-coder", CODER, None, True), ("qwen-coder", f"So:\n\n{CODER}\n{CODER}", None, True),
        ("qwen-coder", XML[1:], "look", True), ("qwen-coder", f"=look>{XML}", "", True),
        ("qwen-coder", CODER.replace("\na  b\n", "a  b"), None, False),
    ],
)  # fmt: skip
def test_calls_of_every_family_keep_their_ids(form, said, call, kept):
    """A call that was sampled as a template shows it keeps its ids; the templates are stand-ins of ours."""
    tokenizer = calling_tokenizer(form)
    tokenizer.add_tokens([AddedToken("  ", normalized=False)])
    texts = ServedText(tokenizer)
    beginning = texts.call_beginning([LOOK], call)
    ids = [index for character in re.split(r"(<\|python_tag\|>|)", said) if character for index in texts.tags(character)]
    parser = texts.parser([LOOK], beginning, None)
    turn = Turn([], "", ids, [], texts.decode(ids), beginning=beginning, parser=parser)
    assert ids != texts.tags(said)
    answer = parser.parse(beginning + turn.text)
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": "a  b"}}} for _ in range(said.count("a  b"))]
    assert [one._asdict() for one in answer.calls] == [one["function"] for one in calls]
    message = {"role": "assistant", "content": answer.content, "tool_calls": calls}
    conversation = Conversation([*HELLO, message, {"role": "tool", "content": "A desk."}], [LOOK])
    prompt, without = (prompt_ids(texts, conversation, "", turns) for turns in ([turn], []))
    first = texts.conversation(HELLO, [LOOK], beginning)
    assert tokenizer.decode(prompt) == tokenizer.decode(without)
    assert (prompt[: len(first) + len(ids)] == first + ids) == (prompt != without) == kept
