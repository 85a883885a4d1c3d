"""Chat prompts and free-text answers of a compiled environment, built and parsed inside the compiled rollout.

    text = DeviceText(env, ChatFormat(ChatFrame(tokenizer), "alfworld", lower_case=True), tokenizer, 512)

On every turn the prompt's tokens equal those of `ChatFormat.build`, and the action that of `ChatFormat.parse`. Exceptions are
reported (`exact`), so that the episode can be left out: answers whose action is not ASCII, contains a control character or a
token's name, or is longer than MAX_ACTION, and prompts that are too long without their history or longer than MAX_TEXT.
"""

from __future__ import annotations

import copy
import string
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.protocol import ListsGames, Playable
from hgpo_jax.policy.answers import ACTION, ACTION_END, THINK, THINK_END
from hgpo_jax.policy.device_tokenizer import DeviceTokenizer, plain, spell, spelling
from hgpo_jax.rollout.chat_prompts import MAX_CHARACTERS_PER_TOKEN, ChatFormat

MAX_TEXT = 12_288  # bytes of a message
MAX_ACTION = 128  # bytes
MAX_COMMAND = 64
BYTES_PER_TOKEN = 8  # bytes reserved for each token of a response
_BLANKS = np.frombuffer(b" \t\n\r\v\f\x1c\x1d\x1e\x1f", np.uint8)  # the ASCII characters that str.strip removes


class RendersText(Playable, Protocol):
    """A compiled environment whose turns can be rendered as text: its words are texts, written together.

    Its tasks are generated from keys, or it has a list of games (`protocol.ListsGames`).
    """

    words: Any
    task_types: Any

    def decode(self, ids: Any) -> str:
        """decode(ids) -> the text of an observation"""
        ...

    def goal_of(self, game: int) -> str:
        """goal_of(game) -> the text of the task of the game, or of the generated task, with this number"""
        ...

    def choices(self, state: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """choices(state) -> (words of every admissible command as text i32[C, W], as an action i32[C, A], which of them the
        player sees bool[C]); 0 if there are fewer commands"""
        ...


class TextState(struct.PyTreeNode):
    """The state of one episode."""

    env: Any  # the environment's state
    task: jax.Array  # i32[]
    turn: jax.Array  # i32[], actions taken


class DevicePrompt(NamedTuple):
    """A prompt, and whether parts of it were left out."""

    ids: jax.Array  # i32[P], followed by 0
    length: jax.Array  # i32[]
    pairs_dropped: jax.Array  # i32[]
    exact: jax.Array  # bool[]


class DeviceAnswer(NamedTuple):
    """The action in a response."""

    action: jax.Array  # i32[MAX_ACTION], its bytes, followed by 0
    well_formed: jax.Array  # bool[]
    exact: jax.Array  # bool[]


class DeviceText:
    """A compiled environment with text prompts and text answers.

    Args:
      env: see `RendersText`.
      format: the template, the frame and the limit of prompts.
      tokenizer: that of the format.
      response_limit: R, tokens of the longest response.

    Attributes:
      tables: NumPy arrays, an argument of the program; see `bound`.

    Raises ValueError for a tokenizer or template that cannot be reproduced.
    """

    action_length = MAX_ACTION

    def __init__(self, env: Any, format: ChatFormat, tokenizer, response_limit: int):
        self.env, self.format, self.response_limit = env, format, response_limit
        self.goal_length, self.observation_length, self.max_turns = env.goal_length, env.observation_length, env.max_turns
        self.task_types, self.end_tokens = env.task_types, format.end_tokens
        if not format.lower_case:
            raise ValueError("lower_case=False: actions are read in lower case here")
        if format.template.chats:
            raise ValueError("the prompts are chats, which are made on the host")
        if format.template.bare and format.frame.opened:
            raise ValueError("the chat template begins a thought, but the prompts ask for the action alone")
        self._tokenizer = DeviceTokenizer(tokenizer)
        self._limit = format.message_limit
        # Words of a message: the environment's words, the template's texts, numbers, and single bytes of actions.
        self._parts = {name: _parts(getattr(format.template, name)) for name in ("first", "later", "entry")}
        for name in ("first", "later"):
            ends = ([(text, False)] if text else [] for text in (format.lead, format.frame.trail))
            self._parts[name] = [*next(ends), *self._parts[name], *next(ends)]
        texts = {part for parts in self._parts.values() for part, is_slot in parts if not is_slot}
        numbers = list(map(str, range(self.max_turns + 2)))
        vocabulary = [*env.words, *sorted(texts), "\n", "'", "',\n'", *numbers]
        if odd := next((word for word in vocabulary if not word.isascii()), ""):
            raise ValueError(f"template={odd!r}: only ASCII text can be made on the device")
        self._word = {word: number for number, word in reversed(list(enumerate(vocabulary)))}
        # Not the word "0", which the environment's own words may include.
        self._first_byte, self._first_number = len(vocabulary), len(vocabulary) - len(numbers)
        words = [word.encode() for word in vocabulary] + [bytes([byte]) for byte in range(256)]
        visible = [b"" if number in format.frame.text.hidden else word for number, word in enumerate(self._tokenizer.words)]
        self.tables: dict[str, Any] = {
            "env": env.tables if isinstance(env, ListsGames) else None,
            "words": spelling(words),
            "tokens": spelling([*visible, b""]),
            "bpe": self._tokenizer.tables,
        }
        self._text_slots = min(MAX_TEXT, self._limit * MAX_CHARACTERS_PER_TOKEN)
        self._markers = [marker.encode() for marker in format.frame.text.markers]

    def bound(self, tables: dict[str, Any]) -> DeviceText:
        """Returns a copy with other arrays, such as the traced ones of `tables` in a program that takes them as an argument."""
        other = copy.copy(self)
        other.tables = tables
        other.env = self.env.bound(tables["env"]) if isinstance(self.env, ListsGames) else self.env
        return other

    # -- as an environment ----------------------------------------------------------------------------------------

    def start(self, game) -> tuple[TextState, jax.Array]:
        """Starts an episode of this game: (state, observation i32[O])."""
        return self._begun(*self.env.start(game))

    def reset(self, key) -> tuple[TextState, jax.Array]:
        """Starts an episode of the task that this key generates: (state, observation i32[O])."""
        return self._begun(*self.env.reset(key))

    @staticmethod
    def _begun(state, observation) -> tuple[TextState, jax.Array]:
        return TextState(env=state, task=state.task, turn=jnp.int32(0)), observation

    def goal(self, state: TextState) -> jax.Array:
        return self.env.goal(state.env)

    def won(self, state: TextState) -> jax.Array:
        return self.env.won(state.env)

    def step(self, state: TextState, action):
        """Steps with the bytes of `action`: (state, observation i32[O], reward f32[], done bool[], inadmissible bool[])."""
        stripped, size = _strip(action.astype(jnp.uint8), jnp.int32(0), (action != 0).sum(), MAX_COMMAND)
        texts, actions, _ = self.env.choices(state.env)
        letters, sizes = jax.vmap(lambda words: spell(self.tables["words"], words, MAX_COMMAND))(texts)
        same = (letters == stripped).all(1) & (sizes == size) & (sizes > 0)
        words = jnp.where(same.any(), actions[jnp.argmax(same)], -1)
        after, observation, reward, done, invalid = self.env.step(state.env, words)
        return state.replace(env=after, turn=state.turn + 1), observation, reward, done, invalid

    # -- prompts --------------------------------------------------------------------------------------------------

    def prompt(self, state: TextState, goal, observations, actions, observation) -> DevicePrompt:
        """Builds the prompt of a turn.

        goal: i32[goal_length]. observations: i32[K, O], actions: i32[K, MAX_ACTION], the past turns, oldest first, 0 before the
        first. observation: i32[O].
        """
        K, limit = observations.shape[0], self._limit
        had = jnp.minimum(state.turn, K)
        commands = self._command_words(state)
        letters = jnp.where(actions != 0, actions + self._first_byte, 0)

        def attempt(carry):
            dropped, _, _, exact, _ = carry
            words = self._message(goal, observations, letters, observation, commands, state.turn, had - dropped)
            text, size = spell(self.tables["words"], words, self._text_slots)
            ids, count, whole = self._tokenizer.encode(self.tables["bpe"], text, size, limit)
            drops = (count > limit) & (dropped < had)
            # A text that does not fit in its slots is too long in any case if the part that fits is too long. A text that is
            # too long without its history loses the middle of a part, which this code does not reproduce.
            exact &= jnp.where(drops, whole | (size > self._text_slots), whole & (count <= limit))
            return dropped + drops, ids, count, exact, drops

        begin = jnp.int32(0), jnp.zeros(limit, jnp.int32), jnp.int32(0), jnp.array(True), jnp.array(True)
        dropped, ids, count, exact, _ = jax.lax.while_loop(lambda carry: carry[-1], attempt, begin)
        head, tail = (jnp.array(part, jnp.int32) for part in (self.format.head, self.format.frame.tail))
        size, P = jnp.minimum(count, limit), self.format.prompt_limit
        slots = jnp.zeros(P + len(tail), jnp.int32)
        slots = jax.lax.dynamic_update_slice(slots, jnp.concatenate([head, ids]), (0,))
        slots = jax.lax.dynamic_update_slice(slots, tail, (len(head) + size,))
        return DevicePrompt(slots[:P], len(head) + size + len(tail), dropped, exact)

    def _command_words(self, state: TextState):
        """Returns the words of the commands that the player sees, each in quotation marks: i32[C (W + 1) + 1]."""
        texts, _, visible = self.env.choices(state.env)
        before = jnp.cumsum(visible) - visible  # visible commands before each one
        opens = jnp.where(before == 0, self._word["'"], self._word["',\n'"])
        words = jnp.where(visible[:, None], jnp.concatenate([opens[:, None], texts], 1), 0).ravel()
        return jnp.append(words, jnp.where(visible.any(), self._word["'"], 0))

    def _message(self, goal, observations, letters, observation, commands, turn, count):
        """Returns the words of the user message that shows this many past turns, i32[.]."""
        K = observations.shape[0]
        number = lambda n: jnp.asarray(self._first_number + n)[None]  # noqa: E731
        entries = []
        for k in range(K):
            slots = {"number": number(turn - K + k + 1), "observation": observations[k], "action": letters[k]}
            line = jnp.where(k > K - count, self._word["\n"], 0)[None]
            words = jnp.concatenate([line, *self._fill("entry", slots)])
            entries.append(jnp.where(k >= K - count, words, 0))
        slots = {
            "goal": goal,
            "observation": observation,
            "commands": commands,
            "turn": number(turn),
            "now": number(turn + 1),
            "shown": number(count),
            "history": jnp.concatenate([*entries, jnp.zeros(1, jnp.int32)]),
        }
        first, later = (jnp.concatenate(self._fill(name, slots)) for name in ("first", "later"))
        width = max(first.shape[0], later.shape[0])
        return jnp.where(count > 0, *(jnp.pad(words, (0, width - words.shape[0])) for words in (later, first)))

    def _fill(self, name: str, slots: dict[str, jax.Array]) -> list[jax.Array]:
        return [slots[part] if is_slot else jnp.array([self._word[part]]) for part, is_slot in self._parts[name]]

    # -- answers --------------------------------------------------------------------------------------------------

    def answer(self, response, length) -> DeviceAnswer:
        """Finds the action in a response i32[R] of i32[] tokens, as `ChatFormat.parse` does."""
        table = self.tables["tokens"]
        blank = table.begin.shape[0] - 2
        valid = (jnp.arange(response.shape[0]) < length) & (response >= 0) & (response < blank)
        text, size = spell(table, jnp.where(valid, response, blank), BYTES_PER_TOKEN * max(response.shape[0], 32))
        exact = size <= text.shape[0]
        lower = jnp.where((text >= 65) & (text <= 90), text + 32, text)
        if self.format.template.bare:
            exact &= _find(text, THINK_END.encode()) < 0  # which the host may leave out with what stands before it
            return self._action_between(lower, jnp.int32(0), size, jnp.array(True), exact)
        begin, end = (_find(lower, tag.encode()) for tag in (ACTION, ACTION_END))
        tagged = (begin >= 0) & (end >= 0)
        fallback = self.format.fallback or text.shape[0]
        begin = jnp.where(tagged, begin + len(ACTION), jnp.maximum(size - fallback, 0))
        end = jnp.where(tagged, jnp.maximum(end, begin), size)
        tags = [tag for tag in (THINK, THINK_END) if tag not in self.format.frame.opened]
        thinks = jnp.array([_find(text, tag.encode()) >= 0 for tag in tags], bool).all()
        well_formed = tagged & thinks & ~_holds_chinese(text)
        stripped = self._action_between(lower, begin, end, well_formed, exact)
        action, length = _window(lower, begin, end - begin, MAX_ACTION)
        whole = self._check(action, length, well_formed, exact)
        return jax.tree.map(lambda a, b: jnp.where(tagged, a, b), stripped, whole)

    def _action_between(self, text, begin, end, well_formed, exact) -> DeviceAnswer:
        action, size = _strip(text, begin, end, MAX_ACTION)
        return self._check(action, size, well_formed, exact)

    def _check(self, action, size, well_formed, exact) -> DeviceAnswer:
        exact &= (size <= MAX_ACTION) & (plain(action) | (jnp.arange(MAX_ACTION) >= size)).all()
        for marker in self._markers:
            exact &= _find(action, marker) < 0
        return DeviceAnswer(action.astype(jnp.int32), well_formed, exact)


def _parts(template: string.Template) -> list[tuple[str, bool]]:
    """Splits a template into its texts and slots, in order, each with whether it is a slot."""
    parts, at, text = [], 0, template.template
    for match in template.pattern.finditer(text):
        slot = match["named"] or match["braced"]
        parts += [(text[at : match.start()] + ("$" if match["escaped"] else ""), False), *([(slot, True)] if slot else [])]
        at = match.end()
    return [part for part in (*parts, (text[at:], False)) if part[0]]


def _find(text, tag: bytes):
    """Finds the first occurrence of `tag` in u8[L]; -1 if there is none, i32[]."""
    L = text.shape[0]
    padded = jnp.pad(text, (0, len(tag)))
    same = jnp.stack([padded[n : n + L] == byte for n, byte in enumerate(tag)]).all(0)
    return jnp.where(same.any(), jnp.argmax(same), -1)


def _window(text, begin, size, slots: int) -> tuple[jax.Array, jax.Array]:
    """Takes `size` bytes of u8[L] from `begin` on: (u8[slots], followed by 0; their number, which may be larger than slots)."""
    at = jnp.arange(slots)
    return jnp.where(at < size, jnp.pad(text, (0, slots))[jnp.minimum(begin + at, text.shape[0])], 0), size


def _strip(text, begin, end, slots: int) -> tuple[jax.Array, jax.Array]:
    """Like `_window`, but without blanks at both ends."""
    at = jnp.arange(text.shape[0])
    inside = (at >= begin) & (at < end) & ~jnp.isin(text, jnp.asarray(_BLANKS))
    first = jnp.argmax(inside)
    last = text.shape[0] - jnp.argmax(inside[::-1])
    return _window(text, first, jnp.where(inside.any(), last - first, 0), slots)


def _holds_chinese(text):
    """Whether UTF-8 bytes u8[L] contain a character from U+4E00 to U+9FFF; bool[]."""
    lead, second, third = text, jnp.pad(text, (0, 1))[1:], jnp.pad(text, (0, 2))[2:]
    goes_on = lambda byte: (byte >= 0x80) & (byte <= 0xBF)  # noqa: E731
    begins = (lead == 0xE4) & (second >= 0xB8) | (lead > 0xE4) & (lead <= 0xE9)
    return (begins & goes_on(second) & goes_on(third)).any()
