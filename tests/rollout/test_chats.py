"""Prompts that are chats: each begins with the last one and its answer, by ids, until the oldest turns are dropped."""

import numpy as np
import pytest

import hgpo_jax
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.tokenizer import text_tokenizer
from hgpo_jax.rollout.chat_prompts import TEMPLATES, ChatFormat
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.workers import EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse
from tests.helpers.chat_tokenizers import CHATML, FAMILIES, byte_tokenizer, family_tokenizer
from tests.helpers.glossary import unexplained

TOKENIZER = byte_tokenizer()
TOOL = TOKENIZER.convert_tokens_to_ids("<tool>")  # spelled in a text it is other ids
TURNS, R = 6, 80
LIMIT = 4096


@pytest.fixture
def template(tmp_path):
    file = tmp_path / "mine.txt"
    first, later = "Do $goal. <action>\n$observation [$commands]", "Turn $now: $observation [$commands]"
    file.write_text(f"== first ==\n{first}\n== next ==\n{later}\n")
    return str(file)


def played(format, answers, roles=None):
    """(the prompts of an episode with these answers, the buffer)."""
    roles = roles or [0] * (len(answers) + 1)
    buffer, prompts = EpisodeBuffer(Episodes.zeros(1, len(answers), LIMIT, R), [0], history_length=1, strict=False), []
    buffer.add_output(0, EnvOutput("seen 0", ["go 0"], "it", 0, role=roles[0]))
    for turn, answer in enumerate(answers):
        (prompt,) = format.build([buffer.prompt_input(0)])
        prompts.append(prompt)
        response = SlotResponse(0, np.array(answer), np.zeros(len(answer), np.float32))
        buffer.add_response(prompt, response, format.parse(answer), ended=True)
        buffer.add_output(0, EnvOutput(f"seen {turn + 1}", [f"go {turn + 1}"], "it", 0, role=roles[turn + 1]))
    return prompts, buffer


def answer(text, *, cut=False):
    return TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * (not cut)


def test_each_prompt_begins_with_the_last_one_and_its_answer(template):
    format = ChatFormat(ChatFrame(TOKENIZER), template)
    answers = [
        answer("<think>a</think><action>go 0</action>"),
        answer("plain", cut=True),
        [*answer("a ", cut=True), TOOL, *answer(" b")],
        answer("<action>go 3</action>"),
    ]
    prompts, _ = played(format, answers)
    for last, response, prompt in zip(prompts, answers, prompts[1:], strict=False):
        assert prompt.ids[: len(last.ids) + len(response)] == last.ids + response
    messages = [{"role": "user", "content": "Do it. <action>\nseen 0 ['go 0']"}]
    for turn, text in enumerate(["<think>a</think><action>go 0</action>", "plain"], 1):
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Turn {turn + 1}: seen {turn} ['go {turn}']"})
    assert prompts[2].ids == TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def shows_thoughts(family, opens=""):
    """(the frame of a family's tokenizer, or of one with its tokens whose prompts end with `opens`)."""
    tokenizer = family_tokenizer(family)
    if opens:
        tokenizer.chat_template = CHATML.format(first="''", content="m.content", last=f"{{{{ {opens!r} }}}}")
    return ChatFrame(tokenizer)


SHOWING = [(family, "") for family in FAMILIES if not shows_thoughts(family).hides_thoughts]
OPENED = [(family, opens) for family in ("qwen3", "base") for opens in ("<think>\n", "<think>\n\n</think>\n\n", "</think>")]


@pytest.mark.parametrize(("family", "opens"), SHOWING + OPENED)
def test_what_a_prompt_opened_stays_before_the_answer(template, family, opens):
    frame = shows_thoughts(family, opens)
    end = "" if "</think>" in opens else "a</think>"
    texts = [f"{end}<action>go {turn}</action>" for turn in range(3)]
    answers = [[*frame.text.tags(text), frame.end_tokens[0]] for text in texts]
    prompts, _ = played(ChatFormat(frame, template), answers)
    for last, response, prompt in zip(prompts, answers, prompts[1:], strict=False):
        assert prompt.ids[: len(last.ids) + len(response)] == last.ids + response


@pytest.mark.parametrize("chat_template", [
    "{{ '<|im_start|>user\n' + messages[-1].content + '<|im_end|>\n<|im_start|>assistant\n' }}",
    "{{ raise_exception('One at once.') if messages | length > 1 }}{{ messages[0].content + '<|im_end|>' }}",
])  # fmt: skip
def test_a_chat_template_of_one_message_shows_no_chat(template, chat_template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    with pytest.raises(ValueError, match=r"env\.template=.*mine\.txt: tokenizer: .*; give a template of one message"):
        ChatFormat(ChatFrame(tokenizer), template)
    ChatFormat(ChatFrame(tokenizer), "plain")


def test_every_role_has_a_chat_of_its_own(template):
    format = ChatFormat(ChatFrame(TOKENIZER), template)
    prompts, _ = played(format, [answer(f"say {turn}") for turn in range(4)], roles=[0, 1, 1, 0, 0])
    text = [TOKENIZER.decode(prompt.ids) for prompt in prompts]
    assert [part.count("assistant\nsay") for part in text] == [0, 0, 1, 1]
    assert "Do it. <action>\nseen 1" in text[1] and "say 0" in text[3] and "say 1" not in text[3]


def test_a_chat_that_is_too_long_loses_its_oldest_turns_and_is_extended_again(template):
    answers = [answer("x" * 60) for _ in range(TURNS)]
    whole, _ = played(ChatFormat(ChatFrame(TOKENIZER), template), answers)
    limit = len(whole[3].ids)  # the fifth prompt is the first one over it
    prompts, buffer = played(ChatFormat(ChatFrame(TOKENIZER), template, limit), answers)
    assert prompts[:4] == whole[:4]
    dropped = prompts[4].pairs_dropped
    assert 0 < dropped < 4 and len(prompts[4].ids) <= limit // 2
    text = TOKENIZER.decode(prompts[4].ids)
    assert f"user\nDo it. <action>\nseen {dropped} " in text and "Turn 5: seen 4" in text
    assert prompts[5].ids[: len(prompts[4].ids) + len(answers[4])] == prompts[4].ids + answers[4]
    assert prompts[5].pairs_dropped == 0
    assert buffer.result().report.counts["pairs_dropped"] == dropped


def test_a_message_that_is_too_long_alone_loses_its_middle(template):
    format = ChatFormat(ChatFrame(TOKENIZER), template, 128)
    _, buffer = played(format, [answer("go")])
    view = buffer.prompt_input(0)._replace(observation="seen " * 100)
    (prompt,) = format.build([view])
    assert prompt.pairs_dropped == 1 and prompt.tokens_cut and len(prompt.ids) <= 128


def test_a_scripted_players_actions_are_answers(template):
    format = ChatFormat(ChatFrame(TOKENIZER), template)
    _, buffer = played(format, [answer("<think></think><action>go 0</action>")])
    view = buffer.prompt_input(0)
    scripted = [turn._replace(response=()) for turn in view.chat]
    assert [turn.action for turn in scripted] == ["go 0"]
    assert format.build([view._replace(chat=scripted)]) == format.build([view])


def test_a_template_with_other_sections_is_told_both_forms(tmp_path):
    (tmp_path / "mine.txt").write_text("== first ==\n$goal\n")
    with pytest.raises(ValueError, match="== first ==, == later ==, == entry == or == first ==, == next ==, and no others"):
        ChatFormat(ChatFrame(TOKENIZER), str(tmp_path / "mine.txt"))


def test_a_small_policy_reads_no_chat():
    with pytest.raises(ValueError, match=r"env\.template=conversation: .*; give a template of one message"):
        ChatFormat(ChatFrame(text_tokenizer(["a b"])), "conversation")


def test_our_conversation_says_what_the_other_prompts_say():
    format = ChatFormat(ChatFrame(TOKENIZER), "conversation")
    assert format.template.chats and (TEMPLATES / "conversation.txt").is_file()
    prompts, _ = played(format, [answer("<think>a</think><action>go 0</action>"), answer("b")])
    first, second = (TOKENIZER.decode(prompt.ids) for prompt in prompts)
    for part in ("Your task: it", "seen 0", "['go 0']", "<think>", "<action>"):
        assert part in first
    assert "seen 1" in second and "['go 1']" in second and second.count("Your task") == 1


@pytest.mark.slow
def test_a_run_computes_each_conversation_once(tmp_path):
    """And the probabilities of the sampler are those of the update."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "short.txt").write_text("== first ==\n$goal: $observation\n== next ==\n$observation\n")
    config = hgpo_jax.load_config(
        "text_small", iterations=1, warm_start="none", cache_dir=str(tmp_path / "cache"), **{
            "env.template": str(tmp_path / "short.txt"), "policy.tokenizer": str(tmp_path / "tokenizer"), "env.max_turns": 3,
            "rollout.prompt_limit": 640, "rollout.response_limit": 4, "rollout.prompt_groups": 2, "rollout.group_size": 2,
            "learner.microbatch_size": 2, "evaluation.episodes": 4, "log.tensorboard": False,
        },
    )  # fmt: skip
    row = hgpo_jax.fit(config, tmp_path / "run").metrics().to_dict("records")[0]
    assert row["conversation/turns"] > 2 and row["conversation/token_share"] < 0.7
    assert row["logp_difference"] < 1e-4 and row["pairs_dropped"] == 0
    assert not unexplained(row)
