"""Chat templates of today's models: what a prompt opens, what ends an answer, which day it is, which ids there are."""

import datetime
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hgpo_jax.chat import Chat
from hgpo_jax.config.schema import RolloutConfig
from hgpo_jax.export import export
from hgpo_jax.policy import Policy, load_policy
from hgpo_jax.policy.chat_template import DATE, ChatFrame
from hgpo_jax.policy.model_config import ModelConfig
from hgpo_jax.policy.placement import shapes
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from hgpo_jax.sampling import generate
from hgpo_jax.sampling.generate import Decoding, published_decoding
from hgpo_jax.serving.text import ServedText
from hgpo_jax.trainer.main import save_trained
from tests.helpers.chat_tokenizers import CHATML, FAMILIES, LLAMA3, LLAMA3_CALLS, family_tokenizer
from tests.helpers.refusals import refused

VIEW = PromptInput("put a mug in desk.", [], 0, "You are in a room.", ["go to desk 1", "look"])
THOUGHT, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
# The family, `thinking`, what the prompt opens, an answer as such a model writes it, and a cloned one.
WHOLE = "<think>I am in a room.</think>\n<action>look</action>"
REST = "I am in a room.\n</think>\n\n<action>look</action>"
CASES = [
    ("qwen2.5", None, "", WHOLE),
    ("qwen3", None, "", f"<think>\n{REST}"),
    ("qwen3", True, "", f"<think>\n{REST}"),
    ("qwen3", False, EMPTY, "<action>look</action>"),
    ("qwen3-thinking", None, THOUGHT, REST),
    ("r1-distill", None, THOUGHT, REST),
    ("llama3.2", None, "", WHOLE),
    ("smollm2", None, "", WHOLE),
    ("smollm3", None, "", f"<think>\n{REST}"),
    ("smollm3", False, EMPTY, "<action>look</action>"),
    ("base", None, "", WHOLE),
]


@pytest.mark.parametrize(("family", "thinking", "opened", "answer"), CASES)
def test_what_a_prompt_opens_belongs_to_the_answer(family, thinking, opened, answer):
    tokenizer = family_tokenizer(family)
    frame = ChatFrame(tokenizer, thinking=thinking)
    format = ChatFormat(frame, "alfworld")
    assert (frame.opened, frame.inside_thought) == (opened, opened == THOUGHT)
    prompt = format.build([VIEW])[0].ids
    assert tokenizer.decode(prompt).endswith(f"assistant\n{opened}" if family[:2] in ("qw", "sm", "ba") else opened)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    text, action, well_formed = format.parse([*ids, frame.end_tokens[0]])
    assert (text, action, well_formed) == (opened + answer, "look", True)
    assert not format.parse(ids[1:])[2] or opened  # half a tag
    # A cloned answer completes what the prompt opened, once.
    cloned = format.answers(["look"])[0]
    said = tokenizer.decode([*frame.tail, *cloned])
    assert [said.count(tag) for tag in ("<think>", "</think>", "<action>", "</action>")] == [1, 1, 1, 1]
    assert format.parse(cloned)[1:] == ("look", True) and cloned[-1] == frame.end_tokens[0]
    # The action alone, after its thought.
    thought = "<think>Hm." if not opened else "Hm."
    assert ChatFormat(frame, "plain").parse(tokenizer.encode(f"{thought}</think>\n\nlook{tokenizer.eos_token}"))[1] == "look"


@pytest.mark.parametrize(("family", "hides"), [("qwen3", True), ("r1-distill", True), ("qwen2.5", False), ("llama3.2", False)])
def test_earlier_thoughts_are_shown_as_the_template_shows_them(family, hides):
    """Ids equal those of the whole text as transformers encodes it; what the thought says is data all the same."""
    tokenizer, asks = family_tokenizer(family), {"role": "user", "content": "Hello?"}
    frame = ChatFrame(tokenizer)
    assert frame.hides_thoughts == hides
    for content in ("<think>\nSecret.\n</think>\n\nHi.", "Secret.</think>Hi.", "Hi.", "<think>Secret.</think>Hi </think>."):
        messages = [asks, {"role": "assistant", "content": content}, asks]
        shown = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
        )  # fmt: skip
        if content.count("</think>") < 2 or hides:
            assert tokenizer.decode(frame.conversation(messages)) == shown
            assert ("Secret" in shown) == (not hides and "Secret" in content)
    ids = frame.conversation([asks, {"role": "assistant", "content": f"<think>{tokenizer.eos_token}</think>Hi."}, asks])
    assert ids.count(tokenizer.eos_token_id) == frame.conversation(messages).count(tokenizer.eos_token_id)


AS_JSON = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' and m.content is iterable %}{{ m.content | tojson }}"
    "{% elif m.role == 'user' %}{{ m.content.lstrip() }}{% else %}{{ m.content | trim }}{% endif %};{% endfor %}<assistant>"
)


@pytest.mark.parametrize("template", [LLAMA3, LLAMA3_CALLS, AS_JSON])
@pytest.mark.parametrize("content", ['{"at": "a\nb", "\u00e9": 1}\n', "  Hi \\ there.\n\n", " ", "plain", '"', "\u2003x\u2003"])
def test_contents_are_changed_as_the_template_changes_them(template, content):
    """Llama 3's trims them, and writes a tool's result as JSON: its strings are iterable, too."""
    tokenizer, date = family_tokenizer("llama3.2"), {"date_string": "26 Jul 2024"}
    tokenizer.chat_template = template
    messages = [{"role": role, "content": content} for role in ("system", "user", "assistant", "tool", "user")]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **date)
    assert tokenizer.decode(ChatFrame(tokenizer).conversation(messages)) == shown


@pytest.mark.parametrize("content", ["  Hi.\n", "Hi."])
@pytest.mark.parametrize("template", [LLAMA3, AS_JSON, CHATML.format(first="''", content="m.content", last="")])
def test_the_only_message_is_trimmed_as_the_template_trims_it(template, content, tmp_path):
    tokenizer = family_tokenizer("llama3.2")
    tokenizer.chat_template = template
    (tmp_path / "t.txt").write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action")
    (prompt,) = ChatFormat(ChatFrame(tokenizer), str(tmp_path / "t.txt")).build([PromptInput("", [], 0, content, [])])
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
    )  # fmt: skip
    assert tokenizer.decode(prompt.ids) == shown


def llama2_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's form: blanks are a letter, one is put before every text, and no token stands between message and frame."""
    letters = sorted({*"▁[]/INST.?\n", *map(chr, range(97, 123))})
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: number for number, letter in enumerate(letters, 2)}}
    pairs = [("]", "▁"), (".", "▁"), ("\n", "\n"), ("▁", "[")]
    vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(pairs)}
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    template = "{% for m in messages %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template)


def transformers_5_llama_tokenizer() -> PreTrainedTokenizerFast:
    """The same as transformers 5 makes it: a blank is put before a text at the beginning alone, not after a token."""
    tokenizer = llama2_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Metaspace("▁", "first", split=False)
    return tokenizer


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen2.5's form, in which two ends of lines are one token."""
    made = Tokenizer.from_str(family_tokenizer("qwen2.5").backend_tokenizer.to_str())
    raw = json.loads(made.to_str())
    raw["model"]["vocab"]["ĊĊ"] = 300
    raw["model"]["merges"] = [["Ċ", "Ċ"]]
    made, template = Tokenizer.from_str(json.dumps(raw)), TURNS + "{{ '\n<|im_end|>\n' }}{% endfor %}" + ASKS
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


@pytest.mark.parametrize("make", [llama2_tokenizer, transformers_5_llama_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("content", ["you are here.", "\nwhere are you?\n", "x"])
def test_the_only_message_is_encoded_with_the_text_around_it(make, content, tmp_path):
    """As transformers encodes the whole prompt, and as the policy reads it when it is served."""
    tokenizer, message = make(), {"role": "user", "content": content}
    frame = ChatFrame(tokenizer)
    (tmp_path / "t.txt").write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action")
    format = ChatFormat(frame, str(tmp_path / "t.txt"), 100)
    (prompt,) = format.build([PromptInput("", [], 0, content, [])])
    shown = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    assert prompt.ids == frame.conversation([message]) == shown
    apart = [part for text in (frame.lead, content, frame.trail) for part in frame.text.encode([text])[0]]
    merged = make is llama2_tokenizer or (content[0] == "\n" if make is merging_tokenizer else content[-1] == ".")
    assert (prompt.ids != [*frame.head, *apart, *frame.tail]) == merged
    (cut,) = format.build([PromptInput("", [], 0, "a b c d e f g " * 20, [])])
    begin, end = frame.lead, frame.trail + tokenizer.decode(frame.tail)
    assert len(cut.ids) <= 100 and cut.tokens_cut and begin.strip() in tokenizer.decode(cut.ids)[:20]
    assert tokenizer.decode(cut.ids).endswith(end)


def test_a_thought_that_a_template_cannot_switch_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.thinking: .*no switch"):
        ChatFrame(family_tokenizer("qwen2.5"), thinking=True)


def policy_of(tokenizer, rows: int = 320) -> Policy:
    model = ModelConfig(
        vocab_size=rows, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )  # fmt: skip
    return Policy(model, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes(model)), tokenizer)


ENDS = {name: [*dict.fromkeys([*(["<|im_end|>"] if name == "base" else []), *case[3]])] for name, case in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_token_is_found_kept_and_written(family, tmp_path):
    """That of the template first: cloning teaches it."""
    tokenizer = family_tokenizer(family)
    assert tokenizer.convert_ids_to_tokens(list(ChatFrame(tokenizer).end_tokens)) == ENDS[family]
    tokenizer.generation |= {"temperature": 0.6, "top_k": 20}
    stop = FAMILIES[family][0][-1]
    policy_of(tokenizer).save(tmp_path / "policy", stop=[stop])
    again = load_policy(tmp_path / "policy")
    kept = dict.fromkeys([*ENDS[family], stop])
    assert again.end_tokens == tuple(again.tokenizer.convert_tokens_to_ids(list(kept)))
    assert published_decoding(generation_of(again.tokenizer)) == Decoding(0.6, 20, 1.0)


def test_without_a_generation_config_the_end_tokens_are_those_of_the_config(tmp_path):
    tokenizer = family_tokenizer("qwen2.5")
    policy_of(tokenizer).save(tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").unlink()
    file, other = tmp_path / "policy" / "config.json", tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for fields in ({"eos_token_id": [tokenizer.eos_token_id, other]}, {"text_config": {"eos_token_id": other}}):
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        assert load_policy(tmp_path / "policy").end_tokens == (tokenizer.eos_token_id, other)


def test_padding_without_a_row_is_not_written(tmp_path):
    """transformers could not load it."""
    tokenizer = family_tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy_of(tokenizer, rows=tokenizer.pad_token_id).save(tmp_path / "policy")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "policy" / name).read_text()).get("pad_token_id") is None


def test_several_templates_without_a_default_are_named():
    tokenizer = family_tokenizer("qwen2.5")
    tokenizer.chat_template = {"rag": tokenizer.chat_template}
    with refused("tokenizer: of its chat templates rag none is called default; rename one"):
        ChatFrame(tokenizer)


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LAZY = "{% if not loop.last or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
NEXT = "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<think>' }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("template", "end", "opened"), [
    (TURNS + LAZY + ASKS, "<|im_end|>", ""),  # written only where something follows
    (NEXT, "<|im_start|>", ""),  # the next turn's beginning
    (TURNS + "{{ '\n\n<|im_end|>\n' }}{% endfor %}" + ASKS, "<|im_end|>", ""),  # after blanks that are a token
    (TURNS + "{{ '<|im_end|>\n' }}{% endfor %}" + ASKS + "<think>\n\n{{ '' }}", "<|im_end|>", "<think>\n\n"),
    (TURNS + "{{ '<|im_end|>\n' }}{% endfor %}" + ASKS + "<think><|endoftext|>", "<|im_end|>", "<think><|endoftext|>"),
])  # fmt: skip
def test_templates_of_other_forms(template, end, opened):
    tokenizer = family_tokenizer("qwen3")
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.chat_template = template
    frame = ChatFrame(tokenizer)
    assert tokenizer.convert_ids_to_tokens(frame.end_tokens[0]) == end and frame.opened == opened


def test_added_letters_and_blanks_are_text():
    tokenizer, said = family_tokenizer("smollm2"), "a茶\nb\n\n"
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("茶", "\n", "\n\n")])
    frame = ChatFrame(tokenizer)
    assert tokenizer.decode(frame.text.encode([said])[0]) == said
    messages = [{"role": "user", "content": said}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(frame.conversation(messages)) == shown


def test_a_word_is_no_switch():
    tokenizer = family_tokenizer("qwen2.5")
    tokenizer.chat_template = "{# thinking #}" + tokenizer.chat_template
    assert not ChatFrame(tokenizer).has_switch and ChatFrame(family_tokenizer("qwen3")).has_switch


MARCH, TODAY = datetime.date(2023, 3, 5), datetime.date.today()


@pytest.mark.parametrize(("family", "trained", "given", "thinking", "day"), [
    ("smollm3", None, {}, None, DATE), ("smollm3", None, {"usual_date": TODAY}, None, TODAY),  # that of no run
    ("smollm3", {"date": MARCH, "thinking": False}, {}, False, MARCH),
    ("smollm3", {"date": MARCH, "thinking": False}, {"usual_date": TODAY}, False, MARCH),
    ("smollm3", {"thinking": True}, {"usual_date": TODAY}, True, DATE),  # training's day where it is given none
    ("smollm3", {"date": MARCH, "thinking": False}, {"thinking": True}, True, MARCH),  # what is given wins
    ("smollm3", {"date": MARCH}, {"thinking": False}, False, MARCH),
    ("llama3.2", {"date": MARCH}, {}, None, MARCH),
])  # fmt: skip
def test_a_policy_is_shown_the_form_that_it_was_trained_in(family, trained, given, thinking, day, tmp_path):
    """Whoever makes its frame: later runs, evaluations, chat and serving; also after it was saved again and exported."""
    policy, place = policy_of(family_tokenizer(family)), tmp_path / "policy"
    policy.save(place, trained=None if trained is None else ChatFrame(policy.tokenizer, **trained))
    load_policy(place).save(tmp_path / "again")
    export(tmp_path / "again", tmp_path / "exported")
    tokenizer = load_policy(tmp_path / "exported").tokenizer
    frame = ChatFrame(tokenizer, **given)
    assert frame.settings == {"date": day.isoformat(), "thinking": thinking}
    assert day.strftime("%d %b" if family == "llama3.2" else "%d %B") in tokenizer.decode(frame.head)
    assert frame.opened == (EMPTY if thinking is False else "")
    if given == {"usual_date": TODAY}:
        assert ServedText(tokenizer).frame.settings == Chat(load_policy(place), Decoding(0))._frame.settings == frame.settings
    later = RolloutConfig(thinking=given.get("thinking"))
    setup = SimpleNamespace(name="", settings=SimpleNamespace(rollout=later), initial=load_policy(place))
    save_trained(place, setup, policy.params)
    if "usual_date" not in given:
        assert ChatFrame(load_policy(place).tokenizer).settings == frame.settings


def test_a_switch_that_a_template_has_lost_is_forgotten(tmp_path):
    tokenizer = family_tokenizer("qwen3")
    policy_of(tokenizer).save(tmp_path / "policy", trained=ChatFrame(tokenizer, thinking=False))
    again = load_policy(tmp_path / "policy").tokenizer
    again.chat_template = family_tokenizer("qwen2.5").chat_template
    assert ChatFrame(again).settings["thinking"] is None and ChatFrame(again).opened == ""


def test_the_day_is_the_configured_one():
    for family, told in (("llama3.2", "Date: 05 Mar 2023"), ("smollm3", "Today: 05 March 2023")):
        frame = ChatFrame(family_tokenizer(family), date=datetime.date(2023, 3, 5))
        messages = [{"role": "user", "content": "Hello"}]
        assert told in frame._tokenizer.decode(frame.head) and told in frame._tokenizer.decode(frame.conversation(messages))
    for asked, kept in (
        ('("%d %B %Y" )', True), (' ("%d %B %Y")', True), ("(messages[0].role)", False), ('("%d" + "%Y")', False)
    ):  # fmt: skip
        tokenizer = family_tokenizer("smollm3")
        tokenizer.chat_template = tokenizer.chat_template.replace('("%d %B %Y")', asked)
        if kept:
            assert "26 July 2024" in tokenizer.decode(ChatFrame(tokenizer).head)
        else:
            with pytest.raises(ValueError, match="cannot be kept"):
                ChatFrame(tokenizer)


@pytest.mark.parametrize(("said", "decoding"), [
    ({}, Decoding(0.7, 0, 1.0)), ({"do_sample": False, "temperature": 0.6}, Decoding(0.0, 0, 1.0)),
    ({"do_sample": True, "temperature": 0.2, "top_p": 0.9, "top_k": None}, Decoding(0.2, 0, 0.9)),
    ({"top_k": -1}, Decoding(0.7, 0, 1.0)), ({"temperature": 11}, "temperature=11"), ({"top_p": "much"}, "top_p='much'"),
])  # fmt: skip
def test_how_the_publisher_samples(said, decoding):
    if isinstance(decoding, str):
        with pytest.raises(ValueError, match=decoding):
            published_decoding(said, 0.7)
    else:
        assert published_decoding(said, 0.7, top_k=None) == decoding
        assert published_decoding(said, 0.7, temperature=0.0, top_p=0.5).temperature == 0


def test_what_the_publisher_asks_for_and_is_not_done_is_told(caplog):
    generate._warn_once.cache_clear()
    published_decoding({"repetition_penalty": 1.0, "min_p": None, "typical_p": 1.0, "top_k": 5})
    assert not caplog.text
    assert published_decoding({"repetition_penalty": 1.05, "min_p": 0.1, "top_k": 5}) == Decoding(top_k=5)
    published_decoding({"repetition_penalty": 1.05, "min_p": 0.1})
    assert caplog.text.count("asks for repetition_penalty=1.05, min_p=0.1, which is not done here") == 1


@pytest.mark.parametrize(("change", "wrong"), [
    ({"generation_config.json": '{"eos_token_id": "x"}'}, "eos_token_id='x' is no token id"),
    ({"generation_config.json": "[]"}, "generation_config.json"),
    ({"generation_config.json": '{"hgpo_jax": {"date": "May", "thinking": null}}'}, "hgpo_jax=.*needs a date and thinking"),
    ({"generation_config.json": '{"hgpo_jax": [2]}'}, r"hgpo_jax=.2.: needs a date and thinking"),
    ({"rows": 250}, "id 25[0-9], but the embedding has 250 rows"), ({"rows": 257}, "'<|im_end|>', id 257"),
])  # fmt: skip
def test_ids_that_cannot_be_are_refused(change, wrong, tmp_path):
    """The rows of an embedding are at least the ids that prompts and answers have; that padding has none is usual."""
    policy_of(family_tokenizer("smollm2"), change.get("rows", 258)).save(tmp_path / "policy")
    if "rows" not in change:
        assert load_policy(tmp_path / "policy").config.vocab_size == 258
    for name in change.keys() - {"rows"}:
        assert json.loads((tmp_path / "policy" / name).read_text())
        (tmp_path / "policy" / name).write_text(change[name])
    with pytest.raises(ValueError, match=wrong.replace("|", r"\|")):
        load_policy(tmp_path / "policy")
