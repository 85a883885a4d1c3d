"""The text that a tokenizer's chat template puts around messages, extracted once from the template itself.

    frame = ChatFrame(tokenizer)
    ids = frame.conversation([{"role": "user", "content": "Hello"}])

Only the frame may contain special tokens. Texts of environments, users and models are data, and are encoded so that no marker
in them can end the message or begin another.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from hgpo_jax.policy.answers import TAGS, THINK, THINK_END, AnswerParser
from hgpo_jax.policy.call_formats import CallFormat, call_format
from hgpo_jax.policy.tokenizer import AS_TRAINED, PLAIN, generation_of
from hgpo_jax.utils.errors import one_line

DATE = datetime.date(2024, 7, 26)  # the date that Llama 3.1's chat template uses by default
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # controls and lone surrogates
_TELLS_TIME = re.compile(r"strftime_now\s*\(\s*(['\"])([^'\"]*)\1\s*\)")
# Around a message's placeholder; what the template makes of them it makes of the message (`_as_shown`).
_BLANK, _QUOTE = "\u2003", '"'
_MARK = "5f1c-the-message-7d2e"  # a message that no template contains


class TokenText:
    """Texts of environments, models and people, as token ids and back.

    tokenizer: a transformers tokenizer whose special and added tokens are not words of the text (not a word-level one).
    """

    def __init__(self, tokenizer):
        self._tokenizer = _after_a_token(tokenizer)
        # A marker becomes harmless when it is encoded in two pieces; if markers overlap, each is cut.
        # Some models have added letters or blanks, which are text.
        plain = (token for token in tokenizer.added_tokens_decoder.values() if not token.special)
        letters = {token.content for token in plain if len(token.content.strip()) < 2}
        added = {token: index for token, index in tokenizer.get_added_vocab().items() if token not in letters}
        markers = sorted(added, key=len, reverse=True)
        self.markers = markers
        self._marker = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None
        self._cuts = re.compile(f"(?={self._marker.pattern})") if self._marker else None
        self._added = frozenset(added.values())
        # Some reasoning models' tags are special tokens; they still belong to the text.
        special = ((index, token) for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.hidden = frozenset(index for index, token in special if token.content not in TAGS)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Encodes texts as data: the ids contain no special or added token, whatever the texts contain."""
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
                # A normalizer may form a marker from other characters, and a marker of one character has no pieces.
                ids[index] += part if self._added.isdisjoint(part) else [i for i in part if i not in self._added]
        return ids

    def tags(self, text: str) -> list[int]:
        """Encodes text of our own, such as a tag, with special tokens."""
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def split(self, text: str) -> list[str]:
        """Splits a text at the special and added tokens that it spells; returns the parts and these tokens, alternating."""
        return self._marker.split(text) if self._marker else [text]

    def marker_in(self, text: str, brackets: frozenset[str]) -> str:
        """Finds a special or added token that a text spells, also with equivalent other characters; "" if there is none.

        brackets: pairs of characters that the template may put around a part of the text.
        """
        texts = [text, unicodedata.normalize("NFKC", text), unicodedata.normalize("NFKC", text).lower()]
        match = next(filter(None, map(self._cuts.search, texts)), None) if self._cuts else None
        within = (token for token in self.special if len(token) > 5 and token[0] + token[-1] in brackets)
        inner = (token for token in within if any(token[1:-1] in text for text in texts))
        return match.group(1) if match else next(inner, "")

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes the text of a response, without special tokens other than the tags."""
        visible = [index for index in ids if index not in self.hidden]
        return self._tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _after_a_token(tokenizer):
    """Returns a tokenizer that cuts every text as one that stands after a token, which all texts of a chat do.

    Of Llama 2's kind, transformers 5 makes tokenizers that put a blank before a text, but not after a token.
    """
    before = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    if not isinstance(before, pre_tokenizers.Metaspace) or before.prepend_scheme != "first":
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(before.replacement, "never", before.split)
    return changed


def sanitized(text: str) -> str:
    """Replaces the control characters and lone surrogates of a text."""
    return _NOT_TEXT.sub("\ufffd", text)


class ChatFrame:
    """A tokenizer's chat template.

    Args:
      tokenizer: a transformers tokenizer with a chat template and an end token.
      date: the current date for a template that mentions it (Llama 3.2, SmolLM3); None: the date of the policy's training
        according to generation_config.json, or else `usual_date`.
      thinking: whether answers begin with a thought, if the template has a switch for it (Qwen3); None: as in the policy's
        training, or else the template's default.
      stop: further tokens that end an answer.

    Attributes:
      text: texts as token ids and back.
      head, tail: token ids before and after the only user message and the text that touches it.
      lead, trail: the template's text that touches the message, from the last token of the head on and up to the first of the
        tail. A word, or a line's end, may begin in it and end in the message, so it is encoded with it.
      trims: whether the template drops blanks before, and after, that message.
      opened: the part of the answer that the tail already contains: "", "<think>" or a whole, empty thought.
      has_switch: whether the template has a switch for `thinking`. hides_thoughts: whether it drops them from earlier
        answers.
      end_tokens: ids of the tokens that end an answer. The first one is the template's (or else the tokenizer's); the others
        are the tokenizer's, those of generation_config.json and `stop`.

    Raises ValueError for a tokenizer without a template or an end token, a template that does not show a message exactly
    once, uses the time in a way that cannot be fixed or has no switch for `thinking`, and a stop that is not a token.
    """

    def __init__(
        self,
        tokenizer,
        *,
        date: datetime.date | None = None,
        thinking: bool | None = None,
        stop: Sequence[str] = (),
        usual_date: datetime.date = DATE,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("tokenizer: has no chat template; take an instruction-tuned model's tokenizer")
        trained = generation_of(tokenizer).get(AS_TRAINED, {})
        if date is None:
            date = datetime.date.fromisoformat(trained["date"]) if "date" in trained else usual_date
        self._tokenizer, self._date, self._thinking, self._stop = tokenizer, date, thinking, tuple(stop)
        self.plain = tokenizer.chat_template == PLAIN
        self.has_switch = self._has_switch()
        if thinking is not None and not self.has_switch:
            raise ValueError("rollout.thinking: this chat template has no switch for it; leave it out")
        if thinking is None and self.has_switch:
            self._thinking = trained.get("thinking")
        self.text = TokenText(tokenizer)
        before, after = self._around([{"role": "user", "content": _MARK}])
        blanks = self._around([{"role": "user", "content": f"{_BLANK}{_MARK}{_BLANK}"}])
        self.trims = not blanks[0].endswith(_BLANK), not blanks[1].startswith(_BLANK)
        *head, self.lead = self.text.split(before)
        self.trail, *tail = self.text.split(after)
        self.head, self.tail = self.text.tags("".join(head)), self.text.tags("".join(tail))
        self.opened, self.hides_thoughts = self._find_opening(after), self._hides_thoughts()
        self.end_tokens = end_tokens(tokenizer, stop, first=self._turn_end())
        self.text.hidden |= set(self.end_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the frame for generation_config.json: a frame made from them alone renders messages the same."""
        return {"date": self._date.isoformat(), "thinking": self._thinking}

    @property
    def inside_thought(self) -> bool:
        """Whether an answer begins inside a thought, which it has to end."""
        return bool(self.opened) and THINK_END not in self.opened

    def parser(self, tools: Sequence[dict[str, Any]] = (), beginning: str = "") -> AnswerParser:
        """Returns the parser of answers to a prompt that shows these tools.

        beginning: the beginning of the answer that follows the tail of the prompt; it is parsed, too.
        """
        inside = self.inside_thought and not beginning
        if not tools:
            return AnswerParser(None, inside)
        return AnswerParser(self.call_format(tools), inside, self._marker_in, self.most_calls)

    def call_format(self, tools: Sequence[dict[str, Any]]) -> CallFormat:
        """Returns the form of tool calls in answers to a prompt that shows these tools."""
        return call_format(self._template(tools), tools)

    @functools.cached_property
    def most_calls(self) -> int | None:
        """The most calls that the template shows of one answer: 1 if it refuses a second, as Llama 3's does; None if not."""
        call = {"type": "function", "function": {"name": _MARK, "arguments": {}}}
        question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}
        try:
            self._render([question, answer | {"tool_calls": [call]}])
        except ValueError:
            return None
        try:
            self._render([question, answer | {"tool_calls": [call, call]}])
        except ValueError:
            return 1
        return None

    def switched(self, thinking: bool | None) -> ChatFrame:
        """Returns this frame with another `thinking`."""
        if thinking == self._thinking:
            return self
        return ChatFrame(self._tokenizer, date=self._date, thinking=thinking, stop=self._stop)

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        sampled: Mapping[int, list[int]] | None = None,
    ) -> list[int]:
        """Encodes a conversation that asks for the assistant's next message.

        messages: each with `role` and `content`, a text or parts of `type` text or image. Contents are data, except that a
          thought in an assistant's message counts as one. A picture is one image token. A policy that sees only one message
          (`tokenizer.PLAIN`) receives the last one.
        tools, and `tool_calls` of messages: as the template takes them. They become part of the frame, and must not spell a
          special or added token.
        sampled: number of a message -> the ids of its content, used instead of encoding it.

        Raises ValueError if the template rejects or leaves out a message, or if tools spell a token.
        """
        messages = messages[-1:] if self.plain else messages
        sampled = {} if self.plain else sampled or {}
        self._check_tools(tools, [message["tool_calls"] for message in messages if message.get("tool_calls")])
        mark = f"message-{secrets.token_hex(8)}-"  # unpredictable, so no message can contain it
        contents, thoughts, marked = list[tuple[int, str]](), dict[int, str](), list[dict[str, Any]]()

        def placeholder(number: int, content: str) -> str:
            contents.append((number, content))
            return f"{_BLANK}{_QUOTE}{mark}{len(contents) - 1}-{_QUOTE}{_BLANK}"

        for number, message in enumerate(messages):
            content = message["content"]
            if message.get("tool_calls") and not content:
                marked.append(message)
                continue
            if not isinstance(content, str):
                texts = (part.get("text") for part in content)
                kinds = [
                    {"type": "image"} if text is None else {"type": "text", "text": placeholder(number, text)} for text in texts
                ]
                marked.append(message | {"content": kinds})
                continue
            if message["role"] == "assistant" and number not in sampled and THINK_END in content:
                begin, thoughts[number], end, content = _parts_of(content)
                marked.append(message | {"content": f"{begin}{mark}thought-{number}-{end}{placeholder(number, content)}"})
                continue
            marked.append(message | {"content": placeholder(number, content)})
        of_content = rf"(?P<lead>{_BLANK})?(?P<escape>\\)?{_QUOTE}{mark}(?P<content>\d+)-\\?{_QUOTE}(?P<trail>{_BLANK})?"
        shown = self._render(marked, tools)
        found = list(re.finditer(rf"{of_content}|{mark}thought-(?P<thought>\d+)-", shown))
        if missing := sorted(set(range(len(contents))) - {int(match["content"]) for match in found if match["content"]}):
            number = contents[missing[0]][0] + 1
            raise ValueError(f"tokenizer: its chat template does not show message {number} of {len(messages)}")
        # Between two tokens of the frame, its text and the messages are one text: a word may begin in one and end in the other,
        # as with a full stop before a line's end.
        runs, tokens, upto = [""], list[list[int]](), 0
        for match in [*found, None]:
            first, *rest = self.text.split(shown[upto : match.start() if match else None])
            runs[-1] += first
            tokens += map(self.text.tags, rest[::2])
            runs += rest[1::2]
            if match and match["thought"]:
                runs[-1] += thoughts[int(match["thought"])]
            elif match:
                number, content = contents[int(match["content"])]
                if number in sampled:
                    tokens.append(sampled[number])
                    runs.append("")
                else:
                    runs[-1] += _as_shown(content, match)
            upto = match.end() if match else upto
        ids: list[int] = []
        for run, token in zip(self.text.encode(runs), [*tokens, []], strict=True):
            ids += [*run, *token]
        return ids

    def _marker_in(self, text: str) -> str:
        return self.text.marker_in(text, self._brackets)

    @functools.cached_property
    def _brackets(self) -> frozenset[str]:
        """The first and last characters of special tokens that the template puts around names or values of tools and calls.

        Qwen3-Coder's writes <KEY> for a tool's KEY; with StarCoder's vocabulary the key `filename` would become a token.
        """
        pairs = {token[0] + token[-1] for token in self.text.special if len(token) > 5}
        described = {"type": "string", "description": _MARK, "enum": [_MARK], _MARK: _MARK}
        parameters = {"type": "object", "properties": {_MARK: described}, "required": [_MARK]}
        tool = {"type": "function", "function": {"name": _MARK, "description": _MARK, "parameters": parameters}}
        call = {"type": "function", "function": {"name": _MARK, "arguments": {_MARK: _MARK}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            shown = self._render([{"role": "user", "content": "Hello"}, answer], [tool])
        except ValueError:
            return frozenset(pairs)
        return frozenset(pair for pair in pairs if f"{pair[0]}{_MARK}{pair[1]}" in shown)

    def _check_tools(self, tools: Sequence[dict[str, Any]], calls: list) -> None:
        """Raises ValueError if the template leaves out tools or their calls, or if they spell a token."""
        template = self._template(tools)
        for field, values in (("tools", list(tools)), ("tool_calls", calls)):
            if values and field not in template:
                raise ValueError(f"{field}: this policy's chat template does not show any; leave them out")
            if token := self._marker_in(json.dumps(values, ensure_ascii=False)):
                raise ValueError(f"{field}: {token!r} is a token of its own in this policy's vocabulary; write it otherwise")

    def _template(self, tools: Sequence[dict[str, Any]] = ()) -> str:
        """Returns the template with the date filled in."""
        try:
            template = self._tokenizer.get_chat_template(tools=list(tools) or None)
        except ValueError:
            names = ", ".join(self._tokenizer.chat_template)
            raise ValueError(f"tokenizer: of its chat templates {names} none is called default; rename one") from None
        template = _TELLS_TIME.sub(lambda match: json.dumps(self._date.strftime(match[2])), template)
        if re.search(r"strftime_now\s*\(", template):
            raise ValueError("tokenizer: its chat template tells the time in a way that cannot be kept; fix that template")
        return template

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, asks: bool = True) -> str:
        """Renders messages with the template. asks: whether to ask for the assistant's next one. Raises ValueError."""
        switch = {} if self._thinking is None else {"enable_thinking": self._thinking, "thinking": self._thinking}
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._template(tools),
                tokenize=False,
                add_generation_prompt=asks,
                date_string=self._date.strftime("%d %b %Y"),
                **switch,
            )
        except Exception as error:  # any error of a template, for example about a system message
            raise ValueError(one_line(f"tokenizer: its chat template fails: {error}; fix chat_template.jinja")) from None

    def _around(self, messages: list[dict[str, Any]], *, asks: bool = True) -> tuple[str, str]:
        """Returns the text before and after the message with content _MARK."""
        text = self._render(messages, asks=asks)
        if text.count(_MARK) != 1:
            raise ValueError(f"tokenizer: its chat template shows a message {text.count(_MARK)} times instead of once")
        before, after = text.split(_MARK)
        return before, after

    def _find_opening(self, tail: str) -> str:
        """Returns the part of a thought at the end of the tail, after the frame's last token."""
        parts = self.text.split(tail)
        # A special token may follow the tag, and blanks may be tokens.
        turns = (at for at in range(1, len(parts), 2) if parts[at].strip() and parts[at] not in TAGS)
        tags = [at for at in range(1, len(parts), 2) if parts[at] in TAGS]
        last = max((at for at in turns if not tags or at < tags[0]), default=-1)
        thought = re.search(r"</?think>.*", "".join(parts[last + 1 :]), re.DOTALL)
        if not thought:
            return ""
        return thought[0] if thought[0].startswith(THINK) else THINK + thought[0]  # some templates only end it

    def _has_switch(self) -> bool:
        if "thinking" not in self._template():
            return False
        thinking, texts = self._thinking, set()
        for self._thinking in (False, True):
            texts.add(self._render([{"role": "user", "content": "Hello"}]))
        self._thinking = thinking
        return len(texts) > 1

    def _hides_thoughts(self) -> bool:
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": f"{THINK}{_MARK}{THINK_END}Hello"}]
        try:
            return _MARK not in self._render([*messages, messages[0]])
        except ValueError:  # the template consists only of a question
            return False

    def _turn_end(self) -> str:
        """Returns the token that the template writes after the assistant's message, "" if there is none."""
        question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}
        # Some templates write it only if another message follows.
        for conversation in ([question, answer], [question, answer, question]):
            try:
                _, after = self._around(conversation, asks=False)
            except ValueError:  # the template consists only of a question
                return ""
            parts = self.text.split(after)
            at = next((at for at, part in enumerate(parts) if part.strip()), 0)  # blanks may be tokens
            if at % 2:
                return parts[at]
        return ""


def _as_shown(content: str, placeholder: re.Match) -> str:
    """Returns what a template shows of a content: Llama 3's trims it, and writes a tool's result as JSON.

    placeholder: what it has made of `_BLANK` and `_QUOTE`.
    """
    content = content if placeholder["lead"] else content.lstrip()
    content = content if placeholder["trail"] else content.rstrip()
    return json.dumps(content, ensure_ascii=False)[1:-1] if placeholder["escape"] else content


def _parts_of(content: str) -> tuple[str, str, str, str]:
    """Splits an answer with a thought: tag and blanks before the thought, the thought, tag and blanks after it, the rest.

    Unlike `answers.split_thought` it takes the last </think>, as chat templates do.
    """
    before, _, after = content.rpartition(THINK_END)
    begin = THINK if before.lstrip().startswith(THINK) else ""
    thought = before.lstrip().removeprefix(begin)
    leading = len(before) - len(thought.lstrip())
    blanks = thought[len(thought.rstrip()) :] if thought.strip() else ""
    rest = after.lstrip()
    return before[:leading], thought.strip(), blanks + THINK_END + after[: len(after) - len(rest)], rest


def end_tokens(tokenizer, stop: Sequence[str] = (), first: str = "") -> tuple[int, ...]:
    """Returns ids of the tokens that end an answer: `first`, the tokenizer's, those of generation_config.json, and `stop`.

    Raises ValueError if there are none, or if `stop` is not a token.
    """
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in stop if token not in vocabulary]:
        raise ValueError(f"stop={unknown}: no token of the tokenizer; give tokens such as {tokenizer.eos_token!r}")
    ids = [vocabulary[first]] if first else []
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += [*generation_of(tokenizer).get("eos_token_id", []), *(vocabulary[token] for token in stop)]
    if not ids:
        raise ValueError("tokenizer: has no eos_token, which ends a response; set it in tokenizer_config.json")
    return tuple(dict.fromkeys(ids))
