"""Pictures in requests: what is sampled after them in every dialect, what is read again, and what is refused."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import openai
import pytest
from PIL import Image

from hgpo_jax.policy import Policy, initialize
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.pictures import MAX_PIXELS, PromptPictures
from hgpo_jax.sampling.continuous_batching import SlotSampler
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_plan import SlotRequest
from hgpo_jax.serving.engine import Engine
from hgpo_jax.serving.pictures import decode
from hgpo_jax.serving.sessions import OpenSessions
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.refusals import refused
from tests.helpers.serving import client_of, engine_of, served
from tests.helpers.vision_policy import vision_policy

LENGTH = 8  # of the answers


def picture(seed, height=24, width=16):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def file_of(pixels, form="PNG", **options) -> str:
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, form, **options)
    return base64.b64encode(file.getvalue()).decode()


def url(pixels) -> str:
    return f"data:image/png;base64,{file_of(pixels)}"


ONE, TWO, OTHER = picture(1), picture(2, 16, 40), picture(3)


def chat(*parts):
    """A user's message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def greedily(policy, text, pictures):
    """The likeliest answer, each token by reading all of the prompt: its ids, and the log-probabilities."""
    tokenizer, image = policy.tokenizer, policy.config.vision.image_token_id
    seen, (grids,) = policy.see([pictures])
    counts = iter(int(np.prod(grid)) // 4 for grid in grids)
    ids = [token for i in tokenizer(text).input_ids for token in [i] * (next(counts) if i == image else 1)]
    prompt, logp = len(ids), []
    while len(ids) < prompt + LENGTH and ids[-1] != tokenizer.eos_token_id:
        padded = np.zeros((1, 256), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.array(policy.logits(padded, [len(ids)], seen)[0, len(ids) - 1], np.float64)
        logits[image] = -np.inf
        logp.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(int(logits.argmax()))
    return ids[:prompt], ids[prompt:], logp


@pytest.fixture(scope="module")
def policy():
    return vision_policy()


@pytest.fixture(scope="module")
def engine(policy):
    with engine_of(policy) as engine:
        yield engine


@pytest.fixture(scope="module")
def port(engine, policy):
    with served(engine, policy) as port:
        yield port


def ask(port, messages, **options):
    usual = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": LENGTH,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    return client_of(port).chat.completions.create(messages=messages, **usual | options)


def check(answer, expected):
    prompt, tokens, logp = expected
    (choice,) = answer.choices
    assert answer.model_extra["prompt_token_ids"] == prompt and answer.usage.prompt_tokens == len(prompt)
    assert choice.model_extra["token_ids"] == tokens
    np.testing.assert_allclose([one.logprob for one in choice.logprobs.content], logp, atol=1e-4)


def shown(*parts):
    return "<|im_start|>user\n" + "".join(parts) + "<|im_end|>\n"


IMAGE, ASKS = "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>assistant\n"


def test_an_answer_is_that_of_the_policy_that_reads_the_whole_prompt(port, policy):
    text = shown("Of ", IMAGE, " and ", IMAGE, "which?") + ASKS
    expected = greedily(policy, text, [ONE, TWO])
    check(ask(port, [chat("Of ", ONE, " and ", TWO, "which?")]), expected)
    others = greedily(policy, text, [TWO, ONE])
    assert others[1] != expected[1]  # or pictures would change nothing
    check(ask(port, [chat("Of ", TWO, " and ", ONE, "which?")]), others)


def test_a_conversation_about_a_picture_goes_on_from_what_was_read(port, policy, engine):
    question = "What is in this picture, and what else could be in it?"
    first = ask(port, [chat(ONE, question)])
    said = first.choices[0].message.content
    before = engine._sampler.reused_tokens
    messages = [chat(ONE, question), {"role": "assistant", "content": said}, chat("Are you sure?")]
    text = shown(IMAGE, question) + ASKS + said + "<|im_end|>\n" + shown("Are you sure?") + ASKS
    check(ask(port, messages), greedily(policy, text, [ONE]))
    assert engine._sampler.reused_tokens - before >= len(question)
    # Another picture of the same size is another conversation.
    before = engine._sampler.reused_tokens
    check(ask(port, [chat(OTHER, question), *messages[1:]]), greedily(policy, text, [OTHER]))
    assert engine._sampler.reused_tokens == before
    # What is left of a prompt holds a picture: all of it is read again.
    two = shown(IMAGE, question) + ASKS + said + "<|im_end|>\n" + shown("And here: ", IMAGE) + ASKS
    check(ask(port, [*messages[:2], chat("And here: ", TWO)]), greedily(policy, two, [ONE, TWO]))


def test_text_alone_is_answered_beside_pictures(port, policy):
    for messages, text, pictures in [
        ([chat("Hello")], shown("Hello"), []),
        ([chat("Hello", ONE)], shown("Hello", IMAGE), [ONE]),
    ]:
        answer = ask(port, messages, n=2)
        same = [choice.model_extra["token_ids"] for choice in answer.choices]
        assert same[0] == same[1]
        if pictures:
            assert same[0] == greedily(policy, text + ASKS, pictures)[1]


def test_every_dialect_reads_the_same_prompt(port, policy):
    client = client_of(port)
    expected = len(greedily(policy, shown("Look: ", IMAGE) + ASKS, [ONE])[0])
    assert ask(port, [chat("Look: ", ONE)]).usage.prompt_tokens == expected
    said = ask(port, [chat("Look: ", ONE)]).choices[0].message.content
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url(ONE), "detail": "low"}]
    body = {"model": "tiny", "input": [{"role": "user", "content": parts}]}
    response = client.responses.create(**body, temperature=0, max_output_tokens=LENGTH)
    assert response.usage.input_tokens == expected and response.output_text == said


@pytest.mark.needs("anthropic")
def test_anthropics_client_shows_pictures(port, policy):
    from anthropic import Anthropic

    expected = len(greedily(policy, shown("Look: ", IMAGE) + ASKS, [ONE])[0])
    said = ask(port, [chat("Look: ", ONE)]).choices[0].message.content
    anthropic = Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="any", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": file_of(ONE)}
    message = {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image", "source": source}]}
    same = {"model": "tiny", "messages": [message]}
    assert anthropic.messages.count_tokens(**same).input_tokens == expected
    answer = anthropic.messages.create(**same, max_tokens=LENGTH, extra_body={"temperature": 0})
    assert answer.content[0].text == said
    # A picture among a tool's results, as agents that use a computer send it.
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    counted = anthropic.messages.count_tokens(model="tiny", messages=[message, {"role": "user", "content": [result]}])
    assert counted.input_tokens == expected + len(policy.tokenizer("<|im_start|>tool\n<|im_end|>\n" + IMAGE).input_ids) + 5


def test_other_weights_see_pictures_anew(policy, engine):
    """As in training, where a sampler goes on with the weights of the next iteration."""
    mesh = make_mesh("data=1", jax.devices()[:1])
    others = Policy(policy.config, initialize(policy.config, 4, mesh), policy.tokenizer)
    keys, prepared = jax.random.split(jax.random.key(0), 4), PromptPictures.of([ONE], policy.config.vision)
    with jax.set_mesh(mesh):
        sampler = SlotSampler(engine._sampler._programs, policy.params, keys, None, slots=4, prompt_limit=200, reuse=True)
        for one in (policy, others):
            sampler.use(one.params, keys, None)
            prompt, tokens, logp = greedily(one, shown(IMAGE) + ASKS, [ONE])
            request = SlotRequest(0, 0, prepared.mark(prompt), LENGTH, Decoding(temperature=0.0), pictures=prepared)
            sampler.add([request])
            while not (done := sampler.step()):
                pass
            assert done[0].tokens.tolist() == tokens
            np.testing.assert_allclose(done[0].logp, logp, atol=1e-4)


@pytest.mark.slow
def test_same_on_a_mesh(policy):
    """Two prompts of each part of the devices at a time, with pictures of other sizes."""
    mesh = make_mesh("data=2,fsdp=2", jax.devices()[:4])
    params = initialize(policy.config, 3, mesh)
    with (
        Engine(
            Policy(policy.config, params, policy.tokenizer), mesh, slots=4, prompt_limit=200, response_limit=48, waiting_limit=9
        ) as engine,
        served(engine, policy) as port,
    ):
        asked = [
            ([chat("A", ONE)], [ONE]),
            ([chat("B", TWO, OTHER)], [TWO, OTHER]),
            ([chat("C", TWO)], [TWO]),
            ([chat("D")], []),
        ]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: ask(port, one[0]), asked))
    for answer, (_, pictures), letter in zip(answers, asked, "ABCD", strict=True):
        if pictures:
            check(answer, greedily(policy, shown(letter, *[IMAGE] * len(pictures)) + ASKS, pictures))


def refusal(port, messages) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(port, messages)
    return json.loads(caught.value.response.text)["error"]["message"]


@pytest.mark.parametrize(("address", "said"), [
    ("https://example.org/a.png", "image_url.url: 'https://example.org/a.png' is no picture's data; give"),
    ("file:///etc/passwd", "is no picture's data"),
    ("data:image/png;base64,%%", "messages: picture 1: its data are not base64"),
    ("data:image/png;base64," + file_of(ONE)[:200], "messages: picture 1: its data are no whole picture; give one of PNG"),
    ("data:image/png;base64,", "messages: picture 1: its data are no whole picture"),
    ("data:image/svg+xml;base64,PHN2Zy8+", "messages: picture 1: its data are no whole picture"),
])  # fmt: skip
def test_what_is_no_picture_is_refused(port, address, said):
    assert said in refusal(port, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}])


def test_pictures_in_other_messages_and_too_many_are_refused(port):
    assert refusal(port, [chat("x") | {"role": "system", "content": chat(ONE)["content"]}, chat("x")]).startswith(
        "messages: a message of the system holds no picture"
    )
    assert "hold 65 pictures; send at most 64" in refusal(port, [chat(*[ONE] * 65)])
    assert "maximum context length is 200 tokens" in refusal(port, [chat(*[TWO] * 30)])
    # Pictures beyond the longest prompt are not prepared; the first 21 have 10 features each.
    assert refusal(port, [chat(*[TWO] * 60)]).endswith("is 200 tokens, and the prompt has 210")
    parts = [{"type": "input_image", "image_url": url(TWO)}] * 60
    counted = client_of(port).responses.input_tokens.count(model="tiny", input=[{"role": "user", "content": parts}])
    assert counted.input_tokens > 600


def test_policies_and_templates_without_pictures_refuse_them(engine, policy, request):
    blind = vision_policy(byte_tokenizer().chat_template.replace("m.content", "(m.content if m.content is string else 'a')"))
    with served(engine, blind) as port:
        assert "does not show message 1 of 1" in refusal(port, [chat("x", ONE)])
        assert "its chat template shows 0 of 1 pictures; take that of the published model" in refusal(port, [chat(ONE)])


def test_a_session_takes_no_pictures(engine, policy):
    with served(engine, policy, sessions=OpenSessions(9, 9, print)) as port:
        ask(port, [chat(ONE)])
        with pytest.raises(openai.BadRequestError, match="pictures are not recorded; send them outside a session"):
            ask(port, [chat(ONE)], extra_headers={"X-Session-Id": "a"})


def test_files_of_every_form_are_decoded():
    np.testing.assert_array_equal(decode(file_of(ONE), "x"), ONE)
    np.testing.assert_array_equal(decode(file_of(ONE, "WEBP", lossless=True), "x"), ONE)
    np.testing.assert_array_equal(decode(file_of(ONE[:, :, 0]), "x"), np.repeat(ONE[:, :, :1], 3, -1))
    assert np.abs(decode(file_of(np.full((8, 8, 3), 77, np.uint8), "JPEG"), "x").astype(int) - 77).max() < 3
    # A transparent part is white; a photo is turned as its camera was.
    clear = np.dstack([ONE, np.zeros(ONE.shape[:2], np.uint8)])
    assert (decode(file_of(clear), "x") == 255).all()
    palette = Image.fromarray(ONE).convert("P")
    np.testing.assert_array_equal(decode(file_of(palette), "x"), np.asarray(palette.convert("RGB")))
    exif = Image.Exif()
    exif[0x0112] = 6
    np.testing.assert_array_equal(decode(file_of(ONE, exif=exif), "x"), np.rot90(ONE, -1))


def test_enormous_and_thin_pictures_are_refused(monkeypatch):
    wide = Image.new("1", (MAX_PIXELS // 2**10 + 1, 2**10))
    with refused(f"x: has {wide.width * wide.height:,} pixels; give at most"):
        monkeypatch.setattr("hgpo_jax.serving.pictures.check", None)  # which is for whole pictures: this one is not decoded
        decode(file_of(wide), "x")
    monkeypatch.undo()
    bomb = Image.new("1", (2**15, 2**14))
    with refused("x: has "):
        decode(file_of(bomb), "x")
    with refused("one side may be at most 200 times the other"):
        decode(file_of(np.zeros((1, 300, 3), np.uint8)), "x")
