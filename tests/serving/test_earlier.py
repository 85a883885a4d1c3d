"""Earlier answers in a session's prompts: the ids that were sampled, where the client sends the text back unchanged."""

import pytest

from hgpo_jax.serving.earlier_answers import prompt_ids
from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.sessions import OpenSessions, Turn
from hgpo_jax.serving.text import ServedText
from tests.helpers.chat_tokenizers import tool_tokenizer
from tests.helpers.serving import HELLO, Scripted, client_of, served

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MARKED = "Take <tool> and go."  # sampled as one token, and read as what it spells
CALLED = f'{MARKED}\n<tool_call>\n{{"name": "look", "arguments": {{"at": 1}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture
def asking(policy):
    """A function: the answer to these messages in a session, or in none, after what is given to `say`."""
    tokenizer = tool_tokenizer()  # that shows calls as Qwen2.5's template does
    shown = "{% if m.content %}\n{% endif %}{{ '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}", shown.replace("%}\n{%", "%}{{ '\\n' }}{%")
    )
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
