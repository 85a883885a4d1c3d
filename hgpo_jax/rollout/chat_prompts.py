"""Text prompts and answers for language models: templates with named slots in a tokenizer's chat frame (`ChatFrame`)."""

from __future__ import annotations

import bisect
import dataclasses
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hgpo_jax.policy.answers import ACTION, ACTION_END, THINK, THINK_END, find_action, split_thought
from hgpo_jax.policy.chat_template import ChatFrame

TEMPLATES = Path(__file__).parent / "templates"
# A message with more characters per token of the limit than this is certainly too long, so it is not tokenized to find out.
# Real observations have 2 to 5.
MAX_CHARACTERS_PER_TOKEN = 16
CUT = " ... "  # replaces the removed text
_SECTIONS = ("first", "later", "entry")
_CHAT_SECTIONS = ("first", "next")
NO_CHAT = "give a template of one message, such as alfworld or plain"


class PastTurn(NamedTuple):
    """A turn that an agent has taken."""

    observation: str
    commands: Sequence[str]
    action: str
    response: Sequence[int] = ()  # the sampled ids; none if the action is a scripted player's


class PromptInput(NamedTuple):
    """An agent's information before it acts."""

    goal: str
    history: Sequence[tuple[str, str]]  # its last K pairs of observation and action, oldest first
    turn: int  # actions that it has taken so far
    observation: str
    commands: Sequence[str]  # the admissible commands
    chat: Sequence[PastTurn] = ()  # its past turns, oldest first, from the first one on that its last prompt shows


class Prompt(NamedTuple):
    """The token ids of a prompt, and the parts that were left out to keep it within the limit."""

    ids: list[int]
    pairs_dropped: int = 0
    tokens_cut: int = 0  # a lower bound: the part cut from a huge text is never tokenized


class ParsedResponse(NamedTuple):
    """A response as text, its action, and whether it is well formed."""

    text: str
    action: str
    well_formed: bool


@dataclasses.dataclass(frozen=True)
class Template:
    """The texts of one environment: a user message for the first turn, one for later turns, an entry of the history.

    Without an entry, a prompt is the chat so far: every turn has a message of its own, before the agent's answer to it.
    """

    first: string.Template
    later: string.Template
    entry: string.Template | None = None

    @classmethod
    def load(cls, path: str | Path) -> Template:
        """Reads a file with the sections `== first ==`, `== later ==` and `== entry ==`, or, for a chat, `first` and `next`.

        Slots are $goal, $observation, $commands, $turn, $now, $shown and $history, in an entry $number, $observation and
        $action. Raises ValueError for a missing section or an unknown slot.
        """
        parts = re.split(r"^== (\w+) ==\n", Path(path).read_text(encoding="utf-8"), flags=re.MULTILINE)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        if parts[0].strip() or set(sections) not in (set(_SECTIONS), set(_CHAT_SECTIONS)):
            forms = " or ".join(", ".join(f"== {name} ==" for name in names) for names in (_SECTIONS, _CHAT_SECTIONS))
            raise ValueError(f"{path}: needs the sections {forms}, and no others")
        texts = {name: string.Template(text.strip("\n")) for name, text in sections.items()}
        template = cls(texts["first"], texts["next"]) if "next" in texts else cls(**texts)
        try:
            template.render(PromptInput("", [("", "")], 1, "", []))
            template.render(PromptInput("", [], 0, "", []))
            template.render_next(PromptInput("", [], 1, "", []))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: unknown slot {error}; a dollar sign is written $$") from None
        return template

    @property
    def chats(self) -> bool:
        """Whether a prompt is the chat so far."""
        return self.entry is None

    @property
    def slots(self) -> set[str]:
        """The names of the slots that its messages have."""
        parts = (self.first, self.later, *([self.entry] if self.entry else []))
        return {name for part in parts for name in part.get_identifiers()}

    @property
    def tells_goal(self) -> bool:
        """Whether every prompt states the goal; a chat does so in its first message."""
        return all("goal" in part.get_identifiers() for part in ((self.first,) if self.chats else (self.first, self.later)))

    @property
    def bare(self) -> bool:
        """Whether the template asks for the action alone: it does not mention <action>."""
        return ACTION not in self.first.template + self.later.template

    def parse(self, text: str, fallback: int, opened: str = "", *, lower_case: bool = False) -> ParsedResponse:
        """Finds a response's action as `find_action` does; if the template asks for the action alone, it is the whole response.

        opened: the part of the response that the prompt's end already contains (`ChatFrame.opened`).
        lower_case: the environment goes by verl-agent's rules, which also take an <action> in a thought, and allow no Chinese
        there; else none is taken, and a thought may be in any language.
        """
        thought, rest = split_thought(text, THINK in opened and THINK_END not in opened)
        ended = thought.endswith(THINK_END)
        if self.bare and thought and not ended:  # what it would do is not decided
            return ParsedResponse(opened + text, "", False)
        if self.bare:
            action = rest.strip()
            return ParsedResponse(opened + text, action.lower() if lower_case else action, True)
        if lower_case:
            return ParsedResponse(opened + text, *find_action(text, fallback, opened, lower_case=True))
        if thought and not ended:
            return ParsedResponse(opened + text, text[-fallback:], False)
        return ParsedResponse(opened + text, *find_action(rest, fallback, opened + thought))

    def render(self, prompt_input: PromptInput) -> str:
        """Renders the user message; of a chat, its first. Slots are filled once: a dollar sign in the inserted texts has no
        meaning.
        """
        if self.entry is None:
            return self.first.substitute(self._slots(prompt_input, []))
        begin = prompt_input.turn - len(prompt_input.history) + 1
        entries = [
            self.entry.substitute(number=begin + index, observation=observation, action=action)
            for index, (observation, action) in enumerate(prompt_input.history)
        ]
        return (self.later if entries else self.first).substitute(self._slots(prompt_input, entries))

    def render_next(self, prompt_input: PromptInput) -> str:
        """Renders a user message of a chat that follows another one."""
        return self.later.substitute(self._slots(prompt_input, []))

    def messages(self, prompt_input: PromptInput) -> Iterator[str]:
        """Yields the user messages of a prompt, those of a chat's earlier turns first."""
        if not self.chats:
            yield self.render(prompt_input)
            return
        turns = [*prompt_input.chat, PastTurn(prompt_input.observation, prompt_input.commands, "")]
        first = prompt_input.turn - len(prompt_input.chat)
        for turn, past in enumerate(turns, first):
            view = prompt_input._replace(turn=turn, observation=past.observation, commands=past.commands)
            yield self.render(view) if turn == first else self.render_next(view)

    @staticmethod
    def _slots(prompt_input: PromptInput, entries: list[str]) -> dict[str, object]:
        """Returns the values of a message's slots."""
        return {
            "goal": prompt_input.goal,
            "observation": prompt_input.observation,
            "commands": ",\n".join(f"'{command}'" for command in prompt_input.commands),
            "turn": prompt_input.turn,
            "now": prompt_input.turn + 1,
            "shown": len(entries),
            "history": "\n".join(entries),
        }


def template_names() -> list[str]:
    """Lists the templates in `templates/`."""
    return sorted(file.stem for file in TEMPLATES.glob("*.txt"))


def template_file(name: str) -> Path:
    """Returns the file of this name in `templates/`, or the file at this path. Raises ValueError."""
    ours = template_names()
    file = TEMPLATES / f"{name}.txt" if name in ours else Path(name)
    if not file.is_file():
        raise ValueError(f"template={name}: no such file; give one, or {', '.join(ours)}")
    return file


def load_template(name: str) -> Template:
    """Loads the template of `template_file`. Raises ValueError."""
    return Template.load(template_file(name))


class ChatFormat:
    """Builds prompts in a chat frame, and parses actions from the answers.

    Args:
      template: as in `load_template`.
      prompt_limit: tokens of the longest prompt. A longer one loses its oldest history first, then the middle of the
        observation, of the commands and of the goal; the rest of the template always stays. A chat that is too long loses its
        oldest turns until it takes half of the limit at most, so that the next prompts extend it again.
      fallback: characters at the end of a malformed response that are taken as its action.
      lower_case: whether actions lose their capitals, and may stand in a thought, as in verl-agent.
      picture: tokens of the picture that every message begins with (`policy.pictures.picture_tokens`); none by default.

    Attributes:
      head: token ids before `lead`.
      lead: the text of the frame that is encoded with the message, before it (`ChatFrame.lead`).

    If the template does not mention <action>, the action is the whole response after its thought.

    Raises:
      ValueError: no such template, the template alone exceeds the limit, or a chat in a frame of one message or with a picture.
    """

    def __init__(
        self,
        frame: ChatFrame,
        template: str,
        prompt_limit: int = 4096,
        fallback: int = 30,
        *,
        lower_case: bool = False,
        picture: Sequence[int] = (),
    ):
        self.template, self.head, self.lead = load_template(template), frame.head, frame.lead
        if picture:  # whose first token ends the text before it
            self.head, self.lead = [*frame.head, *frame.text.encode([frame.lead])[0], *picture], ""
        if picture and self.template.chats:
            raise ValueError(f"env.template={template}: a prompt shows one picture, and a chat has several turns; give another")
        if self.template.chats and frame.plain:
            raise ValueError(f"env.template={template}: a small policy reads one message; {NO_CHAT}")
        self.frame, self.prompt_limit, self.fallback, self.lower_case = frame, prompt_limit, fallback, lower_case
        if self.template.chats:
            self._check_chat(template)
        # Some templates only end a thought.
        end = frame.trail + frame.text.decode(frame.tail)
        opened = frame.opened if end.endswith(frame.opened) else frame.opened.removeprefix(THINK)
        self._begin = "" if frame.hides_thoughts else opened  # of an earlier answer, as the prompt showed it
        self.message_limit = prompt_limit - len(self.head) - len(frame.tail)
        shortest = self._rendered(PromptInput(CUT, [], 99, CUT, [CUT]))
        if (least := len(frame.text.encode([shortest])[0])) > self.message_limit:
            frames = len(self.head) + len(frame.tail)
            raise ValueError(f"prompt_limit={prompt_limit}: the template alone takes {frames + least} tokens")

    def _check_chat(self, template: str) -> None:
        """Raises ValueError if the frame does not show a chat of several messages."""
        messages = [{"role": role, "content": "Hello"} for role in ("user", "assistant", "user")]
        try:
            self.frame.conversation(messages)
        except ValueError as error:
            raise ValueError(f"env.template={template}: {error}; {NO_CHAT}") from None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The end tokens of the frame."""
        return self.frame.end_tokens

    def build(self, inputs: Sequence[PromptInput]) -> list[Prompt]:
        """Builds the prompt of each input."""
        return list(map(self._build_chat, inputs)) if self.template.chats else self._build_messages(inputs)

    def _build_chat(self, prompt_input: PromptInput) -> Prompt:
        """Builds the chat so far."""
        turns, half = prompt_input.chat, self.prompt_limit // 2
        if ids := self._chat(prompt_input, self.prompt_limit):
            return Prompt(ids)
        fits = lambda dropped: bool(self._chat(prompt_input._replace(chat=turns[dropped:]), half))  # noqa: E731
        dropped = bisect.bisect_left(range(len(turns)), True, min(1, len(turns)), key=fits)
        if dropped < len(turns):
            return Prompt(self._chat(prompt_input._replace(chat=turns[dropped:]), half), dropped)
        (prompt,) = self._build_messages([prompt_input._replace(history=[])])
        return prompt._replace(pairs_dropped=dropped)

    def _chat(self, prompt_input: PromptInput, limit: int) -> list[int]:
        """Encodes a chat, with the sampled ids of earlier answers after what their prompts opened; [] if it exceeds the limit.

        An answer stays text if it holds special tokens, or if the chat template hides its thought.
        """
        messages, sampled, chat = list[dict[str, str]](), dict[int, list[int]](), prompt_input.chat
        for text, past in zip(self.template.messages(prompt_input), [*chat, None], strict=True):
            if len(text) > limit * MAX_CHARACTERS_PER_TOKEN:
                return []
            messages.append({"role": "user", "content": text})
            if past:
                ids = list(map(int, past.response)) or self.answers([past.action])[0]
                ids = ids[:-1] if ids[-1] in self.end_tokens else ids
                answer = self._begin + self.frame.text.decode(ids)
                if self.frame.text.hidden.isdisjoint(ids) and not (self.frame.hides_thoughts and THINK_END in answer):
                    sampled[len(messages)] = (self.frame.text.tags(self._begin) if self._begin else []) + ids
                messages.append({"role": "assistant", "content": answer})
        ids = self.frame.conversation(messages, sampled=sampled)
        return ids if len(ids) <= limit else []

    def _build_messages(self, inputs: Sequence[PromptInput]) -> list[Prompt]:
        """Builds prompts of one message."""
        prompts, most = [], self.message_limit * MAX_CHARACTERS_PER_TOKEN
        texts = [self._rendered(prompt_input) for prompt_input in inputs]
        encoded = self.frame.text.encode(text[:most] for text in texts)
        for prompt_input, text, ids in zip(inputs, texts, encoded, strict=True):
            dropped, cut = 0, 0
            while (long := len(ids) > self.message_limit or len(text) > most) and dropped < len(prompt_input.history):
                dropped += 1
                text = self._rendered(prompt_input._replace(history=prompt_input.history[dropped:]))
                ids = self.frame.text.encode([text[:most]])[0]
            if long:
                whole = len(ids) + (len(text) > most)
                ids = self._shorten(prompt_input._replace(history=[]))
                cut = max(1, whole - len(ids))
            prompts.append(Prompt(self.head + ids + self.frame.tail, dropped, cut))
        return prompts

    def _rendered(self, view: PromptInput) -> str:
        """Renders the only message as the frame shows it, with the text around it."""
        text, (left, right) = self.template.render(view), self.frame.trims
        text = text.lstrip() if left else text
        return self.lead + (text.rstrip() if right else text) + self.frame.trail

    def _shorten(self, view: PromptInput) -> list[int]:
        """Shortens a message until it fits: its parts lose their middle, the observation first, the goal last. Returns ids."""
        most = self.message_limit * MAX_CHARACTERS_PER_TOKEN
        fits = list[int]()

        def try_out(view: PromptInput) -> bool:
            nonlocal fits
            text = self._rendered(view)
            ids = self.frame.text.encode([text])[0] if len(text) <= most else []
            fitting = len(text) <= most and len(ids) <= self.message_limit
            fits = ids if fitting else fits
            return fitting

        for part in ("observation", "commands", "goal"):
            whole = getattr(view, part)
            low, high = 0, min(len(whole), most)  # characters, or commands, to keep
            if not try_out(view._replace(**{part: without_middle(whole, 0)})):
                view = view._replace(**{part: without_middle(whole, 0)})
                continue
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (middle, high) if try_out(view._replace(**{part: without_middle(whole, middle)})) else (low, middle)
            break
        return fits

    def answers(self, commands: Sequence[str]) -> list[list[int]]:
        """Builds well-formed responses, as `parse` reads them, with these commands and no thought, including the end token."""
        bare, text = self.template.bare, self.frame.text
        begins, thinks = not (self.frame.opened or bare), self.frame.inside_thought or not (self.frame.opened or bare)
        between = THINK_END * thinks + ACTION * (not bare)
        written = (THINK * begins, between, ACTION_END * (not bare))
        first, middle, last = (text.tags(tags) if tags else [] for tags in written)
        return [[*first, *middle, *command, *last, self.end_tokens[0]] for command in text.encode(commands)]

    def parse(self, ids: Sequence[int]) -> ParsedResponse:
        """Decodes a response, with the part that the frame opened, and parses it with `Template.parse`."""
        text = self.frame.text.decode(ids)
        return self.template.parse(text, self.fallback, self.frame.opened, lower_case=self.lower_case)


def without_middle(whole, limit: int):
    """Keeps `limit` characters of a text, or items of a list, from both ends, and puts a mark in place of the middle."""
    if limit >= len(whole):
        return whole
    mark = CUT if isinstance(whole, str) else [CUT]
    return whole[: (limit + 1) // 2] + mark + whole[len(whole) - limit // 2 :]
