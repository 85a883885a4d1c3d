"""Text prompts and answers for language models: templates with named slots in a tokenizer's chat frame.

A prompt is the chat template's frame around one user message. The frame alone may hold special tokens: whatever
environments and models wrote is data, and is encoded so that no marker in it can end the message or begin another.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hgpo_jax.errors import one_line
from hgpo_jax.policy.tokenizer import PLAIN

TEMPLATES = Path(__file__).parent / "templates"
# A message with more characters per token of the limit than this is too long in any case, and is not tokenized to find out.
# Real observations have 2 to 5.
MAX_CHARACTERS_PER_TOKEN = 16
_SECTIONS = ("first", "later", "entry")
_TAGS = ("<think>", "</think>", "<action>", "</action>")  # of a response
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # controls and lone surrogates
_CHINESE = re.compile("[\u4e00-\u9fff]")


class PromptInput(NamedTuple):
    """What an agent knows before it acts."""

    goal: str
    history: Sequence[tuple[str, str]]  # its last K pairs of observation and action, oldest first
    turn: int  # actions it took so far
    observation: str
    commands: Sequence[str]  # what can be done now


class Prompt(NamedTuple):
    """Token ids, and what was left out to keep them within the limit."""

    ids: list[int]
    pairs_dropped: int = 0
    tokens_cut: int = 0  # a lower bound: what is cut from a huge text is never tokenized


class ParsedResponse(NamedTuple):
    """A response as text, the action in it, and whether it is well formed."""

    text: str
    action: str
    well_formed: bool


@dataclasses.dataclass(frozen=True)
class Template:
    """The texts of one environment: a user message for the first turn, one for later turns, an entry of the history."""

    first: string.Template
    later: string.Template
    entry: string.Template

    @classmethod
    def load(cls, path: str | Path) -> Template:
        """Reads a file with the sections `== first ==`, `== later ==` and `== entry ==`.

        Slots are $goal, $observation, $commands, $turn, $now, $shown and $history, in an entry $number, $observation and
        $action. Raises ValueError for a missing section or an unknown slot.
        """
        parts = re.split(r"^== (\w+) ==\n", Path(path).read_text(encoding="utf-8"), flags=re.MULTILINE)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        if parts[0].strip() or set(sections) != set(_SECTIONS):
            raise ValueError(f"{path}: needs the sections {', '.join(f'== {name} ==' for name in _SECTIONS)} and no others")
        template = cls(**{name: string.Template(text.strip("\n")) for name, text in sections.items()})
        try:
            template.render(PromptInput("", [("", "")], 1, "", []))
            template.render(PromptInput("", [], 0, "", []))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: unknown slot {error}; a dollar sign is written $$") from None
        return template

    @property
    def bare(self) -> bool:
        """Whether it asks for the action alone: it does not mention <action>."""
        return "<action>" not in self.first.template + self.later.template

    def parse(self, text: str, fallback: int) -> ParsedResponse:
        """What `project` finds in a response; where the action alone is asked for, that is the whole response."""
        return ParsedResponse(text, text.strip(), True) if self.bare else ParsedResponse(text, *project(text, fallback))

    def render(self, prompt_input: PromptInput) -> str:
        """The user message. Slots are filled once: a dollar sign in what fills them means nothing."""
        begin = prompt_input.turn - len(prompt_input.history) + 1
        entries = [
            self.entry.substitute(number=begin + index, observation=observation, action=action)
            for index, (observation, action) in enumerate(prompt_input.history)
        ]
        slots = {
            "goal": prompt_input.goal,
            "observation": prompt_input.observation,
            "commands": ",\n".join(f"'{command}'" for command in prompt_input.commands),
            "turn": prompt_input.turn,
            "now": prompt_input.turn + 1,
            "shown": len(entries),
            "history": "\n".join(entries),
        }
        return (self.later if entries else self.first).substitute(slots)


def template_file(name: str) -> Path:
    """The file of this name in `templates/`, or at this place. Raises ValueError."""
    ours = {file.stem: file for file in TEMPLATES.glob("*.txt")}
    file = ours.get(name, Path(name))
    if not file.is_file():
        raise ValueError(f"template={name}: no such file; give one, or {', '.join(sorted(ours))}")
    return file


def load_template(name: str) -> Template:
    """What `template_file` holds. Raises ValueError."""
    return Template.load(template_file(name))


class TokenText:
    """What environments, models and people write, as token ids and back.

    tokenizer: a transformers tokenizer whose special and added tokens are not words of the text (not a word-level one).
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        # A marker becomes harmless when it is encoded in two pieces; of overlapping ones each is cut.
        added = tokenizer.get_added_vocab()
        markers = sorted(added, key=len, reverse=True)
        self.markers = markers
        self._marker = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None
        self._cuts = re.compile(f"(?={self._marker.pattern})") if self._marker else None
        self._added = frozenset(added.values())
        # Some reasoning models' tags are special tokens; they belong to the text nevertheless.
        special = ((index, token) for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.hidden = frozenset(index for index, token in special if token.content not in _TAGS)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of texts as data: no special or added token comes out, whatever is in them."""
        pieces, owner = [], []
        texts = list(map(sanitized, texts))
        for index, text in enumerate(texts):
            cuts = [match.start() + 1 for match in self._cuts.finditer(text)] if self._cuts else []
            for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
                pieces.append(text[begin:end])
                owner.append(index)
        ids: list[list[int]] = [[] for _ in texts]
        if pieces:
            for index, part in zip(owner, self._tokenizer(pieces, add_special_tokens=False).input_ids, strict=True):
                # A normalizer may make a marker out of other characters, and a marker of one character has no pieces.
                ids[index] += part if self._added.isdisjoint(part) else [i for i in part if i not in self._added]
        return ids

    def split(self, text: str) -> list[str]:
        """What is between the special and added tokens that a text spells, and these, in turn."""
        return self._marker.split(text) if self._marker else [text]

    def marker_in(self, text: str) -> str:
        """A special or added token that a text spells, also with other characters of the same meaning; "" if none."""
        texts = [text, unicodedata.normalize("NFKC", text), unicodedata.normalize("NFKC", text).lower()]
        found = next(filter(None, map(self._cuts.search, texts)), None) if self._cuts else None
        # A template may put the brackets around a name itself.
        inner = (token for token in self._special if len(token) > 5 and any(token[1:-1] in text for text in texts))
        return found.group(1) if found else next(inner, "")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens other than the tags."""
        shown = [index for index in ids if index not in self.hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ChatFormat:
    """Prompts in a tokenizer's chat template, and actions out of its responses.

    Args:
      tokenizer: a transformers tokenizer with a chat template.
      template: as `load_template` takes it.
      prompt_limit: tokens of the longest prompt. A longer one loses its oldest history first, then the beginning of the
        user message; the frame always stays.
      stop: further tokens that end a response, besides the tokenizer's eos_token.
      fallback: characters of the end of a malformed response that are taken for its action.

    A template that does not mention <action> asks for the action alone: the whole response is the action.

    Raises:
      ValueError: no such template, a tokenizer without a chat template or end token, a stop that is not one of its tokens, or a
        limit that the frame alone fills.
    """

    def __init__(
        self, tokenizer, template: str, prompt_limit: int = 4096, stop: Sequence[str] = (), fallback: int = 30
    ):
        self.template = load_template(template)
        self.prompt_limit, self.fallback = prompt_limit, fallback
        check_chat_tokenizer(tokenizer)
        self.text = TokenText(tokenizer)
        self._tokenizer, self.head, self.tail = tokenizer, *_frame(tokenizer)
        vocabulary = tokenizer.get_vocab()
        if unknown := [token for token in stop if token not in vocabulary]:
            raise ValueError(f"stop={unknown}: no token of the tokenizer; give tokens such as {tokenizer.eos_token!r}")
        self.end_tokens = (tokenizer.eos_token_id, *(vocabulary[token] for token in stop))
        self.message_limit = prompt_limit - len(self.head) - len(self.tail)
        if self.message_limit < 1:
            frame = prompt_limit - self.message_limit
            raise ValueError(f"prompt_limit={prompt_limit}: the chat template alone takes {frame} tokens")

    def build(self, inputs: Sequence[PromptInput]) -> list[Prompt]:
        """The prompt of each input."""
        prompts, max_characters = [], self.message_limit * MAX_CHARACTERS_PER_TOKEN
        texts = [self.template.render(prompt_input) for prompt_input in inputs]
        encoded = self.text.encode(text[-max_characters:] for text in texts)
        for prompt_input, text, ids in zip(inputs, texts, encoded, strict=True):
            dropped = 0
            while (len(ids) > self.message_limit or len(text) > max_characters) and dropped < len(prompt_input.history):
                dropped += 1
                text = self.template.render(prompt_input._replace(history=prompt_input.history[dropped:]))
                ids = self.text.encode([text[-max_characters:]])[0]
            cut = max(0, len(ids) - self.message_limit)
            prompts.append(Prompt(self.head + ids[cut:] + self.tail, dropped, cut + (len(text) > max_characters)))
        return prompts

    def answers(self, commands: Sequence[str], thoughts: Sequence[str]) -> list[list[int]]:
        """Well-formed responses, as `parse` reads them, that give these commands; ended, with these texts as reasoning."""
        if self.template.bare:
            parts = [[ids] for ids in self.text.encode(commands)]
        else:
            tags = "<think>", "</think><action>", "</action>"
            think, action, end = (self._tokenizer(tag, add_special_tokens=False).input_ids for tag in tags)
            pairs = zip(self.text.encode(thoughts), self.text.encode(commands), strict=True)
            parts = [[think, thought, action, command, end] for thought, command in pairs]
        return [[*(i for part in answer for i in part), self.end_tokens[0]] for answer in parts]

    def parse(self, ids: Sequence[int]) -> ParsedResponse:
        """A response's text without special tokens other than the tags, and what `Template.parse` finds in it."""
        return self.template.parse(self.text.decode(ids), self.fallback)


def sanitized(text: str) -> str:
    """A text whose control characters and lone surrogates are replaced."""
    return _NOT_TEXT.sub("\ufffd", text)


def project(text: str, fallback: int) -> tuple[str, bool]:
    """The action of a response, and whether the response is well formed, as verl-agent decides both.

    The action stands between the first <action> and the first </action> of the lower-cased text; without both it is the
    last `fallback` characters. A well-formed response also has <think> and </think> and no Chinese character. Whether the
    action is admissible is not asked here.
    """
    lower = text.lower()
    begin, end = lower.find("<action>"), lower.find("</action>")
    if begin < 0 or end < 0:
        return lower[-fallback:], False
    action = lower[begin + len("<action>") : end].strip()
    return action, "<think>" in text and "</think>" in text and not _CHINESE.search(text)


def check_chat_tokenizer(tokenizer) -> None:
    """Raises ValueError for a tokenizer without a chat template or an end token."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("tokenizer: has no chat template; take an instruction-tuned model's tokenizer")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: has no eos_token, which ends a response; set it in tokenizer_config.json")


def conversation_ids(
    tokenizer, text: TokenText, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (),
    sampled: Mapping[int, list[int]] | None = None,
) -> list[int]:  # fmt: skip
    """Token ids of a conversation in the chat template, which asks for the assistant's next message.

    messages: each with `role` and `content`. What they say is data, as in `ChatFormat`. A policy that is shown a message and
    nothing else (`tokenizer.PLAIN`) is shown the last one. tools, and `tool_calls` of messages: as the template takes them;
    these become a part of the frame, and must not spell a special or added token. sampled: number of a message -> the ids of
    its content, in the place of its encoding.

    Raises ValueError where the template refuses or leaves out some, or where tools spell a token.
    """
    messages = messages[-1:] if tokenizer.chat_template == PLAIN else messages
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    if calls and "tool_calls" not in tokenizer.chat_template:
        raise ValueError("tool_calls: this policy's chat template does not show any; leave them out")
    for field, given in (("tools", list(tools)), ("tool_calls", calls)):
        if spelled := text.marker_in(json.dumps(given, ensure_ascii=False)):
            raise ValueError(f"{field}: {spelled!r} is a token of its own in this policy's vocabulary; write it otherwise")
    mark = f"message-{secrets.token_hex(8)}-"  # nobody can write it
    marked = [
        message if message.get("tool_calls") and not message["content"] else
        message | {"content": f"{mark}{number}-"}
        for number, message in enumerate(messages)
    ]  # fmt: skip
    more = {"tools": list(tools)} if tools else {}
    try:
        shown = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True, **more)
    except Exception as error:  # whatever a template does, for example with a system message
        raise ValueError(one_line(f"tokenizer: its chat template fails: {error}")) from None
    pieces = re.split(rf"{mark}(\d+)-", shown)
    said = {number for number, message in enumerate(marked) if message is not messages[number]}
    if lost := sorted(said - set(map(int, pieces[1::2]))):
        raise ValueError(f"tokenizer: its chat template does not show message {lost[0] + 1} of {len(messages)}")
    # Between two tokens of the frame, what it says and what messages say is one text: a word may begin in one and end in the
    # other, as with a full stop before a line's end.
    runs, tokens = [""], list[str | list[int]]()
    for at, piece in enumerate(pieces):
        if at % 2 and sampled and int(piece) in sampled:
            tokens.append(sampled[int(piece)])
            runs.append("")
            continue
        if at % 2:
            runs[-1] += messages[int(piece)]["content"]
            continue
        parts = text.split(piece)
        runs[-1] += parts[0]
        tokens += parts[1::2]
        runs += parts[2::2]
    ids: list[int] = []
    for run, token in zip(text.encode(runs), [*tokens, ""], strict=True):
        ids += run
        ids += token if isinstance(token, list) else tokenizer(token, add_special_tokens=False).input_ids if token else []
    return ids


def _frame(tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of what the chat template puts before and after the only user message."""
    mark = "5f1c-the-message-7d2e"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template does
        raise ValueError(one_line(f"tokenizer: its chat template fails: {error}; fix chat_template.jinja")) from None
    if text.count(mark) != 1:
        raise ValueError(f"tokenizer: its chat template shows a message {text.count(mark)} times instead of once")
    head, tail = text.split(mark)
    return tokenizer.encode(head, add_special_tokens=False), tokenizer.encode(tail, add_special_tokens=False)
