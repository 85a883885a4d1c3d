"""Answers that are always valid: grammars beside a brute force, and what the vendors' clients get of a policy without sense."""

import json
import queue
from typing import Literal

import jax
import numpy as np
import openai
import pydantic
import pytest
from flax import nnx

from hgpo_jax.policy import Policy, shardings
from hgpo_jax.policy.call_formats import HermesCalls, LlamaCalls
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.answer_forms import MAX_CHARACTERS, AnswerForm, Json
from hgpo_jax.serving.engine import Engine, Generation
from hgpo_jax.serving.grammars import Grammars
from hgpo_jax.serving.sessions import Session, Sessions
from tests.helpers.byte_policy import byte_policy
from tests.helpers.chat_tokenizers import byte_tokenizer, family_tokenizer, tool_tokenizer
from tests.helpers.serving import HELLO, client_of, engine_of, expected, served

pytestmark = pytest.mark.needs("grammar")

PAIR = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "minimum": -99, "maximum": 99}, "b": {"enum": ["x", "yé", None]}},
}  # fmt: skip
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
CLOSED = {"type": "object", "additionalProperties": False}
NODE = CLOSED | {"properties": {"next": {"anyOf": [{"type": "null"}, {"const": 1}]}}, "required": ["next"]}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
TEXT = CLOSED | {"properties": {"t": {"type": "string", "maxLength": 5}}, "required": ["t"]}
SCHEMAS = [PAIR, LIST, TREE, TEXT]
GO = {"type": "function", "function": {"name": "go", "parameters": PAIR, "strict": True}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": TEXT, "strict": True}}


def members(row) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def valid(value, schema) -> bool:
    """What a schema of this file allows, by its rules read one by one."""
    if schema is PAIR:
        a, b = value["a"], value["b"]
        return list(value) == ["a", "b"] and type(a) is int and -99 <= a <= 99 and b in ("x", "yé", None)
    if schema is LIST:
        return 1 <= len(value) <= 3 and all(type(one) is bool for one in value)
    if schema is TREE:
        return list(value) == ["next"] and value["next"] in (None, 1)
    return list(value) == ["t"] and len(value["t"]) <= 5


@pytest.fixture(scope="module")
def policy():
    return with_tokenizer(tool_tokenizer())


def with_tokenizer(tokenizer) -> Policy:
    return Policy(byte_policy().config, byte_policy().params, tokenizer)


@pytest.fixture(scope="module")
def grammars(policy):
    return Grammars(policy.tokenizer, policy.config.vocab_size, policy.end_tokens)


@pytest.fixture(scope="module")
def engine(policy):
    with engine_of(policy, constrains=True, prompt_limit=700, response_limit=200) as engine:
        yield engine


@pytest.fixture(scope="module")
def port(engine, policy, grammars):
    with served(engine, policy, grammars=grammars) as port:
        yield port


@pytest.fixture(scope="module")
def create(port):
    return client_of(port).chat.completions.create


@pytest.mark.parametrize("size", [260, 264, 287, 288, 320])
def test_a_token_is_allowed_if_the_text_with_it_can_become_an_answer(size):
    """The answers of these schemas are few, so all are listed; a token is a byte."""
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, size, [tokenizer.eos_token_id])
    some = {"enum": ["a", "ab", "é", 1, 12]}, ['"a"', '"ab"', '"é"', "1", "12"]
    for schema, answers in (some, ({"type": "null"}, ["null"])):
        every = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for answer in answers]
        for ids in every:
            constraint = grammars.constraint(AnswerForm(json=Json("f", schema)))
            for length in range(len(ids)):
                possible = {other[length] for other in every if other[:length] == ids[:length]}
                assert set(members(constraint.next_set(ids[:length]))) == possible
            assert list(members(constraint.next_set(ids))) == [tokenizer.eos_token_id]  # what follows the end does not matter
            assert not constraint.failure


def test_tokens_of_several_bytes_may_begin_in_one_part_and_end_in_the_next():
    """Of a tokenizer with merges each token is tried by its text alone, in the library's own check of whole texts."""
    import llguidance

    from hgpo_jax.policy.tokenizer import text_tokenizer

    tokenizer = text_tokenizer(["go look at the desk", '{"a": 1, "b": "x"}'])
    size, form = len(tokenizer), AnswerForm(json=Json("f", PAIR))
    constraint = Grammars(tokenizer, size, [tokenizer.eos_token_id]).constraint(form)
    native = llguidance.LLTokenizer(byte_tokenizer().backend_tokenizer.to_str(), eos_token=257)
    vocabulary = byte_tokenizer().get_vocab()
    by_bytes = llguidance.LLMatcher(native, llguidance.LLMatcher.grammar_from_lark(form.lark({})))
    ids = tokenizer('{"a": -1, "b": "x"}').input_ids
    for length in range(len(ids)):
        allowed = set(members(constraint.next_set(ids[:length])))
        for token in range(size):
            if token in tokenizer.all_special_ids:
                assert token not in allowed
                continue
            text = byte_level_ids(tokenizer, [*ids[:length], token], vocabulary)
            assert (by_bytes.validate_tokens(text) == len(text)) == (token in allowed), (length, token)


def byte_level_ids(tokenizer, ids, vocabulary) -> list[int]:
    """The bytes of some tokens, as ids of the byte tokenizer."""
    return [vocabulary[letter] for token in tokenizer.convert_ids_to_tokens(ids) for letter in token]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_answer_obeys_the_schema(create, schema):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    for seed in range(3):
        asked = {"model": "tiny", "messages": HELLO, "response_format": form, "seed": seed, "n": 2}
        choices = create(**asked).choices
        for choice in choices:
            assert choice.finish_reason == "stop" and valid(json.loads(choice.message.content), schema)
    streamed = ["", ""]
    for chunk in create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in choices]


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    where: Literal["here", "there"]


class Pair(Place):
    number: int = pydantic.Field(ge=0, le=999)  # Anthropic's client drops bounds


def test_the_vendors_own_parsers_read_it(port):
    client = client_of(port)
    chat = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pair)
    assert isinstance(chat.choices[0].message.parsed, Pair)
    response = client.responses.parse(model="tiny", input=HELLO, text_format=Pair)
    assert isinstance(response.output_parsed, Pair)
    with client.chat.completions.stream(model="tiny", messages=HELLO, response_format=Pair) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pair)


@pytest.mark.needs("anthropic")
def test_anthropics_client_reads_it(port):
    from tests.serving.test_messages import client_of, streamed

    client = client_of(port)
    parsed = client.messages.parse(model="tiny", messages=HELLO, max_tokens=200, output_format=Place)
    assert isinstance(parsed.parsed_output, Place)
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (GO, LOOK)]
    for choice, names in (({"type": "any"}, ("go", "look")), ({"type": "tool", "name": "go"}, ("go",))):
        choice |= {"disable_parallel_tool_use": True}
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "tools": tools, "tool_choice": choice}
        for message in (client.messages.create(**asked), streamed(client, **asked)[0]):
            (block,) = message.content
            assert message.stop_reason == "tool_use" and block.name in names
            assert valid(block.input, {"go": PAIR, "look": TEXT}[block.name])


A_GO = {"type": "function", "function": {"name": "go"}}


@pytest.mark.parametrize(("choice", "names"), [("required", ("go", "look")), (A_GO, ("go",))])
def test_every_call_obeys_its_tool(create, choice, names):
    asked = {"model": "tiny", "messages": HELLO, "tools": [GO, LOOK], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(4):
        (one,) = create(**asked, seed=seed).choices
        (call,) = one.message.tool_calls
        assert one.finish_reason == "tool_calls" and call.function.name in names
        assert valid(json.loads(call.function.arguments), {"go": PAIR, "look": TEXT}[call.function.name])


def test_responses_tools_obey(port):
    tools = [{"type": "function", **tool["function"]} for tool in (GO, LOOK)]
    asked = {"model": "tiny", "input": HELLO, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (item,) = client_of(port).responses.create(**asked).output
    assert valid(json.loads(item.arguments), {"go": PAIR, "look": TEXT}[item.name])


def test_an_answer_that_is_cut_says_so(create):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": PAIR}}
    (choice,) = create(model="tiny", messages=HELLO, response_format=form, max_tokens=3).choices
    assert choice.finish_reason == "length" and choice.message.content.startswith("{")


def test_json_objects_are_objects(create):
    """Their end is the policy's own, so some are cut; what there is begins one."""
    for seed in range(3):
        (choice,) = create(model="tiny", messages=HELLO, response_format={"type": "json_object"}, seed=seed).choices
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def sampled(engine, asked) -> list[tuple[list[int], list[float]]]:
    """What an engine samples for (prompt, seed, constraint)s that come together; 48 tokens of what is free."""
    told = [queue.Queue() for _ in asked]
    engine.submit([
        Generation(ids, 200 if constraint else 48, Decoding(), seed, 0, news.put, constraint)
        for (ids, seed, constraint), news in zip(asked, told, strict=True)
    ])  # fmt: skip
    whole = []
    for news in told:
        tokens, logp = [], []
        while True:
            progress = news.get(timeout=60)
            assert not progress.error
            tokens, logp = tokens + progress.tokens, logp + progress.logp
            if progress.ended:
                break
        whole.append((tokens, logp))
    return whole


def test_devices_change_nothing(engine, policy, grammars):
    """Two devices, each with its half of the sets."""
    form = AnswerForm(json=Json("f", PAIR))
    asked = lambda: [(policy.tokenizer(f"Say {seed}").input_ids, seed, grammars.constraint(form)) for seed in range(4)]  # noqa: E731
    mesh = make_mesh("data=2", jax.devices()[:2])
    limits = {"slots": 4, "prompt_limit": 64, "response_limit": 200, "waiting_limit": 3}
    placed = jax.device_put(policy.params, shardings(policy.config, mesh))
    with Engine(Policy(policy.config, placed, policy.tokenizer), mesh, **limits, constrains=True) as two:
        answers = sampled(two, asked())
    for (tokens, logp), (right, right_logp) in zip(answers, sampled(engine, asked()), strict=True):
        assert tokens == right and valid(json.loads(policy.tokenizer.decode(tokens[:-1])), PAIR)
        np.testing.assert_allclose(logp, right_logp, atol=1e-5)


def test_others_are_unchanged_and_its_probability_is_among_what_was_allowed(engine, policy, grammars):
    prompts = [policy.tokenizer(text).input_ids for text in ("Hello, you", "Good morning", "Say it")]
    form = AnswerForm(json=Json("f", PAIR))
    free = [(ids, seed, None) for seed, ids in enumerate(prompts)]
    alone = sampled(engine, free)
    with engine_of(policy, programs=engine._sampler._programs, prompt_limit=700, response_limit=200) as plain:
        assert sampled(plain, free) == alone  # to the bit
    *others, (tokens, logp) = sampled(engine, [*free[:2], (prompts[2], 2, grammars.constraint(form))])
    for (ids, seed, _), (other_tokens, other_logp) in zip(free, others, strict=False):
        right, right_logp = expected(policy, ids, seed)
        assert other_tokens == right
        np.testing.assert_allclose(other_logp, right_logp, atol=1e-5)
    assert valid(json.loads(policy.tokenizer.decode(tokens[:-1])), PAIR)
    constraint, model = grammars.constraint(form), nnx.merge(policy.graphdef, policy.params)
    ids = np.array([[*prompts[2], *tokens]], np.int32)
    with jax.set_mesh(make_mesh("data=1", jax.devices()[:1])):
        hidden = model.hidden(ids, np.arange(len(prompts[2]) - 1, ids.shape[1] - 1)[None])
        logits = np.asarray(model.logits(hidden)[0], np.float64)
    for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        allowed = members(constraint.next_set(tokens[:at]))
        assert token in allowed
        among = row[allowed] - row[allowed].max()
        assert logp[at] == pytest.approx(row[token] - row[allowed].max() - np.log(np.exp(among).sum()), abs=1e-4)


@pytest.mark.parametrize(("schema", "why"), [
    ({"type": "banana"}, "Invalid type: banana"), ({"type": "string", "format": "banana"}, "Unknown format: banana"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"), ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
    ({"enum": ["x" * MAX_CHARACTERS]}, "characters"), ({"$ref": "http://127.0.0.1/x"}, ""), ({"$ref": "#/nowhere"}, ""),
    ({"minimum": 5, "maximum": 3, "type": "integer"}, "Unsatisfiable"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_a_line(create, schema, why):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="tiny", messages=HELLO, response_format=form)
    message = refused.value.body["message"]
    assert message.startswith("response_format: ") and why in message and "\n" not in message and len(message) < 400
    if schema.get("type") not in ("banana", "array"):
        return  # too long to be shown, or left out where it is optional
    with pytest.raises(openai.BadRequestError, match="tools: go: "):
        tool = {"name": "go", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}
        create(model="tiny", messages=HELLO, tools=[{"type": "function", "function": tool}], tool_choice="required")


UNIQUE = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}


def test_of_a_schema_that_is_not_strict_what_can_be_is_enforced(create, port):
    form, responses = {"name": "it", "schema": UNIQUE, "strict": False}, client_of(port).responses.create
    for seed in range(2):
        asked = {"response_format": {"type": "json_schema", "json_schema": form}, "seed": seed}
        (choice,) = create(model="tiny", messages=HELLO, **asked).choices
        assert valid(json.loads(choice.message.content), LIST)
    asked = {"model": "tiny", "input": HELLO, "text": {"format": {"type": "json_schema"} | form}}
    assert valid(json.loads(responses(**asked).output_text), LIST)
    for strict in ({"strict": True}, {"strict": None}):
        with pytest.raises(openai.BadRequestError, match=r"text.format: .*Unimplemented keys"):
            responses(**asked | {"text": {"format": asked["text"]["format"] | strict}})


def test_a_deep_schema_is_refused(create):
    schema = {"type": "integer"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "name": "n"}}
    with pytest.raises(openai.BadRequestError, match="100 levels"):
        create(model="tiny", messages=HELLO, response_format=form)


def accepts(constraint, ids, end) -> bool:
    """Whether a response may be these tokens and then the end."""
    return all(token in members(constraint.next_set(ids[:at])) for at, token in enumerate([*ids, end]))


def test_an_answer_begins_behind_the_thought():
    for name, thought in (("qwen3-thinking", "begun"), ("smollm3", "possible"), ("r1-distill", "begun")):
        tokenizer = family_tokenizer(name)
        grammars = Grammars(tokenizer, 272, [tokenizer.eos_token_id])
        json_form, call = AnswerForm(thought, Json("f", PAIR)), '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
        strict = AnswerForm(thought, None, HermesCalls([GO]), {"go": Json("t", {"type": "object"})}, several=True)
        begin = "<think>" * (thought == "possible")
        for form, text, right in (
            (json_form, f'{begin}I {{ do.</think>\n\n{{"a": 1, "b": "x"}}', True), (json_form, f"{begin}I do", False),
            (json_form, f"{begin}I do.</think> Hm.", False), (json_form, '{"a": 1, "b": "x"}', thought == "possible"),
            (strict, f"{begin}<tool_call>?</think>{call}\n{call}", True),
            (strict, f"{begin}</think>Hm. {call}", True),
            (strict, f"{begin}</think>Hm. <tool_call>?", False), (strict, f"{begin}</think>Hm.", True),
        ):  # fmt: skip
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert accepts(grammars.constraint(form), ids, tokenizer.eos_token_id) == right, (name, text)


def test_llamas_calls_and_json():
    tokenizer, tools = byte_tokenizer(), [GO, LOOK]
    grammars, end = Grammars(tokenizer, 264, [tokenizer.eos_token_id]), tokenizer.eos_token_id
    arguments = {"go": Json("t", PAIR), "look": Json("t", TEXT)}
    both = AnswerForm(json=Json("f", PAIR), calls=LlamaCalls(tools), arguments=arguments)
    begun = AnswerForm(calls=LlamaCalls(tools), arguments=arguments, begun='{"name": "')
    for form, text, right in (
        (both, '{"name": "look", "parameters": {"t": "a"}}', True),
        (both, '{"a": 1, "b": null}', True), (both, '{"t": "a"}', False),
        (begun, 'go", "parameters": {"a": 1,"b": "x"}}', True), (begun, 'go", "parameters": {"t": "a"}}', False),
    ):  # fmt: skip
        assert accepts(grammars.constraint(form), tokenizer(text).input_ids, end) == right, text


def test_thoughts_are_not_in_json_that_clients_read(engine, policy, grammars, monkeypatch):
    """The server's own path, with the answer written."""
    tokenizer = tool_tokenizer()
    tokenizer.chat_template += "{{ '<think>\\n' }}"
    from tests.helpers.serving import Scripted

    scripted = Scripted(tokenizer, lambda _: 'Hm.</think>\n\n{"a": 1}')
    with served(scripted, with_tokenizer(tokenizer), grammars=grammars) as port:
        asked = {"model": "tiny", "messages": HELLO, "response_format": {"type": "json_object"}}
        create = client_of(port).chat.completions.create
        assert create(**asked).choices[0].message.content == '{"a": 1}'
        assert "".join(chunk.choices[0].delta.content or "" for chunk in create(**asked, stream=True)) == '{"a": 1}'


def test_a_strict_tool_is_strict_where_a_call_is_the_policys_choice(create, port):
    """Only Hermes' form can tell: this template's."""
    raw = client_of(port).chat.completions.with_raw_response.create(model="tiny", messages=HELLO, tools=[GO])
    assert "X-Ignored" not in raw.headers


def test_a_call_that_a_policy_chooses_has_the_tools_arguments(policy, grammars):
    """Text is free until a call begins; of the two values only the one in the tool's bounds can be finished."""
    tool, encode = GO["function"], lambda text: policy.tokenizer(text).input_ids
    calls, arguments = HermesCalls([GO]), {"go": Json("tools: go", tool["parameters"], strict=True)}
    free = grammars.constraint(AnswerForm(calls=calls, arguments=arguments))
    begun = 'Well. <tool_call>\n{"name": "go", "arguments": {"a": '
    allowed = lambda text: {policy.tokenizer.decode([token]) for token in members(free.next_set(encode(text)))}  # noqa: E731
    assert {"W", "<", "{"} <= allowed("")
    assert {"-", "1", "9"} <= allowed(begun) and not {"x", '"', "{"} & allowed(begun)
    assert {",", "0"} <= allowed(begun + "9") and "0" not in allowed(begun + "99")


def test_in_training_it_is_refused_and_said(engine, policy):
    from hgpo_jax.serving.agent_rollout import NOT_LEARNED

    session = Session("key", 2, Decoding(), np.asarray(jax.random.key_data(jax.random.key(0))))
    with served(engine, policy, sessions=Sessions([session]), grammars=NOT_LEARNED) as port:
        create = client_of(port, "key").chat.completions.create
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": PAIR}}
        with pytest.raises(openai.BadRequestError, match="not learned from"):
            create(model="tiny", messages=HELLO, response_format=form)
        assert session.refused.startswith("response_format: ") and not session.turns
        create(model="tiny", messages=HELLO, tools=[GO], max_tokens=2)  # strictness alone is a wish
        assert len(session.turns) == 1 and not session.refused  # the program went on
